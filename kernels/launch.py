"""Triton kernels start here and nowhere else: on fake tensors only shapes are asked for, and a test can see, and compile, every launch."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import kernels
from kernels import ahead, arrays

INSTALLED = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's interpreter runs kernels on the CPU, slowly: tests."""

_seen: list[Launch] | None = None


@dataclass(frozen=True)
class Launch:
    """One kernel as it was started: its arguments in order, its constants, and how it is compiled."""

    kernel: Any
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    warps: int
    stages: int
    registers: int | None = None


_in_place = False
_chained = False
_one_token: Callable | None = None


@contextmanager
def states_in_place(run: Callable | None = None) -> Iterator[None]:
    """Inside, a one-token step may write the state after a token over the state before it: whoever asks has no more use for that one.

    run: `one_token`, in a form that torch.compile leaves alone; steps that have a kernel then take it inside what is compiled too.
    """
    global _in_place, _one_token
    before, (_in_place, _one_token) = (_in_place, _one_token), (True, run)
    try:
        yield
    finally:
        _in_place, _one_token = before


def in_place() -> bool:
    """Whether steps may write over the states that they are given."""
    return _in_place


@contextmanager
def chained() -> Iterator[None]:
    """Inside, a kernel that can begins while the one before it ends (programmatic dependent launch): it asks for weights and states, and waits for
    the other's end before it reads anything else or writes. So what it asks for early must be older than the kernel before, and than those before that which
    let the next begin before they have waited themselves (`rows.product_of_few`: its weights never change)."""
    global _chained
    before, _chained = _chained, not INTERPRETED and since_hopper()
    try:
        yield
    finally:
        _chained = before


def early() -> bool:
    """Whether kernels may begin so."""
    return _chained


@functools.cache
def since_hopper() -> bool:
    """Whether kernels may use what came with compute capability 9.0: beginning early, bulk copies. Without a GPU too: what is compiled then is for one."""
    import torch

    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (9, 0)


def after(state: Any) -> Any:
    """Memory for what takes a state's place; the state's own, where every program reads its part before it writes it, and may."""
    import torch

    return state if _in_place else torch.empty_like(state)


def launch(
    kernel: Any, grid: tuple[int, ...], *arguments: Any, warps: int = 4, stages: int = 2, registers: int | None = None, early: bool = False,
    **constants: Any,
) -> None:  # fmt: skip
    """Start `kernel` on the device of its tensors. arguments: tensors and integers; constants: its `tl.constexpr` parameters by name.
    registers: that a thread may have at most. early: begin before the kernel before it ends; the kernel's constant EARLY tells it so, where it has one.

    Fake tensors (torch.compile asking for shapes) start nothing: the kernel begins to be compiled.
    """
    import torch
    from torch._subclasses import FakeTensor

    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.graph_break()  # what is not an opaque operation already runs by itself between compiled parts
    if _seen is not None:
        _seen.append(Launch(kernel, arguments, constants, warps, stages, registers))
    choose_assembler()
    limit = ({} if registers is None else {"maxnreg": registers}) | ({"launch_pdl": True} if early else {})
    options = constants if INTERPRETED else {**constants, "num_warps": warps, "num_stages": stages, **limit}
    tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
    if any(isinstance(x, FakeTensor) for x in tensors):
        if _seen is None:
            ahead.ask(kernel, arguments, options)
        return
    ahead.wait(kernel)
    where = tensors[0].device
    if where.type == "cuda" and where.index != torch.cuda.current_device():
        with torch.cuda.device(where):
            kernel[grid](*arguments, **options)
    else:
        kernel[grid](*arguments, **options)


@functools.cache
def choose_assembler() -> str | None:
    """Have Triton use the newer of the two ptxas that it carries, unless TRITON_PTXAS_PATH names one; its path.

    For all before Blackwell Triton takes its ptxas of CUDA 12.8, which at times leaves out a write to a uniform register: the descriptor of
    a wgmma is then garbage, and the kernel ends in an illegal read, or does not. Seen on an H200 in three kernels, with neither 12.9 nor 13.0.
    """
    import triton

    newer = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas-blackwell"
    if newer.exists():
        os.environ.setdefault("TRITON_PTXAS_PATH", str(newer))
    return os.environ.get("TRITON_PTXAS_PATH")


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Every launch inside, in order."""
    global _seen
    before, _seen = _seen, []
    try:
        yield _seen
    finally:
        _seen = before


def refusal(shape: dict[str, int], dtype: str, device: str) -> str | None:
    """Why no Triton kernel runs on such arrays here; None where one does. An operation adds its own reasons."""
    if not INSTALLED:
        return "triton is not installed (pip install triton)"
    if INTERPRETED:
        return (
            None
            if device == "cpu" and dtype == "float32"
            else f"triton's interpreter takes float32 on the CPU, these are {dtype} on {device}"
        )
    if device != "cuda" and _seen is None:  # a recording of fake tensors may be made anywhere
        return f"triton's kernels take torch tensors on an NVIDIA GPU, these are on {device}"
    if dtype not in ("bfloat16", "float32"):
        return f"triton's kernels take bfloat16 and float32, these are {dtype}"
    return None


def up_to(size: int) -> Callable[[dict[str, int], str, str], str | None]:
    """`refusal`, and of key and value sizes above `size`."""

    def refuse(shape: dict[str, int], dtype: str, device: str) -> str | None:
        reason = refusal(shape, dtype, device)
        if reason is None and max(shape["K"], shape["V"]) > size:
            return (
                f"its kernels hold a head's state on chip: key and value sizes of {size} at most, these are {shape['K']} and {shape['V']}"
            )
        return reason

    return refuse


def step_of(operation: str, array_form: Callable, given: tuple[Any, ...], state: Any) -> Callable:
    """Which one-token step runs on these: `kernels/<operation>/one_token.py`'s where the operation itself runs as triton and nobody follows the
    arrays, or whoever does has said how to run it, else the array form. given: q [B, H, K], k, v [B, H, V] and the rest."""
    ops = arrays.of(given[0])
    if _one_token is None and traced(*given, *(() if state is None else state[:-1])):
        return array_form
    q_BHK, _, v_BHV, *_ = given
    sizes = {"B": q_BHK.shape[0], "T": 1, "H": q_BHK.shape[1], "K": q_BHK.shape[2], "V": v_BHV.shape[2]}
    if kernels.choose(operation, sizes, ops.dtype_name(q_BHK), ops.device(q_BHK)) != "triton":
        return array_form
    return partial(_one_token or one_token, operation)


def one_token(operation: str, *given: Any, **options: Any) -> Any:
    """The step as `kernels/<operation>/one_token.py` has it."""
    return importlib.import_module(f"kernels.{operation}.one_token").step(*given, **options)


def traced(*given: Any) -> bool:
    """Whether somebody follows what is done with arrays: a gradient, torch.compile or JAX. A kernel without a gradient is not for them."""
    there = [x for x in given if x is not None]
    if arrays.of(there[0]).name != "torch":
        return True
    import torch

    return torch.compiler.is_compiling() or (torch.is_grad_enabled() and any(x.requires_grad for x in there))


def divide_up(a: int, b: int) -> int:
    """Blocks of b that cover a."""
    return -(-a // b)


def dot_precision(dtype: Any) -> str:
    """tl.dot's input_precision: three tensor-core products for float32 (its rounding, nearly), one for bfloat16."""
    return "tf32x3" if str(dtype) == "torch.float32" else "ieee"
