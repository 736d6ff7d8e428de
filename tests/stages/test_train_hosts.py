"""Training by JAX on several hosts: two processes over jax.distributed, four simulated devices each, are the run of one process on one device."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from models import checkpoint
from stages import train
from stages.spec import canonical
from tests.stages.small_study import MESA, assert_same_run, context, course, looking_spec, make_packed

pytest.importorskip("jax")

ROOT = Path(__file__).parents[2]
SPEC = looking_spec(model=MESA, steps=12, batch=8)
same_run = partial(assert_same_run, key=SPEC.key, same=("tokens", "learning_rate"), near={"loss": 2e-4, "grad_norm": 2e-2})

WORK = """
import json, sys
from pathlib import Path
from stages import train
from stages.spec import Context, Spec, Stopped

spec, out, budget, settings, stop = Spec.model_validate(json.loads(sys.argv[1])), Path(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]), int(sys.argv[5])
polls = iter(range(1000))
context = Context(threads=1, device="cpu", settings={"backend": "jax", **settings}, stop_requested=lambda: next(polls) >= stop,
                  on_progress=lambda line: print(line.get("note", ""), flush=True))
out.mkdir(exist_ok=True)
try:
    train.run(spec, out, {"budget": Path(budget), "validation": Path(budget).parents[1] / "validation"}, context)
except Stopped as stopped:
    print("Stopped", stopped)
"""


@pytest.fixture(scope="module")
def budget(tmp_path_factory) -> Path:
    return make_packed(tmp_path_factory.mktemp("study") / "packed")


@pytest.fixture(scope="module")
def alone(tmp_path_factory, budget) -> Path:
    out = tmp_path_factory.mktemp("alone")
    given = {"budget": budget, "validation": budget.parents[1] / "validation"}
    train.run(SPEC, out, given, context(settings={"backend": "jax", "devices": 1})[0])
    return out


def on_hosts(hosts: int, devices: int, out: Path, budget: Path, *, fsdp: int = 1, stop: int = 999) -> str:
    """Train on so many hosts; what the first said. The others have a folder of their own, to which nothing is written."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(hosts):
        environment = os.environ | {
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}", "PYTHONPATH": str(ROOT),
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(hosts), "JAX_PROCESS_ID": str(rank),
        }  # fmt: skip
        folder = out if rank == 0 else out.with_name(f"{out.name}-{rank}")
        given = [canonical(SPEC.model_dump()), str(folder), str(budget), json.dumps({"fsdp": fsdp}), str(stop)]
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", WORK, *given], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    said = [process.communicate(timeout=240) for process in processes]
    for process, (_, error) in zip(processes, said, strict=True):
        assert process.returncode == 0, error[-3000:]
    assert not any(list(out.with_name(f"{out.name}-{rank}").iterdir()) for rank in range(1, hosts))
    return said[0][0]


@pytest.mark.slow
def test_two_hosts_train_as_one_device(tmp_path, budget, alone):
    """Stopped on two hosts, whose checkpoint is written by both, it goes on on one host of four devices."""
    out = tmp_path / "out"
    said = on_hosts(2, 4, out, budget, fsdp=8, stop=7)
    assert "Stopped at step 7" in said
    newest = out / "checkpoints" / "00000007.safetensors"
    halves = [checkpoint.load(path) for path in (newest, checkpoint.part(newest, 1))]
    sizes = [sum(array.size for name, array in arrays.items() if "@" in name) for arrays, _ in halves]
    assert sizes[0] == sizes[1] > 0 and halves[0][1]["parts"] == "1"
    whole, facts = checkpoint.load_together(newest)
    assert facts["step"] == "7" and not any("@" in name for name in whole)
    assert "Going on from step 7" in on_hosts(1, 4, out, budget, fsdp=2)
    same_run(alone, out)
    looks = [course(folder, "internals") for folder in (alone, out)]
    assert [(row["step"], row["head"]) for row in looks[1]] == [(step, head) for step in (0, 4, 8, 12) for head in (0, 1)]
    assert [row["gamma"] for row in looks[1]] == pytest.approx([row["gamma"] for row in looks[0]], rel=1e-2)
    assert json.loads((out / "provenance.json").read_text())["devices"] == 4
