"""How exact the sequence operations and the layers are: float32 against the references in float64, outputs and every gradient.

An error is the largest |x - reference| over the largest |reference|, and what is printed is the worst over the cases: one token, odd
lengths, head sizes 16, 48, 96 and 128, several documents with padding, and, for operations, a state to start from and gates at 0 and 1.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks.table import report

CASES = {"one token": (2, 1, 2, 16), "16": (2, 37, 2, 16), "48": (2, 67, 2, 48), "96": (1, 71, 2, 96), "128": (1, 73, 1, 128)}  # B, T, H, K
GRADIENTS = {"d q": ("q",), "d k": ("k",), "d v or x": ("v", "x"), "d decay": ("log_decay", "log_a"), "d write": ("beta", "log_input")}
# Beside every layer with its defaults. Mesa is solved to the end, as its reference is; its own table has other settings.
ENTRIES: dict[str, dict[str, Any]] = {
    "attention, window 5": {"layer": "attention", "window": 5},
    "mesa": {"layer": "mesa", "eps": 0.0, "steps": 60},
    "palimpsa_d, plain": {"layer": "palimpsa_d", "metaplasticity": False},
    "palimpsa_m, plain": {"layer": "palimpsa_m", "metaplasticity": False},
}
MESA = ("q", "k", "v", "log_decay", "beta", "lam")

Numbers = dict[str, np.ndarray]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks layers", description="Errors of operations and layers against float64.")
    parser.add_argument("--only", default="", help="operations and layers whose name has this in it")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    import torch

    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", category=UserWarning)
    started = time.perf_counter()
    for name, table in (("operations", operations), ("layers", layers), ("mesa", mesa)):
        if rows := table(options.only):
            print(f"{name}: largest relative error of float32 against float64")
            print(f"{report(name if name == 'layers' else f'layers-{name}', rows)}, {time.perf_counter() - started:.0f} s\n")


def operations(only: str) -> list[dict[str, Any]]:
    """A row an operation and implementation, over CASES, on the inputs of the contract tests."""
    from tests.kernels.harness import make, run_jax, run_torch, split_documents
    from tests.kernels.operations import OPERATIONS

    rows = []
    for name, operation in OPERATIONS.items():
        if only not in name:
            continue
        option = next(iter(operation.options.values()))
        runs = {
            "reference, torch": lambda *x, o=operation, s=option: run_torch(o, *x, "float32", "reference", **s),
            f"{operation.backend}, torch": lambda *x, o=operation, s=option: run_torch(o, *x, "float32", o.backend, **s),
            f"{operation.backend}, JAX": lambda *x, o=operation, s=option: run_jax(o, *x, o.backend, **s),
        }
        worst: dict[str, Numbers] = {run: {} for run in runs}
        for case, (B, T, H, K) in CASES.items():
            given, state = make(operation, (B, T, H, K, K + 8))
            inputs = given, state, split_documents(B, T)
            exact = run_torch(operation, *inputs, "float64", "reference", **option)
            for run, work in runs.items():
                _keep(worst[run], work(*inputs), exact, case)
        rows += [{"operation": name, "implementation": run} | _columns(worst[run]) for run in runs]
    return rows


def _keep(worst: dict[str, Any], found: Numbers, exact: Numbers, case: str) -> None:
    """Take in a case's errors: (error, case) by array."""
    for array, reference in exact.items():
        worst[array] = max(worst.get(array, (0.0, case)), (_error(found[array], reference), case))


def _error(x: np.ndarray, reference: np.ndarray) -> float:
    """Relative; of what should be 0 and is not, infinite."""
    from tests.kernels.harness import error

    with np.errstate(divide="ignore"):
        return error(x, reference)


def _columns(worst: dict[str, Any]) -> dict[str, Any]:
    def largest(arrays: list[str]) -> float | None:
        return max((worst[array][0] for array in arrays if array in worst), default=None)

    named = {f"d {name}" for names in GRADIENTS.values() for name in names}
    rest = [array for array in worst if array.startswith("d ") and array not in named]
    columns = {"output": largest(["o"]), "end state": largest([array for array in worst if array.startswith("end")])}
    columns |= {title: largest([f"d {name}" for name in names]) for title, names in GRADIENTS.items()}
    array, (_, case) = max(worst.items(), key=lambda item: item[1])
    return columns | {"d others": largest(rest), "worst": f"{array} at {case}"}


@contextmanager
def _kernels(name: str) -> Iterator[None]:
    """STRATA_KERNELS is `name` inside; "" is the default."""
    before = os.environ.pop("STRATA_KERNELS", None)
    try:
        os.environ |= {"STRATA_KERNELS": name} if name else {}
        yield
    finally:
        os.environ.pop("STRATA_KERNELS", None)
        os.environ |= {"STRATA_KERNELS": before} if before is not None else {}


def layers(only: str) -> list[dict[str, Any]]:
    """A row a layer and implementation: the mixer alone, its parameters moved away from their special initial values."""
    from models import build_layer
    from models.layers import LAYERS
    from models.parameters import initialise
    from tests.kernels.harness import split_documents

    rows = []
    for name, entry in sorted(({name: {"layer": name} for name in LAYERS} | ENTRIES).items()):
        if only not in name:
            continue
        worst: dict[str, Numbers] = {}
        for case, (B, T, H, K) in CASES.items():
            random = np.random.default_rng(0)
            layer = build_layer(entry, {"width": H * K, "heads": H, "key_size": K})
            p = {key: x + 0.1 * random.standard_normal(x.shape) for key, x in initialise(layer.parameters(), seed=0, blocks=1).items()}
            x, weight = random.standard_normal((2, B, T, H * K))
            inputs = layer, p, x, weight, split_documents(B, T)
            exact = _layer_in_torch(*inputs, "float64", "reference")
            for run, found in {
                "reference, torch": _layer_in_torch(*inputs, "float32", "reference"),
                "fast, torch": _layer_in_torch(*inputs, "float32", ""),
                "fast, JAX": _layer_in_jax(*inputs),
            }.items():
                _keep(worst.setdefault(run, {}), found, exact, case)
        for run, errors in worst.items():
            parameter, (largest, case) = max(((k, v) for k, v in errors.items() if k not in ("y", "d stream")), key=lambda item: item[1])
            columns = {"output": errors["y"][0], "at": errors["y"][1], "d stream": errors["d stream"][0], "d parameters": largest}
            rows.append({"layer": name, "implementation": run} | columns | {"worst": f"{parameter} at {case}"})
    return rows


def _layer_in_torch(layer: Any, p: Numbers, x: np.ndarray, weight: np.ndarray, ids: np.ndarray, dtype: str, kernels: str) -> Numbers:
    import torch

    from kernels import arrays

    kind = getattr(torch, dtype)
    leaves = {key: torch.tensor(value, dtype=kind, requires_grad=True) for key, value in {**p, "stream": x}.items()}
    with _kernels(kernels):
        y, _ = layer.forward({key: leaves[key] for key in p}, leaves["stream"], segments=torch.tensor(ids), ops=arrays.load("torch"))
        found = torch.autograd.grad((y.double() * torch.tensor(weight)).sum(), list(leaves.values()))
    return {"y": y.detach().double().numpy()} | {f"d {key}": g.double().numpy() for key, g in zip(leaves, found, strict=True)}


def _layer_in_jax(layer: Any, p: Numbers, x: np.ndarray, weight: np.ndarray, ids: np.ndarray) -> Numbers:
    import jax
    import jax.numpy as jnp

    from kernels import arrays

    def scored(leaves: dict[str, Any]) -> tuple[Any, Any]:
        y, _ = layer.forward({key: leaves[key] for key in p}, leaves["stream"], segments=jnp.asarray(ids), ops=arrays.load("jax"))
        return (y * weight.astype(np.float32)).sum(), y

    with _kernels(""):
        found, y = jax.jit(jax.grad(scored, has_aux=True))(
            {key: jnp.asarray(value, jnp.float32) for key, value in {**p, "stream": x}.items()}
        )
    return {"y": np.asarray(y, np.float64)} | {f"d {key}": np.asarray(g, np.float64) for key, g in found.items()}


def mesa(only: str) -> list[dict[str, Any]]:
    """Mesa's own table: stopping rules, sizes of the output's gradient, and inputs that are hard on a solver."""
    if only not in "mesa":
        return []
    import torch

    from kernels.mesa import mesa as operation

    random = np.random.default_rng(0)

    def unit(*shape: int) -> np.ndarray:
        x = random.standard_normal(shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    def inputs(T: int, K: int, *, gamma: float | None = None, beta: float | None = None, lam: float = 1.0, equal: bool = False) -> Numbers:
        """B 1, H 2. gamma, beta: None draws them, per token. equal: one key for all tokens."""
        k = np.repeat(unit(1, 1, 2, K), T, 1) if equal else unit(1, T, 2, K)
        gates = [random.uniform(0.9, 1, (1, T, 2)) if gamma is None else np.full((1, T, 2), gamma)]
        gates.append(random.random((1, T, 2)) if beta is None else np.full((1, T, 2), beta))
        with np.errstate(divide="ignore"):
            log_decay = np.log(gates[0])
        values = unit(1, T, 2, K), k, random.standard_normal((1, T, 2, K)), log_decay, gates[1], np.full((2, K), lam)
        return dict(zip(MESA, values, strict=True))

    def run(given: Numbers, do: np.ndarray, dtype: Any, **options: Any) -> tuple[Numbers, Any]:
        xs = {name: torch.tensor(x, dtype=dtype, requires_grad=True) for name, x in given.items()}
        o, _, info = operation(*xs.values(), **options)
        found = torch.autograd.grad(o, list(xs.values()), torch.tensor(do, dtype=dtype))
        return {"o": o.detach().double().numpy(), **{n: g.double().numpy() for n, g in zip(xs, found, strict=True)}}, info

    rows: list[dict[str, Any]] = []

    def add(what: str, given: Numbers, *, size: float = 1.0, exact: dict[str, Any] | None = None, **options: Any) -> None:
        """exact: options of the float64 run; the elimination of the reference by default."""
        do = np.random.default_rng(1).standard_normal(given["v"].shape)
        reference, _ = run(given, do, torch.float64, **(exact or {"backend": "reference"}))
        found, info = run(given, do * size, torch.float32, **options)
        errors = {n: _error(x if n == "o" else x / size, reference[n]) for n, x in found.items()}
        taken = {"steps mean": float(info["steps"].double().mean()), "steps most": int(info["steps"].max())}
        rows.append(
            {"what": what, "output": errors["o"]}
            | {f"d {n}": errors[n] for n in MESA}
            | taken
            | {"residual": float(info["residual"].max())}
        )

    given = inputs(131, 128)
    for eps in (0.0, 1e-4):
        for steps in (30, 200):
            add(f"eps {eps:g}, at most {steps} steps", given, eps=eps, steps=steps)
    given = inputs(67, 48)
    for exponent in (0, -3, -6, -9, -12):
        add(f"output's gradient times 1e{exponent}", given, size=10.0**exponent, eps=0.0)
    for exponent in (0, -3, -6, -9, -12):
        add(f"output's gradient times 1e{exponent}, eps 1e-4", given, size=10.0**exponent, eps=1e-4)
    for gamma in (0.0, 1.0):
        for beta in (0.0, 1.0):
            add(f"gamma {gamma:g}, beta {beta:g}", inputs(131, 48, gamma=gamma, beta=beta), eps=0.0)
    add("equal keys", inputs(131, 48, equal=True), eps=0.0)
    add("equal keys, nothing forgotten", inputs(131, 48, gamma=1.0, beta=1.0, lam=0.25, equal=True), eps=0.0)
    tokens = inputs(1, 16, gamma=0.9975, beta=0.44, lam=0.25)
    tokens = {n: x if n == "lam" else np.repeat(x, 2048, 1) for n, x in tokens.items()}
    for eps in (0.0, 1e-4):
        add(f"2048 equal tokens, eps {eps:g}", tokens, exact={"steps": 100}, eps=eps)
    return rows
