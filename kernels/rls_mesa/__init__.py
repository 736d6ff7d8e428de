"""The original Mesa layer's sequence operation: recursive least squares, whose regulariser is forgotten with the rest.

    G_t = gamma_t G_{t-1} + beta_t k_t v_t^T     H_t = gamma_t H_{t-1} + beta_t k_t k_t^T     gamma_t = exp(log_decay_t)     H_0 = Lambda
    o_t = G_t^T H_t^-1 q_t                                            (von Oswald et al. 2024; MesaNet, arXiv 2506.05233, App. H, Eq. 46-52)

Mesa (`kernels.mesa`) is this with Lambda kept outside the decay; without forgetting they are the same. As H decays as a whole, a chunk's
solves have an exact parallel form (`chunked.py`); a fixed Lambda has none.

What forgetting costs: along directions that no recent key has, H falls with the decay, and H^-1 grows. cond(H) is about 1 / (product of
the gammas over the tokens since a key came), and float32 results are off by that times 1e-7. With gamma near 1, or 1, all is well.
gamma = 0 would leave the singular beta k k^T. It means what it means everywhere here, that the state is dropped: H begins again at
Lambda, as at a document's first token; so does any gamma up to 2^-23, which leaves less of H than rounding does.

Shapes: B batch, T time, H heads, K key size, V value size.
"""

from typing import Any

import kernels
from kernels import arrays, shapes
from kernels.rls_mesa import chunked, reference
from kernels.rls_mesa.reference import State, step

__all__ = ["State", "rls_mesa", "step"]

Array = Any  # torch.Tensor or jax.Array
IMPLEMENTATIONS = {"chunked": chunked.rls_mesa, "reference": reference.rls_mesa}
kernels.offer("rls_mesa", dict.fromkeys(IMPLEMENTATIONS))


def rls_mesa(
    q_BTHK: Array,
    k_BTHK: Array,
    v_BTHV: Array,
    log_decay_BTH: Array,
    beta_BTH: Array,
    lam_HK: Array,
    *,
    state: State | None = None,
    segments: Array | None = None,
    backend: str | None = None,
) -> tuple[Array, State]:
    """o [B, T, H, V] in v's dtype, and the state after the last token.

    q, k, v: bfloat16, float32 or float64. log_decay: at most 0; 0 keeps the state, -inf drops it (H = Lambda). beta: write strength, at
    least 0. lam: the positive diagonal of Lambda. state: what an earlier call returned; None is a fresh one. segments: int32 [B, T]
    document ids; a new id drops the state, whose first token still decays Lambda; -1 is padding (see `kernels.segmentation`).
    Gates and the state are float32 (float64 for float64 q). All but segments is differentiable, the state included.
    Raises ValueError for shapes that disagree and for a backend that does not exist.
    """
    sizes = shapes.check(
        "rls_mesa",
        q=(q_BTHK, "BTHK"),
        k=(k_BTHK, "BTHK"),
        v=(v_BTHV, "BTHV"),
        log_decay=(log_decay_BTH, "BTH"),
        beta=(beta_BTH, "BTH"),
        lam=(lam_HK, "HK"),
        state=(None if state is None else state.G_BHKV, "BHKV"),
        segments=(segments, "BT"),
    )
    ops = arrays.of(q_BTHK)
    run = IMPLEMENTATIONS[kernels.choose("rls_mesa", sizes, ops.dtype_name(q_BTHK), ops.device(q_BTHK), backend)]
    return run(q_BTHK, k_BTHK, v_BTHV, log_decay_BTH, beta_BTH, lam_HK, state=state, segments=segments)
