"""Torch: sequences that go on a token at a time.

In place, a step goes over memory that stays where it is, on a GPU as one CUDA graph: each block as a few kernels (`torch_one_token`) or compiled, its state
written over the state before it where its kernel can, and nothing that the host must wait for.

Shapes: B batch, P prompt, D width, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from kernels import launch
from models.backbone import Model
from models.backends import torch_one_token as short
from models.backends.torch_arrays import to_numpy
from models.layers.layer import Layer, State
from models.parameters import Parameter


class Decoder:
    """Sequences that go on a token at a time, by each layer's step. params: by the names of the model's table; no gradient is asked of them.

    dtype: what matrices are rounded to, and activations computed in (None: as they are); norms, biases and gates stay.
    in_place: keep states where they are, and capture the step on a GPU; worth its compilation where many tokens are wanted.
    """

    def __init__(
        self, model: Model, params: Mapping[str, torch.Tensor], *, dtype: torch.dtype | None = None, in_place: bool = False
    ) -> None:
        self.model, self.in_place = model, in_place
        self.params = {name: _rounded(value.detach(), model.table[name], dtype) for name, value in params.items()}
        self.device = self.params["embedding"].device
        self._blocks: dict[Layer, Callable] = {}
        self._short = self._short_blocks(params) if in_place else {}
        self._head = short.head(params, self.params["embedding"].dtype) if self._short else None
        # What is captured may not loop on the host, as the array form of a solver does: kernels run between what is compiled.
        self._one_token = torch.compiler.disable(launch.one_token) if in_place and self.device.type == "cuda" else None

    @torch.no_grad()
    def prefill(self, tokens_BP: np.ndarray, segments_BP: np.ndarray | None = None) -> np.ndarray:
        """The prompts at once: logits [B, V], float32, of the token after each."""
        x_BPD, states, _ = self.model.stream(self.params, tokens_BP, segments=segments_BP)
        self.start(states, tokens_BP.shape[1])
        return to_numpy(self.model.logits(self.params, x_BPD[:, -1]))

    def start(self, states: list[State], tokens: int) -> None:
        """Go on from each block's state after so many tokens. The states are the decoder's from here on."""
        if self.in_place:
            states = pytree.tree_map(lambda x: x.contiguous() if isinstance(x, torch.Tensor) else x, states)
        self.states, self.tokens, self.room, self.graph = states, tokens, tokens, None

    def reserve(self, tokens: int) -> None:
        """Make room for so many tokens of each sequence in all, where a layer keeps them."""
        states = [layer.reserve(state, tokens) for layer, state in zip(self.model.layers, self.states, strict=True)]
        moved = any(new is not old for new, old in zip(states, self.states, strict=True))
        self.states, self.room, self.graph = states, tokens, None if moved else self.graph

    def forget_programs(self) -> None:
        """Compile anew from here on: where many batches are decoded, each with a program of its own."""
        self._blocks, self.graph = {}, None

    def step(self, token_B: np.ndarray) -> np.ndarray:
        """One more token of each sequence: logits [B, V] of the next."""
        return to_numpy(self.advance(torch.as_tensor(np.asarray(token_B, np.int32))))

    @torch.no_grad()
    def advance(self, token_B: torch.Tensor) -> torch.Tensor:
        """`step` without waiting for the device; in place, the next call writes over the logits that it gives."""
        if not self.in_place:
            logits_BV, self.states = self.model.step(self.params, token_B, self.states)
            return logits_BV
        self.tokens += 1
        if self.tokens > self.room:
            self.reserve(2 * self.tokens)
        if self.graph is None:
            self.token_B = torch.empty(token_B.shape, dtype=torch.int32, device=self.device)
            self.token_B.copy_(token_B)
            self.graph = self._captured() if self.device.type == "cuda" else self._once
        self.token_B.copy_(token_B, non_blocking=True)
        self.graph()
        return self.logits_BV

    def _once(self) -> None:
        """A step on the memory that stays: the token, the states; the logits are new unless it is captured."""
        with launch.states_in_place(self._one_token):
            x_BD, after, _ = self.model.through_blocks(self.params, self.token_B, self.states, transform=self._transform)
            if self._head is None:
                self.logits_BV = self.model.logits(self.params, self.model.normalise(self.params, x_BD))
            else:
                self.logits_BV = short.logits(x_BD, self._head, self.model.vocab_size)
        for old, new in zip(_arrays(self.states), _arrays(after), strict=True):
            if new.data_ptr() != old.data_ptr():
                old.copy_(new)

    def _short_blocks(self, params: Mapping[str, torch.Tensor]) -> dict[int, short.Block]:
        """The blocks that go as a few kernels, by the identity of their first parameter."""
        dtype, found = self.params["embedding"].dtype, {}
        for index, layer in enumerate(self.model.layers):
            if short.suits(layer, self.device.type, dtype):
                before = f"blocks.{index}."
                p = {name.removeprefix(before): value.detach() for name, value in params.items() if name.startswith(before)}
                found[id(self.params[f"{before}mixer_norm"])] = short.Block.of(layer, p, dtype)
        return found

    def _short_block(self, layer: Layer, p: Mapping[str, torch.Tensor], x_BD: torch.Tensor, state: State, segments: None) -> tuple:
        return self._short[id(p["mixer_norm"])](x_BD, state)

    def _transform(self, block: Callable, layer: Layer) -> Callable:
        if self._short and short.suits(layer, self.device.type, self.params["embedding"].dtype):
            return self._short_block
        if self.device.type == "cpu":
            return block
        if layer not in self._blocks:
            self._blocks[layer] = torch.compile(functools.partial(_without_record, block), dynamic=False)
        return self._blocks[layer]

    def _captured(self) -> Callable[[], None]:
        """The step as one graph. It is run twice beforehand, on states that are put back: kernels are compiled and memory found then."""
        kept = [value.clone() for value in _arrays(self.states)]
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(2):
                self._once()
        torch.cuda.current_stream().wait_stream(beside)
        for value, before in zip(_arrays(self.states), kept, strict=True):
            value.copy_(before)
        del kept
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._once()
        return graph.replay


def _rounded(value: torch.Tensor, parameter: Parameter, dtype: torch.dtype | None) -> torch.Tensor:
    return value.to(dtype) if dtype is not None and len(parameter.shape) == 2 and "heads" not in parameter.axes else value


def _without_record(block: Callable, *given: Any) -> tuple[torch.Tensor, State, dict[str, torch.Tensor]]:
    """A block without its scalars, which a step has no use for."""
    x, state, _ = block(*given)
    return x, state, {}


def _arrays(states: list[State]) -> list[torch.Tensor]:
    return [value for value in pytree.tree_leaves(states) if isinstance(value, torch.Tensor)]
