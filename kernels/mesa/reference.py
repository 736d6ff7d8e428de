"""Mesa token by token, each solve by elimination: the equations themselves. steps > 0 and eps do not change an exact solve.

Shapes: B batch, T time, H heads, K key size, V value size.
"""

from typing import Any, NamedTuple

from kernels import arrays, segmentation

Array = Any  # torch.Tensor or jax.Array


class State(NamedTuple):
    """G [B, H, K, V] and the symmetric H [B, H, K, K], float32 (float64 for float64 inputs), and the id of their segment [B] (-1: none).

    Of H the lower triangle counts: inside `launch.states_in_place` a step may leave the upper one as it was (`whole`).
    """

    G_BHKV: Array
    H_BHKK: Array
    segment_B: Array


def check_options(steps: int, eps: float, criterion: str, start: str, gradient: str = "implicit") -> None:
    """Raises ValueError for an option of `mesa` that means nothing."""
    if steps < 0 or eps < 0:
        raise ValueError(f"mesa: steps is {steps} and eps is {eps}; neither may be negative.")
    if criterion not in ("b", "r0"):
        raise ValueError(f'mesa: criterion is {criterion!r}; it must be "b" or "r0".')
    if start not in ("jacobi", "zero"):
        raise ValueError(f'mesa: start is {start!r}; it must be "jacobi" or "zero".')
    if gradient not in ("implicit", "unrolled"):
        raise ValueError(f'mesa: gradient is {gradient!r}; it must be "implicit" or "unrolled".')


def fresh(q: Array, v: Array) -> State:
    """The state before the first token, for q [B, ..., H, K] and v [B, ..., H, V]."""
    ops = arrays.of(q)
    B, H, K = q.shape[0], *q.shape[-2:]
    G, H_BHKK = (ops.zeros((B, H, K, size), ops.working_dtype(q), q) for size in (v.shape[-1], K))
    return State(G, H_BHKK, ops.full((B,), -1, ops.int32, q))


def whole(state: State) -> State:
    """The state with H's upper triangle as the lower one has it."""
    H = state.H_BHKK
    ops = arrays.of(H)
    return state._replace(H_BHKK=ops.where(ops.causal(H.shape[-1], H), H, ops.swapaxes(H, -1, -2)))


def advance(k_BHK, v_BHV, log_decay_BH, beta_BH, *, sign: Array | None, state: State, segment_B: Array | None) -> tuple[State, Array]:
    """The state after one token, and whether that token is padding [B]."""
    ops = arrays.of(k_BHK)
    k, v, log_decay, beta = (ops.cast(x, state.H_BHKK.dtype) for x in (k_BHK, v_BHV, log_decay_BH, beta_BH))
    gamma = ops.exp(log_decay) if sign is None else ops.exp(log_decay) * ops.cast(sign, k.dtype)
    reset_B, padding_B, segment_B = segmentation.one(segment_B, state.segment_B)
    each = lambda x_B: x_B[:, None, None, None]  # noqa: E731

    def next_of(S, written):
        kept = ops.where(each(reset_B), 0.0, gamma[..., None, None] * S)
        return ops.where(each(padding_B), S, kept + (beta[..., None] * k)[..., :, None] * written[..., None, :])

    return State(next_of(state.G_BHKV, v), next_of(state.H_BHKK, k), segment_B), padding_B


def mesa(
    q, k, v, log_decay, beta, lam, *, sign=None, steps=30, eps=0.0, criterion="b", solve=True, start="jacobi", gradient="implicit",
    state=None, segments=None,
) -> tuple[Array, State, dict[str, Array]]:  # fmt: skip
    """See `kernels.mesa.mesa`. info.steps is 0: there are none."""
    ops = arrays.of(q)
    given = {"sign": sign, "segment_B": segments}
    given = {name: x for name, x in given.items() if x is not None}

    def token(state, xs):
        q, k, v, log_decay, beta, *rest = xs
        given_now = {"sign": None, "segment_B": None} | dict(zip(given, rest, strict=True))
        state, padding_B = advance(k, v, log_decay, beta, state=state, **given_now)
        q = ops.cast(q, state.H_BHKK.dtype)
        matrix = (state.H_BHKK + ops.swapaxes(state.H_BHKK, -1, -2)) / 2 + ops.cast(lam, q.dtype)[:, :, None] * eye
        if not solve:
            solution = q
        elif steps == 0:
            solution = q / ops.sum(matrix * eye, -1) if start == "jacobi" else q * 0.0
        else:
            solution = ops.solve(matrix, q)
        o = ops.einsum("bhk,bhkv->bhv", solution, state.G_BHKV, precision="highest")
        left = ops.stop_gradient(q - ops.einsum("bhij,bhj->bhi", matrix, solution, precision="highest"))
        norm = ops.sqrt(ops.sum(ops.stop_gradient(q * q), -1))
        residual = ops.where(norm > 0, ops.sqrt(ops.sum(left * left, -1)) / ops.where(norm > 0, norm, 1.0), 0.0)
        padding = padding_B[:, None]
        outputs = ops.where(padding[..., None], 0.0, o), ops.where(padding, 0.0, residual)
        return state, (ops.cast(outputs[0], v.dtype), ops.cast(outputs[1], ops.float32))

    K = q.shape[-1]
    eye = ops.cast(ops.arange(K, q)[:, None] == ops.arange(K, q)[None], ops.working_dtype(q))
    by_time = tuple(ops.moveaxis(x, 1, 0) for x in (q, k, v, log_decay, beta, *given.values()))
    state, (o, residual) = ops.scan(token, fresh(q, v) if state is None else state, by_time)
    info = {"steps": ops.zeros(log_decay.shape, ops.int32, q), "residual": ops.moveaxis(residual, 0, 1)}
    return ops.moveaxis(o, 0, 1), state, info
