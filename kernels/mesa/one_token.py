"""Mesa's one-token step in Triton: G and H read and written once, the solve with H in registers, all in float32.

No host read and no shape that depends on data, so it can be captured in a CUDA graph.

Shapes: B batch, H heads, K key size, V value size.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from kernels import arrays, segmentation
from kernels.launch import after, launch
from kernels.mesa.reference import State, fresh
from kernels.mesa.triton import tile

Array = Any  # torch.Tensor
SMALLEST = tl.constexpr(2**-23)  # a residual that counts as 0


def step(
    q, k, v, log_decay, beta, lam, *, sign=None, steps=30, eps=0.0, criterion="b", solve=True, start="jacobi", state=None, segment_B=None,
) -> tuple[Array, State, dict[str, Array]]:  # fmt: skip
    """See `kernels.mesa.step`."""
    if segment_B is not None:
        segmentation.check(segment_B, arrays.of(segment_B))
        segment_B = segment_B.contiguous()
    state = fresh(q, v) if state is None else state
    q, k, v, G, S, last = (x.contiguous() for x in (q, k, v, *state))
    log_decay, beta, lam, sign = (None if x is None else x.float().contiguous() for x in (log_decay, beta, lam, sign))
    (B, H, K), V = q.shape, v.shape[-1]
    end = State(after(G), after(S), torch.empty_like(last))
    o, taken, residual = torch.empty_like(v), q.new_empty((B, H), dtype=torch.int32), torch.empty_like(beta)
    launch(
        advance, (B * H,), q, k, v, log_decay, beta, sign, lam, G, S, segment_B, last, o, *end, taken, residual,
        H, steps if solve else 0, float(eps),
        K=K, V=V, BK=tile(K), BV=tile(V), START=start if solve else "query", CRITERION=criterion, warps=8 if K > 64 else 4, stages=1,
    )  # fmt: skip
    return o, end, {"steps": taken, "residual": residual}


@triton.jit
def times(S_KK, x_K):
    """S x for a symmetric S."""
    return tl.sum(S_KK * x_K[:, None], 0)


@triton.jit(do_not_specialize=["H", "steps"])
def advance(
    q, k, v, log_decay, beta, sign, lam, G, S, segment, last, o, G_end, S_end, last_end, taken, residual,
    H, steps, eps,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, START: tl.constexpr, CRITERION: tl.constexpr,
):  # fmt: skip
    """One head of one sequence. S is H, the matrix; START "query" reads with q itself."""
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // H, bh % H
    i_K, j_V = tl.arange(0, BK), tl.arange(0, BV)
    real_K, real_V = i_K < K, j_V < V
    real_KK, real_KV = real_K[:, None] & real_K[None, :], real_K[:, None] & real_V[None, :]
    S_KK = tl.load(S + bh * K * K + i_K[:, None] * K + i_K[None, :], mask=real_KK, other=0.0)

    id = tl.load(last + b)
    keep = tl.exp(tl.load(log_decay + bh))
    if sign is not None:
        keep *= tl.load(sign + bh)
    write = tl.load(beta + bh)
    padding = False
    if segment is None:
        id = tl.maximum(id, 0)
    else:
        own = tl.load(segment + b)
        padding = own < 0
        keep = tl.where((id >= 0) & (own != id), 0.0, keep)
        id = tl.where(padding, id, own)
        keep = tl.where(padding, 1.0, keep)
        write = tl.where(padding, 0.0, write)
    if h == 0:
        tl.store(last_end + b, id)

    k_K = tl.load(k + bh * K + i_K, mask=real_K, other=0.0).to(tl.float32)
    written_K = k_K * write
    S_KK = tl.where(keep == 0, 0.0, S_KK * keep) + written_K[:, None] * k_K[None, :]
    tl.store(S_end + bh * K * K + i_K[:, None] * K + i_K[None, :], S_KK, mask=real_KK)

    # Conjugate gradients, as `kernels.mesa.solver` has them; vectors lie along columns, products are sums over rows (H is symmetric).
    q_K = tl.load(q + bh * K + i_K, mask=real_K, other=0.0).to(tl.float32)
    lam_K = tl.load(lam + h * K + i_K, mask=real_K, other=1.0)
    most = tl.max(tl.abs(q_K), 0)
    b_K = q_K / tl.where(most > 0, most, 1.0)
    norm = tl.sqrt(tl.sum(b_K * b_K, 0))
    b_K = b_K / tl.where(norm > 0, norm, 1.0)
    diagonal_K = tl.sum(tl.where(i_K[:, None] == i_K[None, :], S_KK, 0.0), 0) + lam_K
    if START == "query":
        x_K = b_K
    elif START == "jacobi":
        x_K = tl.where(diagonal_K > 0, b_K / tl.where(diagonal_K > 0, diagonal_K, 1.0), 0.0)
    else:
        x_K = b_K * 0.0
    r_K = b_K - times(S_KK, x_K) - lam_K * x_K
    p_K = r_K
    square = tl.sum(r_K * r_K, 0)
    first = tl.sqrt(square)
    limit = tl.maximum(eps * (tl.minimum(first, 1.0) if CRITERION == "b" else first), SMALLEST)
    limit *= limit
    going = (most > 0) & (square > limit)
    count = 0
    while going & (count < steps):
        Ap_K = times(S_KK, p_K) + lam_K * p_K
        curvature = tl.sum(p_K * Ap_K, 0)
        going = curvature > 0
        alpha = tl.where(going, square / tl.where(going, curvature, 1.0), 0.0)
        x_K += alpha * p_K
        r_K -= alpha * Ap_K
        now = tl.sum(r_K * r_K, 0)
        p_K = r_K + (now / square) * p_K
        count += going.to(tl.int32)
        square = now
        going = going & (square > limit)
    left_K = b_K - times(S_KK, x_K) - lam_K * x_K
    tl.store(taken + bh, tl.where(padding, 0, count))
    tl.store(residual + bh, tl.where(padding, 0.0, tl.sqrt(tl.sum(left_K * left_K, 0))))

    G_KV = tl.load(G + bh * K * V + i_K[:, None] * V + j_V[None, :], mask=real_KV, other=0.0)
    v_V = tl.load(v + bh * V + j_V, mask=real_V, other=0.0).to(tl.float32)
    G_KV = tl.where(keep == 0, 0.0, G_KV * keep) + written_K[:, None] * v_V[None, :]
    tl.store(G_end + bh * K * V + i_K[:, None] * V + j_V[None, :], G_KV, mask=real_KV)
    read_V = tl.sum((x_K * (most * norm))[:, None] * G_KV, 0)
    tl.store(o + bh * V + j_V, tl.where(padding, 0.0, read_V).to(o.dtype.element_ty), mask=real_V)
