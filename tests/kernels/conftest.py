"""Uninitialised memory is NaN, so that an output nobody wrote shows; one thread, so that the tests cost what they say."""

import os

import pytest
import torch

from kernels import launch


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


@pytest.fixture(autouse=True)
def interpreted_programs_are_let_go():
    """Each Pallas kernel that is interpreted is a program of its own; thousands of them exhaust a process's memory maps."""
    yield
    if os.environ.get("STRATA_KERNELS") == "pallas":
        import jax

        jax.clear_caches()


@pytest.fixture(autouse=launch.INTERPRETED, scope="session")
def loads_and_stores_are_inside():
    from tests.kernels import bounds

    with bounds.held():
        yield


@pytest.fixture(autouse=True, scope="session")
def where_the_kernels_run():
    """STRATA_KERNELS=triton, not interpreted: everything on the card."""
    on_card = os.environ.get("STRATA_KERNELS") == "triton" and not launch.INTERPRETED
    torch.set_default_device("cuda" if on_card else "cpu")
