"""Every Triton kernel that an operation launches, compiled for an H100 or H200 (sm_90) without a card: registers, spills, shared memory.

The launches are those of the operation itself at the study's shapes, seen on fake tensors. Compiled by the Triton that is installed here;
a card's own may differ, and `benchmarks/results` has its figures.
"""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from kernels import launch
from tests.kernels.harness import call, dtype_of
from tests.kernels.operations import OPERATIONS

triton = pytest.importorskip("triton")
if launch.INTERPRETED:
    pytest.skip("the interpreter and the compiler cannot share a process", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)
SHARED = 227 * 1024  # bytes a block may hold on sm_90
STACK = {  # bytes a thread may spill, where not 0 in bfloat16 and 1024 in float32: here what did not spill was slower on an H200 (0.53 ms, not 0.37)
    ("kernels.linear_attention.inside", "_gradients"): {"bfloat16": 640, "float32": 3072},
    ("kernels.rg_lru.triton", "_forward"): {"bfloat16": 16, "float32": 1024},
    # Measured with these on an H200, faster than smaller tiles that spill nothing.
    ("kernels.delta_rule.triton", "_walk_back"): {"bfloat16": 320, "float32": 1024},
    ("kernels.delta_rule.triton", "_within_back"): {"bfloat16": 384, "float32": 1024},
    # Mesa's solver fills the registers with its vectors, and spills what is needed before and after its loop, or (corrections) for each step.
    ("kernels.mesa.solve", "iterate"): {"bfloat16": 832, "float32": 1024},
    ("kernels.mesa.check", "check"): {"bfloat16": 128, "float32": 1024},
    ("kernels.mesa.solve", "right_side"): {"bfloat16": 128, "float32": 1024},
    ("kernels.mesa.walks", "starts"): {"bfloat16": 128, "float32": 1024},
    ("kernels.mesa.walks", "ends"): {"bfloat16": 768, "float32": 1024},
    ("kernels.mesa.inside", "gradients"): {"bfloat16": 384, "float32": 1024},
}
SIZES = {"mesanet": (1, 2048, 2, 128, 128)}
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8", torch.bool: "i1"}  # fmt: skip


def source(seen: launch.Launch) -> ASTSource:
    """As Triton's own launcher would specialise it: 1 is a constant, multiples of 16 are known to be."""
    signature, attributes, constants = {}, {}, dict(seen.constants)
    for place, (name, value) in enumerate(zip(seen.kernel.arg_names, seen.arguments, strict=False)):
        if value is None or (type(value) is int and value == 1):
            constants[name] = value
        elif isinstance(value, TensorDescriptor):
            signature[name] = f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)}>"
        elif isinstance(value, torch.Tensor):
            signature[name] = f"*{TYPES[value.dtype]}"
            if not seen.kernel.params[place].do_not_specialize_on_alignment:
                attributes[(place,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    signature |= dict.fromkeys(constants, "constexpr")
    return ASTSource(seen.kernel, signature=signature, constexprs=constants, attrs=attributes)


def resources(seen: launch.Launch, folder: Path) -> dict[str, int]:
    """registers a thread, stack bytes a thread (spills), shared bytes a block"""
    launch.choose_assembler()
    options = {"num_warps": seen.warps, "num_stages": seen.stages, "maxnreg": seen.registers}
    compiled = triton.compile(source(seen), target=HOPPER, options=options)
    path = folder / "kernel.cubin"
    path.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    said = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(x) for x in re.search(r"REG:(\d+) STACK:(\d+)", said).groups())
    return {"registers": registers, "stack": stack, "shared": compiled.metadata.shared}


def launches(name: str, sizes: tuple[int, ...], dtype: str, **options: Any) -> list[launch.Launch]:
    """What the operation starts, forward and backward, each kind once."""
    import numpy as np

    operation = OPERATIONS[name]
    xs = operation.inputs(np.random.default_rng(0), (1, 2, *sizes[2:]))
    B, T = sizes[:2]
    with FakeTensorMode(), launch.recording() as seen:
        given = {
            n: torch.empty(
                x.shape if n in operation.fixed else (B, T, *x.shape[2:]),
                dtype=getattr(torch, dtype_of(operation, n, dtype)),
            ).requires_grad_(n not in operation.without_gradient)
            for n, x in xs.items()
        }
        o, _, _ = call(operation, given, None, None, backend="triton", **(options or next(iter(operation.options.values()))))
        o.sum().backward()
    kinds = {(x.kernel.__name__, str(x.constants), str([TYPES.get(getattr(a, "dtype", None)) for a in x.arguments])): x for x in seen}
    return list(kinds.values())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", [n for n, operation in OPERATIONS.items() if "triton" in __import__("kernels").backends(operation.name)])
def test_kernels_compile_for_hopper(name: str, size: str, dtype: str, tmp_path: Path) -> None:
    found = launches(name, SIZES[size], dtype)
    assert found
    for seen in found:
        used = resources(seen, tmp_path)
        assert used["shared"] <= SHARED, (seen.kernel.__name__, used)
        assert used["stack"] <= STACK.get((seen.kernel.__module__, seen.kernel.__name__), {"bfloat16": 0, "float32": 1024})[dtype], (
            seen.kernel.__name__,
            used,
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_heads_loss_compiles_for_hopper(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.head_loss import triton as head

    seen = []
    monkeypatch.setattr(
        head,
        "launch",
        lambda kernel, grid, *given, warps, stages=2, **options: seen.append(launch.Launch(kernel, given, options, warps, stages)),
    )
    x, embedding, weight = torch.ones(256, 768, dtype=dtype), torch.ones(500, 768), torch.ones(256)
    head.loss_and_gradient(x, embedding, torch.zeros(256, dtype=torch.int64), weight, differentiate=False)
    monkeypatch.setattr(head, "_add_product", lambda to, a, b: None)
    monkeypatch.setattr(head.chunked, "product", lambda a, b: a.float() @ b.float())
    head.loss_and_gradient(x, embedding, torch.zeros(256, dtype=torch.int64), weight, differentiate=True)
    assert len(seen) == 4
    for launched in seen:
        used = resources(launched, tmp_path)
        assert used["shared"] <= SHARED and used["stack"] <= (0 if dtype == torch.bfloat16 else 1024), (launched.kernel.__name__, used)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("rows_of_x", [1, 40, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_tokens_kernels_compile_for_hopper(
    dtype: torch.dtype, rows_of_x: int, early: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernels import rows
    from kernels.convolution import State, one_token
    from kernels.linear_attention.one_token import step as linear_step
    from kernels.mesa.one_token import step as mesa_step

    monkeypatch.setattr(launch, "_chained", early)
    B, H, K, D = rows_of_x, 12, 128, 1536
    with FakeTensorMode(), launch.recording() as seen:
        q, k, v = (torch.empty(B, H, K, dtype=dtype) for _ in range(3))
        decay, beta = torch.empty(B, H), torch.empty(B, H)
        mesa_step(q, k, v, decay, beta, torch.empty(H, K), eps=1e-4)
        linear_step(q, k, v, decay, beta)
        x, past = torch.empty(B, D, dtype=dtype), State(torch.empty(B, 3, D, dtype=dtype), torch.empty(B, dtype=torch.int32))
        weight = torch.empty(4, D, dtype=dtype)
        one_token.heads(
            torch.empty(B, 3 * D + 72), x, (weight, weight), (past, past), torch.empty(2, H), H=H, K=K, V=K, bound=0.99, epsilon=1e-6
        )
        rows.unit_groups(v, 1e-6)
        rows.gated(torch.empty(B, 6 * D, dtype=dtype), x, 1e-6)
        rows.capped(torch.empty(B, 50257), x, 1e-6, 30.0)
    assert len(seen) == 6
    for launched in seen:
        used = resources(launched, tmp_path)
        few = launched.kernel.__module__ == "kernels.mesa.one_token" or dtype == torch.float32
        allowed = 128 if few else 0  # Mesa's is Triton 3.7's assembler's: none with 3.6 and ptxas 13
        assert used["shared"] <= SHARED and used["stack"] <= allowed, (launched.kernel.__name__, launched.constants, used)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, operation in OPERATIONS.items() if "triton" in __import__("kernels").backends(operation.name)])
def test_kernels_compile_for_ampere(name: str) -> None:
    """An A100 has no wgmma and 163 KiB of shared memory for a block: slower, and the same code."""
    for seen in launches(name, SIZES["mesanet"], "bfloat16"):
        options = {"num_warps": seen.warps, "num_stages": seen.stages, "maxnreg": seen.registers}
        compiled = triton.compile(source(seen), target=GPUTarget("cuda", 80, 32), options=options)
        assert compiled.metadata.shared <= 163 * 1024, (seen.kernel.__name__, compiled.metadata.shared)


@pytest.mark.parametrize("options", [{"solve": False}, {"steps": 0}])
def test_mesa_read_without_a_solve_at_the_study_s_sizes(options: dict[str, Any]) -> None:
    """Values and keys side by side are more than one program of the gradients holds."""
    names = {seen.kernel.__name__ for seen in launches("mesa", SIZES["mesanet"], "bfloat16", **options)}
    assert "_gradients" in names and "iterate" not in names
