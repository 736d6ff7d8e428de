"""Tasks, their groups' means, and which tasks a longer window helps, against hand-worked numbers."""

import numpy as np
import pytest

from stages.report.downstream import haystack
from tests.stages.made_up_study import cell, made_up_needles, score, write_evaluation, write_history, write_study

SETS = {"validation": [16]}


def test_a_task_is_the_mean_over_draws(tmp_path, analyzed):
    write_study(tmp_path, [cell("gla")], sets=SETS, scores={"gla": [
        score("words", 1.0, "scrambling", kind="greedy", shots=10, draw=0, shots_dropped=2, items=100),
        score("words", 4.0, "scrambling", kind="greedy", shots=10, draw=1, shots_dropped=3, items=100),
        score("words", 0.0, "scrambling", kind="greedy", shots=0),
    ]})  # fmt: skip
    rows, page = analyzed([cell("gla")])
    none, ten = sorted(rows["tasks"], key=lambda row: row["shots"])
    assert (ten["score"], ten["std"], ten["draws"], ten["items"], ten["shots_dropped"]) == (2.5, 1.5, 2, 100, 5)
    assert ten["error"] == pytest.approx(100 * np.sqrt(0.025 * 0.975 / 100)) and not ten["at_chance"]
    assert (none["score"], none["std"], none["at_chance"], none["normalisation"]) == (0.0, None, True, None)
    assert "words, 10-shot" in page and "5 few-shot examples did not fit" in page and "±1.5" in page


@pytest.mark.parametrize(
    ("value", "chance", "at_chance"), [(28.0, 25.0, False), (27.0, 25.0, True), (20.0, 25.0, True), (51.0, 50.0, True), (90.0, 50.0, False)]
)
def test_at_chance_is_within_two_standard_errors(tmp_path, analyzed, value, chance, at_chance):
    write_study(tmp_path, [cell("gla")], sets=SETS, scores={"gla": [score("piqa", value, "local", chance=chance)]})
    rows, page = analyzed([cell("gla")])
    assert rows["tasks"][0]["at_chance"] is at_chance
    assert ('class="chance"' in page) is at_chance and f"{chance:.1f}</td>" in page


def test_the_normalisation_is_named(tmp_path, analyzed):
    scores = {
        "gla": [score("a", 40.0, "local", accuracy_bytes=40.0, accuracy_tokens=39.0)],
        "mesa": [score("a", 30.0, "local", accuracy_bytes=30.0, accuracy_tokens=30.0)],
    }
    cells = [cell("gla"), cell("mesa")]
    write_study(tmp_path, cells, sets=SETS, scores=scores)
    rows, page = analyzed(cells)
    assert {row["normalisation"] for row in rows["tasks"]} == {"bytes"}
    assert "Local: multiple choice, options’ losses normalised by bytes" in page


def test_groups_are_plain_means_in_the_papers_order(tmp_path, analyzed):
    scores = [
        score("nq", 1.0, "closed_book", kind="recall"), score("nq2", 2.0, "closed_book", kind="recall"), score("a", 30.0, "zoo"), score("b", 40.0, "zoo"),
        score("piqa", 60.0, "local"), score("arc", 20.0, "local"), score("lambada", 10.0, "global", kind="greedy"), score("race", 25.5, "global"),
        score("piqa", 50.0, "local", setting="cg5"), score("alone", 1.0),
    ]  # fmt: skip
    cells = [cell("gla"), cell("mesa")]
    write_study(tmp_path, cells, sets=SETS, scores={"gla": scores, "mesa": scores[:6]})
    rows, page = analyzed(cells)
    of = {(row["model"], row["group"], row["setting"]): row for row in rows["groups"]}
    local = of["gla", "local", ""]
    assert (local["score"], local["std"], local["tasks"], local["members"], local["chance"], local["at_chance"]) == (
        40.0,
        20.0,
        2,
        "arc, piqa",
        25.0,
        1,
    )
    assert of["gla", "global", ""]["chance"] is None and of["gla", "local", "cg5"]["score"] == 50.0 and ("gla", None, "") not in of
    head = page.split("Means over a group’s tasks")[1].split("</thead>")[0]
    assert [head.index(name) for name in ("global", "local", "closed book", "zoo")] == sorted(
        head.index(name) for name in ("global", "local", "closed book", "zoo")
    )
    assert "Not every cell was asked" not in page and page.index("Global: ") < page.index("Local: ") < page.index("No group: ")


def test_the_highest_score_is_bold_and_uneven_groups_are_said(tmp_path, analyzed):
    cells = [cell("gla"), cell("mesa")]
    scores = {
        "gla": [score("a", 60.0, "local"), score("b", 60.0, "local")],
        "mesa": [score("a", 70.0, "local"), score("b", 40.0, "local"), score("c", 50.0, "local")],
    }
    write_study(tmp_path, cells, sets=SETS, scores=scores)
    _, page = analyzed(cells)
    assert "<b>70.0</b>" in page and "<b>60.0</b>" in page and "<b>40.0</b>" not in page
    assert "Not every cell was asked the same tasks" in page


def test_needles_have_a_section_of_their_own(tmp_path, analyzed):
    scores = [score(f"needle-{i}", value, "niah-noise-2048", kind="recall") for i, value in enumerate((90.0, 100.0))]
    write_study(tmp_path, [cell("gla")], sets=SETS, scores={"gla": scores})
    _, page = analyzed([cell("gla")])
    section = page.split("Needles in haystacks")[1].split("<h2>")[0]
    assert "noise 2048" in section and "95.0" in section and "±5.0" in section
    assert "Downstream tasks" not in page


def test_no_tasks_no_sections(tmp_path, analyzed):
    write_study(tmp_path, [cell("gla")], sets=SETS)
    rows, page = analyzed([cell("gla")])
    assert rows["tasks"] == rows["groups"] == rows["split"] == [] and not any(
        text in page for text in ("Downstream", "Needles", "Local and global")
    )


def windows(*extra, scale="nano", budget="1m"):
    cells = [cell("transformer", scale, budget, layer="attention")]
    return cells + [cell(f"swa-{w}", scale, budget, layer="attention", window=w, group="references") for w in (4, 16, 64, *extra)]


def write_windows(root, by_task, cells):
    """by_task: task -> scores of windows 4, 16, 64 and of full attention."""
    for one in cells:
        place = {4: 0, 16: 1, 64: 2, None: 3}.get(one.get("window"), 2)
        write_history(root / f"history/{one['cell']}.parquet", one, losses=np.ones(3))
        scores = [score(task, values[place], "local") for task, values in by_task.items()]
        write_evaluation(root / f"evaluations/{one['cell']}", one, {("validation", 4, ""): [np.ones(4, np.float32)]}, scores=scores)


def test_tasks_are_split_by_the_studys_own_windows(tmp_path, analyzed):
    cells = windows(256)
    by_task = {
        "hellaswag": (30, 35, 40, 45),
        "piqa": (60, 61, 61, 70),
        "boolq": (50, 55, 60, 59),
        "mine": (1, 2, 3, 3),
        "race-high": (9, 8, 7, 30),
    }
    write_windows(tmp_path, {task: [float(v) for v in values] for task, values in by_task.items()}, cells)
    rows, page = analyzed(cells)
    found = {row["task"]: row for row in rows["split"]}
    assert {task: (row["rises"], row["beaten"], row["group"]) for task, row in found.items()} == {
        "hellaswag": (True, False, "global"), "piqa": (False, False, "local"), "boolq": (True, True, "local"), "mine": (True, False, "global"),
        "race-high": (False, False, "local"),
    }  # fmt: skip
    assert {task: row["paper"] for task, row in found.items()} == {
        "hellaswag": "global", "piqa": "local", "boolq": "local", "mine": None, "race-high": "global",
    }  # fmt: skip
    assert found["boolq"]["scores"] == [50.0, 55.0, 60.0] and found["boolq"]["windows"] == [4, 16, 64] and found["boolq"]["full"] == 59.0
    assert "One task falls in the other group than the paper’s" in page and "SWA-16" in page


def test_a_task_is_global_in_a_study_where_it_is_everywhere(tmp_path, analyzed):
    first, second = windows(), windows(scale="small")
    write_windows(tmp_path, {"hellaswag": [1.0, 2.0, 3.0, 4.0], "lambada": [1.0, 2.0, 3.0, 4.0]}, first)
    write_windows(tmp_path, {"hellaswag": [1.0, 2.0, 3.0, 4.0], "lambada": [1.0, 1.0, 3.0, 4.0]}, second)
    rows, _ = analyzed(first + second)
    found = {(row["task"], row["scale"]): (row["group"], row["study"]) for row in rows["split"]}
    assert (
        found["hellaswag", "nano"] == ("global", "global")
        and found["lambada", "nano"] == ("global", "local")
        and found["lambada", "small"] == ("local", "local")
    )


@pytest.mark.parametrize("lacking", ["swa-16", "transformer"])
def test_without_all_windows_and_full_attention_tasks_are_not_split(tmp_path, analyzed, lacking):
    cells = [one for one in windows() if one["model"] != lacking]
    write_windows(tmp_path, {"hellaswag": [1.0, 2.0, 3.0, 4.0]}, cells)
    assert analyzed(cells)[0]["split"] == []
    if lacking == "swa-16":
        assert len(analyzed(cells, split_windows=[4, 64])[0]["split"]) == 1


def test_needles_by_depth_and_length(tmp_path, analyzed):
    """Over both types of value of a haystack and length, in ten bands; other tasks, settings and numbers of shots are left out."""
    scores = [
        score("a", 50.0, "niah-noise-2048", kind="recall"), score("b", 90.0, "niah-noise-2048", kind="recall"), score("c", 10.0, "niah-noise-4096", kind="recall"),
        score("a", 0.0, "niah-noise-2048", kind="recall", setting="cg5"), score("d", 70.0, "recall", kind="recall"),
    ]  # fmt: skip
    write_study(tmp_path, [cell("gla")], sets=SETS, scores={"gla": scores})
    rows, page = analyzed([cell("gla")])
    assert {(row["haystack"], row["length"], row["types"]) for row in rows["needles"]} == {("noise", 2048, 2), ("noise", 4096, 1)}
    assert [sum(row["items"] for row in rows["needles"] if row["length"] == length) for length in (2048, 4096)] == [800, 400]
    found = {(row["length"], row["depth"]): row["score"] for row in rows["needles"]}
    assert [depth for length, depth in found if length == 2048] == [5, 15, 25, 35, 45, 55, 65, 75, 85, 95]
    made = [one for row in scores[:2] for one in made_up_needles(row)]
    first = [one["score"] for one in made if int(one["item"].split("-")[2]) < 10]
    assert found[2048, 5] == pytest.approx(100 * np.mean(first))
    assert found[2048, 95] > found[2048, 5] > found[4096, 5]
    assert 'id="needles-noise"' in page and "depth, %" in page


@pytest.mark.parametrize(
    ("group", "told"),
    [("niah-noise-2048", ("noise", 2048)), ("niah", ("", None)), ("niah-essay", ("essay", None)), ("niah_4096", ("", 4096))],
)
def test_a_groups_name_tells_its_haystack_and_length(group, told):
    assert haystack(group) == told
