"""The house: each floor imports only from floors below it, and the plan's imports stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = ["kernels", "models", "stages", "pipelines"]  # lowest first
OUTSIDE = {"ray", "dvc", "mlflow"}  # for the top floor alone
# What `import` may bring on each floor beyond the standard library and the floors below; None: anything.
ALLOWED = {
    "kernels": {"numpy", "torch", "triton", "jax"},
    "models": {"numpy", "torch", "triton", "jax", "optax", "safetensors"},
    "stages": {"numpy", "torch", "pyarrow", "pydantic", "tokenizers", "tiktoken", "gigatoken", "awkward", "fsspec", "huggingface_hub", "zstandard", "matplotlib", "ruamel", "sacrebleu", "lm_eval"},
    "pipelines": None,
}  # fmt: skip


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            found.add((node.module or "").split(".")[0])
    return found


@pytest.mark.parametrize("floor", FLOORS)
def test_a_floor_imports_only_from_below(floor: str) -> None:
    above = set(FLOORS[FLOORS.index(floor) + 1 :]) | {"benchmarks", "tests"}
    files = list((ROOT / floor).rglob("*.py"))
    assert files
    for path in files:
        brought = imports(path)
        assert not brought & above, f"{path.relative_to(ROOT)} imports {brought & above}"
        allowed = ALLOWED[floor]
        if allowed is not None:
            strange = brought - allowed - set(FLOORS) - set(sys.stdlib_module_names)
            assert not strange, f"{path.relative_to(ROOT)} imports {strange}"
            assert not brought & OUTSIDE


def test_the_plan_loads_no_framework() -> None:
    heavy = ["torch", "jax", "ray", "mlflow", "pyarrow", "matplotlib", "dvc", "pandas"]
    code = f"import sys; from pipelines import cli, plan, cells, params, resolve, check; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
