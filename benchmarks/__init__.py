"""Benchmarks: timed by hand, never by a test. `python -m benchmarks NAME` prints a table and writes it to benchmarks/results/NAME.parquet."""
