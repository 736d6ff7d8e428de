"""Which of a cluster's nodes a request may run on, and what to say where there are none. Without Ray: pure functions of what it offers.

A request names places in order of preference. It takes the first that has room now; where none has, it waits for the first that the
cluster, grown as far as it may, could ever give it; where there is no such place either, it is refused with what was asked and what there is.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pipelines import slices

if TYPE_CHECKING:
    from pipelines.head import Address

# Ray's labels of a node.
TYPE, TOPOLOGY, POD, SLICE = "ray.io/accelerator-type", "ray.io/tpu-topology", "ray.io/tpu-pod-type", "ray.io/tpu-slice-name"
START_SECONDS = 20.0
KINDS = {"CPU": "processors", "GPU": "GPUs", "TPU": "TPU chips"}


@dataclass(frozen=True)
class Place:
    """One kind of node, or several together, that a request may run on, and how it computes there.

    resources: of all processes together ("cpus", "gpus", or any name of Ray's). type: what its nodes must have for ray.io/accelerator-type.
    topology: of the TPU slice that it takes whole.
    """

    name: str = "processors"
    resources: dict[str, float] = field(default_factory=dict)
    processes: int = 1
    type: str | None = None
    topology: str | None = None
    device: str = "auto"
    backend: str | None = None
    peak_flops: float | None = None
    fsdp: int | None = None

    @property
    def each(self) -> dict[str, float]:
        """What each process takes, by Ray's names."""
        names = {"gpus": "GPU"}
        others = {names.get(name, name): size / self.processes for name, size in self.resources.items() if size and name != "cpus"}
        return {"CPU": max(1, self.resources.get("cpus", 1) // self.processes)} | others

    @property
    def labels(self) -> dict[str, str]:
        """What Ray is told of the nodes. A slice of several hosts is not asked for so: Ray reserves one by its head."""
        found = {TYPE: self.type} if self.type else {}
        return found | ({TOPOLOGY: self.topology} if self.topology and self.processes == 1 else {})

    def __str__(self) -> str:
        each = " and ".join(_amount(name, size) for name, size in self.each.items())
        return f"{self.name} ({f'{self.processes} processes, each with ' if self.processes > 1 else ''}{each})"


@dataclass(frozen=True)
class Offer:
    """A node, what it has (by Ray's names) and its labels; or one that an autoscaler may add, `times` over (a slice's hosts: as one slice)."""

    resources: dict[str, float]
    labels: dict[str, str] = field(default_factory=dict)
    name: str = ""
    times: int = 1

    def processes(self, place: Place) -> int:
        """How many processes of a place fit on it."""
        if not self.suits(place):
            return 0
        return self.times * int(min(self.resources.get(name, 0) / size + 1e-9 for name, size in place.each.items()))

    def suits(self, place: Place) -> bool:
        """Whether it is of the place's kind, whatever its size."""
        if place.type is not None and self.labels.get(TYPE) != place.type:
            return False
        if place.topology is None:
            return True
        return self.labels.get(TOPOLOGY) == place.topology or (TOPOLOGY not in self.labels and self.labels.get(POD) == _pod(place))

    def __str__(self) -> str:
        what = [_amount(name, self.resources[name]) for name in KINDS if self.resources.get(name)] or ["nothing"]
        kind = ", ".join(filter(None, (self.labels.get(TYPE), self.labels.get(TOPOLOGY))))
        return ", ".join(what) + (f" ({kind})" if kind else "")


def _pod(place: Place) -> str:
    return slices.pod_type(place.topology or "", place.type or "")


def _amount(name: str, size: float) -> str:
    kind = KINDS.get(name, name)
    return f"{size:g} {kind.removesuffix('s') if size == 1 and name in KINDS else kind}"


def fits(place: Place, offers: Iterable[Offer]) -> bool:
    """Whether these nodes, were they free, have room for all processes of a place."""
    offers = list(offers)
    if place.topology is None or place.processes == 1:
        return sum(offer.processes(place) for offer in offers) >= place.processes
    hosts: Counter[str] = Counter()
    for offer in offers:  # a slice is one machine: no process of a cell is on another
        hosts[offer.labels.get(SLICE, offer.name)] += min(1, offer.processes(place))
    return max(hosts.values(), default=0) >= place.processes


def take(place: Place, offers: list[Offer]) -> list[Offer]:
    """What is left of the offers once a place is taken, where Ray would most likely take it: the first nodes that fit."""
    left, found = place.processes, []
    fitting = offers
    if place.topology is not None and place.processes > 1:
        names = dict.fromkeys(offer.labels.get(SLICE, offer.name) for offer in offers)
        parts = ([offer for offer in offers if offer.labels.get(SLICE, offer.name) == name] for name in names)
        fitting = next((part for part in parts if fits(place, part)), [])
    for offer in offers:
        count = min(left, offer.processes(place)) if offer in fitting else 0
        rest = {name: size - count * place.each.get(name, 0) for name, size in offer.resources.items()}
        found.append(replace(offer, resources=rest) if count else offer)
        left -= count
    return found


def first(places: Iterable[Place], offers: list[Offer]) -> Place | None:
    """The first place that these nodes have room for."""
    return next((place for place in places if fits(place, offers)), None)


def refusal(what: str, places: list[Place], nodes: list[Offer]) -> str:
    """Why there is no node for it: what was asked, what is missing for it, what there is."""
    asked = "; or ".join(f"{place}: {missing(place, nodes)}" for place in places)
    return f"{what} fits nowhere on this cluster. It asks for {asked}. The cluster has {described(nodes)}. Change cluster.workers, or add nodes (cluster.grows says what may come)."


def missing(place: Place, nodes: list[Offer]) -> str:
    """The first thing that the nodes lack for a place."""
    typed = [node for node in nodes if place.type is None or node.labels.get(TYPE) == place.type]
    if not typed:
        return f"no node has the accelerator {place.type}"
    suited = [node for node in typed if node.suits(place)]
    if not suited:
        return f"no slice of {place.type} has the topology {place.topology}"
    for name, size in place.each.items():
        most = max(node.resources.get(name, 0) for node in suited)
        if most < size:
            return f"none of these nodes has {_amount(name, size)}, at most {most:g}"
    count = sum(node.processes(place) for node in suited)
    return f"there is room for {count:g} of its {place.processes} processes" + (", on one slice" if place.topology else "")


def described(nodes: list[Offer]) -> str:
    """What there is: so many nodes of each kind."""
    kinds: Counter[str] = Counter()
    for node in nodes:
        kinds[str(node) + (" that may be added" if node.name == LATER else "")] += node.times
    return "; ".join(f"{number} node{'s' if number > 1 else ''} with {kind}" for kind, number in kinds.items()) or "no nodes"


LATER = "later"


def later(grows: Iterable[dict[str, Any]]) -> list[Offer]:
    """The nodes that an autoscaling cluster may add. grows: cluster.grows, with each accelerator's kind and Ray's type of it beside it."""
    found = []
    for number, one in enumerate(grows):
        labels = {name: value for name, value in ((TYPE, one["type"]), (TOPOLOGY, one["topology"])) if value}
        hosts = slices.hosts(one["topology"], one["type"]) if one["topology"] else 1
        chips = slices.chips(one["topology"]) / hosts if one["topology"] else one["count"]
        resources = {"CPU": float(one["cpus"])} | ({one["kind"].upper(): float(chips)} if one["kind"] in ("gpu", "tpu") else {})
        found += [Offer(resources, labels | ({SLICE: f"{LATER} {number}"} if hosts > 1 else {}), LATER, one["nodes"])] * hosts
    return found


def nodes_at(address: Address) -> list[Offer]:
    """The living nodes of the cluster that answers at an address, through its dashboard, which may be up before its own node is. ValueError where it
    does not tell."""
    url = f"{address.url}/api/v0/nodes?detail=1&limit=10000"
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, headers=address.headers), timeout=20) as answer:
                rows = json.loads(answer.read())["data"]["result"]["result"]
            found = [Offer(row["resources_total"], row.get("labels") or {}, row["node_id"]) for row in rows if row["state"] == "ALIVE"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"The Ray cluster at {address.url} does not say what nodes it has ({error!r}); see that its dashboard is installed: pip install 'ray[default]'."
            ) from error
        if found or time.monotonic() > deadline:
            return found
        time.sleep(0.2)
