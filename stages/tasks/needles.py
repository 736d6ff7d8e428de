"""Needles in a haystack: keys' values lie in a long text and are asked for at its end (RULER, Hsieh et al. 2024, section 3.1).

The noise is the filler of the passkey task (Mohtashami and Jaggi 2023); the questions' wording is ours.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from stages.tasks import words
from stages.tasks.entry import Generated

NOISE = ["The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again."]
SINGULAR = {"words": "word", "numbers": "number", "uuids": "uuid"}
Item = tuple[str, str, str, list[str]]  # what tells it apart, context, question, answers


def needle(kind: str, key: str, value: str) -> str:
    return f"One of the special magic {kind} for {key} is: {value}."


def maker(settings: Generated, text: str | None) -> Callable[[np.random.Generator, int], Item]:
    """(generator, sentences of the haystack) -> item."""
    kind = settings.value_type
    pool = words.sentences(text) if text is not None else NOISE
    if not pool:
        raise ValueError("The haystack's text has no sentence; give other files.")

    def make(random: np.random.Generator, size: int) -> Item:
        keys = words.distinct(settings.key_type, settings.keys, random)
        values = words.distinct(kind, settings.keys * settings.values, random)
        held = [(key, values[index * settings.values : (index + 1) * settings.values]) for index, key in enumerate(keys)]
        needles = [needle(kind, key, value) for key, of_key in held for value in of_key]
        needles = [needles[place] for place in random.permutation(len(needles))]
        if settings.haystack == "needles":
            draw = words.THINGS
            hay = [needle(kind, draw[settings.key_type](random), draw[kind](random)) for _ in range(size)]
        else:
            hay = [pool[index % len(pool)] for index in range(size)]
        depths = _depths(settings.depths, len(needles), random)
        places = [round(size * depth) for depth in depths]
        lines: list[str] = []
        for index in range(size + 1):
            lines += [one for one, place in zip(needles, places, strict=True) if place == index]
            lines += hay[index : index + 1]
        queried = [held[place] for place in sorted(random.permutation(len(held))[: settings.queries])]
        answers = [value for _, of_key in queried for value in of_key]
        joint = " " if settings.haystack == "text" else "\n"
        name = "-".join(f"{100 * depth:.0f}" for depth in depths)
        return (
            f"depth-{name}",
            _told(kind, len(needles)) + joint.join(lines),
            _asked(kind, [key for key, _ in queried], len(answers)),
            answers,
        )

    return make


def _depths(count: int, needles: int, random: np.random.Generator) -> list[float]:
    """Where needles lie, from 0 (start) to 1 (end): different ones of the evenly spaced depths, as far as there are."""
    spaced = np.linspace(0, 1, count) if count > 1 else np.array([0.5])
    order = np.concatenate([random.permutation(count) for _ in range(-(-needles // count))])[:needles]
    return sorted(float(spaced[place]) for place in order)


def _told(kind: str, needles: int) -> str:
    hidden = f"A special magic {SINGULAR[kind]} is" if needles == 1 else f"Some special magic {kind} are"
    return f"{hidden} hidden in the following text. Keep in mind what you read: it is asked for afterwards.\n"


def _asked(kind: str, keys: list[str], answers: int) -> str:
    queried = keys[0] if len(keys) == 1 else ", ".join(keys[:-1]) + " and " + keys[-1]
    if answers == 1:
        what, verb, all_ = f"the special magic {SINGULAR[kind]}", "is", ""
    else:
        what, verb, all_ = f"the special magic {kind}", "are", "all "
    return f"What {verb} {all_}{what} for {queried} in the text above? {what[0].upper()}{what[1:]} for {queried} in the text above {verb}"
