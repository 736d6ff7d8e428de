"""The analysis of a made-up study: its tables against hand-worked numbers, what is left out, and that it is the same every time."""

import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from stages import artifact, schemas
from stages.analyze import run
from stages.report import tables
from stages.report.parameters import Analysis
from stages.spec import Context, Spec, Stopped
from tests.stages.made_up_study import LENGTH, cell, inputs_of, key, spec_of, write_evaluation, write_history, write_study

SETS = {"validation": [LENGTH], "books": [LENGTH, 2 * LENGTH]}
MODELS = ("transformer", "gla", "mesa")


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("study")
    cells = [cell(model) for model in MODELS] + [cell("mesa_cg5", group="sweep", steps=5, layer="mesa")]
    write_study(root, cells, sets=SETS, sweep_on="mesa")
    return root


CELLS = [cell(model) for model in MODELS] + [cell("mesa_cg5", group="sweep", steps=5, layer="mesa")]


def analyze(root: Path, out: Path, cells=CELLS, **analysis) -> Path:
    spec = spec_of(cells, **{"bootstrap": 20, **analysis})
    out.mkdir(parents=True, exist_ok=True)
    run(spec, out, inputs_of(root, spec), Context())
    return out


@pytest.fixture(scope="module")
def made(study, tmp_path_factory) -> Path:
    return analyze(study, tmp_path_factory.mktemp("analysis"))


def table(out: Path, name: str) -> list[dict]:
    return schemas.read(out / f"tables/{name}.parquet", schemas.FREE).to_pylist()


def files(out: Path) -> dict[str, str]:
    return {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(out.rglob("*")) if path.is_file()}


# Small evaluations by hand


def write_by_hand(root: Path) -> list[dict]:
    """Two cells, two sequences of four and two tokens, four steps of training."""
    cells = [cell("transformer", tokens=400, parameters=7, flops=10.0), cell("mesa", tokens=400, steps=30)]
    losses = {"transformer": [4.0, 3.0, 2.0, 1.0], "mesa": [4.0, 3.5, 1.0, 0.5]}
    nlls = {"transformer": [[1.0, 2.0, 3.0, 4.0], [5.0, math.nan]], "mesa": [[0.5, 2.5, 3.0, 3.0], [4.0, math.nan]]}
    for one in cells:
        mine = [np.array(values, np.float32) for values in nlls[one["model"]]]
        write_history(root / f"history/{one['cell']}.parquet", one, losses=np.array(losses[one["model"]]))
        evaluated = {("validation", 4, ""): mine}
        if one["model"] == "mesa":
            evaluated["validation", 4, "cg5"] = [nll + np.float32(0.25) for nll in mine]
        write_evaluation(root / f"evaluations/{one['cell']}", one, evaluated)
    return cells


@pytest.fixture(scope="module")
def hand_made(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("by_hand")
    return analyze(root, root / "out", write_by_hand(root), smoothing=0.5, bins_per_octave=1, points=4)


def test_perplexity_is_exp_of_the_mean_over_tokens(hand_made):
    found = {(row["cell"], row["setting"]): row for row in table(hand_made, "perplexity")}
    assert found["transformer-nano-1m", ""]["perplexity"] == pytest.approx(math.exp(15 / 5))
    assert found["mesa-nano-1m", ""]["nll"] == pytest.approx(13 / 5) and found["mesa-nano-1m", ""]["tokens"] == 5


def test_positions_less_the_baseline_by_hand(hand_made):
    rows = table(hand_made, "positions")
    assert {row["cell"] for row in rows} == {"mesa-nano-1m"}
    assert [(row["first"], row["last"]) for row in rows] == [(1, 1), (2, 4)]
    assert rows[0]["difference"] == pytest.approx((0.5 + 4) / 2 - (1 + 5) / 2)
    assert rows[1]["difference"] == pytest.approx((2.5 + 3 + 3) / 3 - (2 + 3 + 4) / 3)
    assert all(row["low"] <= row["difference"] <= row["high"] for row in rows)


def test_mean_so_far_by_hand(hand_made):
    rows = [row for row in table(hand_made, "mean_so_far") if row["cell"] == "transformer-nano-1m"]
    assert [(row["position"], row["tokens"]) for row in rows] == [(1, 2), (4, 5)]
    assert [row["nll"] for row in rows] == pytest.approx([6 / 2, 15 / 5])


def test_loss_curves_are_trailing_means_and_differences_are_on_the_same_tokens(hand_made):
    rows = {model: [row for row in table(hand_made, "curves") if row["model"] == model] for model in ("transformer", "mesa")}
    assert [row["tokens"] for row in rows["mesa"]] == [100, 200, 300, 400]
    assert [row["loss"] for row in rows["mesa"]] == pytest.approx([4.0, 3.75, 2.25, 0.75])
    assert [row["difference"] for row in rows["mesa"]] == pytest.approx([0.0, 0.25, -0.25, -0.75])
    assert all(row["difference"] is None for row in rows["transformer"])


def test_cg_settings_less_the_trained_one_by_hand(hand_made):
    (whole,) = table(hand_made, "cg_sweep")
    assert (whole["kind"], whole["cell"], whole["reference"], whole["setting"]) == ("inference", "mesa-nano-1m", "mesa-nano-1m", "cg5")
    assert [whole[name] for name in ("difference", "low", "high", "nll")] == pytest.approx([0.25, 0.25, 0.25, 13 / 5 + 0.25])
    assert whole["steps_taken"] == 5.0
    assert [row["mean_so_far"] for row in table(hand_made, "cg_positions")] == pytest.approx([0.25, 0.25])


def test_models_and_throughput_by_hand(hand_made):
    model = table(hand_made, "models")[0]
    assert (model["parameters"], model["tokens"], model["flops"], model["events"]) == (7, 400, 10.0, 0)
    assert model["final_loss"] == pytest.approx(1.5)
    speed = table(hand_made, "throughput")[0]
    assert speed["training_steps"] == 4 and speed["mfu"] == pytest.approx(0.21)
    assert speed["seconds"] == pytest.approx(4 * 16 * 256 / speed["tokens_per_second"], rel=0.1)


def test_metrics_are_at_the_training_length_and_have_no_timings(made, hand_made):
    found = json.loads((hand_made / "metrics.json").read_text())
    assert found["mesa-nano-1m"] == {"loss": 0.75, "perplexity": {"validation": pytest.approx(math.exp(13 / 5), rel=1e-5)}}
    whole = json.loads((made / "metrics.json").read_text())
    shown = {row["set"]: row["perplexity"] for row in table(made, "perplexity") if row["cell"] == "gla-nano-1m" and row["length"] == LENGTH}
    assert whole["gla-nano-1m"]["perplexity"] == pytest.approx(shown, rel=1e-5)
    assert {name for one in whole.values() for name in one} == {"loss", "perplexity"}
    for path in [made / "metrics.json", *(made / "plots").iterdir()]:
        assert "second" not in path.read_text() and "mfu" not in path.read_text()


def test_a_failed_model_shows_as_infinite_and_breaks_nothing(tmp_path):
    cells = write_by_hand(tmp_path)
    write_evaluation(
        tmp_path / "evaluations/mesa-nano-1m", cells[1], {("validation", 4, ""): [np.array([1.0, np.inf, 1.0, 1.0]), np.array([1.0, 1.0])]}
    )
    out = analyze(tmp_path, tmp_path / "out", cells)
    assert json.loads((out / "metrics.json").read_text())["mesa-nano-1m"]["perplexity"]["validation"] is None
    assert "∞" in (out / "report.html").read_text()


# Parts that cannot be there


def test_the_best_is_said_to_be_so_outside_a_sweep(made):
    assert "Best outside the sweep" in (made / "report.html").read_text()


def test_the_sweep_over_training_steps_is_less_the_grids_cell(made):
    rows = [row for row in table(made, "cg_sweep") if row["kind"] == "training"]
    assert {(row["cell"], row["reference"], row["steps"]) for row in rows} == {("mesa_cg5-nano-1m", "mesa-nano-1m", 5)}
    nll = {(row["cell"], row["set"], row["length"]): row["nll"] for row in table(made, "perplexity") if row["setting"] == ""}
    for row in rows:
        expected = nll[row["cell"], row["set"], row["length"]] - nll["mesa-nano-1m", row["set"], row["length"]]
        assert row["difference"] == pytest.approx(expected, abs=1e-9)
    assert (made / "figures/cg_training-mesa-nano-1m.png").exists()


def test_a_cell_that_the_spec_does_not_list_is_nowhere(study, made, tmp_path):
    assert (study / "evaluations/gla-nano-1m").is_dir()
    out = analyze(study, tmp_path, [one for one in CELLS if one["model"] != "gla"])
    assert "gla" in (made / "report.html").read_text().lower()
    for path in (path for path in out.rglob("*") if path.is_file() and path.suffix != ".png" and path.name != "provenance.json"):
        text = json.dumps(pq.read_table(path).to_pylist(), default=str) if path.suffix == ".parquet" else path.read_text()
        assert "gla" not in text.lower().replace("single", "")


def test_an_attempt_under_other_parameters_leaves_nothing_behind(study, tmp_path):
    analyze(study, tmp_path, CELLS[1:])
    first = set(files(tmp_path))
    analyze(study, tmp_path, CELLS[:1], baseline=None)
    left = set(files(tmp_path))
    assert left < first and not any("cg" in name or "positions" in name for name in left if name.startswith("figures/"))
    assert left - {"provenance.json", "artifact.json"} == set(artifact.read(tmp_path, content=True)["files"])


@pytest.mark.parametrize("baseline", [None, "hawk"])
def test_without_a_baseline_there_are_no_differences(study, tmp_path, baseline):
    out = analyze(study, tmp_path, CELLS[:2], baseline=baseline)
    page = (out / "report.html").read_text()
    assert table(out, "positions") == [] and json.loads((out / "plots/positions.json").read_text()) == []
    assert "Loss by position" not in page and "Training loss" in page and "Best: <b>" in page
    assert not (out / "figures/positions.png").exists()


def test_one_cell_alone(study, tmp_path):
    out = analyze(study, tmp_path, [cell("gla")])
    page = (out / "report.html").read_text()
    assert "One model at one scale: one cell" in page and "<td><b>" not in page
    assert "Conjugate gradient" not in page and "Loss by position" not in page
    assert table(out, "cg_sweep") == table(out, "positions") == []


def test_no_long_documents_no_section(tmp_path):
    cells = [cell("transformer"), cell("gla")]
    write_study(tmp_path, cells, sets={"validation": [LENGTH]})
    page = (analyze(tmp_path, tmp_path / "out", cells) / "report.html").read_text()
    assert "Beyond the training length" not in page and "Loss by position" in page


def test_scales_and_budgets_get_a_panel_each(tmp_path):
    cells = [cell(model, scale, budget) for scale in ("small", "large") for budget in ("1m", "2m") for model in ("transformer", "my_layer")]
    write_study(tmp_path, cells, sets={"validation": [16]})
    out = analyze(tmp_path, tmp_path / "out", cells, unigram_entropy=5.1)
    page = (out / "report.html").read_text()
    assert "unigram entropy" in page and "my_layer" in page
    assert {path.name for path in (out / "figures").glob("positions*")} == {
        "positions.png",
        *(f"positions-{s}-{b}.png" for s in ("small", "large") for b in ("1m", "2m")),
    }


# The same every time


def test_the_same_inputs_give_the_same_bytes(study, made, tmp_path):
    again = files(analyze(study, tmp_path))
    first = files(made)
    assert set(first) == set(again) and len(first) > 15
    assert {name for name in first if first[name] != again[name]} <= {"provenance.json"}


def test_timings_are_in_one_table_alone(study, made, tmp_path):
    """Training again on another machine changes the throughput, its section of the page, and nothing else."""
    import shutil

    shutil.copytree(study, tmp_path / "study")
    path = tmp_path / "study/history/gla-nano-1m.parquet"
    history = schemas.read(path, "history")
    for name in ("seconds", "tokens_per_second", "mfu"):
        history = history.set_column(history.column_names.index(name), name, [[2 * value for value in history[name].to_pylist()]])
    schemas.write(path, history, name="history", key=key("train", "gla-nano-1m"), schema=schemas.schema("history"))
    first, again = files(made), files(analyze(tmp_path / "study", tmp_path / "out"))
    assert {name for name in first if first[name] != again[name]} == {
        "tables/throughput.parquet",
        "report.html",
        "artifact.json",
        "provenance.json",
    }


# Refusals


def test_an_evaluation_under_another_key_is_refused(study, tmp_path):
    spec = spec_of(CELLS)
    wrong = spec.model_copy(update={"inputs": spec.inputs | {"evaluations/gla-nano-1m": "0" * 64}})
    with pytest.raises(ValueError, match="belongs to other parameters"):
        run(wrong, tmp_path, inputs_of(study, spec), Context())


def test_a_history_under_another_key_is_refused(study, tmp_path):
    spec = spec_of(CELLS)
    wrong = spec.model_copy(update={"inputs": spec.inputs | {"history/gla-nano-1m": "0" * 64}})
    with pytest.raises(ValueError, match="history/gla-nano-1m.parquet was made under key"):
        run(wrong, tmp_path, inputs_of(study, spec), Context())


def test_a_damaged_evaluation_is_named(tmp_path):
    cells = write_by_hand(tmp_path)
    path = tmp_path / "evaluations/mesa-nano-1m/validation-4/nll.parquet"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match="nll.parquet"):
        analyze(tmp_path, tmp_path / "out", cells)
    assert not (tmp_path / "out/artifact.json").exists()


def test_a_cell_without_its_input_and_parameters_that_are_none_are_refused(study, tmp_path):
    spec = spec_of(CELLS)
    with pytest.raises(ValueError, match="history/mesa-nano-1m"):
        run(spec, tmp_path, {name: path for name, path in inputs_of(study, spec).items() if name != "history/mesa-nano-1m"}, Context())
    with pytest.raises(ValueError, match="not valid.*colour"):
        run(Spec(stage="analyze", versions={}, parameters=spec.parameters | {"colour": "red"}), tmp_path, {}, Context())
    with pytest.raises(ValueError, match="listed twice"):
        run(spec_of([CELLS[0], CELLS[0]]), tmp_path, {}, Context())


def test_it_stops_when_asked(study, tmp_path):
    spec = spec_of(CELLS)
    with pytest.raises(Stopped):
        run(spec, tmp_path, inputs_of(study, spec), Context(stop_requested=lambda: True))
    assert not (tmp_path / "artifact.json").exists()


def test_the_artifact_records_what_it_was_made_from(study, made):
    record = artifact.read(made, key=spec_of(CELLS, bootstrap=20).key, content=True)
    assert record["stage"] == "analyze" and set(record["inputs"]) == set(spec_of(CELLS).inputs)
    assert record["inputs"]["evaluations/gla-nano-1m"] == artifact.read(study / "evaluations/gla-nano-1m")["digest"]
    assert "provenance.json" not in record["files"] and "report.html" in record["files"]


# Pieces


@pytest.mark.parametrize("length", [1, 2, 3, 7, 100, 256, 257, 2048])
@pytest.mark.parametrize("per_octave", [1, 3, 8])
def test_bins_cover_every_position_once(length, per_octave):
    edges = tables.edges(length, per_octave)
    assert edges[0] == 1 and edges[-1] == length + 1 and (np.diff(edges) > 0).all()
    assert len(edges) <= 2 + per_octave * math.ceil(math.log2(length + 1))


def test_bins_at_the_end_are_not_slivers():
    assert np.diff(tables.edges(256, 1))[-1] == 129  # 128..256, not 128..255 and 256 alone


def test_smoothing_skips_what_is_not_finite():
    assert tables.smoothed(np.array([np.nan, 2.0, np.inf, 4.0]), 2).tolist()[1:] == [2.0, 2.0, 4.0]
    assert math.isnan(tables.smoothed(np.array([np.nan]), 3)[0])


def test_unknown_parameters_of_the_analysis_are_refused():
    with pytest.raises(ValueError):
        Analysis(smoothing=0.0)
    with pytest.raises(ValueError):
        Analysis(baselines="transformer")
