"""A training by several processes, as the driver has Ray Train start them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from models import checkpoint
from pipelines.run import request
from pipelines.work import Outcome, Request
from stages import artifact, train
from stages.spec import Spec
from tests.stages.small_study import MESA, context, make_packed, train_spec


@pytest.mark.slow
def test_ray_train_trains_as_one_process_does(tmp_path, monkeypatch):
    import ray

    from pipelines.driver import perform

    budget, spec = make_packed(tmp_path / "packed"), train_spec(model=MESA, steps=12)
    (tmp_path / "store").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    wanted = Request(
        "train", "cell", spec.model_dump(), {"budget": str(budget)}, str(tmp_path / "store"), "study", device="cpu", processes=2
    )
    wanted.resources = {"cpus": 2}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        outcome = Outcome(**ray.get(perform.options(num_cpus=0).remote(asdict(wanted), 2)))
        again = Outcome(**ray.get(perform.options(num_cpus=0).remote(asdict(wanted), 2)))
    finally:
        ray.shutdown()
    assert (outcome.status, again.status) == ("succeeded", "present"), outcome.error
    made = Path(outcome.folder)
    assert artifact.read(made, key=spec.key, content=True) and json.loads((made / "provenance.json").read_text())["devices"] == 2
    (tmp_path / "alone").mkdir()
    train.run(spec, tmp_path / "alone", {"budget": budget}, context()[0])
    weights, expected = (checkpoint.load(folder / train.WEIGHTS)[0] for folder in (made, tmp_path / "alone"))
    assert all(weights[name] == pytest.approx(expected[name], rel=2e-2, abs=2e-3) for name in expected)


@pytest.mark.parametrize(("stage", "gpus", "processes"), [("train", 4, 4), ("evaluate", 1, 1)])
def test_a_cell_trains_on_its_gpus_and_is_evaluated_on_one(tmp_path, monkeypatch, stage, gpus, processes):
    from pipelines import run as running

    monkeypatch.setattr(running.workspace, "inputs", lambda *_: {})
    chip = {"kind": "gpu", "flops": 1e15}
    place = {"workers": {"default": [{"cpus": 8, "chip": chip, "count": 4}]}, "settings": {}, "study": "s", "retries": 0, "makers": {}}
    monkeypatch.setattr(running, "_sources", lambda *_: [])
    store = running.Store(tmp_path)
    made = request(stage, "cell", Spec(stage=stage, versions={}, parameters={}), place, store, profile=True)
    assert (made.resources["gpus"], made.processes, made.device) == (gpus, processes, "cuda")
    assert made.settings["peak_flops"] == gpus * 1e15 and made.settings["profile"] is True


@pytest.mark.parametrize(("count", "said"), [(4, False), (3, True)])
def test_gpus_divide_the_batch(count, said):
    from pipelines import check
    from pipelines.reading import load

    params = load(Path(__file__).parents[2])
    worker = params.worker("1b").model_copy(update={"count": count})
    params = params.model_copy(update={"cluster": params.cluster.model_copy(update={"workers": {"1b": worker}})})
    found = check._workers(params)
    assert bool(found) is said and all("cluster.workers.1b.count: 3 do not divide training.batch" in text for text in found)


def test_a_process_with_another_environment_is_a_mistake_and_not_a_loss(tmp_path, monkeypatch):
    from ray.train import TrainingFailedError

    from pipelines import together

    wanted = Request("train", "cell", train_spec().model_dump(), {}, str(tmp_path), "study", processes=2)
    wanted.environment = {"libraries": {"numpy": "1.0"}}
    with pytest.raises(RuntimeError, match="numpy .*, wanted 1.0") as caught:
        together._work({"request": asdict(wanted), "threads": 1})

    class Trainer:
        def fit(self):
            raise TrainingFailedError(f"[Rank 1]\nRuntimeError: {caught.value}")

    monkeypatch.setattr(together, "_trainer", lambda *_: Trainer())
    outcome = together.execute_together(wanted, 1)
    assert (outcome.status, outcome.kind, outcome.error) == ("failed", "mistake", str(caught.value))
