"""Torch on a GPU: one token through a block of Mesa or gated linear attention as eight kernels, four of them products, and through the head as two.

    projections and gates | heads: convolutions, unit queries and keys | the layer's step | the heads' norm | output and sum
    both branches | SiLU and their product | down and sum

Of a few sequences, products take what stands around them with them: six kernels, and one. What a block is, `Model.block` and the layers say; here is
how few kernels it takes where every one is short. Norms' weights are multiplied into the weights behind them before these are rounded, and what a norm
divides a row by follows the product. Such weights are a second copy: prompts go through `Model.block`.

Shapes: B batch, D width, H heads, K key size, V value size; a weight is [outputs, inputs].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

import kernels
from kernels import launch
from kernels.arrays import torch as ops
from kernels.head_loss import SOFT_CAP
from models.backbone import NORM_EPSILON
from models.layers.gla import GLA
from models.layers.layer import Layer, State
from models.layers.mesa import Mesa

Array = torch.Tensor
OPERATIONS = {GLA: "linear_attention", Mesa: "mesa"}
PARTS = 3
"""bfloat16 parts of a gate's float32 weight: their sum is exact."""


def suits(layer: Layer, device: str, dtype: torch.dtype) -> bool:
    """Whether a block of such a layer has these kernels."""
    operation, name = OPERATIONS.get(type(layer)), str(dtype).removeprefix("torch.")
    if operation is None or launch.refusal({}, name, device) is not None:
        return False
    sizes = {"B": 1, "T": 1, "H": layer.heads, "K": layer.key_size, "V": layer.value_size}
    if kernels.choose(operation, sizes, name, device) != "triton":
        return False
    plain = not (layer.convolve_values or layer.skip or layer.output_gate) and layer.forget_gate == "sigmoid"
    return plain and layer.convolution <= 4 and max(layer.key_size, layer.value_size) <= 256


@dataclass(frozen=True)
class Block:
    """A block's weights as its kernels take them; call it as `Model.block`."""

    layer: Any
    projections: Array
    convolutions: tuple[Array, Array]
    bias: Array
    operands: tuple[Array, ...]
    out: Array
    branches: Array
    down: Array

    @classmethod
    def of(cls, layer: Any, p: Mapping[str, Array], dtype: torch.dtype) -> Block:
        """p: the block's parameters by their names in it, float32, or rounded to `dtype`."""
        mixer = {name.removeprefix("mixer."): value.float() for name, value in p.items() if name.startswith("mixer.")}
        norm = p["mixer_norm"].float()[:, None]
        gates = torch.cat([mixer[name] for name in layer.gates], 1) * norm
        parts = ops.parts(gates, PARTS) if dtype == torch.bfloat16 else [gates]
        branches = torch.cat([p["mlp.gate"], p["mlp.up"]], 1).float() * p["mlp_norm"].float()[:, None]
        given = {name: gates.new_zeros((1, 1, layer.heads)) for name in layer.gates}
        return cls(
            layer,
            _rounded(torch.cat([*(mixer[name] * norm for name in ("q", "k", "v")), *parts], 1), dtype),
            (mixer["q_conv"].to(dtype).contiguous(), mixer["k_conv"].to(dtype).contiguous()),
            torch.stack([mixer[f"{name}_bias"] for name in layer.gates]),
            tuple(layer.operands(mixer, given, norm, ops=ops)[2:]),
            _rounded(mixer["out"] * mixer["norm"].reshape(-1, 1), dtype),
            _rounded(branches, dtype),
            _rounded(p["mlp.down"].float(), dtype),
        )

    def __call__(self, x_BD: Array, state: State) -> tuple[Array, State, dict[str, Array]]:
        """The stream after the block, and the state: each is written over the one given."""
        from kernels import rows
        from kernels.convolution import one_token as convolution

        layer, few = self.layer, rows.few(x_BD, self.projections, self.out, self.down)
        with launch.chained():
            if few:
                projected = rows.product_of_few(x_BD, self.projections, epsilon=NORM_EPSILON, wide=True)
            else:
                projected = rows.product(x_BD, self.projections, wide=True)
            q, k, v, *gates = convolution.heads(
                projected, x_BD, self.convolutions, (state["q_conv"], state["k_conv"]), self.bias, H=layer.heads, K=layer.key_size, V=layer.value_size,
                bound=getattr(layer, "forget_bound", 1.0), epsilon=NORM_EPSILON, scaled=few,
            )  # fmt: skip
            if isinstance(layer, Mesa):
                o_BHV, memory, _ = layer.one_token(
                    q, k, v, *gates, *self.operands, **layer.settings(), norm_epsilon=layer.norm_epsilon, state=state["memory"]
                )
            else:
                o_BHV, memory = layer.one_token(q, k, v, *gates, state=state["memory"])
                o_BHV = rows.unit_groups(o_BHV, layer.norm_epsilon)
            after = {**state, "memory": memory}
            if few:
                x_BD = rows.product_of_few(o_BHV.flatten(1), self.out, add_to=x_BD)
                hidden = rows.product_of_few(x_BD, self.branches, epsilon=NORM_EPSILON, gated=True)
                return rows.product_of_few(hidden, self.down, add_to=x_BD), after, {}
        x_BD = rows.product(o_BHV.flatten(1), self.out, add_to=x_BD)
        hidden = rows.gated(rows.product(x_BD, self.branches), x_BD, NORM_EPSILON)
        return rows.product(hidden, self.down, add_to=x_BD), after, {}


def head(params: Mapping[str, Array], dtype: torch.dtype) -> Array:
    """The head's weight [V, D], the last norm's in it, filled up with zeros to a number of rows that products like: four times as fast as 50,257."""
    weight_VD = (params["embedding"].float() * params["final_norm"].float()).to(dtype)
    return torch.nn.functional.pad(weight_VD, (0, 0, 0, -len(weight_VD) % 128)).contiguous()


def logits(x_BD: Array, weight_VD: Array, vocab_size: int) -> Array:
    """Logits [B, V], float32, of the stream behind the last block."""
    from kernels import rows

    if rows.few(x_BD, weight_VD):
        with launch.chained():
            return rows.product_of_few(x_BD, weight_VD, epsilon=NORM_EPSILON, wide=True, cap=SOFT_CAP)[:, :vocab_size]
    return rows.capped(rows.product(x_BD, weight_VD, wide=True), x_BD, NORM_EPSILON, SOFT_CAP)[:, :vocab_size]


def _rounded(weight_IJ: Array, dtype: torch.dtype) -> Array:
    return weight_IJ.to(dtype).T.contiguous()
