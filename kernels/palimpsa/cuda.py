"""Palimpsa's two large kernels for bfloat16, in CUDA C (`outputs.cu`, `gradients.cu`): how they are started.

Shapes: B batch, T time, H heads, K key size, V value size, N chunks. numbers [B H, blocks, K, (k, k^2 / 2, q), S], gates [B H, blocks, 4, S]: of blocks of
the kernel's S tokens, see `spread_kernel` in triton.py.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kernels import launch, nvrtc

S = 16
"""Tokens of a block: as many as a thread's registers hold what the gradients need of."""
NUMBERS = 3
DEEP = -8.0
"""Log decay of a chunk's two blocks together down to which gradients take tokens out of the states again: exp(8) of float32's digits at most."""
SHARED, RESERVED = 228 * 1024, 1024  # bytes of an H100's or H200's processor, and of them for each program


def refusal(shape: dict[str, int], dtype: str, device: str) -> str | None:
    """Why neither Triton nor CUDA C runs; None where they do."""
    reason = launch.refusal(shape, dtype, device)
    if reason is None and dtype == "bfloat16":
        if max(shape["K"], shape["V"]) > 256:
            return f"its kernels hold the states of 32 values on chip: key and value sizes of 256 at most, these are {shape['K']} and {shape['V']}"
        return nvrtc.refusal() if device == "cuda" else None
    return reason


def outputs(numbers, gates, v, beta, M, J, M_starts, J_starts, M_last, J_last, o, *, scale: float, chunk: int) -> None:
    """Writes o [B, T, H, V], the states at chunks [B, H, N + 1, K, V], whose last one is behind all tokens, and M_last, J_last [B, H, K, V]."""
    v, beta = (aligned(x) for x in (v, beta))
    given = (numbers, gates, v, beta, M, J, M_starts, J_starts, M_last, J_last, o, scale, v.shape[1], M_starts.shape[2] - 1, gates.shape[1])

    def shared(K: int, groups: int, at_hand: int) -> int:  # blocks of gates, numbers and values, or else shares of o; states
        return 4 * (at_hand * (4 * S + max(NUMBERS * K * S + 48 * S, groups * S * 32)) + 2 * K * 32)

    _launch("outputs", v, M.shape[2], chunk, shared, ((3, 4, 2), (2, 6, 2), (1, 12, 2)), *given)


def gradients(
    numbers, gates, v, beta, prior, M_starts, J_starts, do, P, Q, shares, dv, dbeta, dlog_decay, dprior, *, scale: float, chunk: int
) -> None:
    """As `gradients_kernel` in triton.py: shares of dq and dk [V / 32, B H, blocks, K, 2, S], of dlog_decay [V / 32, B, T, H] and of dprior
    [V / 32, B, H]; P, Q [B, H, K, V] are the gradients of the last state before, of the first one afterwards."""
    B, T, H, _ = v.shape
    v, beta, do = (aligned(x) for x in (v, beta, do))
    arrays = (numbers, gates, v, beta, prior, M_starts, J_starts, do, P, Q, shares, dv, dbeta, dlog_decay, dprior)

    def shared(
        K: int, groups: int, at_hand: int
    ) -> int:  # blocks of gates, numbers and values; states, their gradients; sums of a warp; shares
        return 4 * (at_hand * (4 * S + NUMBERS * K * S + 64 * S) + 4 * K * 32 + groups * 2 * 9 * S + groups * 2 * S * 32)

    ways = ((2, 4, 2), (1, 8, 2), (1, 8, 1))
    _launch("gradients", v, P.shape[2], chunk, shared, ways, *arrays, scale, T, M_starts.shape[2] - 1, gates.shape[1], B * H)


def shared_memory(x: Any) -> int:
    """Bytes that a processor of the GPU that x lies on has."""
    import torch

    return (
        torch.cuda.get_device_properties(x.device).shared_memory_per_multiprocessor if x.is_cuda and torch.cuda.is_available() else SHARED
    )


def aligned(x: Any) -> Any:
    """x, or a copy of it where it begins within 16 bytes, which are copied at once."""
    return x.clone() if x.storage_offset() * x.element_size() % 16 else x


def _launch(
    name: str,
    v: Any,
    K: int,
    chunk: int,
    shared: Callable[[int, int, int], int],
    ways: tuple[tuple[int, int, int], ...],
    *arguments,
) -> None:
    """ways: programs of a processor, so many as threads have the registers that they need; warps of each, all with the same 32 values and a group of
    keys each; blocks at hand, one at work and one on its way. The first that there is shared memory for. ValueError where there is too little."""
    B, _, H, V = v.shape
    has = shared_memory(v)
    fitting = [x for x in ways if x[0] * (shared(K, *x[1:]) + RESERVED) <= has]
    if not fitting:
        needed = min(x[0] * (shared(K, *x[1:]) + RESERVED) for x in ways)
        raise ValueError(
            f"palimpsa in bfloat16 with keys of {K} needs {needed} bytes of a processor's shared memory, this GPU has {has}: "
            'choose another backend ("chunked") or float32.'
        )
    programs, groups, at_hand = fitting[0]
    constants = dict(H=H, K=K, V=V, S=S, C=chunk, GROUPS=groups, RESIDENT=programs, AT_HAND=at_hand)
    source = Path(__file__).parent / f"{name}.cu"
    nvrtc.launch(source, name, (launch.divide_up(V, 32), B * H), 32 * groups, shared(K, groups, at_hand), *arguments, **constants)
