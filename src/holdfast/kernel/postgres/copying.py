"""All of a store's tables at once: read from one PostgreSQL snapshot, or vacuumed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import psycopg
from psycopg import sql

from .problems import translate

TABLES = """
SELECT tablename FROM pg_tables WHERE schemaname = %s AND starts_with(tablename, 'hf_') ORDER BY 1
"""


class Snapshot:
    """One consistent moment of a schema."""

    def __init__(self, dsn: str, schema: str) -> None:
        self._dsn = dsn
        self._schema = schema

    def __enter__(self) -> Snapshot:
        try:
            self._connection = psycopg.connect(self._dsn, prepare_threshold=None)
        except psycopg.Error as error:
            raise translate(error) from error
        self._connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        self._connection.read_only = True
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def count(self, table: str) -> int:
        """Return how many rows a table has."""
        statement = sql.SQL("SELECT count(*) FROM {}").format(self._name(table))
        row = self._connection.execute(statement).fetchone()
        return int(row[0]) if row is not None else 0

    def read(
        self, table: str, columns: Sequence[str], rows_per_fetch: int
    ) -> Iterator[list[tuple[Any, ...]]]:
        """Yield a table's rows, a bounded number at a time."""
        names = sql.SQL(", ").join(map(sql.Identifier, columns))
        statement = sql.SQL("SELECT {} FROM {}").format(names, self._name(table))
        with self._connection.cursor(f"copy_{table}", binary=True) as cursor:
            cursor.execute(statement)
            while found := cursor.fetchmany(rows_per_fetch):
                yield found

    def _name(self, table: str) -> sql.Identifier:
        return sql.Identifier(self._schema, table)


def vacuum(dsn: str, schema: str) -> None:
    """Vacuum and analyse every table of a store, each by itself, on a connection of its own."""
    try:
        with psycopg.connect(dsn, autocommit=True, prepare_threshold=None) as connection:
            found = connection.execute(TABLES, [schema]).fetchall()
            for (table,) in found:
                name = sql.Identifier(schema, table)
                connection.execute(sql.SQL("VACUUM (ANALYZE) {}").format(name))
    except psycopg.Error as error:
        raise translate(error) from error
