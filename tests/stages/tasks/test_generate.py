"""Generated items: fitting, deterministic, answerable from their text, and as the settings say."""

import re
from collections import Counter

import numpy as np
import pytest

from stages.tasks import words
from stages.tasks.entry import PROMPTS, Generated
from stages.tasks.generate import generate, largest

ESSAY = " ".join(f"Sentence number {n} of an essay tells of {word}s." for n, word in enumerate(words.lists()["nouns"]))
KINDS = {
    "words": r"[a-z]+-[a-z]+",
    "numbers": r"[1-9]\d{6}",
    "uuids": r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
}
ALL = [
    {"make": "niah", "length": 512},
    {"make": "niah", "length": 700, "haystack": "text", "text": {"files": ["-"]}, "keys": 4, "values": 2, "queries": 2},
    {"make": "niah", "length": 900, "haystack": "needles", "key_type": "uuids", "value_type": "uuids"},
    {"make": "variable_tracing", "length": 512, "chains": 2, "hops": 3},
    {"make": "common_words", "length": 900},
    {"make": "frequent_words", "length": 512},
]


def made(tokenizer, samples=6, **settings):
    settings = Generated.model_validate({"samples": samples} | settings)
    return generate(settings, tokenizer, ESSAY if settings.haystack == "text" else None).to_pylist()


def tokens(tokenizer, row):
    return 1 + len(tokenizer._plain_tokens(PROMPTS["recall"].format(**row).encode()))


@pytest.mark.parametrize("settings", ALL)
def test_prompts_fill_their_length_and_hold_the_answers(tokenizer, settings):
    room = settings["length"] - Generated.model_validate(settings).reserved
    rows = made(tokenizer, **settings)
    assert len(rows) == 6 and len({row["id"] for row in rows}) == 6 and len({row["context"] for row in rows}) == 6
    for row in rows:
        assert 0.75 * room < tokens(tokenizer, row) <= room
        assert all(answer in row["context"] for answer in row["answers"]) and len(set(row["answers"])) == len(row["answers"])


@pytest.mark.parametrize("settings", ALL)
def test_an_item_depends_on_the_seed_and_its_number_alone(tokenizer, settings):
    rows = made(tokenizer, **settings)
    assert made(tokenizer, 3, **settings) == rows[:3]
    other = made(tokenizer, seed=7, **settings)
    assert all(a["context"] != b["context"] for a, b in zip(rows, other, strict=True))


@pytest.mark.parametrize("key_type", KINDS)
@pytest.mark.parametrize("value_type", KINDS)
def test_the_nine_types_of_needles(tokenizer, key_type, value_type):
    (row,) = made(tokenizer, 1, make="niah", length=512, key_type=key_type, value_type=value_type)
    found = re.findall(rf"One of the special magic {value_type} for ({KINDS[key_type]}) is: ({KINDS[value_type]})\.", row["context"])
    assert len(found) == 1 and row["answers"] == [found[0][1]] and f" for {found[0][0]} in the text above is" in row["question"]


def test_needles_lie_at_all_depths(tokenizer):
    rows = made(tokenizer, 60, make="niah", length=512, depths=4)
    places = [row["context"].index("One of the special") / len(row["context"]) for row in rows]
    named = [int(row["id"].split("-")[-1]) for row in rows]
    assert set(named) == {0, 33, 67, 100} and min(Counter(named).values()) > 5
    assert all(abs(100 * place - depth) < 30 for place, depth in zip(places, named, strict=True))


def test_keys_values_and_queries(tokenizer):
    (row,) = made(tokenizer, 1, make="niah", length=900, keys=4, values=2, queries=2)
    held: dict[str, list[str]] = {}
    for key, value in re.findall(r"numbers for (\S+) is: (\d+)\.", row["context"]):
        held.setdefault(key, []).append(value)
    assert len(held) == 4 and all(len(values) == 2 for values in held.values())
    asked = [key for key in held if key in row["question"]]
    assert len(asked) == 2 and sorted(row["answers"]) == sorted(value for key in asked for value in held[key])
    assert "all the special magic numbers" in row["question"]


def test_distractors_are_needles(tokenizer):
    (row,) = made(tokenizer, 1, make="niah", length=900, haystack="needles")
    assert row["context"].count("One of the special magic numbers") > 10 and "grass" not in row["context"]


def test_a_haystack_of_text_is_the_text(tokenizer):
    (row,) = made(tokenizer, 1, make="niah", length=700, haystack="text", text={"files": ["-"]})
    without = re.sub(r"One of the special magic numbers for \S+ is: \d+\. ?", "", row["context"].split("\n", 1)[1]).strip()
    assert ESSAY.startswith(without) and len(without) > 500


def test_variables_follow_their_chain(tokenizer):
    for row in made(tokenizer, make="variable_tracing", length=512, chains=2, hops=3):
        number = re.search(r"value (\d{5}) in", row["question"])[1]
        holds: dict[str, str] = {}
        for name, value, of in re.findall(r"VAR ([A-Z]+) = (?:(\d+)|VAR ([A-Z]+))\.", row["context"]):
            holds[name] = value or holds[of]  # assigned before it is used
        assert (
            sorted(row["answers"]) == sorted(name for name, value in holds.items() if value == number and len(name) == 5)
            and len(row["answers"]) == 4
        )
        assert f"{number}, they are:" in row["question"] and row["context"].count("they are:") == 1  # one example precedes


def test_common_words_are_the_common_ones(tokenizer):
    for row in made(tokenizer, make="common_words", length=900, common=5):
        text = row["context"].rsplit("In the following numbered list", 1)[1]
        counts = Counter(re.findall(r"\d+\. (\S+)", text))
        assert {word for word, _ in counts.most_common(5)} == set(row["answers"]) and min(counts[word] for word in row["answers"]) == 6
        assert max(count for word, count in counts.items() if word not in row["answers"]) == 1
    (long,) = made(tokenizer, 1, make="common_words", length=4096)
    counts = Counter(re.findall(r"\d+\. (\S+)", long["context"].rsplit("In the following numbered list", 1)[1]))
    assert {counts[word] for word in long["answers"]} == {30} and len(long["answers"]) == 10


def test_frequent_words_are_the_frequent_ones(tokenizer):
    for row in made(tokenizer, make="frequent_words", length=512):
        counts = Counter(row["context"].split("\n", 1)[1].split())
        assert [word for word, _ in counts.most_common(4)] == ["...", *row["answers"]]


def test_words_run_out_last():
    random = np.random.default_rng(0)
    plain = {one for kind in words.lists().values() for one in kind}
    found = words.many(len(plain) + 50, random)
    assert len(set(found)) == len(found) and set(found[: len(plain)]) == plain and all("-" in one for one in found[len(plain) :])


def test_what_cannot_fit_is_named(tokenizer):
    with pytest.raises(ValueError, match="does not fit in 14 tokens, 50 being kept for the answer; raise length"):
        made(tokenizer, make="frequent_words", length=64)


@pytest.mark.parametrize("fitting", range(8))
def test_the_largest_that_fits(fitting):
    assert largest(lambda size: size < fitting, 5) == (None if fitting == 0 else min(fitting - 1, 5))
