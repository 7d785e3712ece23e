"""Empty stores that are ready: making the tables of one takes longer than most tests."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import psycopg
from psycopg import sql

import holdfast
from holdfast.testing.nouns import Setup

# A subquery is read once, a function once for each row of the catalog.
OF_SCHEMA = "(SELECT oid FROM pg_namespace WHERE nspname = %(name)s)"
# Emptying a table changes nothing of this; whatever else a test does to a schema, does.
SHAPE = f"""
SELECT relname, relkind::text, oid, relnatts, reloptions::text, relacl::text
FROM pg_class WHERE relnamespace = {OF_SCHEMA}
UNION ALL
SELECT tgname, tgenabled::text, t.oid, 0, t.xmin::text, ''
FROM pg_trigger t JOIN pg_class c ON c.oid = tgrelid
WHERE relnamespace = {OF_SCHEMA} AND NOT tgisinternal
UNION ALL
SELECT proname, 'function', oid, 0, xmin::text, '' FROM pg_proc
WHERE pronamespace = {OF_SCHEMA}
UNION ALL
SELECT conname, 'constraint', oid, 0, xmin::text, '' FROM pg_constraint
WHERE connamespace = {OF_SCHEMA}
"""
# To send and compare a number costs less than hundreds of rows.
SHAPE_NUMBER = f"SELECT sum(hash_record_extended(shape, 0)) FROM ({SHAPE}) shape"
TABLES = f"""
SELECT relname FROM pg_class WHERE relnamespace = {OF_SCHEMA} AND relkind = 'r'
"""
FILLED = f"""
SELECT relname, pg_relation_size(oid) > %(small)s OR reltuples >= 0 FROM pg_class
WHERE relnamespace = {OF_SCHEMA} AND relkind = 'r' AND pg_relation_size(oid) > 0
"""
FORGET_STATISTICS = f"""
DELETE FROM pg_statistic
WHERE starelid IN (SELECT oid FROM pg_class WHERE relnamespace = {OF_SCHEMA})
"""
NUMBERED = f"""
SELECT relname, pg_sequence_last_value(oid) FROM pg_class
WHERE relnamespace = {OF_SCHEMA} AND relkind = 'S'
"""
# To delete a few rows costs far less than TRUNCATE, which makes new files for a table and all of
# its indexes. The planner takes a table of less than ten pages for one of ten, as it does an empty
# one, so that no plan shows what earlier tests have left.
SMALL_BYTES = 4 * 8192


class Made(NamedTuple):
    """What a schema was when it was made."""

    shape: int
    tables: set[str]
    rows: dict[str, bytes]
    numbers: dict[str, int | None]


class Schemas:
    """Schemas with the tables of a store, each used by one test after another."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._made: dict[str, Made] = {}
        self._free: list[str] = []
        self._connection: psycopg.Connection | None = None

    @contextmanager
    def lent(self) -> Iterator[str]:
        """Lend a schema that holds an empty store."""
        name = self._take()
        yield name
        self._give_back(name)

    def close(self) -> None:
        """Drop all that are left."""
        with self._connected() as connection:
            for name in self._free:
                drop_schemas(connection, name)

    def _connected(self) -> psycopg.Connection:
        """Return a connection that is kept: a new one has to read the catalogs first.

        It fires no triggers, which protect history.
        """
        try:
            if self._connection is not None:
                self._connection.execute("SELECT 1")
                return self._connection
        except psycopg.OperationalError:
            pass  # A test has cut all connections.
        options = "-c session_replication_role=replica"
        self._connection = psycopg.connect(self._dsn, autocommit=True, options=options)
        return self._connection

    def _take(self) -> str:
        if self._free:
            return self._free.pop(0)
        name = f"t_{uuid.uuid4().hex[:20]}"
        make_ready(url=self._dsn, namespace=name)
        connection = self._connected()
        rows = {table: _rows(connection, name, table) for table in _filled(connection, name)}
        self._made[name] = Made(
            *(_shape(connection, name), _tables(connection, name)),
            *(rows, _numbers(connection, name)),
        )
        return name

    def _give_back(self, name: str) -> None:
        """Empty a schema for the next test, or drop it if it is not what it was."""
        connection = self._connected()
        drop_schemas(connection, f"{name}_")
        if self._is_emptied(connection, name):
            self._free.append(name)
        else:
            drop_schemas(connection, name)

    def _is_emptied(self, connection: psycopg.Connection, name: str) -> bool:
        while True:
            try:
                return _is_emptied(connection, name, self._made[name])
            except psycopg.errors.DeadlockDetected:
                pass  # The last transaction of a process that was killed is over now.


def make_ready(**place: Any) -> None:
    """Make a store with the tables of the example nouns too, which many tests use."""
    with holdfast.open(**place) as store:
        Setup(store).install()


def drop_schemas(connection: psycopg.Connection, prefix: str) -> None:
    """Drop every schema whose name begins so."""
    found = connection.execute(
        "SELECT nspname FROM pg_namespace WHERE starts_with(nspname, %s)", [prefix]
    ).fetchall()
    for (schema,) in found:
        connection.execute(f'DROP SCHEMA "{schema}" CASCADE')


def _shape(connection: psycopg.Connection, name: str) -> Any:
    found = connection.execute(SHAPE_NUMBER, {"name": name}).fetchone()
    return found and found[0]


def _tables(connection: psycopg.Connection, name: str) -> set[str]:
    return {row[0] for row in connection.execute(TABLES, {"name": name})}


def _filled(connection: psycopg.Connection, name: str) -> dict[str, bool]:
    """Return the tables that have pages, and whether to truncate them: the large and analyzed."""
    return dict(connection.execute(FILLED, {"name": name, "small": SMALL_BYTES}).fetchall())


def _numbers(connection: psycopg.Connection, name: str) -> dict[str, int | None]:
    return dict(connection.execute(NUMBERED, {"name": name}).fetchall())


def _rows(connection: psycopg.Connection, schema: str, table: str) -> bytes:
    with connection.cursor().copy(f'COPY "{schema}"."{table}" TO STDOUT') as copy:
        return b"".join(copy)


def _each(connection: psycopg.Connection, schema: str, statement: str, tables: Any) -> None:
    """Run a statement that takes a list of tables."""
    if tables:
        names = sql.SQL(", ").join(sql.Identifier(schema, table) for table in tables)
        connection.execute(sql.SQL(statement).format(names))


def _is_emptied(connection: psycopg.Connection, name: str, made: Made) -> bool:
    if _shape(connection, name) != made.shape:
        added = _tables(connection, name) - made.tables
        _each(connection, name, "DROP TABLE {} CASCADE", added)
        if not added or _shape(connection, name) != made.shape:
            return False
    with connection.transaction():
        # A process that was killed may still have a statement that runs.
        _each(connection, name, "LOCK TABLE {} IN SHARE ROW EXCLUSIVE MODE", sorted(made.tables))
        filled = _filled(connection, name)
        changed = [
            table
            for table in {*made.rows, *filled}
            if table not in made.rows or _rows(connection, name, table) != made.rows[table]
        ]
        _empty(connection, name, {table: filled.get(table, False) for table in changed})
        for table in made.rows.keys() & changed:
            with connection.cursor().copy(f'COPY "{name}"."{table}" FROM STDIN') as copy:
                copy.write(made.rows[table])
        for sequence, last in made.numbers.items() - _numbers(connection, name).items():
            given = (f'"{name}"."{sequence}"', last or 1, last is not None)
            connection.execute("SELECT setval(%s, %s, %s)", given)
    return True


def _empty(connection: psycopg.Connection, name: str, tables: dict[str, bool]) -> None:
    truncated = [table for table, is_truncated in tables.items() if is_truncated]
    if truncated:
        _each(connection, name, "TRUNCATE {} CASCADE", truncated)
        connection.execute(FORGET_STATISTICS, {"name": name})
    deleted = [f'DELETE FROM "{name}"."{table}"' for table in tables.keys() - set(truncated)]
    if deleted:
        connection.execute("; ".join(deleted).encode())
