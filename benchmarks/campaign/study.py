"""The campaign's study: every stage of the nano study in a fraction of a second each, and what its results are compared by."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipelines import workspace
from pipelines.store import Store
from stages import artifact
from stages.checkpoints import Checkpoints
from stages.spec import Spec
from stages.units import PARTIAL

NANO = Path(__file__).parents[2] / "pipelines" / "nano"
STEPS, CHECKPOINT_EVERY = 24, 2
QUESTIONS = "factbook_choice"
CELL, OTHER = "mesa-tiny-1m", "gla-tiny-1m"
STAGES = (  # inputs first
    ("resolve", "resolve"), ("vocabulary", "vocabulary"), ("tokenize", "text"), ("tokenize", "held-out"), ("tokenize", "long"), ("pack", "pack"),
    ("items", "items"), ("train", OTHER), ("train", CELL), ("evaluate", OTHER), ("evaluate", CELL), ("analyze", "analyze"),
)  # fmt: skip
TRIED = tuple(pair for pair in STAGES if pair[1] not in ("held-out", "long", OTHER))
TIMED = ("seconds", "tokens_per_second", "mfu", "mfu_without_cg", "devices")  # of a history's columns: how fast, not what


def write_data(folder: Path) -> dict[str, list[str]]:
    """Beginnings of the nano study's documents and some of its questions, in files of a few kB: source -> files."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    made: dict[str, list[str]] = {}
    folder.mkdir(parents=True)
    for source, shipped, files, rows, length in (
        ("text", "training", 4, 24, 2000), ("held-out", "validation", 1, 24, 1000), ("long", "evaluation", 2, 4, 600), (QUESTIONS, QUESTIONS, 1, 6, None),
    ):  # fmt: skip
        table = pq.read_table(NANO / "data" / f"{shipped}.parquet")
        if length:
            table = pa.table({"id": table["id"], "text": pc.utf8_slice_codeunits(table["text"], 0, length)})
        made[source] = [str(folder / f"{source}-{number}.parquet") for number in range(files)]
        for number, path in enumerate(made[source]):
            pq.write_table(table.slice(number * rows, rows), path)
    return made


def params(data: dict[str, list[str]]) -> dict[str, Any]:
    """params.yaml of the study over these files; `root` is its own folder."""
    from pipelines.reading import read
    from stages.sources import pin

    made = copy.deepcopy(read(NANO))
    roles = {"text": "training", "held-out": "validation", "long": "evaluation"}
    made |= {"root": ".", "study": "faults"}
    made["grid"]["models"] = ["gla", "mesa"]
    made["sweep"] = {"models": [], "scales": [], "budgets": []}
    made["scales"] = {"tiny": {"layers": 2, "width": 16, "heads": 2, "key_size": 8, "mlp": 16}}
    made["budgets"] = {"1m": {"tokens": 4 * 32 * STEPS}}
    made["data"]["sources"] = {
        source: {"role": role, "files": data[source], "column": "text", "id": "id", "pin": pin(data[source])}
        for source, role in roles.items()
    }
    made["vocabulary"] |= {"size": 300, "megabytes": 0.05}
    made["packing"] |= {"sequence_length": 32, "shard_rows": 32, "validation_rows": 8, "window": 64, "epochs": 1}
    made["training"] |= {"batch": 4, "warmup_steps": 2, "checkpoint_every": CHECKPOINT_EVERY}
    made["evaluation"] = {"lengths": [32, 64], "settings": {"cg-2": {"steps": 2}, "no-solve": {"solve": False}}, "internals": 2}
    choice = made["tasks"]["factbook-choice"]
    made["tasks"] = {"factbook-choice": choice | {"items": {"files": data[QUESTIONS], "pin": pin(data[QUESTIONS])}}}
    made["analysis"] |= {"baseline": "gla"}
    made["cluster"] |= {"workers": {"default": {"cpus": 1}}, "storage": None}
    return made


# What a stage has made, seen from the study's folder


def results(stage: str, cell: str) -> dict[str, Any]:
    """What must be the same after any fault: the artifact's record, its data read and digested again, and every file where DVC finds it.

    "refused": why whoever reads it refuses it, if so.
    """
    if stage == "resolve":
        files = [Path("context.json"), *sorted(path for path in Path("specs").rglob("*") if path.is_file())]
        return {str(path): _sha(path) for path in files}
    key = Spec.load(workspace.spec_file(stage, cell)).key
    placed = workspace.output(stage, cell, workspace.context()["roles"].get(cell))
    try:
        found = Store(Path(".strata").absolute()).find(key)
        if found is None:
            return {"published": None}
        made: dict[str, Any] = {"record": artifact.read(found, key=key, content=True)}
        for record in placed.rglob(artifact.NAME):
            artifact.read(record.parent)
    except ValueError as refusal:
        return {"refused": str(refusal)}
    made |= {str(path): _sha(path) for path in sorted(placed.rglob("*")) if path.is_file()}
    if stage == "train":
        from stages import schemas

        table = schemas.read(workspace.history_file(cell), "history")
        made["history"] = table.drop_columns([name for name in TIMED if name in table.column_names]).to_pylist()
    return made


def _sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def standing(stage: str, cell: str) -> dict[str, Any]:
    """What is complete now: the published attempt, units by key (inode of each's record), the newest checkpoint's step; and what is half and visible."""
    facts: dict[str, Any] = {"published": None, "units": {}, "checkpoint": 0, "half": []}
    store = Store(Path(".strata").absolute())
    for folder in (path for path in (store.root / "units").glob("*/*") if not path.name.startswith(".")):
        _count(folder, folder.name, facts)
    if stage == "resolve":
        return facts
    key = Spec.load(workspace.spec_file(stage, cell)).key
    try:
        found = store.find(key)
        if found is not None:
            artifact.read(found, key=key, content=True)
            facts["published"] = found.name
    except ValueError as error:
        facts["half"].append(str(error))
    attempts = store.attempts(key)
    for record in (record for attempt in attempts for record in attempt.glob(f"*/**/{artifact.NAME}")):
        if PARTIAL not in str(record.parent):
            _count(record.parent, None, facts)
    if stage == "train":
        facts["checkpoint"] = next((found.step for found in Checkpoints(Path("."), key).usable(attempts, lambda text: None)), 0)
    return facts


def _count(folder: Path, key: str | None, facts: dict[str, Any]) -> None:
    try:
        record = artifact.read(folder, key=key, content=True)
    except ValueError as error:
        facts["half"].append(str(error))
        return
    facts["units"].setdefault(record["key"], []).append((folder / artifact.NAME).stat().st_ino)


def made_again(stage: str, cell: str, before: dict[str, Any]) -> list[str]:
    """What was complete `before` and is another's work now."""
    if stage == "resolve":
        return []
    key = Spec.load(workspace.spec_file(stage, cell)).key
    found = Store(Path(".strata").absolute()).find(key)
    if found is None:
        return []
    again = []
    if before["published"] is not None and found.name != before["published"]:
        again.append(f"attempt {before['published']} was published, now attempt {found.name} is")
    for record in found.glob(f"*/**/{artifact.NAME}"):
        unit = json.loads(record.read_text())["key"]
        if unit in before["units"] and record.stat().st_ino not in before["units"][unit]:
            again.append(f"unit {record.parent.name} was complete")
    if stage == "train" and before["published"] is None:
        began = json.loads((found / "provenance.json").read_text())["resumed_from"]
        if began < before["checkpoint"]:
            again.append(f"went on from step {began} though step {before['checkpoint']} was saved")
    return again


def files_of(stage: str, cell: str, *, inputs: bool) -> Iterator[Path]:
    """The data files of a stage's artifact in the store, or of its inputs' artifacts."""
    store, context = Store(Path(".strata").absolute()), workspace.context()
    spec = Spec.load(workspace.spec_file(stage, cell))
    for key in sorted({context["makers"][key][0] for key in spec.inputs.values()}) if inputs else [spec.key]:
        found = store.find(key)
        for name in artifact.read(found)["files"] if found else ():
            yield found / name
