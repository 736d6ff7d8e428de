"""The board where those who ask and the driver that works meet: small files in the store, so that neither needs Ray to see the other.

    <store>/studies/<study>/requests/<session>/<key>.json    what is wanted; taking it away asks for the work to stop
                           /outcomes/<session>/<key>.json    how it ended, and which requests that answers
                           /drivers/<session>.json           a driver's sign of life

All by Ray session: the driver of another (of an earlier head, of another cluster, of a second clone) leaves a request alone, though both
may want the same key; the store's lease decides which of them makes it.
"""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipelines import objects
from pipelines.work import Outcome, Request

LISTING_SECONDS = 1.0  # how old a listing of a bucket may be


@dataclass(frozen=True)
class Wanted:
    """A request on the board. asked: seconds since 1970 where it was asked.

    ahead: 0 where somebody waits for it; n where nobody does yet, and it may run beside n - 1 others of its kind.
    """

    id: str
    session: str
    ahead: int
    asked: float
    request: Request


class Board:
    """The board of one study in one store."""

    def __init__(self, store: str | Path, study: str) -> None:
        self.objects, self.place = objects.at(store), f"studies/{study}"
        self._seen: dict[str, tuple[Any, Wanted | None]] = {}
        self._age = LISTING_SECONDS if objects.is_url(store) else 0.0
        self._listed: dict[str, tuple[float, dict[str, objects.Entry]]] = {}

    # Asking

    def put(self, request: Request, session: str, *, ahead: int = 0, id: str | None = None) -> str:
        """Put up a request; returns its id. One of the same session and key is replaced: they want the same."""
        record = {"id": id or uuid.uuid4().hex, "session": session, "ahead": ahead, "asked": time.time(), "request": asdict(request)}
        self._write(self._request(session, request.key), record)
        return record["id"]

    def has(self, session: str, key: str) -> bool:
        """Whether a request for this key is on the board."""
        return self.objects.read(self._request(session, key)) is not None

    def withdraw(self, session: str, key: str) -> bool:
        """Take a request away; its driver stops the work, which saves what it has. False where there was none."""
        there = self.has(session, key)
        self.objects.remove([self._request(session, key)])
        return there

    def withdraw_all(self, session: str) -> None:
        """Take every request of a session away."""
        self.objects.remove(self.objects.list(f"{self.place}/requests/{session}"))

    def outcome(self, session: str, key: str, id: str | None = None, *, since: float = 0.0) -> Outcome | None:
        """How the last request of this key (or the one of this id) ended, or None. since: an earlier one does not count (seconds since 1970)."""
        record = self._read(self._outcome(session, key))
        return Outcome(**record["outcome"]) if record and (id is None or id in record["ids"]) and record["time"] >= since else None

    # Working

    def wanted(self, session: str) -> list[Wanted]:
        """The requests for a Ray session: those that somebody waits for first, oldest first."""
        found = {name: self._wanted(name, entry.mark) for name, entry in self._list(f"{self.place}/requests/{session}").items()}
        self._seen = {name: self._seen[name] for name in found if name in self._seen}
        mine = [item for item in found.values() if item is not None and item.session == session]
        return sorted(mine, key=lambda item: (item.ahead > 0, item.asked))

    def _list(self, prefix: str) -> dict[str, objects.Entry]:
        """The names there; of a bucket, as they were a moment ago."""
        now = time.monotonic()
        if prefix not in self._listed or now - self._listed[prefix][0] >= self._age:
            self._listed[prefix] = now, self.objects.list(prefix)
        return self._listed[prefix][1]

    def _wanted(self, name: str, mark: Any) -> Wanted | None:
        if name not in self._seen or self._seen[name][0] != mark:
            record = self._read(name)
            try:
                item = Wanted(**record | {"request": Request(**record["request"])}) if record else None
            except (TypeError, KeyError):
                item = None  # of another version of this code: not ours to run
            self._seen[name] = (mark, item)
        return self._seen[name][1]

    def answer(self, session: str, key: str, outcome: Outcome, ids: set[str]) -> None:
        """Record how the work for `key` ended, and clear away the request if it is one of `ids`."""
        record = {"ids": sorted(ids), "time": round(time.time(), 3), "outcome": asdict(outcome)}
        self._write(self._outcome(session, key), record)
        if (self._read(self._request(session, key)) or {}).get("id") in ids:
            self.withdraw(session, key)
            self._listed.clear()

    # Signs of life

    def beat(self, session: str, facts: dict[str, Any]) -> None:
        """A driver's sign of life: what it says of itself (pid, started, host, job, working: keys)."""
        self._write(self._driver(session), facts | {"session": session, "time": round(time.time(), 3)})

    def leave(self, session: str) -> None:
        self.objects.remove([self._driver(session)])

    def forget(self, session: str) -> None:
        """Clear away what a session that is gone has left: its requests and outcomes, and its driver's sign of life."""
        for kind in ("requests", "outcomes"):
            self.objects.remove(self.objects.list(f"{self.place}/{kind}/{session}"))
        self.leave(session)

    def driver(self, session: str) -> dict[str, Any] | None:
        """What the driver of a Ray session last said of itself, or None."""
        return self._read(self._driver(session))

    def drivers(self) -> list[dict[str, Any]]:
        """The same of every session whose driver has not left, alive or not."""
        return [record for name in sorted(self._list(f"{self.place}/drivers")) if (record := self._read(name))]

    def _request(self, session: str, key: str) -> str:
        return f"{self.place}/requests/{session}/{key}.json"

    def _outcome(self, session: str, key: str) -> str:
        return f"{self.place}/outcomes/{session}/{key}.json"

    def _driver(self, session: str) -> str:
        return f"{self.place}/drivers/{session}.json"

    def _write(self, name: str, record: dict[str, Any]) -> None:
        self.objects.write(name, (json.dumps(record, indent=1) + "\n").encode())

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            record = json.loads(self.objects.read(name) or b"null")
        except json.JSONDecodeError:
            return None
        return record if isinstance(record, dict) else None
