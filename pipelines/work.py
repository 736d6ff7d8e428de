"""One request to run one stage, and its execution in this process: on a worker, or at the desk."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pipelines import secrets
from pipelines.opening import open_store
from pipelines.placement import Place
from pipelines.store import Busy, Lease, Store
from stages import provenance, units
from stages.engine import told_of_full_disk
from stages.spec import Context, LeaseLost, Spec, Stopped, canonical

LOG = "log.txt"


@dataclass
class Request:
    """What somebody wants made.

    inputs: input name -> absolute path; of one that is not made yet, where the study's folder will have it. makers: input name -> (key of the artifact
    in the store that holds it, path in it). settings: what the stage's Context carries (sources, provenance, peak_flops).
    resources: what a worker must have ("cpus", "gpus", or any name of Ray's), all its processes together; type, topology: what its nodes must be (see
    placement.Place). store: the store's folder. places: where it may run, the preferred first, of which `at` takes one; without any, as the request
    itself says. later: the nodes that the cluster may add. environment: what its worker's libraries and versions must be.
    """

    stage: str
    cell: str
    spec: dict[str, Any]
    inputs: dict[str, str]
    store: str
    study: str
    settings: dict[str, Any] = field(default_factory=dict)
    threads: int | None = None
    device: str = "auto"
    resources: dict[str, float] = field(default_factory=dict)
    processes: int = 1
    retries: int = 2
    makers: dict[str, tuple[str, str]] = field(default_factory=dict)
    type: str | None = None
    topology: str | None = None
    places: list[dict[str, Any]] = field(default_factory=list)
    later: list[dict[str, Any]] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def key(self) -> str:
        return Spec.model_validate(self.spec).key

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Request:
        return cls(**json.loads(text))

    @property
    def choices(self) -> list[Place]:
        """Where it may run, the preferred first."""
        own = Place("this", self.resources, self.processes, self.type, self.topology, self.device, self.settings.get("backend"))
        return [Place(**place) for place in self.places] or [own]

    def at(self, place: Place) -> Request:
        """The same, to run there. Nothing of it is identity; provenance says which it was."""
        settings = self.settings | {"provenance": self.settings.get("provenance", {}) | {"place": place.name}}
        given = {"backend": place.backend, "peak_flops": place.peak_flops, "fsdp": place.fsdp}
        settings |= {name: value for name, value in given.items() if value is not None}
        return replace(
            self,
            resources=place.resources,
            processes=place.processes,
            type=place.type,
            topology=place.topology,
            device=place.device,
            settings=settings,
            threads=min(int(place.resources.get("cpus", 1)), os.cpu_count() or 1) if self.places else self.threads,
        )

    def located(self, store: Store, *, data: bool = True) -> Request:
        """The same, with each input that the store has read there, where nothing moves under a stage that runs. Without `data`, for a look at what
        the inputs' records say. From a bucket they come to this machine: so it is asked where the stage runs."""
        found = {name: store.locate(key, inside, data=data) for name, (key, inside) in self.makers.items()}
        return replace(self, inputs=self.inputs | {name: str(place) for name, place in found.items() if place})


@dataclass
class Outcome:
    """How a request ended. status: present (it was made before), succeeded, failed, stopped, lost, busy.

    kind: for a failure, "mistake" (the user's: `error` is a sentence) or "error" (ours: `error` is a traceback).
    """

    status: str
    error: str | None = None
    kind: str | None = None
    folder: str | None = None

    @property
    def done(self) -> bool:
        return self.status in ("present", "succeeded")


def execute(
    request: Request,
    *,
    on_progress: Callable[[dict[str, Any]], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
    log: bool = False,
) -> Outcome:
    """Make the artifact of a request in this process, under a lease, and publish it.

    Takes up the newest usable work of earlier attempts. Never raises for a stage that fails: the outcome says how.
    log: what this process prints goes to the attempt's log.txt from here on, for `strata logs`.
    """
    store = open_store(request.store)
    spec = Spec.model_validate(request.spec)
    try:
        found = store.find(spec.key, _nothing)
        request = request if found else request.located(store)
    except ValueError as error:
        return Outcome("failed", str(error), "mistake")
    except OSError as error:
        return Outcome("failed", f"The store did not answer: {error}", "error")
    if found:
        return Outcome("present", folder=str(found))
    earlier = store.resumable(spec.key)
    try:
        with told_of_full_disk(store.root):
            lease = store.acquire(spec.key, canonical(spec.model_dump()))
    except Busy as busy:
        return Outcome("busy", str(busy))
    except ValueError as full:
        return Outcome("failed", str(full), "mistake")
    if log:
        _print_to(lease.folder / LOG)
    outcome = _run(request, spec, lease, earlier, on_progress, stop)
    outcome.error = outcome.error and secrets.covered(outcome.error)
    if log and outcome.error:
        print(outcome.error, flush=True)
    if not outcome.done and outcome.status != "lost":
        with suppress(OSError):
            _cover_secrets(lease)
    lease.release(asdict(outcome))
    if outcome.done:
        with suppress(OSError):  # what is left is `strata gc`'s
            store.tidy(spec.key, lease.number)
    return outcome


def _print_to(path: Path) -> None:
    """stdout and stderr of this process, its libraries' too, from now on."""
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _run(request: Request, spec: Spec, lease: Lease, earlier: list[Path], on_progress: Any, stop: Callable[[], bool]) -> Outcome:
    context = Context(
        threads=request.threads,
        device=request.device,
        resume_from=earlier,
        settings=request.settings | {"provenance": request.settings.get("provenance", {}) | {"attempt": lease.number}},
        progress_file=lease.folder / "progress.jsonl",
        fence=lease.fence,
        stop_requested=lambda: stop() or lease.stop_requested(),
        on_progress=on_progress,
    )
    folder = str(lease.folder)
    try:
        stage = importlib.import_module(f"stages.{request.stage}")
        with lease.beating(), units.shared(lease.store), told_of_full_disk(lease.folder):
            stage.run(spec, lease.folder, {name: Path(path) for name, path in request.inputs.items()}, context)
            _cover_secrets(lease)
            published = lease.publish()
    except Stopped as stopped:
        return Outcome("stopped", str(stopped), folder=folder)
    except LeaseLost as lost:
        return Outcome("lost", str(lost), folder=folder)
    except Exception as error:
        return _failed(error, lease)
    if not published:
        return Outcome("present", folder=str(lease.store.find(spec.key, _nothing)))
    return Outcome("succeeded", folder=folder)


def _failed(error: Exception, lease: Lease) -> Outcome:
    """What an exception of a stage means. Of one whose lease is lost only that: whoever took over may have cleared its folder away."""
    folder = str(lease.folder)
    try:
        lease.fence()
    except (LeaseLost, OSError) as lost:
        return Outcome("lost", str(lost), folder=folder)
    if isinstance(error, ValueError):
        # Our own ValueErrors are sentences for the user; one out of a library's depths is a fault of ours and keeps its traceback.
        last = traceback.extract_tb(error.__traceback__)[-1].filename
        if any(part in last for part in ("/stages/", "/models/", "/kernels/", "/pipelines/")) and "site-packages" not in last:
            return Outcome("failed", str(error), "mistake", folder)
    return Outcome("failed", "".join(traceback.format_exception(error)), "error", folder)


def _cover_secrets(lease: Lease) -> None:
    """In what a stage or a library may have written of this process's environment."""
    for name in (provenance.NAME, LOG):
        secrets.cover(lease.folder / name)


def _nothing(name: str) -> bool:
    """Of an artifact's files: its record serves."""
    return False
