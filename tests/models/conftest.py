"""One thread: these arrays are tiny, and other tests run beside."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    import torch

    torch.set_num_threads(1)
