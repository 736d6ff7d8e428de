"""Mesa in chunks: one loop of conjugate gradients for all tokens, each step one pass of linear attention; the gradient by hand.

With values [beta v | beta k] the statistics [G | H] are one linear attention state S [K, V + K], read by x as [G^T x | H x]
(`kernels.linear_attention.chunked`). The gradient (MesaNet, Appendix D): with e the output's gradient and e* = (H + Lambda)^-1 G e,

    dq = e*     dLambda = -sum q* e*     and, for k, v, beta, decay and state, that of reading S with q* under the output gradient [e | -e*].

Shapes: B batch, T time, H heads, K key size, V value size, C chunk length, M = chunks x B x H.
"""

from collections.abc import Callable
from typing import Any

from kernels import arrays, chunks, segmentation
from kernels.linear_attention import chunked as linear
from kernels.linear_attention.chunked import Chunks, product
from kernels.linear_attention.reference import State as LinearState
from kernels.mesa.reference import State, fresh
from kernels.mesa.solver import conjugate_gradients, jacobi, relative_residual

Array = Any  # torch.Tensor or jax.Array


def mesa(
    q, k, v, log_decay, beta, lam, *,
    sign=None, steps=30, eps=0.0, criterion="b", solve=True, start="jacobi", gradient="implicit", state=None, segments=None,
    chunk: int | None = None, run: Callable | None = None, read: Callable | None = None,
) -> tuple[Array, State, dict[str, Array]]:  # fmt: skip
    """See `kernels.mesa.mesa`; `chunk` is the chunk's length. A device's kernels: `run`, another `differentiable`, and `read`, linear attention's.

    Only the implicit gradient has kernels; the unrolled one is the framework's own, of the form in array operations.
    """
    ops = arrays.of(q)
    state = fresh(q, v) if state is None else state
    if not solve or steps == 0:
        return _read_with_start(q, k, v, log_decay, beta, lam, sign, solve, start, state, segments, chunk, read)
    log_decay, beta, sign, padding, last_B = segmentation.gates(log_decay, beta, sign, segments, state.segment_B, state.H_BHKK.dtype)
    S_BHKX = ops.concatenate((state.G_BHKV, state.H_BHKK), -1)
    options = {"steps": steps, "eps": float(eps), "criterion": criterion, "start": start, "chunk": chunk or chunks.length(*q.shape[1::2])}
    run = (run or differentiable) if gradient == "implicit" else unrolled
    o, S_BHKX, taken, residual = run(q, k, v, log_decay, beta, lam, sign, S_BHKX, **options)
    return _outputs(o, S_BHKX, taken, ops.stop_gradient(residual), padding, last_B)


def _outputs(o, S_BHKX, taken, residual, padding, last_B) -> tuple[Array, State, dict[str, Array]]:
    ops = arrays.of(o)
    if padding is not None:
        o, residual, taken = ops.where(padding[..., None], 0.0, o), ops.where(padding, 0.0, residual), ops.where(padding, 0, taken)
    V = o.shape[-1]
    return o, State(S_BHKX[..., :V], S_BHKX[..., V:], last_B), {"steps": taken, "residual": residual}


def _read_with_start(q, k, v, log_decay, beta, lam, sign, solve, start, state, segments, chunk, run):
    """No solve: the state read with q itself, or with the solver's start. Two linear attentions, with their own exact gradients."""
    ops = arrays.of(q)
    V, dtype = v.shape[-1], state.H_BHKK.dtype
    options = {"sign": sign, "segments": segments}
    # Without a solve in the inputs' own dtype, as any linear attention.
    inputs = q.dtype if not solve and q.dtype == k.dtype == v.dtype else dtype
    solution, keys, values = (ops.cast(x, inputs) for x in (q, k, v))
    if solve and start == "zero":
        solution = solution * 0.0
    elif solve:
        one = ops.ones((*q.shape[:3], 1), dtype, q)
        start_BH1K = LinearState(ops.einsum("bhkk->bhk", state.H_BHKK)[:, :, None], state.segment_B)
        diagonal, _ = linear.linear_attention(one, one, keys * keys, log_decay, beta, state=start_BH1K, **options)
        solution = jacobi(solution, diagonal + ops.cast(lam, dtype))
    statistics = LinearState(ops.concatenate((state.G_BHKV, state.H_BHKK), -1), state.segment_B)
    values = ops.concatenate((values, keys), -1)
    read, statistics = linear.linear_attention(solution, keys, values, log_decay, beta, state=statistics, chunk=chunk, run=run, **options)
    q32, lam, solution, H_q = (ops.cast(x, dtype) for x in (q, lam, solution, read[..., V:]))
    residual = relative_residual(*(ops.stop_gradient(x) for x in (q32, q32 - H_q - lam * solution)))
    padding = None if segments is None else (segments < 0)[..., None]
    taken = ops.zeros(q.shape[:3], ops.int32, q)
    return _outputs(ops.cast(read[..., :V], v.dtype), statistics.S_BHKV, taken, residual, padding, statistics.segment_B)


def unrolled(*arrays: Array | None, **options: Any) -> tuple[Array, ...]:
    """`forward`, differentiated by the framework, step by step."""
    return forward(*arrays, **options, unrolled=True)[0]


def forward(q, k, v, log_decay, beta, lam, sign, S_BHKX, *, steps, eps, criterion, start, chunk, unrolled=False):
    ops = arrays.of(q)
    B, T, H, _ = q.shape
    V, dtype = v.shape[-1], S_BHKX.dtype
    c, last = linear.cut(ops.cast(k, dtype), written(k, v, beta, dtype), log_decay, sign, S_BHKX, chunk)
    system = System(c, lam_by_chunk(lam, c, B))
    q_MCK = chunks.split(ops.cast(q, dtype), chunk)
    x, taken = system.solve(q_MCK, steps=steps, eps=eps, criterion=criterion, start=start, unrolled=unrolled)
    read = linear.read(x, c)
    residual = relative_residual(q_MCK, q_MCK - read[..., V:] - system.lam_M1K * x)
    o, taken, residual = (chunks.join(y, B, T, H) for y in (read[..., :V], taken, residual))
    return (ops.cast(o, v.dtype), last, taken, residual), (x, c.starts_MKV)


def backward(inputs, residuals, gradients, *, steps, eps, criterion, start, chunk):
    q, k, v, log_decay, beta, lam, sign, S_BHKX = inputs
    x, starts = residuals
    do, dlast = gradients[:2]
    ops = arrays.of(q)
    B, T, H, K = q.shape
    V, dtype = v.shape[-1], S_BHKX.dtype
    values = written(k, v, None, dtype)
    c, _ = linear.cut(ops.cast(k, dtype), values * beta[..., None], log_decay, sign, S_BHKX, chunk, starts)
    system = System(c, lam_by_chunk(lam, c, B))

    do_MCV = chunks.split(ops.cast(do, dtype), chunk)
    back, _ = system.solve(system.write_back(do_MCV), steps=steps, eps=eps, criterion=criterion, start=start)
    _, dk, dvalues, dlog_decay, dS = linear.pull_back(x, c, ops.concatenate((do_MCV, -back), -1), dlast)

    dq, dk, dvalues, dlog_decay = (chunks.join(y, B, T, H) for y in (back, dk, dvalues, dlog_decay))
    dbeta = ops.sum(dvalues * values, -1)
    dvalues = dvalues * beta[..., None]
    dk = dk + dvalues[..., V:]
    dlam = -ops.sum((x * back).reshape(-1, B, H, x.shape[1], K), (0, 1, 3))
    dH = dS[..., V:]
    dS = ops.concatenate((dS[..., :V], (dH + ops.swapaxes(dH, -1, -2)) / 2), -1)  # H is symmetric, and so is its gradient
    return (
        ops.cast(dq, q.dtype), ops.cast(dk, k.dtype), ops.cast(dvalues[..., :V], v.dtype), dlog_decay, dbeta, ops.cast(dlam, lam.dtype), None, dS
    )  # fmt: skip


differentiable = arrays.custom_gradient(forward, backward, outputs=4)


class System:
    """H_t + Lambda of every token t, by chunk. Nothing of size K x K per token is ever made."""

    def __init__(self, c: Chunks, lam_M1K: Array) -> None:
        V = c.v_MCV.shape[-1] - c.k_MCK.shape[-1]
        self.whole, self.lam_M1K = c, lam_M1K
        self.values = c._replace(v_MCV=c.v_MCV[..., :V], starts_MKV=c.starts_MKV[..., :V])
        self.keys = c._replace(v_MCV=c.v_MCV[..., V:], starts_MKV=c.starts_MKV[..., V:])

    def apply(self, x_MCK: Array) -> Array:
        return linear.read(x_MCK, self.keys) + self.lam_M1K * x_MCK

    def write_back(self, do_MCV: Array) -> Array:
        """G_t do_t [M, C, K]."""
        c = self.values
        inside = product(product(do_MCV, linear.transpose(c.v_MCV)) * c.weight_MCC, c.k_MCK)
        return inside + product(do_MCV, linear.transpose(c.starts_MKV)) * c.since_start_MC[..., None]

    def diagonal(self) -> Array:
        ops, c = arrays.of(self.lam_M1K), self.keys
        at_start = ops.einsum("mkk->mk", c.starts_MKV)[:, None]
        return product(c.weight_MCC, c.k_MCK * c.v_MCV) + c.since_start_MC[..., None] * at_start + self.lam_M1K

    def solve(self, rhs_MCK: Array, **options: Any) -> tuple[Array, Array]:
        return conjugate_gradients(self.apply, rhs_MCK, self.diagonal(), **options)


def written(k: Array, v: Array, beta: Array | None, dtype: Any) -> Array:
    """[v | k], times beta: what is written at each token."""
    ops = arrays.of(k)
    values = ops.concatenate((ops.cast(v, dtype), ops.cast(k, dtype)), -1)
    return values if beta is None else values * beta[..., None]


def lam_by_chunk(lam_HK: Array, c: Chunks, B: int) -> Array:
    ops = arrays.of(lam_HK)
    H, K = lam_HK.shape
    M = c.k_MCK.shape[0]
    lam = ops.cast(lam_HK, c.k_MCK.dtype)
    return ops.broadcast_to(lam, (M // H, H, K)).reshape(M, 1, K)
