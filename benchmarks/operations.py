"""What `python -m benchmarks kernels` measures: each operation at one size, its inputs, the peers that are installed, and the work it cannot do without.

Shapes: B batch, T time, H heads, K key size, V value size, D channels, N tokens.
"""

from __future__ import annotations

import importlib
import importlib.metadata as metadata
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks import inputs

CHUNK = 64
CAP = 30

Tensors = dict[str, Any]
Call = Callable[..., Any]
Work = dict[str, float]
"""bytes, FLOPs of products, special functions."""


@dataclass(frozen=True)
class Case:
    """One operation at one size: how to make inputs, how to call ours, what to compare with, and what it cannot do without.

    make: -> tensors by argument name, in order. call: those -> o, or (o, state), or (o, state, info). exact: the same in float64, as good as float64 goes.
    peers: calls by name. forward, both: the least work, of the forward pass and of both. fixed: inputs without a batch axis.
    whole: compare the whole batch, not its first sequence. target_ms: of both passes. compiles_as: cases of the same one share all that is compiled.
    """

    name: str
    size: str
    make: Callable[[], Tensors]
    call: Call
    exact: Call
    forward: Work
    both: Work
    peers: dict[str, Call] = field(default_factory=dict)
    fixed: tuple[str, ...] = ()
    whole: bool = False
    target_ms: float | None = None
    compiles_as: str = ""


def cases(device: str = "cuda", *, small: bool = False) -> Iterator[Case]:
    """All of them. small: sizes that a CPU computes in a moment."""
    for family in (_attention, _linear, _delta, _mesa, _mlstm, _palimpsa, _rg_lru, _convolution, _head_loss):
        yield from family(device, small)


def _random(device: str, seed: int = 0) -> Callable[..., Any]:
    """Standard normal numbers of a shape."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator, device=device)


def _heads(device: str, B: int, T: int, H: int, K: int, V: int, *, unit: bool = False) -> Tensors:
    """q, k, v in bfloat16; a decay and a write strength a token and head in float32."""
    import torch
    import torch.nn.functional as F

    normal = _random(device)
    q, k = normal(B, T, H, K), normal(B, T, H, K)
    if unit:
        q, k = F.normalize(F.silu(q), dim=-1), F.normalize(F.silu(k), dim=-1)
    gates = {"log_decay": F.logsigmoid(normal(B, T, H) + 3), "beta": torch.sigmoid(normal(B, T, H))}
    return {"q": q.bfloat16(), "k": k.bfloat16(), "v": normal(B, T, H, V).bfloat16(), **gates}


def _only(make: Callable[..., Tensors], names: tuple[str, ...], *sizes: Any, **options: Any) -> Tensors:
    given = make(*sizes, **options)
    return {name: given[name] for name in names}


def _matrix_work(B: int, T: int, H: int, K: int, V: int, products: float, *, gates: int = 2) -> tuple[Work, Work]:
    """bfloat16 in and out once forward, and backward inputs, the output's gradient and the inputs' gradients; gates in float32; `products` a token and head, forward."""
    tokens = B * T * H
    given = 2 * (2 * K + V) + 4 * gates
    return {"bytes": tokens * (given + 2 * V), "products": tokens * products}, {
        "bytes": tokens * (3 * given + 4 * V), "products": 3 * tokens * products
    }  # fmt: skip


def _peer(module: str, name: str, call: Callable[[Call], Call]) -> dict[str, Call]:
    """{name: call} where fla-core is installed."""
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return {}
    return {f"fla-core {metadata.version('fla-core')} {name}": call(function)}


def _size(B: int, T: int, H: int, K: int, V: int | None = None) -> str:
    return f"B{B} T{T} H{H} {K}x{V or K}"


def _attention(device: str, small: bool) -> Iterator[Case]:
    """torch's own SDPA, which is what we take: what the others stand beside."""
    from kernels.attention import attention

    B, T, H, K = (2, 70, 2, 16) if small else (8, 2048, 16, 128)
    make = partial(_only, _heads, ("q", "k", "v"), device, B, T, H, K, K)
    forward, both = _matrix_work(B, T, H, K, K, 2 * T / 2 * 2 * K, gates=0)
    both["products"] = 3.5 * forward["products"]  # the scores once more
    yield Case("attention, causal", _size(B, T, H, K), make, attention, partial(attention, backend="reference"), forward, both)


def _linear(device: str, small: bool) -> Iterator[Case]:
    from kernels.linear_attention import linear_attention

    B, T, H, K = (2, 70, 2, 16) if small else (8, 2048, 16, 128)

    peers = _peer("fla.ops.simple_gla", "chunk_simple_gla", lambda f: lambda q, k, v, log_decay: f(q, k, v, g=log_decay, scale=K**-0.5))
    make = partial(_only, _heads, ("q", "k", "v", "log_decay"), device, B, T, H, K, K)
    run = partial(linear_attention, scale=K**-0.5)
    work = _matrix_work(B, T, H, K, K, 2 * CHUNK * (K + K) + 4 * K * K, gates=1)
    yield Case("linear_attention", _size(B, T, H, K), make, run, partial(run, backend="chunked"), *work, peers, target_ms=0.8)


def _delta(device: str, small: bool) -> Iterator[Case]:
    from kernels.delta_rule import delta_rule

    B, T, H, K = (2, 70, 2, 16) if small else (8, 2048, 16, 128)
    products = 2 * CHUNK * (3 * K + 2 * K) + 6 * K * K
    kinds = {
        "delta_rule": _peer("fla.ops.delta_rule", "chunk_delta_rule", lambda f: lambda q, k, v, beta: f(q, k, v, beta, scale=1.0)),
        "delta_rule with decay": _peer(
            "fla.ops.gated_delta_rule", "chunk_gated_delta_rule",
            lambda f: lambda q, k, v, beta, log_decay: f(q, k, v, log_decay, beta, scale=1.0),
        ),
    }  # fmt: skip
    for name, peers in kinds.items():
        given = ("q", "k", "v", "beta", *(["log_decay"] if "decay" in name else []))
        make = partial(_only, _heads, given, device, B, T, H, K, K, unit=True)
        work = _matrix_work(B, T, H, K, K, products, gates=len(given) - 3)
        yield Case(name, _size(B, T, H, K), make, delta_rule, partial(delta_rule, backend="chunked"), *work, peers, target_ms=1.6)


def _mesa(device: str, small: bool) -> Iterator[Case]:
    """At eps 1e-4; and CAP steps of every token, by products of half precision and by split ones."""
    from kernels.mesa import mesa

    B, T, H, K = (2, 70, 2, 16) if small else (32, 2048, 6, 128)
    split = _split(device)
    peers = _peer(
        "fla.ops.mesa_net",
        "chunk_mesa_net",
        lambda f: lambda q, k, v, log_decay, beta, lam: f(q, k, v, log_decay, beta, lam, max_CG_iteration=CAP),
    )

    def case(kind: str, what: str, call: Call, steps: int, precision: int, target: float | None, others: dict[str, Call]) -> Case:
        tokens = B * T * H
        # As linear attention; and G and H at each chunk's start, 4 bytes a number, written and read forward, read backward, and their gradients so.
        states = tokens / CHUNK * 4 * 2 * K * K
        step = 2 * (2 * CHUNK * K + K * K)  # a matrix-vector product of one token
        pass_ = 2 * CHUNK * 4 * K + 8 * K * K
        forward, both = _matrix_work(B, T, H, K, K, 0)
        forward = {"bytes": forward["bytes"] + 2 * states, "products": tokens * (precision * steps * step + pass_)}
        both = {"bytes": both["bytes"] + 5 * states, "products": tokens * (2 * precision * steps * step + 3 * pass_)}
        make = partial(inputs.mesa, kind, B, T, H, K, device=device)
        exact = partial(mesa, steps=200, eps=0.0, backend="chunked")
        return Case(
            f"mesa {kind}, {what}",
            _size(B, T, H, K),
            make,
            call,
            exact,
            forward,
            both,
            others,
            ("lam",),
            False,
            target,
            f"mesa {precision}",
        )

    for kind, steps, target in zip(inputs.MESA, (6, 9, 15, 8), (5.5, 7.0, 12.0, 12.0), strict=True):
        yield case(kind, "eps 1e-4", partial(mesa, steps=CAP, eps=1e-4), steps, 1, target, peers)
    yield case("long", f"{CAP} steps", partial(mesa, steps=CAP, eps=0.0), CAP, 1, 11.0, peers)
    yield case("long", f"{CAP} steps, split", partial(split, steps=CAP, eps=0.0), CAP, 3, 20.0, {})
    yield case("mixed", "eps 1e-4, split", partial(split, steps=CAP, eps=1e-4), 6, 3, None, {})


def _split(device: str) -> Call:
    """Mesa with products in high and low parts throughout, which only its kernel has."""
    from kernels.mesa import mesa

    if device == "cpu":
        return mesa
    from kernels.mesa import triton

    return partial(
        triton.mesa, precision="split", criterion="b", solve=True, start="jacobi", gradient="implicit", sign=None, state=None, segments=None
    )


def _mlstm(device: str, small: bool) -> Iterator[Case]:
    import torch

    from kernels.mlstm import mlstm

    B, T, H, K = (2, 70, 2, 16) if small else (8, 2048, 16, 128)

    def make() -> Tensors:
        given = _heads(device, B, T, H, K, K)
        log_input = 3 * _random(device, 1)(B, T, H)
        q, k = (given[name].abs() / K**0.5 for name in ("q", "k"))  # n . q that cancels would measure rounding
        return {
            "q": q.to(torch.bfloat16),
            "k": k.to(torch.bfloat16),
            "v": given["v"],
            "log_input": log_input,
            "log_decay": given["log_decay"],
        }

    work = _matrix_work(B, T, H, K, K, 2 * CHUNK * (K + K) + 4 * K * K)
    yield Case("mlstm", _size(B, T, H, K), make, mlstm, partial(mlstm, backend="chunked"), *work)


def _palimpsa(device: str, small: bool) -> Iterator[Case]:
    import torch

    from kernels.palimpsa import palimpsa

    B, T, H, K, V = (2, 40, 2, 16, 24) if small else (8, 2048, 16, 96, 192)

    def make() -> Tensors:
        given = _heads(device, B, T, H, K, V, unit=True)
        beta = torch.sigmoid(_random(device, 1)(B, T, H, V))
        prior = torch.full((H,), 1.0, device=device)
        return {n: given[n] for n in ("q", "k", "v")} | {"beta": beta, "log_decay": given["log_decay"], "prior": prior}

    tokens = B * T * H
    given = 2 * (2 * K + V) + 4 * V + 4
    forward = {"bytes": tokens * (given + 2 * V), "special": tokens * K * V}
    both = {"bytes": tokens * (3 * given + 4 * V), "special": 2 * tokens * K * V}
    exact = partial(palimpsa, backend="chunked")
    yield Case("palimpsa", _size(B, T, H, K, V), make, palimpsa, exact, forward, both, fixed=("prior",), target_ms=9.0)


def _rg_lru(device: str, small: bool) -> Iterator[Case]:
    import torch.nn.functional as F

    from kernels.rg_lru import rg_lru

    B, T = (2, 70) if small else (8, 2048)
    peers = _peer("fla.ops.hgrn", "chunk_hgrn", lambda f: lambda x, log_a: f(x, log_a))
    for D in (48,) if small else (2048, 1920, 1280, 960):

        def make(D: int = D) -> Tensors:
            normal = _random(device)
            return {"x": normal(B, T, D).bfloat16(), "log_a": F.logsigmoid(normal(B, T, D) + 3)}

        # x, log_a in and h out; do, h, log_a in and dx, dlog_a out.
        forward, both = {"bytes": B * T * D * 8}, {"bytes": B * T * D * (8 + 14)}
        yield Case(
            "rg_lru", f"B{B} T{T} {D}", make, rg_lru, partial(rg_lru, backend="chunked"), forward, both, peers, target_ms=0.5 * D / 2048
        )


def _convolution(device: str, small: bool) -> Iterator[Case]:
    import torch.nn.functional as F

    from kernels.convolution import short_convolution

    B, T, D, H = (2, 70, 32, 2) if small else (32, 2048, 1536, 12)
    W = 4

    def make() -> Tensors:
        normal = _random(device)
        return {"x": normal(B, T, D).bfloat16(), "weight": normal(W, D) / 2}

    def torchs(x: Any, weight: Any) -> Any:
        y = F.conv1d(x.transpose(1, 2), weight.T[:, None].to(x.dtype), padding=W - 1, groups=D)[..., :T]
        return F.silu(y).transpose(1, 2)

    peers = {"torch conv1d, SiLU": torchs}
    peers |= _peer(
        "fla.modules.causal_conv1d", "causal_conv1d", lambda f: lambda x, weight: f(x, weight.T.to(x.dtype).contiguous(), activation="silu")
    )
    forward, both = {"bytes": B * T * D * 4, "special": B * T * D}, {"bytes": B * T * D * (4 + 6), "special": 2 * B * T * D}
    for name, heads, others in (("convolution, SiLU", None, peers), ("convolution, SiLU, unit heads", H, {})):
        run = partial(short_convolution, silu=True, heads=heads)
        exact = partial(run, backend="chunked")
        yield Case(name, f"B{B} T{T} {D}", make, run, exact, forward, both, others, fixed=("weight",))


def _head_loss(device: str, small: bool) -> Iterator[Case]:
    import torch

    from kernels.head_loss import SOFT_CAP, head_loss

    for N, D, V in ((40, 16, 100),) if small else ((16384, 1536, 50257), (16384, 768, 50257)):

        def make(N: int = N, D: int = D, V: int = V) -> Tensors:
            normal = _random(device)
            target = torch.randint(0, V, (N,), device=device, generator=torch.Generator(device).manual_seed(2))
            weight = torch.full((N,), 1.0 / N, device=device)
            return {"x": normal(N, D).bfloat16(), "embedding": normal(V, D) / D**0.5, "target": target, "weight": weight}

        def over(backend: str | None) -> Call:
            return lambda x, embedding, target, weight: head_loss(x, embedding, target, weight.detach(), backend=backend)[0]

        def exact(x: Any, embedding: Any, target: Any, weight: Any) -> Any:
            rounded = embedding + (embedding.bfloat16() - embedding).detach()
            logits = SOFT_CAP * torch.tanh(x @ rounded.T / SOFT_CAP)
            return (torch.nn.functional.cross_entropy(logits, target, reduction="none") * weight.detach()).sum()

        product, given = 2 * N * D * V, N * D * 2 + V * D * 4
        forward, both = (
            {"bytes": given, "products": product, "special": 2 * N * V},
            {"bytes": 2 * given, "products": 3 * product, "special": 2 * N * V},
        )
        yield Case(
            "head_loss", f"N{N} D{D} V{V}", make, over(None), exact, forward, both, {"torch, all logits": over("reference")}, whole=True
        )
