"""A study's store, by where it is."""

from pathlib import Path

from pipelines import objects
from pipelines.store import Store


def open_store(where: str | Path) -> Store:
    """The store in a folder, or in the bucket of a URL (s3://bucket/path, gs://bucket/path). ValueError where a bucket cannot be used."""
    if not objects.is_url(where):
        return Store(Path(where))
    from pipelines.remote import RemoteStore  # what it needs is an extra

    return RemoteStore(str(where))
