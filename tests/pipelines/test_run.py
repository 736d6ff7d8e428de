"""Running one stage at the desk: what is taken from the store, where inputs are read, what is recorded."""

from __future__ import annotations

import copy
import subprocess
from pathlib import Path

from pipelines import run
from pipelines.cells import makers, specs, version_table
from pipelines.params import Params
from pipelines.reading import parse, read
from pipelines.work import Request
from stages import artifact

ROOT = Path(__file__).parents[2]


def an_artifact(folder: Path, text: str, **inputs: str) -> str:
    """An artifact of one file; its digest."""
    folder.mkdir(parents=True)
    (folder / "data.txt").write_text(text)
    return artifact.write(folder, key="ab" * 32, stage="train", files=["data.txt"], inputs=inputs)["digest"]


def test_an_artifact_of_other_inputs_is_not_taken(tmp_path: Path) -> None:
    digest = an_artifact(tmp_path / "weights", "weights")
    an_artifact(tmp_path / "evaluation", "numbers", weights=digest)
    wanted = Request("evaluate", "a", {}, {"weights": str(tmp_path / "weights")}, store="", study="")
    assert run._strange_input(tmp_path / "evaluation", wanted) is None
    (tmp_path / "weights" / "data.txt").unlink()
    (tmp_path / "weights" / artifact.NAME).unlink()
    (tmp_path / "weights").rmdir()
    assert run._strange_input(tmp_path / "evaluation", wanted) is None, "what is not there says nothing"
    an_artifact(tmp_path / "weights", "weights of another run")
    assert run._strange_input(tmp_path / "evaluation", wanted) == "weights"


def test_every_input_has_a_maker() -> None:
    study = specs(parse(read(ROOT / "pipelines" / "nano")), version_table())
    made_by = makers(study)
    keys = {spec.key for spec in study.values()}
    for spec in study.values():
        for key in spec.inputs.values():
            assert made_by[key][0] in keys


def test_a_relative_store_is_seen_from_the_repository(tmp_path: Path) -> None:
    study = tmp_path / "pipelines" / "mine"
    study.mkdir(parents=True)
    for storage, place in ((None, tmp_path / ".strata"), ("../shared", tmp_path / "../shared"), ("/store", Path("/store"))):
        found = run.store_of({"storage": storage, "root": "../.."}, study)
        assert found.root.resolve() == place.resolve()


def test_files_of_a_revision_are_identity_and_those_of_a_content_pin_are_not() -> None:
    value = read(ROOT / "pipelines" / "nano")
    source = value["data"]["sources"]["long"]

    def key(files: list[str], pin: str) -> str:
        edited = copy.deepcopy(value)
        edited["data"]["sources"]["long"] = source | {"files": files, "pin": pin}
        return specs(parse(edited), version_table())["tokenize", "long"].key

    for pin, same in (("sha256:" + "0" * 64, True), ("revision:" + "0" * 40, False)):
        assert (key(["a.parquet"], pin) == key(["b.parquet"], pin)) is same


def test_code_that_git_does_not_know_is_dirty(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(
            ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", *arguments], cwd=tmp_path, check=True, capture_output=True
        )

    git("init", "-q")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "a.py").write_text("")
    git("add", "-A")
    git("commit", "-qm", "Begin")
    assert run.commit(tmp_path)["dirty"] is False
    (tmp_path / "notes.txt").write_text("")
    assert run.commit(tmp_path)["dirty"] is False
    (tmp_path / "models" / "b.py").write_text("")
    assert run.commit(tmp_path)["dirty"] is True


def test_a_parameter_at_its_default_is_not_in_a_spec() -> None:
    params: Params = parse(read(ROOT))
    training = specs(params, version_table())["train", "mesa-140m-15b"].parameters
    assert params.training.warmup_steps == 2000 and "warmup_steps" not in training
    assert training["precision"] == "bfloat16"
