"""Copying all tables of a store from one PostgreSQL snapshot, and vacuuming them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import apsw
import psycopg
from psycopg import sql

from ..driver import Progress, Settings
from ..opening import open_for_writing
from ..url import PostgresTarget, SqliteTarget
from .errors import translate

LIST_POSTGRES_TABLES = """
SELECT tablename FROM pg_tables WHERE schemaname = %s AND starts_with(tablename, 'hf_') ORDER BY 1
"""


LIST_COLUMNS = """
SELECT column_name FROM information_schema.columns WHERE table_schema = %s AND table_name = %s
"""
LIST_SQLITE_TABLES = """
SELECT name FROM sqlite_master WHERE type = 'table' AND name LIKE 'hf%' ORDER BY rowid
"""
ROWS_PER_FETCH = 1_000


class Snapshot:
    """One snapshot of a schema."""

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

    def columns(self, table: str) -> set[str]:
        """Return the names of a table's columns."""
        found = self._connection.execute(LIST_COLUMNS, [self._schema, table]).fetchall()
        return {str(row[0]) for row in found}

    def read(
        self, table: str, columns: Sequence[str], order: Sequence[str], rows_per_fetch: int
    ) -> Iterator[list[tuple[Any, ...]]]:
        """Yield a table's rows, a bounded number at a time."""
        statement = sql.SQL("SELECT {} FROM {}").format(_listed(columns), self._name(table))
        if order:
            statement += sql.SQL(" ORDER BY {}").format(_listed(order))
        with self._connection.cursor(f"copy_{table}", binary=True) as cursor:
            cursor.execute(statement)
            while found := cursor.fetchmany(rows_per_fetch):
                yield found

    def _name(self, table: str) -> sql.Identifier:
        return sql.Identifier(self._schema, table)


def copy_rows(
    target: PostgresTarget, settings: Settings, path: Path, progress: Progress | None
) -> None:
    """Copy every table of a PostgreSQL store from one snapshot."""
    store = open_for_writing(SqliteTarget(path), replace(settings, mode="write"), migrate=True)
    try:
        with Snapshot(target.dsn, target.schema) as snapshot, store.bulk() as connection:
            # Children may come before their parents; COMMIT checks the references.
            connection.execute("PRAGMA defer_foreign_keys = ON")
            tables = [str(row[0]) for row in connection.execute(LIST_SQLITE_TABLES).fetchall()]
            total, done = sum(map(snapshot.count, tables)), 0
            for table in tables:
                connection.execute(f'DELETE FROM "{table}"')  # noqa: S608 - a name from our schema
                names, order = _copied(connection, table, snapshot.columns(table))
                columns = ", ".join(f'"{name}"' for name in names)
                places = ", ".join("?" * len(names))
                insert = f'INSERT INTO "{table}" ({columns}) VALUES ({places})'  # noqa: S608
                for rows in snapshot.read(table, names, order, ROWS_PER_FETCH):
                    connection.executemany(insert, rows)
                    done += len(rows)
                    if progress is not None:
                        progress(done, total)
    finally:
        store.close()


def _copied(
    connection: apsw.Connection, table: str, there: set[str]
) -> tuple[list[str], list[str]]:
    """Return the columns to copy, and the order if SQLite numbers the rows itself."""
    names = [str(row[1]) for row in connection.execute(f'PRAGMA table_info("{table}")')]
    if set(names) <= there:
        return names, []
    [unique] = [row[1] for row in connection.execute(f'PRAGMA index_list("{table}")') if row[2]]
    order = [str(row[2]) for row in connection.execute(f'PRAGMA index_info("{unique}")')]
    return [name for name in names if name in there], order


def _listed(names: Sequence[str]) -> sql.Composed:
    return sql.SQL(", ").join(map(sql.Identifier, names))


def vacuum(dsn: str, schema: str) -> None:
    """Vacuum and analyse every table of a store, on a separate connection."""
    try:
        with psycopg.connect(dsn, autocommit=True, prepare_threshold=None) as connection:
            found = connection.execute(LIST_POSTGRES_TABLES, [schema]).fetchall()
            for (table,) in found:
                name = sql.Identifier(schema, table)
                connection.execute(sql.SQL("VACUUM (ANALYZE) {}").format(name))
    except psycopg.Error as error:
        raise translate(error) from error
