"""CUDA C kernels: compiled when first started, by NVRTC, which torch for CUDA brings; and started.

For what Triton cannot say: which registers and which shared memory hold what. Everything else is Triton's.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import importlib.util
import os
from pathlib import Path
from typing import Any

CARD = Path(__file__).parent / "card.cuh"
NAMES = tuple(f"libnvrtc.so.{version}" for version in (13, 12))
EARLY = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
SHARED_MEMORY = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, where the value is a number."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15)]


class _Launch(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "threads_x", "threads_y", "threads_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


def _places() -> tuple[str, ...]:
    """Files that NVRTC may be: of the packages `nvidia`, as torch brings them, of the user's path, of a toolkit."""
    spec = importlib.util.find_spec("nvidia")
    packages = [] if spec is None else [f"{folder}/*/lib" for folder in spec.submodule_search_locations or ()]
    folders = [*packages, *filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":")), "/usr/local/cuda/lib64", "/usr/lib/*-linux-gnu"]
    return tuple(path for name in NAMES for folder in folders for path in glob.glob(f"{folder}/{name}"))


PLACES = _places()
"""Looked for when this is imported, so that torch.compile may trace who asks."""


@functools.cache
def library() -> ctypes.CDLL:
    """NVRTC: the one that torch has loaded, or else the first of PLACES."""
    for path in (*NAMES, *PLACES):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise OSError(refusal() or f"none of {', '.join(PLACES)} can be loaded")


def refusal() -> str | None:
    """Why no CUDA C can be compiled here; None where it can."""
    return None if PLACES else f"NVRTC is missing ({NAMES[0]}, which torch for CUDA brings; pip install nvidia-cuda-nvrtc)"


def compiled(source: str, architecture: str, constants: tuple[tuple[str, int], ...]) -> bytes:
    """Machine code of `source` for an architecture ("sm_90"), with constants as macros. RuntimeError with the compiler's words."""
    nvrtc = library()
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    options = [f"--gpu-architecture={architecture}", "--std=c++20", "-default-device", *(f"-D{name}={value}" for name, value in constants)]
    given = (ctypes.c_char_p * len(options))(*(x.encode() for x in options))
    _check_nvrtc(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None))
    try:
        if nvrtc.nvrtcCompileProgram(program, len(options), given):
            _check_nvrtc(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
            log = ctypes.create_string_buffer(size.value)
            _check_nvrtc(nvrtc.nvrtcGetProgramLog(program, log))
            raise RuntimeError(f"NVRTC: {log.value.decode()}")
        _check_nvrtc(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        code = ctypes.create_string_buffer(size.value)
        _check_nvrtc(nvrtc.nvrtcGetCUBIN(program, code))
        return code.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def launch(
    source: Path, name: str, grid: tuple[int, ...], threads: int, shared: int, *arguments: Any, early: bool = False, **constants: int
) -> None:
    """Start the kernel `name` of a file on the device of its tensors. shared: bytes of dynamic shared memory; constants: macros of the source.
    early: it begins while the kernel before it ends, and waits for that itself.

    arguments: tensors (None: no address), integers (int) and floats (float), as the kernel takes them. `card.cuh` and the folder's headers come before
    it. Fake tensors (torch.compile asking for shapes) start nothing.
    """
    import torch
    from torch._subclasses import FakeTensor

    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.graph_break()
    tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
    if any(isinstance(x, FakeTensor) for x in tensors):
        return
    device = tensors[0].device
    with torch.cuda.device(device):
        function = _loaded(source, name, device.index, shared, tuple(constants.items()))
        values = [_value(x) for x in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.cast(ctypes.byref(x), ctypes.c_void_p) for x in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
        attribute = _Attribute(EARLY, 0, 1)
        how = _Launch(*(*grid, 1, 1)[:3], threads, 1, 1, shared, stream, ctypes.pointer(attribute), int(early))
        _check(_driver().cuLaunchKernelEx(ctypes.byref(how), function, pointers, None))


def _value(x: Any) -> Any:
    """As the driver takes it; `launch` holds it until the kernel has its copy."""
    if isinstance(x, float):
        return ctypes.c_float(x)
    return ctypes.c_int(x) if isinstance(x, int) else ctypes.c_void_p(0 if x is None else x.data_ptr())


@functools.cache
def _loaded(source: Path, name: str, device: int, shared: int, constants: tuple[tuple[str, int], ...]) -> ctypes.c_void_p:
    """The kernel, on the current device."""
    import torch

    has = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    if shared > has:
        raise ValueError(f"{source.stem} needs {shared} bytes of shared memory, {torch.cuda.get_device_name(device)} has {has}.")
    major, minor = torch.cuda.get_device_capability(device)
    code = compiled(text(source), f"sm_{major}{minor}", constants)
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _check(_driver().cuModuleLoadData(ctypes.byref(module), code))
    _check(_driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
    _check(_driver().cuFuncSetAttribute(function, SHARED_MEMORY, shared))
    return function


def text(source: Path, card: Path = CARD) -> str:
    """A kernel's source as it is compiled: what the card has to offer, the folder's headers, the kernel."""
    headers = sorted(path for path in source.parent.glob("*.cuh") if path != CARD)
    return "\n".join(path.read_text() for path in (card, *headers, source))


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(result: int) -> None:
    if result:
        said = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(said))
        raise RuntimeError(f"CUDA: {(said.value or b'unknown error').decode()} ({result}).")


def _check_nvrtc(result: int) -> None:
    assert result == 0, f"NVRTC failed with {result}"
