"""Decoding on a GPU: one token of every sequence by one CUDA graph, weights in bfloat16, states in float32 (attention's cache in bfloat16).

The roof is the bytes that a token cannot do without over the card's measured bandwidth: all weights once, each state read and written once, attention's
cache read once. States are those of a real sequence of that length, at the largest scale of params.yaml, the same for all of a batch; Mesa's gates are those that
training leaves (benchmarks/weights.py). Recurrent layers' states do not depend on the context: it is their first one's.

    python -m benchmarks decode [--only PATTERN ...]       entries: MODEL-CONTEXT-BATCH; * and ? are wild
"""

from __future__ import annotations

import argparse
import gc
import time
from typing import Any

import numpy as np

from benchmarks import isolated
from benchmarks.kernels import RATES
from benchmarks.table import Row, report, said
from benchmarks.training import SMALL, chosen, study
from benchmarks.weights import drawn, mixers, set_gates

MODELS = ("mesa", "gla", "transformer")
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
CONTEXTS = (256, 2048, 8192, 32768)
MOST_IMPORTANT = (
    *(f"{model}-256-{batch}" for batch in (1, 8, 64, 256, 1024, 2, 32, 512) for model in ("mesa", "gla")),
    *(f"transformer-{context}-{batch}" for context in CONTEXTS for batch in (1, 8, 64, 1024)),
)  # fmt: skip
ROOM = 256  # tokens that are decoded at most
SHARE = 0.45  # of the free memory, for states: they are there twice while a graph is made


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks decode", description="Decoding on a GPU, beside its byte roof.")
    parser.add_argument(
        "--only", nargs="+", default=MOST_IMPORTANT, metavar="PATTERN", help="entries by name, in this order; * and ? are wild"
    )
    parser.add_argument("--tokens", type=int, default=50, help="timed, of each sequence")
    parser.add_argument("--seconds", type=float, default=None, help="begin no entry later than that; preparing counts")
    parser.add_argument("--prepare", type=int, default=0, metavar="PROCESSES", help="so many processes compile beforehand")
    parser.add_argument("--small", action="store_true", help="sizes for a trial, on a CPU too")
    parser.add_argument("--out", default=None, help="folder of the table; benchmarks/results if not given")
    options = parser.parse_args(arguments)
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.small:
        raise SystemExit("python -m benchmarks decode needs a CUDA card.")
    began, listed = time.perf_counter(), chosen(entries(), options.only)
    listed.sort(
        key=lambda entry: MODELS.index(entry["model"]) if entry["model"] in MODELS else len(MODELS)
    )  # weights are drawn once a model
    given = {"small": options.small, "device": device}
    if options.prepare:
        isolated.prepare(measured, listed, processes=options.prepare, seconds=(options.seconds or 240) / 2, tokens=1, shallow=True, **given)
        print(f"prepared in {time.perf_counter() - began:.0f} s", flush=True)
    left = None if options.seconds is None else options.seconds - (time.perf_counter() - began)
    rows = isolated.each(measured, listed, seconds=left, tokens=options.tokens, **given)
    print(report("decode", (said(row) for row in rows), folder=options.out))


def entries() -> dict[str, Row]:
    """Every model of params.yaml."""
    return {
        f"{model}-{context}-{batch}": {"model": model, "context": context, "batch": batch}
        for model in study()["models"]
        for context in CONTEXTS
        for batch in BATCHES
    }


_made: dict[str, tuple[Any, Any]] = {}
"""The model that was decoded last, with its decoder."""


def _decoder(name: str, scale: dict[str, int], device: str, small: bool) -> tuple[Any, Any]:
    import torch

    import models
    from models.backends.torch import Decoder

    if name not in _made:
        _made.clear()
        gc.collect()
        model = drawn(models.build(study()["models"][name], scale, vocab_size=64 if small else 50257), device)
        weights = model.init(0)
        set_gates(mixers(model), weights, "trained")
        _made[name] = model, Decoder(model, weights, dtype=torch.bfloat16 if device == "cuda" else None, in_place=True)
    return _made[name]


def measured(entry: Row, *, small: bool, device: str, tokens: int, shallow: bool = False) -> Row:
    """What `isolated.each` asks of an entry. shallow: one of each kind of layer, which compiles the same."""
    import torch

    gpu, context, batch = device == "cuda", 16 if small else entry["context"], entry["batch"]
    scale = SMALL if small else list(study()["scales"].values())[-1]
    if shallow:
        scale = scale | {"layers": len(study()["models"][entry["model"]].get("pattern", [None]))}
    model, decoder = _decoder(entry["model"], scale, device, small)
    decoder.states = decoder.graph = None
    gc.collect()
    if gpu:
        torch._dynamo.reset()  # what it compiled for another batch counts against its limit
        decoder.forget_programs()
        torch.cuda.empty_cache()
    held = sum(value.nbytes for value in decoder.params.values())
    recurrent = model.state_floats(1) == model.state_floats(4096)
    size = batch * model.state_floats(context) * (4 if recurrent or not gpu else 2)
    if gpu and size > SHARE * torch.cuda.mem_get_info()[0]:
        raise MemoryError(f"{size / 1e9:.0f} GB of states are too many for this card")
    decoder.prefill(np.random.default_rng(0).integers(0, 64 if small else 50257, (1, context)))
    one = decoder.states
    decoder.start(torch.utils._pytree.tree_map(lambda x: x.repeat_interleave(batch, 0), one), context)
    decoder.reserve(context + ROOM)
    seconds = _time(decoder, batch, tokens, model.vocab_size)
    needed = held + size * (2 if recurrent else 1)
    roof = needed / RATES["bytes"]
    return {
        "ms": seconds * 1e3, "tokens/s": batch / seconds, "GB": needed / 1e9, "of weights": held / 1e9, "TB/s": needed / seconds / 1e12, "roof ms": roof * 1e3,
        "share of roof": roof / seconds,
    }  # fmt: skip


def _time(decoder: Any, batch: int, tokens: int, vocab_size: int) -> float:
    """Seconds a token."""
    import torch

    gpu = decoder.device.type == "cuda"
    token_B = torch.randint(0, vocab_size, (batch,), device=decoder.device, dtype=torch.int32)
    for _ in range(5):
        decoder.advance(token_B)
    if not gpu:
        began = time.perf_counter()
        for _ in range(tokens):
            decoder.advance(token_B)
        seconds = (time.perf_counter() - began) / tokens
    else:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(tokens):
            decoder.advance(token_B)
        end.record()
        end.synchronize()
        seconds = begin.elapsed_time(end) / 1e3 / tokens
    assert torch.isfinite(decoder.logits_BV).all()
    return seconds
