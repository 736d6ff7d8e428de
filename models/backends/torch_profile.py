"""Torch: a profile of what runs from here on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

ROWS = 40


def start_profile(folder: Path) -> Callable[[], None]:
    """Begin one; what is returned ends it and writes trace.json.gz (for Perfetto or chrome://tracing) and kernels.txt, the longest first."""
    gpu = torch.cuda.is_available()
    running = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])])
    running.start()

    def end() -> None:
        if gpu:
            torch.cuda.synchronize()
        running.stop()
        running.export_chrome_trace(str(folder / "trace.json.gz"))
        order = f"self_{'cuda' if gpu else 'cpu'}_time_total"
        table = running.key_averages().table(sort_by=order, row_limit=ROWS, max_name_column_width=90)
        (folder / "kernels.txt").write_text(table + "\n")

    return end
