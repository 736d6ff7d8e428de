"""`strata repro DIR [STUDY]`: `dvc repro` as a Ray job on a cluster's head, in a checkout that outlives the job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from pipelines.mistakes import nearest

TEMPORARY = "runtime_resources"  # the folder of a Ray session into which it copies a job's working_dir


def repro(folder: Path, study: str | None) -> int:
    """Run it on the cluster that this job is a part of; returns DVC's exit code.

    ValueError for a folder that is no checkout of a study, or that is Ray's temporary copy: dvc.lock would be lost with it.
    """
    root = folder.expanduser().resolve()
    if TEMPORARY in root.parts:
        raise ValueError(f"{root} is Ray's temporary copy of a job's folder: dvc.lock and the outputs would be lost with it. "
                         "Name a checkout on the head that stays, and submit without --working-dir.")  # fmt: skip
    if not (root / ".dvc").is_dir():
        raise ValueError(f"{root} is no checkout of a study's repository (it has no .dvc); clone it there first.")
    pipeline = root / "pipelines" / study / "dvc.yaml" if study else root / "dvc.yaml"
    if not pipeline.is_file():
        raise ValueError(f"There is no study {study!r} in {root}; {nearest(study or '', [path.parent.name for path in (root / 'pipelines').glob('*/dvc.yaml')])}")  # fmt: skip
    environment = {"RAY_ADDRESS": "auto", "DVC_NO_ANALYTICS": "1"} | os.environ  # Ray tells a job its cluster
    return subprocess.run([sys.executable, "-m", "dvc", "repro", str(pipeline.relative_to(root))], cwd=root, env=environment).returncode
