"""Inserts of many rows of one table by one query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import TYPE_CHECKING

import msgspec

from ..dataclass import dataclass
from .operation import Query, Row

if TYPE_CHECKING:
    from .driver import DialectName


@dataclass(frozen=True, slots=True)
class Insert:
    """An INSERT of whole rows.

    `ending` follows the values. The row it returns for an inserted row is found by the column
    `key`, or without one by the order of the rows.
    """

    table: str
    columns: tuple[str, ...]
    ending: str = ""
    key: str = ""
    of_one: str = field(init=False)
    of_many: str = field(init=False)

    def __post_init__(self) -> None:
        columns = ", ".join(self.columns)
        values = ", ".join(f":{name}" for name in self.columns)
        of_one = f"INSERT INTO {self.table} ({columns}) VALUES ({values}) {self.ending}"  # noqa: S608
        # In the order of the rows, because generated numbers follow it.
        of_many = (
            f"INSERT INTO {self.table} ({columns}) SELECT {columns}"  # noqa: S608 - our own names
            f" FROM json_populate_recordset(NULL::{self.table}, CAST(:rows AS text)::json)"
            f" WITH ORDINALITY AS given ORDER BY given.ordinality {self.ending}"
        )
        object.__setattr__(self, "of_one", of_one)
        object.__setattr__(self, "of_many", of_many)

    def query(self, dialect: DialectName, rows: Sequence[Row]) -> Query:
        """Return the query that inserts rows."""
        if dialect == "sqlite":
            return Query(self.of_one, {}, each=rows)
        given = [{name: _as_json(row[name]) for name in self.columns} for row in rows]
        return Query(self.of_many, {"rows": msgspec.json.encode(given).decode()})

    def answers(self, rows: Sequence[Row], returned: Sequence[Row]) -> list[list[Row]]:
        """Return what the query returned for each row."""
        if not self.key:
            return [[row] for row in returned] or [[] for _ in rows]
        by_key = {row[self.key]: row for row in returned}
        return [[by_key[row[self.key]]] if row[self.key] in by_key else [] for row in rows]


def _as_json(value: object) -> object:
    return f"\\x{value.hex()}" if isinstance(value, bytes) else value
