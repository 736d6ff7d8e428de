"""That a kernel which leaves its tensors is caught: every test of this folder runs inside `bounds.held` where Triton is interpreted."""

import pytest
import torch

from kernels import launch

triton = pytest.importorskip("triton")
if not launch.INTERPRETED:
    pytest.skip("for Triton's interpreter (TRITON_INTERPRET=1)", allow_module_level=True)

import triton.language as tl  # noqa: E402


@triton.jit
def copy(x, y, there, first, L: tl.constexpr, STORE_ALL: tl.constexpr):
    i = first + tl.arange(0, L)
    value = tl.load(x + i, mask=i < there, other=0.0)
    tl.store(y + i, value, mask=(i < there) | STORE_ALL)


@pytest.mark.parametrize(("there", "first", "store_all", "what"), [(7, 0, False, "load"), (6, -1, False, "load"), (6, 0, True, "store")])
def test_a_kernel_outside_its_tensors_is_caught(there: int, first: int, store_all: bool, what: str) -> None:
    x, y = torch.arange(8.0), torch.zeros(8)
    given = x[:6], y[:6]  # memory goes on behind: nothing crashes
    launch.launch(copy, (1,), *given, 6, 0, L=8, STORE_ALL=False)
    assert torch.equal(*given)
    with pytest.raises(Exception, match="outside the tensors") as raised:
        launch.launch(copy, (1,), *given, there, first, L=8, STORE_ALL=store_all)
    assert f"a {what} outside" in str(raised.value)
