"""One token of the delta rule in Triton: a state is read once and written once, whatever is done to it in between.

Shapes: B batch, H heads, K key size, V value size. BK is K filled up to a power of two, BV a tile of V.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton import next_power_of_2

from kernels import arrays, segmentation
from kernels.launch import after, divide_up, launch
from kernels.linear_attention.reference import State, fresh

Array = Any  # torch.Tensor


def step(q, k, v, beta, log_decay=None, *, scale=1.0, state=None, segment_B=None) -> tuple[Array, State]:
    """See `kernels.delta_rule.step`; without a gradient."""
    if segment_B is not None:
        segmentation.check(segment_B, arrays.of(segment_B))
    state = fresh(q, v) if state is None else state
    q, k, v, beta, S, last = (x.contiguous() for x in (q, k, v, beta, *state))
    log_decay, segment_B = (None if x is None else x.contiguous() for x in (log_decay, segment_B))
    (B, H, K), V = q.shape, v.shape[-1]
    o, S_after, last_after = torch.empty_like(v), after(S), torch.empty_like(last)
    BK, BV = max(16, next_power_of_2(K)), min(32, max(16, next_power_of_2(V)))
    grid = (B * H, divide_up(V, BV))
    given = (q, k, v, beta, log_decay, S, segment_B, last)
    gates = {"DECAYS": log_decay is not None, "SEGMENTS": segment_B is not None}
    launch(_step, grid, *given, o, S_after, last_after, H, K, V, float(scale), BK=BK, BV=BV, **gates, warps=4, stages=1)
    return o, State(S_after, last_after)


@triton.jit
def _step(
    q, k, v, beta, log_decay, S, segment, last, o, S_after, last_after, H, K, V, scale,
    BK: tl.constexpr, BV: tl.constexpr, DECAYS: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    b = head // H
    row_K, column_V = tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV)
    there_K, there_V = row_K < K, column_V < V
    place_KV = head.to(tl.int64) * K * V + row_K[:, None] * V + column_V[None, :]
    there_KV = there_K[:, None] & there_V[None, :]
    before_KV = tl.load(S + place_KV, mask=there_KV, other=0.0)
    q_K = tl.load(q + head * K + row_K, mask=there_K, other=0.0).to(tl.float32)
    k_K = tl.load(k + head * K + row_K, mask=there_K, other=0.0).to(tl.float32)
    v_V = tl.load(v + head * V + column_V, mask=there_V, other=0.0).to(tl.float32)

    S_KV = before_KV
    if DECAYS:
        S_KV *= tl.exp(tl.load(log_decay + head).to(tl.float32))
    id_before = tl.load(last + b)
    id_after = tl.maximum(id_before, 0)
    if SEGMENTS:
        id_now = tl.load(segment + b)
        S_KV = tl.where((id_now >= 0) & (id_before >= 0) & (id_now != id_before), 0.0, S_KV)
        id_after = tl.where(id_now < 0, id_before, id_now)
    u_V = tl.load(beta + head).to(tl.float32) * (v_V - tl.sum(k_K[:, None] * S_KV, 0))
    S_KV += k_K[:, None] * u_V[None, :]
    o_V = scale * tl.sum(q_K[:, None] * S_KV, 0)
    if SEGMENTS:
        S_KV = tl.where(id_now < 0, before_KV, S_KV)
        o_V = tl.where(id_now < 0, 0.0, o_V)
    tl.store(S_after + place_KV, S_KV, mask=there_KV)
    tl.store(o + head * V + column_V, o_V.to(o.dtype.element_ty), mask=there_V)
    if tl.program_id(1) == 0 and head % H == 0:
        tl.store(last_after + b, id_after)
