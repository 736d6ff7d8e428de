"""JAX: arrays from numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def to_arrays(values: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """numpy arrays as JAX arrays on the default device."""
    return {name: jnp.asarray(value) for name, value in values.items()}


def to_numpy(value: jax.Array) -> np.ndarray:
    """A copy on the host."""
    return np.array(value)


def frozen(params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The same parameters: JAX asks for gradients where they are taken."""
    return params
