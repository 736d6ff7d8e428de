"""`strata status` while a stage runs: its last progress line, whatever it holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from pipelines import status
from pipelines.cells import specs, version_table
from pipelines.reading import load, read
from pipelines.resolve import context
from pipelines.run import store_of
from stages.spec import Context
from tests.pipelines.clone import small

ROOT = Path(__file__).parents[2]

# stage, cell, what the stage says last -> what the row shows
LINES: list[tuple[str, str, dict[str, Any], str]] = [
    ("vocabulary", "vocabulary", {"step": 150_000, "of": 200_000, "source": "public-domain", "megabytes": 0.15}, "150000/200000"),
    ("tokenize", "public-domain", {"step": 1, "of": 3, "documents": 90, "tokens": 1000, "tokens_per_second": 512.0}, "1/3"),
    ("pack", "pack", {"step": 2, "of": 5, "looking_for": "validation documents in training"}, "2/5"),
    ("pack", "pack", {"step": 4, "of": 5, "tokens": 640, "tokens_per_second": 0.0}, "4/5"),
    ("pack", "pack", {"done": 4, "of": 5}, ""),
    ("train", "mesa-tiny-1m", {"note": "Going on from step 7."}, ""),
]


@pytest.mark.parametrize("stage, cell, line, shown", LINES)
def test_status_shows_a_running_stage(stage, cell, line, shown, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    with (tmp_path / "params.yaml").open("w") as file:
        YAML().dump(small(read(ROOT / "pipelines" / "nano")), file)
    params = load(tmp_path)
    spec = specs(params, version_table())[stage, cell]
    lease = store_of(context(params), tmp_path).acquire(spec.key, spec.model_dump_json())
    Context(progress_file=lease.folder / "progress.jsonl").progress(stage=stage, **line)
    status.show(tmp_path)
    [row] = [row for row in capsys.readouterr().out.splitlines() if row.split()[:2] == [stage, cell]]
    assert row.split()[2:4] == ["running", *([shown] if shown else [])]
