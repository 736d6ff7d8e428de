"""A simulated cluster: a head without chips, a node with a "GPU", and the two hosts of a v5p-16; what runs where, and what is refused."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from models import checkpoint
from pipelines import environment
from pipelines.board import Board
from pipelines.placement import POD, SLICE, TOPOLOGY, TYPE, Place
from pipelines.run import place
from pipelines.work import Request
from stages import artifact, schemas, train
from tests.stages.small_study import MESA, context, make_packed, train_spec

PROBE = Path(__file__).with_name("probe")
SESSION, STUDY = "session", "study"
H100 = {"kind": "gpu", "name": "h100", "type": "H100", "flops": 1e15}
V5P = {"kind": "tpu", "name": "v5p", "type": "TPU-V5P", "flops": 5e14}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    import ray
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "PYTHONPATH": f"{PROBE}:{Path(__file__).parents[2]}",
            "RAY_AUTH_MODE": "disabled",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "JAX_PLATFORMS": "cpu",
            "OMP_NUM_THREADS": "1",
            "TPU_NAME": "slice-a",
            "TPU_ACCELERATOR_TYPE": "v5p-16",
            "TPU_TOPOLOGY": "2x2x2",
        }.items():
            patch.setenv(name, value)
        with pytest.MonkeyPatch.context() as eight:
            eight.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0")
            cluster = Cluster(
                initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80_000_000}
            )
            cluster.add_node(num_cpus=2, num_gpus=1, labels={TYPE: "H100"}, object_store_memory=80_000_000)
            for host in range(2):
                eight.setenv("TPU_WORKER_ID", str(host))
                labels = {TYPE: "TPU-V5P", TOPOLOGY: "2x2x2", POD: "v5p-16", SLICE: "slice-a", "ray.io/tpu-worker-id": str(host)}
                resources = {"TPU": 4, "slice-a": 1, **({"TPU-v5p-16-head": 1} if host == 0 else {})}
                cluster.add_node(num_cpus=2, resources=resources, labels=labels, object_store_memory=80_000_000)
        ray.init(address=cluster.address, log_to_driver=False)
        yield tmp_path_factory.mktemp("store")
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def driver(cluster):
    from pipelines.driver import Driver

    return Driver(cluster, STUDY, SESSION, "job")


def probe(store: Path, do: str, places: list[Place]) -> Request:
    spec = {"stage": "probe", "versions": {}, "parameters": {"do": do}}
    return Request("probe", do, spec, {}, str(store), STUDY, places=[vars(one) for one in places])


def until(driver, wanted: list[Request], seconds: float = 200.0) -> list:
    """The outcomes of these requests, the driver working."""
    board, deadline = Board(driver.store.root, STUDY), time.monotonic() + seconds
    while not all(found := [board.outcome(SESSION, one.key) for one in wanted]):
        assert time.monotonic() < deadline, found
        driver.turn()
    return found


def ask(driver, *wanted: Request) -> list:
    board = Board(driver.store.root, STUDY)
    for one in wanted:
        board.put(one, SESSION)
    return until(driver, list(wanted))


def on(chip: dict | None, stage: str = "train", count: int = 1, **more) -> Place:
    return place(stage, {"cpus": 1, "chip": chip, "count": count, **more})


@pytest.mark.slow
def test_cells_go_where_they_fit_and_what_fits_nowhere_is_refused_at_once(driver, cluster):
    eight, one, chip = on(H100, count=8), on(H100), on(V5P)
    began = time.monotonic()
    (refused,) = ask(driver, probe(cluster, "where not", [eight, on(V5P, count=16, topology="2x2x4")]))
    assert time.monotonic() - began < 5 and (refused.status, refused.kind) == ("failed", "mistake")
    for words in (
        "probe of where not fits nowhere",
        "8 x h100",
        "at most",
        "no slice of TPU-V5P has the topology 2x2x4",
        "1 GPU (H100)",
        "2 nodes with 2 processors, 4 TPU chips",
    ):
        assert words in refused.error or words == "at most", refused.error

    busy = probe(cluster, "wait", [one])
    Board(cluster, STUDY).put(busy, SESSION)
    while driver.store.alive(busy.key) is None:
        driver.turn()
    (second,) = ask(driver, probe(cluster, "where 2", [eight, one, chip]))  # the GPU is taken: a TPU chip is free
    assert Path(second.folder, "made.txt").read_text().endswith(" jax"), Path(second.folder, "made.txt").read_text()
    Board(cluster, STUDY).withdraw(SESSION, busy.key)
    assert until(driver, [busy])[0].status == "stopped"
    time.sleep(1)  # for Ray to see that the GPU is free
    (third,) = ask(driver, probe(cluster, "where 3", [eight, one, chip]))
    assert Path(third.folder, "made.txt").read_text() == "0 None torch"
    assert Board(cluster, STUDY).outcome(SESSION, refused and probe(cluster, "where not", []).key) is not None


@pytest.mark.slow
def test_a_cell_trains_on_a_slice_and_its_record_says_so(driver, cluster, tmp_path):
    """Ray Train's JaxTrainer reserves the slice and sets jax.distributed up; the hosts' chips are simulated by four CPU devices each."""
    budget, spec = make_packed(tmp_path / "packed"), train_spec(model=MESA, steps=12, batch=8)
    slice = replace(on(V5P, count=8, topology="2x2x2", fsdp=8), device="cpu")
    wanted = Request("train", "cell", spec.model_dump(), {"budget": str(budget)}, str(cluster), STUDY)
    wanted.places = [vars(one) for one in (on(H100, count=8), slice)]
    wanted.environment = environment.here()
    (outcome,) = ask(driver, wanted)
    assert outcome.status == "succeeded", outcome.error
    made = Path(outcome.folder)
    record = json.loads((made / "provenance.json").read_text())
    assert (record["backend"], record["devices"], record["place"]) == ("jax", 8, "2x2x2 of v5p")
    assert artifact.read(made, key=spec.key, content=True)
    (tmp_path / "alone").mkdir()
    train.run(spec, tmp_path / "alone", {"budget": budget}, context()[0])  # by torch
    losses = [schemas.read(folder / train.HISTORY, "history").column("loss").to_pylist() for folder in (made, tmp_path / "alone")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert checkpoint.load(made / train.WEIGHTS)[0].keys() == checkpoint.load(tmp_path / "alone" / train.WEIGHTS)[0].keys()
