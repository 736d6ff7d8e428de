"""Triton functions that the kernels of several operations share.

Shapes: C tokens of one chunk. Imported by the operations' `triton.py` alone.
"""

import triton
import triton.language as tl

from kernels import launch

INTERPRETED = tl.constexpr(launch.INTERPRETED)

GONE = tl.constexpr(-104.0)
"""exp of less is 0 in float32: such a decay drops the state, whatever is behind it."""


@triton.jit
def _join(sum_a, cut_a, sum_b, cut_b):
    return tl.where(cut_b != 0, sum_b, sum_a + sum_b), cut_a + cut_b


@triton.jit
def decay_sums(log_decay_C):
    """(sum_C, document_C): log decay of each token summed from the last token that dropped the state, whose own counts as 0; and how many did.

    A running sum that starts anew: no decay before a drop is in a sum behind it, so neither -inf nor another document's gates touch it.
    The decay from s to t >= s is exp(sum_t - sum_s) where both have one document, else 0; from the chunk's start exp(sum_t) where it is 0.
    """
    cut = log_decay_C < GONE
    return tl.associative_scan((tl.where(cut, 0.0, log_decay_C), cut.to(tl.int32)), 0, _join)


@triton.jit
def decay_between(sum_C, document_C):
    """[C, C], row t, column s: the decay from s to t, 0 for s > t."""
    token_C = tl.arange(0, sum_C.shape[0])
    seen = (token_C[:, None] >= token_C[None, :]) & (document_C[:, None] == document_C[None, :])
    return tl.where(seen, tl.exp(tl.where(seen, sum_C[:, None] - sum_C[None, :], 0.0)), 0.0)


@triton.jit
def exp(x):
    """e^x of float32, 0 for what is below 2^-126: two instructions, where tl.exp takes four."""
    if INTERPRETED:
        return tl.exp(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * 1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1)


SIGMOID = tl.constexpr("""
{
.reg .f32 power;
mul.ftz.f32 power, $1, 0fBFB8AA3B;
ex2.approx.ftz.f32 power, power;
add.ftz.f32 power, power, 0f3F800000;
rcp.approx.ftz.f32 $0, power;
}
""")  # by -1 / log 2; plus 1


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x) of float32 to a few ulp, 0 for what is below 2^-126: four instructions, where tl.sigmoid takes fourteen."""
    if INTERPRETED:
        return tl.sigmoid(x)
    return tl.inline_asm_elementwise(SIGMOID, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


PREFETCH = tl.constexpr("""
{
.reg .pred first;
.reg .u32 thread;
mov.u32 thread, %tid.x;
setp.eq.u32 first, thread, 0;
@first cp.async.bulk.prefetch.L2.global [$1], $2;
mov.u32 $0, 0;
}
""")


@triton.jit
def prefetch(pointer, bytes):
    """Ask for memory to be brought into the second cache: a multiple of 16 bytes, from one on. Not in the interpreter."""
    tl.inline_asm_elementwise(PREFETCH, "=r,l,r", [pointer.to(tl.int64), bytes], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def prefetch_lines(pointers):
    """Ask for the 128 bytes around each pointer likewise, a line a thread."""
    if not INTERPRETED:
        places = pointers.to(tl.int64)
        tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [places], dtype=tl.int32, is_pure=False, pack=1)
