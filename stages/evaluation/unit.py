"""What every kind of unit is: a part of an evaluation with a key of its own, made alone and kept."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from stages import schemas

if TYPE_CHECKING:
    import pyarrow as pa

    from stages.evaluation.scorer import Scorer


class Unit(Protocol):
    """name: its folder's. key: of what it depends on. inputs: the names of the spec's inputs, beside the weights, that it is made from."""

    @property
    def name(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def inputs(self) -> tuple[str, ...]: ...

    def make(self, folder: Path, inputs: dict[str, Path], scorer: Scorer) -> None:
        """Write its files into `folder`. inputs: the folders of the spec's inputs. Raises Stopped."""

    def tables(self, folder: Path) -> dict[str, pa.Table]:
        """Its rows of the evaluation's tables, by their names, out of its folder."""


def write(path: Path, name: str, key: str, data: dict[str, Any] | list[dict[str, Any]]) -> str:
    """A file of columns, or of rows."""
    import pyarrow as pa

    make = pa.Table.from_pylist if isinstance(data, list) else pa.table
    return schemas.write(path, make(data, schema=schemas.schema(name)), name=name, key=key)


def labelled(table: pa.Table, column: str, value: str | None) -> pa.Table:
    """The table with one value in a text column: one that no unit holds, since it changes nothing that it computed."""
    import pyarrow as pa

    return table.set_column(table.schema.get_field_index(column), column, pa.array([value] * len(table), pa.string()))


def together(name: str, tables: Iterable[pa.Table]) -> pa.Table:
    """The rows of tables of one schema, also of none."""
    import pyarrow as pa

    return pa.concat_tables([schemas.schema(name).empty_table(), *tables])
