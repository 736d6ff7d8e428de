"""Which assembler Triton's kernels go through."""

import re

import pytest

from kernels import launch

triton = pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def asked_anew():
    launch.choose_assembler.cache_clear()
    yield
    launch.choose_assembler.cache_clear()


def test_the_assembler_is_newer_than_the_one_that_miscompiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    path = launch.choose_assembler()
    assert triton.knobs.nvidia.ptxas.path == path
    major, minor = (int(x) for x in re.match(r"(\d+)\.(\d+)", triton.knobs.nvidia.ptxas.version).groups())
    assert (major, minor) > (12, 8)


def test_the_users_choice_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/somewhere/ptxas")
    assert launch.choose_assembler() == "/somewhere/ptxas"
