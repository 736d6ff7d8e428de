"""Packed rows, as training and evaluation read them: by number, from a budget's file or the validation folder.

Shapes: N rows, T sequence length.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import OrderedDict
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from stages import artifact, schemas

if TYPE_CHECKING:
    import pyarrow.parquet as pq

SHARDS, ROWS = "shards", "rows.parquet"
HELD = 4  # decoded row groups, and open files

REMEDY = "Delete it and run pack again: what is missing is made anew."


def shards(budget: Path) -> list[str]:
    """The files of the rows of a budget, seen from the packed folder. ValueError where the budget is damaged."""
    try:
        names = [f"{SHARDS}/{name}/{ROWS}" for name, _, _ in json.loads(budget.read_text())["shards"]]
        return [name for name in names if artifact.inside(budget.parent, name)]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{budget} is not a readable budget ({error}). {REMEDY}") from error


class Rows:
    """The first `rows` packed rows of a study: packed/budgets/<budget>.json and the shards that it names.

    Opening checks that every shard is there, of the recorded digest and large enough, from the files' metadata, and reading
    checks the pages' checksums; `verify` reads and digests all data at once. ValueError names the file that is not right. Not for two threads at once.
    """

    def __init__(self, budget: Path, *, verify: bool = False) -> None:
        try:
            record = json.loads(budget.read_text())
            paths = [budget.parent.parent / name for name in shards(budget)]
            shards_of = [(path, digest, rows) for path, (_, digest, rows) in zip(paths, record["shards"], strict=True)]
            self._open(shards_of, record["sequence_length"], verify)
        except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{budget} is not a readable budget ({error}). {REMEDY}") from error
        if self.rows != record["rows"]:
            raise ValueError(f"{budget} does not agree with itself ({record['rows']} rows, its shards give {self.rows}). {REMEDY}")

    def _open(self, shards: list[tuple[Path, str, int]], sequence_length: int, verify: bool) -> None:
        import pyarrow.parquet as pq

        self.paths = [path for path, _, _ in shards]
        self.sequence_length = sequence_length
        self.first = [0, *accumulate(rows for _, _, rows in shards)]
        self.rows = self.first[-1]
        self._files: OrderedDict[int, tuple[pq.ParquetFile, list[int]]] = OrderedDict()
        self._groups: OrderedDict[tuple[int, int], tuple[np.ndarray, np.ndarray, np.ndarray]] = OrderedDict()
        for path, digest, rows in shards:
            found = schemas.metadata(path, "packed")["strata.digest"]
            if found != digest or (verify and artifact.file_digest(path) != digest):
                raise ValueError(f"{path} does not hold the rows that were recorded. {REMEDY}")
            facts = pq.read_metadata(path)
            width = facts.schema.to_arrow_schema().field("tokens").type.list_size
            if facts.num_rows < rows or width != sequence_length + 1:
                raise ValueError(f"{path} has {facts.num_rows} rows of {width} tokens, wanted {rows} of {sequence_length + 1}. {REMEDY}")

    def __len__(self) -> int:
        return self.rows

    def read(self, start: int, stop: int) -> tuple[np.ndarray, list[np.ndarray]]:
        """Rows start..stop-1: tokens [N, T + 1] (uint16 or uint32, not to be written to), and each row's piece lengths (int32, sum T + 1)."""
        if not 0 <= start <= stop <= self.rows:
            raise ValueError(f"Rows {start} to {stop} were asked for; this budget has {self.rows}.")
        tokens: list[np.ndarray] = []
        segments: list[np.ndarray] = []
        while start < stop:
            shard = bisect_right(self.first, start) - 1
            row = start - self.first[shard]
            firsts = self._file(shard)[1]
            group = bisect_right(firsts, row) - 1
            group_tokens, ends, lengths = self._group(shard, group)
            a = row - firsts[group]
            b = min(a + stop - start, len(group_tokens), self.first[shard + 1] - self.first[shard] - firsts[group])
            tokens.append(group_tokens[a:b])
            segments += np.split(lengths[ends[a] : ends[b]], ends[a + 1 : b] - ends[a])
            start += b - a
        if len(tokens) == 1:
            return tokens[0], segments
        return np.concatenate(tokens) if tokens else np.zeros((0, self.sequence_length + 1), np.uint16), segments

    def _file(self, shard: int) -> tuple[pq.ParquetFile, list[int]]:
        """(file, first row of each of its row groups and of what would come after), a few of them open."""
        import pyarrow.parquet as pq

        if shard not in self._files:
            file = pq.ParquetFile(self.paths[shard], memory_map=True, page_checksum_verification=True)
            sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
            self._files[shard] = file, [0, *accumulate(sizes)]
            if len(self._files) > HELD:
                self._files.popitem(last=False)[1][0].close()
        self._files.move_to_end(shard)
        return self._files[shard]

    def _group(self, shard: int, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(tokens [rows, T + 1], ends [rows + 1], piece lengths) of a row group; row r's pieces are lengths[ends[r] : ends[r + 1]]."""
        import pyarrow as pa

        if (shard, group) not in self._groups:
            try:
                table = self._file(shard)[0].read_row_group(group, use_threads=False)
            except (OSError, pa.ArrowException) as error:
                raise ValueError(f"{self.paths[shard]} is not a whole Parquet file ({error}). {REMEDY}") from error
            pieces = table["segments"].combine_chunks()
            ends = pieces.offsets.to_numpy()
            tokens = table["tokens"].combine_chunks().flatten().to_numpy().reshape(-1, self.sequence_length + 1)
            self._groups[shard, group] = tokens, ends, pieces.values.to_numpy()
            if len(self._groups) > HELD:
                self._groups.popitem(last=False)
        self._groups.move_to_end((shard, group))
        return self._groups[shard, group]


class _Validation(Rows):
    def __init__(self, folder: Path, verify: bool) -> None:
        import pyarrow.parquet as pq

        record = artifact.read(folder, content=verify)
        path = folder / "rows.parquet"
        facts = pq.read_metadata(path)
        width = facts.schema.to_arrow_schema().field("tokens").type.list_size
        self._open([(path, record["files"]["rows.parquet"]["digest"], facts.num_rows)], width - 1, False)


def validation(folder: Path, *, verify: bool = False) -> Rows:
    """The validation rows of packed/validation."""
    return _Validation(folder, verify)
