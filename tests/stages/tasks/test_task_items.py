"""Items out of files: every form, every schema, renamed columns, filters, the hub's originals, and rows that are none."""

import gzip
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.tasks.entry import FIELDS, Files
from stages.tasks.items import read
from stages.tasks.originals import ORIGINALS
from tests.stages.tasks.small_tasks import CAPITALS, COLOURS, WORDS


def files(**options):
    return Files.model_validate({"files": ["-"]} | options)


def write(path, rows):
    """Rows in the form that the path's ending tells."""
    table = pa.Table.from_pylist(rows)
    lines = "\n".join(json.dumps(row) for row in rows)
    match "".join(path.suffixes):
        case ".parquet":
            pq.write_table(table, path)
        case ".jsonl":
            path.write_text(lines + "\n\n")
        case ".jsonl.gz":
            path.write_bytes(gzip.compress(lines.encode()))
        case ".arrow":
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
                stream.write_table(table)
    return path


@pytest.mark.parametrize("name", ["x.parquet", "x.jsonl", "x.jsonl.gz", "x.arrow"])
@pytest.mark.parametrize("schema, rows", [("multiple_choice", COLOURS), ("recall", CAPITALS), ("prompt_target", WORDS)])
def test_every_form_of_every_schema(tmp_path, name, schema, rows):
    assert read([write(tmp_path / name, rows)], files(), schema, "t").to_pylist() == rows


def test_columns_are_renamed_and_rows_are_chosen(tmp_path):
    rows = [{"id": f"{kind}-{n}", "source": "a b", "translation": "c"} for kind in ("one", "two") for n in range(2)]
    path = write(tmp_path / "x.parquet", rows)
    found = read([path], files(columns={"context": "translation", "target": "source"}, where={"id": "two-*"}), "prompt_target", "t")
    assert found.to_pylist() == [{"id": f"two-{n}", "context": "c", "target": "a b"} for n in range(2)]
    with pytest.raises(ValueError, match="no item that `where` takes"):
        read([path], files(columns={"context": "translation", "target": "source"}, where={"id": "three*"}), "prompt_target", "tasks.t")
    with pytest.raises(ValueError, match=r"has no column 'task'; it has id, source"):
        read([path], files(where={"task": "x"}), "prompt_target", "tasks.t")


def test_ids_are_made_where_there_are_none_and_made_different(tmp_path):
    one = write(tmp_path / "a.jsonl", [{"context": "a", "target": "b"}, {"context": "c", "target": "d"}])
    other = write(tmp_path / "b.jsonl", [{"context": "a", "target": "b"}, {"context": "c", "target": "other"}])
    assert read([one, other], files(), "prompt_target", "t")["id"].to_pylist() == [
        "0",
        "1",
        "1'",
    ]  # the first of b is the first of a once more


@pytest.mark.parametrize(
    "schema, row, sentence",
    [
        ("multiple_choice", {"context": "a", "choices": ["b", "c"]}, "row 0 of x.jsonl is no multiple_choice item: it lacks 'answer_index'"),
        ("multiple_choice", {"context": "a", "choices": ["b", "c"], "answer_index": -1}, "a test split without answers"),
        ("multiple_choice", {"context": "a", "choices": ["b", " "], "answer_index": 0}, "its choices are"),
        ("multiple_choice", {"context": 3, "choices": ["b"], "answer_index": 0}, "its context is 3, not a text"),
        ("multiple_choice", {"context": "a", "choices": ["b"], "answer_index": 0, "context_options": ["x c"], "continuation": "d"}, "end with its choice"),
        ("multiple_choice", {"context": "a", "choices": ["b"], "answer_index": 0, "context_options": ["x b"]}, "continuation"),
        ("prompt_target", {"context": "a", "target": " "}, "its target is empty"),
        ("recall", {"context": "a", "answers": []}, "its answers are"),
    ],
)  # fmt: skip
def test_rows_that_are_no_items_are_named(tmp_path, schema, row, sentence):
    with pytest.raises(ValueError, match=sentence):
        read([write(tmp_path / "x.jsonl", [row])], files(), schema, "tasks.t")


def test_damaged_files_are_named(tmp_path):
    for name in ("x.parquet", "x.jsonl", "x.arrow"):
        (tmp_path / name).write_bytes(b"{not whole")
        with pytest.raises(ValueError, match=f"{name} is not a whole"):
            read([tmp_path / name], files(), "recall", "tasks.t")


ROWS = {
    "arc": ({"id": "M1", "question": "Why?", "choices": {"text": ["a", "b"], "label": ["1", "2"]}, "answerKey": "2"}, ("Question: Why?\nAnswer:", ["a", "b"], 1)),
    "boolq": ({"passage": "It is.", "question": "is it", "answer": True}, ("It is.\nQuestion: is it?\nAnswer:", ["no", "yes"], 1)),
    "commonsense_qa": ({"id": "1", "question": "Q?", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "A"}, ("Question: Q?\nAnswer:", ["a", "b"], 0)),
    "copa": ({"premise": "It rained.", "choice1": "The road got wet.", "choice2": "It shone.", "question": "effect", "label": 0},
             ("It rained therefore", ["the road got wet.", "it shone."], 0)),
    "hellaswag": ({"activity_label": "Roof", "ctx_a": "A man sits.", "ctx_b": "he", "endings": ["runs [title] Then", "[step] rips  tiles"], "label": "1"},
                  ("Roof: A man sits. He", ["runs. Then", " rips tiles"], 1)),
    "openbookqa": ({"id": "8", "question_stem": "Fish live in", "choices": {"text": ["sea", "sky"], "label": ["A", "B"]}, "answerKey": "A "}, ("Fish live in", ["sea", "sky"], 0)),
    "piqa": ({"goal": "Cut", "sol1": "saw", "sol2": "spoon", "label": 0}, ("Question: Cut\nAnswer:", ["saw", "spoon"], 0)),
    "race": ({"example_id": "h1", "article": "Text.", "question": "Q?", "options": ["a", "b", "c", "d"], "answer": "C"}, ("Article: Text.\n\nQuestion: Q?\nAnswer:", ["a", "b", "c", "d"], 2)),
    "sciq": ({"support": "", "question": "Who?", "distractor1": "x", "distractor2": "y", "distractor3": "z", "correct_answer": "w"},
             ("Question: Who?\nAnswer:", ["x", "y", "z", "w"], 3)),
    "siqa": ({"context": "T left.", "question": "Why?", "answerA": "a", "answerB": "b", "answerC": "c", "label": "3"}, ("Q: T left. Why?\nA:", ["a", "b", "c"], 2)),
    "storycloze": ({"story_id": "s", **{f"input_sentence_{n}": f"S{n}." for n in range(1, 5)}, "sentence_quiz1": "E.", "sentence_quiz2": "F.", "answer_right_ending": 2},
                   ("S1. S2. S3. S4.", ["E.", "F."], 1)),
    "winogrande": ({"sentence": "Ann saw Eve so _ waved.", "option1": "Ann", "option2": "Eve", "answer": "1"}, ("Ann saw Eve so _ waved.", ["Ann", "Eve"], 0)),
    "oe_choice": ({"idx": 0, "doc": {"id": "1", "query": "Question: Q?\nAnswer:", "choices": ["a", "b"], "gold": 1}}, ("Question: Q?\nAnswer:", ["a", "b"], 1)),
    "lambada": ({"text": "He looked at Ann"}, ("He looked at", "Ann")),
    "unscramble": ({"context": "asinoc =", "completion": " casino"}, ("asinoc =", "casino")),
    "wmt": ({"translation": {"en": "Yes.", "de": "Ja."}}, ("Ja.", "Yes.")),
    "squad": ({"id": "1", "context": "C.", "question": "Q?", "answers": {"text": ["a", "a", "b"], "answer_start": [0, 0, 4]}}, ("C.", "Q?", ["a", "b"])),
    "drop": ({"query_id": "1", "passage": "C.", "question": "Q?", "answers_spans": {"spans": ["7", "7"], "types": ["number", "number"]}}, ("C.", "Q?", ["7"])),
    "nq_open": ({"question": "q", "answer": ["a"]}, ("", "q", ["a"])),
    "trivia_qa": ({"question": "q", "question_id": "1", "answer": {"value": "A", "aliases": ["A", "B"]}}, ("", "q", ["A", "B"])),
    "based": ({"doc_id": 3, "text": "One is. Two is", "value": "2", "key": None}, ("One is", "Two is", ["2"])),
    "oe_squad": ({"doc": {"id": "1", "query": "Title: T\nBackground: C.\nQuestion: Q?\nAnswer:", "answers_text": ["a"]}}, ("C.", "Q?", ["a"])),
    "oe_drop": ({"doc": {"query_id": "1", "passage": "C.", "question": "Q?", "answers": [["a", "b"], ["c"]]}}, ("C.", "Q?", ["a, b", "c"])),
}  # fmt: skip


@pytest.mark.parametrize("form", ["x.parquet", "x.jsonl.gz"])  # the hub's tables, and files as repositories have them
@pytest.mark.parametrize("name", ORIGINALS)
def test_originals_become_items(tmp_path, name, form):
    row, wanted = ROWS[name]
    schema = "recall" if len(wanted) == 3 and isinstance(wanted[1], str) else "multiple_choice" if len(wanted) == 3 else "prompt_target"
    found = read([write(tmp_path / form, [row])], files(original=name), schema, "t").to_pylist()[0]
    fields = {
        "multiple_choice": ("context", "choices", "answer_index"),
        "recall": ("context", "question", "answers"),
        "prompt_target": ("context", "target"),
    }
    assert tuple(found[field] for field in fields[schema]) == wanted


def test_questions_of_one_article_are_items_of_their_own(tmp_path):
    """RACE's rows carry their article's id."""
    row = ROWS["race"][0]
    rows = [row, row | {"question": "Another?", "answer": "A"}]
    found = read([write(tmp_path / "x.parquet", rows)], files(original="race"), "multiple_choice", "t").to_pylist()
    assert [item["answer_index"] for item in found] == [2, 0] and len({item["id"] for item in found}) == 2


@pytest.mark.skipif(
    "STRATA_EVALUATION_SETS" not in os.environ, reason="STRATA_EVALUATION_SETS names no folder of sets in the three schemas"
)
def test_sets_at_hand_are_items():
    for path in sorted(Path(os.environ["STRATA_EVALUATION_SETS"]).glob("*.parquet")):
        columns = pq.read_schema(path).names
        schema = next(
            (
                name
                for name, told in (("multiple_choice", "choices"), ("recall", "answers"), ("prompt_target", "target"))
                if told in columns
            ),
            None,
        )
        if schema is not None:
            found = read([path], files(), schema, path.stem)
            assert len(found) == pq.read_metadata(path).num_rows and set(FIELDS[schema]) == set(found.column_names)


def test_winogrande_has_both_sentences(tmp_path):
    found = read([write(tmp_path / "x.jsonl", [ROWS["winogrande"][0]])], files(original="winogrande"), "multiple_choice", "t").to_pylist()[
        0
    ]
    assert found["context_options"] == ["Ann saw Eve so Ann", "Ann saw Eve so Eve"] and found["continuation"] == "waved."


def test_a_row_of_another_original_is_named(tmp_path):
    with pytest.raises(ValueError, match="Row 0 is not what the original 'arc' is made of: it lacks 'choices'"):
        read([write(tmp_path / "x.jsonl", [{"id": "1", "question": "q"}])], files(original="arc"), "multiple_choice", "t")
