"""Floor 1: array operations over torch and JAX, and one folder per sequence operation.

Here: which implementation ("backend") of an operation runs. reference is the recurrence as the paper writes it; chunked is the parallel
form in array operations (attention: `library`, the framework's own); triton is for NVIDIA GPUs, pallas for TPUs.
"""

import importlib
import os
import warnings
from collections.abc import Callable

OPERATIONS = (
    "attention",
    "convolution",
    "delta_rule",
    "head_loss",
    "linear_attention",
    "lru_input",
    "mesa",
    "mlstm",
    "palimpsa",
    "rg_lru",
    "rls_mesa",
    "rope",
)
NAMES = ("reference", "chunked", "library", "triton", "pallas")
PREFERENCE = {
    "cpu": ("chunked", "library", "reference"),
    "cuda": ("triton", "library", "chunked", "reference"),
    "tpu": ("pallas", "library", "chunked", "reference"),
}
FUSED = {"cuda": "triton", "tpu": "pallas"}

_offered: dict[str, dict[str, Callable]] = {}
_chosen: dict[str, str] = {}
_warned: set[str] = set()


def offer(operation: str, backends: dict[str, Callable | None]) -> None:
    """An operation says which implementations it has: by name, refusal(shape, dtype, device) -> None or the reason it cannot run them.

    A refusal of None stands for one that takes everything.
    """
    assert operation in OPERATIONS and set(backends) <= set(NAMES)
    _offered[operation] = {name: refusal or _takes_everything for name, refusal in backends.items()}


def _takes_everything(shape: dict[str, int], dtype: str, device: str) -> None:
    return None


def backends(operation: str) -> dict[str, Callable]:
    """What an operation offered."""
    if operation not in OPERATIONS:
        raise ValueError(f"there is no operation {operation!r}; there are {', '.join(OPERATIONS)}.")
    if operation not in _offered:
        importlib.import_module(f"kernels.{operation}")
    return _offered[operation]


def choose(operation: str, shape: dict[str, int], dtype: str, device: str, backend: str | None = None) -> str:
    """The backend that runs an operation on arrays of these sizes, recorded for `chosen`.

    shape: sizes by axis letter, as {"B": 8, "T": 2048, "H": 6, "K": 128, "V": 128}; dtype: "float32", "bfloat16" or "float64";
    device: "cpu", "cuda" or "tpu". backend, or else the environment's STRATA_KERNELS, asks for one by name.
    Raises ValueError when what is asked for does not exist or refuses. A refusal by the device's own kernel, where nothing was asked
    for, is a warning that names the operation, once.
    """
    available = backends(operation)
    asked = backend or os.environ.get("STRATA_KERNELS") or None
    if asked is not None and asked not in NAMES:
        raise ValueError(f"there is no kernel backend {asked!r}; ask for one of {', '.join(NAMES)}.")
    if asked is not None and (asked in available or backend or asked in ("triton", "pallas")):
        reason = available[asked](shape, dtype, device) if asked in available else f"{operation} has no such implementation"
        if reason is not None:
            raise ValueError(f"{operation} cannot run as {asked}: {reason}; it has {', '.join(available)}.")
        _chosen[operation] = asked
        return asked

    refusals = {}
    for name in PREFERENCE.get(device, PREFERENCE["cpu"]):
        reason = available[name](shape, dtype, device) if name in available else "there is none"
        if reason is None:
            _warn_of_refusal(operation, name, device, refusals)
            _chosen[operation] = name
            return name
        refusals[name] = reason
    raise ValueError(f"{operation} has no implementation for {shape} in {dtype} on {device}: {refusals}.")


def decline(operation: str, name: str, instead: str, reason: str) -> str:
    """What an operation runs as where the backend that was chosen has no such option: `instead`, with a warning, once, if `name` is a fused one."""
    if name not in FUSED.values():
        return name
    if operation not in _warned:
        _warned.add(operation)
        warnings.warn(f"{operation} runs as {instead}, which is slow; not as {name}: {reason}.", stacklevel=3)
    _chosen[operation] = instead
    return instead


def _warn_of_refusal(operation: str, name: str, device: str, refusals: dict[str, str]) -> None:
    fused = FUSED.get(device)
    if fused in refusals and name != "library" and operation not in _warned:
        _warned.add(operation)
        warnings.warn(f"{operation} runs as {name} on {device}, which is slow; no {fused} kernel: {refusals[fused]}.", stacklevel=4)


def chosen() -> dict[str, str]:
    """The backend that each operation last ran with in this process, for a result's provenance."""
    return dict(_chosen)
