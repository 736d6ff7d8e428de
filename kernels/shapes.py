"""What the arguments of an operation must look like, checked once at its door."""

from typing import Any

Array = Any  # torch.Tensor or jax.Array


def check(operation: str, **arguments: tuple[Array | None, str]) -> dict[str, int]:
    """The size of every axis letter, from `name=(array, "BTHK")`; an array of None is left out.

    Raises ValueError when an array has another rank, or one letter has two sizes.
    """
    sizes: dict[str, int] = {}
    source: dict[str, str] = {}
    for name, (x, axes) in arguments.items():
        if x is None:
            continue
        shape = tuple(x.shape)
        if len(shape) != len(axes):
            raise ValueError(f"{operation}: {name} has shape {list(shape)}; it must have the {len(axes)} axes [{', '.join(axes)}].")
        for axis, size in zip(axes, shape, strict=True):
            if sizes.setdefault(axis, size) != size:
                raise ValueError(
                    f"{operation}: {name} has {size} along {axis} (shape {list(shape)}), {source[axis]} has {sizes[axis]}; they must agree."
                )
            source.setdefault(axis, name)
    if 0 in sizes.values():
        empty = next(axis for axis, size in sizes.items() if size == 0)
        raise ValueError(f"{operation}: {source[empty]} is empty along {empty}; give at least one.")
    return sizes
