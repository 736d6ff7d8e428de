"""The table of sequence operations. An operation listed here gets every contract test of test_contracts.py.

Shapes: B batch, T time, H heads, K key size, V value size.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

import kernels
from kernels import arrays, launch
from kernels.attention import State as AttentionState
from kernels.attention import attention
from kernels.attention import step as attention_step
from kernels.convolution import State as ConvolutionState
from kernels.convolution import short_convolution
from kernels.convolution import step as convolution_step
from kernels.delta_rule import delta_rule
from kernels.delta_rule import step as delta_rule_step
from kernels.linear_attention import State as LinearState
from kernels.linear_attention import linear_attention
from kernels.linear_attention import step as linear_attention_step
from kernels.mesa import State as MesaState
from kernels.mesa import mesa
from kernels.mesa import step as mesa_step
from kernels.mlstm import State as MLSTMState
from kernels.mlstm import mlstm
from kernels.mlstm import step as mlstm_step
from kernels.palimpsa import State as PalimpsaState
from kernels.palimpsa import palimpsa
from kernels.palimpsa import step as palimpsa_step
from kernels.rg_lru import State as RGLRUState
from kernels.rg_lru import rg_lru
from kernels.rg_lru import step as rg_lru_step
from kernels.rls_mesa import State as RLSMesaState
from kernels.rls_mesa import rls_mesa
from kernels.rls_mesa import step as rls_mesa_step

# Largest |x - reference| / largest |reference|, for each output and each gradient, against the float64 reference on the same inputs.
# "same": two orders of the same float32 computation. bfloat16: bfloat16 q, k, v and outputs, float32 inside.
TOLERANCES = {"float64": 1e-11, "float32": 4e-6, "bfloat16": 1e-2, "same": 4e-6}

Sizes = tuple[int, int, int, int, int]  # B, T, H, K, V


@dataclass(frozen=True)
class Operation:
    """How to call an operation, and inputs on which it is well conditioned.

    inputs: (random, sizes) -> float64 numpy arrays by argument name, in the order of the signature; gates [B, T, H] have "gate" names.
    state: (random, sizes) -> the float64 arrays of a state, without its segment id. fixed: inputs without a time axis.
    """

    name: str
    call: Callable
    step: Callable
    inputs: Callable[[np.random.Generator, Sizes], dict[str, np.ndarray]]
    state_type: Any
    state: Callable[[np.random.Generator, Sizes], tuple[np.ndarray, ...]]
    fixed: tuple[str, ...] = ()
    without_gradient: tuple[str, ...] = ()
    float32: tuple[str, ...] = (
        "log_decay",
        "beta",
        "lam",
        "prior",
        "sign",
        "log_input",
        "log_a",
        "weight",
        "bias",
    )  # float32 at least, whatever q's dtype
    backend: str = "chunked"
    options: dict[str, dict[str, Any]] = field(default_factory=lambda: {"": {}})
    comparable: Callable[[Any], tuple] = lambda state: state[:-1]  # the arrays of a state that hold numbers, in a form that compares


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def gates(random: np.random.Generator, B: int, T: int, H: int) -> dict[str, np.ndarray]:
    """Decays from fast to slow, with exact 0 and 1 among them; write strengths in [0, 1], both ends included."""
    log_decay = -random.exponential(0.3, (B, T, H)) * np.linspace(0.05, 2, H)
    log_decay[random.random((B, T, H)) < 0.05] = -np.inf
    log_decay[random.random((B, T, H)) < 0.1] = 0
    beta = random.random((B, T, H))
    beta[random.random((B, T, H)) < 0.1] = 0
    beta[random.random((B, T, H)) < 0.1] = 1
    return {"log_decay": log_decay, "beta": beta}


def linear_attention_inputs(random, sizes):
    B, T, H, K, V = sizes
    q, k = (random.standard_normal((B, T, H, K)) for _ in range(2))
    return {"q": q, "k": k, "v": random.standard_normal((B, T, H, V)), **gates(random, B, T, H)}


def mesa_inputs(random, sizes):
    B, T, H, K, V = sizes
    q, k = (unit(random.standard_normal((B, T, H, K))) for _ in range(2))
    lam = random.uniform(0.5, 1.5, (H, K))
    return {"q": q, "k": k, "v": random.standard_normal((B, T, H, V)), **gates(random, B, T, H), "lam": lam}


def rls_mesa_inputs(random, sizes):
    """Slow decays and exact 0: H's condition grows with what has been forgotten."""
    given = mesa_inputs(random, sizes)
    return given | {"log_decay": np.where(np.isinf(given["log_decay"]), given["log_decay"], 0.03 * given["log_decay"])}


def rls_mesa_state(random, sizes):
    B, _, H, *_ = sizes
    return *mesa_state(random, sizes), random.uniform(0.5, 1, (B, H))


def palimpsa_inputs(random, sizes):
    """A precision for each value, some of them 0; priors from weak to strong."""
    B, T, H, K, V = sizes
    q, k, v = (random.standard_normal((B, T, H, size)) for size in (K, K, V))
    beta = random.random((B, T, H, V)) * (random.random((B, T, H, V)) < 0.9)
    log_decay = gates(random, B, T, H)["log_decay"]
    return {"q": q, "k": k, "v": v, "beta": beta, "log_decay": log_decay, "prior": random.uniform(0.5, 2, H)}


def palimpsa_state(random, sizes):
    B, _, H, K, V = sizes
    return random.standard_normal((B, H, K, V)), random.exponential(1.0, (B, H, K, V))


def delta_rule_inputs(random, sizes):
    B, T, H, K, V = sizes
    q, k = (unit(random.standard_normal((B, T, H, K))) for _ in range(2))
    gate = gates(random, B, T, H)
    return {"q": q, "k": k, "v": random.standard_normal((B, T, H, V)), "beta": gate["beta"], "log_decay": gate["log_decay"]}


def without_decay(inputs):
    return lambda random, sizes: {n: x for n, x in inputs(random, sizes).items() if n != "log_decay"}


def mlstm_inputs(random, sizes):
    """Input gates over eight orders of magnitude; keys and queries that meet, as a normaliser n . q that cancels amplifies rounding."""
    B, T, H, K, V = sizes
    q, k = (np.abs(random.standard_normal((B, T, H, K))) / K**0.5 for _ in range(2))
    log_input = 3 * random.standard_normal((B, T, H))
    return {
        "q": q,
        "k": k,
        "v": random.standard_normal((B, T, H, V)),
        "log_input": log_input,
        "log_decay": gates(random, B, T, H)["log_decay"],
    }


def mlstm_state(random, sizes):
    B, _, H, K, V = sizes
    return random.standard_normal((B, H, K, V)), random.standard_normal((B, H, K)), random.standard_normal((B, H))


def rg_lru_inputs(random, sizes):
    B, T, H, K, _ = sizes
    return {"x": random.standard_normal((B, T, H * K)), "log_a": gates(random, B, T, H * K)["log_decay"]}


def rg_lru_state(random, sizes):
    B, _, H, K, _ = sizes
    return (random.standard_normal((B, H * K)),)


def convolution_inputs(random, sizes):
    B, T, H, K, _ = sizes
    return {"x": random.standard_normal((B, T, H * K)), "weight": random.standard_normal((4, H * K)), "bias": random.standard_normal(H * K)}


def convolution_state(random, sizes):
    B, _, H, K, _ = sizes
    return (random.standard_normal((B, 3, H * K)),)


def attention_inputs(random, sizes):
    B, T, H, K, V = sizes
    q, k = (random.standard_normal((B, T, H, K)) for _ in range(2))
    return {"q": 3 * q, "k": k, "v": random.standard_normal((B, T, H, V))}


def attention_state(random, sizes, slots=7):
    B, _, H, K, V = sizes
    return random.standard_normal((B, slots, H, K)), random.standard_normal((B, slots, H, V))


def attention_state_of(k, v, segment_B):
    """A cache of 7 tokens; a ring of 5 slots with the last 5 of them where k has 5 slots."""
    ops, (B, slots) = arrays.of(k), k.shape[:2]
    position = ops.array({7: [0, 1, 2, 3, 4, 5, 6], 5: [5, 6, 2, 3, 4]}[slots], ops.int32, k)
    return AttentionState(k, v, ops.broadcast_to(position[None], (B, slots)), ops.full((B,), 7, ops.int32, k), segment_B)


def attention_in_sight(state):
    """Keys and values that can still be seen, in 80 slots: a cache's own number of slots is its own affair."""
    ops = arrays.of(state.k_BSHK)
    filled = (state.position_BS >= 0)[..., None, None]
    return tuple(ops.pad(ops.where(filled, x, 0.0), 1, 0, 80 - x.shape[1]) for x in state[:2])


def with_signs(inputs):
    def signed(random, sizes):
        given = inputs(random, sizes)
        given["sign"] = np.where(random.random(given["log_decay"].shape) < 0.3, -1.0, 1.0)
        return given

    return signed


def large_lam(inputs):
    """Lambda so large that H + Lambda stays positive with a negative decay."""

    def stable(random, sizes):
        given = inputs(random, sizes)
        given["lam"] = given["lam"] + 20
        return given

    return stable


def matrix_state(random, sizes):
    B, _, H, K, V = sizes
    return (random.standard_normal((B, H, K, V)),)


def mesa_state(random, sizes):
    B, _, H, K, V = sizes
    root = random.standard_normal((B, H, K, K)) / K**0.5
    return random.standard_normal((B, H, K, V)), root @ root.swapaxes(-1, -2)


LINEAR = Operation(
    "linear_attention",
    linear_attention,
    linear_attention_step,
    linear_attention_inputs,
    LinearState,
    matrix_state,
    options={"": {}, "scale": {"scale": 0.25}},
)
MESA = Operation(
    "mesa",
    mesa,
    mesa_step,
    mesa_inputs,
    MesaState,
    mesa_state,
    fixed=("lam",),
    options={"": {"steps": 60}, "start": {"steps": 0}, "gla": {"solve": False}},
)
ATTENTION = Operation(
    "attention",
    attention,
    attention_step,
    attention_inputs,
    attention_state_of,
    attention_state,
    backend="library",
    comparable=attention_in_sight,
)
DELTA_RULE = Operation("delta_rule", delta_rule, delta_rule_step, delta_rule_inputs, LinearState, matrix_state)
CONVOLUTION = Operation(
    "convolution",
    short_convolution,
    convolution_step,
    convolution_inputs,
    ConvolutionState,
    convolution_state,
    fixed=("weight", "bias"),
    options={"": {}, "silu": {"silu": True}, "unit": {"silu": True, "heads": 2}},
)
OPERATIONS = {
    "attention": Operation(**{**vars(ATTENTION), "options": {"": {}, "scale": {"scale": 0.1}}}),
    "sliding window": Operation(**{**vars(ATTENTION), "state": partial(attention_state, slots=5), "options": {"": {"window": 5}}}),
    "convolution": CONVOLUTION,
    "delta_rule": Operation(**{**vars(DELTA_RULE), "inputs": without_decay(delta_rule_inputs)}),
    "delta_rule with decay": Operation(**{**vars(DELTA_RULE), "options": {"": {}, "scale": {"scale": 0.25}}}),
    "linear_attention": LINEAR,
    "linear_attention signed": Operation(**{**vars(LINEAR), "inputs": with_signs(linear_attention_inputs), "without_gradient": ("sign",), "options": {"": {}}}),
    "mesa": MESA,
    "mesa signed": Operation(**{**vars(MESA), "inputs": large_lam(with_signs(mesa_inputs)), "without_gradient": ("sign",), "options": {"": {"steps": 60}}}),
    "mlstm": Operation("mlstm", mlstm, mlstm_step, mlstm_inputs, MLSTMState, mlstm_state),
    "palimpsa": Operation("palimpsa", palimpsa, palimpsa_step, palimpsa_inputs, PalimpsaState, palimpsa_state, fixed=("prior",), options={"": {}, "scale": {"scale": 0.25}}),
    "rg_lru": Operation("rg_lru", rg_lru, rg_lru_step, rg_lru_inputs, RGLRUState, rg_lru_state),
    "rls_mesa": Operation("rls_mesa", rls_mesa, rls_mesa_step, rls_mesa_inputs, RLSMesaState, rls_mesa_state, fixed=("lam",)),
}  # fmt: skip

BACKEND = os.environ.get("STRATA_KERNELS")
DTYPES = ["float64", "float32", "bfloat16"]
if BACKEND in ("triton", "pallas"):  # the same contracts for a device's kernels: on a card, or in Triton's or Pallas' interpreter
    OPERATIONS = {
        n: replace(operation, backend=BACKEND) for n, operation in OPERATIONS.items() if BACKEND in kernels.backends(operation.name)
    }
    DTYPES = ["float32"] if launch.INTERPRETED and BACKEND == "triton" else ["float32", "bfloat16"]
    TOLERANCES = TOLERANCES | {"float32": 2e-5, "same": 2e-5}
