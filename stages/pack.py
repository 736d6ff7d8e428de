"""Pack: pieces of documents into rows of sequence_length + 1 tokens, in training order (MesaNet, section 4 and G.1).

A row is filled with pieces in the stream's order (stages/pieces.py), each behind one BOS; inputs are a row's tokens but the last,
targets all but the first. A piece that does not fit is cut there and goes on in the next row, behind another BOS. So every row
begins with BOS, a piece of sequence_length tokens fills one, and every token of every document is a target exactly once. A single
place left at a row's end holds a BOS of its own. `segments` are the lengths of a row's pieces, each with its BOS.

Shards are `shard_rows` rows each, always whole: the stream never ends, it only begins another epoch. A budget counts rows, and may
use those of `epochs` passes over the data. So shard s depends on nothing but the training data and `packing`: a larger budget, or
more epochs, leave it as it is, and a budget's rows are a prefix of a larger one's. Beside a shard's rows, cursor.json says where
the stream stood after it (what the next shard goes on from) and which epochs ended in it.

Validation rows are filled likewise, from one pass over the validation sources. Documents that also occur in training (by their
tokens) are left out of them, and counted.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field, ValidationError

from stages import artifact, provenance, schemas, units
from stages.command import main
from stages.engine import told_of_full_disk
from stages.pieces import Cursor, Pieces, bounds, digest
from stages.spec import Context, Spec, Stopped, Strict, fingerprint

if TYPE_CHECKING:
    import pyarrow as pa

ROWS, CURSOR, SHARDS, VALIDATION, BUDGETS = "rows.parquet", "cursor.json", "shards", "validation", "budgets"
GROUP_TOKENS = 1 << 19  # of a row group, about


class Packing(Strict):
    """`packing:` of params.yaml.

    window: pieces that are shuffled together. shard_rows: rows of a shard. epochs: passes over the training data that a budget
    may use, each in another order. validation_rows: at most.
    """

    sequence_length: int = Field(ge=8)
    seed: int = Field(default=0, ge=0)
    window: int = Field(default=65536, ge=1)
    shard_rows: int = Field(default=8192, ge=1)
    epochs: int = Field(default=1, ge=1)
    validation_rows: int = Field(default=512, ge=1)


class Parameters(Packing):
    """A spec's. budgets: name -> rows."""

    vocab_size: int = Field(ge=1)
    bos: int = Field(ge=0)
    budgets: dict[str, Annotated[int, Field(ge=1)]]


# Keys: of what the rows depend on, and nothing else.


def _identity(spec: Spec, role: str, *names: str) -> dict[str, Any]:
    data = {name: key for name, key in spec.inputs.items() if name.startswith(f"{role}/")}
    parameters = Parameters.model_validate(spec.parameters)
    return {role: data} | {name: getattr(parameters, name) for name in ("sequence_length", "seed", "window", "vocab_size", "bos", *names)}


def shard_key(spec: Spec, shard: int) -> str:
    """The key of a shard of training rows."""
    return spec.unit_key(shard=shard, **_identity(spec, "training", "shard_rows"))


def budget_key(spec: Spec, rows: int) -> str:
    """The key of the first `rows` training rows: what a training run with them depends on, whatever other budgets there are."""
    return spec.unit_key(rows=rows, **_identity(spec, "training", "shard_rows"))


def validation_key(spec: Spec) -> str:
    """The key of the validation rows. They depend on the training data too, whose documents they leave out."""
    training = _identity(spec, "training")["training"]
    return spec.unit_key(apart_from=training, **_identity(spec, "validation", "validation_rows"))


# Filling


@dataclass(frozen=True)
class Filled:
    """Rows. tokens: [rows, sequence_length + 1]. segments: lengths of all pieces, row after row; cursor: where the stream stands after them.

    ends: for each epoch that ended meanwhile, [epoch, rows] with the number of these rows that were full before another epoch began.
    """

    tokens: np.ndarray
    segments: np.ndarray
    cursor: Cursor
    ends: list[list[int]]


def fill(pieces: Pieces, cursor: Cursor, *, rows: int, bos: int) -> Filled:
    """Fill `rows` rows from the stream at `cursor`. The stream must hold a token."""
    width = pieces.sequence_length + 1
    taken: list[np.ndarray] = []
    segments: list[int] = []
    ends: list[list[int]] = []
    full, room = 0, width
    for window in pieces.windows(cursor):
        inside = (window.epoch, window.block) == (cursor.epoch, cursor.block)
        piece, offset = (cursor.piece, cursor.offset) if inside else (0, 0)
        blocks, of, starts, lengths, count = window.blocks, window.of, window.start, window.length, len(window)
        while piece < count and full < rows:
            left = lengths[piece] - offset
            start = starts[piece] + offset
            if left < room:
                taken.append(blocks[of[piece]][start : start + left])
                segments.append(left + 1)
                room -= left + 1
                piece, offset = piece + 1, 0
            else:
                taken.append(blocks[of[piece]][start : start + room - 1])
                segments.append(room)
                offset += room - 1
                room = 0
                # what is left of the piece, which is at least one token, opens the next row
            if room == 1:
                segments.append(1)
                room = 0
            if room == 0:
                full, room = full + 1, width
        cursor = Cursor(window.epoch, window.block, piece, offset) if piece < count else window.next
        if cursor.epoch > window.epoch:
            ends.append([cursor.epoch, full])
        if full == rows:
            break
    lengths_taken = np.array(segments, np.int32)
    tokens = np.full(rows * width, bos, taken[0].dtype)
    text = np.ones(rows * width, bool)
    text[np.cumsum(lengths_taken, dtype=np.int64) - lengths_taken] = False
    tokens[text] = np.concatenate(taken)
    return Filled(tokens.reshape(rows, width), lengths_taken, cursor, ends)


def _write(path: Path, filled: Filled, parameters: Parameters, key: str) -> None:
    rows, width = filled.tokens.shape
    schema = schemas.schema("packed", vocab_size=parameters.vocab_size, length=width)
    schemas.write(path, _batches(filled, schema, max(1, GROUP_TOKENS // width)), name="packed", key=key, schema=schema)


def _batches(filled: Filled, schema: pa.Schema, size: int) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    rows, width = filled.tokens.shape
    ends = np.cumsum(filled.segments, dtype=np.int64)
    per_row = np.concatenate([[0], np.searchsorted(ends, np.arange(1, rows + 1) * width) + 1]).astype(np.int32)
    kind = schema.field("tokens").type
    tokens = pa.FixedSizeListArray.from_arrays(
        pa.array(filled.tokens.reshape(-1).astype(kind.value_type.to_pandas_dtype(), copy=False)), type=kind
    )
    segments = pa.ListArray.from_arrays(pa.array(per_row), pa.array(filled.segments))
    for start in range(0, rows, size):
        yield pa.record_batch([tokens.slice(start, size), segments.slice(start, size)], schema=schema)


# The stage


def run(spec: Spec, out: Path, inputs: dict[str, Path], context: Context) -> None:
    """Write validation/, shards/ and budgets/.

    inputs: "training/<source>" and "validation/<source>", tokens folders. Raises Stopped when asked to stop (whole shards are
    kept), and ValueError where the training data are too few for a budget, or the validation data for a row.
    """
    started = time.time()
    try:
        parameters = Parameters.model_validate(spec.parameters)
    except ValidationError as error:
        raise ValueError(f"This spec's parameters are not pack's ({error}); `strata run resolve` writes it anew.") from error
    if not parameters.budgets:
        raise ValueError("packing: there is no budget to pack for; give grid.budgets one.")
    digests = {name: artifact.read(inputs[name], key=key)["digest"] for name, key in sorted(spec.inputs.items())}
    with told_of_full_disk(out):
        work = _Work(spec, parameters, out, inputs, context, digests)
        work.check_size()
        validation = work.validation()
        shards = work.shards()
        units.keep_only(out / SHARDS, {name for name, _ in shards})

        context.fence()
        files = {f"{VALIDATION}/{ROWS}": validation} | {f"{SHARDS}/{name}/{ROWS}": value for name, value in shards}
        for path in (out / BUDGETS).glob("*.json") if (out / BUDGETS).is_dir() else ():
            if path.stem not in parameters.budgets:
                path.unlink()
        for name, rows in parameters.budgets.items():
            artifact.write_atomically(out / BUDGETS / f"{name}.json", json.dumps(work.budget(rows, shards), indent=1) + "\n")
        provenance.write(out, spec, context, started=started)
        artifact.write(
            out,
            key=spec.key,
            stage=spec.stage,
            files=[*files, *(f"{BUDGETS}/{name}.json" for name in parameters.budgets)],
            inputs=digests,
            known=files,
        )


class _Work:
    """What the parts of a run share."""

    def __init__(
        self, spec: Spec, parameters: Parameters, out: Path, inputs: dict[str, Path], context: Context, digests: dict[str, str]
    ) -> None:
        self.spec, self.parameters, self.out, self.context = spec, parameters, out, context
        self.folders = {role: [inputs[name] for name in sorted(inputs) if name.startswith(f"{role}/")] for role in ("training", VALIDATION)}
        self.digests = {role: {name: value for name, value in digests.items() if name.startswith(f"{role}/")} for role in self.folders}
        self.how: dict[str, Any] = {name: getattr(parameters, name) for name in ("sequence_length", "seed", "window")}
        self.training = Pieces(self.folders["training"], **self.how)
        self.largest, self.rows = max(parameters.budgets.items(), key=lambda item: item[1])

    def check_size(self) -> None:
        """ValueError at once where the data cannot reach the largest budget. Rows (L + 1) <= tokens + pieces + 2 rows, for the BOS."""
        length, epochs, tokens = self.parameters.sequence_length, self.parameters.epochs, self.training.tokens
        if not tokens:
            raise ValueError("The training sources hold no tokens. Check data.sources: their files, `column` and `where`.")
        most = (tokens + tokens // length + self.training.documents) * epochs // (length - 1)
        if most < self.rows:
            self._too_few(most)

    def _too_few(self, rows: int) -> None:
        length, epochs = self.parameters.sequence_length, self.parameters.epochs
        enough = -(-self.rows * epochs // max(1, rows))
        raise ValueError(
            f"Budget {self.largest} wants {self.rows:,} rows of {length} tokens; the training sources give {rows:,} in {epochs} "
            f"epoch{'s' * (epochs > 1)}: {(self.rows - rows) * length:,} tokens are missing. "
            f"Add data, lower the budget, or set packing.epochs to {enough if rows else 'more'}."
        )

    def _kept(self, folder: Path, key: str, given: dict[str, str]) -> bool:
        """Whether the unit in place is this one, made from these very inputs."""
        return units.complete(folder, key) and artifact.read(folder)["inputs"] == given

    def shards(self) -> list[tuple[str, str]]:
        """Make or keep the shards that the largest budget needs. Returns (name, data digest) of each, in order."""
        size, given = self.parameters.shard_rows, self.digests["training"]
        count = -(-self.rows // size)
        cursor, made, began = Cursor(), 0, time.monotonic()
        found = []
        for shard in range(count):
            folder, key = self.out / SHARDS / f"{shard:05}", shard_key(self.spec, shard)
            if not self._kept(folder, key, given):
                if self.context.stop_requested():
                    raise Stopped(f"{shard} of {count} shards are packed and kept")
                filled = fill(self.training, cursor, rows=size, bos=self.parameters.bos)
                with units.making(folder, key=key, stage=self.spec.stage, inputs=given) as partial:
                    _write(partial / ROWS, filled, self.parameters, key)
                    (partial / CURSOR).write_text(json.dumps({"cursor": asdict(filled.cursor), "ends": filled.ends}) + "\n")
                    self.context.fence()
                made += size * self.parameters.sequence_length
            state = json.loads((folder / CURSOR).read_text())
            cursor = Cursor(**state["cursor"])
            rate = made / max(time.monotonic() - began, 1e-9)
            self.context.progress(
                stage="pack", step=shard + 1, of=count, tokens=(shard + 1) * size * self.parameters.sequence_length, tokens_per_second=rate
            )
            for epoch, rows in state["ends"]:
                if epoch == self.parameters.epochs and shard * size + rows < self.rows:
                    self._too_few(shard * size + rows)
            found.append((folder.name, schemas.metadata(folder / ROWS, "packed")["strata.digest"]))
        return found

    def validation(self) -> str:
        """Make or keep the validation rows. Returns their data digest."""
        folder, key, given = self.out / VALIDATION, validation_key(self.spec), self.digests["training"] | self.digests[VALIDATION]
        if not self._kept(folder, key, given):
            if self.context.stop_requested():
                raise Stopped("nothing is packed yet")
            shared, own = self._shared()
            if not own:
                raise ValueError(
                    f"The validation sources hold no document of their own ({len(shared):,} also occur in training). Check data.sources."
                )
            pieces = Pieces(self.folders[VALIDATION], without=frozenset(shared), **self.how)
            filled = fill(pieces, Cursor(), rows=self.parameters.validation_rows, bos=self.parameters.bos)
            rows = filled.ends[0][1] if filled.ends else self.parameters.validation_rows
            if not rows:
                raise ValueError(
                    f"The validation sources hold {pieces.tokens:,} tokens, less than one row of {self.parameters.sequence_length}. "
                    "Give more of them, or lower packing.sequence_length."
                )
            pieces_kept = int(np.searchsorted(np.cumsum(filled.segments, dtype=np.int64), rows * filled.tokens.shape[1])) + 1
            with units.making(folder, key=key, stage=self.spec.stage, inputs=given) as partial:
                _write(partial / ROWS, Filled(filled.tokens[:rows], filled.segments[:pieces_kept], filled.cursor, []), self.parameters, key)
                (partial / "counts.json").write_text(json.dumps({"rows": rows, "also_in_training": len(shared)}) + "\n")
                self.context.fence()
        return schemas.metadata(folder / ROWS, "packed")["strata.digest"]

    def _shared(self) -> tuple[set[bytes], int]:
        """(digests of the validation documents that also occur in training, number of those that do not): one pass over both."""
        own: Counter[bytes] = Counter()
        traits = []
        for block in Pieces(self.folders[VALIDATION], **self.how).blocks:
            ends, tokens = bounds(block.read())
            traits.append(_traits(ends, tokens))
            own.update(digest(tokens[a:b]) for a, b in zip(ends[:-1], ends[1:], strict=True))
        wanted = np.unique(np.concatenate([np.zeros(0, np.uint64), *traits]))
        found: set[bytes] = set()
        for done, block in enumerate(self.training.blocks):
            if self.context.stop_requested():
                raise Stopped("nothing is packed yet")
            ends, tokens = bounds(block.read())
            for one in np.flatnonzero(np.isin(_traits(ends, tokens), wanted)):
                if (name := digest(tokens[ends[one] : ends[one + 1]])) in own:
                    found.add(name)
            if done % 64 == 0:
                self.context.progress(stage="pack", looking_for="validation documents in training", step=done, of=len(self.training.blocks))
        return found, own.total() - sum(own[name] for name in found)

    def budget(self, rows: int, shards: list[tuple[str, str]]) -> dict[str, Any]:
        """The record of the first `rows` rows: what a training run depends on."""
        size = self.parameters.shard_rows
        used = [[name, value, min(size, rows - number * size)] for number, (name, value) in enumerate(shards) if number * size < rows]
        content = {"rows": rows, "sequence_length": self.parameters.sequence_length, "shards": used}
        return content | {
            "tokens": rows * self.parameters.sequence_length,
            "digest": fingerprint(content),
            "key": budget_key(self.spec, rows),
        }


def _traits(ends: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """A cheap number of each document: of its length, first, middle and last token. Equal documents have equal ones."""
    first, last = ends[:-1], ends[1:] - 1
    mix = np.uint64(0x9E3779B97F4A7C15)
    value = (last - first).astype(np.uint64)
    for place in (first, (first + last) // 2, last):
        value = (value ^ tokens[place].astype(np.uint64)) * mix
        value ^= value >> np.uint64(29)
    return value


if __name__ == "__main__":
    main(run)
