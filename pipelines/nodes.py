"""What a node offers: processors, memory, disk, accelerators; found without torch and jax."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import psutil

# Where devices are looked for; a test puts a tree of its own here.
ROOT = Path("/")
GIB = 1 << 30


@dataclass(frozen=True)
class Kind:
    """A kind of chip. flops: peak dense bfloat16 FLOP/s. memory: bytes, as its maker states them. All from the makers' data sheets."""

    name: str
    kind: str
    flops: float
    memory: float


# The longest name that occurs in what the driver calls the chip is the chip's.
KINDS = {
    kind.name: kind
    for kind in (
        Kind("B200", "gpu", 2250e12, 180e9),
        Kind("H200", "gpu", 989e12, 141e9),
        Kind("H100", "gpu", 989e12, 80e9),
        Kind("H100 PCIe", "gpu", 756e12, 80e9),
        Kind("A100", "gpu", 312e12, 40e9),
        Kind("A100 80GB", "gpu", 312e12, 80e9),
        Kind("L40S", "gpu", 362e12, 48e9),
        Kind("L4", "gpu", 121e12, 24e9),
        Kind("A10", "gpu", 125e12, 24e9),
        Kind("RTX 4090", "gpu", 165e12, 24e9),
        Kind("RTX 3090", "gpu", 71e12, 24e9),
        Kind("TPU v4", "tpu", 275e12, 32e9),
        Kind("TPU v5e", "tpu", 197e12, 16e9),
        Kind("TPU v5p", "tpu", 459e12, 95e9),
        Kind("TPU v6e", "tpu", 918e12, 32e9),
        Kind("TPU v7x", "tpu", 2307e12, 192e9),
    )
}
TPU_NAMES = {"v5litepod": "TPU v5e", "v5lite": "TPU v5e", "tpu7x": "TPU v7x"}  # as TPU_ACCELERATOR_TYPE has them, where it differs


@dataclass(frozen=True)
class Chip:
    """One accelerator. name: its driver's. memory: bytes, None where it is not told. capability: CUDA's, "9.0"."""

    kind: str
    name: str
    memory: float | None = None
    capability: str | None = None
    driver: str | None = None

    @property
    def known(self) -> Kind | None:
        return known(self.name)


@dataclass(frozen=True)
class Node:
    """A node, as `strata doctor` shows it. memory and disk in bytes (disk: free, at the path asked about)."""

    cpus: int
    memory: int
    disk: int
    chips: list[Chip] = field(default_factory=list)
    topology: str | None = None


def known(name: str) -> Kind | None:
    """The kind of a chip by its driver's name ("NVIDIA H100 80GB HBM3"), or None."""
    words = name.replace("-", " ").split()
    fitting = [kind for kind in KINDS.values() if set(kind.name.split()) <= set(words)]
    return max(fitting, key=lambda kind: len(kind.name), default=None)


def node(folder: Path = Path(".")) -> Node:
    """This node. folder: whose disk counts."""
    return Node(cpus(), memory(), shutil.disk_usage(folder).free, [*gpus(), *tpus()], os.environ.get("TPU_TOPOLOGY"))


def accelerators() -> dict[str, int]:
    """How many chips of each kind this node has: {"gpu": 1}. Kinds it lacks are not named."""
    chips = [chip.kind for chip in (*gpus(), *tpus())]
    return {kind: chips.count(kind) for kind in sorted(set(chips))}


def cpus() -> int:
    """Processors that this process may use: the machine's, less what affinity and the container's quota leave out."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (ROOT / "sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(allowed, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no control groups, or "max": no quota
        return allowed


def memory() -> int:
    """Bytes of memory: the machine's, or the container's limit."""
    try:
        return min(psutil.virtual_memory().total, int((ROOT / "sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):
        return psutil.virtual_memory().total


def gpus() -> list[Chip]:
    """The NVIDIA GPUs that CUDA_VISIBLE_DEVICES leaves visible, by nvidia-smi, else by the driver's folder in /proc."""
    found = _from_nvidia_smi()
    if found is None:
        models = sorted((ROOT / "proc/driver/nvidia/gpus").glob("*/information"))
        lines = [dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line) for path in models]
        found = [(entry.get("GPU UUID", "").strip(), Chip("gpu", entry.get("Model", "NVIDIA GPU").strip())) for entry in lines]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [chip for _, chip in found]
    chosen = []
    for name in filter(None, (part.strip() for part in visible.split(","))):
        match = [chip for index, (uuid, chip) in enumerate(found) if name == str(index) or uuid.startswith(name)]
        if not match:
            break  # as CUDA does: what follows an unknown device is not visible
        chosen.append(match[0])
    return chosen


def _from_nvidia_smi() -> list[tuple[str, Chip]] | None:
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=uuid,name,memory.total,compute_cap,driver_version", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return None
    if done.returncode != 0:
        return None
    rows = [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines() if line.count(",") == 4]
    return [
        (uuid, Chip("gpu", name, float(size) * (1 << 20) if size.isdigit() else None, capability, driver))
        for uuid, name, size, capability, driver in rows
    ]


def tpus() -> list[Chip]:
    """The TPU chips of this host, by its device files; their name by TPU_ACCELERATOR_TYPE ("v5p-16")."""
    devices = list((ROOT / "dev").glob("accel[0-9]*"))
    kind = os.environ.get("TPU_ACCELERATOR_TYPE", "").rsplit("-", 1)[0]
    if not devices and kind:
        devices = list((ROOT / "dev/vfio").glob("[0-9]*"))  # other devices' too, hence only where this is known to be a TPU host
    name = TPU_NAMES.get(kind, f"TPU {kind}" if kind else "TPU")
    return [Chip("tpu", name, known(name).memory if known(name) else None) for _ in devices]
