"""Evaluate: what a model's weights do on text sets, on tasks and inside, unit by unit.

Units. Kinds of unit are in stages/evaluation/: texts (a set, length and setting of the solver), asked (a task, number of shots and
setting), inside (the layers' internals). Each has its key: of the weights, the set or items, the length or the task's own parameters,
the setting and the code's versions. Only those that are missing are made; then the tables over all of them are written.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from stages import artifact, course, engine, initial, provenance, schemas, units
from stages.command import main
from stages.evaluation.asked import task_units
from stages.evaluation.inside import inside_units
from stages.evaluation.parameters import Parameters
from stages.evaluation.scorer import Scorer
from stages.evaluation.texts import texts
from stages.evaluation.unit import Unit, together
from stages.spec import Context, Spec

if TYPE_CHECKING:
    import pyarrow as pa

    from models.backbone import Model

ALWAYS = ("perplexity", "positions")  # tables that are there whatever was evaluated


def wanted(spec: Spec, parameters: Parameters, model: Model) -> list[Unit]:
    """Every unit of an evaluation, in the order in which they are made."""
    return [*texts(spec, parameters, model), *task_units(spec, parameters, model), *inside_units(spec, parameters, model)]


def run(spec: Spec, out: Path, inputs: dict[str, Path], context: Context) -> None:
    """Write the units `<set>-<length>[-<setting>]/` (nll, positions and perplexity.parquet), `<task>@<shots>[-<setting>]/` (tasks and
    scores.parquet) and `internals/`, and over all of them perplexity.parquet, positions.parquet, as trained, and, where there are any,
    domains.parquet and scores.parquet; and what was seen inside while the weights were trained, where it was looked at.

    inputs: "weights", "validation", "evaluation/<set>", "items/<task>", "vocabulary" (for tasks): their folders. context.settings: batch_tokens, backend, compile.
    Raises Stopped when asked to stop; the units that are complete are kept.
    """
    import kernels
    import models

    started = time.time()
    try:
        parameters = Parameters.model_validate(spec.parameters)
    except ValidationError as error:
        raise ValueError(f"This evaluation's parameters are not valid ({error}); `strata run resolve` writes the spec anew.") from error
    entry = initial.trained_entry(inputs["weights"], parameters.model)
    model = models.build(entry, parameters.scale, vocab_size=parameters.vocab_size, backend=engine.backend(context))
    everything = wanted(spec, parameters, model)
    missing = [unit for unit in everything if not units.complete(out / unit.name, unit.key)]
    needed = {"weights", *(name for unit in missing for name in unit.inputs)} if missing else set()
    digests = {name: artifact.read(inputs[name], key=key, content=name in needed)["digest"] for name, key in spec.inputs.items()}

    facts: dict[str, Any] = {"computed": [unit.name for unit in missing]}
    with engine.told_of_full_disk(out):
        if missing:
            scorer = Scorer(model, parameters, inputs["weights"], context)
            facts |= {"backend": model.backend, "device": model.framework.device_name(scorer.device), "units": scorer.done}
            for step, unit in enumerate(missing, start=len(everything) - len(missing)):
                context.fence()
                scorer.begin(unit.name, step=step, of=len(everything))
                given = {name: digests[name] for name in ("weights", *unit.inputs)}
                with units.making(artifact.inside(out, unit.name), key=unit.key, stage=spec.stage, inputs=given) as folder:
                    unit.make(folder, inputs, scorer)
                    context.fence()
        context.fence()
        units.keep_only(out, {unit.name for unit in everything})
        known = _collect(out, everything, spec.key) | course.hand_on(inputs["weights"], out, spec.key)
        provenance.write(out, spec, context, started=started, kernels=kernels.chosen() if missing else {}, **facts)
        artifact.write(out, key=spec.key, stage=spec.stage, files=known, inputs=digests, known=known)
        context.progress(step=len(everything), of=len(everything))


def _collect(out: Path, made: Sequence[Unit], key: str) -> dict[str, str]:
    """Write the tables over all units. Returns the digest of every file of the artifact, by its name."""
    tables: dict[str, list[pa.Table]] = {name: [] for name in ALWAYS}
    for unit in made:
        for name, table in unit.tables(out / unit.name).items():
            tables.setdefault(name, []).append(table)
    known = {f"{unit.name}/{file}": facts["digest"] for unit in made for file, facts in artifact.read(out / unit.name)["files"].items()}
    for name, parts in tables.items():
        known[f"{name}.parquet"] = schemas.write(out / f"{name}.parquet", together(name, parts), name=name, key=key)
    return known


if __name__ == "__main__":
    main(run)
