"""The `strata` command. Heavy libraries are imported by the commands that need them: the plan loads neither torch nor ray."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help="Scaled pretraining studies from one params.yaml."
)

MISTAKE, FAILURE, STOPPED = 2, 1, 130

StudyArgument = Annotated[
    str | None, typer.Argument(help="a folder with a params.yaml, or the name of one under pipelines/; this folder if not given")
]


def main() -> None:
    """Run a command; a user's mistake is one sentence and exit code 2, a fault of ours a traceback."""
    try:
        with _told_of_full_disk():
            app()
    except ValueError as mistake:
        stop(str(mistake), MISTAKE)


@contextmanager
def _told_of_full_disk() -> Iterator[None]:
    """As a stage tells it, for all that is written around it."""
    try:
        yield
    except OSError:
        from stages.engine import told_of_full_disk

        with told_of_full_disk(Path.cwd()):
            raise


def stop(message: str, code: int) -> NoReturn:
    print(f"Error: {message}" if code == MISTAKE else message, file=sys.stderr)
    sys.exit(code)


def study_folder(study: str | None) -> Path:
    """The folder of a study, given as a path or a name."""
    if study is None:
        return Path(".")
    for folder in (Path(study), Path("pipelines") / study, repository() / "pipelines" / study):
        if (folder / "params.yaml").is_file():
            return folder
    from pipelines.mistakes import nearest

    known = [path.parent.name for path in (repository() / "pipelines").glob("*/params.yaml")]
    raise ValueError(f"There is no study {study!r}; {nearest(study, known)}")


def repository(folder: Path = Path(".")) -> Path:
    """The nearest folder upward that holds .dvc, or the folder itself."""
    return next((path for path in (folder.resolve(), *folder.resolve().parents) if (path / ".dvc").is_dir()), folder.resolve())


@app.command()
def run(
    stage: Annotated[str, typer.Argument(help="resolve, vocabulary, tokenize, pack, train, evaluate or analyze")],
    cell: Annotated[str | None, typer.Argument(help="the cell, or the source of tokenize")] = None,
    ray: Annotated[bool, typer.Option(envvar="STRATA_RAY", help="work in Ray; --no-ray works in this process")] = True,
    profile: Annotated[bool, typer.Option(help="train: write a profile of a few steps into the attempt's folder")] = False,
) -> None:
    """Run one stage of the study in this folder, as dvc.yaml does: taken from the store if it is there."""
    from pipelines import run as running
    from pipelines import workspace
    from pipelines.mistakes import nearest

    if stage == "resolve":
        from pipelines.check import require
        from pipelines.resolve import resolve

        require(Path("."))
        resolve()
        return
    if stage not in workspace.STAGES:
        raise ValueError(f"There is no stage {stage!r}; {nearest(stage, ['resolve', *workspace.STAGES])}")
    if cell is None and stage in ("tokenize", "train", "evaluate"):
        raise ValueError(
            f"Which {'source' if stage == 'tokenize' else 'cell'}? `strata run {stage} NAME`; specs/{stage}/ has one file each."
        )
    try:
        running.run(stage, cell or stage, ray=ray, profile=profile)
    except KeyboardInterrupt:
        sys.exit(STOPPED)
    except running.Unfinished as ended:
        if ended.outcome.status in ("stopped", "detached"):
            print(ended, file=sys.stderr)
            sys.exit(STOPPED)
        stop(str(ended), MISTAKE if ended.mistake else FAILURE)


@app.command()
def plan(
    study: StudyArgument = None,
    as_json: Annotated[bool, typer.Option("--json", help="the same for machines")] = False,
    refresh: Annotated[bool, typer.Option("--refresh", help="ask a store in a bucket; else what this machine knows of it")] = False,
) -> None:
    """What a study takes, cell by cell, and what will run and why; nothing is run."""
    from pipelines import plan as planning
    from pipelines import run as running
    from pipelines.reading import load
    from pipelines.resolve import context

    folder = study_folder(study)
    params = load(folder)
    store = running.store_of(context(params), folder)
    store.offline = not refresh
    made = planning.plan(params, store, folder)
    if as_json:
        print(json.dumps(made.to_json(), indent=1))
    else:
        planning.show(made, params)


@app.command()
def check(study: StudyArgument = None) -> None:
    """Is this study well formed, and could it run here?"""
    from pipelines.check import problems
    from pipelines.reading import load

    folder = study_folder(study)
    params = load(folder)
    found = problems(params, folder)
    for problem in found:
        print(f"- {problem}")
    if found:
        sys.exit(MISTAKE)
    print(f"{params.study}: params.yaml is well formed, and everything it needs is here.")


@app.command("study")
def new_study(name: Annotated[str, typer.Argument(help="its folder under pipelines/")]) -> None:
    """Make a study: a folder under pipelines/ with the nano study's params.yaml to edit and a copy of dvc.yaml."""
    import re
    import shutil

    from pipelines.params import MODEL_NAME

    root = repository()
    target = root / "pipelines" / name
    if not re.fullmatch(MODEL_NAME, name):
        raise ValueError(f"{name!r} is no name for a study: small letters, digits, _ and single - only, since it becomes a folder.")
    if target.exists():
        raise ValueError(f"{target} exists already; choose another name.")
    text = (root / "pipelines" / "nano" / "params.yaml").read_text()
    text = (
        re.sub(r"\A(#.*\n)+", f"# The {name} study.\n", text).replace("study: nano", f"study: {name}").replace("[data/", "[../nano/data/")
    )
    target.mkdir()
    (target / "params.yaml").write_text(text)
    shutil.copyfile(root / "dvc.yaml", target / "dvc.yaml")
    print(
        f"Made {target.relative_to(root)}: edit its params.yaml, look at `strata plan {name}`, then `dvc repro {target.relative_to(root)}/dvc.yaml`."
    )


@app.command("lock-data")
def lock_data(study: StudyArgument = None) -> None:
    """Write the pin of every data source of a study into its params.yaml: what its files hold now."""
    from pipelines.pins import lock

    folder = study_folder(study)
    for name, before, after in lock(folder):
        print(f"{name}: {after}" + ("" if before == after else f" (was {before})" if before else " (new)"))


@app.command()
def forget(
    names: Annotated[list[str], typer.Argument(help="cells, sources, stages, or the beginnings of keys")],
    study: Annotated[str | None, typer.Option(help="the study; this folder if not given")] = None,
) -> None:
    """Remove artifacts from the store and from the study's folder, so that they are made again."""
    from pipelines.forget import forget as remove

    folder = study_folder(study)
    for line in remove(folder, names):
        print(line)


@app.command()
def fetch(
    names: Annotated[list[str] | None, typer.Argument(help="cells, sources, stages, or the beginnings of keys; all if not given")] = None,
    study: Annotated[str | None, typer.Option(help="the study; this folder if not given")] = None,
    out: Annotated[Path | None, typer.Option(help="link or copy the files to OUT/STAGE/CELL")] = None,
) -> None:
    """Bring artifacts' files from the store to this machine, each checked against its digest."""
    from pipelines import upkeep

    for line in upkeep.fetch(study_folder(study), names or [], out):
        print(line)


@app.command()
def verify(
    names: Annotated[
        list[str] | None, typer.Argument(help="cells, sources, stages, or the beginnings of keys; all of the store if not given")
    ] = None,
    study: Annotated[str | None, typer.Option(help="the study; this folder if not given")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="look at files' sizes only")] = False,
) -> None:
    """Read the store's artifacts through and name what is damaged; exit code 1 where something is."""
    from pipelines import upkeep

    _, specs, store = upkeep.open_study(study_folder(study))
    keys = [specs[one].key for one in upkeep.chosen(specs, names)] if names else store.keys()
    if upkeep.show_verified(store, [key for key in keys if store.published(key)], content=not quick):
        sys.exit(FAILURE)


@app.command()
def gc(
    study: StudyArgument = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only say what would go")] = False,
    unwanted: Annotated[bool, typer.Option("--unwanted", help="artifacts, too, that no study of this repository wants now")] = False,
    older: Annotated[float, typer.Option(help="with --unwanted: days that they must have been there")] = 30.0,
    cache: Annotated[bool, typer.Option("--cache", help="instead, what this machine has of a store in a bucket")] = False,
) -> None:
    """Clear the store of what killed processes left and of what nothing names."""
    from pipelines import upkeep

    folder = study_folder(study)
    _, _, store = upkeep.open_study(folder)
    if cache:
        gone = upkeep.clear_cache(store, dry_run=dry_run)
    else:
        strangers = set(store.keys()) - upkeep.wanted_by(repository(folder), store) if unwanted else set()
        gone = upkeep.gc(store, dry_run=dry_run, unwanted=strangers, older=older)
    for item in gone:
        print(item.what)
    print(f"{'Would free' if dry_run else 'Freed'} {upkeep.total(gone)} at {store.where}.")


@app.command()
def relock(study: StudyArgument = None) -> None:
    """Make a study's dvc.lock anew from the store, training nothing: for one that is lost, damaged or in conflict."""
    from pipelines.relock import relock as make

    for line in make(study_folder(study)):
        print(line)


@app.command()
def status(study: StudyArgument = None) -> None:
    """What runs, what is done, what failed, with progress."""
    from pipelines import status as reporting

    reporting.show(study_folder(study))


@app.command()
def logs(cell: Annotated[str, typer.Argument(help="the cell, or the source of tokenize")], study: StudyArgument = None) -> None:
    """What the newest attempt at each stage of a cell printed, and how it ended."""
    from pipelines import status as reporting

    print(reporting.logs(study_folder(study), cell))


@app.command()
def approve(study: StudyArgument = None) -> None:
    """Let a study run that takes more accelerator-hours than cluster.confirm_hours."""
    from pipelines import approval, workspace
    from pipelines import run as running
    from pipelines.resolve import resolve

    folder = study_folder(study)
    resolve(folder)
    context = workspace.context(folder)
    print(approval.approve(context, running.store_of(context, folder), folder))


@app.command("stop")
def stop_cell(cell: Annotated[str, typer.Argument(help="the cell that trains or is evaluated")], study: StudyArgument = None) -> None:
    """Ask a running cell to save its work and stop."""
    from pipelines import status as reporting

    print(reporting.stop(study_folder(study), cell))


@app.command()
def repro(
    folder: Annotated[Path, typer.Argument(help="a checkout that stays: dvc.lock and the outputs are kept there")],
    study: Annotated[str | None, typer.Argument(help="a study under its pipelines/; the one at its root if not given")] = None,
) -> None:
    """`dvc repro` in a persistent checkout, for `ray job submit --address URL -- strata repro DIR [STUDY]` on a cluster's head."""
    from pipelines.repro import repro as reproduce

    sys.exit(reproduce(folder, study))


@app.command()
def doctor(
    study: StudyArgument = None,
    tpu: Annotated[
        str | None, typer.Option(metavar="TOPOLOGY", help="compile the study's training steps for TPUs, as v5e:2x4; none needed")
    ] = None,
    only: Annotated[str, typer.Option(help="with --tpu: models at scales with this in them, as mesa-140m")] = "",
) -> None:
    """What this node offers, which kernels it would use, and what is missing, with the fix; with --tpu, what TPUs would make of a study."""
    if tpu is None:
        from pipelines import doctor as examination

        sys.exit(examination.show(repository()))
    from pipelines import tpu as examined

    sys.exit(examined.show(study_folder(study), tpu, only))


if __name__ == "__main__":
    os.environ.setdefault("DVC_NO_ANALYTICS", "1")
    main()
