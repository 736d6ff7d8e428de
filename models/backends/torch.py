"""Torch: trains a model by AdamW on one device, and scores sequences.

Weights are float32; activations are float32 or bfloat16. Shapes: B batch, T time, N = B T tokens, D width, V vocabulary.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from kernels.head_loss import head_loss
from models.backbone import Model
from models.layers.layer import Layer

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def keep_freed_memory() -> None:
    """Tell glibc's malloc not to give memory back to the system between a step's arrays: on a CPU, fresh pages cost 5 % of a small step."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        trim_threshold, top_pad, mmap_threshold = -1, -2, -3
        for option, value in ((mmap_threshold, 1 << 25), (trim_threshold, (1 << 31) - 1), (top_pad, 1 << 26)):
            library.mallopt(option, value)


def to_arrays(values: Mapping[str, np.ndarray], device: str = "cpu") -> dict[str, torch.Tensor]:
    """numpy arrays as tensors on a device."""
    return {name: torch.from_numpy(np.array(value)).to(device) for name, value in values.items()}


def to_numpy(value: torch.Tensor) -> np.ndarray:
    """A copy on the host."""
    return value.detach().to("cpu", copy=True).numpy()


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
    Raises ValueError for a model without a forward pass and for an unknown precision.
    """

    devices = 1
    lost = False
    """A step that runs out of memory leaves the parameters as they were."""

    def __init__(
        self, model: Model, *, optimizer: Mapping[str, float] | None, seed: int, device: str = "cpu", precision: str = "float32",
        deterministic: bool = False, threads: int | None = None, compile: bool = False,
    ) -> None:  # fmt: skip
        if model.trainable:
            raise ValueError(f"This model cannot be trained: {model.trainable}. Choose other layers, or only plan it.")
        if precision not in PRECISIONS:
            raise ValueError(f"precision is {precision!r}; it is one of {', '.join(PRECISIONS)}.")
        if threads:
            torch.set_num_threads(threads)
        if device == "cpu":
            keep_freed_memory()
        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(deterministic)
        self.model, self.device, self.dtype = model, torch.device(device), PRECISIONS[precision]
        self.params = {name: value.to(self.device).requires_grad_() for name, value in model.init(seed).items()}
        self._compiled: dict[Layer, Callable] | None = {} if compile and self.device.type != "cpu" else None
        if optimizer is not None:
            self._optimise(optimizer)

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

    def _transform(self, block: Callable, layer: Layer) -> Callable:
        """The block of a kind of layer, compiled once however many blocks are of that kind."""
        if self._compiled is None:
            return block
        if layer not in self._compiled:
            self._compiled[layer] = torch.compile(block)
        return self._compiled[layer]

    def _tensor(self, values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(np.asarray(values)).to(self.device, dtype, non_blocking=True)

    def _loss(
        self, model: Model, tokens_BT1: torch.Tensor, segments_BT: torch.Tensor | None, weight_BT: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """(weighted sum of the negative log likelihoods, each of them [B, T], the layers' scalars)."""
        x_BTD, _, record = model.stream(self.params, tokens_BT1[:, :-1], segments=segments_BT, dtype=self.dtype, transform=self._transform)
        target_N = tokens_BT1[:, 1:].reshape(-1).long()
        total, nll_N = head_loss(x_BTD.reshape(len(target_N), -1), self.params["embedding"], target_N, weight_BT.reshape(-1))
        return total, nll_N.reshape(weight_BT.shape), record

    def step(
        self, tokens_BT1: np.ndarray, *, learning_rate: float, segments: np.ndarray | None = None, targets_mask: np.ndarray | None = None,
        micro_batch: int | None = None, skip_nonfinite: bool = False,
    ) -> dict[str, float]:  # fmt: skip
        """One AdamW step on the mean loss over the unmasked targets, the gradient's global norm clipped.

        tokens_BT1: integers [B, T + 1]. segments: int32 [B, T] of the inputs. targets_mask: bool [B, T], false where a target carries no loss.
        micro_batch: rows at a time on each device; the loss is the same. skip_nonfinite: leave everything as it was where loss or
        gradient is not finite. Returns loss, grad_norm (before clipping), finite (1 or 0) and the layers' scalars.
        Raises MemoryError where the rows at a time do not fit in the device's memory. The device is read once, at the end.
        """
        try:
            return self._step(tokens_BT1, learning_rate, segments, targets_mask, micro_batch, skip_nonfinite)
        except torch.OutOfMemoryError as error:
            message = str(error).splitlines()[0]
        torch.cuda.empty_cache()
        raise MemoryError(message)

    def _step(
        self, tokens_BT1: np.ndarray, learning_rate: float, segments: np.ndarray | None, targets_mask: np.ndarray | None, micro_batch: int | None,
        skip_nonfinite: bool,
    ) -> dict[str, float]:  # fmt: skip
        rows, length = tokens_BT1.shape[0], tokens_BT1.shape[1] - 1
        tokens = self._tensor(tokens_BT1, torch.int32)
        segments_BT = None if segments is None else self._tensor(segments, torch.int32)
        mask = torch.ones(rows, length, device=self.device) if targets_mask is None else self._tensor(targets_mask, torch.float32)
        weight_BT = mask / mask.sum().clamp(min=1)

        self.optimizer.zero_grad(set_to_none=True)
        loss, scalars = torch.zeros((), device=self.device), {}
        for start in range(0, rows, micro_batch or rows):
            part = slice(start, start + (micro_batch or rows))
            part_loss, _, record = self._loss(self.model, tokens[part], None if segments_BT is None else segments_BT[part], weight_BT[part])
            part_loss.backward()
            loss += part_loss.detach()
            for name, value in record.items():
                scalars[name] = scalars.get(name, 0) + value.detach() * (len(tokens[part]) / rows)

        gradients = [value.grad for value in self.params.values()]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        finite = torch.isfinite(norm) & torch.isfinite(loss)
        self.optimizer.grad_scale = norm.clamp(min=self.clip) / self.clip  # the fused step divides gradients by it
        self.optimizer.found_inf = (~finite).float() if skip_nonfinite else torch.zeros((), device=self.device)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()

        names = ["loss", "grad_norm", "finite", *scalars]
        values = torch.stack([loss, norm, finite.float(), *(value.float() for value in scalars.values())])
        return dict(zip(names, values.tolist(), strict=True))

    @torch.no_grad()
    def nll(
        self, tokens_BT1: np.ndarray, *, segments: np.ndarray | None = None, setting: Mapping[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, float]]:
        """Negative log likelihood of each target, float32 [B, T] in nats, and the layers' scalars.

        setting: the solver's, for inference: {"steps": 5}, {"eps": 1e-3}, {"solve": False}; None: as trained.
        """
        tokens = self._tensor(tokens_BT1, torch.int32)
        segments_BT = None if segments is None else self._tensor(segments, torch.int32)
        weight_BT = torch.ones(tokens.shape[0], tokens.shape[1] - 1, device=self.device)
        _, nll_BT, record = self._loss(self.model.with_setting(setting), tokens, segments_BT, weight_BT)
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


class Decoder:
    """Sequences that go on a token at a time, by each layer's step. params: by the names of the model's table; no gradient is asked of them."""

    def __init__(self, model: Model, params: Mapping[str, torch.Tensor]) -> None:
        self.model, self.params = model, {name: value.detach() for name, value in params.items()}

    def prefill(self, tokens_BP: np.ndarray, segments_BP: np.ndarray | None = None) -> np.ndarray:
        """The prompts at once: logits [B, V], float32, of the token after each."""
        x_BPD, self.states, _ = self.model.stream(self.params, tokens_BP, segments=segments_BP)
        return to_numpy(self.model.logits(self.params, x_BPD[:, -1]))

    def step(self, token_B: np.ndarray) -> np.ndarray:
        """One more token of each sequence: logits [B, V] of the next."""
        logits_BV, self.states = self.model.step(self.params, token_B, self.states)
        return to_numpy(logits_BV)
