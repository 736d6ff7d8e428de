"""Pallas kernels for TPUs (Mosaic) start here and nowhere else, with their blocks, their memory and their cost stated.

Heads precede time and time is cut into chunks: a program works on one chunk of one row G = B H, and the chunks of a row run in order.
Shapes: B batch, T time, H heads, K key size, G = B H, N chunks, C chunk length, P = N C.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Array = Any  # jax.Array

VMEM = 16 * 2**20
"""Bytes of a core's fast memory that one kernel may use: what a v5e grants by default (of 128 MiB there and on a v6e, 64 on a v5p)."""
LARGEST = 256
"""Of a head's key and value sizes: a state and what is computed from it then stay within VMEM."""


def refusal(shape: dict[str, int], dtype: str, device: str) -> str | None:
    """Why no Pallas kernel runs on such arrays; None where one does. An operation adds its own reasons.

    On the CPU, where nobody prefers them, kernels asked for by name run in Pallas' interpreter.
    """
    if importlib.util.find_spec("jax") is None:
        return "jax is not installed (pip install 'jax[tpu]')"
    if device not in ("tpu", "cpu"):
        return f"Pallas' kernels here are for TPUs, these arrays are on {device}"
    if dtype not in ("bfloat16", "float32"):
        return f"Pallas' kernels take bfloat16 and float32, these are {dtype}"
    for axis in ("K", "V"):
        if shape.get(axis, 0) > LARGEST:
            return f"{axis} is {shape[axis]}, at most {LARGEST} fit in a TPU core's fast memory"
    return None


def implementation(operation: str, function: str | None = None) -> Callable:
    """The operation (or `function`) as `kernels/<operation>/pallas.py` has it, imported when it is first called: importing kernels loads no framework.

    Raises ValueError for arrays that are not JAX's.
    """

    def call(*arrays: Any, **options: Any) -> Any:
        if type(arrays[0]).__module__.partition(".")[0] not in ("jax", "jaxlib"):
            raise ValueError(f"{operation} cannot run as pallas: its kernels take JAX arrays; build the model with backend jax.")
        return getattr(importlib.import_module(f"kernels.{operation}.pallas"), function or operation)(*arrays, **options)

    return call


def chunk_length(T: int) -> int:
    """128 tokens, the side of a matrix unit; fewer for short rows, in whole tiles of bfloat16."""
    return min(128, -(-T // 16) * 16)


@dataclass(frozen=True)
class Block:
    """An array in HBM and the part of it that a program sees. array: what is read, or an output's shape and dtype.

    shape: of the part, None for axes of which it has one entry and does not see; index: (g, n) -> the part's place, in parts.
    """

    array: Any  # jax.Array or jax.ShapeDtypeStruct
    shape: tuple[int | None, ...]
    index: Callable[[Any, Any], tuple]

    def spec(self) -> Any:
        from jax.experimental import pallas as pl

        return pl.BlockSpec(self.shape, self.index)

    def bytes(self) -> int:
        return math.prod(size or 1 for size in self.shape) * self.array.dtype.itemsize


def by_chunk(array: Any, many: int | None = None) -> Block:
    """[G, N, ...]: a program's own chunk; or `many` of them, one after another, then with an axis for them."""
    rest = array.shape[2:]
    return Block(array, (None, many, *rest), lambda g, n: (g, n, *(0,) * len(rest)))


def by_row(array: Any) -> Block:
    """[G, ...]: the same for all chunks of a row."""
    rest = array.shape[1:]
    return Block(array, (None, *rest), lambda g, n: (g, *(0,) * len(rest)))


def by_head(array: Any) -> Block:
    """[H, ...]: the same for all rows of a head."""
    rest = array.shape[1:]
    return Block(array, (None, *rest), lambda g, n: (g % array.shape[0], *(0,) * len(rest)))


def backwards(block: Block, N: int) -> Block:
    """The same, the chunks of a row running from its last to its first."""
    return Block(block.array, block.shape, lambda g, n: block.index(g, N - 1 - n))


def new(shape: Sequence[int], dtype: Any) -> Any:
    """The shape and dtype of an output."""
    import jax

    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def launch(
    kernel: Callable, G: int, N: int, inputs: Sequence[Block | None], outputs: Sequence[Block | None], *, products: int, exponentials: int = 0,
    scratch: Sequence[tuple[int, ...]] = (), reverse: bool = False, like: Array, **options: Any,
) -> list[Array | None]:  # fmt: skip
    """kernel(*inputs, *outputs, *scratch, **options) on references, for every row and, in order (reverse: last first), every chunk.

    Blocks of None are None to the kernel too. scratch: shapes of float32 arrays in fast memory. products: multiply-adds in one program, and
    exponentials: exp, divisions and the like, both for the compiler's schedule.
    """
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    from kernels.arrays import jax as ops

    blocks = [*inputs, *outputs]
    if reverse:
        blocks = [None if block is None else backwards(block, N) for block in blocks]
    given = [block for block in blocks[: len(inputs)] if block is not None]
    made = [block for block in blocks[len(inputs) :] if block is not None]

    def body(*references: Any) -> None:
        rest = iter(references)
        kernel(*(None if block is None else next(rest) for block in blocks), *rest, **options)

    moved = sum(block.bytes() for block in given + made) * G * N
    run = pl.pallas_call(
        body,
        grid=(G, N),
        in_specs=[block.spec() for block in given],
        out_specs=[block.spec() for block in made],
        out_shape=[block.array for block in made],
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM),
        cost_estimate=pl.CostEstimate(flops=2 * products * G * N, bytes_accessed=moved, transcendentals=exponentials * G * N),
        interpret=ops.device(like) == "cpu",
        name=kernel.__module__.removeprefix("kernels.").replace(".", "_") + "_" + kernel.__name__.strip("_"),
    )
    results = iter(run(*(block.array for block in given)))
    return [None if block is None else next(results) for block in outputs]


def split(x_BTH: Array, C: int, *, many: int = 1, fill: float = 0) -> Array:
    """[B, T, H, K] -> [G, N, C, K], or gates [B, T, H] -> [G, N, 1, C] (float32), filled up at the end of time to whole chunks, `many` at once."""
    import jax.numpy as jnp

    B, T, H, *rest = x_BTH.shape
    N = many * -(-T // (C * many))
    x = jnp.moveaxis(x_BTH, 2, 1)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, N * C - T), *((0, 0) for _ in rest)), constant_values=fill)
    return x.reshape(B * H, N, C, *rest) if rest else x.astype(jnp.float32).reshape(B * H, N, 1, C)


def join(x_GN: Array, B: int, T: int) -> Array:
    """Undoes `split`."""
    import jax.numpy as jnp

    G, N, *rest = x_GN.shape
    x = x_GN.reshape(B, G // B, -1, rest[-1]) if rest[0] != 1 else x_GN.reshape(B, G // B, -1)
    return jnp.moveaxis(x, 1, 2)[:, :T]
