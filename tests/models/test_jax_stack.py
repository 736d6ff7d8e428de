"""Blocks stacked for a scan: how layers become runs, that names and numbers are those of the blocks, and that depth costs no tracing."""

import numpy as np
import pytest

from models import build

jax = pytest.importorskip("jax")

from models.backends import jax_steps  # noqa: E402
from models.backends.jax import Trainer  # noqa: E402
from models.backends.jax_stack import Stack, runs  # noqa: E402

SCALE = {"layers": 1, "width": 32, "heads": 2, "key_size": 16, "mlp": 48}
OPTIMIZER = {"beta1": 0.9, "beta2": 0.98, "epsilon": 1e-5, "weight_decay": 0.1, "clip": 1.0}
MIXED = {"pattern": [{"layer": "hawk"}, {"layer": "mesa"}]}
IRREGULAR = {"pattern": [{"layer": name} for name in ("attention", "gla", "mesa", "gla", "mesa", "hawk")]}


def model_of(entry, layers):
    return build(entry, SCALE | {"layers": layers}, vocab_size=64, backend="jax")


def equations(jaxpr) -> int:
    """All there is in a program, the programs inside it included."""
    inner = [value for equation in jaxpr.eqns for value in jax.tree.leaves(list(equation.params.values()), is_leaf=is_program)]
    return len(jaxpr.eqns) + sum(equations(getattr(value, "jaxpr", value)) for value in inner if is_program(value))


def is_program(value) -> bool:
    return hasattr(getattr(value, "jaxpr", value), "eqns")


@pytest.mark.parametrize(
    "layers, expected",
    [
        ("aaaa", [("a", 4)]),
        ("ababab", [("ab", 3)]),
        ("abababa", [("ab", 3), ("a", 1)]),
        ("aabaab", [("aab", 2)]),
        ("xababy", [("x", 1), ("ab", 2), ("y", 1)]),
        ("aaabb", [("a", 3), ("b", 2)]),
        ("abc", [("a", 1), ("b", 1), ("c", 1)]),
        ("", []),
    ],
)
def test_layers_as_runs(layers, expected):
    found = runs(layers)
    assert [("".join(run.pattern), run.times) for run in found] == expected
    blocks = [(run.blocks(place)[n], layer) for run in found for n in range(run.times) for place, layer in enumerate(run.pattern)]
    assert [index for index, _ in blocks] == list(range(len(layers))) and "".join(layer for _, layer in blocks) == layers


@pytest.mark.parametrize("entry, layers", [(MIXED, 5), (IRREGULAR, 6)])
def test_stacking_goes_back_and_computes_the_same(entry, layers):
    model, twin = model_of(entry, layers), build(entry, SCALE | {"layers": layers}, vocab_size=64)
    stack, params = Stack(model), {name: np.asarray(value) for name, value in model.init(0).items()}
    stacked = stack.stack(params)
    assert {name: value.shape for name, value in stacked.items()} == {name: parameter.shape for name, parameter in stack.table.items()}
    again = stack.unstack(stacked)
    assert list(again) == list(model.table) and all((again[name] == params[name]).all() for name in params)
    tokens = np.random.default_rng(0).integers(0, 64, (2, 19))
    expected, _, scalars = twin.stream(twin.init(0), tokens)
    found, states, same = jax.jit(stack.stream)(stacked, tokens)
    assert np.abs(found - expected.numpy()).max() < 3e-5 * expected.abs().max() and states is None
    assert {name: float(value) for name, value in same.items()} == pytest.approx(
        {name: float(value) for name, value in scalars.items()}, rel=1e-4, abs=1e-6
    )


@pytest.mark.parametrize("entry", [{"layer": "gla"}, MIXED], ids=["gla", "hawk_mesa"])
def test_a_deeper_model_is_no_larger_a_program(entry):
    sizes, names = [], []
    for layers in (4, 16):
        trainer = Trainer(model_of(entry, layers), optimizer=OPTIMIZER, seed=0)
        options = {"model": trainer.model, "optimizer": trainer.optimizer, "layout": trainer.layout, "dtype": trainer.dtype, "parts": 1}
        step = jax.jit(jax_steps.train_step, static_argnames=jax_steps.TRAIN_STATIC)
        given = ((trainer.params, trainer.moments), np.zeros((2, 9), np.int32), None, np.ones((2, 8), np.float32), np.float32(0))
        sizes.append(equations(step.trace(*given, **options, skip_nonfinite=True, rematerialise=False).jaxpr.jaxpr))
        names.append(set(trainer.weights()))
    assert sizes[0] == sizes[1] > 1000
    assert "blocks.15.mixer.out" in names[1] and len(names[1]) > 3 * len(names[0])
