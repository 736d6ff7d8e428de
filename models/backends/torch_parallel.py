"""Torch: processes that train one model together, one device each (data parallel), over torch.distributed.

The rows of a step are split over the ranks, each holds all weights, and DistributedDataParallel sums the gradients while the backward pass
still runs. All ranks make the same calls. Rank 0 alone has the data and writes files: it is the Leader, which tells the others each
call that it makes itself; they `follow`.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from models.backends.dismissal import Dismissal

PATIENCE = datetime.timedelta(hours=2)
"""What the others wait for rank 0, which may be writing a checkpoint or waiting for data."""


def started() -> bool:
    """Whether this process was started as one of several, by torchrun or by Ray Train."""
    return dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) > 1


class Team:
    """The processes that train together: this one's rank, and how many they are. A process alone is a team of one."""

    rank, size, begun = 0, 1, False

    @classmethod
    def join(cls, device: str) -> Team:
        """Take part, on a device of this process's own: "cpu" or "cuda"."""
        team = cls()
        if device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        team.begun = not dist.is_initialized()
        if team.begun:
            dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", timeout=PATIENCE)
        team.rank, team.size = dist.get_rank(), dist.get_world_size()
        return team

    def leave(self) -> None:
        """End what `join` began."""
        if self.begun and dist.is_initialized():
            dist.destroy_process_group()

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, on the device."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def all(self, yes: bool) -> bool:
        """Whether every rank says yes."""
        answer = torch.tensor(int(yes))
        if self.size > 1:
            dist.all_reduce(answer, op=dist.ReduceOp.MIN)
        return bool(answer)

    @staticmethod
    def tell(what: Any = None) -> Any:
        """What rank 0 says, on every rank."""
        said = [what]
        dist.broadcast_object_list(said, device=torch.device("cpu"))
        return said[0]

    def copy_from_first(self, values: list[torch.Tensor]) -> None:
        """Give these tensors the values that they have on rank 0."""
        if self.size > 1:
            for value in values:
                dist.broadcast(value, 0)


class Gradients:
    """Adds up the gradients of the rows of a step, over micro batches and over the team.

    loss: (model, tokens, segments, weight) -> (a sum over targets, ..., the layers' scalars).
    """

    def __init__(self, team: Team, params: Mapping[str, torch.nn.Parameter], loss: Callable) -> None:
        self.team, self.fitting = team, set()
        self.loss = loss
        if team.size > 1:
            torch._dynamo.config.optimize_ddp = False  # blocks are compiled one by one, which is what it would cut a model into
            self.loss = DistributedDataParallel(_Module(params, loss), gradient_as_bucket_view=True)

    def add_up(
        self, model: Any, batch: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor], micro_batch: int
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """(loss, the layers' scalars) of the whole step; the parameters' gradients are its own. batch: this rank's rows."""
        rows = len(batch[0])
        parts = [slice(start, start + micro_batch) for start in range(0, rows, micro_batch)]
        if self.team.size > 1:
            self._try(model, _part(batch, parts[0]))
        sums: dict[str, torch.Tensor] = {}
        for part in parts:
            with self._exchanged_only_if(part is parts[-1]):
                loss, _, record = self.loss(model, *_part(batch, part))
                (loss * self.team.size).backward()  # the team's gradients are averaged
            share = (min(part.stop, rows) - part.start) / rows / self.team.size
            for name, value in {"loss": loss, **{name: value * share for name, value in record.items()}}.items():
                sums[name] = sums.get(name, 0) + value.detach().float()
        totals = self.team.sum(torch.stack(list(sums.values())))
        loss, *scalars = totals.unbind()
        return loss, dict(zip(list(sums)[1:], scalars, strict=True))

    def _exchanged_only_if(self, last: bool) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if last or self.team.size == 1 else self.loss.no_sync()

    def _try(self, model: Any, part: tuple[torch.Tensor | None, ...]) -> None:
        """See that a micro batch of a size fits on every rank before any waits for another's gradients. Raises torch.OutOfMemoryError on all."""
        shape = (*part[0].shape, part[1] is None)
        if shape in self.fitting:
            return
        said = None
        try:
            with self.loss.no_sync():
                self._forget(model, part)
        except torch.OutOfMemoryError as error:
            said = str(error)
        if not self.team.all(said is None):
            raise torch.OutOfMemoryError(said or "Another process of the team ran out of memory.")
        if not self.fitting:
            # After its first exchange DistributedDataParallel lays its buckets out anew, and where a gradient lies in them is the order in which it is
            # summed. Two exchanges without effect, and the first step of a run that goes on sums as the same step of one that was never interrupted.
            self._forget(model, part)
            self._forget(model, part)
        self.fitting.add(shape)

    def _forget(self, model: Any, part: tuple[torch.Tensor | None, ...]) -> None:
        """Compute gradients and drop them."""
        try:
            self.loss(model, *part)[0].backward()
        finally:
            for value in self.loss.parameters():
                value.grad = None


def _part(batch: tuple[torch.Tensor | None, ...], part: slice) -> tuple[torch.Tensor | None, ...]:
    return tuple(None if value is None else value[part] for value in batch)


class _Module(torch.nn.Module):
    """The loss as DistributedDataParallel takes it."""

    def __init__(self, params: Mapping[str, torch.nn.Parameter], loss: Callable) -> None:
        super().__init__()
        self.params, self.loss = torch.nn.ParameterList(params.values()), loss

    def forward(self, *given: Any) -> Any:
        return self.loss(*given)


class Leader:
    """The trainer of rank 0, whose calls the other ranks make too."""

    def __init__(self, team: Team, make: Callable[..., Any], model: Any, options: dict[str, Any]) -> None:
        team.tell(("make", (model,), options))
        self.team, self.trainer = team, make(model, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.trainer, name)

    def step(self, tokens_BT1: np.ndarray, **given: Any) -> dict[str, float]:
        """See the Trainer's."""
        return self.submit(tokens_BT1, **given)()

    def submit(self, tokens_BT1: np.ndarray, **given: Any) -> Callable[[], dict[str, float]]:
        """See the Trainer's."""
        self.team.tell(("submit", (tokens_BT1,), given))
        return self.trainer.submit(tokens_BT1, **given)

    def load_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """See the Trainer's."""
        self.trainer.load_weights(weights)
        self._take_over()

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """See the Trainer's."""
        self.trainer.load_state_dict(state)
        self._take_over()

    def _take_over(self) -> None:
        self.team.tell(("take_over", (), {}))
        self.trainer.take_over()


def follow(team: Team, make: Callable[..., Any]) -> None:
    """Do as rank 0 does until it ends."""
    trainer = None
    while (said := team.tell()) is not None:
        name, given, options = said
        if name == "make":
            trainer = None  # its memory is the next one's
            trainer = make(*given, **options)
        else:
            with contextlib.suppress(MemoryError):  # raised on every rank; rank 0 says what to do
                getattr(trainer, name)(*given, **options)


dismiss = Dismissal(dist.is_initialized, Team.tell)
leading = dismiss.leading
