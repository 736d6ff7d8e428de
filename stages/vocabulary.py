"""Vocabulary: GPT-2's, which the package ships, or a byte-level BPE trained on the training sources.

A vocabulary folder holds tokenizer.json {"kind", "size", "bos", "digest"} and, for bpe, bpe.json (the format of `tokenizers`).
BOS is <|endoftext|>, the one special token: GPT-2's 50256, and 0 of a trained vocabulary. Inside a text it is ordinary text.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, ValidationError, model_serializer, model_validator

from stages import artifact, provenance, sources
from stages.command import main
from stages.documents import SPECIAL, Tally, documents
from stages.engine import told_of_full_disk
from stages.sources import Identity, Reading
from stages.spec import Context, Spec, Stopped, Strict
from stages.tokenizer import BPE, GPT2_BOS, GPT2_SHA256, GPT2_SIZE, RECORD, byte_level

BYTES = 256


class Vocabulary(Strict):
    """`vocabulary:` of params.yaml. size: entries, BOS included. megabytes: of text that a bpe is trained on, in equal parts from each source."""

    kind: Literal["gpt2", "bpe"]
    size: int = Field(default=GPT2_SIZE, gt=BYTES, le=1 << 20)
    megabytes: float = Field(default=8.0, gt=0)

    @model_validator(mode="after")
    def _of_its_kind(self) -> Vocabulary:
        if self.kind == "gpt2" and self.size != GPT2_SIZE:
            raise ValueError(f"the gpt2 vocabulary has {GPT2_SIZE} entries, found size {self.size}; leave size out, or use kind: bpe")
        if self.kind == "gpt2" and "megabytes" in self.model_fields_set:
            raise ValueError("the gpt2 vocabulary is trained on nothing; leave megabytes out, or use kind: bpe")
        return self

    @model_serializer(mode="wrap")
    def _without_megabytes(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What it is made from: gpt2's depends on no text, so its dump, which a spec holds, has no megabytes."""
        return {name: value for name, value in dump(self).items() if name != "megabytes" or self.kind == "bpe"}

    @property
    def bos(self) -> int:
        return GPT2_BOS if self.kind == "gpt2" else 0


class Parameters(Vocabulary):
    """A spec's. sources: how the training sources are read, for bpe."""

    sources: dict[str, Identity] = {}


def run(spec: Spec, out: Path, inputs: dict[str, Path], context: Context) -> None:
    """Write tokenizer.json, and for bpe bpe.json. ValueError where the text is too little for so many entries."""
    started = time.time()
    try:
        parameters = Parameters.model_validate(spec.parameters)
    except ValidationError as error:
        raise ValueError(f"This spec's parameters are not vocabulary's ({error}); `strata run resolve` writes it anew.") from error
    out.mkdir(parents=True, exist_ok=True)
    with told_of_full_disk(out):
        if parameters.kind == "bpe":
            digest = _train(parameters, out, context)
        else:
            digest = GPT2_SHA256
        context.fence()
        record = {"kind": parameters.kind, "size": parameters.size, "bos": parameters.bos, "digest": digest}
        artifact.write_atomically(out / RECORD, json.dumps(record, indent=1, sort_keys=True) + "\n")
        provenance.write(out, spec, context, started=started)
        artifact.write(out, key=spec.key, stage=spec.stage, files=[RECORD] + [BPE] * (parameters.kind == "bpe"), inputs={})


def _train(parameters: Parameters, out: Path, context: Context) -> str:
    """Train, and write bpe.json. The text is the same wherever it is read, and the merges depend on it alone."""
    from tokenizers import pre_tokenizers, trainers

    if not parameters.sources:
        raise ValueError(
            "A bpe vocabulary is trained on the training sources, and this spec has none: give data.sources one with role training."
        )
    files = _pinned(parameters, context)
    tokenizer = byte_level()
    trainer = trainers.BpeTrainer(
        vocab_size=parameters.size,
        special_tokens=[SPECIAL.decode()],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(parameters, out, context, files), trainer)
    if (found := tokenizer.get_vocab_size()) != parameters.size:
        raise ValueError(
            f"The first {parameters.megabytes:g} MB of the training sources give {found} entries, wanted {parameters.size}: "
            "lower vocabulary.size, raise vocabulary.megabytes, or give more text."
        )
    text = json.dumps(json.loads(tokenizer.to_str()), indent=1, ensure_ascii=False) + "\n"
    context.fence()
    artifact.write_atomically(out / BPE, text)
    return artifact.file_digest(out / BPE)


def _pinned(parameters: Parameters, context: Context) -> dict[str, list[sources.File]]:
    """Every source's files, sources by name. ValueError where they are not the ones that a sha256 pins: remote ones are read for it, too."""
    listed = sources.listed(context, parameters.sources)
    found = {name: sources.expand(listed[name], reading.pin) for name, reading in sorted(parameters.sources.items())}
    for name, files in found.items():
        pin = parameters.sources[name].pin
        if pin is not None and pin.startswith("sha256:"):
            sources.check(sources.digests(files), pin, f"the source {name!r}")
    return found


def _texts(parameters: Parameters, out: Path, context: Context, files: dict[str, list[sources.File]]) -> Iterator[str]:
    """The first documents of every source, in the sources' order by name; the last one of each is cut to size."""
    share = int(parameters.megabytes * 1e6 / len(files))
    for number, (name, found) in enumerate(files.items()):
        left = share
        for text in _documents(found, parameters.sources[name], out):
            if context.stop_requested():
                raise Stopped("nothing of the vocabulary is kept; it is quick to make")
            part = text[:left]
            yield part.decode(errors="ignore")
            left -= len(part)
            read = share - left
            # step, of: bytes of all sources; one with less text than its part ends early
            context.progress(stage="vocabulary", step=number * share + read, of=len(files) * share, source=name, megabytes=read / 1e6)
            if left <= 0:
                break


def _documents(files: list[sources.File], reading: Reading, out: Path) -> Iterator[bytes]:
    with sources.scratch(out) as folder:
        for file in files:
            with sources.fetched(file, folder) as path:
                for batch in documents(path, reading, prefix="", tally=Tally()):
                    values: Any = batch["text"]
                    yield from (value.as_py() for value in values)


if __name__ == "__main__":
    main(run)
