"""What a TPU would do with the Pallas kernels and with training steps, from libtpu's compiler alone: no TPU is needed, and none was used.

Kernels: whether each compiles, its fast memory, its bundles (a core issues one a cycle), the share of each unit's slots that they use, spills,
and a time: the longer of its bundles' and of its bytes' at the chip's HBM bandwidth. Steps: whether the trainer's own step compiles and fits,
and tokens a second from an estimate that is an upper bound: dense products at DENSE of the chip's peak, and the kernels' times.

MFLOP and MB are what a kernel tells XLA (Mesa's as if every token took all 30 steps; JAX's own attention tells nothing).
Assumptions: Mesa takes MESA_STEPS steps of its solver (the paper's inputs take 5 to 9 at eps 1e-4); copies between HBM and fast memory go on
beside the bundles; communication between chips is hidden, and what rematerialised blocks compute again is not counted.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.table import RESULTS, report
from models.backends import jax_ahead, jax_schedule
from models.backends.jax_ahead import INPUTS, Compiled, Kernel, Step
from models.backends.jax_schedule import Schedule

TOPOLOGIES = "v5e:2x4,v5p:2x2x2,v6e:2x4"  # eight chips each
LENGTH = 2048
MESA_STEPS = 7
DENSE = 0.6
STUDY = Path(__file__).parents[1] / "params.yaml"
OPTIONS = {"mesa": {"steps": 30, "eps": 1e-4}}
HEADING = "kernels: bfloat16, head size 128, 2048 tokens, one row a chip, the heads of 140m; seconds are of compiling, both ways together"
UNITS = ("MXU", "VALU", "XLU", "EUP", "VLOAD", "VSTORE")
OPERATION = {"attention": "attention", "mamba2": "linear_attention", "gla": "linear_attention", "mlstm": "mlstm", "deltanet": "delta_rule",
             "gated_deltanet": "delta_rule", "hawk": "rg_lru", "mesa": "mesa"}  # fmt: skip
"""Each layer's operation."""


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks tpu", description="Static costs on TPUs, by their compiler.")
    parser.add_argument("--only", default="", help="operations whose name has this in it")
    parser.add_argument("--topologies", default=TOPOLOGIES)
    parser.add_argument(
        "--steps", default="", help="instead the training steps of these models of params.yaml, such as mesa,transformer: a minute each"
    )
    parser.add_argument("--scales", default="140m,440m,1b", help="of the training steps")
    parser.add_argument("--mesa", action="store_true", help="Mesa's own table instead: how many chunks its solver takes on at once")
    parser.add_argument("--folder", help="where the tables go; benchmarks/results if not given")
    options = parser.parse_args(arguments)
    topologies, started = options.topologies.split(","), time.perf_counter()
    if options.steps:
        known = pq.read_table(Path(options.folder or RESULTS) / "tpu-kernels.parquet").to_pylist()
        rows = [row for topology in topologies for row in steps(topology, options.steps.split(","), options.scales.split(","), known)]
        print(
            "steps: bfloat16, one row of 2048 tokens a chip, parameters split over the eight chips; kernels' times are those of tpu-kernels"
        )
        print(f"{report('tpu-steps', rows, folder=options.folder)}, {time.perf_counter() - started:.0f} s")
        return
    print(HEADING)
    if options.mesa:
        variants = {f"{count} chunk{'s' * (count > 1)} at once": {"together": count} for count in (1, 2, 4)}
        rows = [row for topology in topologies for row in kernels(topology, "mesa", variants)]
        print(f"{report('tpu-mesa', rows, folder=options.folder)}, {time.perf_counter() - started:.0f} s")
        return
    rows = [row for topology in topologies for row in kernels(topology, options.only)]
    print(f"{report('tpu-kernels', rows, folder=options.folder)}, {time.perf_counter() - started:.0f} s\n")


def kernels(topology: str, only: str, variants: dict[str, dict[str, Any]] | None = None) -> list[dict[str, Any]]:
    """A row for every kernel of every operation. variants: tunings of a kernel by what to call them, instead of its own."""
    sizes = {"B": 1, "T": LENGTH, "H": 6, "K": 128, "V": 128, "D": 768}
    requests = {
        (name, variant): Kernel(name, sizes, backward=True, options=OPTIONS.get(name, {}), tuning=tuning)
        for name in INPUTS
        if only in name
        for variant, tuning in (variants or {"": {}}).items()
    }
    rows = []
    with tempfile.TemporaryDirectory() as dump:
        results = jax_ahead.ask(topology, list(requests.values()), dump=Path(dump))
        for number, ((name, variant), found) in enumerate(zip(requests, results, strict=True)):
            if found.error:
                raise RuntimeError(f"{name} does not compile for {topology}: {found.error}")
            rows += [
                {"operation": name, **({"variant": variant} if variants else {}), **_kernel_row(topology, schedule, found)}
                for schedule in jax_schedule.schedules(Path(dump) / str(number))
            ]
    return rows


def _kernel_row(topology: str, schedule: Schedule, found: Compiled) -> dict[str, Any]:
    turns = MESA_STEPS if schedule.turns is None and schedule.bundles[2] else schedule.turns or 0
    chip = jax_ahead.chip(topology)
    issue, copy = schedule.cycles(turns) / chip.clock, schedule.bytes / chip.bandwidth
    return {
        "kernel": re.sub(r"^(transpose_)?jvp_|_*\.\d+$|_pallas|_no_residuals|_residuals", "", schedule.name),
        "topology": topology,
        "seconds": round(found.seconds, 1),
        "vmem MiB": schedule.vmem / 2**20,
        "programs": schedule.programs,
        "bundles": schedule.bundles[1],
        "bundles a turn": schedule.bundles[2],
        "turns": turns,
        "spills": schedule.spills,
        **{unit: schedule.occupancy(unit, turns) for unit in UNITS},
        "MFLOP": schedule.flops / 1e6,
        "MB": schedule.bytes / 1e6,
        "us": 1e6 * max(issue, copy),
        "bound": "issue" if issue > copy else "HBM",
    }


def steps(topology: str, names: list[str], scales: list[str], kernel_rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for the training step of every model at every scale."""
    import yaml

    from models import build

    study = yaml.safe_load(STUDY.read_text())
    cases = [(name, scale) for name in names for scale in scales]
    requests = [Step(study["models"][name], study["scales"][scale], 50257, length=LENGTH, fsdp=8) for name, scale in cases]
    rows, chip = [], jax_ahead.chip(topology)
    for (name, scale), request, found in zip(cases, requests, jax_ahead.ask(topology, requests), strict=True):
        model = build(request.model, request.scale, vocab_size=request.vocab_size, backend="jax")
        inside = sum(
            row["us"] * request.scale["heads"] / 6 / 1e6
            for layer in model.layers
            for row in kernel_rows
            if row["topology"] == topology and row["operation"] == OPERATION[layer.name]
        )
        dense = 6 * model.parameters * LENGTH / (DENSE * chip.flops)
        rows.append(
            {
                "model": name,
                "scale": scale,
                "topology": topology,
                "error": found.error or "",
                "seconds": round(found.seconds),
                "kernels": ", ".join(f"{k} {v}" for k, v in found.chosen.items()),
                "HBM GiB": found.memory / 2**30,
                "of GiB": chip.hbm / 2**30,
                "dense ms": 1e3 * dense,
                "kernels ms": 1e3 * inside,
                "tokens/s/chip": LENGTH / (dense + inside),
            }
        )
    return rows
