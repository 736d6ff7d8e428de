"""Softmax attention, causal: full, or over a sliding window (MesaNet's transformer and SWA).

Shapes: B batch, T time, S cached keys, D width, H heads, K key size.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

from kernels import segmentation
from models.layers.layer import TRAINING, Array, Layer, State, linear, product
from models.parameters import Parameter, Table, residual


@dataclass(frozen=True)
class Attention(Layer):
    """Multi-head attention with RoPE on all dimensions of queries and keys.

    window: how many tokens, itself included, a token sees; None: all before it. rope_base: RoPE's base.
    """

    window: int | None = None
    rope_base: float = 10_000.0

    name = "attention"

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"attention: window is {self.window}; a token sees at least itself, so give 1 or more, or null for all.")
        if self.key_size % 2:
            raise ValueError(f"attention: key_size is {self.key_size}; RoPE turns pairs of dimensions, so it must be even.")

    def parameters(self) -> Table:
        """Four projections."""
        projections = {name: Parameter((self.width, self.inner), axes=("width", "inner")) for name in ("q", "k", "v")}
        return {**projections, "out": Parameter((self.inner, self.width), residual, axes=("inner", "width"))}

    def forward(
        self, p: dict[str, Array], x_BTD: Array, state: State | None = None, segments: Array | None = None, *, ops: ModuleType,
        record: dict[str, Array] | None = None,
    ) -> tuple[Array, State]:  # fmt: skip
        """See Layer.forward. The state is a cache of keys and values (of the last window - 1 tokens, where there is a window)."""
        B, T, _ = x_BTD.shape
        q, k, v = (linear(x_BTD, p[name], ops=ops).reshape(B, T, self.heads, self.key_size) for name in ("q", "k", "v"))
        cache = self.initial_state(p, B, ops=ops) if state is None else state
        if segments is None:
            last_B = segmentation.unsegmented(cache["last"])
            segment_BT = ops.broadcast_to(last_B[:, None], (B, T))
            position_BT = cache["next"][:, None] + ops.arange(T, x_BTD)
        else:
            last_B, segment_BT = segmentation.last(segments, cache["last"]), segments
            position_BT = cache["next"][:, None] + ops.cumsum(ops.cast(segments >= 0, ops.int32), 1) - 1

        q, k = (ops.rope(x, position_BT, base=self.rope_base) for x in (q, k))
        new = {"k": k, "v": v, "position": position_BT, "segment": segment_BT}
        seen = {name: ops.concatenate((ops.cast(cache[name], new[name].dtype), new[name]), 1) for name in new}
        o_BTHK = self._attend(q, new, seen, ops=ops)
        after = {**self._in_sight(seen, ops=ops), "next": position_BT[:, -1] + 1, "last": last_B}
        return linear(o_BTHK.reshape(B, T, self.inner), p["out"], ops=ops), after

    def _attend(self, q_BTHK: Array, new: State, seen: State, *, ops: ModuleType) -> Array:
        """Softmax over the keys of the query's own segment, at or before it, within the window; padding gives 0."""
        behind_BTS = new["position"][:, :, None] - seen["position"][:, None, :]
        visible_BTS = (behind_BTS >= 0) & (seen["segment"] >= 0)[:, None] & (new["segment"][:, :, None] == seen["segment"][:, None, :])
        if self.window is not None:
            visible_BTS = visible_BTS & (behind_BTS < self.window)
        scores_BHTS = ops.einsum("bthk,bshk->bhts", q_BTHK, seen["k"], accumulate=ops.float32) * self.key_size**-0.5
        weights_BHTS = ops.cast(ops.softmax(ops.where(visible_BTS[:, None], scores_BHTS, -1e30), -1), q_BTHK.dtype)
        o_BTHK = ops.einsum("bhts,bshk->bthk", weights_BHTS, seen["v"])
        return ops.where((new["segment"] >= 0)[:, :, None, None], o_BTHK, 0.0)

    def _in_sight(self, seen: State, *, ops: ModuleType) -> State:
        """What a later token can still see: with a window, the last window - 1 keys, padding moved to the front."""
        if self.window is None or seen["segment"].shape[1] < self.window:
            return seen
        order_BS = ops.argsort(ops.cast(seen["segment"] >= 0, ops.int32))[:, seen["segment"].shape[1] - self.window + 1 :]
        return {name: ops.take_along(x, order_BS.reshape(*order_BS.shape, *[1] * (x.ndim - 2)), 1) for name, x in seen.items()}

    def initial_state(self, p: dict[str, Array], batch: int, *, ops: ModuleType) -> State:
        """An empty cache. It grows by concatenation, up to window - 1 tokens where there is a window."""
        like = p["q"]
        empty = ops.zeros((batch, 0, self.heads, self.key_size), ops.bfloat16, like)
        place = ops.zeros((batch, 0), ops.int32, like)
        return {
            "k": empty, "v": empty, "position": place, "segment": place,
            "next": ops.zeros((batch,), ops.int32, like), "last": ops.full((batch,), -1, ops.int32, like),
        }  # fmt: skip

    def flops(self, length: int, *, steps: float | None = None, training: bool = False) -> float:
        """Projections, and scores and values over the causal mean of keys seen."""
        window = min(self.window or length, length)
        seen = window - window * (window - 1) / 2 / length  # mean over t = 1 .. length of min(t, window)
        return (TRAINING if training else 1) * (product(4, self.width, self.inner) + product(2, self.inner) * seen)

    def state_floats(self, length: int) -> int:
        """A key and a value for each token in sight."""
        return 2 * self.inner * min(self.window or length, length)
