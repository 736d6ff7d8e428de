"""Evaluates a task's items: draws the examples, batches by length behind one shared beginning, scores or goes on.

Every sequence is padded to its own length's class, whatever it stands beside, so results do not depend on the batch beyond rounding.
Shapes: B batch, P prompt tokens, T time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from models.reader import Beginning, size_class
from stages.tasks import prompts
from stages.tasks.entry import Scoring
from stages.tasks.prompts import Ask, Row

if TYPE_CHECKING:
    from stages.tokenizer import Tokenizer

STATE_FLOATS = 1 << 30  # of a batch's states: what its rows' memories may take


@dataclass
class Answer:
    """What the model gave to an item. nll: of each option, nats. likeliest: the tokens it would have put in the place of the last option's; or went on with."""

    nll: list[float] = field(default_factory=list)
    likeliest: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    matched: bool = False


@dataclass
class Engine:
    """reader: models.reader's. window: tokens given at most. seen: called with the items done so far, and may raise to stop.

    ending: bool [V], the tokens at which going on ends; None: those of `stops`.
    """

    reader: Any
    tokenizer: Tokenizer
    window: int
    batch_tokens: int
    seen: Callable[[int], None] = lambda items: None
    ending: np.ndarray | None = None

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """int32 tokens of each text; the first is compared with the reference encoder's (see tokenizer.py)."""
        import pyarrow as pa

        if not texts:
            return []
        array = pa.array([text.encode() for text in texts], pa.large_binary())
        tokens = self.tokenizer.encode(array)
        if (reason := self.tokenizer.difference(array, tokens, seed=0)) is not None:
            self.tokenizer.fall_back(reason)
            tokens = self.tokenizer.encode(array)
        return [one.values.to_numpy().astype(np.int32) for one in tokens]

    def decode(self, tokens: Iterable[int]) -> str:
        return self.tokenizer.decode(tokens)

    def evaluate(self, scoring: Scoring, rows: Sequence[Row], examples: Sequence[Row]) -> Iterator[tuple[int, int, Ask, Answer]]:
        """(item's place in `rows`, examples that fitted before it, how it was asked, what came) of each item, in no order."""
        texts = [prompts.example(scoring, row) for row in examples]
        parts, leads = prompts.pieces(scoring, texts)
        tokens = [part for part in self.encode(parts)]
        sizes = 1 + np.cumsum([len(part) for part in tokens])  # with BOS, behind 0, 1, ... examples
        new_tokens = scoring.get("new_tokens") or 0

        def limit(one: Ask) -> int:
            """Tokens of beginning and context together."""
            behind = max((len(option) for option in one.options), default=new_tokens)
            most = self.window - behind + 1
            return min(most, scoring.get("truncate")) if scoring.kind == "recall" else most

        def need(one: Ask) -> int:
            return max(len(context) for context in one.contexts)

        groups: dict[int, list[tuple[int, Ask]]] = {}
        asks = prompts.ask(scoring, rows, leads[-1], alone=not texts, encode=self.encode)
        for place, one in enumerate(asks):
            used = next((number for number in range(len(texts), 0, -1) if sizes[number] + need(one) <= limit(one)), 0)
            groups.setdefault(used, []).append((place, one))
        if texts and 0 in groups:
            places = [place for place, _ in groups[0]]
            again = prompts.ask(scoring, [rows[place] for place in places], leads[0], alone=False, encode=self.encode)
            groups[0] = list(zip(places, again, strict=True))
        done = 0
        for used, group in sorted(groups.items()):
            lead = leads[0] if used == 0 else scoring.separator
            fitted = [
                prompts.cut(scoring, one, rows[place], max(1, limit(one) - int(sizes[used])), lead, encode=self.encode, decode=self.decode)
                for place, one in group
            ]
            beginning = np.concatenate([[self.tokenizer.bos], *tokens[: used + 1]]).astype(np.int32)
            state = self.reader.begin(beginning[:-1])  # the last token is read with each item: it predicts where a context is empty
            for index, answer in self.answers(state, beginning[-1:], fitted, new_tokens, done):
                yield group[index][0], used, fitted[index], answer
            done += len(group)

    def answers(self, state: Beginning, last: np.ndarray, asks: list[Ask], new_tokens: int, done: int = 0) -> Iterator[tuple[int, Answer]]:
        """(place, what came) of each of `asks`, in no order, read behind `state` and the token `last`. All have options, or none has."""
        if asks[0].options:
            yield from self._scored(state, last, asks, done)
            return
        texts = [np.concatenate([last, one.contexts[0]]) for one in asks]
        finished = 0
        for length, batch in self._batches(state, [len(text) for text in texts], new_tokens):
            tokens_BP, segments_BP = _padded([texts[index] for index in batch], length, in_front=True)
            for index, answer in zip(batch, self._going_on(state, tokens_BP, segments_BP, new_tokens), strict=True):
                yield index, Answer(likeliest=answer)
            finished += len(batch)
            self.seen(done + finished)

    def _scored(self, state: Beginning, last: np.ndarray, asks: list[Ask], done: int) -> Iterator[tuple[int, Answer]]:
        """Options are sequences of their own; an item is given when it has all of its."""
        lines = [(index, number) for index, one in enumerate(asks) for number in range(len(one.options))]
        texts = [np.concatenate([last, asks[index].contexts[number], asks[index].options[number]]) for index, number in lines]
        answers = [Answer(nll=[float("nan")] * len(one.options)) for one in asks]
        missing = [len(one.options) for one in asks]
        finished = 0
        for length, batch in self._batches(state, [len(text) - 1 for text in texts]):
            tokens_BT1, segments_BT1 = _padded([texts[line] for line in batch], length + 1, in_front=False)
            counts = [len(asks[index].options[number]) for index, number in (lines[line] for line in batch)]
            ends = [len(texts[line]) - 1 for line in batch]
            place_T = np.arange(length)
            scored_BT = (place_T < np.array(ends)[:, None]) & (place_T >= np.subtract(ends, counts)[:, None])
            nll_N, likeliest_N = self.reader.score(state, tokens_BT1, segments_BT1[:, 1:], scored_BT)
            starts = np.cumsum([0, *counts])
            for row, line in enumerate(batch):
                index, number = lines[line]
                part = slice(starts[row], starts[row + 1])
                nll = float(nll_N[part].astype(np.float64).sum())
                answers[index].nll[number] = nll if np.isfinite(nll) else float("inf")
                answers[index].likeliest = likeliest_N[part]
                answers[index].matched = bool((likeliest_N[part] == asks[index].options[number]).all())
                missing[index] -= 1
                if not missing[index]:
                    finished += 1
                    yield index, answers[index]
            self.seen(done + finished)

    def _going_on(self, state: Beginning, tokens_BP: np.ndarray, segments_BP: np.ndarray, new_tokens: int) -> list[np.ndarray]:
        """Tokens of each row up to a line's end, without it, or to `new_tokens`."""
        ending = stops(self.tokenizer) if self.ending is None else self.ending
        found: list[list[int]] = [[] for _ in tokens_BP]
        ended = np.zeros(len(tokens_BP), bool)
        for token_B in self.reader.go_on(state, tokens_BP, segments_BP, new_tokens):
            for row in np.flatnonzero(~ended):
                found[row].append(int(token_B[row]))
            ended |= ending[token_B]
            if ended.all():
                break
        return [np.array(tokens, np.int64) for tokens in found]

    def _batches(self, state: Beginning, lengths: list[int], behind: int = 0) -> Iterator[tuple[int, list[int]]]:
        """(padded length, places) of what is read together: as many as batch_tokens, and the memory for states, hold."""
        classes: dict[int, list[int]] = {}
        for place, length in enumerate(lengths):
            # Steps take longer than reading: those that are gone on with are fewer, larger batches.
            classes.setdefault(size_class(length, 1 if behind else 4), []).append(place)
        for length, places in sorted(classes.items()):
            floats = self.reader.model.state_floats(state.tokens + length + behind)
            size = max(1, min(self.batch_tokens // length, STATE_FLOATS // max(1, floats)))
            yield from ((length, places[start : start + size]) for start in range(0, len(places), size))


@cache
def stops(tokenizer: Tokenizer) -> np.ndarray:
    """bool [V]: tokens with a line's end in them, and BOS, which ends a text."""
    found = np.array(["\n" in tokenizer.decode([token]) for token in range(tokenizer.size)])
    found[tokenizer.bos] = True
    return found


def _padded(texts: list[np.ndarray], length: int, *, in_front: bool) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, segments), int32 [B, length]: segment 0, and -1 where there is padding."""
    tokens, segments = np.zeros((len(texts), length), np.int32), np.full((len(texts), length), -1, np.int32)
    for row, text in enumerate(texts):
        place = slice(length - len(text), length) if in_front else slice(0, len(text))
        tokens[row, place], segments[row, place] = text, 0
    return tokens, segments
