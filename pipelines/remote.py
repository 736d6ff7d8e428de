"""A store in a bucket: the same keys, leases and attempts as in a folder, the files as objects.

    published/<key>                  {"attempt", "token"}: created only if absent; one listing says what there is
    attempts/<key>/<n>/lease         {"host", "pid", ..., "token"}: created only if absent; n is the fencing number
                       heartbeat  progress.jsonl  log.txt  outcome.json  stop  ...
                       files         the artifact's manifest: name -> sha256 and size of a blob
                       resume.json   the same of what a later attempt can go on from; its files are resume/<sha256>
    units/<key>                      a shared part's manifest
    blobs/<ab>/<sha256>              every file's bytes, once, however many artifacts have it
    specs/<key>  studies/...         the specs; the board
    gc                               {"epoch", "running"}: who writes a manifest sees a collection that ran meanwhile

What a stage reads and writes are local files: in a cache of this machine (STRATA_CACHE, or ~/.cache/strata), where each blob is checked
against its name when it comes and linked to wherever it belongs. Files move one by one, several at a time, never through memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pipelines import objects, secrets
from pipelines.files import link
from pipelines.objects import Entry
from pipelines.store import Busy, Lease, Store, holder, holder_is_alive
from stages import artifact, rows
from stages.checkpoints import FOLDER as CHECKPOINTS
from stages.sources import sha256
from stages.spec import LeaseLost

BEAT_SECONDS = 10.0
STALE_SECONDS = 60.0
LOOK_SECONDS = 2.0  # how old a listing of what is published may be, for those who wait
UNITS_SECONDS = 60.0  # the same of the shared units
CLOCK_SECONDS = 60.0
GRACE_SECONDS = 24 * 3600.0  # a blob this young is never collected
COLLECTING_SECONDS = 900.0  # a collection that shows no life for so long has died
AT_ONCE = 8  # files that move at a time
RESUMED = 2  # attempts whose work is fetched to go on from
COPIED_BYTES = 64 << 20  # a growing file up to this size is copied before it is sent; a larger one is linked
# What others see of an attempt, beside its artifact. The first two grow; all are mirrored whole.
GROWING = ("progress.jsonl", "log.txt")
TEXTS = (*GROWING, "outcome.json")  # secrets are covered up in them before anybody sees them
SHOWN = (*GROWING, "outcome.json", "history.parquet", "provenance.json")
NOT_RESUMED = {*SHOWN, "heartbeat", "stop", artifact.NAME}

Files = dict[str, dict[str, Any]]  # name -> {"sha256", "size"}


def cache_folder(url: str) -> Path:
    """Where this machine keeps what it has of a bucket."""
    base = os.environ.get("STRATA_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "strata"
    return Path(base).expanduser() / hashlib.sha256(url.encode()).hexdigest()[:16]


class RemoteStore(Store):
    """Artifacts by key in a bucket. root: the cache on this machine."""

    def __init__(self, url: str) -> None:
        super().__init__(cache_folder(objects.normal(url)))
        self.where = objects.normal(url)
        self._there: set[str] = set()  # blobs known to be in the bucket
        self._epoch: int | None = None
        self._published: tuple[float, dict[str, Entry]] | None = None
        self._units: tuple[float, set[str]] | None = None
        self._attempts_seen: dict[str, dict[int, dict[str, Entry]]] | None = None
        self._clock: tuple[float, float] | None = None
        self._newest: dict[str, tuple[float, int]] = {}
        self._tokens: dict[str, dict[str, Any]] = {}  # the records of what is published, as far as they were read

    @cached_property
    def bucket(self) -> objects.Bucket:
        return objects.bucket(self.where)

    @property
    def objects(self) -> objects.Objects:
        return self.bucket

    # What is published

    def keys(self) -> list[str]:
        return sorted(self._listing(0.0))

    def published(self, key: str) -> bool:
        return key in self._listing(LOOK_SECONDS)

    def _listing(self, age: float) -> dict[str, Entry]:
        now = time.monotonic()
        if self._published is None or (self._attempts_seen is None and now - self._published[0] > age):
            self._published = now, {name.removeprefix("published/"): entry for name, entry in self.bucket.list("published").items()}
        return self._published[1]

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Inside, two listings, taken now, serve for all questions about what is published and what is being made; offline, the last ones do."""
        last = self.root / "listing.json"
        if self.offline:
            known = (_json(_bytes(last)) or {}).get("published", {})
            self._published, self._attempts_seen = (0.0, {key: Entry(0, 0.0, None) for key in known}), {}
            try:
                yield
            finally:
                self._published = self._attempts_seen = None
            return
        self._published = None
        self._listing(0.0)
        seen: dict[str, dict[int, dict[str, Entry]]] = {}
        for name, entry in self.bucket.list("attempts").items():
            _, key, number, file = name.split("/", 3)
            seen.setdefault(key, {}).setdefault(int(number), {})[file] = entry
        self._attempts_seen = {key: _leased(numbers) for key, numbers in seen.items()}
        try:
            yield
        finally:
            self._attempts_seen = None
            tokens = {key: token for key in self._listing(LOOK_SECONDS) if (token := self._tokens.get(key))}
            artifact.write_atomically(last, json.dumps({"published": tokens}).encode())

    def spec(self, key: str) -> str | None:
        text = self.bucket.read(f"specs/{key}")
        return text.decode() if text is not None else None

    def folder(self, key: str) -> Path:
        return self.root / "artifacts" / key[:2] / key

    def find(self, key: str, wanted: Callable[[str], bool] | None = None) -> Path | None:
        """The folder, in the cache, of the published artifact of this key, with its `wanted` files, or None.

        ValueError where it was published and is damaged now.
        """
        if self._attempts_seen is not None and not self.published(key):
            return None
        record = self._record(key)
        if record is None:
            return None
        try:
            folder = self.folder(key) / record["token"]
            files = self._manifest(key, record, folder)
            self._bring({name: file for name, file in files.items() if name == artifact.NAME or wanted is None or wanted(name)}, folder)
            artifact.read(folder, key=key, data=False)
        except (ValueError, KeyError) as error:
            raise ValueError(
                f"The store's artifact {key[:12]} is damaged: {error} `strata forget {key[:12]}` has it made again."
            ) from error
        return folder

    def _record(self, key: str) -> dict[str, Any] | None:
        if self.offline:
            return (_json(_bytes(self.root / "listing.json")) or {}).get("published", {}).get(key)
        record = _json(self.bucket.read(f"published/{key}"))
        if record and "token" in record:
            self._tokens[key] = record
        return record

    def files(self, key: str) -> Files:
        """The manifest of a published artifact. ValueError where it is damaged."""
        record = _json(self.bucket.read(f"published/{key}"))
        if record is None or "token" not in record:
            raise ValueError(f"The store has no artifact {key[:12]}, or its record is damaged.")
        return self._manifest(key, record, self.folder(key) / record["token"])

    def locate(self, key: str, inside: str = "", *, data: bool = True) -> Path | None:
        """Where a stage reads this part of a published artifact: only what it needs is fetched."""

        def wanted(name: str) -> bool:
            if name == inside:
                return True
            part = name.startswith(f"{inside}/" if inside else "") and not _working(name)
            return part and (data or name == f"{inside}/{artifact.NAME}")

        found = self.find(key, wanted)
        if found is None:
            return None
        if data and inside.startswith("budgets/"):
            needed = set(rows.shards(found / inside))
            self.find(key, needed.__contains__)
        return found / inside

    def _manifest(self, key: str, record: dict[str, Any], folder: Path) -> Files:
        local = folder.with_name(f"{folder.name}.files")
        if not local.is_file():
            text = self.bucket.read(f"attempts/{key}/{int(record['attempt'])}/files")
            if text is None:
                raise ValueError("its manifest is missing.")
            _files(text)
            artifact.write_atomically(local, text.decode())
        return _files(local.read_bytes())

    def _bring(self, files: Files, folder: Path) -> None:
        """Have these files under `folder`, each fetched once to this machine and checked against its digest."""
        todo = [(name, file) for name, file in files.items() if _size(artifact.inside(folder, name)) != file["size"]]
        first = {file["sha256"]: file for _, file in todo}
        _several(self._blob_here, first.values())
        for name, file in todo:
            link(self._cached(file["sha256"]), folder / name)

    def _cached(self, sha: str) -> Path:
        return self.root / "blobs" / sha[:2] / sha

    def _blob_here(self, file: dict[str, Any]) -> None:
        target = self._cached(file["sha256"])
        if _size(target) == file["size"]:
            return
        self._download(f"blobs/{file['sha256'][:2]}/{file['sha256']}", file, target)

    def _download(self, name: str, file: dict[str, Any], target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=target.parent, prefix=".partial-")
        os.close(handle)
        try:
            self.bucket.download(name, Path(partial))
            if _size(Path(partial)) != file["size"] or sha256(Path(partial)) != file["sha256"]:
                raise ValueError(f"{self.bucket.url(name)} does not hold what was put there.")
            os.chmod(partial, 0o444)
            os.replace(partial, target)
        except FileNotFoundError as error:
            raise ValueError(f"{self.bucket.url(name)} is missing.") from error
        finally:
            with suppress(FileNotFoundError):
                os.unlink(partial)

    # What goes up

    def upload(self, folder: Path, names: Iterable[str], root: Callable[[Files], Any]) -> Any:
        """Put files' bytes in the bucket, those it lacks, and then call `root` with their manifest, which must write what keeps them from being
        collected. Returns what the last call of `root` returned."""
        chosen = sorted(names)
        files: Files = {}

        def one(name: str) -> None:
            path = folder / name
            files[name] = {"sha256": sha256(path), "size": path.stat().st_size}
            self._put_blob(path, files[name])

        while True:
            self._meet_epoch()
            epoch = self._epoch
            _several(one, chosen)
            done = root(dict(sorted(files.items())))
            self._meet_epoch()
            if self._epoch == epoch:
                return done

    def _put_blob(self, path: Path, file: dict[str, Any]) -> None:
        name = f"blobs/{file['sha256'][:2]}/{file['sha256']}"
        if name in self._there:
            return
        entry = self.bucket.info(name)
        if entry is None or entry.size != file["size"]:
            self.bucket.upload(path, name)
        self._there.add(name)

    def _meet_epoch(self) -> None:
        """Learn of collections since the last look: what was known to be there may be gone. Waits for one that runs."""
        while True:
            record = _json(self.bucket.read("gc")) or {"epoch": 0, "running": False}
            if not record["running"] or self._collection_died():
                break
            time.sleep(1.0)
        if record["epoch"] != self._epoch:
            self._there.clear()
            self._epoch = record["epoch"]

    def _collection_died(self) -> bool:
        entry = self.bucket.info("gc")
        return entry is None or self._now() - entry.modified > COLLECTING_SECONDS

    # Attempts

    def _attempts(self, key: str) -> dict[int, dict[str, Entry]]:
        if self._attempts_seen is not None:
            return self._attempts_seen.get(key, {})
        found: dict[int, dict[str, Entry]] = {}
        for name, entry in self.bucket.list(f"attempts/{key}").items():
            _, _, number, file = name.split("/", 3)
            found.setdefault(int(number), {})[file] = entry
        return _leased(found)

    def attempts(self, key: str) -> list[Path]:
        """Folders with what the attempts at this key show of themselves, newest first; of the newest it is brought up to date."""
        found = self._attempts(key)
        numbers = sorted(found, reverse=True)
        folders = [self.root / "attempts" / key[:2] / key / str(number) for number in numbers]
        for number, folder in list(zip(numbers, folders, strict=True))[:1]:
            self._mirror(key, number, found[number], folder)
        return folders

    def newest(self, key: str) -> int:
        """As it was a moment ago: a driver asks this of everything that runs, many times a second."""
        now = time.monotonic()
        if key not in self._newest or now - self._newest[key][0] > LOOK_SECONDS:
            self._newest[key] = now, max(self._attempts(key), default=0)
        return self._newest[key][1]

    def _mirror(self, key: str, number: int, entries: dict[str, Entry], folder: Path) -> None:
        marks = folder / ".marks"
        had = _json(_bytes(marks)) or {}
        if had.get("lease") != str(entries.get("lease", Entry(0, 0, None)).mark):
            shutil.rmtree(folder, ignore_errors=True)
            had = {}
        now = {"lease": str(entries["lease"].mark)} if "lease" in entries else {}
        for name in SHOWN:
            if name not in entries:
                continue
            now[name] = str(entries[name].mark)
            here = (_bytes(folder / name) or b"") if name in GROWING else b""
            if had.get(name) == now[name] or (name in GROWING and len(here) == entries[name].size):
                continue
            here = here if len(here) < entries[name].size else b""
            artifact.write_atomically(folder / name, here + (self.bucket.read(f"attempts/{key}/{number}/{name}", start=len(here)) or b""))
        if now != had:
            artifact.write_atomically(marks, json.dumps(now).encode())
        folder.mkdir(parents=True, exist_ok=True)

    def resumable(self, key: str) -> list[Path]:
        """Folders with the work of earlier attempts, newest first: this machine's own, and what others had saved."""
        found = self._attempts(key)
        mine = {int(path.name): path for path in (self.root / "work" / key).glob("*/*") if path.name.isdigit()}
        folders, fetched = [], 0
        for number in sorted(found, reverse=True):
            lease = _json(self.bucket.read(f"attempts/{key}/{number}/lease")) or {}
            if number in mine and mine[number].parent.name == lease.get("token"):
                folders.append(mine[number])
            elif "resume.json" in found[number] and fetched < RESUMED:
                target = self.root / "resume" / key / str(lease.get("token")) / str(number)
                if self._bring_resume(key, number, target):
                    folders.append(target)
                    fetched += 1
        return folders

    def _bring_resume(self, key: str, number: int, target: Path) -> bool:
        """Fetch what an attempt had saved; a file that is damaged or gone is left out: an older checkpoint serves."""
        try:
            files = _files(self.bucket.read(f"attempts/{key}/{number}/resume.json") or b"")
        except ValueError:
            return False
        for name, file in files.items():
            path = artifact.inside(target, name)
            try:
                if _size(path) != file["size"] or sha256(path) != file["sha256"]:
                    self._download(f"attempts/{key}/{number}/resume/{file['sha256']}", file, path)
                    path.chmod(0o644)
            except ValueError as error:
                print(f"Warning: {name} of attempt {number} is passed over: {error}", file=sys.stderr, flush=True)
        return True

    def acquire(self, key: str, spec: str) -> Lease:
        found = self._attempts(key)
        number = max(found, default=0)
        if number:
            self._refuse(key, number, found[number])
        number += 1
        token = uuid.uuid4().hex
        mine = holder() | {"token": token}
        if not self.bucket.create(f"attempts/{key}/{number}/lease", json.dumps(mine).encode()):
            raise Busy({}, 0.0)
        self.bucket.write(f"attempts/{key}/{number}/heartbeat", b"1")
        self.bucket.write(f"specs/{key}", spec.encode())
        folder = self.root / "work" / key / token / str(number)
        folder.mkdir(parents=True)
        return RemoteLease(folder, self, token, key=key)

    def alive(self, key: str) -> Path | None:
        found = self._attempts(key)
        number = max(found, default=0)
        if number:
            try:
                self._refuse(key, number, found[number])
            except Busy:
                return next(iter(self.attempts(key)), None)
        return None

    def _refuse(self, key: str, number: int, files: dict[str, Entry]) -> None:
        if "outcome.json" in files:
            return
        age = self._now() - max(files[name].modified for name in ("lease", "heartbeat") if name in files)
        if age < STALE_SECONDS:
            record = _json(self.bucket.read(f"attempts/{key}/{number}/lease")) or {}
            if holder_is_alive(record) is not False:
                raise Busy(record, max(0.0, age))

    def _now(self) -> float:
        """The time on the bucket's clock; asked once a minute, then counted on."""
        now = time.monotonic()
        if self._clock is None or now - self._clock[0] > CLOCK_SECONDS:
            self._clock = now, self.bucket.now()
        return self._clock[1] + time.monotonic() - self._clock[0]

    def ask_to_stop(self, key: str) -> bool:
        attempt = self.alive(key)
        if attempt is None:
            return False
        self.bucket.write(f"attempts/{key}/{attempt.name}/stop", b"")
        return True

    def tidy(self, key: str, number: int) -> None:
        """The artifact stands: earlier attempts, and this one's work, are of no more use."""
        keep = {f"attempts/{key}/{number}/{name}" for name in ("lease", "files", *SHOWN)}
        record = _json(self.bucket.read(f"published/{key}")) or {}
        keep.add(f"attempts/{key}/{record.get('attempt')}/files")
        keep |= {f"attempts/{key}/{record.get('attempt')}/lease"}
        self.bucket.remove([name for name in self.bucket.list(f"attempts/{key}") if name not in keep])
        for kind in ("work", "resume"):
            shutil.rmtree(self.root / kind / key, ignore_errors=True)

    def forget(self, key: str) -> bool:
        found = self._attempts(key)
        if found:
            self._refuse(key, max(found), found[max(found)])
        names = [name for name in self.bucket.list(f"attempts/{key}")]
        published = self.bucket.info(f"published/{key}") is not None
        if not names and not published:
            return False
        units = self._unit_keys(key) if published else []
        self.bucket.remove([f"published/{key}"])
        self.bucket.remove([*names, *(f"units/{unit}" for unit in units)])
        self._published = None
        if self._units is not None:
            self._units[1].difference_update(units)
        for place in (self.folder(key), *(self.root / kind / key for kind in ("work", "resume"))):
            shutil.rmtree(place, ignore_errors=True)
        shutil.rmtree(self.root / "attempts" / key[:2] / key, ignore_errors=True)
        return True

    def _unit_keys(self, key: str) -> list[str]:
        """The shared units that an artifact is made of."""
        try:
            found = self.find(key, lambda name: name.endswith(f"/{artifact.NAME}"))
        except ValueError:
            return []
        assert found is not None
        return [record["key"] for path in found.glob(f"*/**/{artifact.NAME}") if (record := _json(path.read_bytes())) and "key" in record]

    # Units (stages.units.Shelf)

    def _bring_unit(self, key: str) -> None:
        now = time.monotonic()
        if self._units is None or now - self._units[0] > UNITS_SECONDS:
            self._units = now, {name.removeprefix("units/") for name in self.bucket.list("units")}
        if key not in self._units[1]:
            raise ValueError(f"The store has no unit {key[:12]}.")
        self._bring(_files(self.bucket.read(f"units/{key}") or b""), self._unit(key))

    def keep(self, key: str, folder: Path) -> None:
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]

        def root(files: Files) -> None:
            text = json.dumps({"files": files}).encode()
            if not self.bucket.create(f"units/{key}", text) and not self._whole(f"units/{key}"):
                self.bucket.write(f"units/{key}", text)  # the one that stood there was damaged

        self.upload(folder, names, root)
        if self._units is not None:
            self._units[1].add(key)

    def _whole(self, name: str) -> bool:
        """Whether all that a manifest names is in the bucket."""
        try:
            files = _files(self.bucket.read(name) or b"")
        except ValueError:
            return False
        entries = [(self.bucket.info(f"blobs/{file['sha256'][:2]}/{file['sha256']}"), file) for file in files.values()]
        return all(entry is not None and entry.size == file["size"] for entry, file in entries)


@dataclass
class RemoteLease(Lease):
    """The right to publish one attempt's folder, a local one, while no later attempt exists in the bucket."""

    key: str = ""
    _asked: bool = False
    _seen: set[tuple[str, int]] = field(default_factory=set)
    _sent: dict[str, tuple[int, int]] = field(default_factory=dict)
    _resume: Files = field(default_factory=dict)
    _saved: threading.Event = field(default_factory=threading.Event)
    _sending: threading.Lock = field(default_factory=threading.Lock)

    @property
    def remote(self) -> RemoteStore:
        assert isinstance(self.store, RemoteStore)
        return self.store

    @property
    def place(self) -> str:
        return f"attempts/{self.key}/{self.number}"

    def fence(self) -> None:
        later = max(self.remote._attempts(self.key), default=0)
        record = _json(self.remote.bucket.read(f"{self.place}/lease")) or {}
        if later != self.number or record.get("token") != self.token:
            raise LeaseLost(f"Attempt {self.number} was taken over by attempt {later or '?'}.")

    def stop_requested(self) -> bool:
        return self._asked

    @contextmanager
    def beating(self) -> Iterator[None]:
        def beat() -> None:
            while not self._stop.wait(BEAT_SECONDS):
                with suppress(OSError):  # a bucket that is away: the fence decides
                    self.remote.bucket.write(f"{self.place}/heartbeat", b"1")
                    if (saved := self._checkpoints()) != self._seen:
                        self._seen = saved
                        self.kept()
                    self._asked = self._asked or self.remote.bucket.info(f"{self.place}/stop") is not None
                    self._show()

        def send() -> None:
            while not self._stop.is_set():
                if self._saved.wait(0.5):
                    self._saved.clear()
                    with suppress(OSError):
                        self._send()

        threads = [threading.Thread(target=one, name=one.__name__, daemon=True) for one in (beat, send)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()

    def _checkpoints(self) -> set[tuple[str, int]]:
        """The checkpoints that stand now. Whoever writes one puts it in place whole."""
        found = set()
        for path in (self.folder / CHECKPOINTS).glob("*.safetensors"):
            with suppress(FileNotFoundError):
                found.add((path.name, path.stat().st_mtime_ns))
        return found

    def kept(self) -> None:
        """What the attempt has saved so far is to be where a later one finds it: sent in the background, from links and copies made now."""
        staging = Path(tempfile.mkdtemp(prefix=".resume-", dir=self.folder))
        for path in [*self.folder.iterdir(), *(self.folder / CHECKPOINTS).glob("*")]:
            name = path.relative_to(self.folder).as_posix()
            if not path.is_file() or path.name.startswith(".") or name in NOT_RESUMED:
                continue
            target = staging / name
            target.parent.mkdir(exist_ok=True)
            with suppress(FileNotFoundError):  # an older checkpoint that goes meanwhile
                grows = path.parent == self.folder and path.stat().st_size <= COPIED_BYTES
                shutil.copy2(path, target) if grows else os.link(path, target)
        staging.rename(staging.with_name(f"{staging.name}-whole"))
        self._saved.set()

    def _send(self) -> None:
        """Upload the newest snapshot and its manifest; then what the one before held and this one does not goes."""
        with self._sending:
            whole = sorted(self.folder.glob(".resume-*-whole"), key=lambda path: path.stat().st_mtime_ns)
            if not whole:
                return
            files: Files = {}
            for path in sorted(whole[-1].rglob("*")):
                if path.is_file():
                    name, stat = path.relative_to(whole[-1]).as_posix(), path.stat()
                    if self._sent.get(name) == (stat.st_size, stat.st_mtime_ns):
                        files[name] = self._resume[name]
                        continue
                    files[name] = {"sha256": sha256(path), "size": stat.st_size}
                    self.remote.bucket.upload(path, f"{self.place}/resume/{files[name]['sha256']}")
                    self._sent[name] = (stat.st_size, stat.st_mtime_ns)
            self.remote.bucket.write(f"{self.place}/resume.json", json.dumps({"files": files}).encode())
            old = {file["sha256"] for file in self._resume.values()} - {file["sha256"] for file in files.values()}
            self.remote.bucket.remove([f"{self.place}/resume/{sha}" for sha in old])
            self._resume = files
            for folder in whole:
                shutil.rmtree(folder, ignore_errors=True)

    def _show(self, *, all: bool = False) -> None:
        """Let others see how far it is: a file that grows is sent less often the larger it is."""
        for name in SHOWN if all else GROWING:
            try:
                stat = (self.folder / name).stat()
            except FileNotFoundError:
                continue
            sent, when = self._sent.get(f"shown/{name}", (-1, 0))
            due = time.monotonic_ns() - when >= BEAT_SECONDS * 1e9 * (stat.st_size >> 20)
            if sent != stat.st_size and (due or all):
                if name in TEXTS:
                    secrets.cover(self.folder / name)
                self.remote.bucket.write(f"{self.place}/{name}", (self.folder / name).read_bytes())
                self._sent[f"shown/{name}"] = (stat.st_size, time.monotonic_ns())

    def publish(self) -> bool:
        self.fence()
        names = []
        for path in self.folder.rglob("*"):
            name = path.relative_to(self.folder).as_posix()
            if path.is_symlink():
                raise ValueError(f"{path} is a symbolic link; an artifact holds files.")
            if path.is_file() and not name.startswith(".") and "/." not in name and name.split("/")[0] not in _NOT_PUBLISHED:
                names.append(name)

        def root(files: Files) -> Files:
            self.remote.bucket.write(f"{self.place}/files", json.dumps({"files": files}).encode())
            return files

        files = self.remote.upload(self.folder, names, root)
        self.fence()
        record = {"attempt": self.number, "token": self.token}
        if not self.remote.bucket.create(f"published/{self.key}", json.dumps(record).encode()):
            return False
        self.remote._published = None
        folder = self.remote.folder(self.key) / self.token
        for name in files:
            link(self.folder / name, folder / name)
            (folder / name).chmod(0o444)
        return True

    def release(self, outcome: dict[str, Any]) -> None:
        bucket = self.remote.bucket
        try:
            artifact.write_atomically(self.folder / "outcome.json", json.dumps(outcome) + "\n")
            if outcome.get("status") not in ("succeeded", "present", "lost"):
                self.kept()
                self._send()
            self._show(all=True)
            bucket.remove([f"{self.place}/heartbeat"])
        except OSError as error:
            print(f"Warning: how attempt {self.number} ended is not recorded in {self.store.where} ({error}).", file=sys.stderr, flush=True)


_NOT_PUBLISHED = {CHECKPOINTS, *GROWING, "heartbeat", "outcome.json", "stop", "history.jsonl", "profile"}


def _leased(attempts: dict[int, dict[str, Entry]]) -> dict[int, dict[str, Entry]]:
    """Those that were begun; what a silent worker wrote of one that was forgotten is none."""
    return {number: files for number, files in attempts.items() if "lease" in files}


def _working(name: str) -> bool:
    """What an artifact's folder holds beside what a later stage reads."""
    from pipelines.workspace import WORKING

    return name.split("/")[0] in WORKING


def _several(action: Callable[[Any], Any], items: Iterable[Any]) -> None:
    """An action on each item, some at a time; the first exception is raised."""
    chosen = list(items)
    if len(chosen) < 2:
        for item in chosen:
            action(item)
        return
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(action, chosen))


def _files(text: bytes) -> Files:
    """A manifest. ValueError where it is damaged, or names a place outside its folder."""
    try:
        files = json.loads(text)["files"]
        for name, file in files.items():
            artifact.inside(Path("."), name)
            if not (len(file["sha256"]) == 64 and int(file["sha256"], 16) >= 0 and file["size"] >= 0):
                raise KeyError("sha256")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its manifest is damaged ({error}).") from error
    return files


def _json(text: bytes | None) -> dict[str, Any] | None:
    try:
        value = json.loads(text) if text is not None else None
    except ValueError:
        return {}
    return value if isinstance(value, dict) or value is None else {}


def _bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
