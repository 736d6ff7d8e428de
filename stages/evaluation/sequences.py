"""What text sets score, as sequences of tokens, and the batches in which they are scored.

"validation" is the packed validation rows, each a sequence of `sequence_length`. Every other set is documents. A document of n
tokens, BOS before it, is cut at a length L into windows that do not overlap, the first at its start: window w is given the tokens
wL .. wL + L - 1 (BOS is number 0) and scored on wL + 1 .. wL + L. So each token is scored once, knowing what came before it in its
window alone; the last window is shorter, and a document of up to L tokens is scored whole.

Shapes: B batch, T time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stages import artifact, engine, schemas
from stages.evaluation.parameters import VALIDATION

ROWS = 256  # of validation, read at once
POOL_TOKENS = 1 << 22  # sequences are sorted by length within so many tokens


@dataclass(frozen=True)
class Sequence:
    """One to be scored. tokens: int32 [T + 1]. segments: int32 [T], or None where nothing is reset. start: its first target's place in its document."""

    tokens: np.ndarray
    source: str
    start: int = 0
    segments: np.ndarray | None = None

    @property
    def length(self) -> int:
        return len(self.tokens) - 1


def rows(folder: Path, *, length: int, reset: bool) -> Iterator[Sequence]:
    """The packed validation rows, of this length. reset: with the segments at which states start anew."""
    from stages.rows import validation

    found = validation(folder)
    if found.sequence_length != length:
        raise ValueError(f"{folder} has rows of {found.sequence_length} tokens, wanted {length}. Run the pack stage again.")
    for start in range(0, len(found), ROWS):
        tokens_NT1, lengths = found.read(start, min(start + ROWS, len(found)))
        segments_NT = engine.segment_ids(lengths, length)
        for tokens, segments in zip(tokens_NT1.astype(np.int32), segments_NT, strict=True):
            yield Sequence(tokens, VALIDATION, 0, segments if reset else None)


def documents(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """(source, tokens) of every document of a tokens folder."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for path in (folder / name for name in artifact.read(folder)["files"] if name.endswith("tokens.parquet")):
        schemas.metadata(path, "tokens")
        try:
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(batch_size=256, columns=["source", "tokens"]):
                    for source, tokens in zip(batch["source"].to_pylist(), batch["tokens"], strict=True):
                        yield source, tokens.values.to_numpy()
        except (OSError, pa.ArrowException) as error:
            raise ValueError(f"{path} is not a whole Parquet file ({error}). Delete it and tokenize again.") from error


def windows(documents: Iterable[tuple[str, np.ndarray]], *, length: int, bos: int) -> Iterator[Sequence]:
    """Documents, BOS before each, cut as the module's docstring says."""
    for source, document in documents:
        tokens = np.concatenate([[bos], document]).astype(np.int32)
        for start in range(0, len(document), length):
            yield Sequence(tokens[start : start + length + 1], source, start)


def pools(sequences: Iterable[Sequence]) -> Iterator[list[Sequence]]:
    """Sequences in their order, some POOL_TOKENS at a time: what is held in memory."""
    pool, tokens = [], 0
    for sequence in sequences:
        pool.append(sequence)
        tokens += sequence.length
        if tokens >= POOL_TOKENS:
            yield pool
            pool, tokens = [], 0
    if pool:
        yield pool


def batches(sequences: list[Sequence], *, longest: int, batch_tokens: int) -> Iterator[tuple[int, list[int]]]:
    """(padded length, indices) of sequences that are scored together, as many as `batch_tokens` holds.

    A sequence is padded to the next power of two, at most to `longest`, whatever it is scored beside: few shapes to compile.
    """
    classes: dict[int, list[int]] = {}
    for index, sequence in enumerate(sequences):
        classes.setdefault(min(1 << (sequence.length - 1).bit_length(), longest), []).append(index)
    for length, indices in sorted(classes.items()):
        size = max(1, batch_tokens // length)
        yield from ((length, indices[start : start + size]) for start in range(0, len(indices), size))


def padded(sequences: list[Sequence], *, length: int, bos: int) -> tuple[np.ndarray, np.ndarray | None]:
    """(tokens int32 [B, length + 1], segments int32 [B, length]: -1 is padding; None where nothing is padded or reset)."""
    tokens_BT1 = np.full((len(sequences), length + 1), bos, np.int32)
    segments_BT = np.full((len(sequences), length), -1, np.int32)
    for row, sequence in enumerate(sequences):
        tokens_BT1[row, : sequence.length + 1] = sequence.tokens
        segments_BT[row, : sequence.length] = 0 if sequence.segments is None else sequence.segments
    return tokens_BT1, segments_BT if segments_BT.any() else None
