"""Tokenize: a source's documents to tokens, a unit for each of its files, in the order of the files' names.

Units are 00000/, 00001/, ... with tokens.parquet (schema "tokens": id, source, tokens) and counts.json. A unit's key is of its
file's content, not its place: a file that is added leaves the others' units standing. counts.json above them adds all up; it is
outside the artifact's digest, since it says which encoder was at work.
"""

from __future__ import annotations

import contextvars
import json
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from stages import artifact, provenance, schemas, sources, tokenizer, units
from stages.command import main
from stages.documents import Tally, documents
from stages.engine import told_of_full_disk
from stages.sources import File, Identity
from stages.spec import Context, Spec, Stopped, fingerprint

if TYPE_CHECKING:
    import pyarrow as pa

TOKENS, COUNTS = "tokens.parquet", "counts.json"
AHEAD = 2  # batches read and encoded before they are asked for
PROGRESS_SECONDS = 1.0

T = TypeVar("T")


class Parameters(Identity):
    """A spec's. source: the source's name, which every row carries that has no domain of its own."""

    source: str


class _Differs(Exception):
    """The encoder is not right on this file."""


def run(spec: Spec, out: Path, inputs: dict[str, Path], context: Context) -> None:
    """Write the units, counts.json, provenance.json and artifact.json.

    inputs: "vocabulary". context.settings["sources"]: the files. Raises Stopped when asked to stop (whole units are kept), and
    ValueError where the files are not the pinned ones, one is damaged, or none holds a document.
    """
    started = time.time()
    try:
        parameters = Parameters.model_validate(spec.parameters)
    except ValidationError as error:
        raise ValueError(f"This spec's parameters are not tokenize's ({error}); `strata run resolve` writes it anew.") from error
    vocabulary = artifact.read(inputs["vocabulary"], key=spec.inputs["vocabulary"], content=True)["digest"]
    what = f"the source {parameters.source!r}"
    files = sources.expand(sources.listed(context, [parameters.source])[parameters.source], parameters.pin)
    known: list[str | None] = [file.pinned for file in files]
    if all(file.local for file in files):
        known = list(sources.digests(files))
        sources.check(known, parameters.pin, what)

    out.mkdir(parents=True, exist_ok=True)
    names = [f"{number:05}" for number in range(len(files))]
    with told_of_full_disk(out):
        with sources.scratch(out) as scratch:
            work = _Work(
                spec, parameters, scratch, context, tokenizer.load(inputs["vocabulary"], context.threads), vocabulary, of=len(files)
            )
            contents = work.units(out, names, files, known)
        context.fence()
        units.keep_only(out, set(names))
        try:
            sources.check(contents, parameters.pin, what)
        except ValueError:
            units.keep_only(out, set())  # which of the files is another one cannot be told
            raise
        records = [json.loads((out / name / COUNTS).read_text()) for name in names]
        total = Tally()
        for record in records:
            total.add(record)
        if not total.documents:
            raise ValueError(f"{what[0].upper()}{what[1:]} holds no document: {_reasons(total, parameters)}.")
        facts = {"encoders": dict(sorted(Counter(record["encoder"] for record in records).items())), "fallback": work.tokenizer.fallback}
        artifact.write_atomically(out / COUNTS, json.dumps(total.record() | facts, indent=1) + "\n")
        provenance.write(out, spec, context, started=started, **facts)
        digests = {f"{name}/{TOKENS}": schemas.metadata(out / name / TOKENS, "tokens")["strata.digest"] for name in names}
        artifact.write(out, key=spec.key, stage=spec.stage, files=digests, inputs={"vocabulary": vocabulary}, known=digests)


def _reasons(total: Tally, parameters: Parameters) -> str:
    found = [f"{count} {kind}" for kind, count in sorted(total.bad.items())] + [f"{total.filtered} not selected by where"] * bool(
        total.filtered
    )
    return (", ".join(found) or "its files are empty") + (f"; is {parameters.column!r} the column of the text" if total.bad["null"] else "")


@dataclass
class _Work:
    """What the units of a run share."""

    spec: Spec
    parameters: Parameters
    scratch: Path
    context: Context
    tokenizer: tokenizer.Tokenizer
    vocabulary: str
    of: int
    done: int = 0
    documents: int = 0
    tokens: int = 0
    ended: bool = False
    started: float = field(default_factory=time.monotonic)
    told: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def units(self, out: Path, names: list[str], files: list[File], known: list[str | None]) -> list[str]:
        """Make or keep the unit of every file, several at once where there are processors for it. Returns the files' contents."""
        threads = self.context.threads or os.cpu_count() or 1
        with ThreadPoolExecutor(max(1, min(len(files), threads // 4))) as pool:
            # A unit's shelf (stages/units.py) is in the context of the thread that called.
            tasks = [
                pool.submit(contextvars.copy_context().run, self.unit, out / name, *what)
                for name, *what in zip(names, files, known, strict=True)
            ]
            try:
                return [task.result() for task in tasks]
            finally:
                self.ended = True
                for task in tasks:
                    task.cancel()

    def unit(self, folder: Path, file: File, content: str | None) -> str:
        """Make the unit of a file, or keep it. content, also returned: the file's sha256, or what pins it; None where it must be read first."""
        content = content or _recorded(folder)
        if content is None or not units.complete(folder, self._key(content)):
            content = self._make(file, content, folder)
        self._tell(done=1)
        return content

    def _key(self, content: str) -> str:
        return self.spec.unit_key(vocabulary=self.spec.inputs["vocabulary"], content=content, **self._reading())

    def _reading(self) -> dict[str, Any]:
        """How documents are read; a domain only where there is one, since it came later than keys that stand."""
        return self.parameters.model_dump(exclude={"pin"} if self.parameters.domain else {"pin", "domain"})

    def _make(self, file: File, content: str | None, folder: Path) -> str:
        with sources.fetched(file, self.scratch) as path:
            content = content or sources.sha256(path)
            key, given = self._key(content), {"content": content, "vocabulary": self.vocabulary}
            while True:
                try:
                    with units.making(folder, key=key, stage=self.spec.stage, inputs=given) as partial:
                        self._write(path, content, partial, key)
                        self.context.fence()
                    return content
                except _Differs as difference:
                    with self.lock:
                        if self.tokenizer.fallback is None:
                            self.tokenizer.fall_back(f"{difference} of {file}")

    def _write(self, path: Path, content: str, folder: Path, key: str) -> None:
        tally = Tally()
        encoder = self.tokenizer.encoder
        schema = schemas.schema("tokens", vocab_size=self.tokenizer.size)
        read = ahead(documents(path, self.parameters, prefix=fingerprint(content)[:12], tally=tally))
        encoded = ahead(self._encode(batch, number, schema) for number, batch in enumerate(read))
        schemas.write(folder / TOKENS, self._counted(encoded, tally), name="tokens", key=key, schema=schema)
        if encoder != self.tokenizer.encoder:
            raise _Differs("the encoder was found wrong meanwhile")
        (folder / COUNTS).write_text(json.dumps(tally.record() | {"encoder": encoder}, indent=1) + "\n")

    def _encode(self, batch: pa.RecordBatch, number: int, schema: pa.Schema) -> pa.RecordBatch:
        import pyarrow as pa
        import pyarrow.compute as pc

        tokens = self.tokenizer.encode(batch["text"])
        if (difference := self.tokenizer.difference(batch["text"], tokens, number)) is not None:
            raise _Differs(difference)
        source = pa.repeat(self.parameters.source, len(batch))
        if self.parameters.domain is not None:
            source = pc.coalesce(batch["domain"], source)
        return pa.record_batch([batch["id"], source, tokens], schema=schema)

    def _counted(self, batches: Iterable[pa.RecordBatch], tally: Tally) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if self.ended or self.context.stop_requested():  # ended: another file's unit failed
                raise Stopped(f"{self.done} of {self.of} files are tokenized and kept")
            count = len(batch["tokens"].values)
            tally.tokens += count
            self._tell(documents=len(batch), tokens=count)
            yield batch

    def _tell(self, *, documents: int = 0, tokens: int = 0, done: int = 0) -> None:
        with self.lock:
            self.documents, self.tokens, self.done = self.documents + documents, self.tokens + tokens, self.done + done
            now = time.monotonic()
            if not done and now - self.told < PROGRESS_SECONDS:
                return
            self.told = now
            rate = self.tokens / max(now - self.started, 1e-9)
            self.context.progress(
                stage="tokenize", step=self.done, of=self.of, documents=self.documents, tokens=self.tokens, tokens_per_second=rate
            )


def _recorded(folder: Path) -> str | None:
    """The content that the unit in place was made from."""
    try:
        return artifact.read(folder)["inputs"].get("content")
    except ValueError:
        return None


def ahead(items: Iterable[T], count: int = AHEAD) -> Iterator[T]:
    """The same items, made in a thread of their own up to `count` before they are asked for. An exception comes where its item would."""
    ready: queue.Queue[tuple[T | None, Exception | None]] = queue.Queue(count)
    left = threading.Event()

    def put(item: T | None, end: Exception | None = None) -> None:
        while not left.is_set():
            try:
                return ready.put((item, end), timeout=0.1)
            except queue.Full:
                continue

    def work() -> None:
        try:
            for item in items:
                put(item)
                if left.is_set():
                    return
            put(None, StopIteration())
        except Exception as error:
            put(None, error)

    threading.Thread(target=work, daemon=True).start()
    try:
        while True:
            item, end = ready.get()
            if isinstance(end, StopIteration):
                return
            if end is not None:
                raise end
            yield item
    finally:
        left.set()


if __name__ == "__main__":
    main(run)
