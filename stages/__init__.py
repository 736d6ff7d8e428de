"""Floor 3: tokenize, pack, train, evaluate, analyze. Files in, files out; no cluster, no tracker."""

import os

# Threads that wait spin for some ten microseconds, then sleep: without a bound, a step of a small model is ten times slower on
# processors that others use too. Read once, when torch's thread pool is loaded, so it stands here, before any stage.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
