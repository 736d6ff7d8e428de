"""`python -m benchmarks NAME ...`: run benchmarks/NAME.py."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path


def main() -> None:
    names = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py") if path.stem != "table")
    if len(sys.argv) < 2 or sys.argv[1] not in names:
        print(f"usage: python -m benchmarks {'|'.join(names)} [--help]", file=sys.stderr)
        sys.exit(2)
    importlib.import_module(f"benchmarks.{sys.argv[1]}").main(sys.argv[2:])


if __name__ == "__main__":
    main()
