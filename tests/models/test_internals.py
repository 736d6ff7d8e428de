"""What Mesa's heads do inside, against the recurrence written out in float64, in both frameworks."""

import numpy as np
import pytest

import models
from models import internals
from models.layers.layer import gates
from models.parameters import behind

SCALE = {"layers": 2, "width": 16, "heads": 2, "key_size": 8, "mlp": 24}
MODEL = {"pattern": [{"layer": "gla"}, {"layer": "mesa", "steps": 30, "eps": 0.0}]}
POSITIONS = (1, 2, 5, 11)


def looked(backend: str, segments=None, model=MODEL):
    built = models.build(model, SCALE, vocab_size=32, backend=backend)
    tokens = np.random.default_rng(0).integers(0, 32, (2, 11)).astype(np.int32)
    return built, tokens, internals.look(built, built.init(0), tokens, POSITIONS, tolerance=1e-3, segments=segments)


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_the_systems_are_those_of_the_recurrence(backend):
    built, tokens, found = looked(backend)
    assert set(found) == {1}  # the first block's layer has no internals
    one, ops, mesa = found[1], built.ops, built.layers[1]
    params = built.init(0)
    x, _, _ = built.block(built.layers[0], behind("blocks.0.", params), built.embed(params, tokens), None, None)
    mixer = behind("blocks.1.mixer.", params)
    z = ops.rms_norm(x, params["blocks.1.mixer_norm"], eps=1e-6)
    k = np.asarray(mesa._inputs(mixer, z, None, None, ops=ops)[1], np.float64)
    gate = {name: np.asarray(value, np.float64) for name, value in gates(z, mixer, mesa.gates, ops=ops).items()}
    beta = 1 / (1 + np.exp(-gate["write"]))
    gamma = (1 - 0.0025 * beta**2) / (1 + np.exp(-gate["forget"]))
    assert np.allclose(one["gamma"], gamma, atol=1e-6) and np.allclose(one["beta"], beta, atol=1e-6)
    h = np.zeros((2, 2, 8, 8))
    for t in range(11):
        h = gamma[:, t, :, None, None] * h + beta[:, t, :, None, None] * k[:, t, :, :, None] * k[:, t, :, None, :]
        if t + 1 in POSITIONS:
            assert np.allclose(one["system"][:, POSITIONS.index(t + 1)], h + np.eye(8), atol=1e-6)
    assert np.allclose(one["lambda"], 1.0) and one["steps"].shape == one["cosine"].shape == (2, 11, 2)
    assert (one["steps"] >= 1).all() and (one["steps"] <= 8).all() and (np.abs(one["cosine"]) <= 1 + 1e-6).all()


def test_cosine_is_of_what_is_read_with_and_without_the_solve():
    """Behind one token H has rank one, so both read that token's value, with weights of the query's own sign or its opposite."""
    _, _, found = looked("torch")
    assert np.allclose(np.abs(found[1]["cosine"][:, 0]), 1.0, atol=1e-5) and (np.abs(found[1]["cosine"][:, 5:]) < 0.99999).any()


def test_another_document_is_not_in_the_system():
    segments = np.array([[0] * 3 + [1] * 8] * 2, np.int32)
    _, _, found = looked("torch", segments)
    _, _, whole = looked("torch")
    fresh = found[1]["system"][:, POSITIONS.index(5)] - np.eye(8)
    assert np.linalg.matrix_rank(fresh[0, 0], tol=1e-5) == 2  # tokens 4 and 5
    assert np.allclose(found[1]["system"][:, 1], whole[1]["system"][:, 1], atol=1e-6) and not np.allclose(
        found[1]["system"][:, 3], whole[1]["system"][:, 3]
    )


def test_who_has_internals():
    assert internals.can(models.build(MODEL, SCALE, vocab_size=32))
    assert not internals.can(models.build({"layer": "gla"}, SCALE, vocab_size=32))


PALIMPSA = {"pattern": [{"layer": "gla"}, {"layer": "palimpsa_d", "prior": 0.5}]}


def by_recurrence(backend: str):
    """(alpha [B, T, H], importance [B, T, H, K, V]) of the second block, float64, token by token."""
    built, tokens, found = looked(backend, model=PALIMPSA)
    params, ops, layer = built.init(0), built.ops, built.layers[1]
    x, _, _ = built.block(built.layers[0], behind("blocks.0.", params), built.embed(params, tokens), None, None)
    mixer = behind("blocks.1.mixer.", params)
    z = ops.rms_norm(x, params["blocks.1.mixer_norm"], eps=1e-6)
    _, k, _, (beta, log_decay, _), *_ = layer._inputs(mixer, z, None, None, ops=ops)
    k, beta, alpha = (np.asarray(one, np.float64) for one in (k, beta, ops.exp(log_decay)))
    J, all_J = np.zeros((2, 2, 8, 8)), []
    for t in range(11):
        J = alpha[:, t, :, None, None] * J + k[:, t, :, :, None] ** 2 * beta[:, t, :, None, :]
        all_J.append(J)
    return built, tokens, found, alpha, beta, 0.5 + np.stack(all_J, 1)


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_palimpsas_windows_and_importance_are_those_of_the_recurrence(backend):
    built, tokens, found, alpha, beta, importance = by_recurrence(backend)
    assert set(found) == {1} and set(found[1]) == {"log_window", "beta", "importance"}
    assert np.allclose(found[1]["log_window"], np.log(1 / (1 - alpha)), atol=1e-4)
    assert np.allclose(found[1]["beta"], beta.mean(-1), atol=1e-6)
    assert np.allclose(found[1]["importance"], importance[:, [t - 1 for t in POSITIONS]], rtol=1e-5)


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_palimpsas_scalars_are_what_a_look_inside_sees(backend):
    """What training records of a step: means over tokens and heads, and the ratio behind the last token."""
    built, tokens, _, alpha, _, importance = by_recurrence(backend)
    _, _, record = built.through_blocks(built.init(0), tokens)
    low, high = (getattr(importance[:, -1], bound)((-1, -2)) for bound in ("min", "max"))
    ratio_BH = (high - low) / low
    assert set(record) == {"log_window", "importance_ratio"}
    assert float(record["log_window"]) == pytest.approx(-np.log(1 - alpha).mean(), rel=1e-4)
    assert float(record["importance_ratio"]) == pytest.approx(ratio_BH.mean(), rel=1e-4) and ratio_BH.min() > 0.01


def test_without_metaplasticity_there_is_a_window_and_no_importance():
    plain = {"layer": "palimpsa_m", "metaplasticity": False}
    built, tokens, found = looked("torch", model=plain)
    assert set(found) == {0, 1} and set(found[0]) == {"log_window"}
    assert set(built.through_blocks(built.init(0), tokens)[2]) == {"log_window"}


def test_importance_forgets_other_documents():
    segments = np.array([[0] * 3 + [1] * 8] * 2, np.int32)
    _, _, found = looked("torch", segments, PALIMPSA)
    _, _, whole = looked("torch", model=PALIMPSA)
    assert np.allclose(found[1]["importance"][:, 1], whole[1]["importance"][:, 1], atol=1e-6)
    assert 0.5 < found[1]["importance"][:, 2].mean() < 0.9 * whole[1]["importance"][:, 2].mean()  # the prior, and two tokens of five


def test_a_gate_that_never_closes_has_the_longest_window():
    from models.layers.palimpsa import LONGEST_WINDOW, log_window

    ops = models.build(MODEL, SCALE, vocab_size=32).ops
    found = log_window(
        ops.array(np.log([0.5, 0.999, 1.0]), ops.float32, next(iter(models.build(MODEL, SCALE, vocab_size=32).init(0).values()))), ops=ops
    )
    assert np.allclose(np.asarray(found), np.log([2, 1000, LONGEST_WINDOW]), atol=1e-3)
