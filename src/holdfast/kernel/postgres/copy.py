"""Copying all tables of a store from one PostgreSQL snapshot, and vacuuming them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import apsw
import psycopg
from psycopg import sql
from psycopg.abc import PQGen

from ...errors import StoreBusy
from ..driver import Progress, Settings
from ..opening import open_for_writing
from ..url import SqliteTarget
from .connections import STILL_THERE, Connection, Connections, options
from .errors import translate
from .pipeline import Link, Message, Slot
from .transactions import answer_seconds

T = TypeVar("T")

LIST_POSTGRES_TABLES = """
SELECT tablename FROM pg_tables WHERE schemaname = %s AND starts_with(tablename, 'hf_') ORDER BY 1
"""


LIST_COLUMNS = """
SELECT column_name FROM information_schema.columns WHERE table_schema = %s AND table_name = %s
"""
LIST_SQLITE_TABLES = """
SELECT name FROM sqlite_master WHERE type = 'table' AND name LIKE 'hf%' ORDER BY rowid
"""
COUNT_WAITS = "SELECT count(*) AS waits FROM pg_locks WHERE pid = $1 AND NOT granted"
ROWS_PER_FETCH = 1_000


class Patient(Connection):
    """A connection whose statements may take as long as the server answers on another one."""

    perform: Callable[[PQGen[Any]], Any]

    def wait(self, gen: PQGen[T], *_: object, **__: object) -> T:
        """Run what waits for the socket; raises Silent if the server answers nobody."""
        found: T = self.perform(gen)
        return found


@contextmanager
def connected(
    lending: Connections, settings: Settings, goes_on: Callable[[int], bool]
) -> Iterator[Patient]:
    """Lend a connection of its own, and translate the errors of what is done with it.

    `goes_on` is given its process when the server has been silent, and says whether to wait on.
    """
    try:
        given = options(settings.busy_timeout_seconds, "holdfast")
        connection = Patient.connect(lending.dsn, **given)
        link = Link(connection, Slot(), prepares=False)
        connection.perform = partial(
            link.perform,
            limit_seconds=answer_seconds(settings),
            is_alive=partial(goes_on, link.backend_pid),
        )
        try:
            yield connection
        finally:
            link.close()
    except psycopg.Error as error:
        raise translate(error) from error


class Snapshot:
    """One snapshot of a schema."""

    def __init__(self, connection: Patient, schema: str, lock_seconds: float) -> None:
        self._connection = connection
        self._schema = schema
        connection.set_autocommit(False)
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.read_only = True
        # A slow statement is waited for, but not one that a lock keeps from beginning.
        limit = f"{round(lock_seconds * 1000)}ms"
        connection.execute("SELECT set_config('lock_timeout', %s, true)", [limit])

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
    lending: Connections, schema: str, settings: Settings, path: Path, progress: Progress | None
) -> None:
    """Copy every table of a PostgreSQL store from one snapshot."""

    def goes_on(_: int) -> bool:
        return lending.answer(STILL_THERE, answer_seconds(settings)) is not None

    store = open_for_writing(SqliteTarget(path), replace(settings, mode="write"), migrate=True)
    try:
        with connected(lending, settings, goes_on) as source, store.bulk() as connection:
            snapshot = Snapshot(source, schema, settings.busy_timeout_seconds)
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


def vacuum(lending: Connections, schema: str, settings: Settings) -> None:
    """Vacuum and analyse every table of a store, on a separate connection."""

    def goes_on(process: int) -> bool:
        # VACUUM runs in no transaction, and so cannot be given a limit of its own for locks.
        rows = lending.answer(Message(COUNT_WAITS, (process,)), answer_seconds(settings))
        if rows and rows[0]["waits"]:
            raise StoreBusy(
                f"a table of schema {schema!r} was locked for {settings.busy_timeout_seconds:g} "
                "seconds; it was not vacuumed"
            )
        return rows is not None

    with connected(lending, settings, goes_on) as connection:
        found = connection.execute(LIST_POSTGRES_TABLES, [schema]).fetchall()
        for (table,) in found:
            name = sql.Identifier(schema, table)
            connection.execute(sql.SQL("VACUUM (ANALYZE) {}").format(name))
