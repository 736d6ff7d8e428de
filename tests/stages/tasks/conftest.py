"""One tokenizer for all tests of tasks."""

import pytest

from stages.tokenizer import Tokenizer
from tests.stages.tasks.small_tasks import vocabulary


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return Tokenizer(vocabulary(tmp_path_factory.mktemp("vocabulary")), parallel=False)
