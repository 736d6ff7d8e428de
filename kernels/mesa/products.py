"""What the kernels of Mesa share: a chunk's gates, and products of float32 matrices on half-precision tensor cores.

A float32 operand is held as high + low, two halves of 11 bits (float16, scaled by powers of two so that nothing leaves its range) or of
8 (bfloat16). MODE says how a product is taken: "half", high by high alone; "split", with the low parts, float32's accuracy or nearly;
"exact", on float32 operands (three TF32 products).

Shapes: C tokens of one chunk.
"""

import triton
import triton.language as tl

from kernels.tiles import GONE, decay_sums


@triton.jit
def decays(log_decay, sign, row_C, inside_C):
    """(sum_C, document_C, flip_C, first): see `kernels.tiles.decay_sums`, the chunk's first token aside, whose log decay is `first`, so
    that no bit inside the chunk depends on what was before it; flip_C is the product of the signs up to each token (1 without signs)."""
    token_C = tl.arange(0, row_C.shape[0])
    log_decay_C = tl.load(log_decay + row_C, mask=inside_C, other=0.0)
    apart_C = (token_C == 0) & (log_decay_C >= GONE)
    first = tl.sum(tl.where(apart_C, log_decay_C, 0.0), 0)
    sum_C, document_C = decay_sums(tl.where(apart_C, 0.0, log_decay_C))
    if sign is None:
        flip_C = sum_C * 0.0 + 1.0
    else:
        negative_C = (tl.load(sign + row_C, mask=inside_C, other=1.0) < 0).to(tl.int32)
        flip_C = 1.0 - 2.0 * (tl.cumsum(negative_C, 0) % 2).to(tl.float32)
    return sum_C, document_C, flip_C, first


@triton.jit
def since_start(sum_C, document_C, flip_C, first):
    """The decay from the chunk's start to each token."""
    return tl.where(document_C == 0, tl.exp(first + sum_C), 0.0) * flip_C


@triton.jit
def last_of(x_C):
    token_C = tl.arange(0, x_C.shape[0])
    return tl.sum(tl.where(token_C == x_C.shape[0] - 1, x_C, 0), 0)


@triton.jit
def to_end(sum_C, document_C, flip_C):
    """The decay from each token to the chunk's end."""
    near_C = document_C == last_of(document_C)
    return tl.where(near_C, tl.exp(tl.where(near_C, last_of(sum_C) - sum_C, 0.0)), 0.0) * flip_C * last_of(flip_C)


@triton.jit
def through(sum_C, document_C, flip_C, first):
    """The decay over the whole chunk."""
    return tl.where(last_of(document_C) == 0, tl.exp(first + last_of(sum_C)), 0.0) * last_of(flip_C)


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
    """sum + a b in float32. a: float32, or half for "half"; b: high part, b_low: low part or None where b is exact; sum: None for 0."""
    if MODE == "exact":
        return tl.dot(a, b, sum, input_precision="tf32x3")
    else:
        high = a.to(b.dtype)
        sum = tl.dot(high, b, sum)
        if MODE == "split":
            sum = tl.dot(low_part(a, high), b, sum)
            if b_low is not None:
                sum = tl.dot(high, b_low, sum)
        return sum
