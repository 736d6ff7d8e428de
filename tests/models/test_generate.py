"""Generation against the forward pass: greedy tokens, prompts of different lengths, draws, stopping."""

import itertools

import numpy as np
import pytest
import torch

from models import build
from models.generate import generate, sample, stream
from models.layers import LAYERS

SCALE = {"layers": 2, "width": 32, "heads": 2, "key_size": 16, "mlp": 48}


def model_and_params(name, backend="torch"):
    model = build({"layer": name}, SCALE, vocab_size=40, backend=backend)
    return model, model.init(0)


def greedy_by_forward(model, params, prompt, length):
    tokens = prompt
    for _ in range(length):
        logits = model.forward(params, torch.from_numpy(tokens))
        tokens = np.concatenate([tokens, logits[:, -1].argmax(-1, keepdim=True).numpy()], 1)
    return tokens[:, prompt.shape[1] :]


@pytest.mark.parametrize("name", LAYERS)
def test_greedy_is_the_forward_passs(name):
    model, params = model_and_params(name)
    prompt = np.random.default_rng(0).integers(0, 40, (2, 7))
    assert (generate(model, params, prompt, 9) == greedy_by_forward(model, params, prompt, 9)).all()


def prompts_of(sizes):
    """(prompts, the same padded in front, their segments)."""
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 40, size) for size in sizes]
    padded, ids = np.zeros((len(sizes), max(sizes)), np.int64), np.full((len(sizes), max(sizes)), -1, np.int32)
    for row, prompt in enumerate(prompts):
        padded[row, max(sizes) - len(prompt) :], ids[row, max(sizes) - len(prompt) :] = prompt, 0
    return prompts, padded, ids


@pytest.mark.parametrize("name", LAYERS)
def test_prompts_of_different_lengths(name):
    """Padded in front, each row goes on as it does alone."""
    model, params = model_and_params(name)
    prompts, padded, ids = prompts_of((3, 8))
    together = generate(model, params, padded, 6, segments_BP=ids)
    for row, prompt in enumerate(prompts):
        assert (together[row] == generate(model, params, prompt[None], 6)[0]).all()


@pytest.mark.parametrize("name", ["attention", "mesa"])
def test_jax_generates_the_same(name):
    """Prompts of different lengths, each as torch goes on with it alone; full attention's cache grows on the way."""
    pytest.importorskip("jax")
    prompts, padded, ids = prompts_of((3, 8))
    together = generate(*model_and_params(name, "jax"), padded, 12, segments_BP=ids)
    for row, prompt in enumerate(prompts):
        assert (together[row] == generate(*model_and_params(name), prompt[None], 12)[0]).all()


@pytest.mark.parametrize("name, programs", [("attention", 2), ("mesa", 1)])
def test_jax_decodes_in_constant_memory_by_one_program(name, programs):
    """A step takes its states' memory, and is compiled once; for full attention, once more when its cache is doubled."""
    jax = pytest.importorskip("jax")
    from models.backends import jax_steps

    model, params = model_and_params(name, "jax")
    decoder, before, sizes = model.framework.Decoder(model, params), jax_steps.decode._cache_size(), []
    decoder.prefill(np.array([[1, 2, 3]]))
    for token in range(8):
        states = jax.tree.leaves(decoder.states)
        decoder.step(np.array([token]))
        assert all(value.is_deleted() for value in states) or token in (0, 5)  # what is doubled first is a copy
        sizes.append(sum(value.nbytes for value in jax.tree.leaves(decoder.states)))
    assert jax_steps.decode._cache_size() - before == programs == len(set(sizes))


def test_no_graph_grows_when_parameters_ask_for_gradients():
    model, params = model_and_params("gla")
    params = {name: value.requires_grad_() for name, value in params.items()}
    assert generate(model, params, np.array([[1, 2]]), 3).shape == (1, 3)


def test_draws_follow_the_probabilities():
    logits = np.log(np.array([[0.1, 0.2, 0.7]])).repeat(20_000, 0)
    random = np.random.default_rng(0)
    for temperature, expected in ((1.0, [0.1, 0.2, 0.7]), (0.5, np.array([0.01, 0.04, 0.49]) / 0.54)):
        counts = np.bincount(sample(logits, temperature, random), minlength=3) / len(logits)
        assert counts == pytest.approx(np.asarray(expected), abs=0.015)


def test_a_seed_repeats_its_draws():
    model, params = model_and_params("gla")
    prompt = np.array([[1, 2, 3]])
    a, b, c = (generate(model, params, prompt, 12, temperature=1.0, seed=seed) for seed in (1, 1, 2))
    assert (a == b).all() and (a != c).any()


def test_it_stops_once_every_row_has_stopped():
    model, params = model_and_params("gla")
    prompt = np.array([[1, 2, 3]])
    free = generate(model, params, prompt, 8)
    stopped = generate(model, params, prompt, 8, stop=int(free[0, 2]))
    assert stopped.shape[1] == 1 + int(np.argmax(free[0] == free[0, 2]))
    assert [int(token[0]) for token in itertools.islice(stream(model, params, prompt), 8)] == free[0].tolist()


def test_mistakes_are_named():
    model, params = model_and_params("gla")
    with pytest.raises(ValueError, match="at least one token"):
        generate(model, params, np.zeros((1, 0), int), 3)
    with pytest.raises(ValueError, match="temperature is -1"):
        generate(model, params, np.array([[1]]), 3, temperature=-1)


@pytest.mark.parametrize("name", LAYERS)
def test_states_in_place_go_on_as_states_made_anew(name):
    """What a GPU captures: the same memory at every step, but where full attention's cache was made larger."""
    from models.backends.torch import Decoder

    model, params = model_and_params(name)
    prompt, random = np.random.default_rng(0).integers(0, 40, (2, 5)), np.random.default_rng(1)
    anew, kept = Decoder(model, params), Decoder(model, params, in_place=True)
    assert (anew.prefill(prompt) == kept.prefill(prompt)).all()
    places = set()
    for _ in range(9):
        token = random.integers(0, 40, 2)
        assert kept.step(token) == pytest.approx(anew.step(token), rel=1e-4, abs=1e-5)
        places.add(tuple(value.data_ptr() for value in torch.utils._pytree.tree_leaves(kept.states)))
    assert len(places) == (2 if name == "attention" else 1)


def test_rounded_weights_keep_gates_and_norms():
    from models.backends.torch import Decoder

    model, params = model_and_params("mesa")
    decoder = Decoder(model, params, dtype=torch.bfloat16)
    rounded = {name for name, value in decoder.params.items() if value.dtype == torch.bfloat16}
    assert {name.split(".")[-1] for name in rounded} == {"embedding", "q", "k", "v", "q_conv", "k_conv", "out", "gate", "up", "down"}
    prompt = np.random.default_rng(0).integers(0, 40, (2, 5))
    assert np.abs(decoder.prefill(prompt) - Decoder(model, params).prefill(prompt)).max() < 0.3
    assert np.isfinite(decoder.step(np.array([1, 2]))).all()
