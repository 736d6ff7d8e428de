"""`strata doctor --tpu TOPOLOGY`: whether a study's training steps compile for TPUs and fit into their memory, by their compiler alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from models.backends import jax_ahead
from models.backends.jax_ahead import GIB, Compiled, Step
from pipelines import reading, tuning
from pipelines.doctor import Finding
from pipelines.params import Params, cells

MINUTES = 1  # a training step takes about that long to compile


def show(folder: Path, topology: str, only: str) -> int:
    """Print what is found, each as soon as it is; the exit code says whether something is wrong."""
    params = reading.load(folder)
    jax_ahead.chip(topology)  # a topology without figures is a mistake before anything is compiled
    steps = wanted(params, only)
    if not steps:
        known = ", ".join(dict.fromkeys(f"{cell.model}-{cell.scale}" for cell in cells(params)))
        raise ValueError(f"--only {only!r} is in no model at a scale of this study: {known}.")
    print(
        f"{len(steps)} training steps for {topology}, one row of {params.packing.sequence_length} tokens a chip, about {MINUTES} minute each"
    )
    width, wrong = max(map(len, steps)), False
    for finding in examine(steps, topology):
        wrong |= finding.fix is not None
        print(f"{'!' if finding.fix else ' '} {finding.what:{width}}  {finding.found}", flush=True)
        if finding.fix:
            print(f"  {'':{width}}  fix: {finding.fix}", flush=True)
    return int(wrong)


def wanted(params: Params, only: str) -> dict[str, Step]:
    """The training step of each model at each scale of the study, by "<model>-<scale>"."""
    found = {}
    for cell in cells(params):
        name, training = f"{cell.model}-{cell.scale}", tuning.training_of(params, cell.model)
        if only in name:
            entry, scale = tuning.planned(params, cell.model, cell.scale), params.scales[cell.scale].model_dump()
            found[name] = Step(
                entry,
                scale,
                params.vocabulary.size,
                length=params.packing.sequence_length,
                precision=training.precision,
                segments=training.reset,
            )
    return found


def examine(steps: dict[str, Step], topology: str) -> Iterator[Finding]:
    """Each step with its parameters whole on every chip; what does not fit so, once more with them split over all chips."""
    large = {}
    for (name, step), compiled in zip(steps.items(), jax_ahead.ask(topology, list(steps.values())), strict=True):
        if compiled.error and "HBM" in compiled.error:
            large[name] = replace(step, fsdp=jax_ahead.chips(topology), rematerialise=True)
        else:
            yield _finding(name, compiled, topology)
    for (name, step), compiled in zip(large.items(), jax_ahead.ask(topology, list(large.values())) if large else (), strict=True):
        yield _finding(name, compiled, topology, split=step.fsdp)


def _finding(name: str, compiled: Compiled, topology: str, split: int = 1) -> Finding:
    if compiled.error and "HBM" in compiled.error:
        return Finding(name, f"does not fit, its parameters split over {split} chips: {_first(compiled)}", "use a larger topology")
    if compiled.error:
        return Finding(name, f"is refused: {_first(compiled)}", "report it: the kernels should compile for every TPU")
    kernels = ", ".join(f"{operation} by {kernel}" for operation, kernel in compiled.chosen.items())
    how = f", parameters split over {split} chips (fsdp: {split})" if split > 1 else ""
    memory = f"{compiled.memory / GIB:.1f} of {jax_ahead.chip(topology).hbm / GIB:.1f} GiB a chip"
    return Finding(name, f"compiles in {compiled.seconds:.0f} s; {memory}{how}; {kernels}")


def _first(compiled: Compiled) -> str:
    return compiled.error.strip().splitlines()[0][:300]
