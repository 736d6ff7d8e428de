"""Continuations of a shared beginning: as the whole text's forward pass, whatever the batch and the padding."""

import itertools

import numpy as np
import pytest
import torch

from models import build
from models.backends.torch import Trainer
from models.layers import LAYERS
from models.reader import reader, size_class

SCALE = {"layers": 2, "width": 32, "heads": 2, "key_size": 16, "mlp": 48}
VOCABULARY = 40


def reader_of(name, backend="torch", **options):
    model = build({"layer": name, **options}, SCALE, vocab_size=VOCABULARY, backend=backend)
    return reader(model.framework.Trainer(model, optimizer=None, seed=0, device="cpu"))


def texts(sizes, seed=0):
    random = np.random.default_rng(seed)
    return [random.integers(0, VOCABULARY, size) for size in sizes]


def rows(parts, *, behind, length):
    """(tokens [B, length], segments [B, length]): padded behind, or in front."""
    tokens, segments = np.zeros((len(parts), length), np.int32), np.full((len(parts), length), -1, np.int32)
    for row, part in enumerate(parts):
        place = slice(0, len(part)) if behind else slice(length - len(part), length)
        tokens[row, place], segments[row, place] = part, 0
    return tokens, segments


def whole(found, text):
    """(nll of each next token, the likeliest) by the forward pass over the whole text."""
    logits = found.model.forward(found.params, torch.from_numpy(text[None]))[0]
    log = torch.log_softmax(logits[:-1].double(), -1)
    return -log[torch.arange(len(text) - 1), torch.from_numpy(text[1:])].detach().numpy(), logits.argmax(-1).numpy()


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("begin", [0, 7])
def test_scores_are_the_whole_texts(name, begin):
    found = reader_of(name)
    start, parts = texts([begin])[0], texts((3, 9, 6), 1)
    tokens, segments = rows(parts, behind=True, length=12)
    scored = np.zeros((3, 11), bool)
    for row, part in enumerate(parts):
        scored[row, len(part) - 3 : len(part) - 1] = True
    nll, likeliest = found.score(found.begin(start), tokens, segments[:, 1:], scored)
    for row, part in enumerate(parts):
        wanted, best = whole(found, np.concatenate([start, part]))
        assert nll[2 * row : 2 * row + 2] == pytest.approx(wanted[-2:], abs=2e-5)
        assert (likeliest[2 * row : 2 * row + 2] == best[-3:-1]).all()


@pytest.mark.parametrize("name", LAYERS)
def test_going_on_is_the_whole_texts(name):
    found = reader_of(name)
    start, parts = texts([7])[0], texts((3, 9), 1)
    tokens, segments = rows(parts, behind=False, length=10)
    together = np.stack(list(found.go_on(found.begin(start), tokens, segments, 6)), 1)
    for row, part in enumerate(parts):
        text = np.concatenate([start, part])
        for token in together[row]:
            assert token == whole(found, text)[1][-1]
            text = np.append(text, token)
    alone = list(itertools.islice(found.go_on(found.begin(start), parts[0][None], None, 6), 3))
    assert [int(token[0]) for token in alone] == together[0, :3].tolist()


@pytest.mark.parametrize("name", ["attention", "mesa", "hawk"])
def test_jax_reads_the_same(name):
    pytest.importorskip("jax")
    ours, theirs = reader_of(name), reader_of(name, "jax")
    start, parts = texts([7])[0], texts((3, 9, 6), 1)
    tokens, segments = rows(parts, behind=True, length=12)
    scored = segments[:, 1:] == 0
    for begin in (start[:0], start):
        a, b = (one.score(one.begin(begin), tokens, segments[:, 1:], scored) for one in (ours, theirs))
        assert a[0] == pytest.approx(b[0], abs=2e-5) and (a[1] == b[1]).all()
    tokens, segments = rows(parts, behind=False, length=12)
    a, b = (np.stack(list(one.go_on(one.begin(start), tokens, segments, 8)), 1) for one in (ours, theirs))
    assert (a == b).all()


def test_a_setting_changes_the_solver_alone():
    model = build({"layer": "mesa"}, SCALE, vocab_size=VOCABULARY)
    trainer = Trainer(model, optimizer=None, seed=0)
    text = texts([20])[0]
    scored = np.ones((1, 19), bool)
    found = [reader(trainer, setting) for setting in (None, {"steps": 30}, {"solve": False})]
    trained, same, without = (one.score(one.begin(text[:0]), text[None], None, scored)[0] for one in found)
    assert (trained == same).all() and np.abs(trained - without).max() > 1e-4


def test_size_classes_waste_a_quarter_at_most():
    sizes = [size_class(length) for length in range(1, 5000)]
    assert all(0 <= size - length < max(8, length / 4 + 1) for length, size in enumerate(sizes, 1))
    assert sizes == sorted(sizes) and len(set(sizes)) < 40
    assert [size_class(length, 1) for length in (1, 8, 9, 100, 128, 129)] == [8, 8, 16, 128, 128, 256]
