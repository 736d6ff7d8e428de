"""Asking and scoring with a reader whose every answer is known: prompts, examples, windows, cuts, and each kind's rule."""

import numpy as np
import pytest

from stages.tasks import prompts, results
from stages.tasks.entry import Scoring
from stages.tasks.unit import chosen, draw
from tests.stages.tasks.small_tasks import CAPITALS, COLOURS, WORDS, engine

TWO_SIDED = {
    "id": "1", "context": "Ann saw Eve so _ waved.", "choices": ["Ann", "Old Eve"], "answer_index": 1, "context_options": ["Ann saw Eve so Ann", "Ann saw Eve so Old Eve"],
    "continuation": "waved.",
}  # fmt: skip


def scoring(kind, **options):
    return Scoring.model_validate({"kind": kind} | options)


def ask(tokenizer, how, rows, examples=(), says=lambda text: "", **options):
    """(rows of tasks.parquet, in the items' order; the reader)."""
    made = engine(tokenizer, says, **options)
    found = [None] * len(rows)
    for place, used, one, answer in made.evaluate(how, rows, examples):
        found[place] = {"shots_used": used} | results.result(how, rows[place], one, answer, made.decode)
    return found, made.reader


# Kinds


def test_a_choice_by_each_normalisation(tokenizer):
    """The model says " red": option " deep blue" has two tokens of loss 4, " green" one."""
    rows, reader = ask(tokenizer, scoring("multiple_choice"), COLOURS[:1], says=lambda text: " red")
    assert rows[0]["scores"] == [0.25, 8.0, 4.0] and rows[0]["tokens"] == [1, 2, 1] and rows[0]["bytes"] == [3, 9, 5]
    assert rows[0]["prediction"] == "red" and rows[0]["hit"] and rows[0]["score"] == 1
    assert reader.rows[0][0] == COLOURS[0]["context"] + " red"
    of = {rule: results.choice({"scores": [5.0, 8.0, 6.0], "tokens": [1, 2, 2], "bytes": [3, 9, 10]}, rule) for rule in results.RULES}
    assert of == {"tokens": 2, "none": 0, "bytes": 2}
    assert results.choice({"scores": [5.0, 8.0], "tokens": [1, 2], "bytes": [3, 9]}, "bytes") == 1


def test_options_that_all_fail_are_no_hit():
    row = {"scores": [float("inf")] * 2, "tokens": [1, 1], "bytes": [1, 1]}
    assert results.choice(row, "tokens") == -1


def test_the_two_rules_of_context_options(tokenizer):
    full, reader = ask(tokenizer, scoring("multiple_choice"), [TWO_SIDED], says=lambda text: " Old Eve waved.")
    assert sorted(reader.rows[0]) == ["Ann saw Eve so Ann waved.", "Ann saw Eve so Old Eve waved."]
    assert full[0]["tokens"] == [3, 4] and full[0]["prediction"] == "Old Eve"  # option and continuation
    partial, reader = ask(
        tokenizer, scoring("multiple_choice", options="partial"), [TWO_SIDED], says=lambda text: " waved." if "Old" in text else " left."
    )
    assert partial[0]["tokens"] == [2, 2] and partial[0]["prediction"] == "Old Eve" and partial[0]["bytes"] == [6, 6]


def test_greedy_wants_every_token(tokenizer):
    for said, hit in ((" casino", True), (" cassava", False), (" casinos", False), ("casino", False)):
        rows, _ = ask(tokenizer, scoring("greedy"), WORDS[:1], says=lambda text, said=said: said)
        assert rows[0]["hit"] is hit, said


@pytest.mark.parametrize(
    "said, hit",
    [(" PARIS, of course", True), (" it is paris", True), (" Pari", False), ("\n Paris", False), (" one two three four Paris", False)],
)
def test_recall_is_containment_before_a_line_end(tokenizer, said, hit):
    rows, _ = ask(tokenizer, scoring("recall", new_tokens=4), CAPITALS[:1], says=lambda text: said)
    assert rows[0]["hit"] is hit and rows[0]["score"] == float(hit)


def test_recall_of_all_answers_is_their_share(tokenizer):
    item = CAPITALS[0] | {"answers": ["alpha", "beta", "gamma", "delta"]}
    rows, _ = ask(tokenizer, scoring("recall", answers="all"), [item], says=lambda text: " Beta and alpha")
    assert rows[0]["score"] == 0.5 and not rows[0]["hit"]
    assert ask(tokenizer, scoring("recall"), [item], says=lambda text: " Beta")[0][0]["hit"]


def test_generation_is_bleu(tokenizer):
    target = "The cat sat on the old mat in the sun."
    items = [{"id": str(n), "context": "chat =", "target": target} for n in range(2)]
    how = scoring("generation")
    rows, _ = ask(tokenizer, how, items, says=lambda text: f" {target}\nmore")
    assert [row["prediction"] for row in rows] == [target] * 2
    by_id = {item["id"]: item for item in items}
    assert results.summary(how, rows, by_id, 0)["score"] == pytest.approx(100)
    rows[1] |= {"prediction": "A dog."}
    assert 0 < results.summary(how, rows, by_id, 0)["score"] < 60 and results.summary(how, rows, by_id, 0)["metric"] == "bleu"


def test_summaries(tokenizer):
    how = scoring("multiple_choice")
    rows, _ = ask(tokenizer, how, COLOURS, says=lambda text: " red")
    made = results.summary(how, rows, {row["id"]: row for row in COLOURS}, 0)
    assert (made["items"], made["score"], made["metric"]) == (5, 40.0, "accuracy") and made["chance"] == pytest.approx(100 / 3)
    assert made["accuracy_tokens"] == made["accuracy_none"] == 40.0 and made["nll"] == pytest.approx((0.25 + 8 + 4 + 0.25 + 4) / 5)
    greedy = scoring("greedy")
    rows, _ = ask(tokenizer, greedy, WORDS[:1], says=lambda text: " casino")
    made = results.summary(greedy, rows, {"w0": WORDS[0]}, 0)
    assert made["score"] == 100 and made["perplexity"] == pytest.approx(np.exp(rows[0]["scores"][0]))


# Examples, windows


def test_examples_are_one_beginning_read_once(tokenizer):
    how = scoring("greedy", description="Please unscramble:\n", separator="\n")
    says = lambda text: " " + text.rsplit("\n", 1)[-1].removesuffix(" =")[::-1]  # noqa: E731
    rows, reader = ask(tokenizer, how, WORDS[2:], WORDS[:2], says=says, batch_tokens=8)
    assert all(row["hit"] and row["shots_used"] == 2 for row in rows)
    assert len(reader.read) == 1 and len(reader.rows) == 6  # items one by one, their beginning once
    beginning = "Please unscramble:\nonisac = casino\nwodniw = window"
    assert {text for batch in reader.rows for text in batch} == {f"{beginning}\n{row['context']} {row['target']}" for row in WORDS[2:]}
    assert reader.read[0] == len(tokenizer._plain_tokens(beginning.encode()))  # BOS, and all but the last


def test_parts_have_the_tokens_of_the_whole(tokenizer):
    """Whatever white space stands between them."""
    how = scoring("multiple_choice", description="Colours. \n", separator="\n\n")
    made = engine(tokenizer, lambda text: "")
    texts = [prompts.example(how, row) for row in COLOURS[:3]]
    parts, leads = prompts.pieces(how, texts)
    item = prompts.ask(how, COLOURS[3:4], leads[-1], alone=False, encode=made.encode)[0]
    tokens = [token for part in (*made.encode(parts), item.contexts[1], item.options[1]) for token in part]
    whole = "Colours. \n" + "\n\n".join([*texts, COLOURS[3]["context"]]) + " deep blue"
    assert tokens == tokenizer._plain_tokens(whole.encode()).tolist() and tokenizer.decode(tokens) == whole


def test_an_answer_without_white_space_before_it_has_the_wholes_tokens(tokenizer):
    how = scoring("greedy", delimiter="", prompt="un{context}")
    made = engine(tokenizer, lambda text: "")
    item = prompts.ask(how, [{"id": "1", "context": "believ", "target": "ably"}], "", alone=True, encode=made.encode)[0]
    whole = tokenizer._plain_tokens(b"unbelievably").tolist()
    assert len(item.options[0]) and [*item.contexts[0], *item.options[0]][-len(item.options[0]) :] == whole[-len(item.options[0]) :]


def test_white_space_at_a_prompts_end_goes_to_the_answer(tokenizer):
    how = scoring("greedy", prompt="{context} ", delimiter="")
    made = engine(tokenizer, lambda text: "")
    item = prompts.ask(how, [{"id": "1", "context": "a =", "target": "word"}], "", alone=True, encode=made.encode)[0]
    assert tokenizer.decode(item.contexts[0]) == "a =" and tokenizer.decode(item.options[0]) == " word"


def test_another_prompt_where_nothing_precedes(tokenizer):
    how = scoring("generation", zero_shot="Q: What is the English translation of {context} A:", separator="\n", new_tokens=2)
    for examples, wanted in (
        ((), f"Q: What is the English translation of {WORDS[2]['context']} A:"),
        (WORDS[:1], f"onisac = casino\n{WORDS[2]['context']}"),
    ):
        _, reader = ask(tokenizer, how, WORDS[2:3], examples)
        assert reader.rows == [[wanted]]


def test_whole_examples_are_dropped_where_the_window_is_full(tokenizer):
    """Items keep as many of the first examples as fit, and all of themselves."""
    how = scoring("greedy", separator="\n")
    long = {"id": "long", "context": "x y " * 20 + "=", "target": "z"}
    sizes = [len(tokenizer._plain_tokens(("\n" * bool(n) + prompts.example(how, row)).encode())) for n, row in enumerate(WORDS[:3])]
    asked = [len(tokenizer._plain_tokens(f"\n{row['context']} {row['target']}".encode())) for row in (long, WORDS[5])]
    window = asked[0] + sizes[0]  # BOS and all but the last token are read
    rows, reader = ask(tokenizer, how, [long, WORDS[5]], WORDS[:3], window=window)
    fitting = 3 if asked[1] + sum(sizes) <= window else 2
    assert [row["shots_used"] for row in rows] == [1, fitting] and not any(row["truncated"] for row in rows)
    rows, _ = ask(tokenizer, how, [long], WORDS[:3], window=window - 1)
    assert rows[0]["shots_used"] == 0 and not rows[0]["truncated"]
    by_id = {"long": long}
    assert results.summary(how, rows, by_id, 3)["shots_dropped"] == 3


def test_what_no_window_holds_loses_its_start(tokenizer):
    how = scoring("greedy")
    long = {"id": "long", "context": "x y " * 20 + "=", "target": "z"}
    rows, reader = ask(tokenizer, how, [long], window=11)
    assert rows[0]["truncated"] and reader.rows[0][0].endswith("x y = z") and len(tokenizer._plain_tokens(reader.rows[0][0].encode())) == 11


@pytest.mark.parametrize("cut, kept, lost", [("start", "Paris", False), ("end", "Once", True)])
def test_a_long_passage_is_cut_and_the_question_stays(tokenizer, cut, kept, lost):
    item = CAPITALS[0] | {"context": "Once upon a time. " * 40 + "Paris is the capital."}
    how = scoring("recall", truncate=40, cut=cut, new_tokens=4)
    rows, reader = ask(tokenizer, how, [item, CAPITALS[1]], says=lambda text: " Paris" if "Paris" in text else " no")
    text = next(text for batch in reader.rows for text in batch if "France" in text)
    assert text.endswith("\n" + item["question"]) and kept in text and len(tokenizer._plain_tokens(text.encode())) == 39
    assert (rows[0]["truncated"], rows[0]["answer_cut"], rows[0]["hit"]) == (True, lost, not lost) and not rows[1]["truncated"]
    made = results.summary(how, rows, {row["id"]: row for row in (item, CAPITALS[1])}, 0)
    assert (made["truncated"], made["answers_cut"]) == (1, int(lost))


def test_a_context_that_is_empty_is_read_behind_bos(tokenizer):
    item = {"id": "1", "context": "", "choices": ["red", "green"], "answer_index": 0, "context_options": None, "continuation": None}
    rows, _ = ask(tokenizer, scoring("multiple_choice"), [item], says=lambda text: " red")
    assert rows[0]["hit"] and rows[0]["scores"][0] == 0.25


# Batches, draws


def test_batches_change_nothing(tokenizer):
    how, says = scoring("multiple_choice"), lambda text: " green" if "leaf" in text else " red"
    one, many = (ask(tokenizer, how, COLOURS, says=says, batch_tokens=size) for size in (1, 4096))
    assert one[0] == many[0] and len(one[1].rows) == 15 and len(many[1].rows) < 5


def test_progress_is_told_and_may_stop(tokenizer):
    seen = []
    ask(tokenizer, scoring("multiple_choice"), COLOURS, seen=seen.append, batch_tokens=64)
    assert seen[-1] == len(COLOURS) and seen == sorted(seen)

    def stop(items):
        raise InterruptedError

    with pytest.raises(InterruptedError):
        ask(tokenizer, scoring("recall"), CAPITALS, seen=stop)


def test_items_and_examples_are_drawn_by_seed():
    how = scoring("greedy", limit=5)
    places, rest = chosen(how, 8)
    assert len(places) == 5 and sorted([*places, *rest]) == list(range(8)) and (chosen(how, 8)[0] == places).all()
    assert (chosen(scoring("greedy", limit=5, seed=1), 8)[0] != places).any()
    assert chosen(scoring("greedy"), 8)[0].tolist() == list(range(8))
    draws = [[row["id"] for row in draw(how, WORDS, 4, number, "t")] for number in range(10)]
    assert len({tuple(one) for one in draws}) == 10 and all(len(set(one)) == 4 for one in draws)
    assert [row["id"] for row in draw(how, WORDS, 2, 3, "t")] == draws[3][:2]
    with pytest.raises(ValueError, match="tasks.t: 9 shots are wanted and 8 examples are there"):
        draw(how, WORDS, 9, 0, "t")
