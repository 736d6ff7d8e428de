"""TPU slices: their shapes and names, as Google's data sheets and Ray have them.

A slice is chips in a grid, four on a host, but for v5e and v6e, of which up to eight are on one. Its name counts cores up to v5p (v5p-16: two a chip) and chips after it.
"""

from __future__ import annotations

import math
import re

FLAT = ("v5e", "v6e")  # a plane of chips; the others are a cube
CORES = {"v2": 2, "v3": 2, "v4": 2, "v5p": 2, "v7x": 2}  # a chip, where the name counts them
SPELLINGS = {"v5litepod": "v5e", "v5lite": "v5e", "tpu7x": "v7x"}
IN_RAY = {"v5e": "v5litepod", "v5lite": "v5litepod", "tpu7x": "v7x"}
PLANES = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
CUBES = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8", 512: "8x8x8", 1024: "8x8x16"}
HOST = 4


def topology(text: str) -> str:
    """Chips along each axis, "2x2x2", from that or from a slice's name, "v5p-16". ValueError where it is neither."""
    text = text.strip().lower()
    if re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", text):
        return text
    if match := re.fullmatch(r"(v[2-7][a-z]*|tpu7x)-(\d+)", text):
        generation = SPELLINGS.get(match[1], match[1])
        shapes = PLANES if generation in (*FLAT, "v2", "v3") else CUBES
        if shape := shapes.get(int(match[2]) // CORES.get(generation, 1)):
            return shape
    raise ValueError(f"{text!r} is no TPU slice; write its chips along each axis, as 2x4 or 2x2x2, or its name, as v5p-16")


def chips(topology: str) -> int:
    return math.prod(int(part) for part in topology.split("x"))


def generation(type: str) -> str:
    """Of Ray's accelerator type: "v5p" of "TPU-V5P"."""
    name = type.lower().removeprefix("tpu-")
    return SPELLINGS.get(name, name)


def hosts(topology: str, type: str) -> int:
    """How many hosts a slice of a type has."""
    if generation(type) in FLAT and topology in ("1x1", "2x2", "2x4"):
        return 1
    return max(1, chips(topology) // HOST)


def pod_type(topology: str, type: str) -> str:
    """A slice's name in Ray's labels: "v5p-16"."""
    name = type.lower().removeprefix("tpu-")
    return f"{name}-{chips(topology) * CORES.get(generation(type), 1)}"


def ray_type(name: str, kind: str) -> str:
    """What Ray calls the accelerators of a kind that are called `name` here: "TPU-V5P" of "v5p", "H100" of "h100"."""
    if kind != "tpu":
        return name.upper()
    plain = name.lower().removeprefix("tpu-")
    return f"TPU-{IN_RAY.get(plain, plain).upper()}"
