"""Products of few rows in CUDA C, their threads on a CPU (`cuda_on_cpu.h`), against products in float64."""

import pytest
import torch

pytest.importorskip("triton")
from kernels import nvrtc, rows  # noqa: E402
from tests.kernels import cuda_on_cpu  # noqa: E402
from tests.kernels.harness import error  # noqa: E402

if cuda_on_cpu.COMPILER is None:
    pytest.skip("there is no C++ compiler here", allow_module_level=True)


@pytest.fixture
def on_cpu(monkeypatch, tmp_path):
    """Has kernels run here; gives a function that has every product made by one form of programs."""

    def launch(*given, early, **constants):
        cuda_on_cpu.launch(tmp_path, *given, **constants | {"EARLY": 1})

    monkeypatch.setattr(nvrtc, "launch", launch)
    return lambda programs: monkeypatch.setattr(rows, "_programs", lambda *_: programs)


def check(M, J, D, *, norm=False, gated=False, wide=False, added=False, cap=0.0):
    random = torch.Generator().manual_seed(0)
    x, weight, add = (torch.randn(*shape, generator=random).bfloat16() for shape in ((M, D), (2 * J if gated else J, D), (M, J)))
    weight = weight / D**0.5
    unit = x.double() * (x.double().square().mean(-1, keepdim=True) + 0.1).rsqrt() if norm else x.double()
    exact = unit @ weight.double().T
    exact = torch.nn.functional.silu(exact[:, :J]) * exact[:, J:] if gated else exact
    exact = exact + add.double() if added else exact
    exact = cap * torch.tanh(exact / cap) if cap else exact
    y = rows.product_of_few(x, weight, epsilon=0.1 if norm else None, gated=gated, wide=wide, add_to=add if added else None, cap=cap)
    assert error(y, exact) <= (1e-6 if wide else 4e-3) and (not added or y is add)


@pytest.mark.parametrize(
    ("M", "J", "D", "warps", "outputs", "options"),
    [
        (1, 40, 256, 8, 16, {"norm": True, "wide": True}),
        (8, 33, 192, 2, 8, {"added": True}),
        (3, 20, 192, 2, 7, {"norm": True, "gated": True}),
        (5, 35, 128, 2, 16, {"norm": True, "gated": True}),
        (13, 49, 128, 4, 32, {"norm": True, "wide": True, "cap": 3.0}),
    ],
)
def test_weights_in_slots(M, J, D, warps, outputs, options, on_cpu):
    gated, tiles = "gated" in options, -(-M // 8)
    shared = max(2 * D * outputs * (1 + gated), 4 * warps * tiles * (128 * -(-outputs // (8 if gated else 16)) + 8))
    constants = {"WARPS": warps, "TILES": tiles, "OUTPUTS": outputs, "PROGRAMS": 1}
    on_cpu(rows.Programs(rows.ROWS, -(-J // outputs), 32 * warps, shared, constants))
    check(M, J, D, **options)


@pytest.mark.parametrize(
    ("M", "J", "D", "cluster", "outputs", "pieces", "buffers", "warps", "options"),
    [
        (1, 40, 256, 2, 32, 1, 1, (2, 1), {"norm": True, "wide": True}),
        (5, 33, 256, 1, 16, 4, 3, (1, 2), {"added": True}),
        (16, 20, 256, 4, 32, 1, 1, (1, 2), {"norm": True, "gated": True}),
        (33, 17, 768, 2, 16, 3, 2, (1, 1), {"norm": True, "wide": True, "cap": 3.0}),
        (64, 36, 128, 2, 48, 1, 1, (3, 1), {"added": True}),
    ],
)
def test_inputs_shared_in_clusters(M, J, D, cluster, outputs, pieces, buffers, warps, options, on_cpu):
    rows_of_x = -(-M // 16) * 16
    constants = {"CLUSTER": cluster, "OUTPUTS": outputs, "ROWS": rows_of_x, "PIECES": pieces, "BUFFERS": buffers, "PROGRAMS": 1}
    constants |= {"OUTPUT_WARPS": warps[0], "INPUT_WARPS": warps[1]}
    shared = max(2 * D // cluster // pieces * buffers * (outputs + rows_of_x), 4 * warps[1] * rows_of_x * (outputs + 5))
    count = cluster * -(-J // (outputs // 2 if "gated" in options else outputs))
    on_cpu(rows.Programs(rows.CLUSTERS, count, 32 * warps[0] * warps[1], shared, constants))
    check(M, J, D, **options)


@pytest.mark.parametrize(("M", "J", "D"), [(3, 36, 512), (11, 50, 512), (16, 20, 2560)])
@pytest.mark.parametrize("options", [{"norm": True, "gated": True}, {"added": True}])
def test_programs_that_are_chosen(M, J, D, options, on_cpu):
    check(M, J, D, **options)


@pytest.mark.parametrize("M", [1, 4, 8, 9, 16])
@pytest.mark.parametrize(("width", "mlp"), [(768, 2304), (1024, 3072), (1536, 4608)])
def test_programs_have_room_and_cover_all(M, width, mlp):
    for J, D, gated in (
        (3 * width + 72, width, False),
        (width, width, False),
        (mlp, width, True),
        (width, mlp, False),
        (50304, width, False),
    ):
        programs = rows._programs(M, J, D, gated)
        has = programs.constants
        outputs = has["OUTPUTS"] // 2 if gated and "CLUSTER" in has else has["OUTPUTS"]
        assert programs.count * outputs >= J * has.get("CLUSTER", 1) and programs.threads * has["PROGRAMS"] <= 1280
        assert has["PROGRAMS"] * (programs.shared + 1024) <= rows.MEMORY
    assert rows._programs(M, 1536, 1000, False) is None
