"""`strata doctor`: what this node offers, which kernels it would use, and what is missing, with the fix."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

LEAST_PYTHON = (3, 11)
LEAST_FREE_GIB = 5


@dataclass(frozen=True)
class Finding:
    """One thing looked at. fix: what to do where it is wrong; None where it is well."""

    what: str
    found: str
    fix: str | None = None


def examine(root: Path) -> list[Finding]:
    """Everything, in the order in which a run would need it."""
    return [finding for look in LOOKS for finding in look(root)]


def show(root: Path) -> int:
    """Print the findings; the exit code says whether something is wrong."""
    findings = examine(root)
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        print(
            f"{'!' if finding.fix else ' '} {finding.what:{width}}  {finding.found}"
            + (f"\n  {'':{width}}  fix: {finding.fix}" if finding.fix else "")
        )
    return int(any(finding.fix for finding in findings))


def _python(root: Path) -> Iterator[Finding]:
    version = tuple(map(int, platform.python_version_tuple()[:2]))
    fix = (
        None
        if version >= LEAST_PYTHON
        else f"Strata needs Python {'.'.join(map(str, LEAST_PYTHON))} or later; `make nano PYTHON=python3.11`"
    )
    yield Finding("python", f"{platform.python_version()} on {platform.platform()}", fix)


def _libraries(root: Path) -> Iterator[Finding]:
    from stages.provenance import versions

    found = versions()
    missing = [name for name in ("torch", "pyarrow", "ray", "dvc", "mlflow") if name not in found]
    names = ", ".join(f"{name} {version}" for name, version in found.items() if name != "python")
    yield Finding("libraries", names, f"{', '.join(missing)} missing: `make environment`" if missing else None)


def _node(root: Path) -> Iterator[Finding]:
    import psutil

    from pipelines import nodes

    memory = psutil.virtual_memory()
    yield Finding("processors", f"{nodes.cpus()}, memory {memory.total / 2**30:.0f} GiB ({memory.available / 2**30:.0f} free)")
    chips = {kind: number for kind, number in nodes.accelerators().items() if kind != "cpu" and number}
    yield Finding(
        "accelerators", ", ".join(f"{number} {kind.upper()}" for kind, number in chips.items()) or "none: models run on the processors"
    )
    free = shutil.disk_usage(root).free / 2**30
    yield Finding(
        "disk",
        f"{free:.0f} GiB free at {root}",
        None if free >= LEAST_FREE_GIB else "free some space, or set cluster.storage in params.yaml",
    )


def _kernels(root: Path) -> Iterator[Finding]:
    import warnings

    import kernels
    from pipelines import nodes

    device = next((name for kind, name in (("gpu", "cuda"), ("tpu", "tpu")) if nodes.accelerators().get(kind)), "cpu")
    shape = {"B": 1, "T": 2048, "H": 8, "K": 128, "V": 128}
    for operation in kernels.OPERATIONS:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                found, fix = kernels.choose(operation, shape, "float32" if device == "cpu" else "bfloat16", device), None
            except ValueError as error:
                found, fix = "none", str(error)
        yield Finding(f"kernel {operation}", f"{found} on {device}" + (f" ({caught[0].message})" if caught else ""), fix)


def _repository(root: Path) -> Iterator[Finding]:
    if not (root / ".dvc").is_dir():
        yield Finding("dvc", f"{root} is not a DVC repository", "work in a clone of the repository, or `dvc init` there")
        return
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    for lock in (root / "dvc.lock", *sorted((root / "pipelines").glob("*/dvc.lock"))):
        if not lock.exists():
            continue
        name = str(lock.relative_to(root))
        study = "" if lock.parent == root else f" {lock.parent.name}"
        try:
            stages = (YAML(typ="safe").load(lock.read_text()) or {}).get("stages", {})
            yield Finding(name, f"{len(stages)} stages recorded")
        except (YAMLError, UnicodeDecodeError, AttributeError) as error:
            reason = str(error).splitlines()[0]
            yield Finding(
                name,
                f"damaged: {reason}",
                f"`strata relock{study}` rebuilds it from the store and trains nothing; or `git checkout {name}`",
            )


def _store(root: Path) -> Iterator[Finding]:
    from pipelines.run import STORE
    from pipelines.store import Store

    store = Store(root / STORE)
    keys = store.keys()
    damaged = {}
    for key in keys:
        try:
            store.find(key)
        except ValueError as error:
            damaged[key] = str(error)
    yield Finding("store", f"{len(keys)} artifacts at {store.root}")
    for key, reason in damaged.items():
        yield Finding(f"artifact {key[:12]}", reason, f"`strata forget {key[:12]}` in its study, then `dvc repro`")


def _ray(root: Path) -> Iterator[Finding]:
    if importlib.util.find_spec("ray") is None:
        yield Finding("ray", "not installed", "`make environment`, or work with STRATA_RAY=0")
        return
    from pipelines import head

    try:
        address = head.address_from_environment()
    except ValueError as error:
        yield Finding("ray", f"RAY_ADDRESS={os.environ['RAY_ADDRESS']}", str(error))
        return
    running = head.current(root)
    yield Finding(
        "ray",
        f"cluster at {address.url}"
        if address
        else f"a local head runs at {running.url}"
        if running
        else "a local head starts with the next `dvc repro`",
    )


LOOKS: list[Callable[[Path], Iterator[Finding]]] = [_python, _libraries, _node, _kernels, _repository, _store, _ray]
