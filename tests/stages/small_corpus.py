"""What the tests of the data stages stand on: documents, files of every format, and the stages' specs over them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from stages import artifact, pack, schemas, tokenize, vocabulary
from stages.spec import Context, Spec

WORDS = "the quick brown fox jumps over a lazy dog and it's 1 or 22 or 333, (isn't it?) \n\n  naïve café 东京 – end.".split(" ")


def texts(count: int, *, seed: int = 0, longest: int = 120) -> list[str]:
    """Documents of random words, most of them short."""
    random = np.random.default_rng(seed)
    return [f"{seed}.{i} " + " ".join(random.choice(WORDS, 1 + int(longest * random.random() ** 3))) for i in range(count)]


def write_parquet(path: Path, documents: Iterable[str | None], row_group_size: int | None = None, **columns: Any) -> Path:
    documents = list(documents)
    table = {"id": [f"doc-{i}" for i in range(len(documents))], "text": documents} | columns
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(table), path, row_group_size=row_group_size)
    return path


def write_lines(path: Path, lines: Iterable[Any]) -> Path:
    """JSON lines, compressed as the name says; bytes are written as they are."""
    data = b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    if path.suffix == ".gz":
        data = gzip.compress(data)
    if path.suffix == ".zst":
        data = pa.compress(data, "zstd", asbytes=True)
    path.write_bytes(data)
    return path


def context(files: Any = None, **changes: Any) -> Context:
    return Context(**{"threads": 1, "settings": {"sources": files}} | changes)


def key_of(*parts: object) -> str:
    return Spec(stage="made-up", versions={}, parameters={"parts": list(map(str, parts))}).key


GPT2 = Spec(stage="vocabulary", versions={"vocabulary": 1}, parameters={"kind": "gpt2"})


def bpe_spec(size: int = 300, **changes: Any) -> Spec:
    return Spec(stage="vocabulary", versions={"vocabulary": 1}, parameters={"kind": "bpe", "size": size, "sources": {"text": {}}} | changes)


def make_vocabulary(out: Path, spec: Spec = GPT2, files: Any = None) -> Path:
    vocabulary.run(spec, out, {}, context(files))
    return out


def tokenize_spec(vocabulary: Spec = GPT2, **changes: Any) -> Spec:
    return Spec(stage="tokenize", versions={"tokenize": 1}, inputs={"vocabulary": vocabulary.key}, parameters={"source": "text"} | changes)


def tokenized(out: Path, folder: Path, files: list[Any], spec: Spec | None = None, **changes: Any) -> Path:
    """Run tokenize with the vocabulary of `folder`."""
    tokenize.run(spec or tokenize_spec(), out, {"vocabulary": folder}, context([str(file) for file in files], **changes))
    return out


def make_tokens(folder: Path, documents: list[list[int]], *, vocab_size: int = 100, group: int = 7) -> Path:
    """A tokens folder of these documents, `group` to a row group."""
    schema = schemas.schema("tokens", vocab_size=vocab_size)
    batches = [
        pa.record_batch(
            [[str(i + j) for j in range(len(part))], ["made-up"] * len(part), pa.array(part, schema.field("tokens").type)], schema=schema
        )
        for i in range(0, len(documents), group)
        if (part := documents[i : i + group])
    ]
    digest = schemas.write(folder / "00000" / "tokens.parquet", batches, name="tokens", key="k", schema=schema)
    name = "00000/tokens.parquet"
    artifact.write(folder, key=key_of("tokens", folder.name), stage="tokenize", files=[name], inputs={}, known={name: digest})
    return folder


def pack_spec(training: list[Path], validation: list[Path], **changes: Any) -> Spec:
    inputs = {
        f"{role}/{path.name}": key_of("tokens", path.name)
        for role, paths in (("training", training), ("validation", validation))
        for path in paths
    }
    parameters = {
        "sequence_length": 16,
        "seed": 0,
        "window": 20,
        "shard_rows": 8,
        "validation_rows": 4,
        "vocab_size": 100,
        "bos": 0,
        "budgets": {"s": 12},
    }
    return Spec(stage="pack", versions={"pack": 1}, inputs=inputs, parameters=parameters | changes)


def packed(out: Path, training: list[Path], validation: list[Path], *, context: Context | None = None, **changes: Any) -> Spec:
    """Run pack; returns its spec."""
    spec = pack_spec(training, validation, **changes)
    inputs = {f"{role}/{path.name}": path for role, paths in (("training", training), ("validation", validation)) for path in paths}
    pack.run(spec, out, inputs, context or Context())
    return spec


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below, byte for byte."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
