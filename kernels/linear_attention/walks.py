"""The state at chunks' starts, and its gradient at their ends, in Triton: one walk over the chunks, forwards or backwards.

    chunk_starts          S <- keep S + k^T (decay to the chunk's end * beta * values)
    chunk_end_gradients   D <- keep D + q^T (decay since the chunk's start * do)

Gates come first, once a call: for every token the running log decay of its chunk (`kernels.tiles.decay_sums`), the first token's aside,
and a tag, twice the number of drops up to it plus whether the product of signs is negative. Two tokens of one chunk then have their decay
from two sums and two tags, and no bit of it depends on what was before the chunk.

Shapes: B batch, T time, H heads, K key size, V value size, N chunks, C chunk length; one program has a tile of a head's state.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels import tiles
from kernels.launch import divide_up, dot_precision, launch

# Tiles of K and V, warps and stages; with a column's sums in registers too, a smaller tile.
WALK, WALK_WITH_COLUMN = (128, 64, 8, 3), (64, 64, 8, 3)


class Gates(NamedTuple):
    """Running log decays (float32) and tags (int32), both [B, H, N C]; each chunk's first log decay (float32)."""

    sum_BHT: torch.Tensor
    tag_BHT: torch.Tensor
    first_BHN: torch.Tensor


def gates(log_decay_BTH: torch.Tensor, sign_BTH: torch.Tensor | None, chunk: int) -> Gates:
    """log_decay float32, at most 0, -inf included; sign +1 and -1, or None."""
    log_decay_BTH, sign_BTH = contiguous(log_decay_BTH, sign_BTH)
    B, T, H = log_decay_BTH.shape
    N = divide_up(T, chunk)
    new = log_decay_BTH.new_empty
    made = Gates(new((B, H, N * chunk)), new((B, H, N * chunk), dtype=torch.int32), new((B, H, N)))
    launch(_gates, (N, B * H), log_decay_BTH, sign_BTH, *made, T, H=H, C=chunk, SIGNED=sign_BTH is not None, warps=2)
    return made


def chunk_starts(
    k_BTHK: torch.Tensor,
    values_BTHV: torch.Tensor,
    log_decay_BTH: torch.Tensor,
    beta_BTH: torch.Tensor | None,
    sign_BTH: torch.Tensor | None,
    S_BHKV: torch.Tensor,
    *,
    chunk: int,
    dtype: torch.dtype,
    gates: Gates | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """S_t = sign_t exp(log_decay_t) S_{t-1} + beta_t k_t values_t^T from S float32: its value before each chunk [B, N, H, K, V] in `dtype`
    (bfloat16 or float32), and after the last [B, H, K, V] float32.

    k and values: bfloat16 or float32. Tokens are summed to float32's rounding (nearly) for dtype float32, from bfloat16 products for bfloat16.
    """
    made = gates or _gates_of(log_decay_BTH, sign_BTH, chunk)
    return walk(k_BTHK, values_BTHV, made, beta_BTH, S_BHKV, chunk=chunk, dtype=dtype, reverse=False)


def chunk_end_gradients(
    q_BTHK: torch.Tensor,
    do_BTHV: torch.Tensor,
    log_decay_BTH: torch.Tensor,
    sign_BTH: torch.Tensor | None,
    dlast_BHKV: torch.Tensor,
    *,
    chunk: int,
    dtype: torch.dtype,
    gates: Gates | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where o_t = S_t^T q_t has the gradient do and the last state dlast: the gradient of the state after each chunk [B, N, H, K, V] in
    `dtype`, and of the first state [B, H, K, V] float32. Dtypes and precision as in `chunk_starts`."""
    made = gates or _gates_of(log_decay_BTH, sign_BTH, chunk)
    return walk(q_BTHK, do_BTHV, made, None, dlast_BHKV, chunk=chunk, dtype=dtype, reverse=True)


_gates_of = gates  # by another name where an argument has its own


def contiguous(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if x is None else x.contiguous() for x in tensors]


class Column(NamedTuple):
    """One more column of the values, as mLSTM's normaliser has: its values [B, T, H], the state's column [B, H, K] to start from."""

    value_BTH: torch.Tensor
    n_BHK: torch.Tensor


@functools.cache
def tile(size: int, most: int) -> int:
    """A power of two that covers `size`, from 16 to `most`."""
    return max(16, min(most, triton.next_power_of_2(size)))


def walk(
    a_BTHK: torch.Tensor,
    b_BTHV: torch.Tensor,
    gates: Gates,
    factor_BTH: torch.Tensor | None,
    S_BHKV: torch.Tensor,
    *,
    chunk: int,
    dtype: torch.dtype,
    reverse: bool,
    scale: float = 1.0,
    column: Column | None = None,
) -> tuple[torch.Tensor, ...]:
    """(states before each chunk in walking order, the state after the last): S <- keep S + scale a^T (decay * factor * b).

    With a column also its (states [B, N, H, K], last [B, H, K]), float32: n <- keep n + scale a^T (decay * value).
    """
    B, T, H, K = a_BTHK.shape
    V, N = b_BTHV.shape[-1], divide_up(T, chunk)
    a_BTHK, b_BTHV, factor_BTH, S_BHKV = contiguous(a_BTHK, b_BTHV, factor_BTH, S_BHKV)
    states, last = a_BTHK.new_empty((B, N, H, K, V), dtype=dtype), torch.empty_like(S_BHKV)
    columns = () if column is None else (S_BHKV.new_empty((B, N, H, K)), torch.empty_like(column.n_BHK))
    exact = a_BTHK.dtype == b_BTHV.dtype == torch.float32
    precision = "exact" if exact else "split" if dtype == torch.float32 else "single"
    BK, BV, warps, stages = WALK if column is None else WALK_WITH_COLUMN
    BK, BV = tile(K, BK), tile(V, BV)
    launch(
        _walk,
        (divide_up(K, BK) * divide_up(V, BV), B * H),
        *(a_BTHK, b_BTHV, *gates, factor_BTH, S_BHKV, states, last, *(column or (None, None)), *(columns or (None, None)), scale, T),
        **{"H": H, "K": K, "V": V, "C": chunk, "BK": BK, "BV": BV, "REVERSE": reverse, "FACTOR": factor_BTH is not None},
        **{"COLUMN": column is not None, "PRECISION": precision, "DOT": dot_precision(a_BTHK.dtype)},
        warps=warps,
        stages=stages,
    )
    return states, last, *columns


@triton.jit
def _gates(log_decay, sign, sums, tags, firsts, T, H: tl.constexpr, C: tl.constexpr, SIGNED: tl.constexpr):
    n, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    t_C = n * C + tl.arange(0, C)
    place_C = (head // H * T + t_C) * H + head % H
    log_decay_C = tl.load(log_decay + place_C, mask=t_C < T, other=0.0)
    is_first_C = tl.arange(0, C) == 0
    first = tl.sum(tl.where(is_first_C, log_decay_C, 0.0), 0)
    sum_C, document_C = tiles.decay_sums(tl.where(is_first_C & (log_decay_C >= tiles.GONE), 0.0, log_decay_C))
    tag_C = 2 * document_C
    if SIGNED:
        tag_C += tl.cumsum((tl.load(sign + place_C, mask=t_C < T, other=1.0) < 0).to(tl.int32), 0) & 1
    out_C = head * (tl.num_programs(0) * C) + t_C
    tl.store(sums + out_C, sum_C)
    tl.store(tags + out_C, tag_C)
    tl.store(firsts + head * tl.num_programs(0) + n, first)


@triton.jit
def signed(size, tag):
    """A decay's size with the sign of its tag."""
    return tl.where((tag & 1) == 1, -size, size)


@triton.jit
def since_start(sum_C, tag_C, first):
    """The decay from the chunk's start to each token."""
    return signed(tl.where(tag_C < 2, tl.exp(first + sum_C), 0.0), tag_C)


@triton.jit
def to_end(sum_C, tag_C, sum_end, tag_end):
    """The decay from each token to the chunk's last."""
    return signed(tl.where(tag_C >> 1 == tag_end >> 1, tl.exp(sum_end - sum_C), 0.0), tag_C + tag_end)


@triton.jit
def between(sum_C, tag_C):
    """[C, C], row t, column s: the decay from s to t, 0 for s > t."""
    token_C, document_C = tl.arange(0, sum_C.shape[0]), tag_C >> 1
    seen = (token_C[:, None] >= token_C[None, :]) & (document_C[:, None] == document_C[None, :])
    return signed(tl.where(seen, tl.exp(sum_C[:, None] - sum_C[None, :]), 0.0), tag_C[:, None] + tag_C[None, :])


@triton.jit
def product(a_CK, b_CV, PRECISION: tl.constexpr, DOT: tl.constexpr):
    """a^T b, float32. PRECISION: "single" bfloat16, "split" into bfloat16 high and low parts, or "exact"."""
    if PRECISION == "exact":
        return tl.dot(tl.trans(a_CK), b_CV, input_precision=DOT)
    a_KC = tl.trans(a_CK.to(tl.bfloat16))
    high_CV = b_CV.to(tl.bfloat16)
    sum_KV = tl.dot(a_KC, high_CV)
    if PRECISION == "split":
        sum_KV = tl.dot(a_KC, (b_CV - high_CV.to(tl.float32)).to(tl.bfloat16), sum_KV)
        if a_CK.dtype == tl.float32:
            low_CK = (a_CK - a_CK.to(tl.bfloat16).to(tl.float32)).to(tl.bfloat16)
            sum_KV = tl.dot(tl.trans(low_CK), high_CV, sum_KV)
    return sum_KV


@triton.jit
def _walk(
    a, b, sums, tags, firsts, factor, S, states, last, value, n_first, n_states, n_last, scale, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    REVERSE: tl.constexpr, FACTOR: tl.constexpr, COLUMN: tl.constexpr, PRECISION: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    tiles_V: tl.constexpr = (V + BV - 1) // BV
    part, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, N = head // H, (T + C - 1) // C
    c_C, k_K, v_V = tl.arange(0, C), part // tiles_V * BK + tl.arange(0, BK), part % tiles_V * BV + tl.arange(0, BV)
    place_KV, inside_KV = k_K[:, None] * V + v_V[None, :], (k_K < K)[:, None] & (v_V < V)[None, :]
    place_CK, place_CV = c_C[:, None] * (H * K) + k_K[None, :], c_C[:, None] * (H * V) + v_V[None, :]
    column_K = (k_K < K) & (part % tiles_V == 0)
    S_KV = tl.load(S + head * (K * V) + place_KV, mask=inside_KV, other=0.0)
    if COLUMN:
        n_K = tl.load(n_first + head * K + k_K, mask=column_K, other=0.0)
    for i in range(N):
        n = N - 1 - i if REVERSE else i
        token, state, chunk = (batch * T + n * C) * H + head % H, (batch * N + n) * H + head % H, head * N + n
        is_token_C = c_C < T - n * C
        a_CK = tl.load(a + token * K + place_CK, mask=is_token_C[:, None] & (k_K < K)[None, :], other=0.0)
        b_CV = tl.load(b + token * V + place_CV, mask=is_token_C[:, None] & (v_V < V)[None, :], other=0.0)
        sum_C, tag_C, first = tl.load(sums + chunk * C + c_C), tl.load(tags + chunk * C + c_C), tl.load(firsts + chunk)
        sum_end, tag_end = tl.load(sums + chunk * C + C - 1), tl.load(tags + chunk * C + C - 1)
        keep = since_start(sum_end, tag_end, first)
        decay_C = scale * (since_start(sum_C, tag_C, first) if REVERSE else to_end(sum_C, tag_C, sum_end, tag_end))
        tl.store(states + state * (K * V) + place_KV, S_KV.to(states.dtype.element_ty), mask=inside_KV)
        if COLUMN:
            tl.store(n_states + state * K + k_K, n_K, mask=column_K)
            weight_C = decay_C * tl.load(value + token + c_C * H, mask=is_token_C, other=0.0)
            n_K = keep * n_K + tl.sum(a_CK.to(tl.float32) * weight_C[:, None], 0)
        if FACTOR:
            decay_C *= tl.load(factor + token + c_C * H, mask=is_token_C, other=0.0)
        S_KV = keep * S_KV + product(a_CK, b_CV.to(tl.float32) * decay_C[:, None], PRECISION, DOT)
    tl.store(last + head * (K * V) + place_KV, S_KV, mask=inside_KV)
    if COLUMN:
        tl.store(n_last + head * K + k_K, n_K, mask=column_K)
