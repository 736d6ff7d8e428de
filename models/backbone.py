"""The backbone every layer sits on: a pre-norm decoder in the manner of Llama 2 (MesaNet, section 4, E.1 and G.2).

    x = sqrt(D) embedding[token];  each block: x += layer(RMSNorm(x)), x += MLP(RMSNorm(x))
    MLP(x) = (SiLU(x W_gate) * x W_up) W_down;  logits = 30 tanh(RMSNorm(x) embedding^T / 30)

Shapes: B batch, T time, D width, M MLP width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from models.layers.layer import TRAINING, Layer, product
from models.parameters import Parameter, Table, count, fan_in_transposed, ones, prefixed, residual

BACKENDS = ("torch", "jax")
SOFT_CAP = 30.0


@dataclass(frozen=True)
class Model:
    """A stack of blocks, one layer each, as pure functions over a dict of parameters.

    layers: of each block, first to last. width, mlp: of the stream and of the MLP's branches. backend: whose arrays it takes.
    """

    layers: tuple[Layer, ...]
    width: int
    mlp: int
    vocab_size: int
    backend: str = "torch"

    @cached_property
    def table(self) -> Table:
        """Every parameter by name: "embedding", "blocks.0.mixer.q", "blocks.0.mlp.gate", ..., "final_norm"."""
        norm = Parameter((self.width,), ones, decay=False, axes=("width",))
        table = {"embedding": Parameter((self.vocab_size, self.width), fan_in_transposed, decay=False, axes=("vocabulary", "width"))}
        for index, layer in enumerate(self.layers):
            block = {
                "mixer_norm": norm,
                **prefixed("mixer", layer.parameters()),
                "mlp_norm": norm,
                "mlp.gate": Parameter((self.width, self.mlp), axes=("width", "mlp")),
                "mlp.up": Parameter((self.width, self.mlp), axes=("width", "mlp")),
                "mlp.down": Parameter((self.mlp, self.width), residual, axes=("mlp", "width")),
            }
            table.update(prefixed(f"blocks.{index}", block))
        return {**table, "final_norm": norm}

    @cached_property
    def parameters(self) -> int:
        """How many scalars are trained; the tied embedding counts once."""
        return count(self.table)

    @property
    def trainable(self) -> str | None:
        """None, or why there is a table and a cost but no forward pass."""
        return next((reason for layer in self.layers if (reason := layer.trainable)), None)

    def flops(self, length: int, *, steps: float | None = None, training: bool = False) -> float:
        """Floating-point operations a token, averaged over a sequence of `length`; a multiply-add is two, element-wise work is not counted.

        steps: solver steps taken by layers that have a solver (None: their cap). training: forward and backward; a solver runs once
        in each; recomputed activations are not counted.
        """
        dense = len(self.layers) * product(3, self.width, self.mlp) + product(self.vocab_size, self.width)
        layers = sum(layer.flops(length, steps=steps, training=training) for layer in self.layers)
        return (TRAINING if training else 1) * dense + layers

    def state_floats(self, length: int) -> int:
        """Scalars kept a sequence after `length` tokens of decoding, without convolution caches."""
        return sum(layer.state_floats(length) for layer in self.layers)
