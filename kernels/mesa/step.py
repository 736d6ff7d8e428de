"""Mesa's one-token step: the solve with H itself, in constant memory.

Shapes: B batch, H heads, K key size, V value size.
"""

from typing import Any

from kernels import arrays, launch
from kernels.mesa.reference import State, advance, check_options, fresh, whole
from kernels.mesa.solver import conjugate_gradients, jacobi, relative_residual

Array = Any  # torch.Tensor or jax.Array


def step(
    q_BHK: Array,
    k_BHK: Array,
    v_BHV: Array,
    log_decay_BH: Array,
    beta_BH: Array,
    lam_HK: Array,
    *,
    sign: Array | None = None,
    steps: int = 30,
    eps: float = 0.0,
    criterion: str = "b",
    solve: bool = True,
    start: str = "jacobi",
    gradient: str = "implicit",
    norm_epsilon: float | None = None,
    state: State | None = None,
    segment_B: Array | None = None,
) -> tuple[Array, State, dict[str, Array]]:
    """One token: o [B, H, V], the state after it, and info. Arguments as `mesa`'s without the time axis. For generation: no gradient.

    norm_epsilon: o is wanted over the root of its mean square, each head's, with this beside the mean; None: as it is read.
    Where `mesa` runs as triton, one kernel, safe inside a CUDA graph; inside torch.compile, array operations.
    """
    check_options(steps, eps, criterion, start, gradient)
    given = (q_BHK, k_BHK, v_BHV, log_decay_BH, beta_BH, lam_HK)
    options = {"steps": steps, "eps": eps, "criterion": criterion, "solve": solve, "start": start, "norm_epsilon": norm_epsilon}
    run = launch.step_of("mesa", _in_arrays, given, state)
    return run(*given, sign=sign, state=state, segment_B=segment_B, **options)


def _in_arrays(
    q_BHK, k_BHK, v_BHV, log_decay_BH, beta_BH, lam_HK, *, sign, steps, eps, criterion, solve, start, norm_epsilon, state, segment_B
) -> tuple[Array, State, dict[str, Array]]:
    ops = arrays.of(q_BHK)
    state = fresh(q_BHK, v_BHV) if state is None else whole(state)
    state, padding_B = advance(k_BHK, v_BHV, log_decay_BH, beta_BH, sign=sign, state=state, segment_B=segment_B)
    G, H, _ = (ops.stop_gradient(x) for x in state)
    q, lam = (ops.stop_gradient(ops.cast(x, H.dtype)) for x in (q_BHK, lam_HK))
    apply = lambda x: _product(x, H) + lam * x  # noqa: E731
    diagonal = ops.einsum("bhkk->bhk", H) + lam

    taken = ops.zeros(q.shape[:2], ops.int32, q)
    if not solve:
        solution = q
    elif steps == 0:
        solution = jacobi(q, diagonal) if start == "jacobi" else q * 0.0
    else:
        solution, taken = conjugate_gradients(apply, q, diagonal, steps=steps, eps=eps, criterion=criterion, start=start)
    padding = padding_B[:, None]
    o = _product(solution, G)
    if norm_epsilon is not None:
        o = o * ops.rsqrt(ops.mean(o * o, -1, keepdims=True) + norm_epsilon)
    o = ops.where(padding[..., None], 0.0, o)
    residual = ops.where(padding, 0.0, relative_residual(q, q - apply(solution)))
    return ops.cast(o, v_BHV.dtype), state, {"steps": ops.where(padding, 0, taken), "residual": residual}


def _product(x_BHK: Array, S_BHKV: Array) -> Array:
    return arrays.of(x_BHK).einsum("bhk,bhkv->bhv", x_BHK, S_BHKV, precision="highest")
