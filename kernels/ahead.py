"""Triton kernels compiled before they are first started, several at a time: whoever runs an operation on fake tensors (torch.compile, or `arrays.custom_gradient`
before a GPU's first call) passes its launches by, so a model's first step waits for its slowest kernel and not for the sum of them."""

from __future__ import annotations

import functools
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

MOST = 16
"""Threads: a compilation is C++ and an assembler's process, and Python for less than a tenth of its time."""

_asked: set[Any] = set()
_pending: dict[int, list[Future]] = {}


def ask(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Begin to compile `kernel` as it would be started with these (fake) tensors, integers and floats, unless that was asked before."""
    import torch

    tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
    plain = all(x is None or isinstance(x, torch.Tensor | int | float) for x in arguments)  # neither a size's symbol nor a descriptor
    if not plain or tensors[0].device.type != "cuda" or not torch.cuda.is_available():
        return
    device = torch.cuda.current_device() if tensors[0].device.index is None else tensors[0].device.index
    given = tuple(x.dtype if isinstance(x, torch.Tensor) else x for x in arguments)
    key = (kernel, device, given, tuple(options.items()))
    if key not in _asked:
        _asked.add(key)
        _pending.setdefault(id(kernel), []).append(_threads().submit(_compile, kernel, device, given, options))


def wait(kernel: Any) -> None:
    """Until what was asked for of `kernel` is there. What failed is compiled again when it is started, and says so then."""
    for future in _pending.pop(id(kernel), ()) if _pending else ():
        future.exception()


def _compile(kernel: Any, device: int, given: tuple[Any, ...], options: dict[str, Any]) -> None:
    import torch

    with torch.cuda.device(device):
        kernel.warmup(*given, grid=(1,), **options)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(MOST, os.cpu_count() or 1), thread_name_prefix="compile")
