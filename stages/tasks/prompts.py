"""What of an item goes to a model: the examples before it, its prompt, and what is scored behind it, as text and as tokens.

Tokens are those of the whole text. Each part but the first begins with white space and none ends with it, and there, between a
character that is no white space and white space, the tokenizers' split always cuts: so examples are encoded once, for all items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stages.tasks.entry import Scoring

Row = dict[str, Any]
Encode = Callable[[Sequence[str]], list[np.ndarray]]
Decode = Callable[[Iterable[int]], str]


@dataclass(frozen=True)
class Ask:
    """An item as a model is asked it. context: int32 tokens before what is scored or gone on with; contexts differ only where options are in them.

    options: int32 tokens of each option (none: go on). bytes: of each. truncated: some of it did not fit. answer_cut: an answer was in what did not.
    """

    contexts: list[np.ndarray]
    options: list[np.ndarray]
    bytes: list[int]
    truncated: bool = False
    answer_cut: bool = False

    def room(self, new_tokens: int) -> int:
        """Input tokens that it takes: all but the last of what follows is read, too."""
        behind = max((len(option) for option in self.options), default=new_tokens)
        return max(len(context) for context in self.contexts) + behind - 1


def fill(template: str, row: Row) -> str:
    """A template's text for an item."""
    return template.format_map({name: "" if value is None else value for name, value in row.items()})


def asked(scoring: Scoring, row: Row, *, alone: bool) -> list[tuple[str, str]]:
    """(what comes before, what is scored) of each option; one pair with the target or the first answer where there is no choice.

    alone: asked without examples.
    """
    template = scoring.zero_shot if alone and scoring.zero_shot is not None else scoring.get("prompt")
    if scoring.kind != "multiple_choice":
        target = row["answers"][0] if scoring.kind == "recall" else row["target"]
        return [(fill(template, row), scoring.delimiter + target)]
    if row["context_options"] is None:
        return [(fill(template, row), scoring.delimiter + choice) for choice in row["choices"]]
    pairs = []
    for option, choice in zip(row["context_options"], row["choices"], strict=True):
        if scoring.get("options") == "partial":
            pairs.append((fill(template, row | {"context": option}), scoring.delimiter + row["continuation"]))
        else:
            before = option.removesuffix(choice).rstrip()
            pairs.append((fill(template, row | {"context": before}), f"{scoring.delimiter}{choice} {row['continuation']}"))
    return pairs


def example(scoring: Scoring, row: Row) -> str:
    """An item with its answer, as an example for others."""
    before, answer = asked(scoring, row, alone=False)[row["answer_index"] if scoring.kind == "multiple_choice" else 0]
    return (before + answer).strip()


def pieces(scoring: Scoring, examples: Sequence[str]) -> tuple[list[str], list[str]]:
    """(description and examples as they follow one another, what leads an item on behind the first 0, 1, ... of the examples)."""
    described = scoring.description.rstrip()
    lead = scoring.description[len(described) :]
    found, leads = [described], [lead]
    for text in examples:
        found.append(lead + text)
        lead = scoring.separator
        leads.append(lead)
    return found, leads


def ask(scoring: Scoring, rows: Sequence[Row], lead: str, *, alone: bool, encode: Encode) -> list[Ask]:
    """Items behind the examples that `lead` follows."""
    pairs = [asked(scoring, row, alone=alone) for row in rows]
    split = [[_shifted(lead + before, answer) for before, answer in of_item] for of_item in pairs]
    scored = scoring.kind in ("multiple_choice", "greedy")
    texts: dict[str, int] = {}
    for of_item in split:
        for before, answer in of_item:
            texts.setdefault(before, len(texts))
            if scored:
                texts.setdefault(answer if _safe(before, answer) else before + answer, len(texts))
    tokens = dict(zip(texts, encode(list(texts)), strict=True))
    made = []
    for of_item, of_pairs in zip(split, pairs, strict=True):
        contexts = [tokens[before] for before, _ in of_item]
        options = [_behind(before, answer, tokens) for before, answer in of_item] if scored else []
        sizes = [len(answer.removeprefix(scoring.delimiter).encode()) for _, answer in of_pairs] if scored else []
        made.append(Ask(contexts, options, sizes))
    return made


def _shifted(before: str, answer: str) -> tuple[str, str]:
    """White space at the end of the context goes over to the answer, as in lm-eval."""
    kept = before.rstrip()
    return kept, before[len(kept) :] + answer


def _safe(before: str, answer: str) -> bool:
    return not before or answer[:1].isspace()


def _behind(before: str, answer: str, tokens: dict[str, np.ndarray]) -> np.ndarray:
    """The answer's tokens: what the whole text has behind as many as its beginning has alone."""
    if _safe(before, answer):
        return tokens[answer]
    found = tokens[before + answer]
    return found[min(len(tokens[before]), len(found) - 1) :]


def cut(scoring: Scoring, one: Ask, row: Row, limit: int, lead: str, *, encode: Encode, decode: Decode) -> Ask:
    """The item with contexts of at most `limit` tokens. A recall prompt loses some of its context at `cut`, so that the question stays; others their start."""
    if max(len(context) for context in one.contexts) <= limit:
        return one
    if scoring.kind != "recall" or "{context}" not in scoring.get("prompt"):
        return replace(one, contexts=[context[max(0, len(context) - limit) :] for context in one.contexts], truncated=True)
    before, after = scoring.get("prompt").split("{context}")
    head, passage, tail = encode([lead + fill(before, row), row["context"], fill(after, row).rstrip()])
    kept = max(0, limit - len(head) - len(tail))
    passage = passage[len(passage) - kept :] if scoring.get("cut") == "start" else passage[:kept]
    context = np.concatenate([head, passage, tail])
    missing = _contained(row["context"], row["answers"]) and not _contained(decode(passage), row["answers"])
    return replace(one, contexts=[context[max(0, len(context) - limit) :]], truncated=True, answer_cut=missing)


def _contained(text: str, answers: Iterable[str]) -> bool:
    return any(answer.lower() in text.lower() for answer in answers)
