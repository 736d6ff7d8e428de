"""Linear attention's one-token step in Triton: decay, write and read in one pass over the state, read once and written once.

No host read and no shape that depends on data, so it can be captured in a CUDA graph.

Shapes: B batch, H heads, K key size, V value size; one program has all keys and a tile of a head's values.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from kernels import arrays, segmentation
from kernels.launch import after, divide_up, early, launch
from kernels.linear_attention.reference import State, fresh
from kernels.linear_attention.walks import tile

Array = Any  # torch.Tensor


def step(q, k, v, log_decay, beta=None, *, sign=None, scale=1.0, state=None, segment_B=None) -> tuple[Array, State]:
    """See `kernels.linear_attention.step`; without a gradient."""
    if segment_B is not None:
        segmentation.check(segment_B, arrays.of(segment_B))
    state = fresh(q, v) if state is None else state
    q, k, v, log_decay, S, last = (x.contiguous() for x in (q, k, v, log_decay, *state))
    beta, sign, segment_B = (None if x is None else x.contiguous() for x in (beta, sign, segment_B))
    (B, H, K), V = q.shape, v.shape[-1]
    o, S_after = torch.empty_like(v), after(S)
    last_after = after(last) if segment_B is None else torch.empty_like(last)  # its heads read it, at their own times
    BK, BV = tile(K, 256), tile(V, 32)
    launch(
        _step,
        (divide_up(V, BV), B * H),
        *(q, k, v, log_decay, beta, sign, S, segment_B, last, o, S_after, last_after, float(scale)),
        **{"H": H, "K": K, "V": V, "BK": BK, "BV": BV, "BETA": beta is not None, "SIGNED": sign is not None},
        **{"SEGMENTS": segment_B is not None, "EARLY": early(), "early": early(), "warps": 4, "stages": 1},
    )
    return o, State(S_after, last_after)


@triton.jit
def _step(
    q, k, v, log_decay, beta, sign, S, segment, last, o, S_after, last_after, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BETA: tl.constexpr, SIGNED: tl.constexpr, SEGMENTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    part, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row_K, column_V = tl.arange(0, BK), part * BV + tl.arange(0, BV)
    place_KV, there_KV = row_K[:, None] * V + column_V[None, :], (row_K < K)[:, None] & (column_V < V)[None, :]
    before_KV = tl.load(S + head * (K * V) + place_KV, mask=there_KV, other=0.0)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    q_K = tl.load(q + head * K + row_K, mask=row_K < K, other=0.0).to(tl.float32)
    k_K = tl.load(k + head * K + row_K, mask=row_K < K, other=0.0).to(tl.float32)
    v_V = tl.load(v + head * V + column_V, mask=column_V < V, other=0.0).to(tl.float32)
    keep = tl.exp(tl.load(log_decay + head).to(tl.float32))
    if SIGNED:
        keep *= tl.load(sign + head).to(tl.float32)
    if BETA:
        v_V *= tl.load(beta + head).to(tl.float32)
    id_before = tl.load(last + head // H)
    id_after = tl.maximum(id_before, 0)
    if SEGMENTS:
        id_now = tl.load(segment + head // H)
        keep = tl.where((id_now >= 0) & (id_before >= 0) & (id_now != id_before), 0.0, keep)
        id_after = tl.where(id_now < 0, id_before, id_now)
    S_KV = keep * before_KV + k_K[:, None] * v_V[None, :]
    o_V = scale * tl.sum(q_K[:, None] * S_KV, 0)
    if SEGMENTS:
        S_KV, o_V = tl.where(id_now < 0, before_KV, S_KV), tl.where(id_now < 0, 0.0, o_V)
    tl.store(S_after + head * (K * V) + place_KV, S_KV, mask=there_KV)
    tl.store(o + head * V + column_V, o_V.to(o.dtype.element_ty), mask=column_V < V)
    if (part == 0) & (head % H == 0):
        tl.store(last_after + head // H, id_after)
