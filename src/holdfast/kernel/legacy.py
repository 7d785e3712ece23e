"""Read-only access to SQLite databases of other programs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import apsw

from ..errors import CorruptStore, HoldfastError, NotAStore
from .operation import Row
from .sqlite.connection import BUSY_MS, require_place, translate

# A virtual table has no page of its own.
LIST_LEGACY_TABLES = """
SELECT name FROM sqlite_master WHERE type = 'table' AND rootpage > 0 ORDER BY name
"""
LIST_LEGACY_COLUMNS = "SELECT name, hidden FROM pragma_table_xinfo(:table)"


class LegacyFile:
    """One snapshot of a foreign database."""

    def __init__(self, path: Path) -> None:
        self._path = path
        require_place(path, None)
        try:
            self._connection = connect_read_only(path)
            # Nothing that the file defines (views, triggers) may run functions.
            self._connection.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 1)
            self._connection.pragma("trusted_schema", 0)
            self._connection.pragma("cell_size_check", 1)
            self._connection.execute("BEGIN")
        except apsw.Error as error:
            raise self._error(error) from error

    def columns(self) -> dict[str, set[str]]:
        """Return the tables and their columns, without views and what else is computed.

        A few bytes of SQL can compute a value of a gigabyte for every row.
        """
        found = {}
        for table in [str(row["name"]) for row in self.rows(LIST_LEGACY_TABLES)]:
            columns = list(self.rows(LIST_LEGACY_COLUMNS, table=table))
            if not any(column["hidden"] for column in columns):
                found[table] = {str(column["name"]) for column in columns}
        return found

    def rows(self, sql: str, **parameters: str) -> Iterator[Row]:
        """Yield the rows of a query."""
        try:
            cursor = self._connection.execute(sql, parameters)
            for row in cursor:
                names = (column[0] for column in cursor.get_description())
                yield dict(zip(names, row, strict=True))
        except apsw.Error as error:
            raise self._error(error) from error
        except UnicodeDecodeError as error:
            raise CorruptStore(f"{self._path} has text that is not UTF-8: {error}") from error

    def close(self) -> None:
        """Close the file."""
        self._connection.close(force=True)

    def __enter__(self) -> LegacyFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _error(self, error: apsw.Error) -> HoldfastError:
        if isinstance(error, apsw.NotADBError):
            return NotAStore(f"{self._path} is not an SQLite database")
        return translate(error, self._path)


def connect_read_only(path: Path) -> apsw.Connection:
    """Open a connection that changes nothing in the file and leaves no files beside it."""
    # A read-only connection to a WAL database leaves an empty WAL behind. A writable one removes
    # it on close, but would also checkpoint an existing WAL. A hot journal must be rolled back
    # before the file can be read, which only a writable connection can do.
    has_wal, has_journal = (
        os.path.exists(path.with_name(path.name + suffix)) for suffix in ("-wal", "-journal")
    )
    is_read_only = has_wal and not has_journal
    flags = apsw.SQLITE_OPEN_READONLY if is_read_only else apsw.SQLITE_OPEN_READWRITE
    connection = apsw.Connection(str(path), flags=flags)
    connection.set_busy_timeout(BUSY_MS)
    connection.pragma("query_only", 1)
    return connection
