"""The parts of the scaling benchmark: see benchmarks/scaling.py."""
