"""`python -m pipelines` is `strata`."""

from pipelines.cli import main

main()
