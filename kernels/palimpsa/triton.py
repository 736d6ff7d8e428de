"""Palimpsa for NVIDIA GPUs, exact: a thread owns an entry of the state and goes through a block's tokens in registers.

float32 is Triton, here; bfloat16, where time counts, is CUDA C (`cuda.py`), which says what lies in registers and what in shared memory. What is
said here holds for both, but for what is marked; forward, bfloat16 goes through its blocks one after another, and stores states at chunks on its way.

States are stored at the starts of chunks of C tokens only. Forward (float32) all chunks run at once; a thread has one value, its v and beta of all
the chunk's tokens in registers, and takes one key after another. Backward goes through blocks of S tokens from the last to the first, with P
and Q, the gradients of the states M and J behind the block, in memory; a thread has one value again, rebuilds M and J of the block's tokens
for one key (float32), and comes back through them:

    r = 1 / (prior + J_t)    X = M_t r    L = do_t r    Z = L X        P <- P + q_t L      Q <- Q - q_t Z
    dq_t = sum_v X do_t      dk_t = sum_v P v_t + 2 k_t sum_v Q beta_t      dv_t = sum_k k_t P      dbeta_t = sum_k k_t^2 Q
    dlog_decay_t = exp(log_decay_t) sum_kv (M_{t-1} P + J_{t-1} Q)          dprior = -sum_t,kv q_t Z

dv and dbeta stay in registers over all keys; dq and dk are summed over a warp's values for each key and token. What all threads of a warp
need of a key, k and q of the block's tokens, its threads fetch one number each, a key ahead, and tell each other (`_of`, float32).
With c_t the decay from a block's start, the recursions are of M / c, J / c, c P and c Q, so that no token multiplies a state by its decay:
v, beta and prior are divided by c_t instead. Where c_t would fall below exp(DEEP), the state is dropped, or a row begins, the states take c_t
upon them and c is 1 again from there: a token never knows what comes after it, nor what a state held that it does not go on with.
In bfloat16 dq and dk are summed in tf32; all else is float32.

Shapes: B batch, T time, H heads, K key size, V value size, N chunks, C chunk length, S tokens of a block; tensors [W, 32] and [KG, 32]
have a row for each warp, so that each thread has one number: forward W groups of 32 values, backward KG groups of keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import arrays, launch
from kernels.palimpsa import chunked, cuda
from kernels.palimpsa.reference import State
from kernels.tiles import GONE, decay_sums

C, S = 32, cuda.S
DEEP = -10.0
"""Log decay down to which states are scaled: exp(10) costs no more than a digit of float32."""
WARPS = 4
"""Of a program of the backward pass: so many groups of keys, one value a thread."""


@triton.jit
def _reciprocal(x, INTERPRETED: tl.constexpr):
    """1 / x for x of any normal size, to an ulp: one instruction, where a division takes eight."""
    if INTERPRETED:
        return 1.0 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _since_first(log_decay_C):
    """(sum_C, document_C, first): `decay_sums` behind the first token, whose own log decay is apart: no decay between tokens has it."""
    is_first = tl.arange(0, log_decay_C.shape[0]) == 0
    sum_C, document_C = decay_sums(tl.where(is_first, 0.0, log_decay_C))
    return sum_C, document_C, tl.sum(tl.where(is_first, log_decay_C, 0.0), 0)


@triton.jit
def _to_end(log_decay_C):
    """(weight_C, all): the decay from each token to the last one, and from before the first."""
    sum_C, document_C, first = _since_first(log_decay_C)
    is_last = tl.arange(0, log_decay_C.shape[0]) == log_decay_C.shape[0] - 1
    last = tl.sum(tl.where(is_last, sum_C, 0.0), 0)
    document = tl.sum(tl.where(is_last, document_C, 0), 0)
    lives = document_C == document
    return tl.where(lives, tl.exp(tl.where(lives, last - sum_C, 0.0)), 0.0), tl.where(document == 0, tl.exp(first + last), 0.0)


@triton.jit
def _moved(M_VK, J_VK, v_VC, beta_VC, k_CK, weight_C, kept, PRECISION: tl.constexpr):
    """Both states after tokens that write k v and k^2 beta, each decayed by weight_C until then, and what was before by `kept`."""
    written_CK = k_CK * weight_C[:, None]
    M_VK = tl.dot(v_VC, written_CK.to(v_VC.dtype), kept * M_VK, input_precision=PRECISION)
    J_VK = tl.dot(beta_VC, (written_CK * k_CK).to(v_VC.dtype), kept * J_VK, input_precision=PRECISION)
    return M_VK, J_VK


@triton.jit
def _inside_of(x, N, SIZE: tl.constexpr):
    """x < N, known to be true where tiles of SIZE fill N."""
    if N % SIZE == 0:
        return x == x
    return x < N


@triton.jit
def starts_kernel(
    k, v, beta, log_decay, M_first, J_first, M_starts, J_starts, M_last, J_last, T, H, K, V, N,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The states at the start of every chunk [B, H, N, K, V], and the last ones."""
    bh = tl.program_id(2).to(tl.int64)
    row = bh // H * T * H + bh % H
    dtype = k.dtype.element_ty
    v_V, k_K = tl.program_id(0) * BV + tl.arange(0, BV), tl.program_id(1) * BK + tl.arange(0, BK)
    in_V, in_K = v_V < V, k_K < K
    place_VK, in_VK = k_K[None, :] * V + v_V[:, None], in_V[:, None] & in_K[None, :]
    M = tl.load(M_first + bh * K * V + place_VK, mask=in_VK, other=0.0)
    J = tl.load(J_first + bh * K * V + place_VK, mask=in_VK, other=0.0)
    for n in range(0, N):
        at = (bh * N + n) * K * V
        tl.store(M_starts + at + place_VK, M, mask=in_VK)
        tl.store(J_starts + at + place_VK, J, mask=in_VK)
        t_C = n * C + tl.arange(0, C)
        in_C = t_C < T
        rows_C = row + t_C.to(tl.int64) * H
        weight_C, kept = _to_end(tl.load(log_decay + rows_C, mask=in_C, other=0.0))
        k_CK = tl.load(k + rows_C[:, None] * K + k_K[None, :], mask=in_C[:, None] & in_K[None, :], other=0.0).to(tl.float32)
        v_VC = tl.load(v + rows_C[None, :] * V + v_V[:, None], mask=in_V[:, None] & in_C[None, :], other=0.0)
        beta_VC = tl.load(beta + rows_C[None, :] * V + v_V[:, None], mask=in_V[:, None] & in_C[None, :], other=0.0).to(dtype)
        M, J = _moved(M, J, v_VC, beta_VC, k_CK, weight_C, kept, PRECISION)
    tl.store(M_last + bh * K * V + place_VK, M, mask=in_VK)
    tl.store(J_last + bh * K * V + place_VK, J, mask=in_VK)


@triton.jit
def _begin(
    k, v, beta, log_decay, M_starts, J_starts, M_block, J_block, tokens, v_V, in_V, H, K, V,
    C: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes the states after `tokens` tokens of a chunk to M_block, J_block [K, V]; all pointers are those of the chunk."""
    chunk = tl.arange(0, C)
    before = chunk < tokens
    weight_C, kept = _to_end(tl.load(log_decay + chunk * H, mask=before, other=0.0))
    place_VC, in_VC = chunk[None, :] * (H * V) + v_V[:, None], in_V[:, None] & before[None, :]
    v_VC = tl.load(v + place_VC, mask=in_VC, other=0.0)
    beta_VC = tl.load(beta + place_VC, mask=in_VC, other=0.0).to(v_VC.dtype)
    for k0 in range(0, K, BK):
        k_K = k0 + tl.arange(0, BK)
        in_K = _inside_of(k_K, K, BK)
        place_VK, in_VK = k_K[None, :] * V + v_V[:, None], in_V[:, None] & in_K[None, :]
        M = tl.load(M_starts + place_VK, mask=in_VK, other=0.0)
        J = tl.load(J_starts + place_VK, mask=in_VK, other=0.0)
        k_CK = tl.load(k + chunk[:, None] * (H * K) + k_K[None, :], mask=before[:, None] & in_K[None, :], other=0.0).to(tl.float32)
        M, J = _moved(M, J, v_VC, beta_VC, k_CK, weight_C, kept, PRECISION)
        tl.store(M_block + place_VK, M, mask=in_VK)
        tl.store(J_block + place_VK, J, mask=in_VK)
    tl.debug_barrier()  # before other threads read them


@triton.jit
def spread_kernel(
    q, k, log_decay, prior, numbers, gates, T, BLOCKS,
    H: tl.constexpr, K: tl.constexpr, S: tl.constexpr, BK: tl.constexpr, DEEP: tl.constexpr, NUMBERS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """What all threads of a warp read: numbers [B H, BLOCKS, K, (k, q) or (k, k^2 / 2, q), S] and gates [B H, BLOCKS, 4, S]: 1 / c, taken, prior / c, rest.

    taken: by what a token multiplies the states, 1 but where c begins anew. rest: whether one does, and c of the last token.
    PAIRS: two blocks are a chunk; "whether one does" is then also whether the first, and the second where c is never begun anew, decay by more than
    exp(DEEP) together.
    """
    block, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot, k_K = tl.arange(0, S), tl.arange(0, BK)
    in_S = block * S + slot < T
    row_S = bh // H * T * H + bh % H + (block * S + slot).to(tl.int64) * H
    place_KS, in_KS = row_S[None, :] * K + k_K[:, None], in_S[None, :] & (k_K < K)[:, None]
    numbers += (bh * BLOCKS + block) * K * NUMBERS * S
    to_KS, in_K = k_K[:, None] * NUMBERS * S + slot[None, :], (k_K < K)[:, None]
    k_KS = tl.load(k + place_KS, mask=in_KS, other=0.0).to(tl.float32)
    tl.store(numbers + to_KS, k_KS, mask=in_K)
    if NUMBERS == 3:
        tl.store(numbers + to_KS + S, 0.5 * k_KS * k_KS, mask=in_K)
    tl.store(numbers + to_KS + (NUMBERS - 1) * S, tl.load(q + place_KS, mask=in_KS, other=0.0).to(tl.float32), mask=in_K)
    log_decay_S = tl.load(log_decay + row_S, mask=in_S, other=0.0)
    sum_S, taken_S = tl.zeros([S], tl.float32), tl.full([S], 1.0, tl.float32)
    log_c, any_taken = 0.0, 0.0
    if PAIRS:
        behind = tl.sum(tl.load(log_decay + row_S + S * H, mask=(block % 2 == 0) & (block * S + S + slot < T), other=0.0), 0)
        behind = tl.where(behind < DEEP, 0.0, behind)
        any_taken = tl.where(tl.sum(log_decay_S, 0) + behind < DEEP, 1.0, 0.0)
    for t in tl.static_range(S):
        here = slot == t
        own = tl.sum(tl.where(here, log_decay_S, 0.0), 0)
        log_c += own
        anew = (log_c < DEEP) | (block * S + t == 0)
        own_taken = tl.where(anew, tl.where(own < GONE, 0.0, tl.exp(log_c)), 1.0)
        taken_S = tl.where(here, own_taken, taken_S)
        any_taken = tl.where(anew, 1.0, any_taken)
        log_c = tl.where(anew, 0.0, log_c)
        sum_S = tl.where(here, log_c, sum_S)
    over_c_S = tl.exp(-sum_S)
    gates += (bh * BLOCKS + block) * 4 * S
    tl.store(gates + slot, over_c_S)
    tl.store(gates + S + slot, taken_S)
    tl.store(gates + 2 * S + slot, tl.load(prior + bh % H) * over_c_S)
    tl.store(gates + 3 * S + slot, tl.where(slot == 0, any_taken, tl.exp(log_c)))


@triton.jit
def _of(x, SLOT: tl.constexpr):
    """What thread SLOT of a warp has, for all its threads."""
    return tl.gather(x, tl.full(x.shape, SLOT, tl.int32), 1)


@triton.jit
def _decayed(x, decay):
    """decay x, 0 for a decay of 0 whatever x is."""
    return tl.where(decay > 0.0, decay * x, 0.0)


@triton.jit
def _outputs(
    numbers, gates, M_starts, J_starts, v_C, beta_C, o_C, v_W, in_W, lane, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    TAKEN: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """sum_k q M / (prior + J) [W, 32] of each token of a chunk"""
    place = v_W
    taken = tl.load(gates + C + lane)
    prior_C = ()
    for t in tl.static_range(C):
        prior_C = prior_C + (tl.load(gates + 2 * C + t),)
    M_next, J_next = tl.load(M_starts + place, mask=in_W, other=0.0), tl.load(J_starts + place, mask=in_W, other=0.0)
    k_next, q_next = tl.load(numbers + lane), tl.load(numbers + C + lane)
    for key in range(0, K):
        M, J, k, q = M_next, J_next, k_next, q_next
        place += V
        numbers += 2 * C
        more = in_W & (key < K - 1)
        M_next, J_next = tl.load(M_starts + place, mask=more, other=0.0), tl.load(J_starts + place, mask=more, other=0.0)
        k_next, q_next = tl.load(numbers + lane, mask=key < K - 1, other=0.0), tl.load(numbers + C + lane, mask=key < K - 1, other=0.0)
        o_new = ()
        for t in tl.static_range(C):
            if TAKEN:
                taken_t = _of(taken, t)
                M, J = _decayed(M, taken_t), _decayed(J, taken_t)
            k_t = _of(k, t)
            M += k_t * v_C[t]
            J += k_t * k_t * beta_C[t]
            r = _reciprocal(J + prior_C[t], INTERPRETED)
            o_new = o_new + (o_C[t] + _of(q, t) * (M * r),)
        o_C = o_new
    return o_C


@triton.jit
def outputs_kernel(
    numbers, gates, v, beta, M_starts, J_starts, o, scale, T, N,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, W: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """o [B, T, H, V] of one chunk and W groups of 32 values."""
    n, bh = tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = (bh // H * T * H + bh % H + n.to(tl.int64) * C * H) * V  # of the chunk's first token
    v_W = (tl.program_id(0) * W + tl.arange(0, W)[:, None]) * 32 + tl.arange(0, 32)[None, :]
    in_W = v_W < V
    lane = tl.arange(0, 32)[None, :] + tl.zeros([W, 32], tl.int32)
    at = bh * N + n
    gates += at * 4 * C
    v_C, beta_C, o_C = (), (), ()
    for t in tl.static_range(C):
        in_T = in_W & (t < T - n * C)
        over_c = tl.load(gates + t)
        v_C = v_C + (over_c * tl.load(v + row + t * H * V + v_W, mask=in_T, other=0.0).to(tl.float32),)
        beta_C = beta_C + (over_c * tl.load(beta + row + t * H * V + v_W, mask=in_T, other=0.0),)
        o_C = o_C + (tl.zeros([W, 32], tl.float32),)
    numbers += at * K * 2 * C
    M_starts += at * K * V
    J_starts += at * K * V
    if tl.load(gates + 3 * C) > 0.0:
        o_C = _outputs(numbers, gates, M_starts, J_starts, v_C, beta_C, o_C, v_W, in_W, lane, K, V, C, True, INTERPRETED)
    else:
        o_C = _outputs(numbers, gates, M_starts, J_starts, v_C, beta_C, o_C, v_W, in_W, lane, K, V, C, False, INTERPRETED)
    for t in tl.static_range(C):
        tl.store(o + row + t * H * V + v_W, (scale * o_C[t]).to(o.dtype.element_ty), mask=in_W & (t < T - n * C))


@triton.jit
def _fold(a, b, lane, BIT: tl.constexpr):
    """Half of the sums of two: threads without BIT in their number get a's, those with it b's, over the two that differ in BIT."""
    upper = (lane & BIT) != 0
    return tl.where(upper, b, a) + tl.gather(tl.where(upper, a, b), lane ^ BIT, 1)


@triton.jit
def _block(
    numbers, decays, priors, M_at, J_at, P, Q, shares, v_S, beta_S, do_S, place, in_W, key, lane, K: tl.constexpr, V: tl.constexpr,
    S: tl.constexpr, KG: tl.constexpr, TAKEN: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """dv, dbeta and dlog_decay of each token and dprior, as far as they are of this thread's value and keys. dq and dk go to shares."""
    KEYS: tl.constexpr = (K + KG - 1) // KG
    zero = tl.zeros(in_W.shape, tl.float32)
    dv_S, dbeta_S, dlog_decay_S = (), (), ()
    for _ in tl.static_range(S):
        dv_S, dbeta_S, dlog_decay_S = dv_S + (zero,), dbeta_S + (zero,), dlog_decay_S + (zero,)
    dprior = zero
    c_end = _of(priors, S + 1)
    in_K = _inside_of(key, K, KG * KEYS)
    inside = in_W & in_K
    M_next, J_next = tl.load(M_at + place, mask=inside, other=0.0), tl.load(J_at + place, mask=inside, other=0.0)
    P_next, Q_next = tl.load(P + place, mask=inside, other=0.0), tl.load(Q + place, mask=inside, other=0.0)
    numbers_next = tl.load(numbers + key * 2 * S + lane, mask=in_K, other=0.0)
    for i in range(0, KEYS):
        here, kq = inside, numbers_next
        M, J, P_e, Q_e = M_next, J_next, c_end * P_next, c_end * Q_next
        in_K = (i < KEYS - 1) & _inside_of(key + 1, K, KG * KEYS)
        inside = in_W & in_K
        M_next, J_next = tl.load(M_at + place + V, mask=inside, other=0.0), tl.load(J_at + place + V, mask=inside, other=0.0)
        P_next, Q_next = tl.load(P + place + V, mask=inside, other=0.0), tl.load(Q + place + V, mask=inside, other=0.0)
        numbers_next = tl.load(numbers + (key + 1) * 2 * S + lane, mask=in_K, other=0.0)
        M_S, J_S = (M,), (J,)
        for t in tl.static_range(S):
            if TAKEN:
                decay_t = _of(decays, S + t)
                M, J = _decayed(M, decay_t), _decayed(J, decay_t)
            k_t = _of(kq, t)
            M += k_t * v_S[t]
            J += k_t * k_t * beta_S[t]
            M_S, J_S = M_S + (M,), J_S + (J,)
        dv_new, dbeta_new, dlog_decay_new = (), (), ()
        dq_S, dk_S = (), ()
        for back in tl.static_range(1, S + 1):
            k_t, q_t = _of(kq, S - back), _of(kq, 2 * S - back)
            r = _reciprocal(J_S[S - back + 1] + _of(priors, S - back), INTERPRETED)
            X = M_S[S - back + 1] * r
            L = do_S[S - back] * r
            qZ = q_t * (L * X)
            P_e += q_t * L
            Q_e -= qZ
            dprior -= _of(decays, S - back) * qZ
            kQ = k_t * Q_e
            dv_new = (dv_S[S - back] + k_t * P_e,) + dv_new
            dbeta_new = (dbeta_S[S - back] + k_t * kQ,) + dbeta_new
            dq_S = (X * do_S[S - back],) + dq_S
            dk_S = (P_e * v_S[S - back] + (2.0 * kQ) * beta_S[S - back],) + dk_S
            if TAKEN:
                decay_t = _of(decays, 2 * S - back)
                P_e, Q_e = _decayed(P_e, decay_t), _decayed(Q_e, decay_t)
            dlog_decay_new = ((dlog_decay_S[S - back] + M_S[S - back] * P_e) + J_S[S - back] * Q_e,) + dlog_decay_new
        dv_S, dbeta_S, dlog_decay_S = dv_new, dbeta_new, dlog_decay_new
        tl.store(P + place, P_e, mask=here)
        tl.store(Q + place, Q_e, mask=here)
        folded = ()
        for j in tl.static_range(S):
            folded = folded + (_fold(dq_S[j], dk_S[j], lane, 16),)
        for level in tl.static_range(4):
            again = ()
            for j in tl.static_range(8 >> level):
                again = again + (_fold(folded[j], folded[j + (8 >> level)], lane, 8 >> level),)
            folded = again
        tl.store(shares + key * 2 * S + lane, folded[0], mask=_inside_of(key, K, KG * KEYS))
        place += V
        key += 1
    return dv_S, dbeta_S, dlog_decay_S, dprior


@triton.jit
def _stacked(x):
    """[..., 16] of 16 tensors"""
    a = tl.join(tl.join(tl.join(x[0], x[8]), tl.join(x[4], x[12])), tl.join(tl.join(x[2], x[10]), tl.join(x[6], x[14])))
    b = tl.join(tl.join(tl.join(x[1], x[9]), tl.join(x[5], x[13])), tl.join(tl.join(x[3], x[11]), tl.join(x[7], x[15])))
    return tl.reshape(tl.join(a, b), [x[0].shape[0], x[0].shape[1], 16])  # a token's bits, the highest first


@triton.jit
def gradients_kernel(
    numbers, gates, k, v, beta, log_decay, M_starts, J_starts, M_block, J_block, do, P, Q, shares, dv, dbeta, dlog_decay, dprior,
    scale, T, N, BLOCKS, BH, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, S: tl.constexpr,
    KG: tl.constexpr, WK: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """All gradients for 32 values, whose share of dq and dk, dlog_decay and dprior it writes.

    shares [tiles, B H, BLOCKS, K, 32 sums of q and k], dlog_decay [tiles, B, T, H], dprior [tiles, B, H].
    P, Q [B, H, K, V]: gradients of the last state before, of the first one afterwards.
    """
    tile, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = bh // H * T * H + bh % H
    dtype = k.dtype.element_ty
    lane = tl.arange(0, 32)[None, :] + tl.zeros([KG, 32], tl.int32)
    first_key = (K + KG - 1) // KG * tl.arange(0, KG)[:, None] + 0 * lane
    v_W = tile * 32 + lane
    in_W = _inside_of(v_W, V, 32)
    v_V = tile * 32 + tl.arange(0, 32)
    in_V = v_V < V
    P += bh * K * V
    Q += bh * K * V
    M_block += bh * K * V
    J_block += bh * K * V
    shares += (tile.to(tl.int64) * BH + bh) * BLOCKS * K * 2 * S
    dprior_h = tl.zeros([KG, 32], tl.float32)
    for back in range(0, BLOCKS):
        block = BLOCKS - 1 - back
        t0 = block * S
        n = t0 // C
        rows_C, rows_S = row + (n * C).to(tl.int64) * H, row + t0.to(tl.int64) * H  # of the chunk's and of the block's first token
        M_at, J_at = M_starts + (bh * N + n) * K * V, J_starts + (bh * N + n) * K * V
        if t0 > n * C:
            _begin(
                k + rows_C * K, v + rows_C * V, beta + rows_C * V, log_decay + rows_C, M_at, J_at, M_block, J_block,
                t0 - n * C, v_V, in_V, H, K, V, C, WK, PRECISION,
            )  # fmt: skip
            M_at, J_at = M_block, J_block
        gate = gates + (bh * BLOCKS + block) * 4 * S
        decays, priors = tl.load(gate + lane), tl.load(gate + 2 * S + lane)  # (1 / c, taken) and (prior / c, rest)
        v_S, beta_S, do_S = (), (), ()
        for t in tl.static_range(S):
            place, in_T = rows_S * V + t * H * V + v_W, in_W & (t < T - t0)
            over_c_t = _of(decays, t)
            v_S = v_S + (over_c_t * tl.load(v + place, mask=in_T, other=0.0).to(tl.float32),)
            beta_S = beta_S + (over_c_t * tl.load(beta + place, mask=in_T, other=0.0),)
            do_S = do_S + (scale * tl.load(do + place, mask=in_T, other=0.0).to(tl.float32),)
        block_numbers, block_shares = numbers + (bh * BLOCKS + block) * K * 2 * S, shares + block * K * 2 * S
        place = first_key * V + v_W
        if tl.load(gate + 3 * S) > 0.0:
            dv_S, dbeta_S, dlog_decay_S, dprior_block = _block(
                block_numbers, decays, priors, M_at, J_at, P, Q, block_shares, v_S, beta_S, do_S, place, in_W, first_key, lane,
                K, V, S, KG, True, INTERPRETED,
            )  # fmt: skip
        else:
            dv_S, dbeta_S, dlog_decay_S, dprior_block = _block(
                block_numbers, decays, priors, M_at, J_at, P, Q, block_shares, v_S, beta_S, do_S, place, in_W, first_key, lane,
                K, V, S, KG, False, INTERPRETED,
            )  # fmt: skip
        dprior_h += dprior_block
        slot = tl.arange(0, S)
        over_c_S = tl.load(gate + slot)
        place_VS = rows_S * V + v_V[:, None] + slot[None, :] * (H * V)
        in_VS = in_V[:, None] & (slot[None, :] < T - t0)
        dv_VS = over_c_S[None, :] * tl.sum(_stacked(dv_S), 0)
        dbeta_VS = over_c_S[None, :] * tl.sum(_stacked(dbeta_S), 0)
        tl.store(dv + place_VS, dv_VS.to(dtype), mask=in_VS)
        tl.store(dbeta + place_VS, dbeta_VS, mask=in_VS)
        dlog_decay_T = tl.sum(tl.sum(_stacked(dlog_decay_S), 1), 0)
        tl.store(dlog_decay + tile.to(tl.int64) * (BH // H) * T * H + rows_S + slot * H, dlog_decay_T, mask=slot < T - t0)
        tl.debug_barrier()  # M_block and J_block are read
    tl.store(dprior + tile * BH + bh, tl.sum(tl.sum(dprior_h, 1), 0))


@triton.jit
def gather_kernel(
    shares, dq, dk, T, BLOCKS, BH, TILES, H: tl.constexpr, K: tl.constexpr, S: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """dq, dk [B, T, H, K] of one block: the tiles' shares added."""
    block, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot, k_K = tl.arange(0, S), tl.arange(0, BK)
    in_K = (k_K < K)[:, None]
    dq_KS, dk_KS = tl.zeros([BK, S], tl.float32), tl.zeros([BK, S], tl.float32)
    for tile in range(0, TILES):
        at = shares + ((tile * BH + bh) * BLOCKS + block) * K * 2 * S + k_K[:, None] * 2 * S + slot[None, :]
        dq_KS += tl.load(at, mask=in_K, other=0.0)
        dk_KS += tl.load(at + S, mask=in_K, other=0.0)
    row_S = bh // H * T * H + bh % H + (block * S + slot).to(tl.int64) * H
    place_KS, in_KS = row_S[None, :] * K + k_K[:, None], (block * S + slot < T)[None, :] & in_K
    tl.store(dq + place_KS, dq_KS.to(dq.dtype.element_ty), mask=in_KS)
    tl.store(dk + place_KS, dk_KS.to(dk.dtype.element_ty), mask=in_KS)


def palimpsa(q, k, v, beta, log_decay, prior, *, scale=1.0, state=None, segments=None) -> tuple[torch.Tensor, State]:
    """See `kernels.palimpsa.palimpsa`."""
    return chunked.gated(differentiable, q, k, v, beta, log_decay, prior, state, segments, scale=float(scale))


def forward(q, k, v, beta, log_decay, prior, M, J, *, scale):
    q, k, v, beta, log_decay, prior, M, J = (x.contiguous() for x in (q, k, v, beta, log_decay, prior, M, J))
    B, T, H, K, V, N = _sizes(q, v)
    o, M_last, J_last = torch.empty_like(v), torch.empty_like(M), torch.empty_like(J)
    if q.dtype == torch.bfloat16:
        M_starts, J_starts = (M.new_empty((B, H, N + 1, K, V)) for _ in range(2))
        numbers = _spread(q, k, log_decay, prior, cuda.S, DEEP, cuda.NUMBERS)
        cuda.outputs(*numbers, v, beta, M, J, M_starts, J_starts, M_last, J_last, o, scale=scale, chunk=C)
        return (o, M_last, J_last), (M_starts, J_starts)
    M_starts, J_starts = (M.new_empty((B, H, N, K, V)) for _ in range(2))
    wide, BV = min(32, _power(K)), min(64, _power(V))
    launch.launch(
        starts_kernel, (launch.divide_up(V, BV), launch.divide_up(K, wide), B * H),
        k, v, beta, log_decay, M, J, M_starts, J_starts, M_last, J_last, T, H, K, V, N,
        C=C, BK=wide, BV=BV, PRECISION=launch.dot_precision(q.dtype),
    )  # fmt: skip
    warps = 2 if V > 32 else 1
    launch.launch(
        outputs_kernel, (launch.divide_up(V, 32 * warps), N, B * H),
        *_spread(q, k, log_decay, prior, C, DEEP), v, beta, M_starts, J_starts, o, scale, T, N,
        H=H, K=K, V=V, C=C, W=warps, INTERPRETED=launch.INTERPRETED, warps=warps, registers=168,
    )  # fmt: skip
    return (o, M_last, J_last), (M_starts, J_starts)


def backward(inputs, residuals, gradients, *, scale):
    q, k, v, beta, log_decay, prior, *_ = (x.contiguous() for x in inputs)
    do, P, Q = gradients[0].contiguous(), *(torch.empty_like(x).copy_(x) for x in gradients[1:])
    B, T, H, K, V, N = _sizes(q, v)
    tiles, blocks = launch.divide_up(V, 32), launch.divide_up(T, S)
    shares, dlog_decay, dprior = P.new_empty((tiles, B * H, blocks, K, 2, S)), P.new_empty((tiles, B, T, H)), P.new_empty((tiles, B, H))
    dq, dk, dv, dbeta = (torch.empty_like(x) for x in (q, k, v, beta))
    if q.dtype == torch.bfloat16:
        numbers = _spread(q, k, log_decay, prior, S, cuda.DEEP, cuda.NUMBERS, pairs=True)
        cuda.gradients(*numbers, v, beta, prior, *residuals, do, P, Q, shares, dv, dbeta, dlog_decay, dprior, scale=scale, chunk=C)
    else:
        launch.launch(
            gradients_kernel, (tiles, B * H),
            *_spread(q, k, log_decay, prior, S, DEEP), k, v, beta, log_decay, *residuals, torch.empty_like(P), torch.empty_like(Q), do, P, Q, shares,
            dv, dbeta, dlog_decay, dprior, scale, T, N, blocks, B * H, H=H, K=K, V=V, C=C, S=S, KG=WARPS, WK=16,
            PRECISION=launch.dot_precision(q.dtype), INTERPRETED=launch.INTERPRETED, warps=WARPS, stages=1,
        )  # fmt: skip
    launch.launch(gather_kernel, (blocks, B * H), shares, dq, dk, T, blocks, B * H, tiles, H=H, K=K, S=S, BK=_power(K))
    return dq, dk, dv, dbeta, dlog_decay.sum(0), dprior.sum((0, 1)), P, Q


differentiable = arrays.custom_gradient(forward, backward, outputs=3)


def _spread(q, k, log_decay, prior, tokens: int, deep: float, count: int = 2, pairs: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """numbers, gates: see `spread_kernel`."""
    B, T, H, K = q.shape
    blocks = launch.divide_up(T, tokens)
    numbers, gates = (prior.new_empty((B * H, blocks, *shape, tokens)) for shape in ((K, count), (4,)))
    launch.launch(
        spread_kernel, (blocks, B * H), q, k, log_decay, prior, numbers, gates, T, blocks,
        H=H, K=K, S=tokens, BK=_power(K), DEEP=deep, NUMBERS=count, PAIRS=pairs,
    )  # fmt: skip
    return numbers, gates


def _sizes(q, v) -> tuple[int, ...]:
    """B, T, H, K, V, chunks"""
    B, T, H, K = q.shape
    return B, T, H, K, v.shape[-1], launch.divide_up(T, C)


def _power(n: int) -> int:
    """The least power of two that is at least n and 16, tensor cores' smallest side."""
    return max(16, 1 << (n - 1).bit_length())
