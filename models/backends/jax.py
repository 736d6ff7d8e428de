"""JAX: trains a model by AdamW over the devices of one process or of several (jax_parallel.py), scores sequences and continues them; torch's interface and names.

Weights are float32; activations are float32 or bfloat16. Shapes: B batch, T time, P prompt, V vocabulary.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from models import checkpoint
from models.backbone import Model
from models.backends.jax_mesh import Layout
from models.backends.jax_stack import Params, Stack
from models.backends.jax_steps import SCORE_STATIC, TRAIN_STATIC, adamw, compiled, decode, prefill, scores, shardings, train_step
from models.parameters import initialise

PRECISIONS = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float64": jnp.float64}
"""float64: weights too, for references; JAX_ENABLE_X64 must be set."""
PLATFORMS = {"gpu": "cuda"}
GROUPS = ("parameters", "mean", "square")
"""What a training's state has of each parameter."""


def to_arrays(values: Mapping[str, np.ndarray], device: str | None = None) -> Params:
    """numpy arrays as JAX arrays on the first device of a kind (None: the default)."""
    return {name: jax.device_put(jnp.array(value), device and jax.devices(device)[0]) for name, value in values.items()}


def to_numpy(value: jax.Array) -> np.ndarray:
    """A copy on the host."""
    return np.array(value)


aside = contextlib.nullcontext
"""See models.backends.torch: JAX computes gradients only where it is asked to, and what is deterministic is compiled so."""


def find_device(asked: str, *, precision: str, threads: int | None = None) -> str:
    """ "cpu", "cuda" or "tpu"; `asked` may be "auto", which takes the best there is. ValueError where what was asked for is not here.

    threads: of a CPU; they are set when a process first uses JAX, so here.
    """
    if threads:
        os.environ.setdefault("NPROC", str(threads))  # what XLA's CPU client makes its threads by
    if asked == "cpu":
        jax.config.update("jax_platforms", "cpu")  # else the kernels, and the memory, of an accelerator that is here would be taken
    found = PLATFORMS.get(jax.default_backend(), jax.default_backend())
    if asked not in ("auto", found):
        raise ValueError(f"Device {asked} was asked for and JAX finds {found} here: use --device {found}, or run where there is one.")
    return found


def device_name(device: str) -> str:
    """What provenance calls a device: an accelerator by its model, with how many there are."""
    found = jax.devices(device)
    return device if device == "cpu" and len(found) == 1 else f"{len(found)} x {found[0].device_kind}"


def start_profile(folder: Path) -> Callable[[], None]:
    """Begin a profile of what runs from here on, for TensorBoard or XProf; what is returned ends it."""
    jax.profiler.start_trace(str(folder))
    return jax.profiler.stop_trace


class Trainer:
    """Parameters and AdamW's moments of one model; see models.backends.torch.Trainer, whose arguments and methods these are.

    device: "cpu", "cuda" or "tpu". devices: how many of them (None: all that this process sees). fsdp: over how many of them each
    parameter is split (a divisor of devices); more than 1 implies rematerialise. rematerialise: compute what is inside a block again in
    the backward pass instead of keeping it. compile: always. threads: `find_device` has set them. deterministic: a CPU and
    a TPU are anyway.
    Raises ValueError for a model without a forward pass, an unknown precision, and devices that are not here.
    """

    def __init__(
        self, model: Model, *, optimizer: Mapping[str, float] | None, seed: int, device: str = "cpu", precision: str = "float32",
        deterministic: bool = False, threads: int | None = None, compile: bool = True, devices: int | None = None, fsdp: int = 1,
        rematerialise: bool = False,
    ) -> None:  # fmt: skip
        if model.trainable:
            raise ValueError(f"This model cannot be trained: {model.trainable}. Choose other layers, or only plan it.")
        if precision not in PRECISIONS:
            raise ValueError(f"precision is {precision!r}; it is one of {', '.join(PRECISIONS)}.")
        if precision == "float64" and not jax.config.jax_enable_x64:
            raise ValueError("precision is 'float64', which JAX makes float32 unless the environment has JAX_ENABLE_X64=1; set it.")
        here = jax.devices(device)
        if (devices or 1) > len(here):
            raise ValueError(f"{devices} devices were asked for and JAX finds {len(here)} here: ask for fewer, or run where they are.")
        self.layout = Layout.of(here[:devices], fsdp=fsdp)
        self.model, self.stack, self.dtype = model, Stack(model), PRECISIONS[precision]
        self.deterministic, self.rematerialise = deterministic and device == "cuda", rematerialise or fsdp > 1
        self._weight_dtype = np.float64 if precision == "float64" else np.float32
        self.params = self._put(initialise(model.table, seed=seed, blocks=len(model.layers)))
        if optimizer is not None:
            self.optimizer = tuple(sorted(optimizer.items()))
            transform = adamw(self.stack.table, optimizer)
            _, of_state = shardings(transform, self.stack.table, self.layout, self.params)
            self.moments = jax.jit(transform.init, out_shardings=of_state)(self.params)

    ahead = 0
    """How many steps may wait on the devices while the host goes on."""

    @property
    def devices(self) -> int:
        """How many devices a batch is split over."""
        return self.layout.size

    @property
    def lost(self) -> bool:
        """Whether a step that ran out of memory took the parameters with it; load a state to go on."""
        return any(value.is_deleted() for value in jax.tree.leaves((self.params, self.moments)))

    def _put(self, values: Mapping[str, np.ndarray]) -> Params:
        stacked = self.stack.stack({name: np.asarray(value, self._weight_dtype) for name, value in values.items()})
        return self.layout.put(stacked, self.stack.table)

    def submit(self, tokens_BT1: np.ndarray, *, halt: bool = False, **given: Any) -> Callable[[], dict[str, float]]:
        """`step`, as the torch Trainer's submit: it is waited for, so that there never is a step after one that is not finite."""
        facts = self.step(tokens_BT1, **given)
        return lambda: facts

    def step(
        self, tokens_BT1: np.ndarray, *, learning_rate: float, segments: np.ndarray | None = None, targets_mask: np.ndarray | None = None,
        micro_batch: int | None = None, skip_nonfinite: bool = False, rematerialise: bool = False,
        share: tuple[int, int, float] | None = None,
    ) -> dict[str, float]:  # fmt: skip
        """See the torch Trainer's. Raises ValueError where devices do not divide the rows, or micro_batch a device's share of them.

        share: where these rows are a part of the batch: which is its first, of how many, with how many targets.
        """
        self.rematerialise |= rematerialise
        length = tokens_BT1.shape[1] - 1
        mask = np.ones((len(tokens_BT1), length)) if targets_mask is None else targets_mask
        first, rows, targets = share or (0, len(tokens_BT1), np.asarray(mask, self._weight_dtype).sum())
        if rows % self.devices:
            raise ValueError(f"{self.devices} devices do not divide a batch of {rows} rows; give a multiple of them, or use fewer devices.")
        each = rows // self.devices
        micro_batch = micro_batch or each
        if each % micro_batch:
            raise ValueError(f"micro_batch {micro_batch} does not divide the {each} rows of a device; give a divisor of them.")
        weight = np.asarray(mask, self._weight_dtype) / self._weight_dtype(max(targets, 1))
        given = (np.asarray(tokens_BT1, np.int32), None if segments is None else np.asarray(segments, np.int32), weight)
        if not self.layout.here:
            given = tuple(None if value is None else self.layout.put_rows(value, first, rows) for value in given)
        step = compiled(train_step, TRAIN_STATIC, "state", self.deterministic)
        try:
            after, facts = step(
                (self.params, self.moments), *given, self._weight_dtype(learning_rate), model=self.model, optimizer=self.optimizer,
                layout=self.layout, dtype=self.dtype, parts=each // micro_batch, skip_nonfinite=skip_nonfinite, rematerialise=self.rematerialise,
            )  # fmt: skip
            facts = jax.device_get(facts)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise MemoryError(str(error).splitlines()[0]) from error
        self.params, self.moments = after
        return {name: float(value) for name, value in facts.items()}

    def nll(
        self, tokens_BT1: np.ndarray, *, segments: np.ndarray | None = None, setting: Mapping[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, float]]:
        """See the torch Trainer's."""
        segments = None if segments is None else np.asarray(segments, np.int32)
        tokens, model = np.asarray(tokens_BT1, np.int32), self.model.with_setting(setting)
        score = compiled(scores, SCORE_STATIC, None, self.deterministic)
        nll_BT, record = score(self.params, tokens, segments, model=model, layout=self.layout, dtype=self.dtype)
        return np.array(nll_BT, np.float32), {name: float(value) for name, value in jax.device_get(record).items()}

    def weights(self) -> dict[str, np.ndarray]:
        """The parameters, float32, by the names of the model's table."""
        return {name: np.asarray(value, np.float32) for name, value in self._host(self.params).items()}

    def _host(self, stacked: Params) -> dict[str, np.ndarray]:
        return self.stack.unstack({name: self.layout.whole(value) for name, value in stacked.items()})

    @property
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the arrays of `weights`."""
        return {name: tuple(parameter.shape) for name, parameter in self.model.table.items()}

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the arrays of `state_dict`."""
        return {f"{group}/{name}": shape for group in GROUPS for name, shape in self.weight_shapes.items()} | {"step": ()}

    def load_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Take over what `weights` gave. Raises ValueError naming the first array that is missing, unknown or of another shape."""
        self.check_weights(weights)
        self.take_weights(weights)

    def check_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """The ValueError of `load_weights`."""
        _check(self.weight_shapes, weights, what="these weights")

    def take_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """`load_weights` of what was checked."""
        self.params = self._put(weights)

    def state_dict(self) -> dict[str, np.ndarray]:
        """All that an exact resume needs, under the names that the torch Trainer uses."""
        state = {f"{group}/{name}": value for group, values in self._groups.items() for name, value in self._host(values).items()}
        return {**state, "step": np.array(self._count, np.float32)}

    @property
    def _groups(self) -> dict[str, Params]:
        found = (self.params, optax.tree.get(self.moments, "mu"), optax.tree.get(self.moments, "nu"))
        return dict(zip(GROUPS, found, strict=True))

    @property
    def _count(self) -> jax.Array:
        return optax.tree.get(self.moments, "count")

    def pieces(self) -> dict[str, np.ndarray]:
        """What this process holds of `state_dict`, each number in one process only; the names say which part it is (models/checkpoint.py)."""
        found = {}
        for group, values in self._groups.items():
            for name, value in values.items():
                for part in value.addressable_shards:
                    if part.replica_id == 0:
                        found |= self._named_piece(group, name, value.shape, part)
        return found | ({"step": np.array(self._count, np.float32)} if jax.process_index() == 0 else {})

    def _named_piece(self, group: str, name: str, shape: tuple[int, ...], part: Any) -> dict[str, np.ndarray]:
        """A device's part of a stacked parameter as pieces of the parameters that it is stacked of."""
        members, data = self.stack.members.get(name), np.asarray(part.data)
        parts = {f"{group}/{member}": data[index] for index, member in enumerate(members)} if members else {f"{group}/{name}": data}
        cut = [axis for axis, (have, all) in enumerate(zip(data.shape, shape, strict=True)) if have != all]
        if not cut:
            return parts
        (axis,) = cut
        start = part.index[axis].start or 0
        return {checkpoint.piece(one, axis - bool(members), start, shape[axis]): value for one, value in parts.items()}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Go on from `state_dict`. Raises ValueError naming the first array that is missing, unknown or of another shape."""
        self.check_state(state)
        self.take_state(state)

    def check_state(self, state: Mapping[str, np.ndarray]) -> None:
        """The ValueError of `load_state_dict`."""
        _check(self.state_shapes, state, what="this checkpoint")

    def take_state(self, state: Mapping[str, np.ndarray]) -> None:
        """`load_state_dict` of what was checked."""
        self.params, mean, square = (self._put({name: state[f"{group}/{name}"] for name in self.model.table}) for group in GROUPS)
        count = self.layout.place(np.array(state["step"], np.int32))
        self.moments = optax.tree.set(self.moments, mu=mean, nu=square, count=count)


def _check(shapes: Mapping[str, tuple[int, ...]], given: Mapping[str, np.ndarray], *, what: str) -> None:
    """ValueError naming the first array that is missing, unknown or of another shape."""
    for name in sorted(shapes.keys() ^ given.keys()):
        side = f"is not in {what}" if name in shapes else f"in {what} is unknown to the model"
        raise ValueError(f"{name!r} {side}: it belongs to another model. Give what this model was trained to, or remove it.")
    for name, shape in shapes.items():
        if tuple(shape) != given[name].shape:
            raise ValueError(f"{name!r} has shape {given[name].shape} in {what}, {tuple(shape)} in the model; they differ.")


class Decoder:
    """Sequences that go on a token at a time; see models.backends.torch.Decoder. Memory is constant, but for full attention's cache,
    which is doubled when it is full (and the step compiled again)."""

    def __init__(self, model: Model, params: Params) -> None:
        self.model, self.stack = model, Stack(model)
        self.params = self.stack.stack(params, join=jnp.stack)

    def prefill(self, tokens_BP: np.ndarray, segments_BP: np.ndarray | None = None) -> np.ndarray:
        """The prompts at once: logits [B, V], float32, of the token after each."""
        segments_BP = None if segments_BP is None else np.asarray(segments_BP, np.int32)
        logits_BV, self.states = prefill(self.params, np.asarray(tokens_BP, np.int32), segments_BP, model=self.model)
        self.tokens = self.room = tokens_BP.shape[1]
        return to_numpy(logits_BV)

    def step(self, token_B: np.ndarray) -> np.ndarray:
        """One more token of each sequence: logits [B, V] of the next."""
        self.tokens += 1
        if self.tokens > self.room:
            self.room = 2 * self.tokens
            self.states = self.stack.reserve(self.states, self.room)
        logits_BV, self.states = decode(self.params, np.asarray(token_B, np.int32), self.states, model=self.model)
        return to_numpy(logits_BV)
