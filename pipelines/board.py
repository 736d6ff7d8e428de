"""The board where those who ask and the driver that works meet: small files in the store, so that neither needs Ray to see the other.

    <store>/studies/<study>/requests/<session>/<key>.json    what is wanted; taking it away asks for the work to stop
                           /outcomes/<session>/<key>.json    how it ended, and which requests that answers
                           /drivers/<session>.json           a driver's sign of life

All by Ray session: the driver of another (of an earlier head, of another cluster, of a second clone) leaves a request alone, though both
may want the same key; the store's lease decides which of them makes it.
"""

from __future__ import annotations

import json
import shutil
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipelines.work import Outcome, Request
from stages.artifact import write_atomically


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
        self.folder = Path(store).absolute() / "studies" / study
        self._seen: dict[Path, tuple[tuple[int, int], Wanted | None]] = {}

    # Asking

    def put(self, request: Request, session: str, *, ahead: int = 0, id: str | None = None) -> str:
        """Put up a request; returns its id. One of the same session and key is replaced: they want the same."""
        record = {"id": id or uuid.uuid4().hex, "session": session, "ahead": ahead, "asked": time.time(), "request": asdict(request)}
        write_atomically(self._request(session, request.key), json.dumps(record))
        return record["id"]

    def has(self, session: str, key: str) -> bool:
        """Whether a request for this key is on the board."""
        return self._request(session, key).exists()

    def withdraw(self, session: str, key: str) -> bool:
        """Take a request away; its driver stops the work, which saves what it has. False where there was none."""
        try:
            self._request(session, key).unlink()
        except FileNotFoundError:
            return False
        return True

    def withdraw_all(self, session: str) -> None:
        """Take every request of a session away."""
        for path in (self.folder / "requests" / session).glob("*.json"):
            path.unlink(missing_ok=True)

    def outcome(self, session: str, key: str, id: str | None = None, *, since: float = 0.0) -> Outcome | None:
        """How the last request of this key (or the one of this id) ended, or None. since: an earlier one does not count (seconds since 1970)."""
        record = _read(self._outcome(session, key))
        return Outcome(**record["outcome"]) if record and (id is None or id in record["ids"]) and record["time"] >= since else None

    # Working

    def wanted(self, session: str) -> list[Wanted]:
        """The requests for a Ray session: those that somebody waits for first, oldest first."""
        found = {path: self._wanted(path) for path in (self.folder / "requests" / session).glob("*.json")}
        self._seen = {path: self._seen[path] for path in found if path in self._seen}
        mine = [item for item in found.values() if item is not None and item.session == session]
        return sorted(mine, key=lambda item: (item.ahead > 0, item.asked))

    def _wanted(self, path: Path) -> Wanted | None:
        try:
            stat = path.stat()
        except FileNotFoundError:
            return None
        mark = (stat.st_mtime_ns, stat.st_ino)
        if path not in self._seen or self._seen[path][0] != mark:
            record = _read(path)
            try:
                item = Wanted(**record | {"request": Request(**record["request"])}) if record else None
            except (TypeError, KeyError):
                item = None  # of another version of this code: not ours to run
            self._seen[path] = (mark, item)
        return self._seen[path][1]

    def answer(self, session: str, key: str, outcome: Outcome, ids: set[str]) -> None:
        """Record how the work for `key` ended, and clear away the request if it is one of `ids`."""
        record = {"ids": sorted(ids), "time": round(time.time(), 3), "outcome": asdict(outcome)}
        write_atomically(self._outcome(session, key), json.dumps(record, indent=1) + "\n")
        if (_read(self._request(session, key)) or {}).get("id") in ids:
            self.withdraw(session, key)

    # Signs of life

    def beat(self, session: str, facts: dict[str, Any]) -> None:
        """A driver's sign of life: what it says of itself (pid, started, host, job, working: keys)."""
        write_atomically(self._driver(session), json.dumps(facts | {"session": session, "time": round(time.time(), 3)}, indent=1) + "\n")

    def leave(self, session: str) -> None:
        self._driver(session).unlink(missing_ok=True)

    def forget(self, session: str) -> None:
        """Clear away what a session that is gone has left: its requests and outcomes, and its driver's sign of life."""
        for kind in ("requests", "outcomes"):
            shutil.rmtree(self.folder / kind / session, ignore_errors=True)
        self.leave(session)

    def driver(self, session: str) -> dict[str, Any] | None:
        """What the driver of a Ray session last said of itself, or None."""
        return _read(self._driver(session))

    def drivers(self) -> list[dict[str, Any]]:
        """The same of every session whose driver has not left, alive or not."""
        return [record for path in sorted((self.folder / "drivers").glob("*.json")) if (record := _read(path))]

    def _request(self, session: str, key: str) -> Path:
        return self.folder / "requests" / session / f"{key}.json"

    def _outcome(self, session: str, key: str) -> Path:
        return self.folder / "outcomes" / session / f"{key}.json"

    def _driver(self, session: str) -> Path:
        return self.folder / "drivers" / f"{session}.json"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return record if isinstance(record, dict) else None
