"""Where a cell may run: alternatives in order of preference, on nodes of several kinds, and what is said where it fits nowhere."""

from __future__ import annotations

import pytest

from pipelines import slices
from pipelines.placement import POD, SLICE, TOPOLOGY, TYPE, Offer, described, first, fits, later, refusal, take
from pipelines.run import place

H100 = {"kind": "gpu", "name": "h100", "type": "H100", "flops": 1e15}
V5P = {"kind": "tpu", "name": "v5p", "type": "TPU-V5P", "flops": 5e14}


def gpus(count: int, type: str = "H100", cpus: int = 32, name: str = "g") -> Offer:
    return Offer({"CPU": cpus, "GPU": count}, {TYPE: type}, name)


def host(slice: str, topology: str = "2x2x2", number: int = 0) -> Offer:
    return Offer({"CPU": 8, "TPU": 4}, {TYPE: "TPU-V5P", TOPOLOGY: topology, SLICE: slice}, f"{slice}{number}")


def worker(chip: dict, count: int = 1, cpus: int = 8, **more) -> dict:
    return {"cpus": cpus, "chip": chip, "count": count, **more}


EIGHT = place("train", worker(H100, 8))
SLICE_OF_8 = place("train", worker(V5P, 8, topology="2x2x2"))
ONE = place("evaluate", worker(V5P, 8, topology="2x2x2"))
CPU = place("pack", worker(None))


def test_what_a_worker_asks_of_ray():
    assert (EIGHT.processes, EIGHT.each, EIGHT.labels, EIGHT.device, EIGHT.backend) == (
        8,
        {"CPU": 1, "GPU": 1},
        {TYPE: "H100"},
        "cuda",
        "torch",
    )
    assert (SLICE_OF_8.processes, SLICE_OF_8.each, SLICE_OF_8.device, SLICE_OF_8.backend) == (2, {"CPU": 8, "TPU": 4}, "tpu", "jax")
    assert (ONE.processes, ONE.each, ONE.labels) == (1, {"CPU": 8, "TPU": 1}, {TYPE: "TPU-V5P"})
    assert (CPU.processes, CPU.each, CPU.labels) == (1, {"CPU": 8}, {})
    flat = place("train", worker({**V5P, "type": "TPU-V5LITEPOD"}, 8, topology="2x4"))  # eight chips of one host
    assert (flat.processes, flat.each["TPU"], flat.labels[TOPOLOGY]) == (1, 8, "2x4")


@pytest.mark.parametrize(
    ("wanted", "nodes", "there"),
    [
        (EIGHT, [gpus(4), gpus(4)], True),  # processes may be spread
        (EIGHT, [gpus(4), gpus(3)], False),
        (EIGHT, [gpus(8, "A100")], False),
        (EIGHT, [gpus(8, cpus=7)], False),
        (SLICE_OF_8, [host("a"), host("a", number=1)], True),
        (SLICE_OF_8, [host("a"), host("b")], False),  # halves of two slices
        (SLICE_OF_8, [host("a", "2x2x1"), host("a", "2x2x1", 1)], False),
        (SLICE_OF_8, [Offer({"CPU": 8, "TPU": 4}, {TYPE: "TPU-V5P", POD: "v5p-16", SLICE: "a"}, n) for n in "xy"], True),
        (ONE, [host("a", "2x2x1")], True),
        (CPU, [gpus(8, cpus=8)], True),
        (CPU, [Offer({"CPU": 4}), Offer({"CPU": 4})], False),
    ],
)
def test_what_fits(wanted, nodes, there):
    assert fits(wanted, nodes) is there


def test_the_first_that_has_room():
    card, tpu = gpus(8), [host("a"), host("a", number=1)]
    both, places = [card, *tpu], [EIGHT, SLICE_OF_8]
    assert first(places, both) is EIGHT
    busy = take(EIGHT, both)
    assert busy[0].resources == {"CPU": 24, "GPU": 0} and busy[1:] == tpu
    assert first(places, busy) is SLICE_OF_8
    assert first(places, take(SLICE_OF_8, busy)) is None
    halves = [host("a"), host("b"), host("b", number=1)]
    assert [offer.resources["TPU"] for offer in take(SLICE_OF_8, halves)] == [4, 0, 0]


def test_a_refusal_names_what_was_asked_what_is_missing_and_what_there_is():
    nodes = [gpus(4, "A100"), gpus(4, "A100"), host("a", "2x2x1")]
    said = refusal("train of mesa-1b-15b", [EIGHT, SLICE_OF_8], nodes)
    for words in (
        "train of mesa-1b-15b fits nowhere",
        "8 x h100 (8 processes, each with 1 processor and 1 GPU): no node has the accelerator H100",
        "2x2x2 of v5p (2 processes, each with 8 processors and 4 TPU chips): no slice of TPU-V5P has the topology 2x2x2",
        "2 nodes with 32 processors, 4 GPUs (A100); 1 node with 8 processors, 4 TPU chips (TPU-V5P, 2x2x1)",
    ):
        assert words in said, said
    assert "there is room for 4 of its 8 processes" in refusal("x", [EIGHT], [gpus(4)])
    assert "none of these nodes has 8 processors, at most 4" in refusal("x", [CPU], [Offer({"CPU": 4})])


@pytest.mark.parametrize(("here", "taken"), [({"gpu": 8}, EIGHT), ({"tpu": 4}, ONE), ({}, EIGHT), ({"gpu": 1}, EIGHT)])
def test_without_ray_a_request_goes_to_what_this_machine_has(monkeypatch, here, taken):
    """By number, not by name; what is not there at all is the preferred one's to miss."""
    from dataclasses import asdict

    from pipelines import nodes, run
    from pipelines.work import Request

    monkeypatch.setattr(nodes, "accelerators", lambda: here)
    wanted = Request("evaluate", "cell", {}, {}, "store", "study", places=[asdict(EIGHT), asdict(ONE)])
    found = wanted.at(run._here(wanted))
    assert (found.settings["provenance"]["place"], found.settings["backend"], found.device) == (taken.name, taken.backend, taken.device)
    assert found.type is None


def test_an_autoscaling_cluster_says_what_it_may_become():
    grows = [
        {"nodes": 3, "cpus": 64, "accelerator": "h100", "count": 8, "topology": None, **H100},
        {"nodes": 2, "cpus": 8, "accelerator": "v5p", "count": 1, "topology": "2x2x2", **V5P},
    ]
    nodes = later(grows)
    assert fits(EIGHT, nodes) and fits(SLICE_OF_8, nodes) and not fits(place("train", worker(H100, 32)), nodes)
    assert described(nodes).startswith(
        "3 nodes with 64 processors, 8 GPUs (H100) that may be added; 4 nodes with 8 processors, 4 TPU chips"
    )


def test_slices_are_shaped_and_named_as_rays():
    from ray._private.accelerators.tpu import get_chips_per_host, get_num_chips_from_topology, infer_tpu_pod_type_from_topology
    from ray.util.accelerators import accelerators as ray_names

    assert [slices.topology(name) for name in ("v5p-16", "2x4", "v5e-8", "v5litepod-16", "v6e-256", "v4-8")] == [
        "2x2x2",
        "2x4",
        "2x4",
        "4x4",
        "16x16",
        "2x2x1",
    ]
    for name, topology in (("v5p", "2x2x2"), ("v5p", "2x2x1"), ("v5e", "2x4"), ("v5e", "4x4"), ("v6e", "2x2"), ("v4", "4x4x4")):
        type = slices.ray_type(name, "tpu")
        assert type in vars(ray_names).values() and slices.pod_type(topology, type) == infer_tpu_pod_type_from_topology(topology, type)
        assert slices.chips(topology) == get_num_chips_from_topology(topology)
        assert slices.hosts(topology, type) == slices.chips(topology) // get_chips_per_host(topology, type.lower().removeprefix("tpu-"))
    assert slices.ray_type("h100", "gpu") == ray_names.NVIDIA_H100
    with pytest.raises(ValueError, match="'v5p-15' is no TPU slice; .* as v5p-16"):
        slices.topology("v5p-15")


def test_what_params_say_reaches_placement(tmp_path):
    """Workers and growth of params.yaml, as resolve writes them down for the driver; none of it is in a spec."""
    from pathlib import Path

    from pipelines.cells import specs, version_table
    from pipelines.reading import parse, read
    from pipelines.resolve import context

    nano = read(Path(__file__).parents[2] / "pipelines" / "nano")
    chips = {
        "h100": {"kind": "gpu", "flops": 1e15, "memory": 80, "cost": 2, "utilization": 0.4},
        "v6e": {"kind": "tpu", "flops": 9e14, "memory": 32, "cost": 2, "utilization": 0.4},
        "card": {"kind": "gpu", "flops": 1e14, "memory": 24, "cost": 1, "utilization": 0.4, "type": "any"},
    }
    workers = [
        {"accelerator": "h100", "count": 2},
        {"cpus": 4, "accelerator": "v6e", "topology": "v6e-16", "fsdp": 4},
        {"accelerator": "card"},
    ]
    grows = [{"nodes": 2, "cpus": 4, "accelerator": "v6e", "topology": "4x4"}]
    params = parse(nano | {"accelerators": chips, "cluster": {"workers": {"tiny": workers}, "grows": grows}})
    assert specs(params, version_table()) == specs(parse(nano), version_table())
    given = context(params)
    two, slice, card = (place("train", worker) for worker in given["workers"]["mesa-tiny-1m"])
    assert (two.type, two.processes, two.name) == ("H100", 2, "2 x h100") and card.type is None
    assert (slice.type, slice.topology, slice.processes, slice.each, slice.fsdp) == ("TPU-V6E", "4x4", 4, {"CPU": 4, "TPU": 4}, 4)
    assert first([two, slice], later(given["grows"])) is slice and fits(card, [gpus(1, "A100")])
    assert place("pack", given["workers"]["default"][0]).each == {"CPU": 2}
