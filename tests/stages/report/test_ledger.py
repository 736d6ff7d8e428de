"""The ledger: the paper's printed figures, ours beside them by the paper's own rules, and "not run" for everything else."""

import math

import numpy as np
import pytest

from stages.report import ledger, paper
from tests.stages.made_up_study import cell, score, write_evaluation, write_history, write_study

SETS = ["slimpajama", "lambada", "wikitext2", "pg19", "govreport", "qasper"]
OURS = [
    score("lambada", 40.0, "global", kind="greedy", perplexity=20.0), score("hellaswag", 50.0, "global"), score("race-middle", 30.0, "global"),
    score("piqa", 70.0, "local", accuracy_tokens=71.5, accuracy_none=70.0), score("nq-closed", 9.0, "closed_book", kind="recall"), score("nq", 9.0, "closed_book", kind="recall"),
    score("squad-1000", 33.0, "recall", kind="recall"),
    *(score("cycle-letters", value, "scrambling", kind="greedy", shots=100, draw=i) for i, value in enumerate((2.0, 4.0))),
    score("mid-word-2-anagrams", 5.0, "scrambling", kind="greedy", shots=100),
    *(score(f"niah-{i}", value, "niah-noise-2048", kind="recall", items=10) for i, value in enumerate([100.0] * 8 + [10.0])),
    *(score(f"long-{i}", 1.0, "niah-noise-4096", kind="recall") for i in range(8)),
]  # fmt: skip


def write(root, one, scores=None, sets=("slimpajama",), devices=None):
    write_history(root / f"history/{one['cell']}.parquet", one, losses=np.ones(3), devices=devices)
    nlls = {(text, 2048, ""): [np.full(8, math.log(10 + i), np.float32)] for i, text in enumerate(sets)}
    write_evaluation(root / f"evaluations/{one['cell']}", one, nlls, scores=scores)


@pytest.fixture
def large(tmp_path, analyzed):
    one = cell("gated_deltanet", "1b", "50b", learning_rate=1e-3)
    write(tmp_path, one, OURS, devices=4)
    rows, page = analyzed([one])
    found = {}
    for row in rows["ledger"]:
        if row["cell"]:
            found[row["table"], row["metric"], row["shots"], row["length"], row["setting"]] = row
    return found, rows["ledger"], page


def test_the_papers_figures_are_the_printed_ones():
    rows = paper.printed("mesanet")
    value = {
        tuple(row[name] for name in ("table", "scale", "budget", "model", "metric", "shots", "length", "setting")): row["value"]
        for row in rows
    }
    assert len(value) == len(rows) == 3769
    perplexity = {key[1:5] + key[6:7]: printed for key, printed in value.items() if key[0] == "perplexity"}
    assert len(perplexity) == 490 + 350 + 350
    assert perplexity["1B", "50B", "Mesa", "SLIM", 2048] == 10.83 and perplexity["145M", "50B", "Transformer", "AVG", 32768] == 1829.77
    for (scale, budget, model, name, length), printed in perplexity.items():
        if name == "AVG" and printed < 30:  # the printed means are those of the printed figures, to their rounding
            others = [perplexity[k] for k in perplexity if k[:3] == (scale, budget, model) and k[4] == length and k[3] != "AVG"]
            assert sum(others) / len(others) == pytest.approx(printed, abs=0.0115)
    for key, printed in value.items():
        table, scale, budget, model, metric, shots, *_ = key
        if table in ("tasks", "recall") and metric in paper.MEANS["mesanet"]:
            others = [value[(table, scale, budget, model, name, *key[5:])] for name in paper.MEANS["mesanet"][metric]]
            assert sum(others) / len(others) == pytest.approx(printed, abs=0.0115)
    assert all(row["source"] for row in rows) and {row["source"] for row in rows if row["table"] == "niah"} == {"Table 19"}
    assert (
        next(row["std"] for row in rows if (row["table"], row["model"], row["metric"], row["length"]) == ("niah", "Hawk", "noise", 2048))
        == 5.9
    )


def test_palimpsas_figures():
    rows = paper.printed("palimpsa")
    one = {
        (row["scale"], row["model"], row["table"]): row["value"]
        for row in rows
        if row["metric"] in ("accuracy", "WIKI") or row["table"] == "task_perplexity"
    }
    assert one["170M", "D scratch", "task_perplexity"] == 42.27 and one["760M", "GDN", "groups"] == 51.5 and len(rows) == 105


def test_every_figure_of_the_paper_is_there_once(large):
    _, rows, _ = large
    assert len(rows) == 3769
    assert all(
        (row["ours"] is None) == (row["status"] == "not run") == (row["note"] is not None)
        and (row["difference"] is None) == (row["ours"] is None or row["paper"] is None)
        for row in rows
    )
    assert {row["note"] for row in rows if row["cell"] is None} == {"no such cell"}
    assert {(row["model"], row["scale"], row["budget"]) for row in rows if row["cell"]} == {("gated_deltanet", "1b", "50b")}


def test_perplexities_and_their_means(tmp_path, analyzed):
    cells = [cell("gated_deltanet", "440M", "15B"), cell("transformer", "tiny", "15B")]
    for one in cells:
        write(tmp_path, one, sets=SETS)
    rows, page = analyzed(cells)
    found = {(row["metric"], row["length"]): row for row in rows["ledger"] if row["cell"] and row["table"] == "perplexity"}
    assert len(found) == 7 + 5 + 5
    assert (
        found["WIKI", 2048]["paper"] == 14.71
        and found["WIKI", 2048]["name"] == "wikitext2"
        and found["WIKI", 2048]["source"] == "Tables 10-12"
    )
    assert found["WIKI", 2048]["ours"] == pytest.approx(12, rel=1e-6)
    assert found["WIKI", 2048]["difference"] == pytest.approx(12 - 14.71, rel=1e-5) and found["WIKI", 2048]["status"] == "run"
    assert found["AVG", 2048]["ours"] == pytest.approx(12.5, rel=1e-6) and found["AVG", 2048]["paper"] == 17.00
    assert found["PG19", 4096]["ours"] is None and found["AVG", 4096]["note"] == "not evaluated: WIKI, PG19, GOV, QASP"
    assert "−2.71" in page and "Of the 3,769 figures of MesaNet’s that are on record, 7 were run here" in page
    assert "PG19" in page.split("cells that it has")[1][:200]


def test_tasks_are_scored_by_the_papers_normalisation(large):
    found, _, page = large
    piqa = found["tasks", "PIQA", 0, None, ""]
    assert (
        piqa["ours"] == 71.5
        and piqa["name"] == "piqa"
        and piqa["items"] == 1000
        and piqa["difference"] == pytest.approx(71.5 - piqa["paper"])
    )
    assert found["recall", "SQUAD", 0, None, ""]["ours"] == 33.0 and "squad-1000" in page


def test_means_are_never_over_a_part(large):
    found, _, _ = large
    assert found["tasks", "global", 0, None, ""]["status"] == "not run"
    assert found["tasks", "global", 0, None, ""]["note"] == "not evaluated: RACE-H"
    assert found["groups", "scrambling", 100, None, ""]["ours"] == pytest.approx((3.0 + 5.0) / 2)
    cycle = found["scrambling", "cycle_letters", 100, None, ""]
    assert (cycle["ours"], cycle["ours_std"]) == (3.0, 1.0) and cycle["paper_std"] is not None
    assert found["scrambling", "cycle_letters", 10, None, ""]["status"] == "not run"


def test_recall_without_passages_is_no_figure_of_the_papers(large):
    found, _, _ = large
    for metric in ("NQ", "TQA"):
        assert found["recall", metric, 0, None, ""]["status"] == "not run"
    assert "NQ" in found["recall", "recall", 0, None, ""]["note"]


def test_needles_are_a_mean_over_nine_types(large):
    found, _, _ = large
    noise = found["niah", "noise", None, 2048, ""]
    assert (noise["ours"], noise["paper"], noise["paper_std"], noise["items"]) == (90.0, 98.3, 4.1, 90)
    assert noise["ours_std"] == pytest.approx(np.std([100.0] * 8 + [10.0]))
    assert found["niah", "noise", None, 4096, ""]["note"] == "8 of 9 types of key and value"


def test_learning_rates_tokens_and_hours(large):
    found, rows, page = large
    rate = found["learning_rate", "peak", None, None, ""]
    assert rate["ours"] == 1e-3 and rate["paper"] == 9e-4 and rate["difference"] == pytest.approx(1e-4)
    assert {row["tokens"] for row in rows if row["cell"]} == {1_048_576} and {row["tokens"] for row in rows if not row["cell"]} == {None}
    hours = rate["accelerator_hours"]
    assert hours == pytest.approx(4 * 3 * 16 * 256 / 21_000 / 3600, rel=0.1) and "device-hours" in page


def test_throughput_is_ours_where_the_paper_only_draws_it(large):
    """On each of the devices, at the length of training alone; other caps of CG and decoding are not run by this cell."""
    found, rows, page = large
    run = found["throughput", "training", None, 2048, ""]
    assert (
        run["paper"] is None
        and run["difference"] is None
        and run["ours"] == pytest.approx(21_000 / 4, rel=0.05)
        and run["source"] == "Figure 2"
    )
    assert found["throughput", "training", None, 4096, ""]["note"] == "trained at another length"
    assert "benchmarks decode" in found["decoding", "batches 2 to 1024", None, 512, ""]["note"] and "only draws" in page
    assert len([row for row in rows if row["paper"] is None]) == 42 and all(
        row["source"] in ("Figure 2", "Figure 6") for row in rows if row["paper"] is None
    )


def test_hours_are_unknown_where_devices_were_not_counted(tmp_path, analyzed):
    one = cell("mesa", "1b", "50b")
    write(tmp_path, one)
    rows, page = analyzed([one])
    assert {row["accelerator_hours"] for row in rows["ledger"]} == {None} and "device-hours" not in page


def test_solver_settings_are_found_by_name(tmp_path, analyzed):
    one = cell("mesa", "1b", "50b")
    names = ("lambada", "hellaswag", "race-middle", "race-high")
    write(tmp_path, one, [score(name, 40.0 + i, "global", setting="eps-1e-2") for i, name in enumerate(names)])
    rows, page = analyzed([one])
    found = {(row["metric"], row["setting"]): row for row in rows["ledger"] if row["table"] == "solver"}
    assert found["global", "eps=1e-2"]["ours"] == 41.5 and found["global", "eps=1e-2"]["paper"] == 44.13
    assert found["local", "eps=1e-2"]["status"] == found["global", "CG=5"]["status"] == "not run"
    assert "eps-1e-2" in page and "Tasks’ group means of mesa-1b-50b under other settings" in page


def test_palimpsas_slowdown_is_that_of_two_cells_and_says_where(tmp_path, analyzed):
    cells = [cell(name, "170m", "15b") for name in ("palimpsa_d", "palimpsa_d-plain")]
    for one in cells:
        write(tmp_path, one, devices=2)
    rows, page = analyzed(cells, paper="palimpsa", baseline=None)
    (ours,) = (row for row in rows["ledger"] if row["table"] == "slowdown" and row["scale"] == "170m")
    rates = {row["model"]: row["tokens_per_second"] for row in rows["throughput"]}
    assert ours["status"] == "run" and ours["paper"] == 1.5 and ours["cell"] == cells[0]["cell"] and "devices of our cells" in ours["note"]
    assert ours["ours"] == pytest.approx(rates["palimpsa_d-plain"] / rates["palimpsa_d"], rel=1e-3)
    assert ours["difference"] == pytest.approx(ours["ours"] - 1.5) and "times that of, D w/o Meta" in page
    kernels = [row for row in rows["ledger"] if row["table"] == "kernel_throughput"]
    assert [row["paper"] for row in kernels] == [770_000, 50_000, 188_000]
    assert all(row["status"] == "not run" and "benchmarks kernels" in row["note"] for row in kernels)


def test_a_slowdown_wants_both_cells_and_their_devices(tmp_path, analyzed):
    cells = [cell(name, "170m", "15b") for name in ("palimpsa_d", "palimpsa_d-plain")]
    for one in cells:
        write(tmp_path, one)

    def note(cells):
        (row,) = (
            row
            for row in analyzed(cells, paper="palimpsa", baseline=None)[0]["ledger"]
            if row["table"] == "slowdown" and row["scale"] == "170m"
        )
        return row["status"], row["note"]

    assert note(cells[:1]) == ("not run", "no cell of D w/o Meta at this scale and budget") and note(cells) == ("not run", "not recorded")


def test_palimpsas_tasks_are_scored_as_lm_eval_does(tmp_path, analyzed):
    one = cell("palimpsa_d-plain", "170m", "15b")
    tasks = [score(name, 50.0, "accuracy") for name in ("piqa", "hellaswag", "winogrande", "arc-easy", "arc-challenge", "siqa")]
    write(tmp_path, one, [*tasks, score("lambada", 30.0, "accuracy", kind="greedy", perplexity=44.0)])
    rows, _ = analyzed([one], paper="palimpsa")
    found = {(row["table"], row["metric"]): row for row in rows["ledger"] if row["cell"]}
    assert found["task_perplexity", "LMB"]["difference"] == pytest.approx(44 - 46.83)
    assert (
        found["groups", "accuracy"]["ours"] == pytest.approx((30 + 3 * 51 + 3 * 49) / 7) and found["groups", "accuracy"]["paper"] == 43.91
    )
    assert found["word_perplexity", "WIKI"]["note"].startswith("no stage of this study measures it; lm-eval")


def test_other_names_of_the_papers_models_are_given_in_params(tmp_path, analyzed):
    one = cell("my_mesa", "m", "15b")
    write_history(tmp_path / f"history/{one['cell']}.parquet", one, losses=np.ones(3))
    write_evaluation(tmp_path / f"evaluations/{one['cell']}", one, {("heldout", 2048, ""): [np.full(4, math.log(14.0), np.float32)]})
    rows, _ = analyzed([one], paper_names={"my_mesa": "Mesa", "m": "400M", "heldout": "SLIM"})
    (row,) = [row for row in rows["ledger"] if row["status"] == "run"]
    assert (row["name"], row["paper"]) == ("heldout", 13.44) and row["difference"] == pytest.approx(0.56, abs=1e-5)


def test_a_study_that_is_not_the_papers_says_so_in_a_sentence(tmp_path, analyzed):
    write_study(tmp_path, [cell("gla")], sets={"validation": [16]})
    rows, page = analyzed([cell("gla")])
    assert "No cell here is one of the paper’s own" in page and rows["ledger"] == []
    assert "Beside the paper" not in analyzed([cell("gla")], paper=None)[1]


def test_means_of_known_rows():
    found = {"A": {"task": "a", "score": 1.0, "std": 2.0, "items": 3}, "B": {"task": "b", "score": 2.0, "std": None, "items": 4}}
    assert ledger._mean_of(found, "score", "task") == ledger.Ours(1.5, ["a", "b"], None, 7)
    assert ledger._mean_of({"A": found["A"]}, "score", "task") == ledger.Ours(1.0, ["a"], 2.0, 3)
    assert ledger._mean_of({"A": found["A"], "B": None}, "score", "task") == ledger.Lacking("not evaluated: B")
