"""Every test: no network calls home, threads that wait soon sleep (see stages/__init__.py), and interrupts arrive."""

import os
import signal

os.environ.setdefault("GOMP_SPINCOUNT", "10000")
os.environ.setdefault("DVC_NO_ANALYTICS", "1")
os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# libtpu, where it is installed, looks for a TPU host and logs that there is none
os.environ |= {
    "TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0",
    "TPU_LOG_DIR": "disabled", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}  # fmt: skip
# XLA compiles in a quarter of the time: what these tests run is tiny
FAST = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("XLA_FLAGS", FAST)
# A shell starts what runs in its background deaf to SIGINT, and so would be what these tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
