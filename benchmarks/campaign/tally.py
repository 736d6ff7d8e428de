"""What the tries of each fault came to."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

LOST, WRONG, AGAIN, ORPHAN, HALF, UNSAID = "lost", "wrong", "made again", "orphans", "half visible", "not said"
KINDS = (LOST, WRONG, AGAIN, ORPHAN, HALF, UNSAID)
"""What must not come of a fault. not said: it ended in a traceback where a sentence was due."""

Found = list[tuple[str, str]]  # (kind, why)


@dataclass
class Tally:
    """By fault and stage: times tried, and how many tries had each of KINDS."""

    counts: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)

    def add(self, fault: str, stage: str, seconds: float, found: Found) -> None:
        row = self.counts.setdefault((fault, stage), {"tried": 0, **dict.fromkeys(KINDS, 0), "seconds": 0.0})
        row["tried"] += 1
        row["seconds"] += seconds
        for kind in {kind for kind, _ in found}:
            row[kind] += 1
        for kind, why in found:
            self.told.append(f"{fault}: {kind}: {why}")
            print(self.told[-1], file=sys.stderr, flush=True)

    @property
    def failed(self) -> bool:
        return any(row[kind] for row in self.counts.values() for kind in KINDS)

    def sums(self) -> dict[str, int]:
        """Over all faults and stages."""
        return {name: sum(row[name] for row in self.counts.values()) for name in ("tried", *KINDS)}

    def rows(self) -> list[dict[str, Any]]:
        return [{"fault": fault, "stage": stage, **row} for (fault, stage), row in self.counts.items()]
