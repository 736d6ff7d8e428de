"""Training steps on a GPU: tokens a second, MFU, memory, the first step's seconds, and the solver's steps, on random tokens.

    python -m benchmarks training [--only PATTERN ...]                     cells: MODEL-SCALE, with a solver MODEL-SCALE-GATES; some of each if not given
    python -m benchmarks training --table lengths [--only PATTERN ...]     1B at 2k x 16, 4k x 8, ... 32k x 1: MODEL-LENGTH
    python -m benchmarks training --table layer [--only PATTERN ...]       one Mesa layer at T 256 ... 8k, CG 0, 5, 15, 30, beside attention: LAYER-LENGTH

Models and scales are those of the repository's params.yaml, gates those of benchmarks/weights.py. Each is measured in a process that another takes the place
of when it fails; `--prepare` has several processes compile everything beforehand (then the first step's seconds are not those of a new card).
`torchrun --standalone --nproc-per-node 2 -m benchmarks training ...` has several GPUs train together, the same rows on each.
MFU counts a multiply-add as two, the solver's steps as taken (or not at all), recomputation never, over the card's peak of dense bfloat16 products.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import gc
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import isolated
from benchmarks.kernels import median_ms
from benchmarks.table import Row, report, said
from benchmarks.weights import GATES, drawn, mixers, set_gates, setting

PARAMS = Path(__file__).parent.parent / "params.yaml"
OPTIMIZER = {"beta1": 0.9, "beta2": 0.98, "epsilon": 1e-8, "weight_decay": 0.1, "clip": 1.0}
RATE = 1e-6  # of learning: too small to move a gate
MOST_IMPORTANT = (
    "transformer-1b", "mesa-1b-trained", "mesa-1b-full", "mesa-1b-initial", "transformer-440m", "transformer-140m", "gla-1b", "mamba2-1b", "deltanet-1b",
    "gated_deltanet-1b", "xlstm-1b", "hawk-1b", "hawk_mesa-1b-trained",
)  # fmt: skip
SOLVERS_AT_ONCE = 16
"""Sequences of 2048 tokens of a billion parameters with a solver that fit into 141 GB beside its chunks' states; without, twice as many."""
LENGTHS = {2048: 16, 4096: 8, 8192: 4, 16384: 2, 32768: 1}
LAYER_LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
LAYER_TOKENS = 1 << 16
LAYERS = {
    "attention": {"layer": "attention"},
    "mesa CG 0": {"layer": "mesa", "solve": False},
    "mesa CG 5": {"layer": "mesa", "steps": 5},
    "mesa CG 15": {"layer": "mesa", "steps": 15},
    "mesa CG 30": {"layer": "mesa", "steps": 30},
}
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12}  # dense bfloat16 FLOP/s
SMALL = {"layers": 2, "width": 32, "heads": 2, "key_size": 16, "mlp": 64}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks training", description="Training steps on a GPU.")
    parser.add_argument("--table", choices=tuple(TABLES), default="cells")
    parser.add_argument("--only", nargs="+", default=None, metavar="PATTERN", help="entries by name, in this order; * and ? are wild")
    parser.add_argument("--rows", type=int, default=32, help="sequences of 2048 tokens a step, on each GPU (cells)")
    parser.add_argument("--micro-batch", type=int, default=None, help="sequences at once; as many as fit if not given")
    parser.add_argument("--steps", type=int, default=5, help="timed, after the first two")
    parser.add_argument("--seconds", type=float, default=None, help="begin no entry later than that; preparing counts")
    parser.add_argument("--prepare", type=int, default=0, metavar="PROCESSES", help="so many processes compile beforehand")
    parser.add_argument("--small", action="store_true", help="sizes for a trial, on a CPU too")
    parser.add_argument("--out", default=None, help="folder of the table; benchmarks/results if not given")
    options = parser.parse_args(arguments)
    import torch

    from models.backends import torch_parallel

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.small:
        raise SystemExit("python -m benchmarks training needs a CUDA card.")
    began, table = time.perf_counter(), TABLES[options.table]
    entries = chosen(table.entries(), options.only or table.most_important)
    given = {"small": options.small, "device": device, "rows": options.rows, "micro_batch": options.micro_batch, "steps": options.steps}
    if torch_parallel.started():
        team = torch_parallel.Team.join(device)
        rows = (said(row) for row in isolated.inline(functools.partial(table.measure, team=team), entries, **given))
        if team.rank == 0:
            report(f"{table.file}-{team.size}", rows, folder=options.out)
        else:
            list(rows)
        team.leave()
        return
    if options.prepare:
        small_steps = given | {"steps": 0}
        isolated.prepare(
            table.measure, entries, processes=options.prepare, seconds=(options.seconds or 300) / 2, shallow=True, **small_steps
        )
        print(f"prepared in {time.perf_counter() - began:.0f} s", flush=True)
    left = None if options.seconds is None else options.seconds - (time.perf_counter() - began)
    print(report(table.file, (said(row) for row in isolated.each(table.measure, entries, seconds=left, **given)), folder=options.out))


def chosen(entries: dict[str, Row], patterns: tuple[str, ...] | list[str]) -> list[Row]:
    """The entries whose names fit, pattern by pattern."""
    names = list(dict.fromkeys(name for pattern in patterns for name in entries if fnmatch.fnmatchcase(name, pattern)))
    if not names:
        raise SystemExit(f"Nothing is named {' or '.join(patterns)}; there are {', '.join(entries)}.")
    return [entries[name] for name in names]


@functools.cache
def study() -> dict[str, Any]:
    """The repository's params.yaml."""
    import yaml

    return yaml.safe_load(PARAMS.read_text())


def _solves(model: str) -> bool:
    return "mesa" in str(study()["models"][model])


def cells() -> dict[str, Row]:
    """Every model at every scale and, where it solves, under each kind of gates."""
    found = {}
    for scale in study()["scales"]:
        for model in study()["models"]:
            for gates in GATES if _solves(model) else [None]:
                found["-".join(filter(None, (model, scale, gates)))] = {"model": model, "scale": scale, "gates": gates}
    return found


def lengths() -> dict[str, Row]:
    """The same tokens a step in fewer, longer sequences, at the largest scale."""
    scale = list(study()["scales"])[-1]
    models = [(model, "trained" if _solves(model) else None) for model in study()["models"]]
    return {
        f"{model}-{length}": {"model": model, "scale": scale, "gates": gates, "length": length}
        for model, gates in models
        for length in LENGTHS
    }


def layers() -> dict[str, Row]:
    """One layer of the largest scale."""
    return {f"{name}-{length}": {"layer": name, "length": length} for name in LAYERS for length in LAYER_LENGTHS}


def measured_cell(
    entry: Row, *, small: bool, device: str, rows: int, micro_batch: int | None, steps: int, shallow: bool = False, team: Any = None
) -> Row:
    """What `isolated.each` asks of a cell, or of one in fewer, longer sequences. shallow: one of each kind of layer, which compiles the same."""
    model = study()["models"][entry["model"]]
    scale = SMALL if small else study()["scales"][entry["scale"]]
    length = entry.get("length", 2048)
    rows = LENGTHS[length] if "length" in entry else rows
    if shallow:
        scale = scale | {"layers": len(model.get("pattern", [None]))}
    if small:
        rows, length, micro_batch = 2, 32, None
    elif micro_batch is None and entry["gates"] and entry["scale"] == "1b":
        micro_batch = max(1, SOLVERS_AT_ONCE * 2048 // length)
    vocabulary = 64 if small else 50257
    while True:
        try:
            given = {"gates": entry["gates"], "micro_batch": micro_batch, "vocab_size": vocabulary, "team": team, "device": device}
            return measure(model, scale, length=length, rows=rows, steps=steps, **given)
        except MemoryError:
            micro_batch = (micro_batch or rows) // 2
            if micro_batch < 1:
                raise


def measure(
    entry: Mapping[str, Any], scale: Mapping[str, int], *, length: int, rows: int, steps: int, gates: str | None = None, micro_batch: int | None = None,
    vocab_size: int = 50257, team: Any = None, device: str = "cuda",
) -> Row:  # fmt: skip
    """One model's training step. The host is a step ahead of the card, as in a training run, and reads each step's facts.

    rows: of each GPU. steps: timed; with 0 the first step is all there is.
    Raises MemoryError where so many rows at once do not fit.
    """
    import torch

    import models
    from models.backends.torch import Trainer

    gpu = device == "cuda"
    torch._dynamo.reset()
    gc.collect()
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model = drawn(models.build(entry, scale, vocab_size=vocab_size), device).with_setting(setting(gates))
    trainer = Trainer(model, optimizer=OPTIMIZER, seed=0, device=device, precision="bfloat16" if gpu else "float32", compile=gpu, team=team)
    set_gates(mixers(model), trainer.params, gates)
    rows *= trainer.devices
    random = np.random.default_rng(0)
    batches = [random.integers(0, vocab_size, (rows, length + 1)).astype(np.int32) for _ in range(4)]

    def submit(step: int) -> Callable[[], dict[str, float]]:
        given = {"learning_rate": RATE, "skip_nonfinite": True, "micro_batch": micro_batch}
        return trainer.submit(batches[step % len(batches)], **given)

    began = time.perf_counter()
    facts = submit(0)()
    row = {
        "parameters": model.parameters, "GPUs": trainer.devices, "length": length, "rows": rows, "rows at once": micro_batch or rows // trainer.devices,
        "first step s": time.perf_counter() - began,
    }  # fmt: skip
    if steps == 0:
        return row
    submit(1)()
    began = time.perf_counter()
    waiting = submit(2)
    for step in range(3, 2 + steps):
        waiting, before = submit(step), waiting
        before()
    facts = waiting()
    seconds = (time.perf_counter() - began) / steps
    rate, taken = rows * length / seconds, facts.get("cg_steps")
    peak = trainer.devices * next((peak for name, peak in PEAKS.items() if gpu and name in torch.cuda.get_device_name()), math.nan)
    mfu = [rate * model.flops(length, steps=count, training=True) / peak for count in (taken, 0)]
    memory = torch.cuda.max_memory_allocated() / 2**30 if gpu else None
    return row | {
        "tokens/s": rate, "ms": seconds * 1e3, "mfu": mfu[0], "mfu without CG": mfu[1], "CG mean": taken,
        "CG most": most_steps(trainer, batches[0][: micro_batch or rows // trainer.devices]), "peak GiB": memory, "loss": facts["loss"],
        "finite": facts["finite"],
    }  # fmt: skip


def most_steps(trainer: Any, tokens_BT1: np.ndarray) -> int | None:
    """The most steps that a token of some sequences takes. As many of them as in a training step, for which kernels are compiled."""
    import torch

    found: list[torch.Tensor] = []

    def watched(block: Callable, layer: Any) -> Callable:
        def run(layer: Any, *rest: Any) -> Any:
            kind = type(layer)
            plain = kind.operation

            def operation(*given: Any, **options: Any) -> Any:
                o, state, info = plain(*given, **options)
                found.append(info["steps"].max())
                return o, state, info

            kind.operation = staticmethod(operation)
            try:
                x, _, record = block(layer, *rest)
                return x, None, record
            finally:
                kind.operation = staticmethod(plain)

        return run if layer.name == "mesa" else lambda *given: (block(*given)[0], None, {})

    if not any(layer.name == "mesa" for layer in trainer.model.layers):
        return None
    with torch.no_grad():
        tokens = torch.tensor(tokens_BT1[:, :-1], device=trainer.device)
        trainer.model.through_blocks(trainer.params, tokens, dtype=trainer.dtype, transform=watched)
    return max(int(most) for most in found)


def measured_layer(
    entry: Row, *, small: bool, device: str, steps: int, rows: int, micro_batch: int | None, shallow: bool = False, team: Any = None
) -> Row:
    """What `isolated.each` asks of one layer: forward and backward, compiled, at the same number of tokens whatever the length. Mesa takes its steps in full."""
    import torch

    import models
    from kernels import arrays
    from models.backends.torch import to_arrays
    from models.parameters import initialise

    scale = SMALL if small else list(study()["scales"].values())[-1]
    model = models.build(LAYERS[entry["layer"]], scale | {"layers": 1}, vocab_size=64).with_setting(
        setting("full") if "mesa" in entry["layer"] else None
    )
    (layer,) = model.layers
    p = to_arrays(initialise(layer.parameters(), seed=0, blocks=2), device)
    set_gates({"": layer}, p, "full")
    p = {key: value.requires_grad_() for key, value in p.items()}
    torch._dynamo.reset()
    ops, record = arrays.load("torch"), {}
    forward = lambda p, x: layer.forward(p, x, ops=ops)[0]  # noqa: E731
    run = torch.compile(forward, dynamic=False) if device == "cuda" else forward
    length, tokens = (32, 64) if small else (entry["length"], LAYER_TOKENS)
    generator, dtype = torch.Generator(device).manual_seed(0), torch.bfloat16 if device == "cuda" else torch.float32
    x, dy = (torch.randn(tokens // length, length, scale["width"], device=device, generator=generator).to(dtype) for _ in range(2))
    x.requires_grad_()
    both = lambda: torch.autograd.grad(run(p, x), [x, *p.values()], dy, allow_unused=True)  # noqa: E731
    both()
    if shallow:
        return {}
    with torch.no_grad():
        layer.forward(p, x, ops=ops, record=record)
    times = {"forward ms": lambda: run(p, x), "forward and backward ms": both}
    return {"tokens": tokens, "CG mean": float(record["cg_steps"]) if "cg_steps" in record and layer.solve else None} | {
        name: median_ms(call, device=device, repeat_ms=100) for name, call in times.items()
    }


class Table:
    """Entries by name, those that are measured if nothing is asked for, and how."""

    def __init__(
        self, file: str, entries: Callable[[], dict[str, Row]], most_important: tuple[str, ...], measure: Callable[..., Row]
    ) -> None:
        self.file, self.entries, self.most_important, self.measure = file, entries, most_important, measure


TABLES = {
    "cells": Table("training", cells, MOST_IMPORTANT, measured_cell),
    "lengths": Table("training-lengths", lengths, ("transformer-*", "mesa-[0-9]*"), measured_cell),
    "layer": Table("training-layer", layers, ("*",), measured_layer),
}
