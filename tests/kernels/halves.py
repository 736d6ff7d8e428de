"""Triton's interpreter with bfloat16 and float16 as a card has them: products of them summed in float32, and casts to the nearest, ties to even."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def _widened(x: Any) -> Any:
    if x.dtype.scalar == tl.bfloat16:
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
    return interpreter.TensorHandle(x.data.astype(np.float32), tl.float32) if x.dtype.scalar == tl.float16 else x


@contextmanager
def right() -> Iterator[None]:
    """Inside, they are so."""
    builder = interpreter.InterpreterBuilder
    dot, cast = builder.create_dot, builder.cast_impl

    def create_dot(self: Any, a: Any, b: Any, sum: Any, *rest: Any) -> Any:
        return dot(self, _widened(a), _widened(b), sum, *rest)

    def cast_impl(self: Any, x: Any, dtype: Any) -> Any:
        if x.dtype.scalar != tl.float32 or dtype.scalar != tl.bfloat16:
            return cast(self, x, dtype)
        bits = np.ascontiguousarray(x.data).view(np.uint32).astype(np.uint64)
        return interpreter.TensorHandle(((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16), dtype.scalar)

    builder.create_dot, builder.cast_impl = create_dot, cast_impl
    try:
        yield
    finally:
        builder.create_dot, builder.cast_impl = dot, cast
