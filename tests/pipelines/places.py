"""Places for a store: a folder, a bucket in this process's memory, and one behind an S3 server of its own (moto), where that is installed."""

from __future__ import annotations

import io
import logging
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

KINDS = ("folder", "memory", "s3")
SETTINGS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}  # no secrets: moto takes any


@contextmanager
def server() -> Iterator[str]:
    """An S3 server on loopback with a bucket named `bucket`; yields its address. Skips the test where moto or s3fs is missing."""
    moto = pytest.importorskip("moto.server", reason="the local S3 server is missing: pip install 'strata[buckets]'")
    pytest.importorskip("s3fs", reason="S3 stores need s3fs: pip install 'strata[s3]'")
    import fsspec
    import s3fs

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    running = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    url = f"http://{host}:{port}"
    before = {name: os.environ.get(name) for name in (*SETTINGS, "FSSPEC_S3_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")}
    os.environ |= SETTINGS | {"FSSPEC_S3_ENDPOINT_URL": url}
    fsspec.config.conf["s3"] = {"endpoint_url": url}
    try:
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem(endpoint_url=url).makedirs("bucket", exist_ok=True)
        yield url
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        fsspec.config.conf.pop("s3", None)
        s3fs.S3FileSystem.clear_instance_cache()
        running.stop()


def url_of(kind: str, folder: Path) -> str:
    """A fresh place of a kind. `folder`: of the test."""
    match kind:
        case "folder":
            return str(folder / "store")
        case "memory":
            return f"memory://{uuid.uuid4().hex}/store"
    return f"s3://bucket/{uuid.uuid4().hex}"


def _opened_apart(self: MemoryFileSystem, path: str, mode: str = "rb", *, _open: Any = MemoryFileSystem._open, **options: Any) -> Any:
    """fsspec's readers in memory share one file and its position, so threads read each other's bytes; no bucket's do."""
    file = _open(self, path, mode, **options)
    return io.BytesIO(file.getvalue()) if mode == "rb" else file


MemoryFileSystem._open = _opened_apart
