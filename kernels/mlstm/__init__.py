"""The mLSTM cell (xLSTM): linear attention with an exponential input gate and a normaliser.

    C_t = f_t C_{t-1} + i_t k_t v_t^T     n_t = f_t n_{t-1} + i_t k_t     o_t = C_t^T q_t / max(|n_t . q_t|, 1)

with i = exp(log_input) and f = exp(log_decay) (Beck et al. 2024, arXiv 2405.04517, Eq. 19-27; MesaNet Table 1). All of it is computed
and kept divided by exp(m_t), m_t = max(log_decay_t + m_{t-1}, log_input_t), which no output depends on. The layer scales k.

Shapes: B batch, T time, H heads, K key size, V value size.
"""

from typing import Any

import kernels
from kernels import arrays, linear_attention, mosaic, shapes
from kernels.mlstm import chunked, reference
from kernels.mlstm.reference import State, step

__all__ = ["State", "mlstm", "step"]

Array = Any  # torch.Tensor or jax.Array


def _triton(*arguments: Any, **options: Any) -> tuple[Array, State]:
    from kernels.mlstm import triton  # here: importing kernels loads no framework; a statement: torch.compile can trace it

    return triton.mlstm(*arguments, **options)


ARRAY_FORMS = {"chunked": chunked.mlstm, "reference": reference.mlstm}
IMPLEMENTATIONS = {**ARRAY_FORMS, "triton": _triton, "pallas": mosaic.implementation("mlstm")}
FUSED = {"triton": linear_attention.refusal, "pallas": mosaic.refusal}
kernels.offer("mlstm", {**dict.fromkeys(ARRAY_FORMS), **FUSED})


def mlstm(
    q_BTHK: Array,
    k_BTHK: Array,
    v_BTHV: Array,
    log_input_BTH: Array,
    log_decay_BTH: Array,
    *,
    state: State | None = None,
    segments: Array | None = None,
    backend: str | None = None,
) -> tuple[Array, State]:
    """o [B, T, H, V] in v's dtype, and the state after the last token.

    q, k, v: bfloat16, float32 or float64. log_input: any number, -inf writes nothing. log_decay: at most 0; 0 keeps the state, -inf drops
    it. state: what an earlier call returned; None is a fresh one. segments: int32 [B, T] document ids; a new id drops the state, -1 is
    padding (see `kernels.segmentation`). Gates and the state are float32 (float64 for float64 q).
    All but segments and the state's m is differentiable.
    Raises ValueError for shapes that disagree and for a backend that does not exist.
    """
    sizes = shapes.check(
        "mlstm",
        q=(q_BTHK, "BTHK"),
        k=(k_BTHK, "BTHK"),
        v=(v_BTHV, "BTHV"),
        log_input=(log_input_BTH, "BTH"),
        log_decay=(log_decay_BTH, "BTH"),
        state=(None if state is None else state.C_BHKV, "BHKV"),
        segments=(segments, "BT"),
    )
    ops = arrays.of(q_BTHK)
    run = IMPLEMENTATIONS[kernels.choose("mlstm", sizes, ops.dtype_name(q_BTHK), ops.device(q_BTHK), backend)]
    return run(q_BTHK, k_BTHK, v_BTHV, log_input_BTH, log_decay_BTH, state=state, segments=segments)
