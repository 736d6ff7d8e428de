"""Train: packed rows to weights, and a history of every step.

Step s of a run with batch B reads rows [sB, (s+1)B), whatever runs it. A target that is BOS carries no loss. A run that ends in
any way goes on from its newest checkpoint, on a CPU (and on a GPU with `deterministic`) to the same weights bit for bit.

The precision is what is computed and so part of the run's identity: a CPU that is asked for bfloat16 computes in bfloat16, and a
GPU without it refuses.

Shapes: B batch, T time (the sequence length); a row has T + 1 tokens.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from pydantic import ValidationError

from stages import artifact, engine, initial, provenance
from stages.checkpoints import Checkpoints
from stages.command import main
from stages.course import Course
from stages.evaluation.parameters import VALIDATION
from stages.history import LOG, History, Row, Spikes
from stages.profile import Profile
from stages.schedule import learning_rate
from stages.spec import Context, Spec, Stopped
from stages.training import Parameters

if TYPE_CHECKING:
    from models.backends.torch import Team
    from stages.rows import Rows

WEIGHTS, HISTORY = "weights.safetensors", "history.parquet"
ROLLBACKS = 8  # in one run
SKIPS = 32  # in a row
MICRO_TOKENS = 1 << 16
PROGRESS_SECONDS = 1.0
MEASURES = ("loss", "grad_norm", "finite")  # what a trainer's step returns besides the layers' scalars


def run(spec: Spec, out: Path, inputs: dict[str, Path], context: Context) -> None:
    """Write weights.safetensors, history.parquet, provenance.json and artifact.json (of the weights alone, of model.json where it was
    found out which layers to replace, and of what `internals` saw).

    inputs: "budget", the file packed/budgets/<budget>.json; "initial", the weights' folder that `init` is about; "validation", the folder
    packed/validation, for `internals`. context.settings: peak_flops (of the device, for MFU), micro_batch
    (sequences at once on each device; found out if not given), backend, compile, devices, fsdp, rematerialise (see stages/engine.py), profile (write
    profile/ of a few steps). Of several processes that were started together, the first does all of this, and the others help it.
    Raises Stopped when asked to stop, with a checkpoint saved.
    """
    try:
        parameters = Parameters.model_validate(spec.parameters)
    except ValidationError as error:
        raise ValueError(f"This training's parameters are not valid ({error}); `strata run resolve` writes the spec anew.") from error
    with engine.told_of_full_disk(out), engine.together(context, parameters.precision, reader(spec, inputs)) as team:
        if team is not None and team.rank > 0:
            return
        if not _complete(out, spec.key):
            Run(spec, parameters, out, inputs, context, team).to_the_end()
        context.fence()
        Checkpoints(out, spec.key).remove()
        (out / LOG).unlink(missing_ok=True)


def help(spec: Spec, inputs: dict[str, Path], context: Context) -> None:
    """Do as the first of several processes does that run this training together; this is another of them."""
    with engine.together(context, spec.parameters.get("precision", "float32"), reader(spec, inputs)):
        pass


def _complete(out: Path, key: str) -> bool:
    """Whether an earlier attempt got as far as its artifact.json."""
    try:
        artifact.read(out, key=key)
    except ValueError:
        return False
    return (out / HISTORY).exists()


class UnderWay(NamedTuple):
    """A step that was given to the device: its row so far, when that was, and what waits for its facts (None: its batch is left out)."""

    row: Row
    began: float
    facts: Callable[[], dict[str, float]] | None


class Run:
    """One attempt at a training run; `step` is how many steps are done, `under_way` those given to the device and not heard of yet."""

    def __init__(
        self, spec: Spec, parameters: Parameters, out: Path, inputs: dict[str, Path], context: Context, team: Team | None = None
    ) -> None:
        import models

        self.spec, self.parameters, self.out, self.context, self.team = spec, parameters, out, context, team
        self.started = time.time()
        self.input_digest, rows = _open(inputs["budget"], spec, parameters)
        self.start = initial.start(spec, parameters, inputs.get(initial.INPUT), rows, out, context)
        self.model = models.build(self.start.model, parameters.scale, vocab_size=parameters.vocab_size, backend=engine.backend(context))
        if reason := self.model.trainable:
            raise ValueError(f"This model cannot be trained: {reason}.")
        self.batches = Batches(rows, parameters)
        self.history = History(out)
        self.checkpoints = Checkpoints(out, spec.key)
        self.spikes = Spikes()
        self.skips = 0  # steps skipped since the last one that was taken
        self.rolled_back: dict[int, str] = {}  # step -> why its batch is left out
        self.seconds: deque[float] = deque(maxlen=32)  # of the last steps
        self.under_way: deque[UnderWay] = deque()
        self.settled = self.shown = float("-inf")
        self.profile = Profile(out, self.model if context.settings.get("profile") else None)
        self.checkpoint_every = context.settings.get("checkpoint_every", parameters.checkpoint_every)
        self.device = engine.device(self.model, context, parameters.precision)
        wanted, folder = parameters.internals, inputs.get(VALIDATION)
        self.course = Course(wanted, parameters, spec, folder, self.model, self.device) if wanted else None
        self.trainer, self.step, self.saved = self._trainer(), 0, -1
        self.share = parameters.batch // self.trainer.devices  # of a batch, what one device takes
        self.micro_batch = context.settings.get("micro_batch") or at_once(self.share, parameters.sequence_length)
        self.rematerialise = bool(context.settings.get("rematerialise"))
        self.restore()
        self.resumed_from = self.step

    def to_the_end(self) -> None:
        """Take every step that is left, then write the results."""
        with self.batches, self.profile:
            self.look()
            while self.step < self.parameters.steps:
                if self.context.stop_requested():
                    self.settle()
                    self.save()
                    raise Stopped(f"at step {self.step} of {self.parameters.steps}; run again to go on.")
                self.launch()
                last = self.launched % self.checkpoint_every == 0 or self.launched == self.parameters.steps
                last = last or (self.course is not None and self.course.due(self.launched))
                self.settle(0 if last or self.skips else self.trainer.ahead)  # a checkpoint, or a look, is of its steps and no other's
                self.look()
                if self.step % self.checkpoint_every == 0:
                    self.save()
            self.save()
        self.finish()

    @property
    def launched(self) -> int:
        """How many steps are done or under way."""
        return self.step + len(self.under_way)

    # Where the run stands

    def restore(self) -> None:
        """Go to the newest checkpoint of any attempt that verifies, or to the run's beginning."""
        self.context.fence()
        self.under_way.clear()
        fresh = self.step == 0
        for found in self.checkpoints.usable(dict.fromkeys([self.out, *self.context.resume_from]), self._note):
            try:
                self.history.resume(found.out, length=found.history, step=found.step)
                if self.course is not None:
                    self.course.resume(self.history.looks(), found.step)
                self.trainer.load_state_dict(found.state)
            except ValueError as error:
                self._note(f"The checkpoint of step {found.step} is passed over: {error}.")
                fresh = False
                continue
            self.checkpoints.resumed(found)
            self.step, self.saved = found.step, found.step if found.out == self.out else -1
            self._note(f"Going on from step {self.step}.")
            break
        else:
            self.history.start()
            if self.course is not None:
                self.course.start()
            self.trainer = self.trainer if fresh else self._trainer()
            self.step, self.saved = 0, -1
        self.spikes, self.skips = Spikes(), 0
        for row in self.history.rows():
            self._take_in(row)

    def _trainer(self) -> Any:
        trainer = engine.trainer(
            self.model,
            self.context,
            device=self.device,
            precision=self.parameters.precision,
            optimizer=self.parameters.optimizer.model_dump(),
            seed=self.parameters.seed,
            deterministic=self.parameters.deterministic,
            team=self.team,
        )
        self.start.apply(trainer)
        return trainer

    def save(self) -> None:
        """Make the steps so far durable: the history first, then the checkpoint that counts on it."""
        if self.saved == self.step:
            return
        self.context.fence()
        length = self.history.flush()
        self.context.fence()
        others = getattr(self.trainer, "save_others", None)  # of processes that hold the state together
        self.checkpoints.save(self.trainer.state_dict(), step=self.step, history=length, others=others)
        self.saved = self.step

    def look(self) -> None:
        """Look inside where that is due: it is durable with the next checkpoint, like the steps before it."""
        if self.course is not None and self.course.due(self.step):
            assert not self.under_way
            self.history.append_look(self.course.look(self.trainer, self.step))

    # One step

    def launch(self) -> None:
        """Give the next step to the device. Where an earlier one turns out not to be finite, the device leaves this one undone by itself."""
        p, index = self.parameters, self.launched
        rate = learning_rate(index, steps=p.steps, peak=p.learning_rate, start=p.start_learning_rate, warmup=p.warmup_steps, floor=p.floor)
        row: Row = {"step": index + 1, "tokens": (index + 1) * p.batch * p.sequence_length, "learning_rate": rate}
        began = time.perf_counter()
        if index in self.rolled_back:
            self.under_way.append(UnderWay(row, began, None))
            return
        self.profile.turn()
        tokens_BT1, segments_BT = self.batches[index]
        named = {"number": index} if getattr(self.trainer, "by_number", False) else {}
        facts = self._submit(tokens_BT1, **beside(p, tokens_BT1, segments_BT), learning_rate=rate, **named)
        if facts is not None:
            self.under_way.append(UnderWay(row, began, facts))

    def settle(self, ahead: int = 0) -> None:
        """Write the rows of the steps under way, but for the last `ahead`, or deal with one that is not finite."""
        while len(self.under_way) > ahead:
            row, began, facts = self.under_way.popleft()
            if facts is None:
                self._record(row | {"event": self.rolled_back[row["step"] - 1]})
                continue
            measured, now = facts(), time.perf_counter()
            seconds, self.settled = now - max(began, self.settled), now
            row |= {"loss": measured["loss"], "grad_norm": measured["grad_norm"]}
            row |= self._speed(seconds, measured.get("cg_steps"))
            row |= {name: value for name, value in measured.items() if name not in MEASURES}
            if not measured["finite"]:
                self._nonfinite(row)
            else:
                height = self.spikes.height(row["loss"])
                self._record(row | {"event": None if height is None else f"spike: {height:.3g} nats above the median"})

    def _submit(self, tokens_BT1: np.ndarray, **given: Any) -> Callable[[], dict[str, float]] | None:
        """The trainer's step, with fewer sequences at once from here on where they do not fit in memory, and, where one alone does not, with
        activations computed again instead of kept: the gradient is the same sum.

        None where the trainer's weights went with the memory: the run then stands where its last checkpoint was.
        """
        given |= {"skip_nonfinite": True, "halt": self.parameters.on_nonfinite != "skip"}
        while True:
            try:
                return self.trainer.submit(tokens_BT1, micro_batch=self.micro_batch, rematerialise=self.rematerialise, **given)
            except MemoryError as error:
                if self.micro_batch == 1 and self.rematerialise:
                    raise ValueError(
                        f"One sequence of {self.parameters.sequence_length} tokens does not fit in the memory of {self.device} ({error}). "
                        "Run this cell on a larger device."
                    ) from error
            if self.micro_batch == 1:
                self.rematerialise = True
                self._note(f"One sequence does not fit in the memory of {self.device}; activations are computed again from here on.")
            else:
                smaller = at_once(self.share, self.parameters.sequence_length, below=self.micro_batch)
                self._note(f"{self.micro_batch} sequences at once do not fit in the memory of {self.device}; going on with {smaller}.")
                self.micro_batch = smaller
            if self.trainer.lost:
                self.trainer = self._trainer()
                self.restore()
                return None

    def _speed(self, seconds: float, solver_steps: float | None) -> Row:
        """Tokens per second and MFU; `solver_steps` are those really taken. A multiply-add is two FLOPs; recomputation never counts."""
        p, peak = self.parameters, self.context.settings.get("peak_flops")
        rate = p.batch * p.sequence_length / seconds

        def mfu(steps: float | None) -> float | None:
            return rate * self.model.flops(p.sequence_length, steps=steps, training=True) / peak if peak else None

        speed = {"seconds": seconds, "tokens_per_second": rate, "mfu": mfu(solver_steps), "mfu_without_cg": mfu(0)}
        return speed | {"devices": self.trainer.devices}

    def _nonfinite(self, row: Row) -> None:
        """A loss or gradient that is not finite; the trainer has left the weights as they were."""
        p, number = self.parameters, row["step"]
        what = f"loss {row['loss']:.4g}, gradient norm {row['grad_norm']:.4g} at learning rate {row['learning_rate']:.3g}"
        if p.on_nonfinite == "skip" and self.skips < SKIPS:
            self._record(row | {"event": f"skipped: {what}"})
            return
        if p.on_nonfinite == "rollback" and len(self.rolled_back) < ROLLBACKS:
            self.rolled_back[self.step] = f"rolled back: {what}"
            self._note(f"Step {number}: {what}. Going back to the last checkpoint, to leave that batch out.")
            self.restore()
            return
        self.save()
        given_up = {"stop": "", "skip": f" {SKIPS} steps in a row were skipped.", "rollback": f" It was rolled back {ROLLBACKS} times."}
        remedy = {
            "stop": ", a longer warm-up, or training.on_nonfinite: skip or rollback",
            "skip": " or a longer warm-up",
            "rollback": " or a longer warm-up",
        }
        raise ValueError(
            f"Step {number} is not finite: {what}.{given_up[p.on_nonfinite]} Everything up to step {self.step} is kept; "
            f"try a lower learning rate{remedy[p.on_nonfinite]}."
        )

    def _record(self, row: Row) -> None:
        """The step is done: note its row, and show it."""
        self.history.append(row)
        self._take_in(row)
        self.step += 1
        if "seconds" in row:
            self.seconds.append(row["seconds"])
        now = time.monotonic()
        if now - self.shown >= PROGRESS_SECONDS or self.step == self.parameters.steps or row["event"]:
            self.shown = now
            self._show(row)

    def _take_in(self, row: Row) -> None:
        """What later steps need to know of one that is done."""
        event = row["event"] or ""
        self.skips = self.skips + 1 if event.startswith("skipped") else 0
        if event.startswith("rolled back"):
            self.rolled_back[row["step"] - 1] = event
        elif not event.startswith("skipped"):
            self.spikes.append(row["loss"])

    def _show(self, row: Row) -> None:
        facts = {name: engine.finite_or_none(row.get(name)) for name in ("loss", "tokens_per_second", "mfu", "learning_rate")}
        pace = statistics.median(self.seconds) if self.seconds else None
        facts["seconds_left"] = None if pace is None else round(pace * (self.parameters.steps - self.step), 1)
        event = {"event": row["event"]} if row["event"] else {}
        self.context.progress(step=self.step, of=self.parameters.steps, **facts, saved=max(self.saved, 0), **event)

    def _note(self, text: str) -> None:
        self.context.progress(note=text)

    # The end

    def finish(self) -> None:
        """Write what the run was for; artifact.json last."""
        import kernels
        from models import checkpoint

        key = self.spec.key
        self.context.fence()
        checkpoint.save(self.out / WEIGHTS, self.trainer.weights(), {"key": key, "step": str(self.step)})
        self.history.to_parquet(self.out / HISTORY, key=key)
        looked = [] if self.course is None else self.course.write(self.out, self.history.looks(), key)
        provenance.write(
            self.out,
            self.spec,
            self.context,
            started=self.started,
            backend=self.model.backend,
            device=self.model.framework.device_name(self.device),
            kernels=kernels.chosen(),
            micro_batch=self.micro_batch,
            rematerialise=self.rematerialise,
            devices=self.trainer.devices,
            resumed_from=self.resumed_from,
            **self.start.provenance(),
        )
        self.context.fence()
        artifact.write(
            self.out,
            key=key,
            stage=self.spec.stage,
            files=[WEIGHTS, *self.start.files, *looked],
            inputs={"budget": self.input_digest, **self.start.digests, **(self.course.digests if self.course else {})},
        )


def at_once(batch: int, length: int, *, below: int | None = None) -> int:
    """How many sequences go through the device at once: the most that divide the batch and have up to MICRO_TOKENS tokens, or are `below`."""
    fits = [n for n in range(1, batch + 1) if batch % n == 0 and (n * length <= MICRO_TOKENS if below is None else n <= max(1, below // 2))]
    return max(fits, default=1)


def _open(budget: Path, spec: Spec, parameters: Parameters) -> tuple[str, Rows]:
    """(digest, rows) of the input, once it is what the spec says."""
    from stages.rows import Rows

    try:
        facts = json.loads(budget.read_text())
        key, digest, length, count = (facts[name] for name in ("key", "digest", "sequence_length", "rows"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{budget} is not a readable budget ({error}). Run the pack stage again.") from error
    if key != spec.inputs["budget"]:
        raise ValueError(f"{budget} was made under key {key[:12]}, wanted {spec.inputs['budget'][:12]}. Run the pack stage again.")
    needed = parameters.steps * parameters.batch
    if length != parameters.sequence_length or count < needed:
        raise ValueError(
            f"{budget} has {count} rows of {length} tokens; {parameters.steps} steps of {parameters.batch} sequences need {needed} "
            f"of {parameters.sequence_length}. Run resolve and the pack stage again."
        )
    return digest, Rows(budget)


def beside(parameters: Parameters, tokens_BT1: np.ndarray, segments_BT: np.ndarray | None) -> dict[str, Any]:
    """What a trainer takes of some rows beside their tokens."""
    return {"segments": segments_BT, "targets_mask": tokens_BT1[:, 1:] != parameters.bos}


def reader(spec: Spec, inputs: dict[str, Path]) -> engine.Read:
    """How a process that helps another reads its rows: (a batch's number, which of its rows) -> what a trainer takes of them."""
    batches: list[Batches] = []
    parameters = Parameters.model_validate(spec.parameters)

    def read(number: int, rows: slice) -> dict[str, Any]:
        if not batches:
            batches.append(Batches(_open(inputs["budget"], spec, parameters)[1], parameters, rows))
        assert batches[0].part == rows
        tokens_BT1, segments_BT = batches[0][number]
        return {"tokens_BT1": tokens_BT1, **beside(parameters, tokens_BT1, segments_BT)}

    return read


class Batches:
    """The batch of each step (or the part of each that is wanted), the next one read while a step is taken."""

    def __init__(self, rows: Rows, parameters: Parameters, part: slice | None = None) -> None:
        self.rows, self.parameters, self.part = rows, parameters, part or slice(0, parameters.batch)
        self.reader = ThreadPoolExecutor(1, thread_name_prefix="rows")
        self.ahead: dict[int, Future] = {}

    def __getitem__(self, step: int) -> tuple[np.ndarray, np.ndarray | None]:
        """(tokens int32 [B, T + 1], segments int32 [B, T] or None where nothing is reset) of a step."""
        batch = self.ahead.get(step) or self.reader.submit(self._read, step)
        self.ahead = {step + 1: self.reader.submit(self._read, step + 1)} if step + 1 < self.parameters.steps else {}
        return batch.result()

    def _read(self, step: int) -> tuple[np.ndarray, np.ndarray | None]:
        size = self.parameters.batch
        tokens_BT1, lengths = self.rows.read(step * size + self.part.start, step * size + self.part.stop)
        return tokens_BT1.astype(np.int32), engine.segment_ids(lengths, self.parameters.sequence_length) if self.parameters.reset else None

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.shutdown(wait=True, cancel_futures=True)


if __name__ == "__main__":
    main(run)
