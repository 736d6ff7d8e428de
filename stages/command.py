"""`python -m stages.<stage> spec.json OUT`: one stage alone, without DVC, Ray and MLflow."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stages.spec import Context, Spec, Stopped

Run = Callable[[Spec, Path, dict[str, Path], Context], None]

HISTORY = "history.parquet"  # of a training, beside its weights
EXIT_MISTAKE = 2
EXIT_STOPPED = 130

# Where a study keeps what a stage reads, seen from its folder, by the first part of the input's name.
WORKSPACE = {
    "vocabulary": "vocabulary",
    "training": "tokens/{name}",
    "validation": "packed/validation",
    "validation/": "tokens/{name}",
    "evaluation": "tokens/{name}",
    "items": "{name}",
    "budget": "packed/budgets/{budget}.json",
    "initial": "weights/{source}",
    "weights": "weights/{cell}",
    "history": "{name}.parquet",
    "evaluations": "{name}",
}


def default_input(name: str, cell: str, source: str | None = None) -> Path:
    """Where the input `name` of the spec of `cell` stands in a study's folder. A cell is named <model>-<scale>-<budget>.

    source: the cell whose weights it starts from, where it does; its spec does not tell.
    """
    if name == "initial" and source is None:
        raise ValueError("This training starts from another cell's weights; say where they are: --input initial=weights/<that cell>.")
    kind = "validation/" if name.startswith("validation/") else name.split("/")[0]
    return Path(WORKSPACE[kind].format(name=name, cell=cell, source=source, budget=cell.rsplit("-", 1)[-1]))


def main(run: Run, arguments: list[str] | None = None) -> None:
    """Parse the command line, run the stage, exit 0, 2 for a user's mistake, 130 when stopped with its work saved."""
    parser = argparse.ArgumentParser(description=(sys.modules["__main__"].__doc__ or "").strip().split("\n")[0])
    parser.add_argument("spec", type=Path, help="specs/<stage>/<cell>.json, as `strata run resolve` writes it")
    parser.add_argument("out", type=Path, help="folder for what the stage makes; half-done work in it is continued")
    parser.add_argument(
        "--input", action="append", default=[], metavar="NAME=PATH", help="an input's folder, where it is not in the study's usual place"
    )
    parser.add_argument("--source", action="append", default=[], metavar="FILE", help="a data file or URL (vocabulary, tokenize), in order")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or tpu")
    parser.add_argument("--backend", choices=("torch", "jax"), default="torch", help="whose arrays train and evaluate compute with")
    parser.add_argument("--profile", action="store_true", help="train: write a profile of a few steps into OUT/profile")
    parser.add_argument("--threads", type=int, help="processor threads; the library's own choice if not given")
    options = parser.parse_args(arguments)

    stopping: list[int] = []
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, lambda number, _: stopping.append(number))
    try:
        spec = Spec.load(options.spec)
        given = dict(item.split("=", 1) for item in options.input if "=" in item or _refuse(item))
        if unknown := sorted(set(given) - set(spec.inputs)):
            raise ValueError(f"This spec has no input {unknown[0]!r}; its inputs are {', '.join(spec.inputs) or 'none'}.")
        inputs = {name: Path(given[name]) if given.get(name) else default_input(name, options.spec.stem) for name in spec.inputs}
        options.out.mkdir(parents=True, exist_ok=True)
        context = Context(
            threads=options.threads,
            device=options.device,
            settings={"sources": options.source, "backend": options.backend, "profile": options.profile},
            progress_file=options.out / "progress.jsonl",
            stop_requested=lambda: bool(stopping),
            on_progress=show,
        )
        run(spec, options.out, inputs, context)
    except Stopped as stopped:
        print(f"Stopped: {stopped}", file=sys.stderr)
        sys.exit(EXIT_STOPPED)
    except ValueError as mistake:
        print(f"Error: {mistake}", file=sys.stderr)
        sys.exit(EXIT_MISTAKE)


def _refuse(item: str) -> bool:
    raise ValueError(f"--input takes NAME=PATH, found {item!r}.")


def show(line: dict[str, Any]) -> None:
    """A progress line as plain text for a log."""
    facts = [f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in line.items() if name != "time"]
    print("  ".join(facts), flush=True)
