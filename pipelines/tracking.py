"""MLflow: one experiment a study, one run a cell, found again by its key. What it holds is a copy; losing it loses nothing.

By default sqlite:///<root>/mlflow.db with artifacts in <root>/mlruns, so that a bare `mlflow ui` at the repository's root
shows the study. Everything is logged once, by whoever collects the artifact, and logging it again adds nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import shutil
import socket
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pipelines.head import locked
from stages.artifact import write_atomically
from stages.spec import Spec

POINTS = 200  # of a curve: the dense series stays in Parquet
PARAMETER_LENGTH = 500
SERVER_SECONDS = 3.0  # for a server to show that it is there
BUSY_SECONDS = 10.0  # for one that is there to find the time
OWED = Path(".strata") / "owed"
DIGEST_LENGTH = 36  # what MLflow keeps of a dataset's digest
BATCH = {"metrics": 1000, "params": 100, "tags": 100}
SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "1",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}
NOT_CURVES = ("step", "tokens", "seconds", "devices", "event")
STATUSES = {"succeeded": "FINISHED", "present": "FINISHED", "failed": "FAILED", "stopped": "KILLED", "lost": "FAILED"}


def warm() -> None:
    """Import MLflow in a thread, so that the seconds it takes pass while a stage runs elsewhere."""
    threading.Thread(target=_mlflow, name="import mlflow", daemon=True).start()


def remember(stage: str, cell: str, spec: Any, context: dict[str, Any], made: Path, *, root: Path, status: str = "FINISHED") -> bool:
    """Log what the stage `spec` of a cell has made in the folder `made`. context: what `resolve` wrote of the place.

    status: FINISHED, FAILED or KILLED (train: then what its history holds so far). Returns whether MLflow took it; never raises for MLflow.
    What it does not take, because a server is away or has too much to do, is owed, and told after the next that it takes: DVC runs no stage
    again for it.
    """
    owed = root / OWED / context["study"]
    mine = owed / f"{stage}@{cell}.json"
    if not _tell(stage, cell, spec, context, made, root, status):
        with contextlib.suppress(OSError):
            record = {"stage": stage, "cell": cell, "spec": spec.model_dump(), "made": str(made), "status": status}
            write_atomically(mine, json.dumps(record))
        return False
    mine.unlink(missing_ok=True)
    if owed.is_dir():
        with locked(root / ".strata" / "owed.lock"):
            _pay(owed, context, root)
    return True


def _pay(owed: Path, context: dict[str, Any], root: Path) -> None:
    """Tell what is owed, as far as it is taken."""
    for path in sorted(owed.glob("*.json")):
        record = _json(path)
        try:
            made, given = Path(record["made"]), (record["stage"], record["cell"], Spec.model_validate(record["spec"]))
            there = made.is_dir() and not _tell(*given, context, made, root, record["status"])
        except (KeyError, TypeError, ValueError):
            there = False  # damaged
        if there:
            return
        path.unlink(missing_ok=True)


def _tell(stage: str, cell: str, spec: Any, context: dict[str, Any], made: Path, root: Path, status: str) -> bool:
    tracker = Tracker(root, context["study"], context.get("tracking"))
    provenance = _json(made / "provenance.json")
    match stage:
        case "train":
            parameters = spec.parameters | {
                "cell": {name: value for name, value in context["cells"].get(cell, {}).items() if name != "name"}
            }
            names = [name for name, role in sorted(context["roles"].items()) if role == "training"]
            digest = _json(made / "artifact.json").get("inputs", {}).get("budget") or spec.inputs["budget"]
            history = made / "history.parquet"
            return tracker.log_training(
                cell,
                spec.key,
                parameters,
                history if history.is_file() else None,
                provenance,
                dataset=("+".join(names), digest),
                status=status,
            )
        case "evaluate":
            return tracker.log_evaluation(cell, spec.key, spec.inputs["weights"], made / "perplexity.parquet", provenance)
        case "analyze":
            return tracker.log_report(spec.key, made, provenance)
    return True


class Tracker:
    """One study's experiment. uri: the tracking server or database; MLFLOW_TRACKING_URI comes first, the default last.

    Every log_ method returns True, or False after one line of warning: MLflow never stops or fails anything.
    """

    def __init__(self, root: Path, study: str, uri: str | None = None) -> None:
        self.root, self.study = Path(root).absolute(), study
        self.uri = os.environ.get("MLFLOW_TRACKING_URI") or uri or f"sqlite:///{self.root / 'mlflow.db'}"

    def log_training(
        self,
        cell: str,
        key: str,
        parameters: dict[str, Any],
        history: Path | None,
        provenance: dict[str, Any],
        *,
        dataset: tuple[str, str],
        status: str = "FINISHED",
    ) -> bool:
        """The run of a cell. history: its Parquet file. dataset: (name, digest) of the rows it was trained on."""
        with self._run(f"train {cell}", key, cell) as run:
            if run is None or run.tags.get("strata.training") == status == "FINISHED":
                return run is not None
            run.start = int(1000 * provenance["started"]) if "started" in provenance else run.start
            run.parameters(flat(parameters))
            run.tags_of({**_tags(provenance), "strata.stage": "train"})
            run.dataset(*dataset)
            if history is not None:
                run.curves(curves(history, run.start))
            run.folder_or_file(history.parent / "provenance.json" if history else None, "training")
            run.end(status, "strata.training")
        return not run.failed

    def log_evaluation(self, cell: str, key: str, train_key: str, perplexity: Path, provenance: dict[str, Any]) -> bool:
        """What an evaluation adds to the run of its weights. key: the evaluation's. perplexity: its table, a Parquet file; scores.parquet may stand beside it."""
        with self._run(f"evaluate {cell}", train_key, cell) as run:
            if run is None or run.tags.get("strata.evaluation") == key:
                return run is not None
            run.metrics(_perplexities(perplexity) | _scores(perplexity.with_name("scores.parquet")))
            run.tags_of(
                {f"evaluation.{name}": value for name, value in _tags(provenance).items() if name.startswith(("kernels", "device"))}
            )
            run.folder_or_file(perplexity, "evaluation")
            run.end("FINISHED", "strata.evaluation", key)
        return not run.failed

    def log_report(self, key: str, folder: Path, provenance: dict[str, Any] | None = None) -> bool:
        """A run of its own for the study's analysis: report, tables and figures as artifacts, metrics.json as metrics."""
        with self._run("report", key, "report") as run:
            if run is None or run.tags.get("strata.report") == key:
                return run is not None
            numbers = {
                name: value
                for name, value in flat(_json(folder / "metrics.json"), separator="/", plain=True).items()
                if isinstance(value, int | float)
            }
            run.metrics({_name(name): float(value) for name, value in numbers.items()})
            run.tags_of({**_tags(provenance or {}), "strata.stage": "analyze"})
            for name in ("report.html", "metrics.json", "tables", "figures"):
                run.folder_or_file(folder / name, None)
            run.end("FINISHED", "strata.report", key)
        return not run.failed

    @contextlib.contextmanager
    def _run(self, what: str, key: str, name: str) -> Iterator[Any]:
        """The run of `key`, begun if there is none; None, after a warning, where MLflow is away. MLflow's errors inside end here too."""
        run = None
        try:
            self._answers()
            mlflow = _mlflow()
        except (OSError, ImportError) as error:
            self._warn(what, error)
            yield None
            return
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        try:
            with self._database():
                client = mlflow.MlflowClient(tracking_uri=self.uri)
                run = _Run(client, self._experiment(client), key, name, self.study)
                yield run
        except (MlflowException, SQLAlchemyError, OSError) as error:
            self._warn(what, error)
            if run is None:
                yield None
            else:
                run.failed = True

    @contextlib.contextmanager
    def _database(self) -> Iterator[None]:
        """For a database in a file: one process at a time, made whole before anybody sees it, and relative to the root."""
        if not self.uri.startswith("sqlite:///"):
            yield
            return
        with locked(self.root / ".strata" / "tracking.lock"), contextlib.chdir(self.root):
            path = Path(self.uri.removeprefix("sqlite:///"))
            if not path.exists():
                self._create(path)
            yield

    def _create(self, path: Path) -> None:
        """Make an empty database, in memory where there is such a place: its many migrations each wait for the disk."""
        partial = path.with_name(f".{path.name}.partial")
        with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
            _mlflow().MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db").get_experiment("0")
            shutil.copyfile(f"{folder}/mlflow.db", partial)
        os.replace(partial, path)

    def _answers(self) -> None:
        """Raise OSError soon where a server is away, instead of after MLflow's own patience. One that only has much to do is waited for."""
        if not self.uri.startswith(("http://", "https://")):
            return
        place = urllib.parse.urlsplit(self.uri)
        socket.create_connection((place.hostname, place.port or {"http": 80, "https": 443}[place.scheme]), timeout=SERVER_SECONDS).close()
        try:
            urllib.request.urlopen(_without_password(self.uri).rstrip("/") + "/health", timeout=BUSY_SECONDS).close()
        except urllib.error.HTTPError:
            pass  # somebody answers, whatever he says

    def _experiment(self, client: Any) -> str:
        from mlflow.exceptions import MlflowException

        found = client.get_experiment_by_name(self.study)
        if found is None:
            place = (self.root / "mlruns" / self.study).as_uri() if self.uri.startswith("sqlite:") else None
            try:
                return client.create_experiment(self.study, artifact_location=place)
            except MlflowException:
                found = client.get_experiment_by_name(self.study)  # somebody else's came first
                if found is None:
                    raise
        if found.lifecycle_stage == "deleted":
            client.restore_experiment(found.experiment_id)
        return found.experiment_id

    def _warn(self, what: str, error: Exception) -> None:
        reason = " ".join(str(error).split())[:200]
        print(f"Warning: MLflow at {clean(_without_password(self.uri))} did not take {what} ({clean(reason)}); the results stand, and it is logged after the next that MLflow takes.", file=sys.stderr, flush=True)  # fmt: skip


class _Run:
    """One MLflow run, found by its key or begun. Each method adds only what is not there yet."""

    def __init__(self, client: Any, experiment: str, key: str, name: str, study: str) -> None:
        self.client, self.failed = client, False
        found = client.search_runs([experiment], filter_string=f"tags.`strata.key` = '{key}'", max_results=1)
        tags = {"strata.key": key, "strata.study": study, "strata.cell": name, "mlflow.source.name": "strata"}
        run = found[0] if found else client.create_run(experiment, run_name=name, tags=tags)
        self.id, self.start, self.fresh = run.info.run_id, run.info.start_time, not found
        self.tags, self.known, self.measured = dict(run.data.tags), set(run.data.params), set(run.data.metrics)

    def parameters(self, values: dict[str, str]) -> None:
        from mlflow.entities import Param

        self._log("params", [Param(name, value) for name, value in values.items() if name not in self.known])

    def tags_of(self, values: dict[str, str]) -> None:
        from mlflow.entities import RunTag

        self._log("tags", [RunTag(name, value) for name, value in values.items()])

    def metrics(self, values: dict[str, float]) -> None:
        """Numbers without a step; of a name that is there already the new value is what MLflow shows."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._log("metrics", [Metric(name, value, now, 0) for name, value in values.items()])

    def curves(self, points: Iterable[tuple[str, float, int, int]]) -> None:
        """(name, value, milliseconds, step): those whose name and step are there already are left out."""
        from mlflow.entities import Metric

        points = list(points)
        there = {
            (name, point.step)
            for name in {point[0] for point in points} & self.measured
            for point in self.client.get_metric_history(self.id, name)
        }
        self._log("metrics", [Metric(*point) for point in points if (point[0], point[3]) not in there])

    def _log(self, kind: str, values: list[Any]) -> None:
        for begin in range(0, len(values), BATCH[kind]):
            self.client.log_batch(self.id, **{kind: values[begin : begin + BATCH[kind]]})

    def dataset(self, name: str, digest: str) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        source = json.dumps({"digest": digest})
        short = digest.rpartition(":")[2][:DIGEST_LENGTH]
        self.client.log_inputs(
            self.id, datasets=[DatasetInput(Dataset(name, short, "strata", source), [InputTag("mlflow.data.context", "training")])]
        )

    def folder_or_file(self, path: Path | None, inside: str | None) -> None:
        if path is not None and path.is_dir():
            self.client.log_artifacts(self.id, str(path), f"{inside}/{path.name}" if inside else path.name)
        elif path is not None and path.is_file():
            self.client.log_artifact(self.id, str(path), inside)

    def end(self, status: str, tag: str, value: str | None = None) -> None:
        """How the work ended; last of all the mark that its logging is complete."""
        self.client.set_terminated(self.id, status)
        self.client.set_tag(self.id, tag, value or status)


def _mlflow() -> Any:
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    for name in ("alembic", "mlflow"):
        logging.getLogger(name).setLevel(logging.ERROR)
    import mlflow

    return mlflow


# What is logged


def curves(history: Path, started: int) -> Iterator[tuple[str, float, int, int]]:
    """About 200 points of every curve of a history file: (name, value, milliseconds since 1970, step). Missing values are left out."""
    import pyarrow.parquet as pq

    table = pq.read_table(history)
    stride = math.ceil(table.num_rows / POINTS) or 1
    chosen = sorted({*range(0, table.num_rows, stride), table.num_rows - 1}) if table.num_rows else []
    seconds = 0.0
    times = [started + round(1000 * (seconds := seconds + (value or 0.0))) for value in table["seconds"].to_pylist()]
    steps = table["step"].to_pylist()
    for name in table.column_names:
        if name not in NOT_CURVES:
            values = table[name].to_pylist()
            yield from ((name, float(values[row]), times[row], steps[row]) for row in chosen if values[row] is not None)


def _perplexities(path: Path) -> dict[str, float]:
    """perplexity/<set>/<length>/<setting> -> value."""
    import pyarrow.parquet as pq

    rows = pq.read_table(path, columns=["set", "length", "setting", "perplexity"]).to_pylist()
    return {
        _name(f"perplexity/{row['set']}/{row['length']}/{row['setting']}".rstrip("/")): row["perplexity"]
        for row in rows
        if row["perplexity"] is not None
    }


def _scores(path: Path) -> dict[str, float]:
    """tasks/<task>/<shots>/<setting> -> the score's mean over draws; nothing where there is no table."""
    import pyarrow.parquet as pq

    found: dict[str, list[float]] = {}
    for row in pq.read_table(path, columns=["task", "shots", "setting", "score"]).to_pylist() if path.is_file() else ():
        found.setdefault(_name(f"tasks/{row['task']}/{row['shots']}/{row['setting']}".rstrip("/")), []).append(row["score"])
    return {name: sum(scores) / len(scores) for name, scores in found.items()}


def _name(text: str) -> str:
    """A metric's name with the characters that MLflow allows."""
    return re.sub(r"[^\w\-. /]", "_", text)


SECRET = re.compile(
    r"(^|[._-])(password|passwd|secret|credentials?|api_?key|access_?key|(access|auth|bearer|session)_?token|authorization)([._-]|$)", re.I
)


def clean(text: str) -> str:
    """Text without what gives access: passwords in URLs, signed queries, bearer tokens."""
    text = re.sub(r"(\w+://)[^/\s@]+@", r"\1", text)
    text = re.sub(r"(?i)([?&][^=&\s]*(?:token|key|secret|signature|sig|credential|password)[^=&\s]*=)[^&\s\"']+", r"\1...", text)
    return re.sub(r"(?i)\b(bearer|basic)\s+[\w.+/=-]{8,}", r"\1 ...", text)


def flat(value: Any, name: str = "", *, separator: str = ".", plain: bool = False) -> dict[str, Any]:
    """Nested tables as one table of dotted names; values as text of at most 500 characters (or as they are), secrets left out."""
    if isinstance(value, dict):
        found: dict[str, Any] = {}
        for key, item in value.items():
            found |= flat(item, f"{name}{separator}{key}" if name else str(key), separator=separator, plain=plain)
        return found
    if SECRET.search(name):
        return {}
    if plain:
        return {name: value}
    text = clean(value if isinstance(value, str) else json.dumps(value, default=str))
    return {name: text if len(text) <= PARAMETER_LENGTH else text[: PARAMETER_LENGTH - 3] + "..."}


def _tags(provenance: dict[str, Any]) -> dict[str, str]:
    """Provenance as tags; the commit also under the name that MLflow's pages know."""
    tags = {f"{name}": value for name, value in flat(provenance).items() if name not in ("key", "stage")}
    if "commit" in provenance:
        tags["mlflow.source.git.commit"] = str(provenance["commit"])
    return tags


def _without_password(uri: str) -> str:
    parts = urllib.parse.urlsplit(uri)
    return uri if parts.username is None and parts.password is None else parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
