"""RLS Mesa in chunks: an exact solve for every token of every chunk at once, by two Cholesky factors a chunk; the gradient by hand.

With z the decay from a chunk's start and A the whole H there, H_t = z_t (A + sum_{s <= t} (beta_s / z_s) k_s k_s^T) inside the chunk.
With A = R R^T, keys a_s = sqrt(beta_s) R^-1 k_s, diag(z) + a a^T = L L^T and u = L^-1 a (Woodbury's identity, C x K):

    H_t^-1 b_t = R^-T (b' - sum_{s <= t} u_s (u_s . b')) / z_t        b' = R^-1 b_t

which is causal linear attention with u for keys and values, without a decay. beta = 0 makes a row of 0. Tokens behind a place where H
begins again have A = Lambda, and meet only each other. A step of refinement, x += H^-1 (b - H x), takes off what rounding the
difference left. The statistics at the chunks' starts are those of linear attention (`kernels.linear_attention.chunked`), so nothing but
their scan is sequential. The gradient is Mesa's (MesaNet, Appendix D), with weight_t Lambda for Lambda.

Shapes: B batch, T time, H heads, K key size, V value size, X = V + K, C chunk length, M = chunks x B x H.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from kernels import arrays, chunks, segmentation
from kernels.linear_attention import chunked as linear
from kernels.linear_attention.chunked import Chunks, product, transpose
from kernels.mesa.chunked import System, lam_by_chunk, written
from kernels.rg_lru.chunked import differentiable as running_product
from kernels.rls_mesa.reference import GUARD, State, fresh, renewals

Array = Any  # torch.Tensor or jax.Array

CHUNK = 16
"""Longer chunks have smaller z at their ends, which the solution is divided by."""


def rls_mesa(q, k, v, log_decay, beta, lam, *, state=None, segments=None, chunk: int | None = None) -> tuple[Array, State]:
    """See `kernels.rls_mesa.rls_mesa`; `chunk` is the chunk's length."""
    ops = arrays.of(q)
    state = fresh(q, v) if state is None else state
    dtype = state.H_BHKK.dtype
    again, left = renewals(ops.cast(log_decay, dtype))
    log_decay, beta, _, padding, last_B = segmentation.gates(
        ops.where(again, -float("inf"), left), beta, None, segments, state.segment_B, dtype
    )
    left = left if padding is None else ops.where(padding, 0.0, left)
    # What is left of Lambda: begun again at 1, and decayed by its first token.
    begun = ops.where(log_decay == -float("inf"), ops.exp(left), 0.0)
    weight_BTH, weight_BH = running_product(begun, log_decay, state.weight_BH)
    before_BTH = ops.concatenate((state.weight_BH[:, None], weight_BTH[:, :-1]), 1)
    S_BHKX = ops.concatenate((state.G_BHKV, state.H_BHKK), -1)
    numbers = (left, before_BTH)  # the solver's own: what depends on them does so through log_decay and weight
    arguments = (q, k, v, log_decay, beta, ops.cast(lam, dtype), weight_BTH, *map(ops.stop_gradient, numbers), S_BHKX)
    o, S_BHKX = differentiable(*arguments, chunk=chunk or min(q.shape[1], CHUNK))
    o = o if padding is None else ops.where(padding[..., None], 0.0, o)
    V = v.shape[-1]
    return o, State(S_BHKX[..., :V], S_BHKX[..., V:], weight_BH, last_B)


def forward(q, k, v, log_decay, beta, lam, weight, left, before, S_BHKX, *, chunk):
    ops, dtype = arrays.of(q), S_BHKX.dtype
    B, T, H, _ = q.shape
    c, last = linear.cut(ops.cast(k, dtype), written(k, v, beta, dtype), log_decay, None, S_BHKX, chunk)
    solve, system = _solver(c, log_decay, left, beta, lam, weight, before)
    x = solve(chunks.split(ops.cast(q, dtype), chunk))
    o = chunks.join(linear.read(x, system.values), B, T, H)
    return (ops.cast(o, v.dtype), last), (x, c.starts_MKV)


def backward(inputs, residuals, gradients, *, chunk):
    q, k, v, log_decay, beta, lam, weight, left, before, S_BHKX = inputs
    (x, starts), (do, dlast) = residuals, gradients
    ops, dtype = arrays.of(q), S_BHKX.dtype
    B, T, H, K = q.shape
    V = v.shape[-1]
    values = written(k, v, None, dtype)
    c, _ = linear.cut(ops.cast(k, dtype), values * beta[..., None], log_decay, None, S_BHKX, chunk, starts)
    solve, system = _solver(c, log_decay, left, beta, lam, weight, before)

    do_MCV = chunks.split(ops.cast(do, dtype), chunk)
    back = solve(system.write_back(do_MCV))
    _, dk, dvalues, dlog_decay, dS = linear.pull_back(x, c, ops.concatenate((do_MCV, -back), -1), dlast)

    dq, dk, dvalues, dlog_decay, both = (chunks.join(y, B, T, H) for y in (back, dk, dvalues, dlog_decay, x * back))
    dlam, dweight = -ops.sum(both * weight[..., None], (0, 1)), -ops.sum(both * lam, -1)
    dbeta = ops.sum(dvalues * values, -1)
    dvalues = dvalues * beta[..., None]
    dk = dk + dvalues[..., V:]
    dH = dS[..., V:]
    dS = ops.concatenate((dS[..., :V], (dH + ops.swapaxes(dH, -1, -2)) / 2), -1)  # H is symmetric, and so is its gradient
    return (
        ops.cast(dq, q.dtype), ops.cast(dk, k.dtype), ops.cast(dvalues[..., :V], v.dtype), dlog_decay, dbeta, dlam, dweight, None, None, dS
    )  # fmt: skip


differentiable = arrays.custom_gradient(forward, backward, outputs=2)


class Factors(NamedTuple):
    """What Woodbury's identity needs, by chunk, with R = sqrt(Lambda) R': R'^-1, 1 / sqrt(Lambda), u, z, before which tokens H began
    again, and which tokens meet which."""

    inverse_MKK: Array
    scale_M1K: Array
    u_MCK: Array
    z_MC: Array
    again_MC1: Array
    meets_MCC: Array

    def whitened(self, b_MCK: Array) -> Array:
        """R^-1 b."""
        b = b_MCK * self.scale_M1K
        return arrays.of(b).where(self.again_MC1, b, product(b, transpose(self.inverse_MKK)))

    def unwhitened(self, b_MCK: Array) -> Array:
        """R^-T b."""
        return arrays.of(b_MCK).where(self.again_MC1, b_MCK, product(b_MCK, self.inverse_MKK)) * self.scale_M1K

    def solve(self, b_MCK: Array) -> Array:
        """H_t^-1 b_t."""
        b = self.whitened(b_MCK)
        score = arrays.of(b).where(self.meets_MCC, product(b, transpose(self.u_MCK)), 0.0)
        return self.unwhitened(b - product(score, self.u_MCK)) / self.z_MC[..., None]


def _solver(c: Chunks, log_decay, left, beta, lam, weight, before) -> tuple[Callable[[Array], Array], System]:
    """b_MCK -> H_t^-1 b_t, and the system itself."""
    gates = (chunks.split(x, c.k_MCK.shape[1]) for x in (log_decay, left, beta, weight, before))
    log_decay_MC, left_MC, beta_MC, weight_MC, before_MC = gates
    lam_M1K = lam_by_chunk(lam, c, log_decay.shape[0])
    system = System(c, weight_MC[..., None] * lam_M1K)
    factors = _factors(system.keys, log_decay_MC, left_MC, beta_MC, lam_M1K, before_MC[:, 0])

    def solve(b_MCK: Array) -> Array:
        x = factors.solve(b_MCK)
        return x + factors.solve(b_MCK - system.apply(x))

    return solve, system


def _factors(keys: Chunks, log_decay_MC, left_MC, beta_MC, lam_M1K, before_M) -> Factors:
    ops = arrays.of(lam_M1K)
    C, K = keys.k_MCK.shape[1:]
    began_MC = ops.cumsum(ops.cast(log_decay_MC == -float("inf"), ops.int32), 1)  # how often H began again, up to here
    again_MC = began_MC > 0
    meets = (began_MC[:, :, None] == began_MC[:, None, :]) & ops.causal(C, log_decay_MC)

    scale = 1 / ops.sqrt(lam_M1K)
    H = (keys.starts_MKV + transpose(keys.starts_MKV)) / 2 * scale * transpose(scale)
    rounding = GUARD * ops.epsilon(H)
    eye = _diagonal(ops.ones((1, K), H.dtype, H))
    A = H + ops.maximum(before_M, rounding * ops.einsum("mkk->m", H))[:, None, None] * eye
    inverse = ops.solve_lower(ops.cholesky(A), ops.broadcast_to(eye, A.shape))
    factors = Factors(inverse, scale, None, None, again_MC[..., None], meets)

    a = factors.whitened(keys.k_MCK * ops.sqrt(beta_MC)[..., None])
    z = ops.exp(ops.sum(ops.where(meets, left_MC[:, None, :], 0.0), -1))
    z = ops.maximum(z, rounding * ops.max(ops.sum(a * a, -1), -1, keepdims=True))
    overlap = ops.where(meets | ops.swapaxes(meets, 1, 2), product(a, transpose(a)), 0.0)
    return factors._replace(u_MCK=ops.solve_lower(ops.cholesky(overlap + _diagonal(z)), a), z_MC=z)


def _diagonal(x_MK: Array) -> Array:
    ops = arrays.of(x_MK)
    K = x_MK.shape[-1]
    return ops.where(ops.arange(K, x_MK)[:, None] == ops.arange(K, x_MK)[None], x_MK[:, None], 0.0)
