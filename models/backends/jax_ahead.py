"""Kernels and training steps compiled for a TPU topology where there is no TPU: by libtpu's own compiler, in a process of its own.

    for found in ahead.ask("v5e:2x2", [Kernel(...), Step(...)]): ...

finds what a TPU would refuse (block shapes, fast memory and HBM that overflow, what Mosaic does not lower), and the compiler's own counts.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else a second process that loads libtpu dies
    "TPU_SKIP_MDS_QUERY": "1",  # the others: no questions to a TPU host that is not there
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_LOG_DIR": "disabled",
}


@dataclass(frozen=True)
class Chip:
    """One chip as its maker states it: bytes of HBM that a program may have (as the compiler says), bytes a second, bfloat16 FLOPs a second,
    and bundles a second of a core (the FLOPs by the matrix units' sizes)."""

    hbm: float
    bandwidth: float
    flops: float
    clock: float


GIB = 2**30
CHIPS = {
    "v5e": Chip(15.75 * GIB, 819e9, 197e12, 1.5e9),
    "v5p": Chip(95.74 * GIB, 2765e9, 459e12, 1.75e9),
    "v6e": Chip(31.25 * GIB, 1640e9, 918e12, 1.75e9),
}
OPTIMIZER = {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1, "clip": 1.0}
INPUTS = {
    "attention": {"q": "BTHK", "k": "BTHK", "v": "BTHV"},
    "delta_rule": {"q": "BTHK", "k": "BTHK", "v": "BTHV", "beta": "BTH", "log_decay": "BTH"},
    "linear_attention": {"q": "BTHK", "k": "BTHK", "v": "BTHV", "log_decay": "BTH", "beta": "BTH"},
    "mesa": {"q": "BTHK", "k": "BTHK", "v": "BTHV", "log_decay": "BTH", "beta": "BTH", "lam": "HK"},
    "mlstm": {"q": "BTHK", "k": "BTHK", "v": "BTHV", "log_input": "BTH", "log_decay": "BTH"},
    "palimpsa": {"q": "BTHK", "k": "BTHK", "v": "BTHV", "beta": "BTHV", "log_decay": "BTH", "prior": "H"},
    "rg_lru": {"x": "BTD", "log_a": "BTD"},
}
"""Every operation's arrays by axis letter, in the order of its signature."""
IN_PRECISION = ("q", "k", "v", "x")
"""What has the activations' dtype; the rest is float32."""


@dataclass(frozen=True)
class Kernel:
    """One operation's Pallas kernel, for one device. sizes: by axis letter, those of the operation (`INPUTS`).

    options: the operation's. tuning: of its kernel alone, such as {"together": 1} for Mesa's.
    """

    operation: str
    sizes: dict[str, int]
    dtype: str = "bfloat16"
    backward: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    tuning: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """One training step over all devices of the topology: entries of params.yaml, rows a device, how many devices split a parameter.

    segments: whether it takes documents' ids, as a study with training.reset does.
    """

    model: dict[str, Any]
    scale: dict[str, Any]
    vocab_size: int
    rows: int = 1
    length: int = 2048
    fsdp: int = 1
    precision: str = "bfloat16"
    rematerialise: bool = False
    segments: bool = False


@dataclass(frozen=True)
class Compiled:
    """What came of it. error: why the TPU's compiler refused, None where it did not. Bytes are one device's; kernels: Mosaic's calls."""

    error: str | None
    seconds: float
    flops: float = 0.0
    bytes: float = 0.0
    kernels: int = 0
    arguments: int = 0
    temporaries: int = 0
    chosen: dict[str, str] = field(default_factory=dict)

    @property
    def memory(self) -> int:
        """Bytes of HBM that a device needs: what it is given (results take its place) and what it makes on the way."""
        return self.arguments + self.temporaries


def chip(topology: str) -> Chip:
    """The chip of a topology. Raises ValueError for one whose figures are not known here."""
    kind = topology.partition(":")[0]
    if kind not in CHIPS:
        raise ValueError(f"there are no figures for a TPU {kind!r}; there are for {', '.join(CHIPS)}.")
    return CHIPS[kind]


def chips(topology: str) -> int:
    """How many chips a topology has, by its name. Raises ValueError where it does not say."""
    sizes = topology.partition(":")[2].split("x")
    if not all(size.isdigit() for size in sizes):
        raise ValueError(f"{topology!r} is no TPU topology; name one as v5e:2x2, v5p:2x2x1 or v6e:4x4.")
    return math.prod(map(int, sizes))


def missing() -> str | None:
    """Why nothing can be compiled here; None where it can."""
    absent = [name for name in ("jax", "libtpu", "optax") if find_spec(name) is None]
    return f"{', '.join(absent)} not installed: pip install 'strata[tpu]'" if absent else None


def ask(topology: str, requests: Sequence[Kernel | Step], *, dump: Path | None = None) -> Iterator[Compiled]:
    """The results, in the order of the requests, each as soon as it is there. topology: as "v5e:2x2", "v5p:2x2x1", "v6e:4x4".

    dump: a folder that takes what the compiler writes about every program, by request ("0", "1" ...); each then has its own process.
    Raises ValueError for a topology that does not exist, and where libtpu is missing.
    """
    if reason := missing():
        raise ValueError(f"Nothing can be compiled for a TPU here: {reason}.")
    groups = [list(requests)] if dump is None else [[request] for request in requests]
    for number, group in enumerate(groups):
        environment = {**os.environ, **ENVIRONMENT}
        environment.pop("STRATA_KERNELS", None)
        if dump is not None:
            folder = (dump / str(number)).absolute()
            environment["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_mosaic_dump_to={folder}/mosaic"
        yield from _in_a_process(topology, group, environment)


def _in_a_process(topology: str, requests: list[Kernel | Step], environment: dict[str, str]) -> Iterator[Compiled]:
    command = [sys.executable, "-m", __name__, topology]
    given = json.dumps([{"kind": type(request).__name__, **asdict(request)} for request in requests])
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors) as process,
    ):
        try:
            process.stdin.write(given)
            process.stdin.close()
            found = 0
            for line in process.stdout:
                if line.startswith("{"):
                    yield Compiled(**json.loads(line))
                    found += 1
            status = process.wait()
            errors.seek(0)
            said = errors.read()
            if "mistake: " in said:
                raise ValueError(said.partition("mistake: ")[2].strip())
            if status or found != len(requests):
                raise RuntimeError(f"compiling for {topology} ended after {found} of {len(requests)} programs:\n{said[-3000:]}")
        finally:
            process.kill()


def main() -> None:
    """In the process: requests as JSON on standard input, a line of JSON for each."""
    from jax.experimental import topologies

    from kernels.arrays import jax as ops

    try:
        devices = topologies.get_topology_desc(topology_name=sys.argv[1], platform="tpu").devices
    except Exception as error:  # libtpu raises whatever its parser does
        sys.exit(
            f"mistake: there is no TPU topology {sys.argv[1]!r} ({str(error).splitlines()[0]}); name one as v5e:2x2, v5p:2x2x1 or v6e:4x4."
        )
    kinds = {kind.__name__: (kind, lower) for kind, lower in ((Kernel, lower_kernel), (Step, lower_step))}
    for request in json.load(sys.stdin):
        kind, lower = kinds[request.pop("kind")]
        with ops.compiling_for("tpu"):
            print(json.dumps(asdict(_compile(lower, kind(**request), devices))), flush=True)


def _compile(lower: Any, request: Kernel | Step, devices: list[Any]) -> Compiled:
    import kernels

    started = time.perf_counter()
    kernels._chosen.clear()
    try:
        compiled = lower(request, devices).compile()
    except Exception as error:  # whatever JAX, Mosaic or XLA refuse with is the answer
        return Compiled(str(error)[:2000], time.perf_counter() - started)
    seconds, cost, memory = time.perf_counter() - started, compiled.cost_analysis() or {}, compiled.memory_analysis()
    return Compiled(
        None, seconds, float(cost.get("flops", 0)), float(cost.get("bytes accessed", 0)), compiled.as_text().count('"tpu_custom_call"'),
        memory.argument_size_in_bytes, memory.temp_size_in_bytes, kernels.chosen(),
    )  # fmt: skip


def lower_kernel(request: Kernel, devices: list[Any]) -> Any:
    """The operation, or its gradient for all arrays, for the topology's first device."""
    import importlib

    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    place = SingleDeviceSharding(devices[0])
    operation = getattr(importlib.import_module(f"kernels.{request.operation}"), request.operation)
    if request.tuning:
        operation = getattr(importlib.import_module(f"kernels.{request.operation}.pallas"), request.operation)
    options = request.options | (request.tuning or {"backend": "pallas"})
    arrays = [
        jax.ShapeDtypeStruct([request.sizes[a] for a in axes], request.dtype if name in IN_PRECISION else jnp.float32, sharding=place)
        for name, axes in INPUTS[request.operation].items()
    ]

    def forward(*arrays: Any) -> Any:
        return operation(*arrays, **options)[0]

    def backward(weight: Any, *arrays: Any) -> Any:
        return jax.vjp(forward, *arrays)[1](weight)

    if not request.backward:
        return jax.jit(forward).lower(*arrays)
    output = jax.eval_shape(forward, *arrays)
    return jax.jit(backward).lower(jax.ShapeDtypeStruct(output.shape, output.dtype, sharding=place), *arrays)


def lower_step(request: Step, devices: list[Any]) -> Any:
    """The trainer's own step (jax_steps.py), for all devices of the topology."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import models
    from models.backends.jax_mesh import Layout
    from models.backends.jax_stack import Stack
    from models.backends.jax_steps import TRAIN_STATIC, adamw, compiled, shardings, train_step

    model = models.build(request.model, request.scale, vocab_size=request.vocab_size, backend="jax")
    layout, table = Layout.of(list(devices), fsdp=request.fsdp), Stack(model).table
    float32 = jnp.float32
    params = {name: jax.ShapeDtypeStruct(p.shape, float32, sharding=layout.sharding(p)) for name, p in table.items()}
    transform = adamw(table, OPTIMIZER)
    _, of_state = shardings(transform, table, layout, params)
    moments = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), jax.eval_shape(transform.init, params), of_state
    )
    rows = request.rows * layout.size
    by_row = NamedSharding(layout.mesh, layout.rows(rows))
    tokens = jax.ShapeDtypeStruct((rows, request.length + 1), jnp.int32, sharding=by_row)
    ids = jax.ShapeDtypeStruct((rows, request.length), jnp.int32, sharding=by_row) if request.segments else None
    weight = jax.ShapeDtypeStruct((rows, request.length), float32, sharding=by_row)
    rate = jax.ShapeDtypeStruct((), float32, sharding=NamedSharding(layout.mesh, P()))
    return compiled(train_step, TRAIN_STATIC, "state", False).lower(
        (params, moments), tokens, ids, weight, rate, model=model, optimizer=tuple(sorted(OPTIMIZER.items())), layout=layout,
        dtype=jnp.dtype(request.precision).type, parts=1, skip_nonfinite=False, rematerialise=request.rematerialise or request.fsdp > 1,
    )  # fmt: skip


if __name__ == "__main__":
    main()
