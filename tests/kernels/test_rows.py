"""The kernels of one token around a recurrence: norms and what follows products, and queries, keys, values and gates. Interpreted, or on a card."""

import pytest
import torch

from kernels import launch

pytest.importorskip("triton")
if not (launch.INTERPRETED or torch.cuda.is_available()):
    pytest.skip("these kernels run in Triton's interpreter or on a GPU", allow_module_level=True)

from kernels import nvrtc, rows  # noqa: E402
from kernels.arrays import torch as ops  # noqa: E402
from kernels.convolution import State, one_token, step  # noqa: E402
from tests.kernels.harness import error  # noqa: E402

DEVICE = "cpu" if launch.INTERPRETED else "cuda"
DTYPES = {torch.float32: 1e-5} if launch.INTERPRETED else {torch.float32: 1e-5, torch.bfloat16: 8e-3}


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), device="cpu").to(DEVICE, dtype)


def scaled(x, epsilon):
    return x.double() * (x.double().square().mean(-1, keepdim=True) + epsilon).rsqrt()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("M", "J", "D"), [(1, 40, 24), (3, 1500, 200)])
def test_norms_behind_products(M, J, D, dtype):
    x, weight, add = normal(M, D, dtype=dtype), normal(2 * J, D, dtype=dtype, seed=1) / D**0.5, normal(M, 2 * J, dtype=dtype, seed=2)
    unit, exact = scaled(x, 0.1), weight.double().T
    hidden = rows.gated(rows.product(x, weight), x, 0.1)
    a, b = (unit @ exact).chunk(2, 1)
    assert hidden.dtype == dtype and error(hidden, torch.nn.functional.silu(a) * b) <= 2 * DTYPES[dtype]
    logits = rows.capped(rows.product(x, weight, wide=True), x, 0.1, 3.0)
    assert logits.dtype == torch.float32 and error(logits, 3 * torch.tanh(unit @ exact / 3)) <= 1e-5
    total = x.double() @ exact + add.double()
    assert error(rows.product(x, weight, add_to=add), total) <= DTYPES[dtype] and error(add, total) <= DTYPES[dtype]


@pytest.mark.skipif(launch.INTERPRETED or nvrtc.refusal() is not None, reason="CUDA C; test_rows_in_c.py has its threads on a CPU")
@pytest.mark.parametrize(
    ("M", "J", "D"), [(1, 40, 1536), (rows.FEW, 2051, 768), (3, 1500, 4608), (11, 1500, 4608), (rows.MORE, 2051, 1536)]
)
def test_products_of_few_rows(M, J, D):
    x, weight, add = (
        normal(M, D, dtype=torch.bfloat16),
        normal(2 * J, D, dtype=torch.bfloat16, seed=1) / D**0.5,
        normal(M, J, seed=2).bfloat16(),
    )
    unit, exact = scaled(x, 0.1), weight.double().T
    assert rows.few(x, weight)
    a, b = (unit @ exact).chunk(2, 1)
    assert error(rows.product_of_few(x, weight, epsilon=0.1, gated=True), torch.nn.functional.silu(a) * b) <= 4e-3
    assert error(rows.product_of_few(x, weight, epsilon=0.1, wide=True, cap=3.0), 3 * torch.tanh(unit @ exact / 3)) <= 1e-5
    total = x.double() @ exact[:, :J] + add.double()
    assert error(rows.product_of_few(x, weight[:J], add_to=add), total) <= 4e-3 and error(add, total) <= 4e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 3, 16), (7, 5, 200)])
def test_unit_groups(shape, dtype):
    x = normal(*shape, dtype=dtype)
    assert error(rows.unit_groups(x, 0.1), scaled(x, 0.1)) <= DTYPES[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("H", "K", "V", "W", "parts", "bound"), [(2, 16, 16, 4, 1, 1.0), (3, 12, 20, 2, 3, 0.9), (1, 16, 8, 1, 2, 0.5)])
def test_heads_of_one_token(H, K, V, W, parts, bound, dtype):
    B, D = (3 if H < 3 else 400), H * K
    x = normal(B, 24, dtype=dtype, seed=6)
    projected = normal(B, 2 * D + H * V + 2 * H * parts)
    weights = [normal(W, D, dtype=dtype, seed=seed) for seed in (1, 2)]
    states = [State(normal(B, W - 1, D, seed=seed), torch.arange(-1, B - 1, dtype=torch.int32, device=DEVICE)) for seed in (3, 4)]
    bias = normal(2, H, seed=5)
    pieces = (projected * scaled(x, 0.1).float()[:, :1] / x[:, :1].float()).split([D, D, H * V, 2 * H * parts], 1)
    exact, after = [], []
    for piece, weight, state in zip(pieces[:2], weights, states, strict=True):
        y, end = step(piece, weight.float(), silu=True, heads=H, state=State(*(one.clone() for one in state)))
        exact.append(y.reshape(B, H, K)), after.append(end)
    forget, write = (pieces[3].reshape(B, parts, 2, H).sum(1) + bias).unbind(1)
    strength = torch.sigmoid(write)
    exact += [pieces[2].reshape(B, H, V), ops.log_sigmoid(forget) + torch.log1p(-(1 - bound) * strength**2), strength]
    found = one_token.heads(projected, x, tuple(weights), tuple(states), bias, H=H, K=K, V=V, bound=bound, epsilon=0.1)
    for index, (ours, theirs) in enumerate(zip(found, exact, strict=True)):
        assert ours.dtype == (dtype if index < 3 else torch.float32) and error(ours, theirs) <= DTYPES[dtype]
    for state, end in zip(states, after, strict=True):
        assert torch.equal(state.segment_B, end.segment_B) and error(state.inputs_BWD, end.inputs_BWD) <= DTYPES[torch.float32]
