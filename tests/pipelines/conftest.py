"""A fresh place for a store, of each kind."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipelines import places


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with places.server() as url:
        yield url


def _fresh(kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if kind == "s3":
        request.getfixturevalue("s3")
    monkeypatch.setenv("STRATA_CACHE", str(tmp_path / "cache"))
    return places.url_of(kind, tmp_path)


@pytest.fixture(params=places.KINDS)
def where(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A place of any kind, and an empty cache."""
    return _fresh(request.param, request, tmp_path, monkeypatch)


@pytest.fixture(params=[kind for kind in places.KINDS if kind != "folder"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket, and an empty cache."""
    return _fresh(request.param, request, tmp_path, monkeypatch)
