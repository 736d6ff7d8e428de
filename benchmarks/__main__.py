"""`python -m benchmarks NAME ...`: run benchmarks/NAME.py; `record` is table.py's."""

from __future__ import annotations

import importlib
import sys

NAMES = ("kernels", "training", "decode", "layers", "data", "tpu", "faults", "scaling", "recall", "record")
PLACES = {"record": "table"}


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in NAMES:
        print(f"usage: python -m benchmarks {'|'.join(NAMES)} [--help]", file=sys.stderr)
        sys.exit(2)
    name = sys.argv[1]
    importlib.import_module(f"benchmarks.{PLACES.get(name, name)}").main(sys.argv[2:])


if __name__ == "__main__":
    main()
