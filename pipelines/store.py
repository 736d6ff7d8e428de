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
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from pipelines import objects
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


def holder_is_alive(record: dict[str, Any]) -> bool | None:
    """Whether the holder's process runs; None where that cannot be seen from here."""
    if record.get("host") != socket.gethostname() or record.get("namespace") != _namespace():
        return None
    return runs(record)


def holder() -> dict[str, Any]:
    """This process, as a lease names its holder."""
    return {"host": socket.gethostname(), "namespace": _namespace(), **identity(psutil.Process())}


@dataclass
class Lease:
    """The right to write one attempt's folder, until a later attempt exists."""

    folder: Path
    store: Store
    token: str = ""
    _stop: threading.Event = field(default_factory=threading.Event)

    @property
    def number(self) -> int:
        return int(self.folder.name)

    @property
    def stop_file(self) -> Path:
        """Whoever creates this file asks the attempt to save its work and stop."""
        return self.folder / "stop"

    def stop_requested(self) -> bool:
        return self.stop_file.exists()

    def kept(self) -> None:
        """Have what was saved so far where a later attempt finds it. In a folder it is there."""

    def fence(self) -> None:
        """Raise LeaseLost if a later attempt took over, or the artifact was forgotten: to be called before every write that lasts."""
        later = [path.name for path in self.folder.parent.iterdir() if int(path.name) > self.number] if self.folder.is_dir() else []
        if later or not self.folder.is_dir() or self._is_anothers():
            raise LeaseLost(f"Attempt {self.number} was taken over by attempt {max(later, default='?', key=int)}.")

    def _is_anothers(self) -> bool:
        """Whether this number was given again, after the artifact was forgotten while this process was silent."""
        try:
            return json.loads((self.folder / "heartbeat").read_text()).get("token", self.token) != self.token
        except (OSError, ValueError):
            return False

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
        """Record how the attempt ended and let the lease go. Where the record cannot be written (a full disk, a folder that whoever took over has
        cleared away) the heartbeat stays, and the lease goes with this process."""
        try:
            if self.folder.is_dir():
                artifact.write_atomically(self.folder / "outcome.json", json.dumps(outcome) + "\n")
                (self.folder / "heartbeat").unlink(missing_ok=True)
        except OSError as error:
            print(f"Warning: how attempt {self.number} ended is not recorded at {self.folder} ({error}).", file=sys.stderr, flush=True)


class Store:
    """Artifacts by key under one folder."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root).absolute()
        self.where = str(self.root)
        self.offline = False  # of a store in a bucket: answer from what this machine knows

    @property
    def objects(self) -> objects.Objects:
        """Small files beside the artifacts: the board's, approvals."""
        return objects.Folder(self.root)

    def folder(self, key: str) -> Path:
        return self.root / "artifacts" / key[:2] / key

    def keys(self) -> list[str]:
        """Every published key."""
        return sorted(path.parent.name for path in (self.root / "artifacts").glob("*/*/published"))

    def published(self, key: str) -> bool:
        return (self.folder(key) / "published").exists()

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Inside, answers about many keys may be as old as its beginning: a bucket is listed once then."""
        yield

    def spec(self, key: str) -> str | None:
        """The text of the spec that a key stands for."""
        path = self.folder(key) / "spec.json"
        return path.read_text() if path.is_file() else None

    def locate(self, key: str, inside: str = "", *, data: bool = True) -> Path | None:
        """Where a stage reads this part of a published artifact, or None. Without `data` its record alone will be read. ValueError where it is damaged."""
        found = self.find(key)
        return found / inside if found else None

    def find(self, key: str, wanted: Callable[[str], bool] | None = None) -> Path | None:
        """The folder of the published artifact of this key, or None. wanted: which of its files will be read, where they must be fetched first.

        ValueError where it was published and is damaged now: it is never silently made again.
        """
        pointer = self.folder(key) / "published"
        try:
            number = pointer.read_bytes().strip().decode(errors="replace")
        except FileNotFoundError:
            return None
        try:
            if not number.isdecimal():
                raise ValueError(f"{pointer} names no attempt.")
            attempt = self.folder(key) / "attempts" / number
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

    def newest(self, key: str) -> int:
        """The number of the newest attempt; 0 where there was none."""
        return max((int(path.name) for path in self.attempts(key)[:1]), default=0)

    def resumable(self, key: str) -> list[Path]:
        """Folders with the work of earlier attempts, newest first."""
        return self.attempts(key)

    def ask_to_stop(self, key: str) -> bool:
        """Ask the attempt that is being made to save its work and end. False where none is."""
        attempt = self.alive(key)
        if attempt is not None:
            (attempt / "stop").touch()
        return attempt is not None

    def tidy(self, key: str, number: int) -> None:
        """The artifact of this key stands: other attempts' folders are of no more use. number: the attempt that has just ended."""
        published = self.find(key)
        for attempt in self.attempts(key):
            if attempt != published and attempt.name != str(number):
                shutil.rmtree(attempt, ignore_errors=True)

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
        lease = Lease(target, self, uuid.uuid4().hex)
        try:
            artifact.write_atomically(target / "heartbeat", json.dumps(holder() | {"token": lease.token}))
            artifact.write_atomically(self.folder(key) / "spec.json", spec)
        except BaseException:
            shutil.rmtree(target, ignore_errors=True)  # without a heartbeat it would look busy for a while
            raise
        return lease

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
            holder = holder if isinstance(holder, dict) else {}
        except (FileNotFoundError, ValueError):
            if (attempt / "outcome.json").exists() or self._now() - attempt.stat().st_mtime > STALE_SECONDS:
                return
            raise Busy({}, self._now() - attempt.stat().st_mtime) from None
        age = self._now() - beaten
        if age < STALE_SECONDS and holder_is_alive(holder) is not False:
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

    def _bring_unit(self, key: str) -> None:
        """Have a shared unit at its place on this machine: in a folder it is there. ValueError where there is none."""

    def fetch(self, key: str, folder: Path) -> bool:
        """Link the shared unit of this key to `folder`; False where there is none or it is damaged."""
        unit = self._unit(key)
        try:
            self._bring_unit(key)
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
