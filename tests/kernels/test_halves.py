"""The kernels' bfloat16 in Triton's interpreter, with products and casts as a card has them (`halves.py`): parity, and Mesa's second solve."""

import numpy as np
import pytest
import torch

from kernels import launch

triton = pytest.importorskip("triton")
if not launch.INTERPRETED:
    pytest.skip("for Triton's interpreter (TRITON_INTERPRET=1)", allow_module_level=True)

import triton.language as tl  # noqa: E402

from benchmarks import inputs  # noqa: E402
from kernels.mesa import chunked  # noqa: E402
from kernels.mesa import triton as mesa  # noqa: E402
from tests.kernels import halves  # noqa: E402
from tests.kernels.harness import error, make, run_torch, split_documents  # noqa: E402
from tests.kernels.operations import OPERATIONS, TOLERANCES  # noqa: E402

NAMES = [
    n for n, x in OPERATIONS.items() if "triton" in __import__("kernels").backends(x.name) and n != "palimpsa"
]  # its bfloat16 is CUDA C


SIZES = [(2, 37, 2, 16, 24), (1, 70, 3, 48, 16), (1, 131, 1, 16, 48)]


@triton.jit
def kernel(x, y, z, L: tl.constexpr):
    at = tl.arange(0, L)[:, None] * L + tl.arange(0, L)[None, :]
    rounded = tl.load(x + at).to(tl.bfloat16)
    tl.store(y + at, rounded)
    tl.store(z + at, tl.dot(rounded, tl.trans(rounded)))


@pytest.fixture(autouse=True)
def right(monkeypatch):
    monkeypatch.setattr("kernels.choose", lambda operation, shape, dtype, device, backend=None: backend or "triton")
    with halves.right():
        yield


def test_casts_are_to_the_nearest_and_products_of_all_bits():
    x = torch.randn(16, 16) * torch.logspace(-30, 30, 16, base=2)
    y, z = torch.empty(16, 16, dtype=torch.bfloat16), torch.empty(16, 16)

    kernel[(1,)](x, y, z, L=16)
    assert torch.equal(y, x.bfloat16())
    assert error(z, x.bfloat16().double() @ x.bfloat16().double().T) <= 1e-6


@pytest.mark.parametrize(("name", "option"), [*((name, None) for name in NAMES), ("mesa", "gla")])
@pytest.mark.parametrize("sizes", SIZES)
def test_parity_in_bfloat16(name, option, sizes):
    operation = OPERATIONS[name]
    options = operation.options[option] if option else next(iter(operation.options.values()))
    xs, state = make(operation, sizes)
    xs = {n: x if n in operation.float32 else torch.tensor(x).bfloat16().double().numpy() for n, x in xs.items()}
    segments = split_documents(*sizes[:2])
    reference = run_torch(operation, xs, state, segments, "float64", "reference", **options)
    ours = run_torch(operation, xs, state, segments, "bfloat16", "triton", **options)
    errors = {n: error(ours[n], reference[n]) for n in reference}
    assert max(errors.values()) <= TOLERANCES["bfloat16"], errors


def solved(given):
    """Output and gradients, the same in float64, info, and the flags of the forward and backward check."""
    do = torch.randn(given["v"].shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    xs = [x.requires_grad_() for x in given.values()]
    with launch.recording() as launches:
        o, _, info = mesa.mesa(*xs, eps=1e-4)
        found = [o, *torch.autograd.grad(o, xs, do)]
    double = [x.detach().double().requires_grad_() for x in xs]
    exact = chunked.mesa(*double, steps=100, eps=0.0)[0]
    exact = [exact, *torch.autograd.grad(exact, double, do.double())]
    checks = [x for x in launches if x.constants.get("PART") == "first"]
    flags = [dict(zip(x.kernel.arg_names, x.arguments, strict=False))["flag"] for x in checks]
    return {n: relative(x, y) for n, x, y in zip(["o", *given], found, exact, strict=True)}, info, flags


def relative(x, exact):
    return float((x.detach().double() - exact).norm() / exact.norm())


@pytest.mark.parametrize(
    ("kind", "length", "twice"), [("mixed", 256, (0, 0)), ("hard", 256, (0, 0)), ("lowrank", 256, (0.6, 1)), ("scream", 512, (1, 1))]
)
def test_mesa_is_within_its_bounds_and_solves_twice_where_it_must(kind, length, twice):
    """What rounding a bfloat16 output costs is 1.7e-3."""
    errors, info, flags = solved(inputs.mesa(kind, 1, length, 1, 128))
    assert errors["o"] <= 2e-3 and max(errors.values()) <= 3.3e-3, errors
    assert float(info["residual"].max()) <= (1e-4 if kind == "scream" else 1.25e-3)
    shares = [float((flag & 1).float().mean()) for flag in flags]
    assert all(found >= least and (least > 0 or found == 0) for found, least in zip(shares, twice, strict=True)), shares


def test_mesa_has_split_gradients_where_keys_read_little_of_its_solution():
    """Nearly equal keys, quickly forgotten: no chunk is solved twice, and single products would be off by 7e-3."""
    given = inputs.mesa("hard", 1, 256, 1, 128)
    common = torch.nn.functional.normalize(given["k"][:, :1].float(), dim=-1)
    given["k"] = torch.nn.functional.normalize(0.95 * common + 0.05 * given["k"].float(), dim=-1).bfloat16()
    given["log_decay"] = torch.full_like(given["log_decay"], float(np.log(0.9)))
    errors, _, flags = solved(given)
    assert not (flags[0] & 1).any() and not (flags[1] & 1).any() and bool((flags[0][1:] == 2).all())
    assert max(errors[n] for n in ("k", "v", "log_decay", "beta")) <= 3.5e-3, errors


def test_mesa_is_linear_in_the_output_gradient():
    given = inputs.mesa("scream", 1, 128, 1, 64)
    xs = [x.requires_grad_() for x in given.values()]
    do = torch.randn(given["v"].shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    large, small = (torch.autograd.grad(mesa.mesa(*xs, eps=1e-4)[0], xs, do * scale) for scale in (1.0, 2.0**-40))
    for x, y in zip(large, small, strict=True):
        assert torch.equal(x, y * 2.0**40)
