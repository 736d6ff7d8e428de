"""Load what a stage loads, once, before children are made of this process."""

from __future__ import annotations

import importlib

MODULES = (
    "torch", "pyarrow.parquet", "pyarrow.compute", "tokenizers", "safetensors.numpy", "gigatoken", "rich.progress", "matplotlib.pyplot", "ruamel.yaml",
    "models.backends.torch", "pipelines.cli", "pipelines.check", "pipelines.run", "pipelines.resolve", "pipelines.forget", "pipelines.ahead", "pipelines.approval", "pipelines.progress",
    "stages.vocabulary", "stages.tokenize", "stages.pack", "stages.items", "stages.train", "stages.evaluate", "stages.analyze",
)  # fmt: skip


def load() -> None:
    """Nothing is computed: a thread of a library's would not come along into a child."""
    for name in MODULES:
        importlib.import_module(name)
