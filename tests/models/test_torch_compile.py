"""What a GPU's training compiles: each kind of block whole, once, whatever the layer."""

import functools

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from models import build
from models.backends.torch import Trainer
from models.layers import LAYERS

SCALE = {"layers": 3, "width": 32, "heads": 2, "key_size": 16, "mlp": 48}
OPTIMIZER = {"beta1": 0.9, "beta2": 0.98, "epsilon": 1e-8, "weight_decay": 0.1, "clip": 1.0}
ENTRIES = {name: {"layer": name} for name in LAYERS} | {"window": {"layer": "attention", "window": 5}}
TRAINABLE = [name for name, entry in ENTRIES.items() if build(entry, SCALE, vocab_size=32).trainable is None]


def trainer(entry, **options):
    return Trainer(build(entry, SCALE, vocab_size=32), optimizer=OPTIMIZER, seed=0, threads=1, **options)


@pytest.mark.parametrize("segments", [False, True], ids=["whole", "segments"])
@pytest.mark.parametrize("name", TRAINABLE)
def test_a_block_is_one_graph_and_is_compiled_once(name, segments, monkeypatch):
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = trainer(ENTRIES[name])
    compiled._compile = True  # a CPU's trainer does not
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, fullgraph=True, backend=graphs))
    tokens = np.random.default_rng(0).integers(0, 32, (2, 22))
    ids = np.repeat(np.arange(3, dtype=np.int32), 7)[None].repeat(2, 0) if segments else None
    plain = trainer(ENTRIES[name]).step(tokens, learning_rate=1e-3, segments=ids)
    found = [compiled.step(tokens, learning_rate=1e-3, segments=ids) for _ in range(2)]
    assert graphs.frame_count == 1
    assert found[0] == pytest.approx(plain, rel=1e-3) and found[1]["loss"] < found[0]["loss"]
    scored = trainer(ENTRIES[name])
    scored.load_weights(compiled.weights())
    np.testing.assert_allclose(compiled.nll(tokens, segments=ids)[0], scored.nll(tokens, segments=ids)[0], rtol=1e-3)


@pytest.mark.parametrize("name", ["attention", "gla", "mesa", "hawk"])
def test_recomputed_blocks_give_the_same_step(name):
    tokens = np.random.default_rng(0).integers(0, 32, (2, 22))
    kept, again, later = trainer(ENTRIES[name]), trainer(ENTRIES[name], rematerialise=True), trainer(ENTRIES[name])
    for _ in range(2):
        facts = kept.step(tokens, learning_rate=1e-3)
        assert again.step(tokens, learning_rate=1e-3) == facts == later.step(tokens, learning_rate=1e-3, rematerialise=True)
