"""Mesa's one-token step: G and H read and written once, the solve with H in registers, all in float32. In Triton, and for keys and values of 128 in CUDA C
(`one_token.cu`), where of H the lower triangle is read, and in place written, G comes to shared memory while H is solved with, and a step of the solver
waits for its sums once.

No host read and no shape that depends on data, so it can be captured in a CUDA graph.

Shapes: B batch, H heads, K key size, V value size.
"""

import functools
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch._subclasses import FakeTensor

from kernels import arrays, nvrtc, segmentation
from kernels.launch import INTERPRETED, after, early, in_place, launch, since_hopper
from kernels.mesa.reference import State, fresh
from kernels.mesa.triton import tile
from kernels.tiles import prefetch

Array = Any  # torch.Tensor
SOURCE = Path(__file__).with_name("one_token.cu")
SQUARE, TRIANGLE, VECTORS = 4 * 128 * 128, 16 * 2560, 4 * (3 * 128 + 32)
"""Bytes of shared memory: G; of H the lower triangle, in squares of 32; three vectors and sums. H lies beside G, or where that comes to."""
STARTS = ("zero", "jacobi", "query")
SMALLEST = tl.constexpr(2**-23)  # a residual that counts as 0


def step(
    q, k, v, log_decay, beta, lam, *, sign=None, steps=30, eps=0.0, criterion="b", solve=True, start="jacobi", norm_epsilon=None,
    state=None, segment_B=None,
) -> tuple[Array, State, dict[str, Array]]:  # fmt: skip
    """See `kernels.mesa.step`."""
    if segment_B is not None:
        segmentation.check(segment_B, arrays.of(segment_B))
        segment_B = segment_B.contiguous()
    state, in_c, dtype = fresh(q, v) if state is None else state, in_cuda(q, v), v.dtype
    if in_c and not q.dtype == k.dtype == dtype:
        q, k, v = (x.float() for x in (q, k, v))
    q, k, v, G, S, last = (x.contiguous() for x in (q, k, v, *state))
    log_decay, beta, lam, sign = (None if x is None else x.float().contiguous() for x in (log_decay, beta, lam, sign))
    (B, H, K), V = q.shape, v.shape[-1]
    end = State(after(G), after(S), after(last) if segment_B is None else torch.empty_like(last))  # its heads read it, at their own times
    o, taken, residual = torch.empty_like(v), q.new_empty((B, H), dtype=torch.int32), torch.empty_like(beta)
    given = (q, k, v, log_decay, beta, sign, lam, G, S, segment_B, last, o, *end, taken, residual)
    start, steps = (start, steps) if solve else ("query", 0)
    if in_c:
        processors = torch.cuda.get_device_properties(q.device).multi_processor_count
        apart = not 2 * processors < B * H <= 3 * processors  # three programs a processor where all of them are then at work at once
        nvrtc.launch(
            SOURCE, "mesa_step", (B * H,), 128, SQUARE + apart * TRIANGLE + VECTORS, *given, H, steps, float(eps), int(criterion == "b"), STARTS.index(start),
            -1.0 if norm_epsilon is None else float(norm_epsilon), int(not in_place()),
            BFLOAT=int(q.dtype == torch.bfloat16), EARLY=int(early()), APART=int(apart), early=early(),
        )  # fmt: skip
    else:
        # Three programs of 168 registers a thread share a processor. Where each has one for itself, it takes what registers it can use.
        few = B * H <= 132
        launch(
            advance, (B * H,), *given, H, steps, float(eps), norm_epsilon,
            K=K, V=V, BK=tile(K), BV=tile(V), CHAINS=4 if few else 1, START=start, CRITERION=criterion,
            PREFETCH=few and not INTERPRETED and since_hopper() and K * V % 4 == 0, EARLY=early(), warps=max(1, tile(K) // 32), stages=1, registers=255 if few else 168, early=early(),
        )  # fmt: skip
    return o.to(dtype), end, {"steps": taken, "residual": residual}


def in_cuda(q: Array, v: Array) -> bool:
    """Whether the step has its sizes, its compiler and its shared memory in CUDA C. The same for every step of a state: Triton's kernel reads H whole."""
    sizes = q.shape[-1] == v.shape[-1] == 128 and q.is_cuda and not isinstance(q, FakeTensor)
    return sizes and nvrtc.refusal() is None and fits(q.device)


@functools.cache
def fits(device: torch.device) -> bool:
    """Whether a GPU copies to shared memory by itself, and has enough of it for a program."""
    has = torch.cuda.get_device_properties(device)
    return has.major >= 8 and has.shared_memory_per_block_optin >= SQUARE + TRIANGLE + VECTORS


@triton.jit
def times(S_AIK, x_K, A: tl.constexpr, I: tl.constexpr):
    """S x for a symmetric S. A thread has a column: its sum takes no other thread, and goes in A chains."""
    return tl.sum(tl.sum(S_AIK * tl.reshape(x_K, (A, I))[:, :, None], 1), 0)


@triton.jit(do_not_specialize=["H", "steps"], do_not_specialize_on_alignment=["S", "S_end"])
def advance(
    q, k, v, log_decay, beta, sign, lam, G, S, segment, last, o, G_end, S_end, last_end, taken, residual,
    H, steps, eps, norm_epsilon,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, START: tl.constexpr, CRITERION: tl.constexpr,
    CHAINS: tl.constexpr, PREFETCH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // H, bh % H
    i_K, j_V = tl.arange(0, BK), tl.arange(0, BV)
    real_K, real_V = i_K < K, j_V < V
    I: tl.constexpr = BK // CHAINS
    i_AI = tl.arange(0, CHAINS)[:, None] * I + tl.arange(0, I)[None, :]
    real_AIK = (i_AI < K)[:, :, None] & real_K[None, None, :]
    place_AIK = bh * K * K + i_AI[:, :, None] * K + i_K[None, None, :]
    S_AIK = tl.load(S + place_AIK, mask=real_AIK, other=0.0)
    if PREFETCH:
        prefetch(G + bh * K * V, K * V * 4)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

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
    written_AI = tl.reshape(written_K, (CHAINS, I))
    S_AIK = tl.where(keep == 0, 0.0, S_AIK * keep) + written_AI[:, :, None] * k_K[None, None, :]
    tl.store(S_end + place_AIK, S_AIK, mask=real_AIK)

    q_K = tl.load(q + bh * K + i_K, mask=real_K, other=0.0).to(tl.float32)
    lam_K = tl.load(lam + h * K + i_K, mask=real_K, other=1.0)
    most = tl.max(tl.abs(q_K), 0)
    b_K = q_K / tl.where(most > 0, most, 1.0)
    norm = tl.sqrt(tl.sum(b_K * b_K, 0))
    b_K = b_K / tl.where(norm > 0, norm, 1.0)
    diagonal_K = tl.sum(tl.sum(tl.where(i_AI[:, :, None] == i_K[None, None, :], S_AIK, 0.0), 1), 0) + lam_K
    if START == "query":
        x_K = b_K
    elif START == "jacobi":
        x_K = tl.where(diagonal_K > 0, b_K / tl.where(diagonal_K > 0, diagonal_K, 1.0), 0.0)
    else:
        x_K = b_K * 0.0
    r_K = b_K - times(S_AIK, x_K, CHAINS, I) - lam_K * x_K
    p_K = r_K
    square = tl.sum(r_K * r_K, 0)
    first = tl.sqrt(square)
    limit = tl.maximum(eps * (tl.minimum(first, 1.0) if CRITERION == "b" else first), SMALLEST)
    limit *= limit
    going = (most > 0) & (square > limit)
    count = 0
    while going & (count < steps):
        Ap_K = times(S_AIK, p_K, CHAINS, I) + lam_K * p_K
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
    left_K = b_K - times(S_AIK, x_K, CHAINS, I) - lam_K * x_K
    tl.store(taken + bh, tl.where(padding, 0, count))
    tl.store(residual + bh, tl.where(padding, 0.0, tl.sqrt(tl.sum(left_K * left_K, 0))))

    real_KV = real_K[:, None] & real_V[None, :]
    place_KV = bh * K * V + i_K[:, None] * V + j_V[None, :]
    G_KV = tl.load(G + place_KV, mask=real_KV, other=0.0)
    v_V = tl.load(v + bh * V + j_V, mask=real_V, other=0.0).to(tl.float32) * write
    G_KV = tl.where(keep == 0, 0.0, G_KV * keep)
    x_K *= most * norm
    read_V = tl.sum(x_K[:, None] * G_KV, 0) + tl.sum(x_K * k_K, 0) * v_V
    if norm_epsilon is not None:
        read_V *= tl.rsqrt(tl.sum(read_V * read_V, 0) / V + norm_epsilon)
    tl.store(o + bh * V + j_V, tl.where(padding, 0.0, read_V).to(o.dtype.element_ty), mask=real_V)
    tl.store(G_end + place_KV, G_KV + k_K[:, None] * v_V[None, :], mask=real_KV)
