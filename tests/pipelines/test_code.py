"""Code and environment of a cluster's workers: what is sent, what is refused, and what a worker says that has another."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pipelines import environment, head, jobs
from pipelines.code import code_for, copy
from pipelines.head import Address
from pipelines.placement import described, nodes_at
from pipelines.work import Outcome, Request

ROOT, PROBE = Path(__file__).parents[2], Path(__file__).with_name("probe")
CLUSTER, UPLOAD = Address("http://cluster:8265"), {"how": "upload", "python": None, "image": None}


def git(root: Path, *arguments: str) -> None:
    subprocess.run(
        ["git", "-c", "user.name=test", "-c", "user.email=test@example.org", *arguments], cwd=root, check=True, capture_output=True
    )


@pytest.fixture
def repository(tmp_path) -> Path:
    """A repository with a little code, data and a study."""
    for name in ("stages/train.py", "stages/versions.yaml", "pipelines/run.py", "pipelines/nano/params.yaml", "docs/page.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"of {name}\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "Begin")
    (tmp_path / ".gitignore").write_text(".strata\n")
    return tmp_path


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_copy_is_of_the_committed_code_alone(repository):
    folder, digest, diff = copy(repository)
    assert files(folder) == {"stages/train.py", "stages/versions.yaml", "pipelines/run.py"} and diff == "" and folder.name == digest[:16]
    (repository / "pipelines/nano/params.yaml").write_text("edited: true\n")  # a study's parameters are in its specs
    assert copy(repository) == (folder, digest, "")


def test_code_that_differs_from_the_commit_is_refused_unless_asked_for_and_then_kept(repository):
    _, before, _ = copy(repository)
    (repository / "stages/train.py").write_text("another line\n")
    (repository / "stages/new.py").write_text("beside\n")
    with pytest.raises(
        ValueError, match=r"2 files of it differ from the commit \(stages/train.py, stages/new.py\); commit, or set STRATA_DIRTY=1"
    ):
        code_for(UPLOAD, repository, CLUSTER)
    code = code_for(UPLOAD, repository, CLUSTER, dirty=True)
    folder = Path(code.runtime_env["working_dir"])
    assert code.digest != before and "stages/new.py" in files(folder) and (folder / "stages/train.py").read_text() == "another line\n"
    asked = code.mark(Request("train", "cell", {}, {}, "store", "study"))
    assert asked.environment["code"] == code.digest == code.runtime_env["env_vars"][environment.CODE]
    kept = asked.settings["provenance"]
    assert kept["code"] == code.digest and "+another line" in kept["diff"] and "+++ b/stages/new.py\nbeside" in kept["diff"]


def test_shared_code_and_images(tmp_path):
    shared = code_for({"how": "shared", "python": "/env/bin/python", "image": None}, tmp_path, CLUSTER)
    assert (shared.folder, shared.python, shared.runtime_env) == (head.CODE, "/env/bin/python", {"py_executable": "/env/bin/python"})
    image = code_for({"how": "shared", "python": None, "image": "registry/strata:1"}, tmp_path, CLUSTER)
    assert (image.folder, image.python, image.runtime_env) == (None, "python", {"image_uri": "registry/strata:1"})
    ours = code_for(UPLOAD, tmp_path, Address("http://127.0.0.1:1", local=True))
    assert ours.folder == head.CODE and ours.digest is None


def test_a_worker_names_what_differs():
    asked = environment.here()
    assert environment.difference(asked, "torch") is None
    other = {"libraries": asked["libraries"] | {"numpy": "1.0", "jax": "0.1", "torch": asked["libraries"]["torch"].split("+")[0] + "+cu130"},
             "versions": asked["versions"] | {"layers.mesa": 99}}  # fmt: skip
    said = environment.difference(other, "torch")
    assert f"version of layers.mesa {asked['versions']['layers.mesa']}, wanted 99" in said
    assert f"numpy {asked['libraries']['numpy']}, wanted 1.0" in said and "jax" not in said and "torch" not in said
    assert "jax" in environment.difference(other, "jax") and "code of its own, wanted abc" in environment.difference(
        {"code": "abc"}, "torch"
    )


@pytest.mark.slow
def test_a_cluster_runs_the_code_that_was_sent(tmp_path, monkeypatch):
    """A copy of this repository's code, on a real head: the driver and its worker run it, and say what differs where that is so."""
    repository = tmp_path / "clone"
    repository.mkdir()
    for floor in ("kernels", "models", "stages", "pipelines"):
        shutil.copytree(
            ROOT / floor,
            repository / floor,
            ignore=lambda folder, names: [name for name in names if name == "__pycache__" or (Path(folder).parent.name == "pipelines")],
        )
    git(repository, "init", "-q")
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", "Begin")
    owner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    monkeypatch.setenv("PYTHONPATH", str(PROBE))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    try:
        address = head.ensure(tmp_path, psutil.Process(owner.pid))
        (node,) = nodes_at(address)
        assert node.resources["CPU"] >= 1 and "nothing" not in described([node])
        code = code_for({"how": "upload", "python": sys.executable, "image": None}, repository, Address(address.url, token=address.token))

        def ask(do: str, **more) -> Outcome:
            spec = {"stage": "probe", "versions": {}, "parameters": {"do": do}}
            return jobs.ask(Request("probe", "cell", spec, {}, str(tmp_path / ".strata"), "study", **more), address, code=code)

        made = ask("whose code")
        assert made.status == "succeeded", made.error
        digest, where = Path(made.folder, "made.txt").read_text().split()
        assert digest == code.digest and "working_dir" in where, where
        differs = ask("succeed", environment={"libraries": {"numpy": "1.0"}})
        assert differs.kind == "mistake" and "numpy" in differs.error and "wanted 1.0" in differs.error
    finally:
        owner.kill()
        owner.wait()
