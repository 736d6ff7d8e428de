"""Floor 1: array operations over torch and JAX, and one folder per sequence operation."""
