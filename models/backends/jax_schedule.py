"""What the TPU's compiler wrote about a kernel (see `jax_ahead.ask`'s dump): its bundles, what they keep busy, spills, fast memory.

A TPU core issues one bundle of instructions a cycle, so bundles times how often they run are cycles, but for waits on HBM. Bundles are
counted by depth: 0 once, 1 once a program of the grid, 2 once an iteration of the loop inside.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

UTILIZATION = "*-final_hlo-static-per-bundle-utilization.txt"
BUNDLE = re.compile(r"\s*(0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?\s*:\s*(>*)\s*\{")
TURNS = re.compile(r"scmp\.ge\.s32\.totalorder \S+ (\d+) /\* loop exit test \*/")
COST = re.compile(r'"(flops|bytes_accessed)":"(\d+)"')
ALLOCATION = re.compile(r"#allocation\d+ \[shape = [^=]*=vmem, size = (0x[0-9a-f]+)")
REGISTER = 8 * 128 * 4
PIPELINE = 2
"""Turns of the grid's loop that only fill or drain its copies."""


@dataclass(frozen=True)
class Schedule:
    """One kernel. programs: of its grid, on one core (a v5p's two share them); turns: of the loop inside, where it is a number. bundles by depth; busy: slots used, by unit and depth;
    slots: what a bundle has of each unit; vmem: bytes, spilled registers among them. flops, bytes: of the whole kernel, as it states them
    (0 where it does not)."""

    name: str
    programs: int
    turns: int | None
    bundles: tuple[int, int, int]
    busy: dict[str, tuple[int, int, int]]
    slots: dict[str, int]
    vmem: int
    flops: float
    bytes: float

    def cycles(self, turns: int) -> int:
        """Of the whole kernel, where the loop inside a program has so many turns."""
        return self.bundles[0] + self.programs * (self.bundles[1] + turns * self.bundles[2])

    def occupancy(self, unit: str, turns: int) -> float:
        """The share of a unit's slots that programs use."""
        used = self.busy[unit][1] + turns * self.busy[unit][2]
        return used / self.slots[unit] / max(self.bundles[1] + turns * self.bundles[2], 1)

    @property
    def spills(self) -> int:
        """Registers that one pass over the code stores for want of registers."""
        return sum(self.busy["VSTORE:SPILL"])


def schedules(dump: Path) -> list[Schedule]:
    """Every Pallas kernel of a dump, in the order in which they were compiled."""
    found: dict[str, Schedule] = {}
    for path in sorted(dump.glob(UTILIZATION)):
        stem = path.name.removesuffix(UTILIZATION.removeprefix("*-"))
        identity = re.match(r"\d+-(.+?)-\d+-$", stem)
        files = {kind: next(iter(dump.glob(f"{path.name.split('-')[0]}-{identity[1]}-*{kind}.txt")), None) for kind in KINDS}
        said = None if None in files.values() else files["schedule-analysis_final_bundles"].read_text()
        if identity[1] == "TLP" or said is None or "tpu_custom_call" not in said:
            continue
        cost = {name: float(number) for name, number in COST.findall(said)}
        found[identity[1]] = _read(identity[1], path, files["-final_bundles"], files["-original"], cost)
    return list(found.values())


KINDS = ("schedule-analysis_final_bundles", "-final_bundles", "-original")


def _read(name: str, utilization: Path, bundles: Path, allocated: Path, cost: dict[str, float]) -> Schedule:
    _, header, capacity, _, *rows = utilization.read_text().splitlines()
    units, slots = [unit.strip() for unit in header.split(",")], [int(x) for x in capacity.split()]
    used = [[int(x) for x in row.split()] for row in rows if row.strip()]
    text = bundles.read_text()
    depth, turns, level = {}, {}, 0
    for line in text.splitlines():
        if match := BUNDLE.match(line):
            level = min(len(match[2]), 2)
            depth[int(match[1], 16)] = level
        if match := TURNS.search(line):
            turns[level] = int(match[1])
    at = [[i for i in range(len(used)) if depth.get(i, 0) == level] for level in range(3)]
    busy = {unit: tuple(sum(used[i][column] for i in level) for level in at) for column, unit in enumerate(units)}
    spilled = len(set(re.findall(r"vmem:\[#allocation(\d+)_spill\]", text)))
    vmem = sum(int(size, 16) for size in ALLOCATION.findall(allocated.read_text())) + spilled * REGISTER
    programs = turns[1] - PIPELINE if 1 in turns else 1
    return Schedule(
        name, programs, turns.get(2), tuple(map(len, at)), busy, dict(zip(units, slots, strict=True)), vmem, cost.get("flops", 0.0),
        cost.get("bytes_accessed", 0.0),
    )  # fmt: skip
