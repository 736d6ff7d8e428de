"""Uninitialised memory is NaN, so that an output nobody wrote shows; one thread, so that the tests cost what they say."""

import pytest
import torch


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(4).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
