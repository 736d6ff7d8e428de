"""What XLA compiles: a training step, scores, and one more token, as functions of stacked parameters (see jax_stack.py).

Each device differentiates its own rows of a batch, and the gradients are summed (see jax_mesh.py).
Shapes: B batch, T time, P prompt, C positions at once, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from kernels import arrays
from models.backbone import Model
from models.backends.jax_mesh import Layout
from models.backends.jax_stack import Params, Stack
from models.layers.layer import State
from models.parameters import Table

CHUNK = 1 << 26
"""Logits that a device holds at once in the loss."""


def head_nll(model: Model, params: Params, x_BTD: jax.Array, target_BT: jax.Array) -> jax.Array:
    """Negative log likelihoods [B, T], a few positions of logits at a time, computed again in the backward pass."""
    B, T = target_BT.shape
    C = max(1, min(T, CHUNK // (B * model.vocab_size)))
    padding = -T % C
    x_NBCD = jnp.moveaxis(jnp.pad(x_BTD, ((0, 0), (0, padding), (0, 0))).reshape(B, -1, C, x_BTD.shape[-1]), 1, 0)
    target_NBC = jnp.moveaxis(jnp.pad(target_BT, ((0, 0), (0, padding))).reshape(B, -1, C), 1, 0)

    @jax.checkpoint
    def nll(x_BCD: jax.Array, target_BC: jax.Array) -> jax.Array:
        return arrays.load("jax").softmax_cross_entropy(model.logits(params, x_BCD), target_BC)

    nll_NBC = jax.lax.map(lambda part: nll(*part), (x_NBCD, target_NBC))
    return jnp.moveaxis(nll_NBC, 0, 1).reshape(B, -1)[:, :T]


def losses(
    model: Model, params: Params, tokens_BT1: jax.Array, segments_BT: jax.Array | None, *, layout: Layout, dtype: Any, rematerialise: bool = False
) -> tuple[jax.Array, dict[str, jax.Array]]:  # fmt: skip
    """(negative log likelihoods [B, T], the layers' scalars) of a device's rows; params: this device's part of the stacked ones."""
    whole = params | {name: layout.gather(model.table[name], params[name]) for name in ("embedding", "final_norm")}
    x_BTD, _, record = Stack(model).stream(
        whole, tokens_BT1[:, :-1], segments=segments_BT, dtype=dtype, rematerialise=rematerialise, gather=layout.gather
    )
    return head_nll(model, whole, x_BTD, tokens_BT1[:, 1:]), record


def gradients(
    params: Params, tokens_BT1: jax.Array, segments_BT: jax.Array | None, weight_BT: jax.Array, *, model: Model, layout: Layout, dtype: Any,
    parts: int, rematerialise: bool,
) -> tuple[jax.Array, Params, dict[str, jax.Array]]:  # fmt: skip
    """The weighted sum of the negative log likelihoods, its gradient, and the layers' scalars, each device taking its rows in `parts`."""
    table = Stack(model).table
    specs = {name: layout.spec(parameter) for name, parameter in table.items()}

    def cut(x: jax.Array) -> jax.Array:
        return x.reshape(parts, -1, *x.shape[1:])

    def of_rows(params: Params, tokens: jax.Array, segments: jax.Array | None, weight: jax.Array) -> tuple:
        def scored(params: Params, tokens: jax.Array, segments: jax.Array | None, weight: jax.Array) -> tuple:
            nll, record = losses(model, params, tokens, segments, layout=layout, dtype=dtype, rematerialise=rematerialise)
            return (nll * weight).sum(), record

        def add_part(total: tuple, part: tuple) -> tuple:
            (value, record), gradient = jax.value_and_grad(scored, has_aux=True)(params, *part)
            return jax.tree.map(jnp.add, total, (value, gradient)), record

        start = (jnp.zeros((), weight.dtype), jax.tree.map(jnp.zeros_like, params))
        (value, gradient), records = jax.lax.scan(add_part, start, jax.tree.map(cut, (tokens, segments, weight)))
        gradient = {name: layout.sum_gradient(table[name], g) for name, g in gradient.items()}
        return layout.sum(value), gradient, layout.mean(jax.tree.map(jnp.mean, records))

    rows = layout.rows(len(tokens_BT1))
    mapped = jax.shard_map(
        of_rows, mesh=layout.mesh, in_specs=(specs, rows, rows, rows), out_specs=(P(), specs, P()), check_vma=False
    )  # fmt: skip
    return mapped(params, tokens_BT1, segments_BT, weight_BT)


def adamw(table: Table, options: Mapping[str, float]) -> optax.GradientTransformation:
    """Clipping by the global norm, then AdamW's direction, of which a step takes learning rate times as much."""
    return optax.chain(
        optax.clip_by_global_norm(options["clip"]),
        optax.scale_by_adam(options["beta1"], options["beta2"], options["epsilon"]),
        optax.add_decayed_weights(options["weight_decay"], mask={name: parameter.decay for name, parameter in table.items()}),
    )


def shardings(transform: optax.GradientTransformation, table: Table, layout: Layout, params: Params) -> tuple[dict, Any]:
    """Of the parameters, and of the optimiser's state, whose moments are split as their parameters are."""
    of_params = {name: layout.sharding(parameter) for name, parameter in table.items()}
    state = jax.eval_shape(transform.init, params)
    return of_params, optax.tree.map_params(
        transform, lambda _, sharding: sharding, state, of_params, transform_non_params=lambda _: layout.sharding()
    )


@cache
def compiled(function: Callable, static: tuple[str, ...], donated: str | None, deterministic: bool) -> Callable:
    """The function, compiled by XLA; deterministic: to the same bits on every run, on a GPU too."""
    options = {"xla_gpu_deterministic_ops": True} if deterministic else None
    return jax.jit(function, static_argnames=static, donate_argnames=donated, compiler_options=options)


def train_step(
    state: tuple[Params, Any], tokens_BT1: jax.Array, segments_BT: jax.Array | None, weight_BT: jax.Array, learning_rate: jax.Array, *,
    model: Model, optimizer: tuple, layout: Layout, dtype: Any, parts: int, skip_nonfinite: bool, rematerialise: bool,
) -> tuple:  # fmt: skip
    """One AdamW step: (stacked parameters, the optimiser's state) after it, and the facts that Trainer.step returns."""
    params, moments = state
    table = Stack(model).table
    transform = adamw(table, dict(optimizer))
    value, gradient, record = gradients(
        params, tokens_BT1, segments_BT, weight_BT, model=model, layout=layout, dtype=dtype, parts=parts, rematerialise=rematerialise
    )
    norm = optax.tree.norm(gradient)
    finite = jnp.isfinite(norm) & jnp.isfinite(value)
    updates, moments_after = transform.update(gradient, moments, params)
    moved = (optax.apply_updates(params, jax.tree.map(lambda u: -learning_rate * u, updates)), moments_after)
    if skip_nonfinite:
        moved = jax.tree.map(lambda new, old: jnp.where(finite, new, old), moved, state)
    moved = jax.lax.with_sharding_constraint(moved, shardings(transform, table, layout, params))
    return moved, {"loss": value, "grad_norm": norm, "finite": finite.astype(jnp.float32), **record}


TRAIN_STATIC = ("model", "optimizer", "layout", "dtype", "parts", "skip_nonfinite", "rematerialise")


def scores(params: Params, tokens_BT1: jax.Array, segments_BT: jax.Array | None, *, model: Model, layout: Layout, dtype: Any) -> tuple:
    """Negative log likelihoods [B, T] and the layers' scalars, of stacked parameters."""
    specs = {name: layout.spec(parameter) for name, parameter in Stack(model).table.items()}
    rows = layout.rows(len(tokens_BT1))

    def of_rows(params: Params, tokens: jax.Array, segments: jax.Array | None) -> tuple:
        nll, record = losses(model, params, tokens, segments, layout=layout, dtype=dtype)
        return nll, layout.mean(record)

    mapped = jax.shard_map(of_rows, mesh=layout.mesh, in_specs=(specs, rows, rows), out_specs=(rows, P()), check_vma=False)
    return mapped(params, tokens_BT1, segments_BT)


SCORE_STATIC = ("model", "layout", "dtype")


@partial(jax.jit, static_argnames=("model",))
def prefill(params: Params, tokens_BP: jax.Array, segments_BP: jax.Array | None, *, model: Model) -> tuple[jax.Array, list[State]]:
    """Logits [B, V] of the token after the prompts, and the states to go on from; params and states are stacked."""
    x_BPD, states, _ = Stack(model).stream(params, tokens_BP, segments=segments_BP, keep_states=True)
    return model.logits(params, x_BPD[:, -1]), states


@partial(jax.jit, static_argnames=("model",), donate_argnames=("states",))
def decode(params: Params, token_B: jax.Array, states: list[State], *, model: Model) -> tuple[jax.Array, list[State]]:
    """`Model.step`, stacked; the states' memory is used again."""
    x_BD, states, _ = Stack(model).stream(params, token_B, states, keep_states=True)
    return model.logits(params, x_BD), states
