"""The unit of evaluation that looks inside layers: what is in it, which cells have it, and that it is made once."""

import numpy as np
import pytest

from stages import artifact, evaluate, heads, schemas, train
from stages.evaluation import sequences
from stages.evaluation.parameters import Parameters
from stages.evaluation.scorer import Scorer
from tests.stages.small_study import GLA, LENGTH, MESA, context, evaluate_spec, make_packed, train_spec

PALIMPSA = {"layer": "palimpsa_d"}
PLAIN = {"layer": "palimpsa_m", "metaplasticity": False}


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """The inputs of evaluations of a Mesa, a GLA and two Palimpsas."""
    root = tmp_path_factory.mktemp("study")
    budget = make_packed(root / "packed")
    found = {}
    for model in (MESA, GLA, PALIMPSA, PLAIN):
        out = root / model["layer"]
        out.mkdir()
        train.run(train_spec(model=model), out, {"budget": budget}, context()[0])
        found[model["layer"]] = {"weights": out, "validation": root / "packed" / "validation"}
    return found


def evaluated(study, out, model=MESA, **changes):
    spec = evaluate_spec(weights=train_spec(model=model), sets=[], lengths=[], **changes)
    out.mkdir(exist_ok=True)
    evaluate.run(spec, out, study[model["layer"]], context()[0])
    return out


def rows(out):
    return schemas.read(out / "internals" / "internals.parquet", "internals").to_pylist()


def test_a_row_a_block_head_and_bin(study, tmp_path):
    found = rows(evaluated(study, tmp_path / "out", internals=3))
    assert [(row["block"], row["head"], row["first"], row["position"]) for row in found] == [
        (0, head, first, last) for head in (0, 1) for first, last in ((1, 1), (2, 2), (3, 4), (5, 8), (9, LENGTH))
    ]
    for row in found:
        assert row["sequences"] == 3 and 0 < row["gamma"] < 1 and 0 < row["beta"] < 1 and -1 <= row["cosine"] <= 1
        assert 0 < row["steps"] <= 8
        assert 0.25 < row["lambda_low"] <= row["lambda_mean"] <= row["lambda_high"]
    assert all(
        1 <= row["condition"] <= (row["lambda_high"] + row["position"]) / row["lambda_low"] for row in found
    )  # keys have unit length


def test_the_mean_forget_gate_is_the_one_that_training_records(study, tmp_path):
    """Over all positions of all validation rows: what a forward pass gives as its scalar."""
    found = rows(evaluated(study, tmp_path / "out", internals=9))
    by_head = [sum(row["gamma"] * (row["position"] - row["first"] + 1) for row in found if row["head"] == head) / LENGTH for head in (0, 1)]
    spec = evaluate_spec(weights=train_spec(model=MESA), sets=[], lengths=[])
    parameters = Parameters.model_validate(spec.parameters)
    import models

    model = models.build(MESA, parameters.scale, vocab_size=parameters.vocab_size)
    scorer = Scorer(model, parameters, study["mesa"]["weights"], context()[0])
    tokens = np.stack([one.tokens for one in sequences.rows(study["mesa"]["validation"], length=LENGTH, reset=False)])
    assert np.mean(by_head) == pytest.approx(scorer.trainer.nll(tokens)[1]["gamma"], rel=1e-5)


def test_only_models_with_internals_have_the_unit(study, tmp_path):
    assert not (evaluated(study, tmp_path / "gla", GLA, internals=2) / "internals").exists()
    out = evaluated(study, tmp_path / "mesa")
    assert not (out / "internals").exists()
    before = artifact.read(out / f"validation-{LENGTH}")["key"]
    evaluated(study, out, internals=2)
    assert artifact.read(out / f"validation-{LENGTH}")["key"] == before and "internals/internals.parquet" in artifact.read(out)["files"]


def test_it_is_made_again_only_for_other_sequences(study, tmp_path):
    out = evaluated(study, tmp_path / "out", internals=2)
    made = (out / "internals" / "internals.parquet").stat().st_mtime_ns
    evaluated(study, out, internals=2, settings={"few": {"steps": 2}})
    assert (out / "internals" / "internals.parquet").stat().st_mtime_ns == made
    evaluated(study, out, internals=3)
    assert rows(out)[0]["sequences"] == 3


def test_states_that_are_reset_are_looked_at_so(study, tmp_path):
    whole, reset = (rows(evaluated(study, tmp_path / str(reset), internals=4, reset=reset)) for reset in (False, True))
    assert whole[0]["condition"] == pytest.approx(reset[0]["condition"]) and whole[-1]["condition"] != pytest.approx(
        reset[-1]["condition"], rel=1e-3
    )


@pytest.mark.parametrize("length", [1, 2, 7, 8, 12, 2048])
def test_bins_cover_every_position_once(length):
    found = heads.bins(length)
    assert [place for first, last in found for place in range(first, last + 1)] == list(range(1, length + 1))


def test_palimpsas_memory_by_block_head_and_bin(study, tmp_path):
    out = evaluated(study, tmp_path / "out", PALIMPSA, internals=3)
    assert not (out / "internals" / "internals.parquet").exists() and "internals/memory.parquet" in artifact.read(out)["files"]
    found = schemas.read(out / "internals" / "memory.parquet", "memory").to_pylist()
    assert [(row["head"], row["position"]) for row in found] == [(head, last) for head in (0, 1) for last in (1, 2, 4, 8, LENGTH)]
    for row in found:
        assert (
            row["log_window"] > 0 and 0 < row["beta"] < 1.4 and 1 < row["importance_low"] < row["importance_mean"] < row["importance_high"]
        )
        assert 0 < row["ratio"] < row["importance_high"]
    first, last = found[0], found[4]
    assert last["importance_mean"] > first["importance_mean"]  # it grows with what was read


def test_the_last_ratio_and_window_are_those_that_training_records(study, tmp_path):
    found = schemas.read(evaluated(study, tmp_path / "out", PALIMPSA, internals=9) / "internals" / "memory.parquet", "memory").to_pylist()
    spec = evaluate_spec(weights=train_spec(model=PALIMPSA), sets=[], lengths=[])
    parameters = Parameters.model_validate(spec.parameters)
    import models

    model = models.build(PALIMPSA, parameters.scale, vocab_size=parameters.vocab_size)
    scorer = Scorer(model, parameters, study["palimpsa_d"]["weights"], context()[0])
    tokens = np.stack([one.tokens for one in sequences.rows(study["palimpsa_d"]["validation"], length=LENGTH, reset=False)])
    recorded = scorer.trainer.nll(tokens)[1]
    ratios = [row["ratio"] for row in found if row["position"] == LENGTH]
    assert recorded["importance_ratio"] == pytest.approx(np.mean(ratios), rel=1e-4)
    windows = [
        sum(row["log_window"] * (row["position"] - row["first"] + 1) for row in found if row["head"] == head) / LENGTH for head in (0, 1)
    ]
    assert recorded["log_window"] == pytest.approx(np.mean(windows), rel=1e-4)


def test_without_metaplasticity_only_windows_are_there(study, tmp_path):
    out = evaluated(study, tmp_path / "out", PLAIN, internals=2)
    found = schemas.read(out / "internals" / "memory.parquet", "memory").to_pylist()
    assert all(row["log_window"] > 0 and row["ratio"] is None and row["beta"] is None for row in found)


def test_training_records_what_is_inside_in_the_history(study):
    names = schemas.read(study["palimpsa_d"]["weights"] / "history.parquet", "history").column_names
    assert {"log_window", "importance_ratio"} <= set(names)
    names = schemas.read(study["mesa"]["weights"] / "history.parquet", "history").column_names
    assert {"cg_steps", "cg_residual", "gamma", "beta", "lambda"} <= set(names)
