"""What every sequence layer is: a frozen dataclass with a parameter table, pure functions over arrays, and its costs.

Shapes: B batch, T time, D width.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any, ClassVar

from models.parameters import Table

Array = Any  # torch.Tensor or jax.Array
State = Any  # arrays in dicts and named tuples
SCALE_FIELDS = ("width", "heads", "key_size")


@dataclass(frozen=True)
class Layer:
    """A sequence layer on the backbone: x [B, T, D] to what is added to the stream [B, T, D].

    width, heads and key_size come from the scale; a subclass's further fields are its options in params.yaml.
    """

    width: int
    heads: int
    key_size: int

    name: ClassVar[str]
    mlp: ClassVar[bool] = True
    """Whether the block has an MLP behind this layer."""

    @classmethod
    def options(cls) -> tuple[str, ...]:
        """The names that params.yaml may set."""
        return tuple(field.name for field in fields(cls) if field.name not in SCALE_FIELDS)

    @property
    def forgets(self) -> bool:
        """Whether it has a forget gate for each head, and so a memory window; see `log_forget`."""
        return False

    @property
    def inner(self) -> int:
        """Width of queries and keys over all heads."""
        return self.heads * self.key_size

    @property
    def trainable(self) -> str | None:
        """None, or why this layer has only a parameter table and costs."""
        return "no forward pass yet" if type(self).forward is Layer.forward else None

    def parameters(self) -> Table:
        """The layer's parameters by name."""
        raise NotImplementedError

    def forward(
        self, p: dict[str, Array], x_BTD: Array, state: State | None = None, segments: Array | None = None, *, ops: ModuleType,
        record: dict[str, Array] | None = None,
    ) -> tuple[Array, State]:  # fmt: skip
        """The whole sequence at once.

        p: parameters by name, float32. x: normalised stream, float32 or bfloat16. state: where the sequence goes on from; None starts fresh.
        segments: int32 [B, T]; another id than the token before resets the layer, -1 is padding. ops: kernels.arrays.torch or .jax.
        record: where given, receives the layer's scalars (float32, one number each), such as Mesa's solver steps.
        Returns y [B, T, D] in x's dtype and the state after the last token.
        """
        raise NotImplementedError(f"Layer {self.name!r} has no forward pass yet: its parameters and costs can be planned, but not trained.")

    def step(self, p: dict[str, Array], x_BD: Array, state: State | None, *, ops: ModuleType) -> tuple[Array, State]:
        """One token [B, D] with a state of constant size (full attention: a cache); returns y [B, D] and the next state."""
        y_B1D, state = self.forward(p, x_BD[:, None], state, ops=ops)
        return y_B1D[:, 0], state

    def log_forget(self, p: dict[str, Array], x_BTD: Array, *, ops: ModuleType) -> Array:
        """log gamma [B, T, H] (float32) of each head's forget gate on the normalised stream x, where the layer `forgets`."""
        raise NotImplementedError(f"Layer {self.name!r} has no forget gate.")

    def initial_state(self, p: dict[str, Array], batch: int, *, ops: ModuleType) -> State:
        """The state of `batch` sequences before their first token: what padding leaves of no state at all."""
        like = next(iter(p.values()))
        _, state = self.forward(
            p, ops.zeros((batch, 1, self.width), ops.float32, like), segments=ops.full((batch, 1), -1, ops.int32, like), ops=ops
        )
        return state

    def reserve(self, state: State, tokens: int) -> State:
        """The state with room for `tokens` tokens in all. One of constant size has it; full attention's cache is made larger."""
        return state

    def flops(self, length: int, *, steps: float | None = None, training: bool = False) -> float:
        """Floating-point operations a token, averaged over a sequence of `length`; a multiply-add is two, element-wise work is not counted.

        steps: solver steps taken, where the layer has a solver (None: its cap). training: forward and backward (recomputation never counted).
        """
        raise NotImplementedError

    def state_floats(self, length: int) -> int:
        """Scalars kept a sequence after `length` tokens of decoding, without convolution caches."""
        raise NotImplementedError


def linear(x: Array, weight: Array, bias: Array | None = None, *, ops: ModuleType) -> Array:
    """x weight + bias in x's dtype; weights are kept in float32 and rounded here."""
    y = ops.matmul(x, ops.cast(weight, x.dtype))
    return y if bias is None else y + ops.cast(bias, x.dtype)


def precise(x: Array, *, ops: ModuleType) -> Array:
    """x in float32; float64 stays as it is."""
    return x if x.dtype == ops.float64 else ops.cast(x, ops.float32)


def gate(x: Array, weight: Array, bias: Array, *, ops: ModuleType) -> Array:
    """A gate before its activation: x weight + bias, in float32 whatever the activations' dtype."""
    y = ops.wide_matmul(x, weight)
    return y + ops.cast(bias, y.dtype)


def gates(x: Array, p: dict[str, Array], names: tuple[str, ...], *, ops: ModuleType) -> dict[str, Array]:
    """Each gate [..., H] before its activation, by one product for all: parameters NAME [D, H] and NAME_bias [H]."""
    y = gate(x, ops.concatenate([p[name] for name in names], 1), ops.concatenate([p[f"{name}_bias"] for name in names], 0), ops=ops)
    size = y.shape[-1] // len(names)
    return {name: y[..., index * size : (index + 1) * size] for index, name in enumerate(names)}


TRAINING = 3
"""Forward and backward over forward, for matrix products: each has one product forward and two backward."""


def product(*sizes: int) -> int:
    """FLOPs of multiplying a vector by a matrix of these sizes."""
    flops = 2
    for size in sizes:
        flops *= size
    return flops
