"""What a plain `dvc repro` releases, what a targeted one does not, and what wants to be approved first."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from ruamel.yaml import YAML

from pipelines import ahead, approval, repro, workspace
from pipelines.reading import read
from pipelines.resolve import resolve
from pipelines.run import store_of
from tests.pipelines.clone import small

ROOT = Path(__file__).parents[2]


@pytest.fixture
def study(tmp_path):
    """The small study's folder, resolved, on a made-up GPU."""
    params = small(read(ROOT / "pipelines" / "nano"))
    params["accelerators"] = {"card": {"kind": "gpu", "flops": 1e5, "memory": 1, "cost": 2.0, "utilization": 0.5}}
    params["cluster"] = {"workers": {"tiny": {"accelerator": "card"}}, "confirm_hours": 1}
    with (tmp_path / "params.yaml").open("w") as file:
        YAML().dump(params, file)
    (tmp_path / "dvc.yaml").touch()
    resolve(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "words, whole",
    [
        (["dvc", "repro"], True),
        (["python", "-m", "dvc", "repro", "-q"], True),
        (["dvc", "repro", "dvc.yaml"], True),
        (["dvc", "repro", "../{name}/dvc.yaml", "--keep-going"], True),
        (["dvc", "repro", "other/dvc.yaml"], False),
        (["dvc", "repro", "train@mesa-tiny-1m"], False),
        (["dvc", "repro", "dvc.yaml:pack"], False),
        (["dvc", "repro", "-s"], False),
        (["dvc", "repro", "--force"], False),
        (["strata", "run", "train", "mesa-tiny-1m"], False),
    ],
)
def test_only_a_plain_repro_asks_for_the_whole_study(study, words, whole, monkeypatch):
    words = [word.format(name=study.name) for word in words]
    monkeypatch.setattr(ahead, "caller", lambda: SimpleNamespace(cmdline=lambda: words, cwd=lambda: str(study)))
    assert ahead.whole_study(study) is whole


def test_what_the_lock_or_the_store_holds_is_not_released(study):
    context = workspace.context(study)
    store = store_of(context, study)
    everything = ahead.unmade(context, store, study)
    assert [stage for stage, _ in everything] == sorted((stage for stage, _ in everything), key=ahead.STAGES.index)
    assert {cell for stage, cell in everything if stage == "train"} == set(context["cells"]) and ("analyze", "analyze") not in everything

    cell = next(iter(context["cells"]))
    name = workspace.dvc_stage("train", cell, context["cells"][cell]["group"])
    spec = study / "specs" / "train" / f"{cell}.json"
    digest = hashlib.md5(spec.read_bytes()).hexdigest()
    lock = {"stages": {name: {"deps": [{"path": f"specs/train/{cell}.json", "md5": digest}]}}}
    (study / "dvc.lock").write_text(json.dumps(lock))
    assert set(everything) - set(ahead.unmade(context, store, study)) == {("train", cell)}
    spec.write_text(spec.read_text() + "\n")  # as another parameter would
    assert ahead.unmade(context, store, study) == everything

    key = json.loads((study / "specs" / "vocabulary" / "vocabulary.json").read_text())
    from stages.spec import Spec

    folder = store.folder(Spec.model_validate(key).key)
    folder.mkdir(parents=True)
    (folder / "published").write_text("1")
    assert ("vocabulary", "vocabulary") not in ahead.unmade(context, store, study)


def test_many_hours_want_to_be_approved_once(study):
    context = workspace.context(study)
    store = store_of(context, study)
    cells = ahead.unmade(context, store, study)
    total = approval.cost(context, cells)
    assert total.hours > 1 and total.cost == pytest.approx(2 * total.hours)
    with pytest.raises(ValueError, match="cells to train, .* accelerator-hours, cost .* `strata approve` lets it run"):
        approval.require(context, store, cells)
    approval.require(context, store, [item for item in cells if item[0] != "train"])
    assert approval.approve(context, store, study).startswith(f"Approved: {len(context['cells'])} cells to train, ")
    approval.require(context, store, cells)
    with pytest.raises(ValueError, match="more than cluster.confirm_hours"):  # more than was seen
        approval.require(context, store, [*cells, *cells])


def test_a_machine_with_room_for_one_runs_nothing_ahead(study, monkeypatch):
    context = workspace.context(study)
    assert not ahead.room_here(context)  # the made-up GPU is not here
    workers = {"default": [{"cpus": 2, "count": 1, "chip": None}]}
    for processors, room in ((2, False), (3, False), (4, True)):
        monkeypatch.setattr(ahead.os, "cpu_count", lambda n=processors: n)
        assert ahead.room_here(context | {"workers": workers}) is room


def test_repro_stays_out_of_rays_temporary_copy(tmp_path):
    copy = tmp_path / "runtime_resources" / "working_dir_files" / "package"
    copy.mkdir(parents=True)
    with pytest.raises(ValueError, match="temporary copy .* dvc.lock and the outputs would be lost"):
        repro.repro(copy, None)
    with pytest.raises(ValueError, match="no checkout"):
        repro.repro(tmp_path, None)
    (tmp_path / ".dvc").mkdir()
    (tmp_path / "pipelines" / "nano").mkdir(parents=True)
    (tmp_path / "pipelines" / "nano" / "dvc.yaml").touch()
    with pytest.raises(ValueError, match="no study 'nono'.*nano"):
        repro.repro(tmp_path, "nono")
