"""JAX: processes that train one model together, one a host, over jax.distributed (one program on many devices).

All processes make the same calls. Rank 0 alone decides and publishes: it is the Leader, which tells the others each call that it makes
itself; they `follow`. What is large is not told: each process reads its own rows of a batch, and writes its own pieces of a checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import broadcast_one_to_all

from models import checkpoint
from models.backends.dismissal import Dismissal
from models.backends.jax import Trainer

PATIENCE = 2 * 3600
"""Seconds that the others wait for rank 0, which may be writing a checkpoint or waiting for data."""
KEPT = 64
"""Messages that stay readable: more than are ever told between two steps, at which all meet."""
BY_HAND = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
"""Environment variables of a process that is started by hand, beside others."""

Read = Callable[[int, slice], dict[str, Any]]


def started() -> bool:
    """Whether this process was started as one of several, by Ray Train or by hand."""
    return jax.process_count() > 1 if jax.distributed.is_initialized() else all(name in os.environ for name in BY_HAND)


class Team:
    """The processes that train together: this one's rank, and how many they are."""

    begun = False

    @classmethod
    def join(cls, device: str) -> Team:
        """Take part. device: as `find_device` takes it, which comes after: a process must join before it first computes."""
        team = cls()
        if not jax.distributed.is_initialized():
            team.begun = True
            if device == "cpu":
                jax.config.update("jax_platforms", "cpu")
            address, size, rank = (os.environ[name] for name in BY_HAND)
            jax.distributed.initialize(address, int(size), int(rank))
        team.rank, team.size = jax.process_index(), jax.process_count()
        return team

    def leave(self) -> None:
        """End what `join` began."""
        if self.begun:
            jax.distributed.shutdown()

    @staticmethod
    def hear(number: int) -> Any:
        """What rank 0 told as its message of this number."""
        return pickle.loads(_client().blocking_key_value_get_bytes(_key(number), PATIENCE * 1000))

    @staticmethod
    def meet(number: int) -> None:
        """Wait for all, after the message of this number."""
        _client().wait_at_barrier(f"{_key(number)}/met", PATIENCE * 1000)


_told = 0


def tell(what: Any) -> int:
    """Rank 0 says something to all others. Returns its number."""
    global _told
    _client().key_value_set_bytes(_key(_told), pickle.dumps(what))
    if _told >= KEPT:
        _client().key_value_delete(_key(_told - KEPT))
    _told += 1
    return _told - 1


def _key(number: int) -> str:
    return f"strata/{number}"


def _client() -> Any:
    from jax._src import distributed  # jax.distributed shows no key-value store; libraries over JAX take it from here

    return distributed.global_state.client


class Shared(Mapping[str, np.ndarray]):
    """Arrays that rank 0 has and gives to all: each process asks for each of them, in the same order. values: rank 0's; None elsewhere."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], values: Mapping[str, np.ndarray] | None = None) -> None:
        self.shapes, self.values = shapes, values

    def __getitem__(self, name: str) -> np.ndarray:
        mine = np.zeros(self.shapes[name], np.float32) if self.values is None else np.asarray(self.values[name], np.float32)
        return np.asarray(broadcast_one_to_all(mine))

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


class Leader:
    """The trainer of rank 0, whose calls the other ranks make too."""

    by_number = True
    """A batch is named by its number, by which the others read their rows of it."""

    def __init__(self, team: Team, make: Callable[..., Trainer], model: Any, options: dict[str, Any], *, spread: bool = True) -> None:
        tell(("make", (model,), options))
        self.team, self.trainer, self.spread = team, make(model, **options), spread

    def __getattr__(self, name: str) -> Any:
        return getattr(self.trainer, name)

    def submit(self, tokens_BT1: np.ndarray, *, number: int, targets_mask: np.ndarray, **given: Any) -> Callable[[], dict[str, float]]:
        """See the Trainer's. number: the batch's."""
        told = {name: value for name, value in given.items() if name != "segments"}
        tell(("submit", (number, len(tokens_BT1), float(targets_mask.sum())), told))
        return self.trainer.submit(tokens_BT1, targets_mask=targets_mask, **given)

    def weights(self) -> dict[str, np.ndarray]:
        """See the Trainer's: an array at a time is made whole."""
        tell(("weights", (), {}))
        return self.trainer.weights()

    def load_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """See the Trainer's."""
        self.trainer.check_weights(weights)
        tell(("take_weights", (), {}))
        self.trainer.take_weights(Shared(self.trainer.weight_shapes, weights))

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """See the Trainer's."""
        self.trainer.check_state(state)
        tell(("take_state", (), {}))
        self.trainer.take_state(Shared(self.trainer.state_shapes, state))

    def state_dict(self) -> dict[str, np.ndarray]:
        """This process's pieces of the state (see models/checkpoint.py), where `save_others` has the other ranks write theirs; else all of it."""
        if self.spread:
            return self.trainer.pieces()
        tell(("state_dict", (), {}))
        return self.trainer.state_dict()

    @property
    def save_others(self) -> Callable[[Path, dict[str, str]], int] | None:
        """(a checkpoint's path, its metadata) -> how many files the other ranks have written beside it, their pieces of the state. None where
        their disks are not one folder, and this process writes everything."""
        return self._save_others if self.spread else None

    def _save_others(self, path: Path, metadata: dict[str, str]) -> int:
        self.team.meet(tell(("save", (path, metadata), {})))
        return self.team.size - 1


def follow(team: Team, make: Callable[..., Trainer], read: Read) -> None:
    """Do as rank 0 does until it ends. read: (a batch's number, which of its rows) -> what Trainer.step takes of them."""
    trainer: Any = None
    number = 0
    while (said := team.hear(number)) is not None:
        name, given, options = said
        match name:
            case "make":
                trainer = None  # its memory is the next one's
                trainer = make(*given, **options)
            case "submit":
                batch, rows, targets = given
                mine = trainer.layout.rows_here(rows)
                with contextlib.suppress(MemoryError):  # raised on every rank; rank 0 says what to do
                    trainer.submit(**read(batch, mine), share=(mine.start, rows, targets), **options)
            case "weights" | "state_dict":
                getattr(trainer, name)()
            case "take_weights":
                trainer.take_weights(Shared(trainer.weight_shapes))
            case "take_state":
                trainer.take_state(Shared(trainer.state_shapes))
            case "save":
                path, metadata = given
                checkpoint.save(checkpoint.part(path, team.rank), trainer.pieces(), metadata)
                team.meet(number)
        number += 1


dismiss = Dismissal(jax.distributed.is_initialized, tell)
leading = dismiss.leading
