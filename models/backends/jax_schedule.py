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
GRID = re.compile(r"scmp\.ge\.s32\.totalorder \S+ (\d+) /\* loop exit test \*/")
ALLOCATION = re.compile(r"#allocation\d+ \[shape = [^=]*=vmem, size = (0x[0-9a-f]+)")
REGISTER = 8 * 128 * 4
PIPELINE = 2
"""Turns of the grid's loop that only fill or drain its copies."""


@dataclass(frozen=True)
class Schedule:
    """One kernel. bundles by depth; busy: slots used, by unit and depth; slots: what a bundle has of each unit."""

    name: str
    programs: int
    bundles: tuple[int, int, int]
    busy: dict[str, tuple[int, int, int]]
    slots: dict[str, int]
    vmem: int

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
        if None in files.values() or "tpu_custom_call" not in files["schedule-analysis_final_bundles"].read_text():
            continue
        found[identity[1]] = _read(identity[1], path, files["-final_bundles"], files["-post-ra"])
    return list(found.values())


KINDS = ("schedule-analysis_final_bundles", "-final_bundles", "-post-ra")


def _read(name: str, utilization: Path, bundles: Path, allocated: Path) -> Schedule:
    _, capacity, _, *rows = utilization.read_text().splitlines()[0:3] + utilization.read_text().splitlines()[4:]
    units = [unit.strip() for unit in capacity.split(",")]
    slots = [int(x) for x in utilization.read_text().splitlines()[2].split()]
    used = [[int(x) for x in row.split()] for row in rows if row.strip()]
    text = bundles.read_text()
    depth = {int(match[1], 16): min(len(match[2]), 2) for match in map(BUNDLE.match, text.splitlines()) if match}
    at = [[i for i in range(len(used)) if depth.get(i, 0) == level] for level in range(3)]
    busy = {unit: tuple(sum(used[i][column] for i in level) for level in at) for column, unit in enumerate(units)}
    grid = GRID.search(text)
    spilled = len(set(re.findall(r"vmem:\[#allocation(\d+)_spill\]", text)))
    vmem = sum(int(size, 16) for size in ALLOCATION.findall(allocated.read_text())) + spilled * REGISTER
    programs = int(grid[1]) - PIPELINE if grid else 1
    return Schedule(name, programs, tuple(map(len, at)), busy, dict(zip(units, slots, strict=True)), vmem)
