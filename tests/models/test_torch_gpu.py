"""What only a GPU can tell: captured decoding, FlexAttention, exact gates, and training that is compiled, late by a step, and the same bits again."""

import numpy as np
import pytest
import torch

from kernels.arrays import torch as ops
from kernels.attention import attention
from models import build
from models.backends.torch import Decoder, Trainer
from models.parameters import initialise

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")]
SCALE = {"layers": 2, "width": 512, "heads": 4, "key_size": 128, "mlp": 1024}
OPTIMIZER = {"beta1": 0.9, "beta2": 0.98, "epsilon": 1e-8, "weight_decay": 0.1, "clip": 1.0}


def distance(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


def trainer_of(name, **options):
    model = build({"layer": name}, SCALE, vocab_size=1000)
    return Trainer(model, optimizer=OPTIMIZER, seed=0, device="cuda", precision="bfloat16", compile=True, **options)


def batch(step):
    return np.random.default_rng(step).integers(0, 1000, (8, 513)).astype(np.int32)


@pytest.mark.parametrize("name", ["gla", "mesa", "attention"])
def test_a_captured_step_is_the_step(name):
    model = build({"layer": name}, SCALE, vocab_size=1000)
    params = {key: torch.tensor(value, device="cuda") for key, value in initialise(model.table, seed=0, blocks=2).items()}
    anew, captured = (Decoder(model, params, dtype=torch.bfloat16, in_place=in_place) for in_place in (False, True))
    prompt, random = np.random.default_rng(0).integers(0, 1000, (3, 70)), np.random.default_rng(1)
    anew.prefill(prompt), captured.prefill(prompt)
    for _ in range(5):
        token = random.integers(0, 1000, 3)
        assert distance(torch.tensor(captured.step(token)), torch.tensor(anew.step(token))) < 0.02


@pytest.mark.parametrize(("window", "documents"), [(200, False), (64, True), (None, True)])
def test_flexible_attention_is_the_references(window, documents):
    random = torch.Generator("cuda").manual_seed(0)
    inputs = [torch.randn(2, 600, 2, 128, device="cuda", generator=random).bfloat16() for _ in range(4)]
    ids = [[0] * 250 + [1] * 300 + [-1] * 50, [3] * 599 + [4]]
    segments = torch.tensor(ids, dtype=torch.int32, device="cuda") if documents else None

    def run(dtype, backend):
        *leaves, do = (x.to(dtype).requires_grad_() for x in inputs)
        o, _ = attention(*leaves, window=window, segments=segments, backend=backend)
        return [o, *torch.autograd.grad(o, leaves, do)]

    for found, exact in zip(run(torch.bfloat16, "library"), run(torch.float64, "reference"), strict=True):
        assert distance(found, exact) < 1e-2


def test_gates_are_exact():
    x, weight, dy = (
        torch.randn(8192, 1536, device="cuda").bfloat16(),
        torch.randn(1536, 24, device="cuda"),
        torch.randn(8192, 24, device="cuda"),
    )
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = ops.wide_matmul(*leaves)
    y.backward(dy)
    assert distance(y, x.double() @ weight.double()) < 4e-6
    assert distance(leaves[0].grad, dy.double() @ weight.double().T) < 5e-3
    assert distance(leaves[1].grad, x.double().T @ dy.double()) < 1e-5


@pytest.mark.parametrize("name", ["attention", "gla", "mesa"])
def test_deterministic_training_is_bit_for_bit(name):
    runs = []
    for _ in range(2):
        trainer = trainer_of(name, deterministic=True)
        facts = [trainer.step(batch(step), learning_rate=1e-3) for step in range(3)]
        runs.append((facts, trainer.state_dict()))
    torch.use_deterministic_algorithms(False)
    assert runs[0][0] == runs[1][0]
    assert all((runs[0][1][key] == value).all() for key, value in runs[1][1].items())


def test_what_follows_a_bad_step_is_left_undone():
    trainer = trainer_of("gla")
    trainer.step(batch(0), learning_rate=1e-3)
    before = trainer.state_dict()
    weight = trainer.params["final_norm"]
    kept = weight.detach().clone()
    weight.data.fill_(float("nan"))
    bad = trainer.submit(batch(1), learning_rate=1e-3, skip_nonfinite=True, halt=True)
    weight.data.copy_(kept)
    good = trainer.submit(batch(2), learning_rate=1e-3, skip_nonfinite=True, halt=True)
    assert bad()["finite"] == 0 and good()["finite"] == 1
    assert all((value == before[key]).all() for key, value in trainer.state_dict().items())
    trainer.load_state_dict(before)
    trainer.step(batch(2), learning_rate=1e-3, skip_nonfinite=True, halt=True)
    assert not (trainer.state_dict()["parameters/embedding"] == before["parameters/embedding"]).all()
