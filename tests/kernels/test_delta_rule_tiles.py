"""The delta rule's Triton kernels where keys and values take several tiles; test_contracts.py has sizes of one tile."""

import pytest
import torch

from kernels.delta_rule import refusal
from tests.kernels.harness import error, make, run_torch, split_documents
from tests.kernels.operations import OPERATIONS

DEVICE = torch.get_default_device().type


@pytest.mark.parametrize(("K", "V"), [(96, 80), (160, 48)])
def test_tiles_of_keys_and_values(K: int, V: int) -> None:
    """Outputs, the last state and every gradient, against the reference in float64; documents, padding, a state to start from."""
    reason = refusal({"K": K, "V": V}, "float32", DEVICE)
    if reason is not None:
        pytest.skip(reason)
    operation, sizes = OPERATIONS["delta_rule with decay"], (1, 40, 2, K, V)
    xs, state = make(operation, sizes)
    segments = split_documents(*sizes[:2])
    reference = run_torch(operation, xs, state, segments, "float64", "reference", scale=0.5)
    ours = run_torch(operation, xs, state, segments, "float32", "triton", scale=0.5)
    errors = {name: error(ours[name], reference[name]) for name in reference}
    assert max(errors.values()) <= 2e-5, errors
