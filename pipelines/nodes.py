"""What this node offers, found without torch and jax."""
import os
def cpus() -> int:
    return len(os.sched_getaffinity(0))
