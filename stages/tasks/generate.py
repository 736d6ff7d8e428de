"""Generated items: each as large as fits its length in tokens, a function of the settings, the seed and the vocabulary alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from stages import schemas
from stages.tasks import needles, ruler
from stages.tasks.entry import PROMPTS, Generated
from stages.tasks.needles import Item

if TYPE_CHECKING:
    import pyarrow as pa

    from stages.tokenizer import Tokenizer

BATCH = 64


def generate(settings: Generated, tokenizer: Tokenizer, text: str | None) -> pa.Table:
    """`samples` items in the recall schema. BOS, prompt and answer_tokens together are `length` tokens at most.

    Item n draws from a generator of (seed, n): it does not depend on how many there are. ValueError where nothing fits the length.
    """
    import pyarrow as pa

    make = needles.maker(settings, text) if settings.make == "niah" else getattr(ruler, settings.make)(settings)
    room = settings.length - settings.reserved

    def item(number: int, size: int) -> Item:
        return make(np.random.default_rng([settings.seed, number]), size)

    size = largest(lambda tried: _sizes([item(0, tried)], tokenizer)[0] <= room, settings.length)
    if size is None:
        raise ValueError(
            f"A prompt of {settings.make} does not fit in {room} tokens, {settings.reserved} being kept for the answer; raise length."
        )
    columns: dict[str, list[Any]] = {"id": [], "context": [], "question": [], "answers": []}
    for start in range(0, settings.samples, BATCH):
        numbers = range(start, min(start + BATCH, settings.samples))
        for number, made in zip(numbers, _fitted(item, numbers, size, room, tokenizer), strict=True):
            name, context, question, answers = made
            for column, value in zip(columns, (f"{number}-{name}".rstrip("-"), context, question, answers), strict=True):
                columns[column].append(value)
    return pa.table(columns, schema=schemas.schema("recall"))


def largest(fits: Callable[[int], bool], limit: int) -> int | None:
    """The largest size from 0 to `limit` that fits, if larger ones never do where a smaller one does not; None: not even 0."""
    if not fits(0):
        return None
    low, high = 0, limit + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _fitted(item: Callable[[int, int], Item], numbers: Sequence[int], size: int, room: int, tokenizer: Tokenizer) -> list[Item]:
    """The items of a size, those that come out too long made again a little smaller."""
    sizes = dict.fromkeys(numbers, size)
    made: dict[int, Item] = {}
    left = list(numbers)
    while left:
        tried = [item(number, sizes[number]) for number in left]
        again = []
        for number, one, tokens in zip(left, tried, _sizes(tried, tokenizer), strict=True):
            if tokens <= room:
                made[number] = one
            elif sizes[number] == 0:
                raise ValueError(f"Item {number} does not fit in {room} tokens; raise length.")
            else:
                sizes[number] = max(0, sizes[number] - max(1, sizes[number] // 32))
                again.append(number)
        left = again
    return [made[number] for number in numbers]


def _sizes(items: Sequence[Item], tokenizer: Tokenizer) -> list[int]:
    """Tokens of each prompt as recall tasks ask it, BOS included."""
    import pyarrow as pa

    prompts = [PROMPTS["recall"].format(context=context, question=question).encode() for _, context, question, _ in items]
    return [1 + len(tokens) for tokens in tokenizer.encode(pa.array(prompts, pa.large_binary()))]
