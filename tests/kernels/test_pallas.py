"""The TPU's kernels in Pallas' interpreters: a few contracts of each in every run, all of them (test_contracts.py) where slow tests run."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter  # where it keeps the races that it saw
from jax.experimental.pallas import tpu as pltpu

import kernels
from tests.kernels.harness import error, make, run_jax, run_torch, split_documents
from tests.kernels.operations import OPERATIONS, TOLERANCES

NAMES = [name for name, operation in OPERATIONS.items() if "pallas" in kernels.backends(operation.name)]
every_operation = pytest.mark.parametrize("name", NAMES)
ours = pytest.mark.parametrize("name", [name for name in NAMES if name not in ("attention", "sliding window")])  # splash attention is JAX's
ROOT = Path(__file__).parents[2]


@every_operation
def test_parity_with_the_reference_in_float64(name):
    """Outputs, final states, every gradient; documents, padding, gates at 0 and 1, a state to start from."""
    operation = OPERATIONS[name]
    options = next(iter(operation.options.values()))
    T = 77 if operation.name == "attention" else 131  # a cache to compare has 80 slots
    xs, state = make(operation, (1, T, 2, 16, 24))
    state = None if operation.name == "attention" else state  # over a cache, it is the library's
    segments = split_documents(1, T)
    reference = run_torch(operation, xs, state, segments, "float64", "reference", **options)
    found = run_jax(operation, xs, state, segments, "pallas", **options)
    errors = {n: error(found[n], reference[n]) for n in reference}
    assert found.keys() == reference.keys() and max(errors.values()) <= TOLERANCES["float32"], errors


@ours
def test_no_race_and_nothing_unwritten_is_read(name):
    """In the interpreter that has a TPU's memories and copies: memory starts as NaN, a read out of bounds raises, races are found."""
    operation = OPERATIONS[name]
    options = next(iter(operation.options.values()))
    xs, state = make(operation, (1, 40 if name == "palimpsa" else 150, 1, 16, 16))  # palimpsa goes token by token
    plain = run_jax(operation, xs, state, None, "pallas", **options)
    watching = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")
    interpreter.races = None
    with pltpu.force_tpu_interpret_mode(watching):
        watched = run_jax(operation, xs, state, None, "pallas", **options)
    assert interpreter.races is not None and not interpreter.races.races_found
    for n, x in plain.items():
        assert np.isfinite(watched[n]).all() and error(watched[n], x) <= TOLERANCES["same"], n


@pytest.mark.slow
def test_every_contract():
    environment = {**os.environ, "STRATA_KERNELS": "pallas", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "pytest", "tests/kernels/test_contracts.py", "-x", "-q"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]


def test_asked_for_by_name_it_says_what_it_takes():
    with pytest.raises(ValueError, match="these are float64"):
        kernels.choose("mesa", {"B": 1, "T": 4, "H": 1, "K": 8, "V": 8}, "float64", "cpu", "pallas")
    with pytest.raises(ValueError, match="K is 512, at most 256"):
        kernels.choose("mesa", {"B": 1, "T": 4, "H": 1, "K": 512, "V": 8}, "bfloat16", "tpu", "pallas")
    with pytest.raises(ValueError, match="on cuda"):
        kernels.choose("mesa", {"B": 1, "T": 4, "H": 1, "K": 8, "V": 8}, "bfloat16", "cuda", "pallas")
