"""One token from its projections to what a recurrence takes, as one Triton kernel: queries and keys convolved, activated and of unit length, values, gates.

    z = sum_j weight_j x_{t-W+1+j};  q = silu(z) / |silu(z)|        log gamma = log sigmoid(forget) + log(1 - (1 - bound) beta^2),  beta = sigmoid(write)

The convolutions' states are written over those before. The formulas are those of `kernels.convolution` and of the layers' gates.

Shapes: B batch, H heads, K key size, V value size, D = H K channels, W window, X width of the stream; a program has G heads of one sequence.
"""

import torch
import triton
import triton.language as tl

from kernels.convolution.chunked import EPSILON, State
from kernels.launch import divide_up, early, launch
from kernels.rows import scale


def heads(
    projected: torch.Tensor, x_BX: torch.Tensor, weights: tuple[torch.Tensor, torch.Tensor], states: tuple[State, State], bias: torch.Tensor, *,
    H: int, K: int, V: int, bound: float, epsilon: float, scaled: bool = False,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """q, k [B, H, K], v [B, H, V] in x's dtype, log_decay and beta [B, H] in float32.

    projected [B, D + D + H V + 2 H parts], float32: queries, keys, values, and the gates before their biases, (forget, write) [2, H] once or in several
    parts to be added up; all of the stream x as it is, to be divided by its root mean square
    here, or `scaled` already. weights: of the convolutions on queries and keys,
    [W, D]. states: theirs, in place. bias [2, H] float32.
    """
    (B, columns), X = projected.shape, x_BX.shape[1]
    assert len(weights[0]) <= 4
    parts, rest = divmod(columns - 2 * H * K - H * V, 2 * H)
    assert rest == 0 and all(x.is_contiguous() for x in (projected, *weights, bias, *states[0], *states[1]))
    new = x_BX.new_empty
    q, k, v = new((B, H, K)), new((B, H, K)), new((B, H, V))
    log_decay, beta = new((B, H), dtype=torch.float32), new((B, H), dtype=torch.float32)
    G = 1 if B * H <= 1056 else 4
    launch(
        _heads, (divide_up(H, G), B), projected, None if scaled else x_BX, *weights, *states[0], *states[1], bias, q, k, v, log_decay, beta, float(bound), float(epsilon),
        H=H, K=K, V=V, X=X, G=G, BK=triton.next_power_of_2(K), BV=triton.next_power_of_2(V), BX=triton.next_power_of_2(X), W=len(weights[0]),
        PARTS=parts, EPSILON=EPSILON, EARLY=early(), warps=G, early=early(),
    )  # fmt: skip
    return q, k, v, log_decay, beta


@triton.jit
def _past(past, channel_GK, there_GK, D: tl.constexpr, W: tl.constexpr):
    """The three inputs before, last first; zeros where the window is shorter."""
    a_1 = tl.load(past + (W - 2) * D + channel_GK, mask=there_GK & (W > 1), other=0.0)
    a_2 = tl.load(past + (W - 3) * D + channel_GK, mask=there_GK & (W > 2), other=0.0)
    a_3 = tl.load(past + (W - 4) * D + channel_GK, mask=there_GK & (W > 3), other=0.0)
    return a_1, a_2, a_3


@triton.jit
def _convolved(x_GK, a_1, a_2, a_3, weight, past, channel_GK, there_GK, D: tl.constexpr, W: tl.constexpr, EPSILON: tl.constexpr):
    """past: the inputs before, shifted by one."""
    w_0 = tl.load(weight + (W - 1) * D + channel_GK, mask=there_GK, other=0.0).to(tl.float32)
    w_1 = tl.load(weight + (W - 2) * D + channel_GK, mask=there_GK & (W > 1), other=0.0).to(tl.float32)
    w_2 = tl.load(weight + (W - 3) * D + channel_GK, mask=there_GK & (W > 2), other=0.0).to(tl.float32)
    w_3 = tl.load(weight + (W - 4) * D + channel_GK, mask=there_GK & (W > 3), other=0.0).to(tl.float32)
    z_GK = w_0 * x_GK + w_1 * a_1.to(tl.float32) + w_2 * a_2.to(tl.float32) + w_3 * a_3.to(tl.float32)
    tl.store(past + (W - 2) * D + channel_GK, x_GK.to(past.dtype.element_ty), mask=there_GK & (W > 1))
    tl.store(past + (W - 3) * D + channel_GK, a_1, mask=there_GK & (W > 2))
    tl.store(past + (W - 4) * D + channel_GK, a_2, mask=there_GK & (W > 3))
    z_GK *= tl.sigmoid(z_GK)
    return z_GK * tl.rsqrt(tl.sum(z_GK * z_GK, 1) + EPSILON * EPSILON)[:, None]


@triton.jit
def _heads(
    projected, x, q_weight, k_weight, q_past, q_segment, k_past, k_segment, bias, q, k, v, log_decay, beta, bound, epsilon,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, X: tl.constexpr, G: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BX: tl.constexpr,
    W: tl.constexpr, PARTS: tl.constexpr, EPSILON: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    b = tl.program_id(1).to(tl.int64)
    D: tl.constexpr = H * K
    h_G, i_K, j_V, i_X = tl.program_id(0) * G + tl.arange(0, G), tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, BX)
    there_G = h_G < H
    there_GK, there_GV = there_G[:, None] & (i_K < K)[None, :], there_G[:, None] & (j_V < V)[None, :]
    channel_GK, channel_GV = h_G[:, None] * K + i_K[None, :], h_G[:, None] * V + j_V[None, :]
    # Everything is asked for before anything is stored: a load does not pass a store.
    q_past += b * (W - 1) * D
    k_past += b * (W - 1) * D
    q_before, k_before = _past(q_past, channel_GK, there_GK, D, W), _past(k_past, channel_GK, there_GK, D, W)
    row = projected + b * (2 * D + H * V + 2 * H * PARTS)
    q_GK = tl.load(row + channel_GK, mask=there_GK, other=0.0)
    k_GK = tl.load(row + D + channel_GK, mask=there_GK, other=0.0)
    v_GV = tl.load(row + 2 * D + channel_GV, mask=there_GV, other=0.0)
    factor = 1.0
    if x is not None:
        factor = scale(tl.load(x + b * X + i_X, mask=i_X < X, other=0.0), X, epsilon)
    gate = row + 2 * D + H * V + h_G
    forget_G, write_G = tl.zeros((G,), tl.float32), tl.zeros((G,), tl.float32)
    for part in tl.static_range(PARTS):
        forget_G += tl.load(gate + part * 2 * H, mask=there_G, other=0.0)
        write_G += tl.load(gate + part * 2 * H + H, mask=there_G, other=0.0)
    forget_G = factor * forget_G + tl.load(bias + h_G, mask=there_G, other=0.0)
    write_G = factor * write_G + tl.load(bias + H + h_G, mask=there_G, other=0.0)
    q_GK = _convolved(factor * q_GK, *q_before, q_weight, q_past, channel_GK, there_GK, D, W, EPSILON)
    k_GK = _convolved(factor * k_GK, *k_before, k_weight, k_past, channel_GK, there_GK, D, W, EPSILON)
    to = b * D
    tl.store(q + to + channel_GK, q_GK.to(q.dtype.element_ty), mask=there_GK)
    tl.store(k + to + channel_GK, k_GK.to(k.dtype.element_ty), mask=there_GK)
    tl.store(v + b * H * V + channel_GV, (factor * v_GV).to(v.dtype.element_ty), mask=there_GV)
    strength_G = tl.sigmoid(write_G)
    kept_G = tl.minimum(forget_G, 0.0) - tl.log(1 + tl.exp(-tl.abs(forget_G))) + tl.log(1 - (1 - bound) * strength_G * strength_G)
    tl.store(log_decay + b * H + h_G, kept_G, mask=there_G)
    tl.store(beta + b * H + h_G, strength_G, mask=there_G)
    if tl.program_id(0) == 0:
        tl.store(q_segment + b, tl.maximum(tl.load(q_segment + b), 0))
        tl.store(k_segment + b, tl.maximum(tl.load(k_segment + b), 0))
