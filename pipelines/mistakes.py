"""Mistakes in params.yaml as one sentence each: the key, what was found, what is allowed, and the nearest match for a name."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import ValidationError

from stages.spec import Strict

MANY = 24  # names that a sentence holds


def listed(names: Iterable[str]) -> str:
    """Names in order, for a sentence."""
    return ", ".join(sorted(names)) or "none"


def nearest(name: str, allowed: Iterable[str]) -> str:
    """What to write instead of `name`: the nearest match where there is one, and all that is allowed, or the first of many."""
    allowed = sorted(set(allowed))
    close = difflib.get_close_matches(str(name), allowed, n=1)
    more = f" and {len(allowed) - MANY} more" if len(allowed) > MANY + 1 else ""
    return (f"did you mean {close[0]!r}? " if close else "") + f"Allowed: {listed(allowed[:MANY] if more else allowed)}{more}."


def explain(error: ValidationError, kind: type[Strict]) -> str:
    """The first mistake of a failed validation as one sentence that names the key, what was found and what is allowed.

    kind: what was validated.
    """
    details = error.errors(include_url=False)
    # A union reports each of its branches: the one that went deepest is what the user meant.
    first = max(
        (item for item in details if item["loc"][:1] == details[0]["loc"][:1]),
        key=lambda item: len(item["loc"]) - 9 * (item["type"] == "value_error"),
        default=details[0],
    )
    first = next((item for item in details if item["type"] == "value_error"), first) if details[0]["type"] == "value_error" else first
    where = ".".join(str(part) for part in first["loc"] if not _is_branch(part))
    found, context = first["input"], first.get("ctx", {})
    match first["type"]:
        case "missing":
            return f"{where}: is missing."
        case "extra_forbidden":
            return f"{where}: is not a parameter; {nearest(str(first['loc'][-1]), _siblings(first['loc'], kind))}"
        case "value_error":
            reason = str(context["error"])
            return f"{where}: {reason}" if where else reason
        case "literal_error" | "enum":
            return f"{where}: found {found!r}, allowed: {context['expected']}."
        case "union_tag_invalid" | "union_tag_not_found":
            return f"{where}: {context.get('discriminator', 'kind')} must be one of {context.get('expected_tags', 'the known kinds')}, found {found!r}."
    wanted = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return f"{where}: found {described(found)}, wanted {wanted}."


def _is_branch(part: Any) -> bool:
    """Whether a part of a location names a union's branch, which is no key of params.yaml."""
    return isinstance(part, str) and bool(re.search(r"[\[\]()]|^(float|int|str|bool|constrained-.*|[A-Z]\w+)$", part))


def _siblings(location: tuple[Any, ...], kind: Any) -> list[str]:
    """The keys that are allowed where an unknown one stands in a `kind`."""
    for part in location[:-1]:
        kind = _inside(kind, part)
    return (
        list(getattr(kind, "model_fields", {}))
        if not isinstance(kind, list)
        else [name for item in kind for name in getattr(item, "model_fields", {})]
    )


def _inside(kind: Any, part: Any) -> Any:
    """The type that stands under `part` of `kind`: a field's, a table's or list's items', or a union's branch."""
    if isinstance(kind, list):
        return next((found for item in kind if (found := _inside(item, part)) is not None), None)
    if hasattr(kind, "model_fields"):
        field = kind.model_fields.get(part)
        return _unwrap(field.annotation) if field else kind if _is_branch(part) or isinstance(part, int) else None
    arguments = typing.get_args(kind)
    return _unwrap(arguments[-1]) if arguments else kind


def _unwrap(kind: Any) -> Any:
    """A type without Annotated and None; a union of several as the list of them."""
    if typing.get_origin(kind) is Annotated:
        return _unwrap(typing.get_args(kind)[0])
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kinds = [_unwrap(item) for item in typing.get_args(kind) if item is not type(None)]
        return kinds[0] if len(kinds) == 1 else kinds
    return kind


def described(value: Any) -> str:
    """A value as a person would name it."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return "a list"
    return repr(value) if len(repr(value)) < 80 else f"a {type(value).__name__}"
