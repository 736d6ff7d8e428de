"""What generated items are made of: words, numbers, uuids, names, all drawn from a given generator."""

from __future__ import annotations

import json
import re
import uuid
from functools import cache
from importlib import resources
from string import ascii_lowercase, ascii_uppercase

import numpy as np


@cache
def lists() -> dict[str, list[str]]:
    """Common English words by kind: adjectives, nouns, verbs."""
    text = (resources.files("stages") / "data" / "words.json").read_text()
    return {kind: words.split() for kind, words in json.loads(text).items()}


def word(random: np.random.Generator) -> str:
    """An adjective and a noun, joined."""
    adjectives, nouns = lists()["adjectives"], lists()["nouns"]
    return f"{adjectives[random.integers(len(adjectives))]}-{nouns[random.integers(len(nouns))]}"


def number(random: np.random.Generator) -> str:
    """Seven digits."""
    return str(random.integers(1_000_000, 10_000_000))


def uuid4(random: np.random.Generator) -> str:
    """A version-4 UUID of 128 random bits."""
    return str(uuid.UUID(bytes=random.bytes(16), version=4))


THINGS = {"words": word, "numbers": number, "uuids": uuid4}


def distinct(kind: str, count: int, random: np.random.Generator) -> list[str]:
    """`count` different things of a kind."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[THINGS[kind](random)] = None
    return list(found)


def letters(size: int, random: np.random.Generator, *, upper: bool = False) -> str:
    alphabet = ascii_uppercase if upper else ascii_lowercase
    return "".join(alphabet[place] for place in random.integers(26, size=size))


def many(count: int, random: np.random.Generator) -> list[str]:
    """`count` different words, in random order: plain ones as far as they go, then joined ones."""
    plain = sorted({one for words in lists().values() for one in words})
    found = [plain[place] for place in random.permutation(len(plain))[:count]]
    return found + distinct("words", count - len(found), random) if count > len(found) else found


def sentences(text: str) -> list[str]:
    """A text cut behind the ends of its sentences, white space run together."""
    return [one for one in re.split(r"(?<=[.!?])\s+", " ".join(text.split())) if one]
