"""One token of Palimpsa in Triton: both states are read once and written once.

Shapes: B batch, H heads, K key size, V value size. BK is K filled up to a power of two, BV a tile of V.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton import next_power_of_2

from kernels import arrays, segmentation
from kernels.launch import divide_up, launch
from kernels.palimpsa.reference import State, fresh

Array = Any  # torch.Tensor


def step(q, k, v, beta, log_decay, prior, *, scale=1.0, state=None, segment_B=None) -> tuple[Array, State]:
    """See `kernels.palimpsa.step`; without a gradient."""
    if segment_B is not None:
        segmentation.check(segment_B, arrays.of(segment_B))
    state = fresh(q, v) if state is None else state
    q, k, v, beta, log_decay, prior, M, J, last = (x.contiguous() for x in (q, k, v, beta, log_decay, prior, *state))
    segment_B = None if segment_B is None else segment_B.contiguous()
    (B, H, K), V = q.shape, v.shape[-1]
    o, M_after, J_after, last_after = torch.empty_like(v), torch.empty_like(M), torch.empty_like(J), torch.empty_like(last)
    BK, BV = max(16, next_power_of_2(K)), min(32, max(16, next_power_of_2(V)))
    given = (q, k, v, beta, log_decay, prior, M, J, segment_B, last)
    launch(
        _step, (divide_up(V, BV), B * H),
        *given, o, M_after, J_after, last_after, H, K, V, float(scale),
        BK=BK, BV=BV, SEGMENTS=segment_B is not None, warps=4, stages=1,
    )  # fmt: skip
    return o, State(M_after, J_after, last_after)


@triton.jit
def _step(
    q, k, v, beta, log_decay, prior, M, J, segment, last, o, M_after, J_after, last_after, H, K, V, scale,
    BK: tl.constexpr, BV: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    b = head // H
    row_K, column_V = tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV)
    there_K, there_V = row_K < K, column_V < V
    place_KV = head.to(tl.int64) * K * V + row_K[:, None] * V + column_V[None, :]
    there_KV = there_K[:, None] & there_V[None, :]
    M_KV, J_KV = tl.load(M + place_KV, mask=there_KV, other=0.0), tl.load(J + place_KV, mask=there_KV, other=0.0)
    q_K = tl.load(q + head * K + row_K, mask=there_K, other=0.0).to(tl.float32)
    k_K = tl.load(k + head * K + row_K, mask=there_K, other=0.0).to(tl.float32)
    v_V = tl.load(v + head * V + column_V, mask=there_V, other=0.0).to(tl.float32)
    beta_V = tl.load(beta + head * V + column_V, mask=there_V, other=0.0).to(tl.float32)
    prior_h = tl.load(prior + head % H).to(tl.float32)
    kept = tl.exp(tl.load(log_decay + head).to(tl.float32))

    id_before = tl.load(last + b)
    id_after = tl.maximum(id_before, 0)
    padding = id_before != id_before
    if SEGMENTS:
        id_now = tl.load(segment + b)
        padding = id_now < 0
        kept = tl.where(~padding & (id_before >= 0) & (id_now != id_before), 0.0, kept)
        id_after = tl.where(padding, id_before, id_now)
    M_KV = tl.where(padding, M_KV, kept * M_KV + k_K[:, None] * v_V[None, :])
    J_KV = tl.where(padding, J_KV, kept * J_KV + (k_K * k_K)[:, None] * beta_V[None, :])
    o_V = tl.where(padding, 0.0, scale * tl.sum(q_K[:, None] * M_KV / (prior_h + J_KV), 0))
    tl.store(M_after + place_KV, M_KV, mask=there_KV)
    tl.store(J_after + place_KV, J_KV, mask=there_KV)
    tl.store(o + head * V + column_V, o_V.to(o.dtype.element_ty), mask=there_V)
    if tl.program_id(0) == 0 and head % H == 0:
        tl.store(last_after + b, id_after)
