"""`strata run STAGE [CELL]`: what a stage of dvc.yaml does at the desk. Ask the store, have it made, put it in place, remember it."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines import environment, slices, workspace
from pipelines.objects import is_url
from pipelines.opening import open_store
from pipelines.placement import Offer, Place, first
from pipelines.store import Store
from pipelines.work import Outcome, Request, execute
from stages import artifact
from stages.command import HISTORY
from stages.spec import Spec

if TYPE_CHECKING:
    from pipelines import ahead, head
    from pipelines.code import Code
    from pipelines.progress import Progress

STORE = ".strata"
FLOORS = ("kernels", "models", "stages", "pipelines")
BUSY_SECONDS = 1.0  # between looks at a key that somebody else is making
DIRTY = "STRATA_DIRTY"  # environment variable: uncommitted code may be sent to a cluster
REMEMBERED = ("train", "evaluate", "analyze")  # what MLflow hears of


class Unfinished(Exception):
    """A stage has not made its artifact; the message is what to print.

    outcome: how it ended. mistake: whether the user can mend it, and the message is a sentence.
    """

    def __init__(self, message: str, outcome: Outcome) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.mistake = outcome.kind == "mistake" or outcome.status != "failed"


def store_of(context: dict[str, Any], folder: Path = Path(".")) -> Store:
    """The store that the study's settings name: a bucket, a folder (a relative one is seen from the repository's root), or .strata/ there."""
    where = context["storage"] or STORE
    return open_store(where if is_url(where) else root_of(context, folder) / Path(where).expanduser())


def root_of(context: dict[str, Any], folder: Path = Path(".")) -> Path:
    root = (folder / context["root"]).resolve()
    if not folder.resolve().is_relative_to(root):
        raise ValueError(
            f"root: is {context['root']!r}, which is no folder above the study's, {folder.resolve()}; it is the way up to the repository's root."
        )
    return root


def run(stage: str, cell: str, *, ray: bool, profile: bool = False) -> Outcome:
    """Make one stage's artifact, or take it from the store, and put it where DVC expects it. Raises Unfinished, ValueError.

    The working directory is the study's folder. profile: of a training, have it write a profile of a few steps.
    """
    context = workspace.context()
    file = workspace.spec_file(stage, cell)
    if not file.is_file():
        raise ValueError(f"{file} does not exist: the study has no {stage} of {cell!r}, or `strata run resolve` has not run since it has.")
    spec = Spec.load(file)
    store = store_of(context)
    found = store.find(spec.key, lambda name: False)
    source = source_of(stage, cell, context)
    if found is None and source is not None:
        run(stage, source, ray=ray)  # an edge that dvc.yaml, the same for every study, does not have
    wanted = request(stage, cell, spec, context, store, profile=profile).located(store, data=False)
    if found and (strange := _strange_input(found, wanted)):
        print(f"{stage} {cell}: the store's was made from another {strange} than there is now; it is made again.", file=sys.stderr)
        store.forget(spec.key)
        found = None
    outcome = Outcome("present", folder=str(found)) if found else _make(wanted, context, store, ray)
    if not outcome.done:
        if stage == "train" and outcome.folder:
            _remember(stage, cell, spec, context, outcome)
        raise Unfinished(f"{stage} {cell}: {outcome.status}. {outcome.error or ''}".rstrip(), outcome)
    data = context["outputs"] == "files"
    made = store.find(spec.key, workspace.placed(stage, data=data))
    if made is None:
        raise ValueError(f"{stage} {cell}: it was made and is not in the store {store.where} any more; run again.")
    outcome.folder = str(made)
    workspace.place(stage, cell, context["roles"].get(cell), made, data=data)
    print(f"{stage} {cell}: {'taken from the store' if outcome.status == 'present' else 'made'}, key {spec.key[:12]}")
    _remember(stage, cell, spec, context, outcome)
    return outcome


def source_of(stage: str, cell: str, context: dict[str, Any]) -> str | None:
    """The cell whose weights this training starts from."""
    return context.get("initial", {}).get(cell) if stage == "train" else None


def _strange_input(found: Path, wanted: Request) -> str | None:
    """The first input of an artifact whose data is not what it was made from (a training made again on a GPU, say), or None."""
    recorded = artifact.read(found, data=False)["inputs"]
    for name, path in wanted.inputs.items():
        now = _digest(Path(path))
        if now is not None and recorded.get(name, now) != now:
            return name
    return None


def _digest(path: Path) -> str | None:
    """The recorded digest of an input: a folder's, a budget's or a table's; None where it is not there whole."""
    try:
        if path.suffix == ".parquet":
            from stages.schemas import recorded_digest

            return recorded_digest(path)
        return workspace.record(path)["digest"] if path.is_dir() else json.loads(path.read_text())["digest"]
    except (OSError, ValueError, KeyError):
        return None


def _makers(spec: Spec, context: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Which artifact of the store holds each input, and where in it."""
    found = {name: tuple(context["makers"][key]) for name, key in spec.inputs.items()}
    return {name: (key, HISTORY if name.startswith("history/") else inside) for name, (key, inside) in found.items()}


def request(stage: str, cell: str, spec: Spec, context: dict[str, Any], store: Store, *, profile: bool = False) -> Request:
    """What is to be made, with all that depends on the place."""
    places = [place(stage, worker) for worker in context["workers"].get(cell, context["workers"]["default"])]
    return Request(
        stage=stage,
        cell=cell,
        spec=spec.model_dump(),
        inputs={name: str(path.absolute()) for name, path in workspace.inputs(spec, cell, source_of(stage, cell, context)).items()},
        makers=_makers(spec, context),
        store=store.where,
        study=context["study"],
        settings={
            **context["settings"],
            "sources": _sources(stage, cell, context),
            "provenance": {"study": context["study"], "cell": cell, **_commit_of(Path.cwd())},
            "profile": profile,
        },
        places=[asdict(one) for one in places],
        later=context.get("grows", []),
        environment=environment.here(),
        retries=context["retries"],
    ).at(places[0])


def place(stage: str, worker: dict[str, Any]) -> Place:
    """Where a worker of params.yaml lets a stage run. A training takes all its chips, anything else one GPU, or a TPU host at most."""
    chip, count, topology = worker["chip"] or {"kind": "cpu"}, worker["count"], worker.get("topology")
    kind, typed = chip["kind"], chip.get("type")
    backend = worker.get("backend") or ("jax" if kind == "tpu" else "torch")
    hosts = slices.hosts(topology, typed or "") if topology else 1
    if stage != "train" and (kind == "gpu" or hosts > 1):
        count, topology, hosts = 1, None, 1
    processes = hosts if kind == "tpu" else count if kind == "gpu" and backend == "torch" else 1
    chips = {"gpu": {"gpus": count}, "tpu": {"TPU": count}, "cpu": {}}[kind]
    named = f"{topology} of {chip.get('name', kind)}" if topology else f"{count} x {chip.get('name', kind)}"
    return Place(
        name="processors" if kind == "cpu" else named,
        resources={"cpus": worker["cpus"] * (hosts if topology else 1), **chips},
        processes=processes,
        type=typed,
        topology=topology,
        device={"gpu": "cuda", "tpu": "tpu", "cpu": "auto"}[kind],  # one that is not there is an error, never a processor instead
        backend=backend,
        peak_flops=chip["flops"] * count if "flops" in chip else None,
        fsdp=worker.get("fsdp") if stage == "train" else None,
    )


def _sources(stage: str, cell: str, context: dict[str, Any]) -> list[str] | dict[str, list[str]]:
    """The data files of a stage that reads any; local ones made absolute, since a worker stands elsewhere."""

    def placed(files: list[str]) -> list[str]:
        return [file if "://" in file else str(Path(file).absolute()) for file in files]

    if stage == "tokenize":
        return placed(context["sources"][cell])
    if stage == "vocabulary":
        return {name: placed(context["sources"][name]) for name, role in context["roles"].items() if role == "training"}
    if stage == "items":
        return {name: placed(files) for name, files in context["items"].items()}
    return []


def commit(folder: Path = Path(".")) -> dict[str, Any]:
    """The git commit of the repository, and whether tracked files differ from it or code stands beside it; nothing outside a repository."""

    def git(*arguments: str) -> str | None:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "HEAD")
    if head is None:
        return {}
    code = [f":(glob,top){floor}/**/*.{ending}" for floor in FLOORS for ending in ("py", "yaml")]
    changed = git("status", "--porcelain", "--untracked-files=no") or git("ls-files", "--others", "--exclude-standard", "--", *code)
    return {"commit": head, "dirty": bool(changed)}


_commit_of = functools.cache(commit)  # a study's requests are many, git is slow


def _make(wanted: Request, context: dict[str, Any], store: Store, ray: bool) -> Outcome:
    from pipelines import ahead, approval
    from pipelines.progress import Progress

    rest = ahead.unmade(context, store) if ahead.whole_study() else [(wanted.stage, wanted.cell)]
    approval.require(context, store, rest)
    with Progress(f"{wanted.stage} {wanted.cell}") as progress:
        if not ray:
            wanted = wanted.at(_here(wanted))
        if not ray and wanted.processes > 1:
            by_hand = f"torchrun --nproc-per-node {wanted.processes} -m stages.train specs/train/{wanted.cell}.json OUT"
            raise ValueError(
                f"{wanted.cell} trains by {wanted.processes} processes, which Ray starts: leave --no-ray out, or "
                + (f"use `{by_hand}`." if wanted.device == "cuda" else "see docs/clusters.md for how to start one on each host.")
            )
        if not ray:
            with _signals() as stopping:
                return _execute_here(wanted, progress, stopping)
        from pipelines import head, jobs, tracking
        from pipelines.code import code_for

        if wanted.stage in REMEMBERED:
            tracking.warm()
        address = head.address_from_environment() or head.ensure(root_of(context))
        code = code_for(context["code"], root_of(context), address, dirty=os.environ.get(DIRTY, "0") not in ("", "0"))
        if not address.local:
            from pipelines.sharing import shared

            wanted = shared(wanted, context, store, say=progress.say)
        _release([item for item in rest if item != (wanted.stage, wanted.cell)], context, store, address, code)
        return jobs.ask(wanted, address, code=code, progress=progress)


def _execute_here(wanted: Request, progress: Progress, stopping: list[int]) -> Outcome:
    """Make it in this process, or, where another makes it, wait for what comes of that."""
    said = False
    while True:
        outcome = execute(wanted, on_progress=progress.show, stop=lambda: bool(stopping))
        if outcome.status not in ("busy", "lost"):
            return outcome
        if stopping:
            return Outcome("stopped", "It was stopped while another made it.")
        if not said:
            progress.say(f"{wanted.stage} {wanted.cell} waits: {outcome.error}")
            said = True
        time.sleep(BUSY_SECONDS)


def _here(wanted: Request) -> Place:
    """The first of its places whose chips this machine has, whatever they are called; else the preferred, whose stage says what is missing."""
    from pipelines.nodes import accelerators

    this = Offer({"CPU": 1e9} | {kind.upper(): float(number) for kind, number in accelerators().items()})
    places = [replace(place, type=None, topology=None) for place in wanted.choices]
    return first(places, [this]) or places[0]


def _release(rest: ahead.Cells, context: dict[str, Any], store: Store, address: head.Address, code: Code) -> None:
    """Let the rest of the study run ahead of DVC's asking; say so when there is something new."""
    from pipelines import ahead, approval, jobs

    if not rest or not context["ahead"] or (address.local and not ahead.room_here(context)):
        return
    requests: Iterable[Request] = (
        request(stage, cell, Spec.load(workspace.spec_file(stage, cell)), context, store) for stage, cell in rest
    )
    if not address.local:
        from pipelines.sharing import reads_here

        requests = (one for one in requests if not reads_here(one, store))  # its data go up when DVC asks for it
    if jobs.release(requests, address, at_once=context["ahead"], code=code):
        print(
            f"Released: {approval.describe(context, rest)}; {context['ahead']} at a time at most, as the cluster has room.", file=sys.stderr
        )


def _remember(stage: str, cell: str, spec: Spec, context: dict[str, Any], outcome: Outcome) -> None:
    """Log to MLflow what this stage adds, or how a training ended; a tracking server that is away is a warning."""
    if stage not in REMEMBERED:
        return
    from pipelines import tracking

    status = tracking.STATUSES[outcome.status]
    tracking.remember(stage, cell, spec, context, Path(outcome.folder or ""), root=root_of(context), status=status)


class _signals:
    """Inside, Ctrl-C and SIGTERM are collected instead of raised, so that the stage can save its work first."""

    def __enter__(self) -> list[int]:
        import signal

        self.seen: list[int] = []
        self.before = {number: signal.signal(number, lambda n, _: self.seen.append(n)) for number in (signal.SIGINT, signal.SIGTERM)}
        return self.seen

    def __exit__(self, *error: object) -> None:
        import signal

        for number, handler in self.before.items():
            signal.signal(number, handler)
