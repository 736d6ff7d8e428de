"""`strata lock-data`: write what the data sources hold now into params.yaml, and touch nothing else of it."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipelines.reading import NAME, read
from stages.artifact import write_atomically
from stages.sources import Source
from stages.sources import lock as pin_of
from stages.spec import Strict
from stages.tasks.entry import Files, Text


def lock(folder: Path) -> list[tuple[str, str | None, str]]:
    """Pin every source and every task's files of the study in `folder`. Returns (name, pin before, pin now); params.yaml keeps its comments and layout."""
    from pydantic import ValidationError
    from ruamel.yaml import YAML

    from pipelines.mistakes import explain

    read(folder)  # a clear sentence for what is no YAML or no table
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 10_000
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.representer.add_representer(type(None), lambda representer, _: representer.represent_scalar("tag:yaml.org,2002:null", "null"))
    path = folder / NAME
    document = yaml.load(path.read_text())
    sources = (document.get("data") or {}).get("sources")
    if not isinstance(sources, dict) or not sources:
        raise ValueError(f"{path}: data.sources: holds no source to pin.")
    found: list[tuple[str, str | None, str]] = []
    for where, kind, value in _pinned(document):
        try:
            source = kind.model_validate(dict(value) | {"pin": None})
        except (ValidationError, TypeError) as error:
            reason = explain(error, kind) if isinstance(error, ValidationError) else f"found {value!r}, wanted a table."
            raise ValueError(f"{path}: {where}: {reason}") from error
        before, now = value.get("pin"), pin_of(source, folder)
        value["pin"] = now
        found.append((where.removeprefix("data.sources."), before, now))
    if any(before != now for _, before, now in found):
        text = io.StringIO()
        yaml.dump(document, text)
        write_atomically(path, text.getvalue())
    return found


def _pinned(document: Any) -> Iterator[tuple[str, type[Strict], Any]]:
    """(where it stands, what it is, its table) of everything in params.yaml that has a pin."""
    for name, value in document["data"]["sources"].items():
        yield f"data.sources.{name}", Source, value
    for name, task in (document.get("tasks") or {}).items():
        for place, kind in (("items", Files), ("examples", Files), ("generate.text", Text)):
            value = task
            for part in place.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            if value is not None:
                yield f"tasks.{name}.{place}", kind, value
