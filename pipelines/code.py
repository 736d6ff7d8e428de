"""How a cluster's nodes get this code and its environment: a path that all of them see, a copy of the tracked files, or a container.

    <root>/.strata/code/<digest>/    a copy that was sent; Ray sends it once, by its contents

The copy is of the code alone (the floors), as it is on disk. Where it differs from the commit, it is sent only if that was asked for, and the
difference is kept in the provenance of whatever is made with it.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipelines.environment import CODE
from pipelines.head import CODE as HERE
from pipelines.head import Address
from pipelines.work import Request

TRACKED = ("kernels", "models", "stages", ":(glob)pipelines/*.py")


@dataclass(frozen=True)
class Code:
    """How the driver's node gets this code: a folder that all nodes see and a Python there, or a runtime environment of Ray's.

    digest: of what was uploaded. diff: how that differs from the commit.
    """

    folder: Path | None = HERE
    python: str = sys.executable
    runtime_env: dict[str, Any] = field(default_factory=dict)
    digest: str | None = None
    diff: str = ""

    def mark(self, request: Request) -> Request:
        """The request, to be run by this code and no other; what differs from the commit goes into its provenance."""
        if self.digest is None:
            return request
        facts = {"code": self.digest} | ({"diff": self.diff} if self.diff else {})
        settings = request.settings | {"provenance": request.settings.get("provenance", {}) | facts}
        return replace(request, environment=request.environment | {"code": self.digest}, settings=settings)


def code_for(how: dict[str, Any], root: Path, address: Address, *, dirty: bool = False) -> Code:
    """The code for the cluster at an address. how: cluster.code, python and image of params.yaml. root: the repository. dirty: whether code that
    is not committed may be sent. ValueError where it may not."""
    if address.local:
        return Code()
    if how["image"]:
        return Code(None, how["python"] or "python", {"image_uri": how["image"]})
    executable = {"py_executable": how["python"]} if how["python"] else {}
    if how["how"] == "shared":
        return Code(python=how["python"] or sys.executable, runtime_env=executable)
    folder, digest, diff = copy(root, dirty=dirty)
    environment = {"working_dir": str(folder), "env_vars": {CODE: digest}}
    return Code(None, how["python"] or "python", environment | executable, digest, diff)


def copy(root: Path, *, dirty: bool = False) -> tuple[Path, str, str]:
    """A copy of the repository's code under its digest: (folder, digest, how it differs from the commit). ValueError where it differs and may not."""
    names = [name for name in _git(root, "ls-files", "-z", "--", *TRACKED).split("\0") if (root / name).is_file() and name]
    if not names:
        raise ValueError(f"cluster.code: upload sends what git tracks, and {root} is no repository of this code; use code: shared.")
    beside = [
        name
        for name in _git(root, "ls-files", "-z", "--others", "--exclude-standard", "--", *TRACKED).split("\0")
        if name.endswith((".py", ".yaml"))
    ]
    diff = _git(root, "diff", "HEAD", "--", *TRACKED)
    if (diff or beside) and not dirty:
        changed = [*_git(root, "diff", "HEAD", "--name-only", "--", *TRACKED).split(), *beside]
        raise ValueError(
            f"cluster.code: upload sends committed code, and {len(changed)} file{'s' if len(changed) > 1 else ''} of it differ{'' if len(changed) > 1 else 's'} "
            f"from the commit ({', '.join(changed[:3])}{', ...' if len(changed) > 3 else ''}); commit, or set STRATA_DIRTY=1 to send it so."
        )
    diff += "".join(f"--- /dev/null\n+++ b/{name}\n{(root / name).read_text()}" for name in beside)
    contents = {name: (root / name).read_bytes() for name in sorted({*names, *beside})}
    digest = hashlib.sha256(b"".join(name.encode() + b"\0" + hashlib.sha256(data).digest() for name, data in contents.items())).hexdigest()
    folder = root / ".strata" / "code" / digest[:16]
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=folder.parent))
        for name, data in contents.items():
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            (temporary / name).write_bytes(data)
        try:
            temporary.rename(folder)
        except OSError:  # another stage was faster
            shutil.rmtree(temporary)
    return folder, digest, diff


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else ""
