"""The Mesa layer's sequence operation: at every token, the best linear map from the past keys to the past values, read with q.

    G_t = gamma_t G_{t-1} + beta_t k_t v_t^T     H_t = gamma_t H_{t-1} + beta_t k_t k_t^T     gamma_t = sign_t exp(log_decay_t)
    q*_t = (H_t + Lambda)^-1 q_t                 o_t = G_t^T q*_t                             (MesaNet, arXiv 2506.05233, Eq. 7 and 8)

The solve is by conjugate gradients (its Algorithm 1), token by token; the gradient is by implicit differentiation (its Appendix D),
which takes q* as solved.

Shapes: B batch, T time, H heads, K key size, V value size.
"""

from typing import Any

import kernels
from kernels import arrays, launch, mosaic, shapes
from kernels.mesa import chunked, reference
from kernels.mesa.reference import State
from kernels.mesa.step import step

__all__ = ["State", "mesa", "step"]

Array = Any  # torch.Tensor or jax.Array


def _triton(*arguments: Any, **options: Any) -> tuple[Array, State, dict[str, Array]]:
    from kernels.mesa import triton  # here: importing kernels loads no framework; a statement: torch.compile can trace it

    return triton.mesa(*arguments, **options)


ARRAY_FORMS = {"chunked": chunked.mesa, "reference": reference.mesa}
IMPLEMENTATIONS = {**ARRAY_FORMS, "triton": _triton, "pallas": mosaic.implementation("mesa")}
refusal = launch.up_to(128)


kernels.offer("mesa", {**dict.fromkeys(ARRAY_FORMS), "triton": refusal, "pallas": mosaic.refusal})


def mesa(
    q_BTHK: Array,
    k_BTHK: Array,
    v_BTHV: Array,
    log_decay_BTH: Array,
    beta_BTH: Array,
    lam_HK: Array,
    *,
    sign: Array | None = None,
    steps: int = 30,
    eps: float = 0.0,
    criterion: str = "b",
    solve: bool = True,
    start: str = "jacobi",
    gradient: str = "implicit",
    state: State | None = None,
    segments: Array | None = None,
    backend: str | None = None,
) -> tuple[Array, State, dict[str, Array]]:
    """o [B, T, H, V] in v's dtype, the state after the last token, and info.

    q, k, v: bfloat16, float32 or float64. log_decay: at most 0; 0 keeps the state, -inf drops it. beta: write strength, at least 0.
    lam: the positive diagonal of Lambda. sign: +1 or -1, the decay's sign, None for +1 (with -1, lam must keep H + Lambda positive).
    steps: the most conjugate gradient steps of a token, forward and backward. A token stops by itself once its residual is at most
    eps ||q|| and eps times its first residual (criterion "b"), or eps times its first residual alone ("r0", the paper's); at any eps once
    it is at most 2^-23 ||q|| (2^-52 in float64).
    start: "jacobi" (q / diag(H + Lambda)) or "zero". steps=0 reads with the start itself; solve=False reads with q (gated linear
    attention). Both have their exact gradients.
    gradient: "implicit" takes q* as solved, at the cost of one more solve. "unrolled" differentiates the `steps` iterations that were taken
    (those of frozen tokens count for nothing), keeps all of them in memory, and is not opaque to torch.compile. Which of the two a solver
    stopped early should train with, the paper leaves open (its Appendix J).
    state: what an earlier call returned; None is a fresh one. segments: int32 [B, T] document ids; a new id drops the state, -1 is
    padding (see `kernels.segmentation`).
    info: steps int32 [B, T, H], those taken; residual float32 [B, T, H], the true ||q - (H + Lambda) q*|| / ||q||, 0 for q = 0. No gradient.
    Raises ValueError for shapes that disagree, an option that does not exist, a negative steps or eps.
    """
    sizes = shapes.check(
        "mesa",
        q=(q_BTHK, "BTHK"),
        k=(k_BTHK, "BTHK"),
        v=(v_BTHV, "BTHV"),
        log_decay=(log_decay_BTH, "BTH"),
        beta=(beta_BTH, "BTH"),
        lam=(lam_HK, "HK"),
        sign=(sign, "BTH"),
        state=(None if state is None else state.G_BHKV, "BHKV"),
        segments=(segments, "BT"),
    )
    reference.check_options(steps, eps, criterion, start, gradient)
    ops = arrays.of(q_BTHK)
    name = kernels.choose("mesa", sizes, ops.dtype_name(q_BTHK), ops.device(q_BTHK), backend)
    if gradient == "unrolled":
        name = kernels.decline("mesa", name, "chunked", 'gradient "unrolled" keeps every step')
    options = {"steps": steps, "eps": eps, "criterion": criterion, "solve": solve, "start": start, "gradient": gradient}
    given = (q_BTHK, k_BTHK, v_BTHV, log_decay_BTH, beta_BTH, lam_HK)
    state = None if state is None else reference.whole(state)
    return IMPLEMENTATIONS[name](*given, sign=sign, state=state, segments=segments, **options)
