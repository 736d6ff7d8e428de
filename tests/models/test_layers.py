"""The contract of every layer, for each entry of LAYERS that can be trained; a new layer gets it by existing.

Float32 on the CPU. Differences are relative to the largest magnitude; the bound is 3e-5, which covers sums taken in another order.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from kernels import arrays
from models import build, build_layer
from models.layers import LAYERS
from models.layers.layer import Layer
from models.parameters import Parameter

BLOCK = {"forget_gate": "mamba", "convolve_values": True, "output_gate": True, "value_expansion": 2, "skip": True}
SCALE = {"layers": 2, "width": 48, "heads": 2, "key_size": 16, "mlp": 64}
VOCABULARY, BOUND = 61, 3e-5
ENTRIES = {name: {"layer": name} for name in LAYERS if build_layer({"layer": name}, SCALE).trainable is None}
ENTRIES |= {
    "swa": {"layer": "attention", "window": 5},
    "mesa_exact": {"layer": "mesa", "eps": 0.0},
    "mesa_start": {"layer": "mesa", "steps": 0},
    "mesa_unrolled": {"layer": "mesa", "gradient": "unrolled", "steps": 4},
    "mesa_unsolved": {"layer": "mesa", "solve": False},
    "gla_values": {"layer": "gla", "convolve_values": True},
    "mamba2_mamba": {"layer": "mamba2", "forget_gate": "mamba", "skip": True},
    "gated_deltanet_block": {"layer": "gated_deltanet", **BLOCK},
    "mesa_block": {"layer": "mesa", "value_expansion": 2, "output_gate": True},
    "mlstm_block": {"layer": "mlstm", **BLOCK},
    "rls_mesa_forgetting": {"layer": "rls_mesa", "forget_minimum": 0.97},
    "palimpsa_d_wide": {"layer": "palimpsa_d", "value_expansion": 2, "rank": 5, "prior": 0.5},
    "palimpsa_d_plain": {"layer": "palimpsa_d", "metaplasticity": False},
    "palimpsa_m_groups": {"layer": "palimpsa_m", "groups": 1, "value_expansion": 1.5},
    "palimpsa_m_plain": {"layer": "palimpsa_m", "metaplasticity": False},
    "gla_attention": {"pattern": [{"layer": "gla"}, {"layer": "attention"}]},
    "hawk_mesa": {"pattern": [{"layer": "hawk"}, {"layer": "mesa"}]},
}
every = pytest.mark.parametrize("name", ENTRIES)


def model_of(name, backend="torch", **scale):
    return build(ENTRIES[name], {**SCALE, **scale}, vocab_size=VOCABULARY, backend=backend)


def lively(model, seed=0):
    """Parameters away from their special initial values (zero biases, unit norms)."""
    random = np.random.default_rng(seed)
    return {
        name: value + torch.from_numpy(0.1 * random.standard_normal(value.shape).astype(np.float32))
        for name, value in model.init(seed).items()
    }


def tokens_of(*shape, seed=1):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, VOCABULARY, shape))


def difference(a, b):
    a, b = np.asarray(a), np.asarray(b)
    assert a.shape == b.shape
    return np.abs(a - b).max() / np.abs(b).max()


@every
def test_step_equals_forward(name):
    model = model_of(name)
    params, tokens = lively(model), tokens_of(2, 13)
    expected = model.forward(params, tokens)
    state, logits = model.initial_state(2), []
    for t in range(13):
        logits_BV, state = model.step(params, tokens[:, t], state)
        logits.append(logits_BV)
    assert difference(torch.stack(logits, 1), expected) < BOUND


@every
def test_prefill_then_step(name):
    """Also with explicit initial states, and with a prompt taken in two parts."""
    model = model_of(name)
    params, tokens = lively(model), tokens_of(2, 40)
    expected = model.forward(params, tokens)
    state = model.initial_state(2, params)
    first, state = model.prefill(params, tokens[:, :19], state)
    second, state = model.prefill(params, tokens[:, 19:39], state)
    last, _ = model.step(params, tokens[:, 39], state)
    assert difference(torch.cat((first, second, last[:, None]), 1), expected) < BOUND


@every
def test_a_token_never_sees_a_later_one(name):
    model = model_of(name)
    params, tokens = lively(model), tokens_of(1, 37)
    other = tokens.clone()
    other[:, 20:] = tokens_of(1, 17, seed=2)
    a, b = model.forward(params, tokens), model.forward(params, other)
    assert difference(a[:, :20], b[:, :20]) < 1e-6
    assert difference(a[:, 20:], b[:, 20:]) > 1e-2


@every
def test_rows_do_not_depend_on_their_batch(name):
    model = model_of(name)
    params, tokens = lively(model), tokens_of(3, 21)
    together = model.forward(params, tokens)
    assert difference(torch.cat([model.forward(params, tokens[i : i + 1]) for i in range(3)]), together) < BOUND


@every
def test_segments_do_not_leak(name):
    """What comes before a piece in its row moves neither its outputs nor its gradients, and nothing flows back; convolution included."""
    model = model_of(name)
    params = lively(model)
    segments = torch.tensor([[0] * 11 + [1] * 14 + [5] * 8], dtype=torch.int32)
    piece, results = tokens_of(1, 14, seed=3), []
    for seed in (4, 5):
        tokens = torch.cat((tokens_of(1, 11, seed=seed), piece, tokens_of(1, 8, seed=seed + 2)), 1)
        leaves = {key: value.clone().requires_grad_() for key, value in params.items()}
        logits = model.forward(leaves, tokens, segments)[:, 11:25]
        logits.square().sum().backward()
        results.append((logits.detach(), {key: value.grad for key, value in leaves.items()}))
    (a, gradients), (b, others) = results
    assert difference(a, b) < 1e-6
    assert difference(a, model.forward(params, piece)) < BOUND
    for key, gradient in gradients.items():
        if gradient is not None and gradient.abs().max() > 0:
            assert difference(gradient, others[key]) < BOUND, key


@every
def test_gradients_stay_in_their_segment(name):
    for layer in model_of(name).layers:
        ops = arrays.load("torch")
        p = {key.removeprefix("blocks.0.mixer."): value for key, value in lively(build_one(layer)).items() if "mixer." in key}
        x = torch.randn(2, 20, SCALE["width"], generator=torch.Generator().manual_seed(0)).requires_grad_()
        segments = torch.tensor([[0] * 9 + [1] * 11, [3] * 4 + [4] * 16], dtype=torch.int32)
        y, _ = layer.forward(p, x, segments=segments, ops=ops)
        y[0, 9:].square().sum().backward()
        assert x.grad[0, 9:].abs().max() > 0
        assert x.grad[0, :9].abs().max() == 0 and x.grad[1].abs().max() == 0


def build_one(layer):
    return replace(build({"layer": "attention"}, {**SCALE, "layers": 1}, vocab_size=VOCABULARY), layers=(layer,))


@every
def test_padding_changes_nothing(name):
    """Padding in front, between and behind: the real tokens' logits and the state after them are those without it."""
    model = model_of(name)
    params, tokens = lively(model), tokens_of(2, 12)
    ids = torch.zeros(2, 12, dtype=torch.int32)
    expected, state = model.prefill(params, tokens, None, ids)
    places = [1, 2, 4, 5, 6, 9, 10, 11, 12, 13, 15, 16]
    padded, padded_ids = tokens_of(2, 19, seed=9), torch.full((2, 19), -1, dtype=torch.int32)
    padded[:, places], padded_ids[:, places] = tokens, ids
    logits, padded_state = model.prefill(params, padded, None, padded_ids)
    assert difference(logits[:, places], expected) < BOUND
    follow = tokens_of(2, 1, seed=8)[:, 0]
    assert difference(model.step(params, follow, padded_state)[0], model.step(params, follow, state)[0]) < BOUND


@every
def test_states_continue_their_segment_and_reset_at_another(name):
    model = model_of(name)
    params, tokens = lively(model), tokens_of(1, 30)
    ids = torch.tensor([[2] * 17 + [7] * 13], dtype=torch.int32)
    expected = model.forward(params, tokens, ids)
    for cut in (10, 17, 19):
        first, state = model.prefill(params, tokens[:, :cut], None, ids[:, :cut])
        second, _ = model.prefill(params, tokens[:, cut:], state, ids[:, cut:])
        assert difference(torch.cat((first, second), 1), expected) < BOUND, cut


@pytest.mark.parametrize("name", [*LAYERS, "swa", "gated_deltanet_block"])  # a compilation each: seconds
def test_torch_equals_jax(name):
    """The same weights give the same logits through the same code; gradients and curves: tests/models/test_jax_trainer.py."""
    jax = pytest.importorskip("jax")
    layers = len(ENTRIES[name].get("pattern", "1"))
    model, twin = model_of(name, layers=layers), model_of(name, "jax", layers=layers)
    params, tokens = lively(model), tokens_of(2, 35)
    jax_params = {key: jax.numpy.asarray(value.numpy()) for key, value in params.items()}
    assert difference(jax.jit(twin.forward)(jax_params, tokens.numpy()), model.forward(params, tokens)) < BOUND


@every
def test_bfloat16_activations_stay_close(name):
    """float32 weights, bfloat16 activations: close to float32, and the stream really is bfloat16."""
    model = model_of(name)
    params, tokens = lively(model), tokens_of(2, 33)
    x, _, _ = model.stream(params, tokens, dtype=torch.bfloat16)
    assert x.dtype == torch.bfloat16
    logits = model.logits(params, x)
    expected = model.forward(params, tokens)
    assert logits.dtype == torch.float32 and (logits - expected).norm() / expected.norm() < 0.08


@every
def test_every_parameter_has_a_gradient(name):
    model = model_of(name)
    leaves = {key: value.clone().requires_grad_() for key, value in lively(model).items()}
    model.forward(leaves, tokens_of(2, 16)).square().sum().backward()
    unused = {"lambda"} if ENTRIES[name].get("solve") is False else set()
    for key, value in leaves.items():
        if key.rpartition(".")[2] not in unused:
            assert value.grad is not None and value.grad.abs().max() > 0, key


def test_a_layer_without_a_forward_pass_says_so():
    """What a file with a parameter table alone gives: it can be planned, and says why it cannot be trained."""

    @dataclass(frozen=True)
    class Planned(Layer):
        name = "planned"

        def parameters(self):
            return {"out": Parameter((self.width, self.width), axes=("width", "width"))}

        def flops(self, length, *, steps=None, training=False):
            return 2.0 * self.width**2

        def state_floats(self, length):
            return 0

    model = build_one(Planned(width=48, heads=2, key_size=16))
    assert model.parameters > 0 and model.flops(10) > 0 and model.trainable == "no forward pass yet"
    with pytest.raises(NotImplementedError, match="no forward pass yet"):
        model.forward(model.init(0), tokens_of(1, 3))
