"""The array operations that layers and kernels are written with, the same set over torch and over JAX.

`ops = arrays.of(x)` is the module for an array's type (`kernels.arrays.torch` or `kernels.arrays.jax`). Importing this package
imports neither framework. Arithmetic (+ - * /), comparison, slicing, `.reshape` and `.shape` are the arrays' own.
"""

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from kernels.arrays import declaration

Array = Any  # torch.Tensor or jax.Array


def of(x: Array) -> ModuleType:
    """The operations for an array's type: `kernels.arrays.torch` or `kernels.arrays.jax`."""
    framework = type(x).__module__.partition(".")[0]
    if framework == "torch" or any(t.__module__ == "torch" for t in type(x).__mro__):
        from kernels.arrays import torch as ops  # an import statement, so that torch.compile can trace this function

        return ops
    if framework in ("jax", "jaxlib"):
        from kernels.arrays import jax as ops

        return ops
    raise ValueError(f"expected a torch tensor or a JAX array, found {type(x).__name__}; convert it first.")


def load(backend: str) -> ModuleType:
    """The operations by the framework's name, "torch" or "jax"."""
    if backend not in ("torch", "jax"):
        raise ValueError(f'backend is {backend!r}; it must be "torch" or "jax".')
    return importlib.import_module(f"kernels.arrays.{backend}")


def custom_gradient(forward: Callable, backward: Callable, *, outputs: int, saved: int = 0) -> Callable:
    """A function of arrays with a hand-written gradient, for whichever framework its arrays belong to.

    forward(*arrays, **static) -> (outputs, residuals): two tuples of new arrays (none may be one of `arrays`); `outputs` is how many outputs,
        the first `saved` of which backward gets in front of the residuals.
    backward(arrays, residuals, gradients, **static) -> a gradient, or None, for each of `arrays`.
    Arrays may be None. Static options are int, float, bool, str or None. Outputs that are not floating point carry no gradient.
    The result is called as f(*arrays, **static) -> outputs. Under torch.compile forward and backward are opaque operations.
    """
    made = declaration.declare(forward, backward, outputs, saved)

    @functools.wraps(forward)
    def call(*arrays: Array | None, **static: Any) -> tuple[Array, ...]:
        first = next(x for x in arrays if x is not None)
        return made[of(first).name](*arrays, **static)

    return call
