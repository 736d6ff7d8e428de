"""Mesa in Triton: a walk for [G | H] at the chunks' starts (`walks.py`), then every chunk's solve (`solve.py`) and read-out (`check.py`) by
itself; backward one more solve, a walk the other way, and the chunks' gradients (`inside.py`).

Products (`products.py`): of float32 inputs in float32. Of bfloat16 inputs in float16, with a second solve for the residual where that is too large
(`precision="auto"`), or in high and low parts throughout (`precision="split"`). Inside the chunks of heads in which no chunk needed
it, forward or backward, and keys read enough of the solution, gradients are of single bfloat16 products.

Shapes: B batch, T time, H heads, K key size, V value size, X = V + K, N chunks, M = N B H.
"""

from functools import partial
from typing import Any

import torch

from kernels import arrays
from kernels.launch import divide_up, launch
from kernels.linear_attention import triton as linear
from kernels.linear_attention.walks import gates
from kernels.mesa import check as checker
from kernels.mesa import chunked, inside, walks
from kernels.mesa import solve as solver
from kernels.mesa.reference import State
from kernels.mesa.system import AMOUNTS

Array = Any  # torch.Tensor

# Columns at a time, warps and stages, by MODE; "easy" for heads of which no chunk is flagged, with as many columns at the chunks' ends.
CONFIGURATIONS = {
    "refine": {
        "starts": (64, 4, 2), "iterate": (0, 4, 1), "check": (32, 4, 2), "right_side": (64, 4, 2),
        "ends": (64, 4, 2), "easy ends": (64, 4, 2), "inside": (64, 4, 1), "easy inside": (64, 4, 1),
    },
    "correct": {"iterate": (0, 4, 1)},
    "split": {
        "starts": (64, 4, 2), "iterate": (0, 4, 1), "check": (32, 4, 2), "right_side": (64, 4, 2), "ends": (64, 4, 2),
        "inside": (64, 4, 1),
    },
    "exact": {
        "starts": (32, 4, 1), "iterate": (0, 8, 1), "check": (16, 8, 1), "right_side": (16, 8, 1), "ends": (32, 4, 1),
        "inside": (16, 8, 1),
    },
}  # fmt: skip
LIMIT = 255
"""All registers that a thread can have: unless told, ptxas 13.1 gives 32 to kernels that need more, and spills the rest."""
BOUND = 1.25e-3
"""A chunk with a token of true residual above this (of a right-hand side of norm 1) is solved once more."""


def mesa(q, k, v, log_decay, beta, lam, *, precision: str = "auto", **options: Any) -> tuple[Array, State, dict[str, Array]]:
    """See `kernels.mesa.mesa`. precision: "auto" or "split", of bfloat16 inputs; see above."""
    if precision not in ("auto", "split"):
        raise ValueError(f'mesa: precision is {precision!r}; it must be "auto" or "split".')
    run = partial(differentiable, precision=precision)
    length = 32 if products(q, k, v, precision) == "exact" and max(k.shape[-1], v.shape[-1]) > 64 else 64  # float32 fills shared memory
    return chunked.mesa(q, k, v, log_decay, beta, lam, **options, chunk=length, run=run, read=linear.by_parts)


def forward(q, k, v, log_decay, beta, lam, sign, S_BHKX, *, steps, eps, criterion, start, chunk, precision):
    mode = products(q, k, v, precision)
    dtype = v.dtype
    q, k, v, beta, lam, S_BHKX = operands(mode, q, k, v, beta, lam, S_BHKX)
    decays = gates(log_decay, sign, chunk)
    B, T, H, K = q.shape
    V, N = v.shape[-1], divide_up(T, chunk)
    shape = {"K": K, "V": V, "C": chunk, "BK": tile(K)}
    new = q.new_empty
    M = N * B * H
    high = new((M, K, V + K), dtype=torch.float32 if mode == "exact" else torch.float16)
    low = high if mode == "exact" else torch.empty_like(high)
    scale, last = new((M, 2), dtype=torch.float32), torch.empty_like(S_BHKX)
    keys, sizes, reaches, factors, amounts = prepare(k, v, beta, decays, chunk, mode)
    columns, warps, stages = CONFIGURATIONS[mode]["starts"]
    launch(
        walks.starts, (divide_up(V, columns) + divide_up(K, columns), B * H), keys, v, beta, *decays, factors, amounts, S_BHKX, high, low, scale, last,
        T, H, N, B * H, **shape, BW=columns, MODE=mode, warps=warps, stages=stages,
    )  # fmt: skip
    short = torch.empty_like(q) if mode == "refine" else None
    o = torch.empty_like(v)
    system = (keys, sizes, reaches, amounts, beta, decays, lam, high, low, scale)
    x, taken, residual, flag = solve(q, *system, None, short, None, v, o, steps, eps, criterion, start, chunk, mode)
    kept = {"exact": (), "split": (low, *system[:4]), "refine": (low, *system[:4], short, flag)}[mode]
    return (o.to(dtype), last, taken, residual), (x, high, scale, *decays, *kept)


def prepare(k, v, beta, decays, chunk, mode) -> tuple[torch.Tensor | None, ...]:
    """`walks.prepare`'s keys, sizes, reaches, factors and amounts; of float32 the keys alone, as they are."""
    if mode == "exact":
        return k, None, None, None, None
    B, T, H, K = k.shape
    N, V = divide_up(T, chunk), v.shape[-1]
    M, new = N * B * H, partial(k.new_empty, dtype=torch.float32)
    made = torch.empty_like(k, dtype=torch.float16), new(beta.shape), new((M, chunk)), new((2, M, chunk)), new((M, AMOUNTS.value))
    launch(
        walks.prepare, (M,), k, v, beta, *decays, *made, T, H, N, B * H,
        K=K, V=V, C=chunk, BK=tile(K), BV=tile(V), warps=4, stages=1,
    )  # fmt: skip
    return made


def solve(
    rhs, keys, sizes, reaches, amounts, beta, decays, lam, high, low, scale, x0, short, known, v, given, steps, eps, criterion, start, chunk, mode,
):  # fmt: skip
    """(x, steps taken, residual, `check.check`'s flag) of A x = rhs; short is x too, and what x reads of v goes into `given`. Backward, given
    x0: `given` is `since`, the residual that part of log decay's gradient which is read from the chunk's start, and chunks `known` to be hard
    are in any case. See `check.check`."""
    B, T, H, K = keys.shape
    M, V, back = high.shape[0], high.shape[2] - K, x0 is not None
    shape = {"K": K, "V": V, "C": chunk, "BK": tile(K)}
    new = partial(keys.new_empty, dtype=torch.float32)
    x, taken = new(keys.shape), new(beta.shape, dtype=torch.int32)
    asked, lengths, residual = new(beta.shape), new(beta.shape), new(beta.shape)
    flag, left, goal = (new((M,), dtype=torch.int32), new(keys.shape), new(beta.shape)) if mode == "refine" else (None, None, None)

    def iterate(rhs: torch.Tensor, asked: torch.Tensor, mode: str, correct: bool) -> None:
        _, warps, stages = CONFIGURATIONS["correct" if correct else mode]["iterate"]
        launch(
            solver.iterate, (M,), rhs, keys, reaches, amounts, beta, *decays, lam, high, low, scale, x, short, taken, asked, lengths, flag,
            T, H, B * H, steps, eps, **shape, MODE={"refine": "half"}.get(mode, mode), JACOBI=start == "jacobi" and not correct, CRITERION=criterion,
            CORRECT=correct, warps=warps, stages=stages,
        )  # fmt: skip

    def check(part: str) -> None:
        columns, warps, stages = CONFIGURATIONS[mode]["check"]
        launch(
            checker.check, (M,), rhs, keys, sizes, reaches, amounts, x0, v, beta, *decays, lam, high, low, scale, x, taken, asked, lengths, known, flag,
            left, goal, *((None, None, given, residual) if back else (given, residual, None, None)), T, H, B * H, steps, BOUND, **shape, BJ=columns,
            MODE="exact" if mode == "exact" else "split", BACK=back, PART=part,
            warps=warps, stages=stages, registers=LIMIT if mode == "exact" else None,
        )  # fmt: skip

    iterate(rhs, asked, mode, correct=False)
    if mode != "refine":
        check("only")
    else:
        check("first")
        check("left")
        iterate(left, goal, "split", correct=True)
        check("last")
    return x, taken, residual, flag


def backward(inputs, residuals, gradients, *, steps, eps, criterion, start, chunk, precision):
    q, k, v, log_decay, beta, lam, sign, S_BHKX = inputs
    x, high, scale, *decays = residuals[:6]
    low, keys, sizes, reaches, amounts, short, flag = (*residuals[6:], *[None] * 7)[:7]
    low = high if low is None else low
    do, dlast = gradients[:2]
    mode, dtypes = products(q, k, v, precision), (q.dtype, k.dtype, v.dtype)
    q, k, v, beta, lam, S_BHKX = operands(mode, q, k, v, beta, lam, S_BHKX)
    keys = k if keys is None else keys
    do, dlast = do.to(v.dtype).contiguous(), dlast.float().contiguous()
    B, T, H, K = q.shape
    V, N = v.shape[-1], divide_up(T, chunk)
    M = N * B * H
    shape = {"K": K, "V": V, "C": chunk, "BK": tile(K)}
    new = partial(q.new_empty, dtype=torch.float32)
    rhs, dq, since = new(q.shape), torch.empty_like(q), new(beta.shape)
    columns, warps, stages = CONFIGURATIONS[mode]["right_side"]
    launch(
        solver.right_side, (M,), do, k, v, x, beta, *decays, high, low, scale, rhs, since, T, H, B * H,
        **shape, BV=tile(V), BJ=columns, MODE=mode, warps=warps, stages=stages,
    )  # fmt: skip
    system = (keys, sizes, reaches, amounts, beta, decays, lam, high, low, scale)
    back, _, since, again = solve(rhs, *system, x, dq, flag, None, since, steps, eps, criterion, start, chunk, mode)
    dhigh = new((M, K, V + K), dtype=torch.float32 if mode == "exact" else torch.bfloat16)
    dlow = dhigh if mode == "exact" else torch.empty_like(dhigh)
    columns, warps, stages = CONFIGURATIONS[mode]["ends"]
    tiles = divide_up(V, columns) + divide_up(K, columns)
    dthrough, dS = new((M, tiles, tile(K))), new(S_BHKX.shape)
    # Heads of which no chunk is flagged have no use for low parts.
    passes = [("all", mode)] if mode != "refine" else [("easy", "half"), ("hard", "split")]
    hard = None if mode != "refine" else torch.maximum(flag, again).reshape(N, B * H).amax(0)
    for heads, taken in passes:
        columns, warps, stages = CONFIGURATIONS[mode]["easy ends" if heads == "easy" else "ends"]
        launch(
            walks.ends, (tiles, B * H), x, do, back, *decays, high, low, scale, dlast, dhigh, dlow, dthrough, dS, hard, T, H, N, B * H,
            **shape, BW=columns, MODE=taken, HEADS=heads, warps=warps, stages=stages,
        )  # fmt: skip
    dk, dv, dbeta, dlog_decay, dlam = torch.empty_like(k), torch.empty_like(v), new(beta.shape), new(beta.shape), new((M, K))
    for heads, taken in passes:
        columns, warps, stages = CONFIGURATIONS[mode]["easy inside" if heads == "easy" else "inside"]
        solutions = (short, dq) if heads == "easy" else (x, back)
        launch(
            inside.gradients, (M,), *solutions, do, k, v, beta, *decays, dhigh, dlow, since, dthrough, dk, dv, dbeta, dlog_decay, dlam,
            hard, T, H, B * H, **shape, BV=tile(V), BJ=columns, TILES=tiles, MODE=taken, HEADS=heads, warps=warps, stages=stages,
            registers=LIMIT if mode == "exact" else None,
        )  # fmt: skip
    dlam = dlam.reshape(N * B, H, K).sum(0)
    dq, dk, dv = (x.to(dtype) for x, dtype in zip((dq, dk, dv), dtypes, strict=True))
    return dq, dk, dv, dlog_decay, dbeta, dlam.to(inputs[5].dtype), None, dS


differentiable = arrays.custom_gradient(forward, backward, outputs=4)


def products(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, precision: str) -> str:
    """The kernels' MODE."""
    if any(x.dtype != torch.bfloat16 for x in (q, k, v)):
        return "exact"
    return "refine" if precision == "auto" else "split"


def operands(mode: str, q, k, v, *rest: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Contiguous; q, k, v in one dtype, the rest in float32."""
    return [x.to(torch.float32 if mode == "exact" else torch.bfloat16).contiguous() for x in (q, k, v)] + [
        None if x is None else x.float().contiguous() for x in rest
    ]


def tile(size: int) -> int:
    """The next power of two that tensor cores take."""
    return max(16, 1 << (size - 1).bit_length())
