"""What a worker must have in common with who asks: the version table, and the libraries that a result owes something to."""

from __future__ import annotations

import functools
import os
import socket
from typing import Any

from pipelines.cells import VERSIONS, version_table
from stages import engine, provenance

DESK = ("dvc", "mlflow")  # used by who asks, and not by a worker
FRAMEWORKS = {name for needs in engine.NEEDS.values() for name in needs} | {"triton"}
WORKER, DIFFERS = "The worker on", "differs from this study's desk"
CODE = "STRATA_CODE"  # environment variable of a driver and its workers: the digest of the code that was uploaded for them


@functools.cache
def _here() -> dict[str, Any]:
    libraries = {name: version for name, version in provenance.versions().items() if name not in DESK}
    table = {f"{part}.{name}": version for part, entries in version_table(VERSIONS).items() for name, version in entries.items()}
    return {"libraries": libraries, "versions": table, "code": os.environ.get(CODE)}


def here() -> dict[str, Any]:
    """This process's: {"libraries": {name: version}, "versions": {"layers.mesa": 1, ...}, "code": digest of uploaded code, or None}."""
    return dict(_here())


def difference(asked: dict[str, Any], backend: str) -> str | None:
    """One sentence naming what differs between this process and who asks, or None. backend: whose framework must be here.

    A library's build (torch 2.13.0+cpu, 2.13.0+cu130) does not count, nor does Python's last number.
    """
    mine, found = here(), []
    for name, version in asked.get("versions", {}).items():
        if mine["versions"].get(name) != version:
            found.append(f"version of {name} {mine['versions'].get(name, 'none')}, wanted {version}")
    for name, version in asked.get("libraries", {}).items():
        if name in FRAMEWORKS and name not in engine.NEEDS.get(backend, ()):
            continue
        if _public(name, mine["libraries"].get(name)) != _public(name, version):
            found.append(f"{name} {mine['libraries'].get(name, 'not installed')}, wanted {version}")
    if asked.get("code") and asked["code"] != mine["code"]:
        found.append(f"code {(mine['code'] or 'of its own')[:12]}, wanted {asked['code'][:12]}")
    if not found:
        return None
    return f"{WORKER} {socket.gethostname()} {DIFFERS}: {'; '.join(found)}. Give the cluster the same environment and code (cluster.python, cluster.image, cluster.code), or work from one like its own."


def _public(name: str, version: str | None) -> str | None:
    return version and (".".join(version.split(".")[:2]) if name == "python" else version.split("+")[0])
