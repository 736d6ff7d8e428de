"""Products of float32 matrices on half-precision tensor cores.

A float32 operand is held as high + low, two halves of 11 bits (float16, scaled by powers of two so that nothing leaves its range) or of
8 (bfloat16). MODE says how a product is taken: "half", high by high alone; "split", with the low parts, float32's accuracy or nearly;
"exact", on float32 operands (three TF32 products).

Shapes: C tokens of one chunk.
"""

import triton
import triton.language as tl

from kernels.tiles import exp


@triton.jit
def power_of_two(x):
    """The largest power of two that is at most x; 1 for 0."""
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(power > 0, power, 1.0)


@triton.jit
def row_scales(x_CK, MODE: tl.constexpr):
    """Powers of two by which rows are divided to fit float16; 1 where operands stay float32."""
    return tl.max(tl.abs(x_CK), 1) * 0.0 + 1.0 if MODE == "exact" else power_of_two(tl.max(tl.abs(x_CK), 1))


@triton.jit
def operand(x, MODE: tl.constexpr):
    """A matrix that float16 holds without error, as tensor cores take it."""
    return x if MODE == "exact" else x.to(tl.float16)


@triton.jit
def low_part(x, high):
    return (x - high.to(tl.float32)).to(high.dtype)


@triton.jit
def product(a, b, b_low, sum, MODE: tl.constexpr):
    """sum + a b in float32. a: float32, or in b's dtype, exact; b: high part, b_low: low part or None where b is exact; sum: None for 0."""
    if MODE == "exact":
        return tl.dot(a, b, sum, input_precision="tf32x3")
    else:
        high = a.to(b.dtype)
        sum = tl.dot(high, b, sum)
        if MODE == "split":
            if a.dtype != b.dtype:
                sum = tl.dot(low_part(a, high), b, sum)
            if b_low is not None:
                sum = tl.dot(high, b_low, sum)
        return sum


@triton.jit
def halves(x, dtype: tl.constexpr, MODE: tl.constexpr):
    """(high, low) of x as operands of split products; x itself twice for "exact"."""
    if MODE == "exact":
        return x, x
    else:
        high = x.to(dtype)
        return high, low_part(x, high)


@triton.jit
def times_halves(high, low, b, b_low, sum, MODE: tl.constexpr):
    """sum + (high + low) b, b with a low part or (None) exact."""
    sum = product(high, b, b_low, sum, MODE)
    return sum if MODE == "exact" else product(low, b, None, sum, "half")


@triton.jit
def settled(x):
    """x, as a product leaves its result: through one that adds 0. What follows from it stays there, and is not made anew in other layouts."""
    left, right = tl.zeros((x.shape[0], 16), tl.float16), tl.zeros((16, x.shape[1]), tl.float16)
    return tl.dot(left, right, x)


@triton.jit
def weights(sum_C, tag_C, reach_C):
    """[C, C]: the decay from s to t, times s's reach; sums and tags are `kernels.linear_attention.walks.gates`'."""
    token_C, document_C = tl.arange(0, sum_C.shape[0]), tag_C >> 1
    flip_C = 1.0 - 2.0 * (tag_C & 1).to(tl.float32)
    seen = (token_C[:, None] >= token_C[None, :]) & (document_C[:, None] == document_C[None, :])
    return tl.where(seen, exp(sum_C[:, None] - sum_C[None, :]) * flip_C[:, None] * (flip_C * reach_C)[None, :], 0.0)
