"""The data stages against the tokenizer's own rate: tokenize, pack, and rows read.

`gigatoken` is the library reading the same Parquet by itself into memory; `tokenize` is the whole stage, Parquet in and out, checks
and digests included. Rates are of the fastest of the repeats: per second of wall time, and per second of processor time over all
threads, which says what a core does also on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.table import report
from stages import pack, sources, tokenize, tokenizer, vocabulary
from stages.rows import Rows
from stages.spec import Context, Spec

SHIPPED = Path(__file__).parent.parent / "pipelines" / "nano" / "data"
TIKTOKEN_BYTES = 4 << 20


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks data", description="Rates of tokenize, pack and reading.")
    parser.add_argument(
        "files", nargs="*", default=[str(SHIPPED / "training.parquet")], help="Parquet of a column `text`; the nano study's by default"
    )
    parser.add_argument("--held-out", default=str(SHIPPED / "validation.parquet"), help="Parquet that validation rows are packed from")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sequence-length", type=int, default=2048)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("always")
        path = report("data", _measure(options, Path(folder)))
    print(f"\n{path}")


def _fastest(repeats: int, work: Callable[[], Any]) -> tuple[float, float]:
    """(wall seconds, processor seconds), each the least of the repeats."""
    found = []
    for _ in range(repeats):
        wall, used = time.perf_counter(), time.process_time()
        work()
        found.append((time.perf_counter() - wall, time.process_time() - used))
    return min(wall for wall, _ in found), min(used for _, used in found)


def _measure(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    words = Spec(stage="vocabulary", versions={}, parameters={"kind": "gpt2"})
    vocabulary.run(words, folder / "vocabulary", {}, Context())

    def spec(name: str) -> Spec:
        return Spec(stage="tokenize", versions={}, inputs={"vocabulary": words.key}, parameters={"source": name})

    def tokenized(name: str, files: list[str]) -> Path:
        out = folder / name
        shutil.rmtree(out, ignore_errors=True)
        tokenize.run(spec(name), out, {"vocabulary": folder / "vocabulary"}, Context(threads=options.threads, settings={"sources": files}))
        return out

    counts: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    held = tokenized("held", [options.held_out])
    files = [str(file.local) for file in sources.expand(options.files)]

    def add(what: str, tokens: int, size: int | None, seconds: tuple[float, float]) -> None:
        wall, used = seconds
        rates = {"MB/s": size / wall / 1e6 if size else None, "Mtokens/s": tokens / wall / 1e6, "Mtokens/s a core": tokens / used / 1e6}
        rows.append(
            {"what": what, "tokens": tokens, "wall s": wall, "cpu s": used}
            | rates
            | {"peak MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000}
        )

    stage = _fastest(options.repeats, lambda: counts.update(json.loads((tokenized("training", files) / tokenize.COUNTS).read_text())))
    tokens, size = counts["tokens"], counts["bytes"]

    def library() -> None:
        import gigatoken

        gigatoken.Tokenizer.from_tiktoken(tokenizer.gpt2_file(), pretokenizer="gpt2").encode_files(
            gigatoken.ParquetFileSource(files, column="text")
        )

    plain = tokenizer.load(folder / "vocabulary")._plain
    sample = pq.read_table(files[0], columns=["text"])["text"].to_pylist()
    part, held_bytes = [], 0
    for text in sample:
        part.append(text)
        held_bytes += len(text.encode())
        if held_bytes >= TIKTOKEN_BYTES:
            break
    encoded: list[Any] = []
    peer = _fastest(1, lambda: encoded.append(plain.encode_ordinary_batch(part, num_threads=options.threads)))
    add(f"tiktoken, {held_bytes / 1e6:.0f} MB, {options.threads} threads", sum(map(len, encoded[0])), held_bytes, peer)
    add("gigatoken, Parquet to memory", tokens, size, _fastest(options.repeats, library))
    add("tokenize, Parquet to Parquet", tokens, size, stage)

    length = options.sequence_length
    budget = max(1, int(0.95 * tokens) // length)
    parameters = {
        "sequence_length": length,
        "window": 8192,
        "shard_rows": 2048,
        "validation_rows": 16,
        "vocab_size": plain.n_vocab,
        "bos": plain.eot_token,
    }
    inputs = {"training/training": folder / "training", "validation/held": held}
    how = Spec(
        stage="pack",
        versions={},
        inputs={name: spec(path.name).key for name, path in inputs.items()},
        parameters=parameters | {"budgets": {"all": budget}},
    )
    made = -(-budget // 2048) * 2048 * length

    def packed() -> None:
        shutil.rmtree(folder / "packed", ignore_errors=True)
        pack.run(how, folder / "packed", inputs, Context(threads=options.threads))

    add("pack, all of it", made, None, _fastest(options.repeats, packed))

    def read(size: int) -> Callable[[], None]:
        def work() -> None:
            opened = Rows(folder / "packed" / "budgets" / "all.json")
            for start in range(0, len(opened), size):
                opened.read(start, min(start + size, len(opened)))

        return work

    add("read rows in order, 64 at once", budget * length, None, _fastest(options.repeats, read(64)))
    if counts["fallback"]:
        print(f"The stage fell back: {counts['fallback']}. Its rate is not gigatoken's.")
    else:
        by = {row["what"].split(",")[0]: row for row in rows}
        print(
            f"tokenize reaches {by['tokenize']['MB/s'] / by['gigatoken']['MB/s']:.0%} of the library's own rate; every batch's sample was the reference's.\n"
        )
    return rows
