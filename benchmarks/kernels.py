"""The sequence operations on a GPU: forward and backward, ours and the peers that are installed, with the error against float64 beside every time.

*called* is a call from Python, again and again; *graph* the same inside one CUDA graph: the kernels without the host. An error is
||x - reference|| / ||reference||, on the first sequence of the batch, against our chunked form in float64 on the same (rounded) inputs: of the output, and the
largest of the gradients. The roof is what the card's own rates allow for the fewest bytes (inputs and outputs once, forward and backward), the products,
and the special functions; which of them is largest binds.

Each is measured in a process that another takes the place of when it fails; first all that is ours, then the peers. Before, everything is compiled by
several processes at once.

    python -m benchmarks kernels [--only TEXT ...] [--who ours|peers|all] [--seconds N] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

from benchmarks import isolated
from benchmarks.operations import Case, Tensors, cases
from benchmarks.table import Row, report, said
from kernels import launch

# Of an H200, measured for copies and products, computed for the reciprocal unit: bytes/s, FLOP/s of dense bfloat16, special functions/s.
RATES = {"bytes": 4.3e12, "products": 790e12, "special": 4.19e12}
OURS = "ours"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks kernels", description="Operations on a GPU, beside peers.")
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="cases that have one of these in their name and size")
    parser.add_argument("--who", choices=("ours", "peers", "all"), default="all")
    parser.add_argument("--milliseconds", type=int, default=60, help="how long to repeat each")
    parser.add_argument("--seconds", type=float, default=None, help="begin no entry later than that; compiling counts")
    parser.add_argument("--processes", type=int, default=12, help="that compile beforehand; 0 for none")
    parser.add_argument("--small", action="store_true", help="sizes for a trial, on a CPU too")
    parser.add_argument("--out", default=None, help="folder of the table; benchmarks/results if not given")
    options = parser.parse_args(arguments)
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.small:
        raise SystemExit("python -m benchmarks kernels needs a CUDA card; `python -m benchmarks layers` measures exactness on a CPU.")
    began, given = time.perf_counter(), {"device": device, "small": options.small}
    entries = [entry for entry in _entries(**given) if _wanted(entry, options)]
    if not entries:
        raise SystemExit(f"No case has {' or '.join(options.only)} in its name.")
    if options.processes and device == "cuda":
        isolated.prepare(
            compile_one, _compiling(entries, **given), processes=options.processes, seconds=(options.seconds or 240) / 2, **given
        )
        print(f"compiled in {time.perf_counter() - began:.0f} s", flush=True)
    left = None if options.seconds is None else options.seconds - (time.perf_counter() - began)
    rows = isolated.each(measured, entries, seconds=left, milliseconds=options.milliseconds, **given)
    print(report("kernels", (said(in_order(row)) for row in rows), folder=options.out))


COLUMNS = (
    "operation", "size", "who", "graph ms", "graph forward ms", "called ms", "called forward ms", "error o", "error gradients", "worst", "steps mean", "steps most",
    "solved twice", "residual", "roof ms", "binds", "share of roof", "target ms", "note",
)  # fmt: skip


def in_order(row: Row) -> Row:
    return {column: row.get(column) for column in COLUMNS}


def _entries(**given: Any) -> list[Row]:
    pairs = [(case, who) for case in cases(**given) for who in (OURS, *case.peers)]
    pairs.sort(key=lambda pair: pair[1] != OURS)
    return [{"operation": case.name, "size": case.size, "who": who} for case, who in pairs]


def _compiling(entries: list[Row], **given: Any) -> list[Row]:
    """Entries that between them compile all that there is to compile."""
    found, known = {}, {(case.name, case.size): case for case in cases(**given)}
    for entry in entries:
        case = known[entry["operation"], entry["size"]]
        found.setdefault((case.compiles_as or case.name, case.size, entry["who"]), entry)
    return list(found.values())


def _wanted(entry: Row, options: argparse.Namespace) -> bool:
    who = options.who == "all" or (options.who == "ours") == (entry["who"] == OURS)
    return who and any(text in f"{entry['operation']}, {entry['size']}" for text in options.only)


@functools.lru_cache(1)
def _cases(device: str, small: bool) -> dict[tuple[str, str], Case]:
    warnings.filterwarnings("ignore", category=UserWarning)
    return {(case.name, case.size): case for case in cases(device, small=small)}


def _call(entry: Row, case: Case) -> Callable[..., Any]:
    return case.call if entry["who"] == OURS else case.peers[entry["who"]]


def compile_one(entry: Row, *, device: str, small: bool) -> None:
    """All that one entry compiles; its inputs are of their real size, on which kernels are specialised."""
    import torch

    case = _cases(device, small)[entry["operation"], entry["size"]]
    given = case.make()
    _both(_call(entry, case), given, _output_gradient(case, given))[0]()
    torch.cuda.synchronize()


def measured(entry: Row, *, milliseconds: int, device: str, small: bool) -> Row:
    """What `isolated.each` asks of an entry."""
    case = _cases(device, small)[entry["operation"], entry["size"]]
    call, given = _call(entry, case), case.make()
    roof = {name: amount / RATES[name] * 1e3 for name, amount in case.both.items()}
    binds = max(roof, key=lambda name: roof[name])
    row = {"roof ms": roof[binds], "binds": binds, "target ms": case.target_ms if entry["who"] == OURS else None}
    both, leaves = _both(call, given, _output_gradient(case, given))
    with launch.recording() as launches:
        result, found = both()
    row["solved twice"] = _solved_twice(launches)
    row |= _errors(case, leaves, _output(result), found, _exact(entry["operation"], entry["size"], device, small))
    info = result[2] if isinstance(result, tuple) and len(result) > 2 and isinstance(result[2], dict) else {}
    if info:
        steps = info["steps"]
        row |= {"steps mean": float(steps.float().mean()), "steps most": int(steps.max()), "residual": float(info["residual"].max())}
    del result, found, info, launches
    forward = lambda: call(*given.values())  # noqa: E731
    timed = functools.partial(median_ms, device=device, repeat_ms=milliseconds)
    row |= {"called forward ms": timed(forward), "called ms": timed(both)}
    if device == "cuda":
        row["graph forward ms"] = timed(_captured(forward))
        row["graph ms"] = timed(_captured(both))
        row["share of roof"] = row["roof ms"] / row["graph ms"]
    return row


def _solved_twice(launches: list[launch.Launch]) -> float | None:
    """The share of Mesa's chunks, forward and backward, in which the solve in half precision was not enough."""
    import torch

    checks = [x for x in launches if x.constants.get("PART") == "first"]
    flags = [dict(zip(x.kernel.arg_names, x.arguments, strict=False))["flag"] for x in checks]
    return float((torch.cat(flags) & 1).float().mean()) if flags else None


def _both(call: Callable[..., Any], given: Tensors, do: Any) -> tuple[Callable[[], tuple[Any, Any]], Tensors]:
    """A call and its gradients by `do`, the output's; and the leaves."""
    import torch

    leaves = {n: x.detach().requires_grad_(x.is_floating_point()) for n, x in given.items()}
    wanted = [x for x in leaves.values() if x.requires_grad]

    def both() -> tuple[Any, Any]:
        result = call(*leaves.values())
        return result, torch.autograd.grad(_output(result), wanted, do, allow_unused=True)

    return both, leaves


def _output(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def _output_gradient(case: Case, given: Tensors) -> Any:
    """Random, the same at every call, in the output's dtype; 1 where that is a loss."""
    import torch

    o = _output(case.call(*given.values()))
    return (
        torch.randn(o.shape, generator=torch.Generator(o.device).manual_seed(1), device=o.device).to(o.dtype)
        if o.ndim
        else torch.ones_like(o)
    )


@functools.lru_cache(None)
def _exact(operation: str, size: str, device: str, small: bool) -> Tensors:
    """Output and gradients in float64, of the batch's first sequence or of all of it."""
    case = _cases(device, small)[operation, size]
    given = case.make()
    do = _output_gradient(case, given)
    sampled = {n: x if case.whole or n in case.fixed else x[:1] for n, x in given.items()}
    double = {n: x.double() if x.is_floating_point() else x for n, x in sampled.items()}
    both, leaves = _both(case.exact, double, (do if case.whole else do[:1]).double())
    result, found = both()
    return {"o": _output(result).detach()} | dict(zip([n for n, x in leaves.items() if x.requires_grad], found, strict=True))


def _errors(case: Case, leaves: Tensors, o: Any, found: Any, exact: Tensors) -> Row:
    """Gradients of what has no batch axis sum over it, so they are left out here; tests bound them."""

    def error(x: Any, reference: Any) -> float:
        x = x if case.whole else x[:1]
        size = reference.norm()
        return float((x.double() - reference).norm() / size) if size > 0 else float(x.double().norm())

    names = [n for n, x in leaves.items() if x.requires_grad]
    gradients = {
        n: error(g, exact[n]) for n, g in zip(names, found, strict=True) if g is not None and exact[n] is not None and n not in case.fixed
    }
    worst = max(gradients, key=lambda n: gradients[n])
    return {"error o": error(o, exact["o"]), "error gradients": gradients[worst], "worst": f"d {worst}"}


def median_ms(run: Callable[[], Any], *, device: str, repeat_ms: int) -> float:
    """The median."""
    if device == "cuda":
        from triton.testing import do_bench

        return do_bench(run, warmup=10, rep=repeat_ms, return_mode="median")
    times = []
    for _ in range(3):
        began = time.perf_counter()
        run()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def _captured(run: Callable[[], Any]) -> Callable[[], None]:
    """`run` as one CUDA graph."""
    import torch

    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(beside)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay
