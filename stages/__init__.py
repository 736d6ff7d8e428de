"""Floor 3: tokenize, pack, train, evaluate, analyze. Files in, files out; no cluster, no tracker."""

import os

# Threads that wait sleep instead of spinning: on processors that others use too, a step of a small model is else ten times slower.
# Read once, when torch's thread pool is loaded, so it stands here, before any stage.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
