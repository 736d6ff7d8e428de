"""Torch: trains a model by AdamW on one device or on one in each of several processes, and scores sequences.

Weights are float32; activations are float32 or bfloat16. A GPU is never waited for inside a step: the host is a step ahead of it.
Shapes: B batch, T time, N = B T tokens, D width, V vocabulary.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from kernels.head_loss import head_loss
from models.backbone import Model
from models.backends.torch_arrays import to_arrays, to_numpy
from models.backends.torch_decoder import Decoder
from models.backends.torch_parallel import Gradients, Team
from models.backends.torch_profile import start_profile
from models.layers.layer import Layer

__all__ = ["Decoder", "Team", "Trainer", "device_name", "find_device", "start_profile", "to_arrays", "to_numpy"]

Facts = Callable[[], dict[str, float]]
"""Waits for what a step measured."""
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def keep_freed_memory() -> None:
    """Tell glibc's malloc not to give memory back to the system between a step's arrays: on a CPU, fresh pages cost 5 % of a small step."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        trim_threshold, top_pad, mmap_threshold = -1, -2, -3
        for option, value in ((mmap_threshold, 1 << 25), (trim_threshold, (1 << 31) - 1), (top_pad, 1 << 26)):
            library.mallopt(option, value)


def grow_segments() -> None:
    """Let torch's GPU memory grow in place (expandable segments), unless PYTORCH_CUDA_ALLOC_CONF or PYTORCH_ALLOC_CONF says how it is to be kept: in
    segments of fixed sizes a step of a billion parameters fragments, and one that nearly fills the card asks for memory anew."""
    if not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & set(os.environ):
        choose = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
        choose("expandable_segments:True")


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """What is inside is computed without gradients and by any algorithm, also beside a training that is deterministic."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.use_deterministic_algorithms(deterministic)


def find_device(asked: str, *, precision: str, threads: int | None = None) -> str:
    """ "cpu" or "cuda"; `asked` may be "auto", which takes the GPU where there is one. ValueError where it is not here, or lacks the precision.

    threads: the Trainer sets them.
    """
    found = ("cuda" if torch.cuda.is_available() else "cpu") if asked == "auto" else asked
    if found.startswith("cuda"):
        if not torch.cuda.is_available():
            raise ValueError("Device cuda was asked for and torch finds no GPU here: use --device cpu, or run where one is.")
        if precision == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False):
            raise ValueError(f"{torch.cuda.get_device_name()} has no bfloat16: set training.precision to float32, or run on another GPU.")
    return found


def device_name(device: str) -> str:
    """What provenance calls a device: a GPU by its model."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


class Trainer:
    """Parameters and AdamW's moments of one model on one device.

    optimizer: {"beta1", "beta2", "epsilon", "weight_decay", "clip"}; None is for scoring alone, and holds no moments.
    precision: of activations, "float32" or "bfloat16". deterministic: the same bits on every run on one device. threads: of a CPU. compile: torch.compile each kind of block.
    rematerialise: compute what is inside a block again in the backward pass instead of keeping it. team: the processes that train
    together, each of which makes the same calls with the same arguments (see models/backends/torch_parallel.py).
    Raises ValueError for a model without a forward pass and for an unknown precision.
    """

    lost = False
    """A step that runs out of memory leaves the parameters as they were."""

    def __init__(
        self, model: Model, *, optimizer: Mapping[str, float] | None, seed: int, device: str = "cpu", precision: str = "float32",
        deterministic: bool = False, threads: int | None = None, compile: bool = False, rematerialise: bool = False, team: Team | None = None,
    ) -> None:  # fmt: skip
        if model.trainable:
            raise ValueError(f"This model cannot be trained: {model.trainable}. Choose other layers, or only plan it.")
        if precision not in PRECISIONS:
            raise ValueError(f"precision is {precision!r}; it is one of {', '.join(PRECISIONS)}.")
        if threads:
            torch.set_num_threads(threads)
        if device == "cpu":
            keep_freed_memory()
        else:
            grow_segments()
        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(deterministic)
        self.model, self.device, self.dtype, self.rematerialise = model, torch.device(device), PRECISIONS[precision], rematerialise
        self.params = {name: torch.nn.Parameter(value.to(self.device)) for name, value in model.init(seed).items()}
        self.ahead = 0 if self.device.type == "cpu" else 1
        """How many steps may wait on the device while the host goes on."""
        self._compile, self._blocks = compile and self.device.type != "cpu", {}
        normalise = functools.partial(_normalised, model)
        self._normalise = torch.compile(normalise, dynamic=False) if self._compile else normalise
        self._copies = None if self.device.type == "cpu" else torch.cuda.Stream()
        self.team = team or Team()
        if optimizer is not None:
            self._optimise(optimizer)
            self._gradients = Gradients(self.team, self.params, self._loss)

    @property
    def devices(self) -> int:
        """How many devices a batch is split over."""
        return self.team.size

    def _optimise(self, optimizer: Mapping[str, float]) -> None:
        model, self.clip = self.model, optimizer["clip"]
        decayed = [self.params[name] for name, parameter in model.table.items() if parameter.decay]
        others = [self.params[name] for name, parameter in model.table.items() if not parameter.decay]
        groups = [{"params": decayed, "weight_decay": optimizer["weight_decay"]}, {"params": others, "weight_decay": 0.0}]
        betas = (optimizer["beta1"], optimizer["beta2"])
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=optimizer["epsilon"], fused=True)
        for value in self.params.values():
            self.optimizer.state[value] = {
                "step": torch.zeros((), device=self.device), "exp_avg": torch.zeros_like(value), "exp_avg_sq": torch.zeros_like(value)
            }  # fmt: skip
        self._halted = torch.zeros((), dtype=torch.bool, device=self.device)

    def _transform(self, block: Callable, layer: Layer) -> Callable:
        """The block of a kind of layer without its state, compiled once however many blocks are of that kind; then the stream between blocks
        is a pair."""
        if layer not in self._blocks:
            compiled = self._compile and torch.compile(functools.partial(_unsummed, self.model), dynamic=False)
            self._blocks[layer] = functools.partial(_from_pair, compiled) if compiled else functools.partial(_stateless, block)
        run = self._blocks[layer]
        again = self.rematerialise and torch.is_grad_enabled()
        return functools.partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False) if again else run

    def _to_device(self, values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        """A copy on the device, made beside what it computes."""
        value = torch.as_tensor(np.ascontiguousarray(values)).to(dtype)
        if self._copies is None:
            return value
        with torch.cuda.stream(self._copies):
            value = value.pin_memory().to(self.device, non_blocking=True)
        value.record_stream(torch.cuda.current_stream())
        return value

    def _batch(
        self, tokens_BT1: np.ndarray, segments: np.ndarray | None, targets_mask: np.ndarray | None, rows: slice
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """(tokens, segments, weight of each target's loss) of some rows, on the device; the weights of all rows sum to 1."""
        mask_BT = np.ones((len(tokens_BT1), tokens_BT1.shape[1] - 1), bool) if targets_mask is None else np.asarray(targets_mask, bool)
        tokens = self._to_device(tokens_BT1[rows], torch.int32)
        segments_BT = None if segments is None else self._to_device(segments[rows], torch.int32)
        mask = self._to_device(mask_BT[rows], torch.bool)
        if self._copies is not None:
            torch.cuda.current_stream().wait_stream(self._copies)
        return tokens, segments_BT, mask.float() / max(int(mask_BT.sum()), 1)

    def _loss(
        self, model: Model, tokens_BT1: torch.Tensor, segments_BT: torch.Tensor | None, weight_BT: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """(weighted sum of the negative log likelihoods, each of them [B, T], the layers' scalars)."""
        through = {"segments": segments_BT, "dtype": self.dtype, "transform": self._transform}
        x_BTD, _, record = model.through_blocks(self.params, tokens_BT1[:, :-1], **through)
        x_BTD = self._normalise({"final_norm": self.params["final_norm"]}, x_BTD)
        target_N = tokens_BT1[:, 1:].reshape(-1).long()
        total, nll_N = head_loss(x_BTD.reshape(len(target_N), -1), self.params["embedding"], target_N, weight_BT.reshape(-1))
        return total, nll_N.reshape(weight_BT.shape), record

    def step(self, tokens_BT1: np.ndarray, **given: Any) -> dict[str, float]:
        """`submit`, and wait for its facts."""
        return self.submit(tokens_BT1, **given)()

    def submit(
        self, tokens_BT1: np.ndarray, *, learning_rate: float, segments: np.ndarray | None = None, targets_mask: np.ndarray | None = None,
        micro_batch: int | None = None, skip_nonfinite: bool = False, halt: bool = False, rematerialise: bool = False,
    ) -> Facts:  # fmt: skip
        """One AdamW step on the mean loss over the unmasked targets, the gradient's global norm clipped; given to the device, not waited for.

        tokens_BT1: integers [B, T + 1]. segments: int32 [B, T] of the inputs. targets_mask: bool [B, T], false where a target carries no loss.
        micro_batch: rows at a time on each device; the loss is the same. skip_nonfinite: leave everything as it was where loss or
        gradient is not finite; halt: and then leave it so in every step that follows, until a state is loaded. rematerialise: from here on.
        Returns a function that waits for loss, grad_norm (before clipping), finite (1 or 0) and the layers' scalars.
        Raises MemoryError where the rows at a time do not fit in the device's memory, ValueError where the team does not divide the rows.
        """
        self.rematerialise |= rematerialise
        share, rest = divmod(len(tokens_BT1), self.devices)
        if rest:
            raise ValueError(
                f"{self.devices} devices do not divide a batch of {len(tokens_BT1)} rows; give a multiple of them, or use fewer."
            )
        rows = slice(self.team.rank * share, (self.team.rank + 1) * share)
        try:
            batch = self._batch(tokens_BT1, segments, targets_mask, rows)
            names, values = self._descend(batch, micro_batch or share, learning_rate, skip_nonfinite, halt)
            return _read_later(names, values)
        except torch.OutOfMemoryError as error:
            message = str(error).splitlines()[0]
        self.optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        raise MemoryError(message)

    def _descend(
        self, batch: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor], micro_batch: int, learning_rate: float, skip: bool, halt: bool
    ) -> tuple[list[str], torch.Tensor]:
        self.optimizer.zero_grad(set_to_none=True)
        loss, scalars = self._gradients.add_up(self.model, batch, micro_batch)
        gradients = [value.grad for value in self.params.values()]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        finite = torch.isfinite(norm) & torch.isfinite(loss)
        undone = ~finite | self._halted
        self._halted = undone if halt else self._halted
        self.optimizer.grad_scale = norm.clamp(min=self.clip) / self.clip  # the fused step divides gradients by it
        self.optimizer.found_inf = undone.float() if skip else torch.zeros((), device=self.device)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        return ["loss", "grad_norm", "finite", *scalars], torch.stack([loss, norm, finite.float(), *scalars.values()])

    @torch.no_grad()
    def nll(
        self, tokens_BT1: np.ndarray, *, segments: np.ndarray | None = None, setting: Mapping[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, float]]:
        """Negative log likelihood of each target, float32 [B, T] in nats, and the layers' scalars.

        setting: the solver's, for inference: {"steps": 5}, {"eps": 1e-3}, {"solve": False}; None: as trained.
        """
        batch = self._batch(tokens_BT1, segments, None, slice(None))
        _, nll_BT, record = self._loss(self.model.with_setting(setting), *batch)
        return nll_BT.cpu().numpy(), {name: float(value) for name, value in record.items()}

    def weights(self) -> dict[str, np.ndarray]:
        """The parameters, float32, by the names of the model's table."""
        return {name: to_numpy(value) for name, value in self.params.items()}

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Take over what `weights` gave. Raises ValueError naming the first array that is missing, unknown or of another shape."""
        for name in sorted(self.params.keys() ^ weights.keys()):
            side = "lack" if name in self.params else "have an unknown"
            raise ValueError(f"These weights {side} {name!r}: they belong to another model. Give those that this model was trained to.")
        for name, value in self.params.items():
            if tuple(value.shape) != weights[name].shape:
                raise ValueError(
                    f"{name!r} has shape {weights[name].shape} in these weights, {tuple(value.shape)} in the model; they differ."
                )
            value.copy_(torch.from_numpy(np.array(weights[name])))

    def state_dict(self) -> dict[str, np.ndarray]:
        """All that an exact resume needs: "parameters/NAME", "mean/NAME" and "square/NAME" (AdamW's moments), "step"."""
        state = {f"parameters/{name}": to_numpy(value) for name, value in self.params.items()}
        for name, value in self.params.items():
            moments = self.optimizer.state[value]
            state[f"mean/{name}"], state[f"square/{name}"] = to_numpy(moments["exp_avg"]), to_numpy(moments["exp_avg_sq"])
        return {**state, "step": to_numpy(moments["step"])}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Go on from `state_dict`. Raises ValueError naming the first array that is missing, unknown or of another shape."""
        targets = {"step": None}
        for name, value in self.params.items():
            moments = self.optimizer.state[value]
            targets |= {f"parameters/{name}": value, f"mean/{name}": moments["exp_avg"], f"square/{name}": moments["exp_avg_sq"]}
        for name in sorted(targets.keys() ^ state.keys()):
            side = "lacks" if name in targets else "has an unknown"
            raise ValueError(f"This checkpoint {side} {name!r}: it belongs to another model. Remove it, or resume the model that made it.")
        for name, target in targets.items():
            if target is None:
                continue
            if tuple(target.shape) != state[name].shape:
                raise ValueError(
                    f"{name!r} has shape {state[name].shape} in this checkpoint, {tuple(target.shape)} in the model; they differ."
                )
            target.copy_(torch.from_numpy(np.array(state[name])))
        for value in self.params.values():
            self.optimizer.state[value]["step"].fill_(float(state["step"]))
        self._halted = torch.zeros_like(self._halted)

    @torch.no_grad()
    def take_over(self) -> None:
        """Have every process of the team go on from what rank 0 holds."""
        states = [self.optimizer.state[value] for value in self.params.values()] if hasattr(self, "optimizer") else []
        self.team.copy_from_first([*self.params.values(), *(value for state in states for value in state.values())])
        self._halted = torch.zeros((), dtype=torch.bool, device=self.device)


def _stateless(block: Callable, *given: Any) -> tuple[torch.Tensor, None, dict[str, torch.Tensor]]:
    """A block without its state, which training has no use for, and which is then not computed."""
    x, _, record = block(*given)
    return x, None, record


Pair = tuple[torch.Tensor, torch.Tensor]
"""The stream, and what is still to be added to it: a compiled block adds the two where it reads them to normalise, and saves a pass over both."""


def _unsummed(
    model: Model, layer: Layer, p: Mapping[str, torch.Tensor], x: Pair, state: None, segments: torch.Tensor | None
) -> tuple[Pair, None, dict[str, torch.Tensor]]:
    """A block without its state from pair to pair."""
    x, y, _, record = model.unsummed(layer, p, x[0] + x[1], state, segments)
    return (x, y), None, record


def _from_pair(run: Callable, layer: Layer, p: Mapping[str, torch.Tensor], x: torch.Tensor | Pair, *rest: Any) -> Any:
    """A block from pair to pair, from the stream itself too: the first block's, which is the same program."""
    return run(layer, p, x if isinstance(x, tuple) else (x, torch.zeros_like(x, requires_grad=x.requires_grad)), *rest)


def _normalised(model: Model, params: Mapping[str, torch.Tensor], x: torch.Tensor | Pair) -> torch.Tensor:
    """The stream as the head takes it."""
    return model.normalise(params, x[0] + x[1] if isinstance(x, tuple) else x)


def _read_later(names: list[str], values: torch.Tensor) -> Facts:
    """Facts on their way to the host."""
    if values.device.type == "cpu":
        there, arrived = values, None
    else:
        there = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        there.copy_(values, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()

    def read() -> dict[str, float]:
        if arrived is not None:
            arrived.synchronize()
        return dict(zip(names, there.tolist(), strict=True))

    return read
