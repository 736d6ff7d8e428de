"""The sequence operations on a GPU: forward and backward, ours and the peers that are installed, with the error against float64 beside every time.

An error is ||x - reference|| / ||reference|| on the first sequence of the batch, against our chunked form in float64 on the same (rounded) inputs:
of the output, and the largest of the gradients. A peer that fails says so. The roof is what the card's own rates allow for the fewest bytes (inputs and
outputs once, forward and backward), the products, and the special functions; which of them is largest binds.

    python -m benchmarks kernels [--only NAME] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from benchmarks.table import report

# Of an H200, measured for copies and products, computed for the reciprocal unit: bytes/s, FLOP/s of dense bfloat16, special functions/s.
RATES = {"bytes": 4.3e12, "products": 790e12, "special": 4.19e12}
CHUNK = 64
CAP = 30

Tensors = dict[str, Any]
Call = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """One operation at one size: how to make inputs, how to call ours, what to compare with, and what it cannot do without.

    make: a seed -> tensors by argument name, in order. call: those -> o, or (o, state), or (o, state, info). peers: the same by name.
    work: of forward and backward: bytes, FLOPs of products, special functions.
    """

    name: str
    size: str
    make: Callable[[int], Tensors]
    call: Call
    operation: Call
    options: dict[str, Any] = field(default_factory=dict)
    peers: dict[str, Call] = field(default_factory=dict)
    work: dict[str, float] = field(default_factory=dict)
    fixed: tuple[str, ...] = ()
    target_ms: float | None = None


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks kernels", description="Operations on a GPU, beside peers.")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--out", default=None, help="folder of the Parquet file; benchmarks/results if not given")
    parser.add_argument("--milliseconds", type=int, default=200, help="how long to repeat each")
    options = parser.parse_args(arguments)
    import torch

    if not torch.cuda.is_available():
        raise ValueError("python -m benchmarks kernels needs a CUDA card; `python -m benchmarks layers` measures exactness on a CPU.")
    warnings.filterwarnings("ignore", category=UserWarning)
    rows = []
    for case in cases():
        if options.only in case.name:
            rows += list(measured(case, options.milliseconds))
            torch.cuda.empty_cache()
    report("kernels", rows, folder=options.out)


def cases() -> Iterator[Case]:
    yield from _linear()
    yield from _delta()
    yield from _mesa()
    yield from _palimpsa()
    yield from _rg_lru()


def measured(case: Case, milliseconds: int) -> Iterator[dict[str, Any]]:
    """A row for ours and one for each peer."""
    import torch
    from triton.testing import do_bench

    given = case.make(0)
    do = torch.randn_like(_output(case.call(**given)))
    exact = _reference(case, given, do)
    roof = {name: amount / RATES[name] * 1e3 for name, amount in case.work.items()}
    binds = max(roof, key=lambda name: roof[name]) if roof else ""
    for who, call in {"ours": case.call, **case.peers}.items():
        row = {"operation": case.name, "size": case.size, "who": who}
        try:
            leaves = {n: x.detach().requires_grad_(x.is_floating_point()) for n, x in given.items()}
            result = call(**leaves)
            o, info = _output(result), result[2] if isinstance(result, tuple) and len(result) > 2 and isinstance(result[2], dict) else {}
            wanted = [x for x in leaves.values() if x.requires_grad]
            found = torch.autograd.grad(o, wanted, do, retain_graph=True, allow_unused=True)
            errors = _errors(case, leaves, o, found, exact)
            forward = do_bench(lambda c=call, g=given: c(**g), rep=milliseconds, return_mode="median")
            backward = do_bench(
                lambda o=o, w=wanted: torch.autograd.grad(o, w, do, retain_graph=True, allow_unused=True),
                rep=milliseconds,
                return_mode="median",
            )
            row |= {"forward ms": forward, "backward ms": backward, "both ms": forward + backward} | errors
            row |= {"steps mean": float(info["steps"].float().mean()), "steps most": int(info["steps"].max())} if info else {}
            row |= {"residual": float(info["residual"].max())} if info else {}
            row |= {"note": ""}
        except Exception as problem:  # a peer that this Triton or card refuses must not end the others' run
            if who == "ours":
                raise
            row |= {"note": f"{type(problem).__name__}: {str(problem).splitlines()[0][:80] if str(problem) else ''}"}
        columns = ("forward ms", "backward ms", "both ms", "error o", "error gradients", "worst", "steps mean", "steps most", "residual")
        yield row | {c: row.get(c) for c in columns} | {
            "roof ms": roof.get(binds), "binds": binds, "target ms": case.target_ms if who == "ours" else None, "note": row["note"]
        }  # fmt: skip


def _output(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def _reference(case: Case, given: Tensors, do: Any) -> Tensors:
    """Output and gradients of the batch's first sequence in float64."""
    import torch

    first = {n: (x if n in case.fixed else x[:1]).detach() for n, x in given.items()}
    leaves = {n: x.double().requires_grad_() if x.is_floating_point() else x for n, x in first.items()}
    o = _output(case.operation(*leaves.values(), **case.options, backend="chunked"))
    wanted = {n: x for n, x in leaves.items() if x.requires_grad}
    found = torch.autograd.grad(o, list(wanted.values()), do[:1].double())
    return {"o": o.detach()} | dict(zip(wanted, found, strict=True))


def _errors(case: Case, leaves: Tensors, o: Any, found: Any, exact: Tensors) -> dict[str, Any]:
    """Gradients of what has no batch axis sum over it, so they are left out here; tests bound them."""

    def error(x: Any, reference: Any) -> float:
        size = reference.norm()
        return float((x.double() - reference).norm() / size) if size > 0 else float(x.double().norm())

    names = [n for n, x in leaves.items() if x.requires_grad]
    gradients = {n: error(g[:1], exact[n]) for n, g in zip(names, found, strict=True) if g is not None and n not in case.fixed}
    worst = max(gradients, key=lambda n: gradients[n])
    return {"error o": error(o[:1], exact["o"]), "error gradients": gradients[worst], "worst": f"d {worst}"}


def _sized(B: int, T: int, H: int, K: int, V: int, *, seed: int, unit: bool = False) -> Tensors:
    """q, k, v in bfloat16; a decay and a write strength a token and head in float32."""
    import torch
    import torch.nn.functional as F

    generator = torch.Generator("cuda").manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=generator, device="cuda")  # noqa: E731
    q, k = normal(B, T, H, K), normal(B, T, H, K)
    if unit:
        q, k = F.normalize(F.silu(q), dim=-1), F.normalize(F.silu(k), dim=-1)
    gates = {"log_decay": F.logsigmoid(normal(B, T, H) + 3), "beta": torch.sigmoid(normal(B, T, H))}
    return {"q": q.bfloat16(), "k": k.bfloat16(), "v": normal(B, T, H, V).bfloat16(), **gates}


def _matrix_work(B: int, T: int, H: int, K: int, V: int, products: float) -> dict[str, float]:
    """bfloat16 in and out once forward, and backward inputs, the output's gradient and four gradients; `products` a token and head, forward."""
    tokens = B * T * H
    forward, backward = 2 * (2 * K + 2 * V) + 8, 2 * (2 * K + 2 * V) + 8 + 2 * (2 * K + V) + 8
    return {"bytes": tokens * (forward + backward), "products": 3 * tokens * products}


def _peer(module: str, name: str, call: Callable[[Call], Call]) -> dict[str, Call]:
    """{name: call} where the peer's package is installed."""
    import importlib

    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return {}
    import importlib.metadata as metadata

    return {f"fla-core {metadata.version('fla-core')} {name}": call(function)}


def _linear() -> Iterator[Case]:
    import torch.nn.functional as F

    from kernels.linear_attention import linear_attention

    B, T, H, K = 8, 2048, 16, 128

    def make(seed: int) -> Tensors:
        given = _sized(B, T, H, K, K, seed=seed)
        return {n: given[n] for n in ("q", "k", "v", "log_decay")}

    def sdpa(q: Any, k: Any, v: Any, log_decay: Any) -> Any:
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)

    peers = {"torch SDPA, causal": sdpa}
    peers |= _peer("fla.ops.simple_gla", "chunk_simple_gla", lambda f: lambda q, k, v, log_decay: f(q, k, v, g=log_decay, scale=K**-0.5))
    call = lambda q, k, v, log_decay: linear_attention(q, k, v, log_decay, scale=K**-0.5)  # noqa: E731
    work = _matrix_work(B, T, H, K, K, 2 * CHUNK * (K + K) + 4 * K * K)
    yield Case("linear_attention", f"B{B} T{T} H{H} {K}x{K}", make, call, linear_attention, {"scale": K**-0.5}, peers, work, target_ms=0.8)


def _delta() -> Iterator[Case]:
    from kernels.delta_rule import delta_rule

    B, T, H, K = 8, 2048, 16, 128
    work = _matrix_work(B, T, H, K, K, 2 * CHUNK * (3 * K + 2 * K) + 6 * K * K)
    for gated in (False, True):

        def make(seed: int, gated: bool = gated) -> Tensors:
            given = _sized(B, T, H, K, K, seed=seed, unit=True)
            return {n: given[n] for n in ("q", "k", "v", "beta", *(["log_decay"] if gated else []))}

        if gated:
            peers = _peer(
                "fla.ops.gated_delta_rule",
                "chunk_gated_delta_rule",
                lambda f: lambda q, k, v, beta, log_decay: f(q, k, v, log_decay, beta, scale=1.0),
            )
        else:
            peers = _peer("fla.ops.delta_rule", "chunk_delta_rule", lambda f: lambda q, k, v, beta: f(q, k, v, beta, scale=1.0))
        name = "delta_rule with decay" if gated else "delta_rule"
        yield Case(name, f"B{B} T{T} H{H} {K}x{K}", make, delta_rule, delta_rule, {}, peers, work, target_ms=1.6)


def _mesa() -> Iterator[Case]:
    from benchmarks.inputs import MESA
    from benchmarks.inputs import mesa as make_inputs
    from kernels.mesa import mesa

    B, T, H, K = 32, 2048, 6, 128
    tokens = B * T * H
    peers = _peer(
        "fla.ops.mesa_net",
        "chunk_mesa_net",
        lambda f: lambda q, k, v, log_decay, beta, lam: f(q, k, v, log_decay, beta, lam, max_CG_iteration=CAP),
    )
    for kind, target in zip(MESA, (5.5, 7.0, 12.0, 12.0), strict=True):

        def make(seed: int, kind: str = kind) -> Tensors:
            return make_inputs(kind, B, T, H, K, seed=seed, device="cuda")

        def call(eps: float) -> Call:
            return lambda q, k, v, log_decay, beta, lam: mesa(q, k, v, log_decay, beta, lam, steps=CAP, eps=eps)

        # Bytes: as linear attention's, and G and H at each chunk's start in float32, written and read forward, read backward with their gradients.
        states = tokens / CHUNK * 4 * 2 * K * K * 5
        bytes_ = _matrix_work(B, T, H, K, K, 0)["bytes"] + states
        step = 2 * (2 * CHUNK * K + K * K)  # a matrix-vector product of one token, forward or backward
        for eps, steps in ((1e-4, 6), (0.0, CAP)):
            if eps == 0.0 and kind != "mixed":
                continue
            products = tokens * (2 * steps * step + 3 * (2 * CHUNK * 4 * K + 8 * K * K))
            what = "eps 1e-4" if eps else f"eps 0, at most {CAP} steps"
            yield Case(
                f"mesa {kind}", f"B{B} T{T} H{H} {K}x{K}, {what}", make, call(eps), mesa, {"steps": 200, "eps": 0.0}, peers if eps else {},
                {"bytes": bytes_, "products": products}, fixed=("lam",), target_ms=target if eps else None,
            )  # fmt: skip


def _palimpsa() -> Iterator[Case]:
    import torch

    from kernels.palimpsa import palimpsa

    B, T, H, K, V = 8, 2048, 16, 96, 192

    def make(seed: int) -> Tensors:
        generator = torch.Generator("cuda").manual_seed(seed)
        given = _sized(B, T, H, K, V, seed=seed, unit=True)
        beta = torch.sigmoid(torch.randn(B, T, H, V, generator=generator, device="cuda"))
        prior = torch.full((H,), 1.0, device="cuda")
        return {n: given[n] for n in ("q", "k", "v")} | {"beta": beta, "log_decay": given["log_decay"], "prior": prior}

    entries = B * T * H * K * V
    work = {"bytes": B * T * H * (4 * (2 * K + 2 * V) + 4 * 3 * V + 2 * (2 * K + V)), "special": 2 * entries}
    yield Case("palimpsa", f"B{B} T{T} H{H} {K}x{V}", make, palimpsa, palimpsa, {}, {}, work, fixed=("prior",), target_ms=9.0)


def _rg_lru() -> Iterator[Case]:
    import torch
    import torch.nn.functional as F

    from kernels.rg_lru import rg_lru

    B, T = 8, 2048
    for D in (2048, 1920, 1280, 960):

        def make(seed: int, D: int = D) -> Tensors:
            generator = torch.Generator("cuda").manual_seed(seed)
            normal = lambda *shape: torch.randn(*shape, generator=generator, device="cuda")  # noqa: E731
            return {"x": normal(B, T, D).bfloat16(), "log_a": F.logsigmoid(normal(B, T, D) + 3)}

        peers = _peer("fla.ops.hgrn", "chunk_hgrn", lambda f: lambda x, log_a: f(x, log_a))
        # x, log_a in and h out; do, h, log_a in and dx, dlog_a out.
        yield Case("rg_lru", f"B{B} T{T} {D}", make, rg_lru, rg_lru, {}, peers, {"bytes": B * T * D * (8 + 14)}, target_ms=0.5 * D / 2048)
