"""Analyze: the histories and evaluations of a study's cells to tables, figures, and one report."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from stages import artifact, provenance
from stages.command import main
from stages.report.parameters import Parameters
from stages.spec import Context, Spec

DIGITS = 6  # significant digits in metrics.json: fewer than any difference of rounding


def run(spec: Spec, out: Path, inputs: dict[str, Path], context: Context) -> None:
    """Write tables/*.parquet, figures/*.png, plots/*.json, metrics.json and report.html of the cells that the spec lists.

    inputs: "history/<cell>" -> a history.parquet, "evaluations/<cell>" -> an evaluation's folder. Nothing else is read.
    ValueError where one of them is missing, damaged, or was made under another key than the spec's.
    """
    from stages import schemas
    from stages.report import figures, render, style, tables
    from stages.report.study import Study

    started = time.time()
    try:
        parameters = Parameters.model_validate(spec.parameters)
    except ValidationError as error:
        first = error.errors()[0]
        what = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
        raise ValueError(f"This analysis' parameters are not valid ({what}); `strata run resolve` writes the spec anew.") from error
    study = Study.load(parameters, spec, inputs)

    files: list[str] = []
    known: dict[str, str] = {}

    def wrote(name: str) -> Path:
        files.append(name)
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        return out / name

    made = {}
    for number, (name, make) in enumerate(tables.TABLES.items(), start=1):
        if context.stop_requested():
            from stages.spec import Stopped

            raise Stopped("the analysis is made again from its beginning, which takes little time.")
        made[name] = make(study)
        context.progress(step=number, of=len(tables.TABLES), table=name, rows=made[name].num_rows)

    context.fence()
    for name, table in made.items():
        path = wrote(f"tables/{name}.parquet")
        known[f"tables/{name}.parquet"] = schemas.write(path, table, name=schemas.FREE, key=spec.key)
    drawn = figures.draw(study, made, style.Style.of(study))
    for name, figure in drawn.items():
        wrote(f"figures/{name}.png").write_bytes(figure.png)
    for name, rows in tables.plots(made).items():
        artifact.write_atomically(wrote(f"plots/{name}.json"), json.dumps(rows, indent=0, allow_nan=False) + "\n")
    artifact.write_atomically(wrote("metrics.json"), json.dumps(metrics(study, made), indent=1, sort_keys=True, allow_nan=False) + "\n")
    artifact.write_atomically(wrote("report.html"), render.render(study, made, drawn))

    _remove_strangers(out, files)
    provenance.write(out, spec, context, started=started)
    artifact.write(out, key=spec.key, stage=spec.stage, files=files, inputs=study.digests, known=known)


def metrics(study: Any, made: dict[str, Any]) -> dict[str, Any]:
    """{cell: {"loss": final training loss, "perplexity": {set: at the training length}}}; no timings, null where not finite."""
    from stages.evaluation.parameters import TRAINED
    from stages.report.tables import rounded

    found: dict[str, Any] = {
        row["cell"]: {"loss": rounded(row["final_loss"], DIGITS), "perplexity": {}} for row in made["models"].to_pylist()
    }
    for row in made["perplexity"].to_pylist():
        if row["length"] == study.length and row["setting"] == TRAINED:
            found[row["cell"]]["perplexity"][row["set"]] = rounded(row["perplexity"], DIGITS)
    return found


def _remove_strangers(out: Path, files: list[str]) -> None:
    """Remove what an earlier attempt under other parameters left in the folders that are this stage's own."""
    for folder in ("tables", "figures", "plots"):
        for path in (out / folder).glob("*"):
            if f"{folder}/{path.name}" not in files:
                path.unlink()


if __name__ == "__main__":
    main(run)
