"""The endless stream of pieces that packed rows are filled with, in an order that the seed fixes.

A document is cut into pieces of at most `sequence_length` tokens. A block is a row group of a tokens file. In each epoch the
blocks of all sources stand in another random order, so that sources mix in proportion; blocks are taken in that order until
`window` pieces are held, and these are shuffled: a window. A window is a function of the seed, the epoch and the block that it
begins with: a piece's place depends on nothing behind its window. Memory: one window, `window` pieces and a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from stages import artifact, schemas

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Cursor:
    """Where the stream stands: the next token is number `offset` of piece `piece` of the window that begins with block `block`."""

    epoch: int = 0
    block: int = 0
    piece: int = 0
    offset: int = 0


@dataclass(frozen=True)
class Window:
    """Shuffled pieces: piece i is blocks[of[i]][start[i] : start[i] + length[i]]. next: where the next window begins."""

    epoch: int
    block: int
    blocks: list[np.ndarray]
    of: list[int]
    start: list[int]
    length: list[int]
    next: Cursor

    def __len__(self) -> int:
        return len(self.length)


@dataclass(frozen=True)
class Block:
    path: Path
    group: int
    documents: int
    tokens: int

    def read(self) -> pa.ListArray:
        """The documents' tokens. ValueError where the file is damaged (its pages carry checksums)."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(self.path, page_checksum_verification=True) as file:
                return file.read_row_group(self.group, columns=["tokens"], use_threads=False)["tokens"].combine_chunks()
        except (OSError, pa.ArrowException) as error:
            raise ValueError(f"{self.path} is not a whole Parquet file ({error}). Delete it and tokenize again.") from error


def blocks(folders: list[Path]) -> list[Block]:
    """The blocks of tokens folders, in order. ValueError where a file is not the one that its folder's artifact.json lists."""
    import pyarrow.parquet as pq

    found = []
    for folder in folders:
        for name, entry in sorted(artifact.read(folder)["files"].items()):
            path = folder / name
            if schemas.metadata(path, "tokens")["strata.digest"] != entry["digest"]:
                raise ValueError(f"{path} does not hold the data that was recorded. Delete it and tokenize again.")
            facts = pq.read_metadata(path)
            for group in range(facts.num_row_groups):
                columns = {
                    facts.row_group(group).column(i).path_in_schema: facts.row_group(group).column(i) for i in range(facts.num_columns)
                }
                found.append(Block(path, group, facts.row_group(group).num_rows, columns["tokens.list.element"].num_values))
    return found


def permutation(count: int, *seeds: int) -> np.ndarray:
    """A random order of `count` things: a sort of raw 64-bit draws, which NumPy keeps the same over its versions."""
    draws = np.random.PCG64(np.random.SeedSequence(seeds)).random_raw(count)
    return np.argsort(draws, kind="stable")


def bounds(documents: pa.ListArray) -> tuple[np.ndarray, np.ndarray]:
    """(ends int64 [documents + 1], tokens): document d is tokens[ends[d] : ends[d + 1]]."""
    ends = documents.offsets.to_numpy().astype(np.int64)
    return ends - ends[0], documents.values.to_numpy()[ends[0] : ends[-1]]


def digest(tokens: np.ndarray) -> bytes:
    """What a document is known by: 128 bits of its tokens' hash."""
    return blake2b(np.ascontiguousarray(tokens).view(np.uint8), digest_size=16).digest()


class Pieces:
    """The stream over tokens folders. without: digests of documents that are left out."""

    def __init__(
        self, folders: list[Path], *, sequence_length: int, seed: int, window: int, without: frozenset[bytes] = frozenset()
    ) -> None:
        self.blocks = blocks(folders)
        self.sequence_length, self.seed, self.size, self.without = sequence_length, seed, window, without
        self._last: Window | None = None

    @cached_property
    def tokens(self) -> int:
        """In one epoch."""
        return sum(block.tokens for block in self.blocks)

    @cached_property
    def documents(self) -> int:
        return sum(block.documents for block in self.blocks)

    def windows(self, cursor: Cursor) -> Iterator[Window]:
        """The windows from the one that `cursor` is in, without end. The last one is kept, for who goes on in it."""
        while True:
            if self._last is None or (self._last.epoch, self._last.block) != (cursor.epoch, cursor.block):
                self._last = None  # two are never held
                self._last = self._window(cursor.epoch, cursor.block)
            window = self._last
            cursor = window.next
            yield window

    def _window(self, epoch: int, block: int) -> Window:
        order = permutation(len(self.blocks), self.seed, epoch)
        tokens, starts, lengths = [], [], []
        held, last = 0, block
        while held < self.size and last < len(order):
            flat, start, length = self._pieces(self.blocks[order[last]])
            tokens.append(flat)
            starts.append(start)
            lengths.append(length)
            held += len(start)
            last += 1
        shuffled = permutation(held, self.seed, epoch, block)
        of = np.repeat(np.arange(len(starts)), [len(start) for start in starts])
        after = Cursor(epoch, last) if last < len(order) else Cursor(epoch + 1)
        pick = lambda parts: np.concatenate([np.zeros(0, np.int64), *parts])[shuffled].tolist()  # noqa: E731
        return Window(epoch, block, tokens, of[shuffled].tolist(), pick(starts), pick(lengths), after)

    def _pieces(self, block: Block) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(tokens, starts, lengths) of a block's pieces, in its documents' order."""
        ends, tokens = bounds(block.read())
        first, last = ends[:-1], ends[1:]
        if self.without:
            kept = np.array([digest(tokens[a:b]) not in self.without for a, b in zip(first, last, strict=True)], bool)
            first, last = first[kept], last[kept]
        count = -(-(last - first) // self.sequence_length)
        number = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        start = np.repeat(first, count) + number * self.sequence_length
        return tokens, start, np.minimum(np.repeat(last, count) - start, self.sequence_length)
