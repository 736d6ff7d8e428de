"""What a node offers, read from trees and tools that stand in for the real ones."""

import subprocess
import sys

import pytest

from pipelines import nodes


@pytest.fixture(autouse=True)
def bare(tmp_path, monkeypatch):
    """A node without anything: a root folder to fill, no nvidia-smi."""
    monkeypatch.setattr(nodes, "ROOT", tmp_path)
    monkeypatch.setattr(nodes.shutil, "which", lambda name: None)
    for name in ("CUDA_VISIBLE_DEVICES", "TPU_ACCELERATOR_TYPE", "TPU_TOPOLOGY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def put(path, text=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_bare_node(tmp_path):
    node = nodes.node(tmp_path)
    assert node.cpus >= 1 and node.memory > 1 << 28 and node.disk > 0 and node.chips == [] and nodes.accelerators() == {}


def test_quotas_of_a_container(bare):
    put(bare / "sys/fs/cgroup/cpu.max", "50000 100000")
    put(bare / "sys/fs/cgroup/memory.max", str(1 << 29))
    assert nodes.cpus() == 1 and nodes.memory() == 1 << 29
    unlimited = nodes.psutil.virtual_memory().total
    put(bare / "sys/fs/cgroup/cpu.max", "max 100000")
    put(bare / "sys/fs/cgroup/memory.max", "max")
    assert nodes.cpus() >= 1 and nodes.memory() == unlimited


def smi(bare, monkeypatch, script):
    put(bare / "bin/nvidia-smi", f"#!/bin/sh\n{script}\n")
    (bare / "bin/nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{bare / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(nodes.shutil, "which", lambda name: str(bare / "bin" / name))


def test_gpus_by_nvidia_smi(bare, monkeypatch):
    smi(bare, monkeypatch, "echo 'GPU-aa, NVIDIA H200, 143771, 9.0, 570.1'; echo 'GPU-bb, NVIDIA A100-SXM4-80GB, [N/A], 8.0, 570.1'")
    h200, a100 = nodes.gpus()
    assert h200 == nodes.Chip("gpu", "NVIDIA H200", 143771 * (1 << 20), "9.0", "570.1") and h200.known.flops == 989e12
    assert a100.memory is None and a100.known.name == "A100 80GB"
    assert nodes.accelerators() == {"gpu": 2}


@pytest.mark.parametrize("visible, count", [("", 0), ("-1", 0), ("1", 1), ("0,1", 2), ("GPU-bb", 1), ("7,0", 0), ("0,7,1", 1)])
def test_only_visible_gpus_count(bare, monkeypatch, visible, count):
    smi(bare, monkeypatch, "echo 'GPU-aa, NVIDIA H200, 143771, 9.0, 570.1'; echo 'GPU-bb, NVIDIA H200, 143771, 9.0, 570.1'")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert len(nodes.gpus()) == count


def test_gpus_by_the_driver_where_nvidia_smi_fails(bare, monkeypatch):
    smi(bare, monkeypatch, "echo 'Failed to initialize NVML'; exit 255")
    put(bare / "proc/driver/nvidia/gpus/0000:1b:00.0/information", "Model: \t\t NVIDIA H100 PCIe\nGPU UUID: \t GPU-aa\n")
    assert [chip.known.name for chip in nodes.gpus()] == ["H100 PCIe"]


def test_tpus(bare, monkeypatch):
    for number in range(4):
        put(bare / f"dev/vfio/{number}")
    put(bare / "dev/vfio/vfio")
    assert nodes.tpus() == []  # some other device's
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-16")
    assert [chip.known.name for chip in nodes.tpus()] == ["TPU v5e"] * 4
    for number in range(8):
        put(bare / f"dev/accel{number}")
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5p-16")
    assert nodes.accelerators() == {"tpu": 8} and nodes.tpus()[0].memory == 95e9


@pytest.mark.parametrize(
    "name, kind",
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA A10G", None),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA A100-PCIE-40GB", "A100"),
    ],
)
def test_names_of_chips(name, kind):
    assert (nodes.known(name).name if nodes.known(name) else None) == kind


def test_neither_torch_nor_jax_is_loaded():
    code = "import sys; from pipelines import nodes; nodes.node(); print([name for name in ('torch', 'jax', 'ray') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
