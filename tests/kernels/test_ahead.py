"""Kernels that are compiled before they are first started."""

import contextlib
import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels import ahead, arrays, launch


class Kernel:
    """Stands for a Triton kernel: what it was asked for, in order."""

    def __init__(self, fails: bool = False) -> None:
        self.asked, self.started, self.fails = [], 0, fails
        self.may_end = threading.Event()

    def warmup(self, *given, grid, **options) -> None:
        assert self.may_end.wait(10)
        self.asked.append((given, options, threading.current_thread() is not threading.main_thread()))
        if self.fails:
            raise RuntimeError("no such layout")

    def __getitem__(self, grid):
        def start(*arguments, **options) -> None:
            self.started += 1
            self.compiled_then = len(self.asked)

        return start


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as compiling is concerned."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(launch, "choose_assembler", lambda: None)
    monkeypatch.setattr(launch, "INTERPRETED", False)


def on_fakes(kernel: Kernel, size: int = 4) -> None:
    with FakeTensorMode():
        x = torch.empty(size, device="cuda", dtype=torch.bfloat16)
    launch.launch(kernel, (1,), x, None, size, 0.5, BLOCK=16, warps=8)


def test_fake_tensors_ask_once_and_a_start_waits() -> None:
    kernel = Kernel()
    for _ in range(3):
        on_fakes(kernel)
    on_fakes(kernel, size=5)
    threading.Timer(0.1, kernel.may_end.set).start()
    launch.launch(kernel, (1,), torch.zeros(4), None, 4, 0.5, BLOCK=16, warps=8)
    assert kernel.started == 1 and kernel.compiled_then == 2
    options = {"BLOCK": 16, "num_warps": 8, "num_stages": 2}
    assert sorted(kernel.asked, key=str) == [((torch.bfloat16, None, size, 0.5), options, True) for size in (4, 5)]


def test_what_fails_ahead_is_left_to_the_start() -> None:
    kernel = Kernel(fails=True)
    kernel.may_end.set()
    on_fakes(kernel)
    launch.launch(kernel, (1,), torch.zeros(4))
    assert kernel.started == 1


def test_a_recording_compiles_nothing() -> None:
    kernel = Kernel()
    with launch.recording() as seen:
        on_fakes(kernel)
    assert len(seen) == 1 and id(kernel) not in ahead._pending


FIRST, SECOND = Kernel(), Kernel()


def forward(x):
    launch.launch(FIRST, (1,), x)
    return (x * 2,), (x,)


def backward(inputs, residuals, gradients):
    launch.launch(SECOND, (1,), *residuals, *gradients)
    return (gradients[0] * 2,)


double = arrays.custom_gradient(forward, backward, outputs=1)


class OnGPU(torch.Tensor):
    is_cuda = True


def test_an_operation_is_rehearsed_with_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first call on a GPU both kernels are asked for; a CPU's call rehearses nothing."""
    asked = []
    monkeypatch.setattr(ahead, "ask", lambda kernel, arguments, options: asked.append((kernel, [tuple(x.shape) for x in arguments])))
    double(torch.ones(3))
    assert FIRST.started == 1 and not asked
    for _ in range(2):
        double(torch.ones(3).as_subclass(OnGPU))
    assert FIRST.started == 3 and SECOND.started == 0
    assert asked == [(FIRST, [(3,)]), (SECOND, [(3,), (3,)])]
