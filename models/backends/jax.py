"""JAX: arrays from numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def to_arrays(values: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """numpy arrays as JAX arrays on the default device."""
    return {name: jnp.asarray(value) for name, value in values.items()}
