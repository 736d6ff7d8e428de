"""The fault campaign's parts: see benchmarks/faults.py."""
