"""`tasks:` of params.yaml: what a task is. Its items are data in the schema of its kind (see schemas.COLUMNS); these lines say the rest.

kind             schema           what is scored
multiple_choice  multiple_choice  the option with the least negative log likelihood, under a normalisation
greedy           prompt_target    whether every token of the target is the likeliest, the target's earlier tokens given
generation       prompt_target    BLEU of what the model goes on with
recall           recall           whether what the model goes on with contains an answer
"""

from __future__ import annotations

from string import Formatter
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from stages.sources import PIN, Format
from stages.spec import Strict

Kind = Literal["multiple_choice", "greedy", "recall", "generation"]
SCHEMAS: dict[str, str] = {
    "multiple_choice": "multiple_choice",
    "greedy": "prompt_target",
    "generation": "prompt_target",
    "recall": "recall",
}
FIELDS = {
    "multiple_choice": ("id", "context", "choices", "answer_index", "context_options", "continuation"),
    "prompt_target": ("id", "context", "target"),
    "recall": ("id", "context", "question", "answers"),
}
PROMPTS = {"multiple_choice": "{context}", "greedy": "{context}", "generation": "{context}", "recall": "{context}\n{question}"}
NEW_TOKENS = {"recall": 48, "generation": 128}  # MesaNet, appendix N; GPT-3's translation
ANSWER_TOKENS = {"niah": 128, "variable_tracing": 30, "common_words": 120, "frequent_words": 50}  # RULER's
TRUNCATED = 2000  # tokens of a recall prompt (MesaNet, appendix L.2)
Word = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_.-]*$")]


def default(name: str, kind: str) -> Any:
    """What an option of one kind is where params.yaml leaves it out."""
    return {
        "prompt": PROMPTS[kind],
        "normalisation": "tokens",
        "options": "full",
        "truncate": TRUNCATED,
        "cut": "start",
        "answers": "any",
        "new_tokens": NEW_TOKENS.get(kind),
    }[name]


OF_KIND = {
    "normalisation": ("multiple_choice",),
    "options": ("multiple_choice",),
    "truncate": ("recall",),
    "cut": ("recall",),
    "answers": ("recall",),
    "new_tokens": ("recall", "generation"),
}


def _pin(value: str | None) -> str | None:
    if value is not None and not PIN.fullmatch(value):
        raise ValueError(f"a pin is 'sha256:<64 hex digits>' or 'revision:<40 hex digits>', found {value!r}; `strata lock-data` writes it")
    return value


class Text(Strict):
    """Files of running text, for haystacks. column: of the text."""

    files: list[str] = Field(min_length=1)
    pin: str | None = None
    format: Format = "auto"
    column: str = "text"

    _check_pin = field_validator("pin")(_pin)

    def identity(self) -> dict[str, Any]:
        return _identity(self)


class Files(Strict):
    """Files of items: Parquet, JSON lines, or Arrow, one item a row.

    columns: field of the schema -> the file's column, where they differ. where: only rows whose column has this value; a text may
    hold * and ?. original: how rows of a set's original form become items (a name of stages/tasks/originals.py). pin: see stages/sources.py.
    """

    files: list[str] = Field(min_length=1)
    pin: str | None = None
    format: Literal["auto", "parquet", "jsonl", "arrow"] = "auto"
    columns: dict[str, str] = {}
    where: dict[str, str | int | float | bool | None] = {}
    original: str | None = None

    _check_pin = field_validator("pin")(_pin)

    @model_validator(mode="after")
    def _known(self) -> Files:
        from stages.tasks.originals import ORIGINALS

        if self.original is not None and self.original not in ORIGINALS:
            raise ValueError(f"original is {self.original!r}; it is one of {', '.join(sorted(ORIGINALS))}, or null for rows that are items")
        if self.original is not None and self.columns:
            raise ValueError("columns and original are two ways to say what a row is; give one of them")
        return self

    def identity(self) -> dict[str, Any]:
        return _identity(self)


def _identity(source: Text | Files) -> dict[str, Any]:
    """What items depend on of their source, defaults left out: the files' names only where the pin is a revision of a whole repository."""
    whole = source.pin is not None and source.pin.startswith("revision:")
    return source.model_dump(exclude=set() if whole else {"files"}, exclude_defaults=True)


Things = Literal["words", "numbers", "uuids"]


class Generated(Strict):
    """Items made by code from a seed (see needles.py and ruler.py): RULER's tasks, in the recall schema.

    make: which. length: tokens of a whole prompt with the answer, BOS included, under the study's vocabulary. samples: items. seed: of all
    draws. haystack: what needles lie in: "noise", a filler sentence over and over; "needles", more needles; or the `text` given.
    keys: needles with keys of their own; values: of each key; queries: keys asked for. key_type, value_type: of what they are made.
    depths: places a needle may lie at, evenly from start to end. chains, hops: of variable_tracing. common: words asked for of common_words.
    answer_tokens: kept for the answer; None: RULER's number.
    """

    make: Literal["niah", "variable_tracing", "common_words", "frequent_words"]
    length: int = Field(ge=64)
    samples: int = Field(ge=1, default=500)
    seed: int = Field(ge=0, default=42)
    haystack: Literal["noise", "needles", "text"] = "noise"
    text: Text | None = None
    keys: int = Field(ge=1, default=1)
    values: int = Field(ge=1, default=1)
    queries: int = Field(ge=1, default=1)
    key_type: Things = "words"
    value_type: Things = "numbers"
    depths: int = Field(ge=1, default=40)
    chains: int = Field(ge=1, default=1)
    hops: int = Field(ge=1, default=4)
    common: int = Field(ge=1, default=10)
    answer_tokens: int | None = Field(ge=1, default=None)

    @property
    def reserved(self) -> int:
        """Tokens of the length that are kept for the answer."""
        return self.answer_tokens or ANSWER_TOKENS[self.make]

    @model_validator(mode="after")
    def _fits(self) -> Generated:
        if (self.haystack == "text") != (self.text is not None):
            raise ValueError("text gives the files of a haystack of text; give it with `haystack: text` and only there")
        if self.queries > self.keys:
            raise ValueError(f"queries is {self.queries}, more than the {self.keys} keys")
        if self.make != "niah" and self.haystack != "noise":
            raise ValueError(f"haystack is niah's; {self.make} makes its own")
        return self


class Only(Strict):
    """The cells that a task is for: those whose model, scale and budget are listed; an empty list takes all."""

    models: list[str] = []
    scales: list[str] = []
    budgets: list[str] = []

    def takes(self, model: str, scale: str, budget: str) -> bool:
        return all(not names or name in names for names, name in ((self.models, model), (self.scales, scale), (self.budgets, budget)))


class Scoring(Strict):
    """How items are asked and scored: the part of a task that its results depend on beside its items.

    version: of the task itself; raise it to have it evaluated anew. prompt: a template over the item's fields. delimiter: between prompt and answer.
    shots: examples before each item, one evaluation for each number. draws: of the examples, each evaluated. description: text before them.
    zero_shot: the prompt without examples, where it is another. separator: between examples; it begins with white space. limit: items, drawn by
    seed; None: all. window: tokens that a model is given at most; None: the training's sequence length, or a generated item's length.

    normalisation: an option's negative log likelihood by its tokens (MesaNet, appendix N), by its bytes, or "none".
    options: where an item has context_options (WinoGrande): "full" scores option and continuation after what precedes the option, "partial"
    the continuation alone after each.
    truncate: a prompt's tokens at most, by cutting its context at `cut`, so that the question stays. new_tokens: to go on with at most.
    answers: whether "any" of them must be contained, or the score is the share of "all".
    """

    kind: Kind
    version: int = Field(ge=1, default=1)
    prompt: str | None = None
    zero_shot: str | None = None
    description: str = ""
    separator: str = "\n\n"
    delimiter: str = " "
    shots: list[Annotated[int, Field(ge=0)]] = Field(min_length=1, default=[0])
    draws: int = Field(ge=1, default=1)
    limit: int | None = Field(ge=1, default=None)
    seed: int = Field(ge=0, default=0)
    window: int | None = Field(ge=2, default=None)
    normalisation: Literal["tokens", "none", "bytes"] | None = None
    options: Literal["full", "partial"] | None = None
    truncate: int | None = Field(ge=2, default=None)
    cut: Literal["start", "end"] | None = None
    answers: Literal["any", "all"] | None = None
    new_tokens: int | None = Field(ge=1, default=None)

    def get(self, name: str) -> Any:
        """An option, or its default for this kind."""
        value = getattr(self, name)
        return default(name, self.kind) if value is None else value

    @model_validator(mode="after")
    def _of_its_kind(self) -> Scoring:
        for name, kinds in OF_KIND.items():
            if getattr(self, name) is not None and self.kind not in kinds:
                raise ValueError(f"{name} is an option of {' and '.join(kinds)} tasks; this one is {self.kind}")
        for name in ("prompt", "zero_shot"):
            if (template := getattr(self, name)) is not None:
                _check_template(name, template, FIELDS[SCHEMAS[self.kind]])
        if self.kind == "recall" and self.get("prompt").count("{context}") > 1:
            raise ValueError("prompt has {context} more than once, so that it cannot be cut to length")
        if not self.separator[:1].isspace():
            raise ValueError(
                f"separator is {self.separator!r}; it must begin with white space, so that examples keep their tokens before any item"
            )
        if twice := sorted({number for number in self.shots if self.shots.count(number) > 1}):
            raise ValueError(f"shots lists {twice[0]} twice")
        return self


class Task(Scoring):
    """An entry of `tasks:`. items or generate: where its items come from. examples: where few-shot examples do; None: from the items that `limit`
    leaves over. group: the mean it is part of. only: the cells it is for. settings: of `evaluation.settings`, those it is evaluated under besides, in the
    cells that settings_only lists.
    """

    items: Files | None = None
    generate: Generated | None = None
    examples: Files | None = None
    group: Word | None = None
    only: Only = Only()
    settings: list[str] = []
    settings_only: Only = Only()

    @model_validator(mode="after")
    def _has_items(self) -> Task:
        if (self.items is None) == (self.generate is None):
            raise ValueError("a task has either items (files) or generate (a generator); give one of them")
        if self.generate is not None and self.kind != "recall":
            raise ValueError(f"generated items are for recall tasks; this one is {self.kind}")
        if max(self.shots) and self.examples is None and self.limit is None:
            raise ValueError(
                "shots need examples of their own (examples: {files: ...}), or a limit that leaves items over to draw them from"
            )
        return self

    def scoring(self) -> dict[str, Any]:
        """What `Scoring` holds, as a spec has it: defaults left out. Generated items are asked whole and for all of their answers."""
        found = self.model_dump(include=set(Scoring.model_fields), exclude_defaults=True) | {"kind": self.kind}
        if self.generate is not None:
            length = self.generate.length
            found = {"window": length, "truncate": length, "new_tokens": self.generate.reserved, "answers": "all"} | found
        return found

    def sources(self) -> dict[str, Text | Files]:
        """The files it reads, by the place in its entry that names them."""
        text = self.generate.text if self.generate else None
        return {name: one for name, one in (("items", self.items), ("examples", self.examples), ("generate.text", text)) if one is not None}


def _check_template(name: str, template: str, fields: tuple[str, ...]) -> None:
    try:
        parts = [(field, spec, conversion) for _, field, spec, conversion in Formatter().parse(template)]
    except ValueError as error:
        raise ValueError(f"{name} is no template ({error}); a brace that stands for itself is written twice") from error
    for field, spec, conversion in parts:
        if field is not None and (field not in fields or spec or conversion):
            raise ValueError(f"{name} has {{{field}}}, which is no field of its items; they have {', '.join(fields)}")
