"""The end of a training by several processes: rank 0 tells those who follow, once, that there is no more to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Dismissal:
    """Called by rank 0. joined: whether this process has others. tell: sends them a message; None ends their following."""

    def __init__(self, joined: Callable[[], bool], tell: Callable[[None], Any]) -> None:
        self._joined, self._tell, self._told = joined, tell, False

    def __call__(self) -> None:
        if not self._told and self._joined():
            self._told = True
            self._tell(None)

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Inside, the others follow; at the end, however it comes, they are told so."""
        try:
            yield
        finally:
            self()
