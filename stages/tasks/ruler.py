"""RULER's tasks beside needles: variable tracing, common words, frequent words (Hsieh et al. 2024, sections 3.2 and 3.3).

Sizes and counts are the paper's and its code's; the wording of prompts is ours.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from stages.tasks import words
from stages.tasks.entry import Generated
from stages.tasks.needles import NOISE, Item

Maker = Callable[[np.random.Generator, int], Item]
LONG = 4096  # tokens from which the common words are repeated more often
ZIPF = 2.0


def variable_tracing(settings: Generated) -> Maker:
    """Chains X1 = number, X2 = X1, ...: which variables hold the first chain's number? One short example precedes."""

    def chains(random: np.random.Generator, letters: int) -> list[tuple[str, list[str]]]:
        names: dict[str, None] = {}
        while len(names) < settings.chains * (settings.hops + 1):
            names[words.letters(letters, random, upper=True)] = None
        numbers: dict[str, None] = {}
        while len(numbers) < settings.chains:
            numbers[str(random.integers(10_000, 99_999))] = None
        size = settings.hops + 1
        return [(number, list(names)[index * size : (index + 1) * size]) for index, number in enumerate(numbers)]

    def text(made: list[tuple[str, list[str]]], size: int, random: np.random.Generator) -> str:
        lines: list[list[str]] = [[] for _ in range(size + 1)]
        for number, names in made:
            places = np.sort(random.integers(0, size + 1, len(names)))
            for index, (place, name) in enumerate(zip(places, names, strict=True)):
                lines[place].append(f"VAR {name} = {number if index == 0 else f'VAR {names[index - 1]}'}.")
        return " ".join(one for index in range(size + 1) for one in (*lines[index], *([NOISE[index % len(NOISE)]] if index < size else [])))

    def question(number: str, count: int) -> str:
        return (
            f"Which variables are assigned the value {number} in the text above? "
            f"By the chains of assignments in the text above, {count} variables are assigned the value {number}, they are:"
        )

    told = "Keep track of the variables that are assigned in the following text, directly or by way of another.\n"

    def make(random: np.random.Generator, size: int) -> Item:
        first = chains(random, 3)
        number, names = first[0]
        shown = f"{told}{text(first, 2 * len(NOISE), random)}\n{question(number, len(names))} {' '.join(names)}\n\n"
        made = chains(random, 5)
        number, names = made[0]
        return "", f"{shown}{told}{text(made, size, random)}", question(number, len(names)), names

    return make


def common_words(settings: Generated) -> Maker:
    """A numbered list in which some words come often, the others seldom: which are they? One short example precedes."""
    often, seldom = (30, 3) if settings.length >= LONG else (6, 1)
    shown_words, shown_often, shown_seldom = (40, 10, 3) if settings.length >= LONG else (20, 3, 1)

    def listed(random: np.random.Generator, distinct: int, often: int, seldom: int) -> tuple[str, list[str]]:
        drawn = words.many(distinct, random)
        common = drawn[: settings.common]
        full = common * often + drawn[settings.common :] * seldom
        order = random.permutation(len(full))
        return " ".join(f"{index}. {full[place]}" for index, place in enumerate(order, 1)), common

    told = "In the following numbered list some words come often. Keep in mind those that come most.\n"
    question = f"Which {settings.common} words come most often in the list above? The {settings.common} words that come most often are:"

    def make(random: np.random.Generator, size: int) -> Item:
        example, right = listed(random, max(shown_words, settings.common), shown_often, shown_seldom)
        shown = f"{told}{example}\n{question} {' '.join(f'{index}. {one}' for index, one in enumerate(right, 1))}\n\n"
        text, common = listed(random, settings.common + size, often, seldom)
        return "", f"{shown}{told}{text}", question, common

    return make


def frequent_words(settings: Generated) -> Maker:
    """Made-up words whose counts fall by Zipf's law, the first of them dots: which are the next three?"""
    kinds = max(8, settings.length // 50)
    weight = np.arange(1, kinds + 1, dtype=np.float64) ** -ZIPF / (np.pi**2 / 6)  # zeta(2)

    def make(random: np.random.Generator, size: int) -> Item:
        coded: dict[str, None] = {}
        while len(coded) < kinds - 1:
            coded[words.letters(6, random)] = None
        ranked = ["...", *coded]
        counts = np.floor((size + 40) * weight).astype(int)
        full = [one for one, count in zip(ranked, counts, strict=True) for _ in range(count)]
        text = " ".join(full[place] for place in random.permutation(len(full)))
        told = "Keep count of each word of the following coded text. The dots mean nothing.\n"
        question = "Which three words come most often in the coded text above? The three words that come most often are:"
        return "", told + text, question, ranked[1:4]

    return make
