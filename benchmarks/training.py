"""Training steps on a GPU: tokens a second, MFU, memory, the first step's seconds, and the solver's steps, on random tokens.

    python -m benchmarks training [--models NAME ...] [--scales NAME ...] [--gates KIND ...]       models by scales
    python -m benchmarks training --table lengths                                                  1B at 2k x 16, 4k x 8, ... 32k x 1
    python -m benchmarks training --table layer                                                    one Mesa layer at T 256 ... 8k, CG 0, 5, 15, 30, beside attention

Models and scales are those of the repository's params.yaml. gates: of Mesa, "trained" sets its forget gates as training leaves them (2 of 12 heads remember
for hundreds of tokens and more, gamma at least 0.997, the rest spread over 0.5 to 0.99), "initial" leaves them as they begin, "exact" sets eps to 0: tokens go on to the rounding of float32.
`torchrun --standalone --nproc-per-node 2 -m benchmarks training ...` has several GPUs train together, the same rows on each.
MFU counts a multiply-add as two, the solver's steps as taken (or not at all), recomputation never, over the card's peak of dense bfloat16 products.
"""

from __future__ import annotations

import argparse
import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.table import report

PARAMS = Path(__file__).parent.parent / "params.yaml"
OPTIMIZER = {"beta1": 0.9, "beta2": 0.98, "epsilon": 1e-8, "weight_decay": 0.1, "clip": 1.0}
RATE = 1e-6  # of learning: too small to move a gate
LENGTHS = {2048: 16, 4096: 8, 8192: 4, 16384: 2, 32768: 1}
LAYER_LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
LAYER_TOKENS = 1 << 16
SOLVES = {
    "CG 0": {"solve": False},
    "CG 5": {"steps": 5, "eps": 0.0},
    "CG 15": {"steps": 15, "eps": 0.0},
    "CG 30": {"steps": 30, "eps": 0.0},
}
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12}  # dense bfloat16 FLOP/s


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks training", description="Training steps on a GPU.")
    parser.add_argument("--table", choices=("cells", "lengths", "layer"), default="cells")
    parser.add_argument("--models", nargs="+", default=["transformer", "mesa"], help="of params.yaml")
    parser.add_argument("--scales", nargs="+", default=["140m", "440m", "1b"], help="of params.yaml")
    parser.add_argument("--gates", nargs="+", choices=("trained", "initial", "exact"), default=["trained"], help="of Mesa's layers")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=32, help="sequences a step, on each GPU")
    parser.add_argument("--micro-batch", type=int, default=None, help="sequences at once; all of them if not given")
    parser.add_argument("--steps", type=int, default=8, help="timed, after the first two")
    parser.add_argument("--out", default=None, help="folder of the Parquet file; benchmarks/results if not given")
    options = parser.parse_args(arguments)
    import torch

    from models.backends import torch_parallel

    if not torch.cuda.is_available():
        raise SystemExit("python -m benchmarks training needs a CUDA card.")
    options.team = torch_parallel.Team.join("cuda") if torch_parallel.started() else torch_parallel.Team()
    rows = list({"cells": cells, "lengths": lengths, "layer": layers}[options.table](options))
    name = "training" if options.table == "cells" else f"training-{options.table}"
    if options.team.rank == 0:
        report(name if options.team.size == 1 else f"{name}-{options.team.size}", rows, folder=options.out)
    options.team.leave()


def study() -> dict[str, Any]:
    """The repository's params.yaml."""
    import yaml

    return yaml.safe_load(PARAMS.read_text())


def cells(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each model, scale and, where it solves, kind of gates."""
    params = study()
    for scale in options.scales:
        for name in options.models:
            entry = params["models"][name]
            for gates in options.gates if "mesa" in str(entry) else [None]:
                given = {name: getattr(options, name) for name in ("length", "rows", "micro_batch", "steps", "team")}
                yield _said({"model": name, "scale": scale, "gates": gates} | measure(entry, params["scales"][scale], gates=gates, **given))


def lengths(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The same tokens a step in fewer, longer sequences, at the largest scale."""
    params = study()
    scale = options.scales[-1]
    for length, rows in LENGTHS.items():
        for name in options.models:
            gates = options.gates[0] if "mesa" in str(params["models"][name]) else None
            found = measure(
                params["models"][name],
                params["scales"][scale],
                length=length,
                rows=rows,
                gates=gates,
                steps=options.steps,
                team=options.team,
            )
            yield _said({"model": name, "scale": scale, "gates": gates} | found)


def _said(row: dict[str, Any]) -> dict[str, Any]:
    print("  ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()), flush=True)
    return row


def measure(
    entry: Mapping[str, Any], scale: Mapping[str, int], *, length: int, rows: int, steps: int, gates: str | None = None, micro_batch: int | None = None,
    vocab_size: int = 50257, team: Any = None,
) -> dict[str, Any]:  # fmt: skip
    """One model's training step. The host is a step ahead of the card, as in a training run, and reads each step's facts.

    rows: of each GPU.
    """
    import torch

    import models
    from models.backends.torch import Trainer

    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model = models.build(entry, scale, vocab_size=vocab_size)
    if gates == "exact":
        model = model.with_setting({"eps": 0.0})
    trainer = Trainer(model, optimizer=OPTIMIZER, seed=0, device="cuda", precision="bfloat16", compile=True, team=team)
    rows *= trainer.devices
    set_gates(trainer, gates)
    random = np.random.default_rng(0)
    batches = [random.integers(0, vocab_size, (rows, length + 1)).astype(np.int32) for _ in range(4)]

    def submit(step: int) -> Callable[[], dict[str, float]]:
        given = {"learning_rate": RATE, "skip_nonfinite": True, "micro_batch": micro_batch}
        return trainer.submit(batches[step % len(batches)], **given)

    began = time.perf_counter()
    facts = submit(0)()
    first = time.perf_counter() - began
    before = submit(1)
    before()
    began = time.perf_counter()
    waiting = submit(2)
    for step in range(3, 2 + steps):
        waiting, before = submit(step), waiting
        before()
    facts = waiting()
    seconds = (time.perf_counter() - began) / steps
    rate = rows * length / seconds
    peak = trainer.devices * next((peak for name, peak in PEAKS.items() if name in torch.cuda.get_device_name()), math.nan)
    taken = facts.get("cg_steps")
    mfu = [rate * model.flops(length, steps=count, training=True) / peak for count in (taken, 0)]
    return {
        "parameters": model.parameters, "GPUs": trainer.devices, "length": length, "rows": rows, "tokens/s": rate, "ms": seconds * 1e3, "mfu": mfu[0], "mfu without CG": mfu[1],
        "CG mean": taken, "CG most": most_steps(trainer, batches[0]), "first step s": first,
        "peak GiB": torch.cuda.max_memory_allocated() / 2**30, "loss": facts["loss"],
    }  # fmt: skip


def set_gates(trainer: Any, gates: str | None) -> None:
    """Mesa's forget gates as training leaves them: constant, by their biases. Before its bound, which moves gamma by at most 0.0025."""
    import torch

    if gates is None or gates == "initial":
        return
    for index, layer in enumerate(trainer.model.layers):
        if layer.name != "mesa":
            continue
        heads = layer.heads
        slow = max(1, heads // 6)
        gamma = np.concatenate([np.linspace(0.998, 0.9995, slow), np.linspace(0.5, 0.99, heads - slow)])
        with torch.no_grad():
            trainer.params[f"blocks.{index}.mixer.forget"].zero_()
            trainer.params[f"blocks.{index}.mixer.forget_bias"].copy_(torch.tensor(np.log(gamma / (1 - gamma))))


def most_steps(trainer: Any, tokens_BT1: np.ndarray) -> int | None:
    """The most steps that a token of some sequences takes."""
    import torch

    found: list[int] = []

    def watched(block: Callable, layer: Any) -> Callable:
        def run(layer: Any, *rest: Any) -> Any:
            kind = type(layer)
            plain = kind.operation

            def operation(*given: Any, **options: Any) -> Any:
                o, state, info = plain(*given, **options)
                found.append(int(info["steps"].max()))
                return o, state, info

            kind.operation = staticmethod(operation)
            try:
                return block(layer, *rest)
            finally:
                kind.operation = staticmethod(plain)

        return run if layer.name == "mesa" else block

    if not any(layer.name == "mesa" for layer in trainer.model.layers):
        return None
    with torch.no_grad():
        tokens = torch.tensor(tokens_BT1[:1, :-1], device="cuda")
        trainer.model.through_blocks(trainer.params, tokens, dtype=torch.bfloat16, transform=watched)
    return max(found)


def layers(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One layer of the largest scale, forward and backward, compiled, at the same number of tokens."""
    import torch
    from triton.testing import do_bench

    import models
    from kernels import arrays
    from models.backends.torch import to_arrays
    from models.parameters import initialise

    scale = {name: size for name, size in study()["scales"][options.scales[-1]].items() if name in ("width", "heads", "key_size")}
    entries = {"attention": {"layer": "attention"}, **{f"mesa, {name}": {"layer": "mesa", **solve} for name, solve in SOLVES.items()}}
    for name, entry in entries.items():
        layer = models.build_layer(entry, scale)
        p = {key: value.requires_grad_() for key, value in to_arrays(initialise(layer.parameters(), seed=0, blocks=2), "cuda").items()}
        torch._dynamo.reset()
        ops = arrays.load("torch")
        run = torch.compile(lambda p, x, layer=layer, ops=ops: layer.forward(p, x, ops=ops)[0], dynamic=False)
        for length in LAYER_LENGTHS:
            x = torch.randn(LAYER_TOKENS // length, length, scale["width"], device="cuda", dtype=torch.bfloat16, requires_grad=True)
            dy = torch.randn_like(x)
            forward = do_bench(lambda run=run, p=p, x=x: run(p, x), return_mode="median")
            both = do_bench(lambda run=run, p=p, x=x, dy=dy: torch.autograd.grad(run(p, x), [x, *p.values()], dy), return_mode="median")
            yield _said({"layer": name, "length": length, "tokens": LAYER_TOKENS, "forward ms": forward, "forward and backward ms": both})
