"""The names that a mistake's sentence offers."""

from __future__ import annotations

from pipelines import mistakes


def test_few_names_are_all_named_the_nearest_first():
    assert mistakes.nearest("mess", ["mesa", "gla"]) == "did you mean 'mesa'? Allowed: gla, mesa."
    assert mistakes.nearest("x", []) == "Allowed: none."


def test_of_many_names_the_first_and_their_number():
    names = [f"cell-{number:03}" for number in range(80)]
    said = mistakes.nearest("cell-o79", names)
    assert said.startswith("did you mean 'cell-079'?") and said.endswith(f"cell-{mistakes.MANY - 1:03} and {80 - mistakes.MANY} more.")
    just = names[: mistakes.MANY + 1]
    assert mistakes.nearest("", just) == f"Allowed: {', '.join(just)}."  # "and 1 more" would be no shorter
