"""A kernel in CUDA C run by a CPU's threads: `cuda_on_cpu.h` in the place of the card."""

import ctypes
import shutil
import subprocess
from functools import cache
from pathlib import Path

from kernels import nvrtc

COMPILER = shutil.which("g++")


@cache
def compiled(source: Path, name: str, shared: int, constants: tuple[tuple[str, int], ...], folder: Path) -> ctypes.CDLL:
    """shared: bytes of shared memory, and not one more; constants: macros."""
    path = folder / f"{name}_{len(list(folder.iterdir()))}.cpp"
    run = f'extern "C" void start(int x, int y, int threads, void** values) {{ run({name}, x, y, threads, values); }}'
    path.write_text(nvrtc.text(source, card=Path(__file__).parent / "cuda_on_cpu.h") + run)
    macros = [f"-D{n}={x}" for n, x in constants] + [f"-DSHARED_BYTES={shared}"]
    command = [COMPILER, "-std=c++20", "-O1", "-w", "-shared", "-fPIC", *macros, path, "-o", path.with_suffix(".so"), "-pthread"]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(path.with_suffix(".so")))


def launch(folder: Path, source: Path, name: str, grid: tuple[int, ...], threads: int, shared: int, *arguments, **constants) -> None:
    """As `nvrtc.launch`; what is compiled is kept in `folder`."""
    values = [nvrtc._value(x) for x in arguments]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.cast(ctypes.byref(x), ctypes.c_void_p) for x in values))
    compiled(source, name, shared, tuple(constants.items()), folder).start(*(*grid, 1)[:2], threads, pointers)
