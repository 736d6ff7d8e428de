"""Floor 2: sequence layers, the backbone they sit on, checkpoints, and how each framework trains them.

`build` makes a model from the entries of params.yaml; it imports neither torch nor jax.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from models.backbone import BACKENDS, Model
from models.layers import LAYERS
from models.layers.layer import SCALE_FIELDS, Layer

SCALE = ("layers", *SCALE_FIELDS, "mlp")


def _known(kind: str, name: str, known: Iterable[str]) -> None:
    """Raise a ValueError that names the nearest match unless `name` is one of `known`."""
    known = sorted(known)
    if name not in known:
        nearest = get_close_matches(str(name), known, 1, 0)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else "."
        raise ValueError(f"There is no {kind} {name!r}{hint} Known: {', '.join(known) or 'none'}.")


def build_layer(entry: Mapping[str, Any], scale: Mapping[str, int]) -> Layer:
    """One layer from {layer: NAME, **options} and the scale's width, heads and key_size; a ValueError names what is unknown."""
    options = dict(entry)
    if "layer" not in options:
        raise ValueError(f"A model entry names its `layer` (or a `pattern` of them); found {sorted(options) or 'nothing'}.")
    name = options.pop("layer")
    _known("layer", name, LAYERS)
    kind = LAYERS[name]
    for option in options:
        _known(f"option of layer {name!r}", option, kind.options())
    _check_types(kind, options)
    return kind(**{field: scale[field] for field in SCALE_FIELDS}, **options)


def _check_types(kind: type[Layer], options: Mapping[str, Any]) -> None:
    """Refuse an option that is not of its default's plain type: a text where a number belongs, say."""
    defaults = {field.name: field.default for field in fields(kind)}
    for name, value in options.items():
        default = defaults[name]
        wanted = {float: (float, int), type(None): (int, type(None))}.get(type(default), (type(default),))
        if not isinstance(value, wanted) or isinstance(value, bool) is not isinstance(default, bool):
            raise ValueError(f"Option {name!r} of layer {kind.name!r} is {value!r}; give a value like its default, {default!r}.")


def build(model: Mapping[str, Any], scale: Mapping[str, int], *, vocab_size: int, backend: str = "torch") -> Model:
    """A model from an entry of params.yaml's `models` and one of its `scales`.

    model: {layer: NAME, **options}, or {pattern: [such entries]} repeated over the depth. scale: {layers, width, heads, key_size, mlp}.
    backend: "torch" or "jax", whose arrays the model's functions take; its library is imported when they are first called.
    Raises ValueError, naming the nearest match, for an unknown layer, option, scale entry or backend.
    """
    _known("backend", backend, BACKENDS)
    for name in scale:
        _known("entry of a scale", name, SCALE)
    for name in SCALE:
        if not isinstance(scale.get(name), int) or scale[name] < 1:
            raise ValueError(f"A scale needs `{name}`, a whole number of at least 1; found {scale.get(name)!r}.")
    if vocab_size < 1:
        raise ValueError(f"vocab_size is {vocab_size}; a vocabulary has at least one token.")
    if "pattern" in model:
        if len(model) > 1 or not model["pattern"]:
            raise ValueError(f"A model's `pattern` is a list of one or more layer entries and stands alone; found {dict(model)}.")
        pattern = [build_layer(entry, scale) for entry in model["pattern"]]
    else:
        pattern = [build_layer(model, scale)]
    layers = tuple(pattern[index % len(pattern)] for index in range(scale["layers"]))
    return Model(layers=layers, width=scale["width"], mlp=scale["mlp"], vocab_size=vocab_size, backend=backend)
