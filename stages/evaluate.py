"""Evaluate: next-token losses of a model's weights over text sets, at several lengths and, for layers with a solver, settings of it.

What is scored. "validation" is the packed validation rows, each a sequence of `sequence_length`; a target that is BOS is not scored.
Every other set is documents. A document of n tokens, BOS before it, is cut at a length L into windows that do not overlap, the
first at its start: window w is given the tokens wL .. wL + L - 1 (BOS is number 0) and scored on wL + 1 .. wL + L. So each token
is scored once, knowing what came before it in its window alone; the last window is shorter, and a document of up to L tokens is
scored whole. Position k of a window is the k-th token scored.

perplexity.parquet is over every window, domains.parquet by the documents' domains, in a set that has several. positions.parquet is over the windows that start at their document's start (`start` 0 in
nll.parquet), so that position k is the document's k-th token and the mean so far (MesaNet, Eq. 54) that of its first L tokens.
A loss that is not a number, from a model that fails there, counts as infinite.

Tasks. A task's items are asked as stages/tasks/ has it, at each of its numbers of shots: unit `<task>@<shots>[-<setting>]`, with
tasks.parquet (an item and draw a row) and scores.parquet.

Internals. Where `internals` is not 0 and a layer can say what it does inside (Mesa), unit `internals`: see stages/internals.py.

Units. One per set, length and setting, and one per task, number of shots and setting, each with its key: of the weights, the set or
items, the length or the task's own parameters, the setting and the code's versions. Only those that are missing are computed.

Shapes: B batch, T time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field, StringConstraints, ValidationError, model_validator

from stages import artifact, engine, initial, internals, measures, provenance, schemas, units
from stages.command import main
from stages.spec import Context, Spec, Stopped, Strict
from stages.tasks.entry import SCHEMAS, Scoring

if TYPE_CHECKING:
    import pyarrow as pa

    from models.backbone import Model
    from stages.tokenizer import Tokenizer

VALIDATION = "validation"
DOMAINS = "domains.parquet"
TRAINED = ""  # the setting that is none: solved as in training
BATCH_TOKENS = 1 << 15
PROGRESS_SECONDS = 1.0
ROWS = 256  # of validation, read at once
POOL_TOKENS = 1 << 22  # sequences are sorted by length within so many tokens

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]


class Setting(Strict):
    """How a layer's solver runs in inference; what is not given is as in training.

    steps: its cap. eps: its tolerance. criterion: what that is relative to (see the layer). solve: False reads out without it.
    """

    steps: int | None = Field(default=None, ge=0)
    eps: float | None = Field(default=None, ge=0)
    criterion: str | None = None
    solve: bool | None = None

    @model_validator(mode="after")
    def _something(self) -> Setting:
        if not self.options():
            raise ValueError("a setting gives at least one of steps, eps, criterion, solve")
        return self

    def options(self) -> dict[str, Any]:
        """What it changes, by the names of the layer's own options."""
        return self.model_dump(exclude_none=True)


class Evaluation(Strict):
    """`evaluation:` of params.yaml.

    lengths: of the windows that documents are cut into. settings: name -> how solvers run, each evaluated besides as trained.
    internals: validation sequences on which layers that can are looked at inside; 0: none.
    batch_tokens: tokens scored at once; never in a spec (nor in `model_dump`), since it changes no result beyond rounding.
    """

    lengths: list[Annotated[int, Field(ge=1)]] = Field(min_length=1)
    settings: dict[Name, Setting] = {}
    internals: int = Field(default=0, ge=0)
    batch_tokens: int = Field(default=BATCH_TOKENS, ge=1, exclude=True)

    @model_validator(mode="after")
    def _one_of_each(self) -> Evaluation:
        if twice := sorted({length for length in self.lengths if self.lengths.count(length) > 1}):
            raise ValueError(f"length {twice[0]} is listed twice")
        return self


class Asked(Scoring):
    """A task as a spec has it. code: its kind's version. group: the mean that its score goes into. settings: it is evaluated under besides."""

    code: int = 1
    group: str | None = None
    settings: list[Name] = []


class Parameters(Strict):
    """What an evaluation's spec holds: its cell's model, what it was trained with, and what is evaluated."""

    model: dict[str, Any]
    scale: dict[str, int]
    vocab_size: int = Field(ge=1)
    bos: int = Field(ge=0)
    sequence_length: int = Field(ge=1)
    reset: bool = False
    precision: engine.Precision = "float32"
    lengths: list[Annotated[int, Field(ge=1)]]
    settings: dict[Name, Setting] = {}
    internals: int = Field(default=0, ge=0)
    internals_code: int = 1  # the version of what is looked at
    tasks: dict[str, Asked] = {}


@dataclass(frozen=True)
class Sequence:
    """One to be scored. tokens: int32 [T + 1]. segments: int32 [T], or None where nothing is reset. start: its first target's place in its document."""

    tokens: np.ndarray
    source: str
    start: int = 0
    segments: np.ndarray | None = None

    @property
    def length(self) -> int:
        return len(self.tokens) - 1


@dataclass(frozen=True)
class Unit:
    """A set at a length under a setting. input: the set's name among the spec's inputs."""

    input: str
    length: int
    setting: str
    options: dict[str, Any]
    key: str

    @property
    def set(self) -> str:
        return self.input.removeprefix("evaluation/")

    @property
    def name(self) -> str:
        """Its folder's."""
        return "-".join([self.set, str(self.length), *([self.setting] if self.setting else [])])


@dataclass(frozen=True)
class TaskUnit:
    """A task at a number of shots under a setting."""

    task: str
    asked: Asked
    shots: int
    setting: str
    options: dict[str, Any]
    key: str

    @property
    def name(self) -> str:
        """Its folder's: no set's, which have no @."""
        return "-".join([f"{self.task}@{self.shots}", *([self.setting] if self.setting else [])])

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of its items, and of its examples' where it has any of their own."""
        return (f"items/{self.task}", f"items/{self.task}.examples")


@dataclass(frozen=True)
class InternalsUnit:
    """What a model's layers do inside, on the first `sequences` validation rows."""

    sequences: int
    key: str
    name: str = internals.NAME
    input: str = VALIDATION


def takes(model: Model, setting: Setting) -> bool:
    """Whether some layer of the model has what a setting sets."""
    return any(set(setting.options()) <= set(layer.options()) for layer in model.layers)


def units_of(spec: Spec, parameters: Parameters, model: Model) -> list[Unit]:
    """Every unit of an evaluation: the validation rows, then the sets by name, at each length; as trained, then each setting."""
    settings = {TRAINED: {}} | {name: setting.options() for name, setting in parameters.settings.items() if takes(model, setting)}
    sets = [(VALIDATION, parameters.sequence_length)] if VALIDATION in spec.inputs else []
    sets += [(name, length) for name in sorted(spec.inputs) if name.startswith("evaluation/") for length in parameters.lengths]
    if f"evaluation/{VALIDATION}" in spec.inputs:
        raise ValueError(f"A text set cannot be named {VALIDATION!r}: the packed validation rows are. Give it another name.")
    return [
        Unit(
            name,
            length,
            setting,
            options,
            spec.unit_key(weights=spec.inputs["weights"], set=spec.inputs[name], length=length, setting=options),
        )
        for name, length in sets
        for setting, options in settings.items()
    ]


def task_units(spec: Spec, parameters: Parameters, model: Model) -> list[TaskUnit]:
    """Every unit of an evaluation's tasks, by name, at each number of shots; as trained, then under the task's settings."""
    found = []
    for task, asked in sorted(parameters.tasks.items()):
        settings = {TRAINED: {}} | {
            name: parameters.settings[name].options() for name in asked.settings if takes(model, parameters.settings[name])
        }
        given = {name: key for name, key in spec.inputs.items() if name in (f"items/{task}", f"items/{task}.examples")}
        scoring = asked.model_dump(exclude={"shots", "group", "settings"}, exclude_defaults=True)
        if not max(asked.shots):
            scoring = {name: value for name, value in scoring.items() if name != "draws"}
        if asked.window is None:
            scoring["window"] = parameters.sequence_length
        for shots in asked.shots:
            for setting, options in settings.items():
                key = spec.unit_key(weights=spec.inputs["weights"], task=task, items=given, scoring=scoring, shots=shots, setting=options)
                found.append(TaskUnit(task, asked, shots, setting, options, key))
    return found


def internals_units(spec: Spec, parameters: Parameters, model: Model) -> list[InternalsUnit]:
    """The unit of the model's internals, where some are wanted, there are validation rows, and a layer has any."""
    from models import internals as inside

    if not parameters.internals or VALIDATION not in spec.inputs or not inside.can(model):
        return []
    depends_on = {
        "weights": spec.inputs["weights"],
        "set": spec.inputs[VALIDATION],
        "internals": parameters.internals,
        "code": parameters.internals_code,
    }
    return [InternalsUnit(parameters.internals, spec.unit_key(**depends_on))]


def run(spec: Spec, out: Path, inputs: dict[str, Path], context: Context) -> None:
    """Write the units `<set>-<length>[-<setting>]/` (nll, positions and perplexity.parquet) and `<task>@<shots>[-<setting>]/` (tasks and
    scores.parquet), `internals/` (internals.parquet), and over all of them perplexity.parquet, as trained, positions.parquet and, where there are tasks, scores.parquet.

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
    wanted = [*units_of(spec, parameters, model), *task_units(spec, parameters, model), *internals_units(spec, parameters, model)]
    missing = [unit for unit in wanted if not units.complete(out / unit.name, unit.key)]
    needed = {"weights", *(name for unit in missing for name in _inputs(unit, spec))} if missing else set()
    digests = {name: artifact.read(inputs[name], key=key, content=name in needed)["digest"] for name, key in spec.inputs.items()}

    facts: dict[str, Any] = {"computed": [unit.name for unit in missing]}
    with engine.told_of_full_disk(out):
        if missing:
            scorer = Scorer(model, parameters, inputs["weights"], context)
            facts |= {"backend": model.backend, "device": model.framework.device_name(scorer.device)}
            for done, unit in enumerate(missing, start=len(wanted) - len(missing)):
                context.fence()
                scorer.progress = {"step": done, "of": len(wanted), "unit": unit.name}
                given = {name: digests[name] for name in ("weights", *_inputs(unit, spec))}
                with units.making(out / unit.name, key=unit.key, stage=spec.stage, inputs=given) as folder:
                    if isinstance(unit, TaskUnit):
                        scorer.ask(unit, folder, inputs)
                    elif isinstance(unit, InternalsUnit):
                        scorer.look(unit, folder, _rows(inputs[unit.input], parameters))
                    else:
                        _make(unit, folder, _sequences(unit, inputs[unit.input], parameters), scorer)
                    context.fence()
        context.fence()
        units.keep_only(out, {unit.name for unit in wanted})
        known = _collect(out, wanted, spec.key)
        provenance.write(out, spec, context, started=started, kernels=kernels.chosen() if missing else {}, **facts)
        artifact.write(out, key=spec.key, stage=spec.stage, files=known, inputs=digests, known=known)
        context.progress(step=len(wanted), of=len(wanted))


def _inputs(unit: Unit | TaskUnit | InternalsUnit, spec: Spec) -> list[str]:
    """The names of the inputs, beside the weights, that a unit is made from."""
    if not isinstance(unit, TaskUnit):
        return [unit.input]
    return ["vocabulary", *(name for name in unit.inputs if name in spec.inputs)]


# Sequences


def _sequences(unit: Unit, folder: Path, parameters: Parameters) -> Iterator[Sequence]:
    """What a unit scores, in the set's order."""
    if unit.input == VALIDATION:
        return _rows(folder, parameters)
    return windows(_documents(folder), length=unit.length, bos=parameters.bos)


def _rows(folder: Path, parameters: Parameters) -> Iterator[Sequence]:
    from stages.rows import validation

    rows = validation(folder)
    if rows.sequence_length != parameters.sequence_length:
        raise ValueError(
            f"{folder} has rows of {rows.sequence_length} tokens, wanted {parameters.sequence_length}. Run the pack stage again."
        )
    for start in range(0, len(rows), ROWS):
        tokens_NT1, lengths = rows.read(start, min(start + ROWS, len(rows)))
        segments_NT = engine.segment_ids(lengths, parameters.sequence_length)
        for tokens, segments in zip(tokens_NT1.astype(np.int32), segments_NT, strict=True):
            yield Sequence(tokens, VALIDATION, 0, segments if parameters.reset else None)


def _documents(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """(source, tokens) of every document of a tokens folder."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for path in (folder / name for name in artifact.read(folder)["files"] if name.endswith("tokens.parquet")):
        schemas.metadata(path, "tokens")
        try:
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(batch_size=256, columns=["source", "tokens"]):
                    for source, tokens in zip(batch["source"].to_pylist(), batch["tokens"], strict=True):
                        yield source, tokens.values.to_numpy()
        except (OSError, pa.ArrowException) as error:
            raise ValueError(f"{path} is not a whole Parquet file ({error}). Delete it and tokenize again.") from error


def windows(documents: Iterable[tuple[str, np.ndarray]], *, length: int, bos: int) -> Iterator[Sequence]:
    """Documents, BOS before each, cut as the module's docstring says."""
    for source, document in documents:
        tokens = np.concatenate([[bos], document]).astype(np.int32)
        for start in range(0, len(document), length):
            yield Sequence(tokens[start : start + length + 1], source, start)


# Scoring


class Scorer:
    """A model with its weights on a device, and the losses it gives."""

    def __init__(self, model: Model, parameters: Parameters, weights: Path, context: Context) -> None:
        from models import checkpoint

        self.parameters, self.context = parameters, context
        self.device = engine.device(model, context, parameters.precision)
        self.trainer = engine.trainer(model, context, device=self.device, precision=parameters.precision)
        self.trainer.load_weights(checkpoint.load(weights / "weights.safetensors")[0])
        self.batch_tokens = context.settings.get("batch_tokens", BATCH_TOKENS)
        self.progress: dict[str, Any] = {}  # which unit is being made
        self.shown = float("-inf")
        self.tokenizer: Tokenizer | None = None

    def losses(self, sequences: list[Sequence], unit: Unit, solver: Solver) -> list[np.ndarray]:
        """float32 [T] of each, in order; NaN where the target is BOS. What the layers' solvers did is added to `solver`."""
        found: list[np.ndarray] = [np.empty(0, np.float32)] * len(sequences)
        for length, batch in batches(sequences, longest=unit.length, batch_tokens=self.batch_tokens):
            self._poll()
            began = time.perf_counter()
            tokens_BT1, segments_BT = padded([sequences[index] for index in batch], length=length, bos=self.parameters.bos)
            nll_BT, info = self.trainer.nll(tokens_BT1, segments=segments_BT, setting=unit.options or None)
            count = sum(sequences[index].length for index in batch)
            solver.add(info, scored=count, averaged=nll_BT.size)
            for row, index in enumerate(batch):
                targets = sequences[index].tokens[1:]
                nll = np.nan_to_num(nll_BT[row, : len(targets)], nan=np.inf, posinf=np.inf, neginf=-np.inf)
                found[index] = np.where(targets == self.parameters.bos, np.float32(np.nan), nll).astype(np.float32)
            self._show(tokens_per_second=count / (time.perf_counter() - began))
        return found

    def ask(self, unit: TaskUnit, folder: Path, inputs: dict[str, Path]) -> None:
        """Evaluate a task's unit and write its files into `folder`."""
        from models.reader import reader
        from stages import tokenizer
        from stages.tasks import unit as tasks
        from stages.tasks.engine import Engine

        began = time.perf_counter()

        def seen(items: int) -> None:
            self._poll()
            self._show(items_per_second=items / (time.perf_counter() - began))

        if self.tokenizer is None:
            self.tokenizer = tokenizer.load(inputs["vocabulary"], self.context.threads)
        schema, (items, examples) = SCHEMAS[unit.asked.kind], unit.inputs
        engine = Engine(
            reader(self.trainer, unit.options or None),
            self.tokenizer,
            unit.asked.window or self.parameters.sequence_length,
            self.batch_tokens,
            seen,
        )
        tasks.make(
            folder,
            name=unit.task,
            key=unit.key,
            scoring=unit.asked,
            shots=unit.shots,
            items=tasks.load(inputs[items], schema),
            examples=tasks.load(inputs[examples], schema) if examples in inputs else None,
            engine=engine,
        )

    def look(self, unit: InternalsUnit, folder: Path, sequences: Iterator[Sequence]) -> None:
        """Look at what layers do inside and write the unit's file into `folder`."""
        began = time.perf_counter()

        def seen(number: int) -> None:
            self._poll()
            self._show(items_per_second=number / (time.perf_counter() - began))

        model = self.trainer.model
        internals.make(
            folder,
            key=unit.key,
            model=model,
            params=model.framework.to_arrays(self.trainer.weights(), self.device),
            sequences=[(one.tokens[:-1], one.segments) for one in islice(sequences, unit.sequences)],
            dtype=model.ops.bfloat16 if self.parameters.precision == "bfloat16" else None,
            seen=seen,
        )

    def _poll(self) -> None:
        if self.context.stop_requested():
            raise Stopped(f"at {self.progress['unit']}, unit {self.progress['step'] + 1} of {self.progress['of']}; run again to go on.")

    def _show(self, **speed: float) -> None:
        if time.monotonic() - self.shown >= PROGRESS_SECONDS:
            self.shown = time.monotonic()
            self.context.progress(**self.progress, **speed)


def batches(sequences: list[Sequence], *, longest: int, batch_tokens: int) -> Iterator[tuple[int, list[int]]]:
    """(padded length, indices) of sequences that are scored together, as many as `batch_tokens` holds.

    A sequence is padded to the next power of two, at most to `longest`, whatever it is scored beside: few shapes to compile.
    """
    classes: dict[int, list[int]] = {}
    for index, sequence in enumerate(sequences):
        classes.setdefault(min(1 << (sequence.length - 1).bit_length(), longest), []).append(index)
    for length, indices in sorted(classes.items()):
        size = max(1, batch_tokens // length)
        yield from ((length, indices[start : start + size]) for start in range(0, len(indices), size))


def padded(sequences: list[Sequence], *, length: int, bos: int) -> tuple[np.ndarray, np.ndarray | None]:
    """(tokens int32 [B, length + 1], segments int32 [B, length]: -1 is padding; None where nothing is padded or reset)."""
    tokens_BT1 = np.full((len(sequences), length + 1), bos, np.int32)
    segments_BT = np.full((len(sequences), length), -1, np.int32)
    for row, sequence in enumerate(sequences):
        tokens_BT1[row, : sequence.length + 1] = sequence.tokens
        segments_BT[row, : sequence.length] = 0 if sequence.segments is None else sequence.segments
    return tokens_BT1, segments_BT if segments_BT.any() else None


@dataclass
class Solver:
    """Means over scored tokens, heads and layers of what solvers did: steps taken, true residual. None where no layer has one."""

    tokens: int = 0
    sums: dict[str, float] = field(default_factory=dict)

    def add(self, info: dict[str, float], *, scored: int, averaged: int) -> None:
        """Take in a batch's means over `averaged` tokens, of which all but `scored` are padding and count nothing: no step, no residual."""
        self.tokens += scored
        for name, value in info.items():
            self.sums[name] = self.sums.get(name, 0.0) + value * averaged

    def mean(self, name: str) -> float | None:
        return self.sums[name] / self.tokens if name in self.sums else None


# Files


def _make(unit: Unit, folder: Path, sequences: Iterator[Sequence], scorer: Scorer) -> None:
    """Score a unit's sequences and write its three files into `folder`."""
    solver, everything, from_start = Solver(), Positions(), Positions()
    domains: dict[str, Domain] = {}
    number = 0

    def scored() -> Iterator[pa.RecordBatch]:
        nonlocal number
        for pool in _pools(sequences):
            nlls = scorer.losses(pool, unit, solver)
            everything.add(nlls)
            for nll, sequence in zip(nlls, pool, strict=True):
                domains.setdefault(sequence.source, Domain()).add(nll)
            from_start.add([nll for nll, sequence in zip(nlls, pool, strict=True) if sequence.start == 0])
            columns = {
                "set": [unit.set] * len(pool),
                "source": [sequence.source for sequence in pool],
                "length": [unit.length] * len(pool),
                "sequence": range(number, number + len(pool)),
                "start": [sequence.start for sequence in pool],
                "nll": nlls,
            }
            number += len(pool)
            yield from schemas.batches([columns], schema)

    schema = schemas.schema("nll")
    schemas.write(folder / "nll.parquet", scored(), name="nll", key=unit.key, schema=schema)
    length = len(from_start.count)
    _write(folder / "positions.parquet", "positions", unit.key, {
        "set": [unit.set] * length,
        "length": [unit.length] * length,
        "position": range(1, length + 1),
        "nll_sum": from_start.nll_sum,
        "count": from_start.count,
    })  # fmt: skip
    tokens = int(everything.count.sum())
    nll = float(everything.nll_sum.sum()) / tokens if tokens else float("nan")
    _write(folder / "perplexity.parquet", "perplexity", unit.key, {
        "set": [unit.set],
        "length": [unit.length],
        "setting": [TRAINED],
        "sequences": [number],
        "tokens": [tokens],
        "nll": [nll],
        "perplexity": [float(np.exp(np.float64(nll)))],
        "steps_taken": [solver.mean("cg_steps")],
        "residual": [solver.mean("cg_residual")],
    })  # fmt: skip

    if len(domains) > 1:
        _write(folder / DOMAINS, "domains", unit.key, [
            {"set": unit.set, "source": source, "length": unit.length, "setting": TRAINED} | domain.record() for source, domain in sorted(domains.items())
        ])  # fmt: skip


def _pools(sequences: Iterator[Sequence]) -> Iterator[list[Sequence]]:
    """Sequences in their order, some POOL_TOKENS at a time: what is held in memory."""
    pool, tokens = [], 0
    for sequence in sequences:
        pool.append(sequence)
        tokens += sequence.length
        if tokens >= POOL_TOKENS:
            yield pool
            pool, tokens = [], 0
    if pool:
        yield pool


@dataclass
class Domain:
    """Running sums of the losses of one kind of text."""

    sequences: int = 0
    tokens: int = 0
    nll_sum: float = 0.0

    def add(self, nll: np.ndarray) -> None:
        scored = nll[~np.isnan(nll)].astype(np.float64)
        self.sequences, self.tokens, self.nll_sum = self.sequences + 1, self.tokens + len(scored), self.nll_sum + float(scored.sum())

    def record(self) -> dict[str, float]:
        nll = self.nll_sum / self.tokens if self.tokens else float("nan")
        with np.errstate(over="ignore"):
            return {"sequences": self.sequences, "tokens": self.tokens, "nll": nll, "perplexity": float(np.exp(np.float64(nll)))}


@dataclass
class Positions:
    """Running sums of losses by position."""

    nll_sum: np.ndarray = field(default_factory=lambda: np.zeros(0))
    count: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def add(self, nlls: list[np.ndarray]) -> None:
        parts = [(self.nll_sum, self.count), measures.by_position(nlls)]
        length = max(len(count) for _, count in parts)
        self.nll_sum, self.count = (sum(np.pad(array, (0, length - len(array))) for array in arrays) for arrays in zip(*parts, strict=True))


def _write(path: Path, name: str, key: str, data: dict[str, Any] | list[dict[str, Any]]) -> str:
    """A file of columns, or of rows."""
    import pyarrow as pa

    make = pa.Table.from_pylist if isinstance(data, list) else pa.table
    return schemas.write(path, make(data, schema=schemas.schema(name)), name=name, key=key)


def _collect(out: Path, wanted: list[Unit | TaskUnit | InternalsUnit], key: str) -> dict[str, str]:
    """Write the files over all units. Returns the digest of every file of the artifact, by its name."""
    import pyarrow as pa

    def together(name: str, units: list[Any]) -> pa.Table:
        return pa.concat_tables(
            [schemas.schema(name).empty_table(), *(schemas.read(out / unit.name / f"{name}.parquet", name) for unit in units)]
        )

    sets, tasks = [unit for unit in wanted if isinstance(unit, Unit)], [unit for unit in wanted if isinstance(unit, TaskUnit)]
    tables = {"perplexity": _set(together("perplexity", sets), "setting", [unit.setting for unit in sets])}
    tables["positions"] = together("positions", [unit for unit in sets if unit.setting == TRAINED])
    if several := [unit for unit in sets if (out / unit.name / DOMAINS).exists()]:
        of_row = [unit for unit in several for _ in range(len(schemas.read(out / unit.name / DOMAINS, "domains")))]
        tables["domains"] = _set(together("domains", several), "setting", [unit.setting for unit in of_row])
    if tasks:
        of_row = [unit for unit in tasks for _ in range(len(schemas.read(out / unit.name / "scores.parquet", "scores")))]
        scores = _set(together("scores", tasks), "setting", [unit.setting for unit in of_row])
        tables["scores"] = _set(scores, "group", [unit.asked.group for unit in of_row])
    known = {f"{unit.name}/{file}": facts["digest"] for unit in wanted for file, facts in artifact.read(out / unit.name)["files"].items()}
    for name, table in tables.items():
        known[f"{name}.parquet"] = schemas.write(out / f"{name}.parquet", table, name=name, key=key)
    return known


def _set(table: pa.Table, column: str, values: list[str | None]) -> pa.Table:
    """The table with other values of a text column: those that no unit holds, since they change nothing that it computed."""
    import pyarrow as pa

    return table.set_column(table.schema.get_field_index(column), column, pa.array(values, pa.string()))


if __name__ == "__main__":
    main(run)
