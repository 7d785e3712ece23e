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

# Emptying a table changes nothing of this; whatever else a test does to a schema, does.
SHAPE = """
SELECT relname, relkind::text, oid, relnatts, reloptions::text, relacl::text
FROM pg_class WHERE relnamespace = %(name)s::regnamespace
UNION ALL
SELECT tgname, tgenabled::text, t.oid, 0, t.xmin::text, ''
FROM pg_trigger t JOIN pg_class c ON c.oid = tgrelid
WHERE relnamespace = %(name)s::regnamespace AND NOT tgisinternal
UNION ALL
SELECT proname, 'function', oid, 0, xmin::text, '' FROM pg_proc
WHERE pronamespace = %(name)s::regnamespace
UNION ALL
SELECT conname, 'constraint', oid, 0, xmin::text, '' FROM pg_constraint
WHERE connamespace = %(name)s::regnamespace
ORDER BY 3
"""
FILLED = """
SELECT relname FROM pg_class
WHERE relnamespace = %(name)s::regnamespace AND relkind = 'r' AND pg_relation_size(oid) > 0
"""
FORGET_STATISTICS = """
DELETE FROM pg_statistic
WHERE starelid IN (SELECT oid FROM pg_class WHERE relnamespace = %(name)s::regnamespace)
"""
NUMBERED = "SELECT sequencename, last_value FROM pg_sequences WHERE schemaname = %(name)s"


class Made(NamedTuple):
    """What a schema was when it was made."""

    shape: list[Any]
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
        self._made[name] = Made(_shape(connection, name), rows, _numbers(connection, name))
        return name

    def _give_back(self, name: str) -> None:
        """Empty a schema for the next test, or drop it if it is not what it was."""
        connection = self._connected()
        drop_schemas(connection, f"{name}_")
        if _is_emptied(connection, name, self._made[name]):
            self._free.append(name)
        else:
            drop_schemas(connection, name)


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


def _shape(connection: psycopg.Connection, name: str) -> list[Any]:
    return connection.execute(SHAPE, {"name": name}).fetchall()


def _filled(connection: psycopg.Connection, name: str) -> list[str]:
    return [row[0] for row in connection.execute(FILLED, {"name": name})]


def _numbers(connection: psycopg.Connection, name: str) -> dict[str, int | None]:
    return dict(connection.execute(NUMBERED, {"name": name}).fetchall())


def _rows(connection: psycopg.Connection, schema: str, table: str) -> bytes:
    with connection.cursor().copy(f'COPY "{schema}"."{table}" TO STDOUT') as copy:
        return b"".join(copy)


def _each(connection: psycopg.Connection, schema: str, statement: Any, tables: list[str]) -> None:
    names = sql.SQL(", ").join(sql.Identifier(schema, table) for table in tables)
    connection.execute(sql.SQL(statement).format(names))


def _is_emptied(connection: psycopg.Connection, name: str, made: Made) -> bool:
    if connection.execute("SELECT to_regnamespace(%s)", [name]).fetchone() == (None,):
        return False
    kept, shape = {row[0] for row in made.shape}, _shape(connection, name)
    added = [row[0] for row in shape if row[1] == "r" and row[0] not in kept]
    if added:
        _each(connection, name, "DROP TABLE {} CASCADE", added)
        shape = _shape(connection, name)
    if shape != made.shape:
        return False
    changed = [
        table
        for table in {*made.rows, *_filled(connection, name)}
        if table not in made.rows or _rows(connection, name, table) != made.rows[table]
    ]
    if changed:
        _each(connection, name, "TRUNCATE {} CASCADE", changed)
        connection.execute(FORGET_STATISTICS, {"name": name})
    for table in made.rows.keys() & changed:
        with connection.cursor().copy(f'COPY "{name}"."{table}" FROM STDIN') as copy:
            copy.write(made.rows[table])
    for sequence, last in made.numbers.items() - _numbers(connection, name).items():
        given = (f'"{name}"."{sequence}"', last or 1, last is not None)
        connection.execute("SELECT setval(%s, %s, %s)", given)
    return True
