"""An operation's Pallas kernels called with torch tensors, gradients included, so that one set of contract tests serves both frameworks."""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

Arrays = list[Any]


def through_jax(call: Callable, xs: dict[str, torch.Tensor], state: Any, segments: torch.Tensor | None, **options: Any) -> tuple:
    """call(xs, state, segments, **options) -> (o, state, info or None), computed by JAX."""
    leaves = [*xs.values(), *(state or ())]
    given = [_to_jax(x) for x in leaves]
    ids = None if segments is None else _to_jax(segments)
    names, kind = tuple(xs), None if state is None else type(state)
    forward, backward, shape = _compiled(call, names, kind, tuple(sorted(options.items())))

    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
            results = [_to_torch(x) for x in forward(given, ids)]
            ctx.mark_non_differentiable(*(x for x in results if not x.is_floating_point()))
            return tuple(results)

        @staticmethod
        def backward(ctx, *gradients: torch.Tensor) -> tuple:
            floats = [_to_jax(g) for g in gradients if g is not None and g.is_floating_point()]
            found = iter(backward(given, ids, floats))
            return tuple(_to_torch(next(found)) if x.is_floating_point() else None for x in leaves)

    results = Through.apply(*leaves)
    end_type, infos = shape[0]
    o, end = results[0], end_type(*results[1 : len(results) - len(infos)])
    return o, end, dict(zip(infos, results[len(results) - len(infos) :], strict=True)) if infos else None


@cache
def _compiled(call: Callable, names: tuple[str, ...], kind: Any, options: tuple) -> tuple[Callable, Callable, list]:
    """(forward, backward), jitted, and what the results are, known once forward has been traced."""
    shape: list[tuple[Any, tuple[str, ...]]] = []

    def flat(arrays: Arrays, ids: Any) -> Arrays:
        state = None if kind is None else kind(*arrays[len(names) :])
        o, end, info = call(dict(zip(names, arrays, strict=False)), state, ids, **dict(options))
        shape[:] = [(type(end), tuple(info or ()))]
        return [o, *end, *(info or {}).values()]

    def pull(arrays: Arrays, ids: Any, gradients: Arrays) -> Arrays:
        floats = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating)]

        def of_floats(*values: Any) -> Arrays:
            mixed = dict(enumerate(arrays)) | dict(zip(floats, values, strict=True))
            return [x for x in flat(list(mixed.values()), ids) if jnp.issubdtype(x.dtype, jnp.floating)]

        return list(jax.vjp(of_floats, *(arrays[i] for i in floats))[1](gradients))

    return jax.jit(flat), jax.jit(pull), shape


def _to_jax(x: torch.Tensor) -> Any:
    if x.dtype == torch.bfloat16:
        return jnp.asarray(x.detach().float().cpu().numpy(), jnp.bfloat16)
    return jnp.asarray(x.detach().cpu().numpy())


def _to_torch(x: Any) -> torch.Tensor:
    if x.dtype == jnp.bfloat16:
        return torch.tensor(np.asarray(x, np.float32)).bfloat16()
    return torch.tensor(np.asarray(x))
