"""Calling an operation of the table from numpy, in either framework, with gradients."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from tests.kernels.bridge import through_jax
from tests.kernels.operations import BACKEND, OPERATIONS, Operation, Sizes

POSITIONAL = {"q", "k", "v", "log_decay", "beta", "lam", "prior", "x", "log_a", "log_input", "weight", "bias"}


def make(operation: Operation, sizes: Sizes, seed: int = 0) -> tuple[dict[str, np.ndarray], tuple[np.ndarray, ...]]:
    """Inputs and a state to start from, in float64."""
    random = np.random.default_rng(seed)
    return operation.inputs(random, sizes), operation.state(random, sizes)


def split_documents(B: int, T: int, seed: int = 0) -> np.ndarray:
    """Documents of random lengths, ids that start at 0, padding in front, within and behind."""
    random = np.random.default_rng(seed)
    ids = np.cumsum(random.random((B, T)) < 4 / T, axis=1).astype(np.int32)
    ids[random.random((B, T)) < 0.15] = -1
    return ids


def error(x: Any, reference: Any) -> float:
    """Largest |x - reference| over largest |reference|; infinite when x is not finite."""
    x, reference = (y.detach().double().cpu().numpy() if isinstance(y, torch.Tensor) else np.asarray(y, np.float64) for y in (x, reference))
    assert x.shape == reference.shape, (x.shape, reference.shape)
    difference = np.abs(x - reference).max(initial=0)
    if difference == 0:
        return 0.0
    return float(difference / np.abs(reference).max()) if np.isfinite(difference) else np.inf


def call(operation: Operation, xs: dict[str, Any], state: Any, segments: Any, **options: Any):
    """(o, state, info or None); torch tensors reach Pallas' kernels through JAX."""
    if (options.get("backend") or BACKEND) == "pallas" and isinstance(next(iter(xs.values())), torch.Tensor):
        return through_jax(_caller(operation.name), xs, state, segments, **options)
    arguments = [x for name, x in xs.items() if name in POSITIONAL]
    named = {name: x for name, x in xs.items() if name not in POSITIONAL}
    o, state, *info = operation.call(*arguments, **named, state=state, segments=segments, **options)
    return o, state, info[0] if info else None


@cache
def _caller(name: str) -> Callable:
    return partial(call, next(operation for operation in OPERATIONS.values() if operation.name == name))


def step(operation: Operation, xs: dict[str, Any], t: int, state: Any, segments: Any, **options: Any):
    """The step on token t of xs: (o, state)."""
    xs = {name: x if name in operation.fixed else x[:, t] for name, x in xs.items()}
    arguments = [x for name, x in xs.items() if name in POSITIONAL]
    named = {name: x for name, x in xs.items() if name not in POSITIONAL}
    o, state, *_ = operation.step(*arguments, **named, state=state, segment_B=None if segments is None else segments[:, t], **options)
    return o, state


def dtype_of(operation: Operation, name: str, dtype: str) -> str:
    return "float32" if dtype == "bfloat16" and name in operation.float32 else dtype


def to_torch(
    operation: Operation, xs: dict[str, np.ndarray], state: tuple | None, dtype: str, ids: np.ndarray | None = None, gradient: bool = False
):
    """(xs, state or None) as torch tensors; the state's segment id is 0 unless given."""
    given = {n: torch.tensor(x, dtype=getattr(torch, dtype_of(operation, n, dtype))) for n, x in xs.items()}
    if gradient:
        given = {n: x if n in operation.without_gradient else x.requires_grad_() for n, x in given.items()}
    if state is None:
        return given, None
    arrays = [torch.tensor(x, dtype=torch.float64 if dtype == "float64" else torch.float32, requires_grad=gradient) for x in state]
    ids = np.zeros(len(state[0]), np.int32) if ids is None else ids
    return given, operation.state_type(*arrays, torch.tensor(ids, dtype=torch.int32))


def state_leaves(start: Any, state: tuple | None) -> dict[str, Any]:
    """The differentiable arrays of a state, by name."""
    return {f"state {i}": x for i, x in enumerate(start[: len(state)])} if state else {}


def weighted(operation: Operation, o: Any, state: Any, seed: int = 1) -> Any:
    """A fixed random projection of all float outputs: the scalar that is differentiated."""
    random = np.random.default_rng(seed)
    total = 0
    for x in (o, *operation.comparable(state)):
        w = random.standard_normal(tuple(x.shape))
        w = w + w.swapaxes(-1, -2) if w.ndim == 4 and w.shape[-1] == w.shape[-2] else w  # H is symmetric
        weights = torch.tensor(w) if isinstance(x, torch.Tensor) else jnp.asarray(w, x.dtype)
        total = total + ((x.double() if isinstance(x, torch.Tensor) else x) * weights).sum()
    return total


def run_torch(operation: Operation, xs, state, segments, dtype: str, backend: str | None, **options) -> dict[str, np.ndarray]:
    """Outputs, final states and the gradient of every differentiable input, by name, in float64 numpy."""
    given, start = to_torch(operation, xs, state, dtype, gradient=True)
    o, end, _ = call(operation, given, start, None if segments is None else torch.tensor(segments), backend=backend, **options)
    leaves = {n: x for n, x in given.items() if n not in operation.without_gradient} | state_leaves(start, state)
    gradients = torch.autograd.grad(weighted(operation, o, end), list(leaves.values()), allow_unused=True)
    gradients = [torch.zeros_like(x) if g is None else g for g, x in zip(gradients, leaves.values(), strict=True)]
    results = {
        "o": o,
        **{f"end {i}": x for i, x in enumerate(operation.comparable(end))},
        **{f"d {n}": g for n, g in zip(leaves, gradients, strict=True)},
    }
    return {n: x.detach().double().cpu().numpy() for n, x in results.items()}


def run_jax(operation: Operation, xs, state, segments, backend: str | None, **options) -> dict[str, np.ndarray]:
    """As `run_torch`, in float32 through JAX."""
    given = {n: jnp.asarray(x, jnp.float32) for n, x in xs.items()}
    fixed = {n: x for n, x in given.items() if n in operation.without_gradient}
    leaves = {n: x for n, x in given.items() if n not in fixed} | {
        f"state {i}": jnp.asarray(x, jnp.float32) for i, x in enumerate(state or ())
    }
    ids = jnp.zeros(len(next(iter(xs.values()))), jnp.int32)
    segments = None if segments is None else jnp.asarray(segments)

    def loss(leaves):
        both = leaves | fixed
        start = None if state is None else operation.state_type(*(leaves[f"state {i}"] for i in range(len(state))), ids)
        o, end, _ = call(operation, {n: both[n] for n in xs}, start, segments, backend=backend, **options)
        return weighted(operation, o, end), (o, end)

    (_, (o, end)), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(leaves)
    results = {"o": o, **{f"end {i}": x for i, x in enumerate(operation.comparable(end))}, **{f"d {n}": g for n, g in gradients.items()}}
    return {n: np.asarray(x, np.float64) for n, x in results.items()}
