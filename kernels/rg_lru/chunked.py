"""The recurrence as an associative scan, and its gradient as another one, backwards:

    dx_t = dh_t + a_{t+1} dx_{t+1}        dlog_a_t = dx_t a_t h_{t-1}

Shapes: B batch, T time, D channels.
"""

from typing import Any

from kernels import arrays, segmentation
from kernels.rg_lru.reference import State, fresh

Array = Any  # torch.Tensor or jax.Array


def rg_lru(x, log_a, *, state=None, segments=None, run=None) -> tuple[Array, State]:
    """See `kernels.rg_lru.rg_lru`. run: `differentiable`, or another form of it."""
    ops = arrays.of(x)
    state = fresh(x) if state is None else state
    log_a, _, _, padding, last_B = segmentation.gates(log_a, None, None, segments, state.segment_B, state.h_BD.dtype)
    x = x if padding is None else ops.where(padding, 0.0, x)
    out, h = (run or differentiable)(x, log_a, state.h_BD)
    return out if padding is None else ops.where(padding, 0.0, out), State(h, last_B)


def forward(x, log_a, h_BD):
    ops = arrays.of(x)
    h = _scan(ops.exp(log_a), ops.cast(x, h_BD.dtype), h_BD)
    return (ops.cast(h, x.dtype), h[:, -1] * 1.0), (h * 1.0,)  # an operation returns no array twice


def backward(inputs, residuals, gradients):
    x, log_a, h_BD = inputs
    (h,), (dout, dlast) = residuals, gradients
    ops = arrays.of(x)
    a = ops.exp(log_a)
    dh = ops.cast(dout, h.dtype)
    backwards = lambda y: ops.flip(y, 1)  # noqa: E731
    a_next = ops.pad(a[:, 1:], 1, 0, 1, 1.0)  # after the last token stands the state's own gradient
    dx = backwards(_scan(backwards(a_next), backwards(dh), dlast))
    da_times_a = dx * a
    before = ops.concatenate((h_BD[:, None], h[:, :-1]), 1)
    return ops.cast(dx, x.dtype), da_times_a * before, da_times_a[:, 0] * 1.0


differentiable = arrays.custom_gradient(forward, backward, outputs=2)


def _scan(a_BTD: Array, x_BTD: Array, start_BD: Array) -> Array:
    """h_t = a_t h_{t-1} + x_t from h = start."""
    ops = arrays.of(a_BTD)
    x = ops.concatenate((x_BTD[:, :1] + a_BTD[:, :1] * start_BD[:, None], x_BTD[:, 1:]), 1)
    return ops.associative_scan(lambda earlier, later: (earlier[0] * later[0], earlier[1] * later[0] + later[1]), (a_BTD, x), 1)[1]
