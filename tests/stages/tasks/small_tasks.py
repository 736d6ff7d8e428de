"""What the tests of tasks stand on: GPT-2's vocabulary, items, and a reader whose every answer is known."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from models.reader import Beginning
from stages.tasks.engine import Engine
from stages.tokenizer import GPT2_BOS, GPT2_SHA256, GPT2_SIZE, Tokenizer

COLOURS = [
    {"id": f"c{number}", "context": f"Question: which colour has a {thing}?\nAnswer:", "choices": ["red", "deep blue", "green"], "answer_index": answer,
     "context_options": None, "continuation": None}
    for number, (thing, answer) in enumerate([("rose", 0), ("sea far from the coast", 1), ("leaf", 2), ("brick", 0), ("pea", 2)])
]  # fmt: skip
CAPITALS = [
    {"id": f"p{number}", "context": f"{city} is the capital of {land}. It lies on a river.", "question": f"What is the capital of {land}?", "answers": [city]}
    for number, (land, city) in enumerate([("France", "Paris"), ("Austria", "Vienna"), ("Hungary", "Budapest"), ("Egypt", "Cairo")])
]  # fmt: skip
WORDS = [
    {"id": f"w{number}", "context": f"{word[::-1]} =", "target": word}
    for number, word in enumerate(["casino", "window", "garden", "planet", "silver", "orange", "yellow", "basket"])
]


def vocabulary(folder: Path) -> Path:
    """A vocabulary folder: GPT-2's."""
    record = {"kind": "gpt2", "size": GPT2_SIZE, "bos": GPT2_BOS, "digest": GPT2_SHA256}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(record))
    return folder


class Known:
    """A reader that goes on as `says` tells: (the text so far) -> what it would write next. Each of that text's tokens has a loss of 0.25, any other of 4.

    read: how many tokens were read as shared beginnings. rows: the texts that were read behind them, as they were batched.
    """

    def __init__(self, tokenizer: Tokenizer, says: Callable[[str], str]) -> None:
        self.tokenizer, self.says = tokenizer, says
        self.model = SimpleNamespace(state_floats=lambda length: 1)
        self.read: list[int] = []
        self.rows: list[list[str]] = []

    def begin(self, tokens: np.ndarray) -> Beginning:
        self.read.append(len(tokens))
        return Beginning(tokens, len(tokens))

    def _next(self, tokens: np.ndarray, said: int = 0) -> int:
        """The token after these, of which the last `said` are its own words."""
        assert tokens[0] == GPT2_BOS and GPT2_BOS not in tokens[1:]
        text = self.tokenizer.decode(tokens[1 : len(tokens) - said])
        written = self.tokenizer._plain_tokens(self.says(text).encode())
        return int(written[said]) if said < len(written) else GPT2_BOS

    def score(
        self, beginning: Beginning, tokens_BT1: np.ndarray, segments_BT: np.ndarray, scored_BT: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        nll, likeliest = [], []
        self.rows.append([])
        for tokens, segments, scored in zip(tokens_BT1, segments_BT, scored_BT, strict=True):
            whole = np.concatenate([beginning.state, tokens[: 1 + int((segments >= 0).sum())]])
            self.rows[-1].append(self.tokenizer.decode(whole[1:]))
            places = np.flatnonzero(scored)
            assert places[-1] == (segments >= 0).sum() - 1  # the scored tokens are the text's last
            for said, place in enumerate(places):
                end = len(beginning.state) + place + 1
                likeliest.append(self._next(whole[:end], said))
                nll.append(0.25 if whole[end] == likeliest[-1] else 4.0)
        return np.array(nll, np.float32), np.array(likeliest)

    def go_on(self, beginning: Beginning, tokens_BP: np.ndarray, segments_BP: np.ndarray, room: int) -> Iterator[np.ndarray]:
        texts = [np.concatenate([beginning.state, tokens[segments >= 0]]) for tokens, segments in zip(tokens_BP, segments_BP, strict=True)]
        self.rows.append([self.tokenizer.decode(text[1:]) for text in texts])
        for said in range(room):
            token_B = np.array([self._next(text, said) for text in texts])
            yield token_B
            texts = [np.append(text, token) for text, token in zip(texts, token_B, strict=True)]


def engine(tokenizer: Tokenizer, says: Callable[[str], str], **options: Any) -> Engine:
    return Engine(Known(tokenizer, says), tokenizer, **({"window": 512, "batch_tokens": 1024} | options))
