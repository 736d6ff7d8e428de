"""Decoding on a GPU: one token of every sequence by one CUDA graph, weights in bfloat16, states in float32 (attention's cache in bfloat16).

The roof is the bytes that a token cannot do without over the card's measured bandwidth: all weights once, each state read and written once, attention's
cache read once. States are those of a real sequence of that length, at the largest scale of params.yaml, the same for all of a batch; Mesa's gates are those that
training leaves (benchmarks/training.py). Recurrent layers' states do not depend on the context: it is their first one's.

    python -m benchmarks decode [--models NAME ...] [--batches N ...] [--contexts N ...]
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.kernels import RATES
from benchmarks.table import report
from benchmarks.training import set_gates, study

BATCHES = (1, 2, 8, 32, 128, 512, 1024)
CONTEXTS = (256, 2048, 8192, 32768)
ROOM = 256  # tokens that are decoded at most
SHARE = 0.45  # of the free memory, for states: they are there twice while a graph is made


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks decode", description="Decoding on a GPU, beside its byte roof.")
    parser.add_argument("--models", nargs="+", default=["gla", "mesa", "transformer"], help="of params.yaml")
    parser.add_argument("--scale", default="1b", help="of params.yaml")
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--contexts", nargs="+", type=int, default=CONTEXTS)
    parser.add_argument("--tokens", type=int, default=50, help="timed, of each sequence")
    parser.add_argument("--out", default=None, help="folder of the Parquet file; benchmarks/results if not given")
    options = parser.parse_args(arguments)
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("python -m benchmarks decode needs a CUDA card.")
    report("decode", list(measured(options)), folder=options.out)


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each model, context and batch whose states fit."""
    import torch

    import models
    from models.backends.torch import Decoder, to_arrays
    from models.parameters import initialise

    params = study()
    for name in options.models:
        model = models.build(params["models"][name], params["scales"][options.scale], vocab_size=50257)
        weights = to_arrays(initialise(model.table, seed=0, blocks=len(model.layers)), "cuda")
        set_gates(SimpleNamespace(model=model, params=weights), "trained")
        decoder = Decoder(model, weights, dtype=torch.bfloat16, in_place=True)
        del weights
        held = sum(value.nbytes for value in decoder.params.values())
        recurrent = model.state_floats(1) == model.state_floats(4096)
        for context in options.contexts[:1] if recurrent else options.contexts:
            decoder.prefill(np.random.default_rng(0).integers(0, 50257, (1, context)))
            one = decoder.states
            for batch in options.batches:
                size = batch * model.state_floats(context) * (4 if recurrent else 2)
                decoder.states = decoder.graph = None
                gc.collect()
                torch.cuda.empty_cache()
                if size > SHARE * torch.cuda.mem_get_info()[0]:
                    continue
                decoder.start(torch.utils._pytree.tree_map(lambda x, batch=batch: x.repeat_interleave(batch, 0), one), context)
                decoder.reserve(context + ROOM)
                seconds = _time(decoder, batch, options.tokens)
                needed = held + size * (2 if recurrent else 1)
                roof = needed / RATES["bytes"]
                row = {
                    "model": name,
                    "context": context,
                    "batch": batch,
                    "ms": seconds * 1e3,
                    "tokens/s": batch / seconds,
                    "GB": needed / 1e9,
                }
                yield row | {"roof ms": roof * 1e3, "share of roof": roof / seconds}
                print(
                    {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}, roof / seconds, flush=True
                )


def _time(decoder: Any, batch: int, tokens: int) -> float:
    """Seconds a token."""
    import torch

    token_B = torch.randint(0, 50257, (batch,), device="cuda", dtype=torch.int32)
    for _ in range(5):
        decoder.advance(token_B)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(tokens):
        decoder.advance(token_B)
    end.record()
    end.synchronize()
    assert torch.isfinite(decoder.logits_BV).all()
    return begin.elapsed_time(end) / 1e3 / tokens
