"""Where, when and by what an artifact was made: `provenance.json`, which no stage depends on."""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stages.spec import Context, Spec

NAME = "provenance.json"
LIBRARIES = (
    "torch",
    "jax",
    "optax",
    "triton",
    "numpy",
    "pyarrow",
    "safetensors",
    "tokenizers",
    "tiktoken",
    "gigatoken",
    "ray",
    "dvc",
    "mlflow",
)


def versions() -> dict[str, str]:
    """Versions of the installed libraries that a result could owe something to."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def write(out: Path, spec: Spec, context: Context, *, started: float, **facts: Any) -> dict[str, Any]:
    """Write `out/provenance.json`. started: time.time() at the stage's start. facts: device, kernels and whatever else is worth keeping.

    What the caller knows and the stage does not (study, git commit, attempt) comes in context.settings["provenance"].
    """
    from stages.artifact import write_atomically  # here: benchmarks ask for `versions` where only the kernels' libraries are installed

    record = {
        "key": spec.key,
        "stage": spec.stage,
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "threads": context.threads,
        "libraries": versions(),
        "started": round(started, 3),
        "seconds": round(time.time() - started, 3),
        **context.settings.get("provenance", {}),
        **facts,
    }
    write_atomically(out / NAME, json.dumps(record, indent=1, sort_keys=True) + "\n")
    return record
