"""A block as few kernels against the block itself. Interpreted, or on a card."""

import numpy as np
import pytest
import torch

from kernels import launch
from models import build
from models.backends import torch_one_token as short
from models.backends.torch import Decoder
from models.parameters import initialise

pytest.importorskip("triton")
if not (launch.INTERPRETED or torch.cuda.is_available()):
    pytest.skip("these kernels run in Triton's interpreter or on a GPU", allow_module_level=True)

DEVICE = "cpu" if launch.INTERPRETED else "cuda"
SCALE = {"layers": 2, "width": 48, "heads": 2, "key_size": 16, "mlp": 40}


def params_of(model):
    """Every parameter off its special initial value."""
    random = np.random.default_rng(1)
    values = initialise(model.table, seed=0, blocks=2)
    return {name: torch.tensor(x + 0.1 * random.standard_normal(x.shape, np.float32), device=DEVICE) for name, x in values.items()}


@pytest.mark.parametrize(
    "entry",
    [
        {"layer": "gla"},
        {"layer": "mesa"},
        {"layer": "mesa", "convolution": 2, "forget_bound": 1.0, "eps": 0.0},
        {"layer": "gla", "value_expansion": 2},
    ],
)
def test_few_kernels_are_the_block(entry, monkeypatch):
    monkeypatch.setenv("STRATA_KERNELS", "triton")
    model = build(entry, SCALE, vocab_size=40)
    params = params_of(model)
    anew, kept = Decoder(model, params), Decoder(model, params, in_place=True)
    assert len(kept._short) == 2
    random = np.random.default_rng(0)
    prompt = random.integers(0, 40, (3, 7))
    anew.prefill(prompt), kept.prefill(prompt)
    for _ in range(3):
        token = random.integers(0, 40, 3)
        theirs, ours = anew.step(token), kept.step(token)
        assert np.abs(ours - theirs).max() <= 2e-5 * np.abs(theirs).max()
    leaves = (torch.utils._pytree.tree_leaves(decoder.states) for decoder in (anew, kept))
    for theirs, ours in zip(*leaves, strict=True):
        assert (ours.double() - theirs.double()).abs().max() <= 2e-5 * max(1, theirs.abs().max())


@pytest.mark.parametrize(
    "entry",
    [
        {"layer": "gla", "output_gate": True},
        {"layer": "gla", "forget_gate": "mamba"},
        {"layer": "deltanet"},
        {"layer": "gla", "skip": True},
    ],
)
def test_others_go_another_way(entry):
    model = build(entry, SCALE, vocab_size=40)
    assert not any(short.suits(layer, DEVICE, torch.float32) for layer in model.layers)
