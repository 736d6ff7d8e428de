"""A unit of evaluation: what the heads of a model's Mesa layers do on a few validation sequences (MesaNet, appendix O).

A row per block, head and bin of positions first..position, over all sequences: the gates, the solver's steps to TOLERANCE and the cosine of what is read with
and without the solve are means over the bin's tokens; `condition` is that of H_t + Lambda behind the bin's last token, a mean over sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from models import internals
from models.backbone import Model
from stages import schemas

NAME = "internals"
TOLERANCE = 1e-3  # of a token's first residual (the paper's)
MEANS = ("gamma", "beta", "steps", "cosine")


def bins(length: int) -> list[tuple[int, int]]:
    """(first, last) of positions 1..length, each last twice the one before, and the length."""
    lasts = [1 << power for power in range(length.bit_length()) if 1 << power < length] + [length]
    return list(zip([1, *(last + 1 for last in lasts[:-1])], lasts, strict=True))


def make(
    folder: Path, *, key: str, model: Model, params: dict[str, Any], sequences: Sequence[tuple[np.ndarray, np.ndarray | None]], dtype: Any, seen: Callable[[int], None]
) -> None:  # fmt: skip
    """Look at sequences (inputs int32 [T], segments int32 [T] or None), one at a time, and write internals.parquet into `folder`.

    seen: called with the number of sequences looked at, after each.
    """
    import pyarrow as pa

    spans = bins(len(sequences[0][0]))
    lasts = tuple(last for _, last in spans)
    sums: dict[int, dict[str, np.ndarray]] = {}
    lams: dict[int, np.ndarray] = {}
    for number, (tokens_T, segments_T) in enumerate(sequences, start=1):
        given = {"tolerance": TOLERANCE, "segments": None if segments_T is None else segments_T[None], "dtype": dtype}
        for block, found in internals.look(model, params, tokens_T[None], lasts, **given).items():
            lams[block] = found["lambda"]
            for name, value_PH in _binned(found, spans).items():
                mine = sums.setdefault(block, {})
                mine[name] = mine.get(name, 0.0) + value_PH
        seen(number)
    rows = [
        {"block": block, "head": head, "first": first, "position": last, "sequences": len(sequences)}
        | {name: float(values[place, head]) / len(sequences) for name, values in mine.items()}
        | {"lambda_low": float(lam.min()), "lambda_mean": float(lam.mean()), "lambda_high": float(lam.max())}
        for block, mine in sums.items()
        for head, lam in enumerate(lams[block])
        for place, (first, last) in enumerate(spans)
    ]
    table = pa.Table.from_pylist(rows, schema=schemas.schema(NAME))
    schemas.write(folder / f"{NAME}.parquet", table, name=NAME, key=key)


def _binned(found: dict[str, np.ndarray], spans: list[tuple[int, int]]) -> dict[str, np.ndarray]:
    """name -> [P, H] of one sequence."""
    eigenvalues_PHK = np.linalg.eigvalsh(found["system"][0].astype(np.float64))  # rising
    means = {name: np.stack([found[name][0, first - 1 : last].mean(0, dtype=np.float64) for first, last in spans]) for name in MEANS}
    return means | {"condition": eigenvalues_PHK[..., -1] / eigenvalues_PHK[..., 0]}
