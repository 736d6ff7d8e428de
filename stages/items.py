"""Items: what the study's tasks are asked about, read from their files or generated, each task's in the schema of its kind.

Units. One a task ("piqa"), and one for the examples of a task that has its own ("piqa.examples"): items.parquet. A unit depends on its
files' pin and how they are read, or on its generator, the seed and the vocabulary (a generated prompt has a length in tokens).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from stages import artifact, provenance, schemas, sources, units
from stages.command import main
from stages.engine import told_of_full_disk
from stages.spec import Context, Spec, Stopped, Strict
from stages.tasks.entry import Files, Generated, Text
from stages.tasks.unit import ITEMS

TEXT = ".text"  # behind a task's name: the files of its haystack
EXAMPLES = ".examples"
UNNAMED: dict[str, Any] = {"files": ["-"]}  # a spec leaves out the names of files under a content pin; the schema wants some


class Entry(Strict):
    """A unit. schema: of the items. files: how they are read, without names under a content pin. generate: how they are made; code: its version."""

    kind: Literal["multiple_choice", "prompt_target", "recall"] = Field(alias="schema")
    files: dict[str, Any] | None = None
    generate: dict[str, Any] | None = None
    code: int | None = None


class Parameters(Strict):
    tasks: dict[str, Entry] = {}


def item_key(spec: Spec, name: str) -> str:
    """The key of the unit `name`: of what its items depend on, never of the other tasks."""
    entry = spec.parameters["tasks"][name]
    made_of = {"vocabulary": spec.inputs["vocabulary"]} if entry.get("generate") else {}
    return spec.unit_key(items=entry, **made_of)


def run(spec: Spec, out: Path, inputs: dict[str, Path], context: Context) -> None:
    """Write the units `<task>/items.parquet`. context.settings["sources"]: unit -> its files; "<task>.text": a haystack's."""
    started = time.time()
    try:
        parameters = Parameters.model_validate(spec.parameters)
    except ValidationError as error:
        raise ValueError(f"This spec's parameters are not items' ({error}); `strata run resolve` writes it anew.") from error
    out.mkdir(parents=True, exist_ok=True)
    vocabulary = {}
    if "vocabulary" in spec.inputs:
        vocabulary = {"vocabulary": artifact.read(inputs["vocabulary"], key=spec.inputs["vocabulary"], content=True)["digest"]}
    with told_of_full_disk(out):
        known: dict[str, str] = {}
        for number, (name, entry) in enumerate(sorted(parameters.tasks.items())):
            if context.stop_requested():
                raise Stopped(f"at {name}, task {number + 1} of {len(parameters.tasks)}; run again to go on.")
            key = item_key(spec, name)
            if not units.complete(out / name, key):
                context.fence()
                with units.making(
                    artifact.inside(out, name), key=key, stage=spec.stage, inputs=vocabulary if entry.generate else {}
                ) as folder:
                    table = _generated(name, entry, out, inputs, context) if entry.generate else _read(name, entry, out, context)
                    schemas.write(folder / ITEMS, table, name=entry.kind, key=key)
            context.progress(step=number + 1, of=len(parameters.tasks), unit=name)
            known[f"{name}/{ITEMS}"] = artifact.read(out / name)["files"][ITEMS]["digest"]
        context.fence()
        units.keep_only(out, set(parameters.tasks))
        provenance.write(out, spec, context, started=started)
        artifact.write(out, key=spec.key, stage=spec.stage, files=known, inputs=vocabulary, known=known)


@contextmanager
def _fetched(name: str, pin: str | None, scratch: Path, context: Context) -> Iterator[list[Path]]:
    """A unit's files as local ones, in order; ValueError where they are not the pinned ones."""
    files = sources.expand(sources.listed(context, [name])[name], pin)
    with ExitStack() as stack:
        paths = [stack.enter_context(sources.fetched(file, scratch)) for file in files]
        sources.check([sources.sha256(path) for path in paths], pin, f"tasks.{name}")
        yield paths


def _read(name: str, entry: Entry, out: Path, context: Context) -> Any:
    from stages.tasks.items import read

    with sources.scratch(out) as scratch, _fetched(name, (entry.files or {}).get("pin"), scratch, context) as paths:
        return read(paths, Files.model_validate(UNNAMED | (entry.files or {})), entry.kind, f"tasks.{name}")


def _generated(name: str, entry: Entry, out: Path, inputs: dict[str, Path], context: Context) -> Any:
    from stages import tokenizer
    from stages.tasks.generate import generate

    settings = Generated.model_validate(_with_files(entry.generate or {}))
    text = _text(name, settings.text, out, context) if settings.text else None
    return generate(settings, tokenizer.load(inputs["vocabulary"], context.threads), text)


def _with_files(generate: dict[str, Any]) -> dict[str, Any]:
    return generate | {"text": UNNAMED | generate["text"]} if generate.get("text") else generate


def _text(name: str, given: Text, out: Path, context: Context) -> str:
    """A haystack's text: its files' documents, blank lines between them."""
    from stages.documents import Tally, documents

    reading = sources.Reading(format=given.format, column=given.column)
    with sources.scratch(out) as scratch, _fetched(name + TEXT, given.pin, scratch, context) as paths:
        found = [
            value for path in paths for batch in documents(path, reading, prefix="", tally=Tally()) for value in batch["text"].to_pylist()
        ]
    return b"\n\n".join(found).decode()


if __name__ == "__main__":
    main(run)
