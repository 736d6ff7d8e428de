"""Every load and store of an interpreted Triton kernel, held to the memory of the launch's own tensors: a card reads past them without a word."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor


def spans(arguments: tuple[Any, ...]) -> list[tuple[int, int]]:
    """Of each tensor: its first byte's address, and that behind its last."""
    tensors = [x.base if isinstance(x, TensorDescriptor) else x for x in arguments]
    tensors = [x for x in tensors if isinstance(x, torch.Tensor) and x.numel() > 0]
    reach = lambda x: 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))  # noqa: E731
    return [(x.data_ptr(), x.data_ptr() + reach(x) * x.element_size()) for x in tensors]


@contextmanager
def held() -> Iterator[None]:
    """Inside, a load or store that is not masked out and lies outside every tensor raises IndexError (as the cause of the interpreter's own error)."""
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, run = builder.create_masked_load, builder.create_masked_store, executor.__call__
    allowed: list[tuple[int, int]] = []

    def hold(what: str, pointers: Any, mask: Any) -> None:
        places, there = np.broadcast_arrays(pointers.data.astype(np.int64), mask.data.astype(bool))
        places = places[there]
        inside = np.zeros(places.shape, bool)
        for first, end in allowed:
            inside |= (first <= places) & (places < end)
        if not inside.all():
            raise IndexError(f"a {what} outside the tensors of its launch: {places[~inside][:4]}, they lie at {allowed}")

    def held_load(self, pointers, mask, *rest):
        hold("load", pointers, mask)
        return load(self, pointers, mask, *rest)

    def held_store(self, pointers, value, mask, *rest):
        hold("store", pointers, mask)
        return store(self, pointers, value, mask, *rest)

    def held_run(self, *arguments, **options):
        allowed[:] = spans((*arguments, *options.values()))
        return run(self, *arguments, **options)

    builder.create_masked_load, builder.create_masked_store, executor.__call__ = held_load, held_store, held_run
    try:
        yield
    finally:
        builder.create_masked_load, builder.create_masked_store, executor.__call__ = load, store, run
