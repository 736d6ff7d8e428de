"""The store: artifacts by key, shared by every study, clone and worker that sees its folder.

    <root>/artifacts/<ke>/<key>/spec.json            what the key stands for
                              /attempts/<n>/...      one try each; n is its fencing number
                              /published             the number of the attempt that won; created only if absent
    <root>/units/<ke>/<key>/...                      parts that several artifacts share

An attempt holds its lease while its heartbeat is fresh and no later attempt exists. Times are compared on the store's
clock (modification times), so that neither another host's clock nor one that jumps decides who is alive.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from pipelines.files import link_tree
from pipelines.processes import identity, runs
from stages import artifact
from stages.spec import LeaseLost

BEAT_SECONDS = 5.0
STALE_SECONDS = 30.0


class Busy(Exception):
    """Another attempt at this key is alive."""

    def __init__(self, holder: dict[str, Any], seconds: float) -> None:
        super().__init__(
            f"process {holder.get('pid', '?')} on {holder.get('host', '?')} is making it (last sign of life {seconds:.0f} s ago)"
        )


def _namespace() -> str:
    """What tells this machine's process numbers from those of a container, or another machine, of the same name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _process_is_alive(holder: dict[str, Any]) -> bool | None:
    """Whether the holder's process runs; None where that cannot be seen from here."""
    if holder.get("host") != socket.gethostname() or holder.get("namespace") != _namespace():
        return None
    return runs(holder)


@dataclass
class Lease:
    """The right to write one attempt's folder, until a later attempt exists."""

    folder: Path
    store: Store
    _stop: threading.Event = field(default_factory=threading.Event)

    @property
    def number(self) -> int:
        return int(self.folder.name)

    @property
    def stop_file(self) -> Path:
        """Whoever creates this file asks the attempt to save its work and stop."""
        return self.folder / "stop"

    def fence(self) -> None:
        """Raise LeaseLost if a later attempt took over: to be called before every write that lasts."""
        later = [path.name for path in self.folder.parent.iterdir() if int(path.name) > self.number]
        if later or not self.folder.is_dir():
            raise LeaseLost(f"Attempt {self.number} was taken over by attempt {max(later, default='?', key=int)}.")

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Inside, a thread shows that this attempt is alive."""

        def beat() -> None:
            while not self._stop.wait(BEAT_SECONDS):
                try:
                    os.utime(self.folder / "heartbeat")
                except OSError:
                    return

        thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    def publish(self) -> bool:
        """Make this attempt the artifact of its key. False where another attempt was first: then that one stands."""
        self.fence()
        for path in self.folder.rglob("*"):
            if path.is_file() and path.name not in ("heartbeat", "progress.jsonl"):
                path.chmod(0o444)
        key_folder = self.folder.parent.parent
        draft = self.folder / ".published"
        draft.write_text(str(self.number))
        try:
            os.link(draft, key_folder / "published")
        except FileExistsError:
            return False
        finally:
            draft.unlink()
        return True

    def release(self, outcome: dict[str, Any]) -> None:
        """Record how the attempt ended and let the lease go."""
        artifact.write_atomically(self.folder / "outcome.json", json.dumps(outcome) + "\n")
        (self.folder / "heartbeat").unlink(missing_ok=True)


class Store:
    """Artifacts by key under one folder."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root).absolute()

    def folder(self, key: str) -> Path:
        return self.root / "artifacts" / key[:2] / key

    def find(self, key: str) -> Path | None:
        """The folder of the published artifact of this key, or None.

        ValueError where it was published and is damaged now: it is never silently made again.
        """
        pointer = self.folder(key) / "published"
        try:
            number = pointer.read_text().strip()
        except FileNotFoundError:
            return None
        attempt = self.folder(key) / "attempts" / number
        try:
            artifact.read(attempt, key=key)
        except ValueError as error:
            raise ValueError(
                f"The store's artifact {key[:12]} is damaged: {error} `strata forget {key[:12]}` has it made again."
            ) from error
        return attempt

    def attempts(self, key: str) -> list[Path]:
        """The folders of the attempts at this key, newest first."""
        parent = self.folder(key) / "attempts"
        return (
            sorted((path for path in parent.iterdir() if path.name.isdigit()), key=lambda path: -int(path.name)) if parent.is_dir() else []
        )

    def acquire(self, key: str, spec: str) -> Lease:
        """Begin an attempt at this key. Raises Busy while another one is alive. spec: the text of the spec, kept beside it."""
        attempts = self.attempts(key)
        if attempts:
            self._refuse_if_alive(attempts[0])
        number = int(attempts[0].name) + 1 if attempts else 1
        target = self.folder(key) / "attempts" / str(number)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            target.mkdir()
        except FileExistsError:
            raise Busy({}, 0.0) from None
        holder = {"host": socket.gethostname(), "namespace": _namespace(), **identity(psutil.Process())}
        artifact.write_atomically(target / "heartbeat", json.dumps(holder))
        artifact.write_atomically(self.folder(key) / "spec.json", spec)
        return Lease(target, self)

    def alive(self, key: str) -> Path | None:
        """The attempt that is being made now, or None."""
        for attempt in self.attempts(key)[:1]:
            try:
                self._refuse_if_alive(attempt)
            except Busy:
                return attempt
        return None

    def _refuse_if_alive(self, attempt: Path) -> None:
        heartbeat = attempt / "heartbeat"
        try:
            holder, beaten = json.loads(heartbeat.read_text()), heartbeat.stat().st_mtime
        except (FileNotFoundError, json.JSONDecodeError):
            if (attempt / "outcome.json").exists() or self._now() - attempt.stat().st_mtime > STALE_SECONDS:
                return
            raise Busy({}, self._now() - attempt.stat().st_mtime) from None
        age = self._now() - beaten
        if age < STALE_SECONDS and _process_is_alive(holder) is not False:
            raise Busy(holder, age)

    def _now(self) -> float:
        """The time on the clock that stamps the store's files."""
        clock = self.root / f".clock-{socket.gethostname()}-{os.getpid()}-{threading.get_ident()}"
        clock.touch()
        try:
            return clock.stat().st_mtime
        finally:
            clock.unlink(missing_ok=True)

    def forget(self, key: str) -> bool:
        """Remove the artifact of this key, its attempts and the units in it, so that it is made again. Raises Busy while one is being made."""
        if not self.folder(key).is_dir():
            return False
        for attempt in self.attempts(key)[:1]:
            self._refuse_if_alive(attempt)
        for record in self.folder(key).glob(f"attempts/*/*/**/{artifact.NAME}"):
            try:
                unit = json.loads(record.read_text())["key"]
            except (ValueError, KeyError):
                continue  # damaged: no unit of the store is linked to it
            shutil.rmtree(self._unit(unit), ignore_errors=True)
        trash = self.folder(key).with_name(f".forgotten-{key}-{time.time_ns()}")
        self.folder(key).rename(trash)
        shutil.rmtree(trash)
        return True

    # Units (stages.units.Shelf)

    def _unit(self, key: str) -> Path:
        return self.root / "units" / key[:2] / key

    def fetch(self, key: str, folder: Path) -> bool:
        """Link the shared unit of this key to `folder`; False where there is none or it is damaged."""
        unit = self._unit(key)
        try:
            artifact.read(unit, key=key)
        except ValueError:
            return False
        shutil.rmtree(folder, ignore_errors=True)
        link_tree(unit, folder)
        return True

    def keep(self, key: str, folder: Path) -> None:
        """Share the complete unit at `folder`: the first one of a key stands."""
        unit = self._unit(key)
        if unit.is_dir():
            try:
                artifact.read(unit, key=key)
                return
            except ValueError:
                shutil.rmtree(unit)
        unit.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".partial-{key}-", dir=unit.parent))
        link_tree(folder, partial)
        try:
            partial.rename(unit)
        except OSError:  # somebody else's copy of the same unit came first
            shutil.rmtree(partial, ignore_errors=True)
