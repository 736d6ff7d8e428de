"""Where a training starts: from nothing, or from the weights of another (fine-tuning).

A parameter has the source's value of the same name, unless it is dropped or the source has none: then it starts as from nothing. And
some layers may be others than the source's: those that remember longest there, by the median of N_t = 1 / (1 - gamma_t) (Palimpsa,
arXiv 2602.09075, who give eight layers of a trained Mamba2 another recurrence). Which they are is kept beside the weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages import artifact, engine
from stages.spec import Context, Spec
from stages.training import Initial, Parameters, Replace

if TYPE_CHECKING:
    from stages.rows import Rows

INPUT = "initial"
WEIGHTS, MODEL = "weights.safetensors", "model.json"
ROWS = 8  # of the training rows, the first: what memory windows are measured on

Shapes = Mapping[str, tuple[int, ...]]
Entry = dict[str, Any]


@dataclass(frozen=True)
class Taken:
    """Parameters by where they come from. copied: the source's. fresh: as from nothing. left: the source's that the model lacks."""

    copied: list[str]
    fresh: list[str]
    left: list[str]


def taken(model: Shapes, source: Shapes, drop: Iterable[str]) -> Taken:
    """What a model takes over from a source, by their parameters' shapes.

    ValueError where a pattern of `drop` means none of the source's parameters, or where a parameter that is not dropped has another shape.
    """
    dropped: set[str] = set()
    for pattern in drop:
        meant = [name for name in source if fnmatchcase(name, pattern)]
        if not meant:
            raise ValueError(f"drop: {pattern!r} means no parameter of the source, whose names are like {', '.join(list(source)[1:4])}.")
        dropped.update(meant)
    copied = [name for name in model if name in source and name not in dropped]
    for name in copied:
        if tuple(model[name]) != tuple(source[name]):
            raise ValueError(
                f"{name!r} has shape {tuple(source[name])} in the source and {tuple(model[name])} in the model; give both the same sizes, "
                f"or let it start anew: drop: ['*.{name.rsplit('.', 1)[-1]}']."
            )
    return Taken(copied, [name for name in model if name not in copied], [name for name in source if name not in copied])


def replaced(entry: Entry, layers: int, chosen: Iterable[int], layer: Entry) -> Entry:
    """The model entry whose `layers` layers are `entry`'s, but for the `chosen`, which are `layer`."""
    chosen = set(chosen)
    return {"pattern": [layer if index in chosen else entry for index in range(layers)]}


def stand_in(entry: Entry, layers: int, replace: Replace | None) -> Entry:
    """A model entry of the size and cost that a training's will have, before it is known which layers are replaced."""
    if replace is None:
        return entry
    if "layer" not in entry:
        raise ValueError("init_from.replace takes the place of some layers of one kind: give this model a `layer`, not a `pattern`.")
    if replace.count > layers:
        raise ValueError(f"init_from.replace.count: {replace.count} layers cannot be replaced in a model of {layers}.")
    return replaced(entry, layers, range(replace.count), replace.layer)


def trained_entry(weights: Path, entry: Entry) -> Entry:
    """The model entry that trained weights belong to: what their training resolved, or else `entry`. weights: their artifact's folder."""
    return json.loads((weights / MODEL).read_text())["model"] if MODEL in artifact.read(weights)["files"] else entry


@dataclass
class Start:
    """How one attempt at a training begins. model: the model entry to build. files: what the artifact holds beside the weights."""

    model: Entry
    folder: Path | None = None
    init: Initial = Initial()
    digests: dict[str, str] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def apply(self, trainer: Any) -> None:
        """Give a new trainer the weights to start with."""
        if self.folder is None:
            return
        from models import checkpoint

        weights, source = trainer.weights(), checkpoint.load(self.folder / WEIGHTS)[0]
        what = taken({n: a.shape for n, a in weights.items()}, {n: a.shape for n, a in source.items()}, self.init.drop)
        trainer.load_weights(weights | {name: source[name] for name in what.copied})
        self.facts |= {"copied": what.copied, "fresh": what.fresh, "left": what.left}

    def provenance(self) -> dict[str, Any]:
        """What to keep of it with the result."""
        return {INPUT: self.facts} if self.folder else {}


def start(spec: Spec, parameters: Parameters, folder: Path | None, rows: Rows, out: Path, context: Context) -> Start:
    """The start of a training, its source verified. folder: the source's artifact. rows: what is trained on.

    Which layers are replaced is written to out/model.json at once: attempts that go on from this one's work keep to it.
    """
    if parameters.init is None:
        return Start(parameters.model)
    if folder is None or INPUT not in spec.inputs:
        raise ValueError(f"This training starts from other weights, and none were given: --input {INPUT}=weights/<cell>.")
    record = artifact.read(folder, key=spec.inputs[INPUT], content=True)
    begun = Start(parameters.model, folder, parameters.init, {INPUT: record["digest"]})
    if parameters.init.replace is not None:
        choice = _chosen_before(spec.key, [out, *context.resume_from]) or _choose(parameters, folder, rows, context)
        context.fence()
        artifact.write_atomically(out / MODEL, json.dumps({"key": spec.key, **choice}, indent=1, sort_keys=True) + "\n")
        begun.model, begun.files = choice["model"], [MODEL]
        begun.facts |= {name: choice[name] for name in ("replaced", "windows")}
    return begun


def _chosen_before(key: str, attempts: Iterable[Path]) -> dict[str, Any] | None:
    """What an earlier attempt chose."""
    for attempt in attempts:
        try:
            choice = json.loads((attempt / MODEL).read_text())
        except (OSError, ValueError):
            continue
        if choice.pop("key", None) == key:
            return choice
    return None


def _choose(parameters: Parameters, folder: Path, rows: Rows, context: Context) -> dict[str, Any]:
    """The layers to replace: measured in float32 on the first training rows, with the source's weights."""
    import models
    from models import checkpoint
    from models.windows import longest, memory_windows

    replace, entry = parameters.init.replace, parameters.model
    stand_in(entry, parameters.scale["layers"], replace)
    model = models.build(entry, parameters.scale, vocab_size=parameters.vocab_size, backend=engine.backend(context))
    weights = checkpoint.load(folder / WEIGHTS)[0]
    if {name: array.shape for name, array in weights.items()} != {name: tuple(one.shape) for name, one in model.table.items()}:
        raise ValueError(
            "The source's weights do not fit this model before its layers are replaced, so their memory windows cannot be measured: "
            "give it the source's layer and options, and what replaces some of them under init_from.replace.layer."
        )
    tokens_NT1, lengths = rows.read(0, min(ROWS, len(rows)))
    tokens_BT = tokens_NT1[:, :-1].astype("int32")
    segments_BT = engine.segment_ids(lengths, parameters.sequence_length) if parameters.reset else None
    params = model.framework.to_arrays(weights, engine.device(model, context, "float32"))
    windows = memory_windows(model, params, tokens_BT, segments_BT)
    chosen = longest(windows, replace.count)
    return {"model": replaced(entry, len(windows), chosen, replace.layer), "replaced": chosen, "windows": windows}
