"""Changing rows of PostgreSQL while triggers, rules and foreign keys are silent."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import psycopg
from psycopg import sql

from ...errors import Conflict
from .postgres_tables import Table

Connection = psycopg.Connection[Any]
Silence = Callable[[Connection, Collection[Table]], AbstractContextManager[None]]

# Triggers and rules of tables that are not disabled.
_ACTING: Final = """
SELECT tgrelid::regclass::text, 'TRIGGER', tgname, tgenabled::text FROM pg_trigger
WHERE tgrelid = ANY (%(tables)s) AND NOT tgisinternal AND tgenabled <> 'D'
UNION ALL
SELECT ev_class::regclass::text, 'RULE', rulename, ev_enabled::text FROM pg_rewrite
WHERE ev_class = ANY (%(tables)s) AND ev_enabled <> 'D'
"""
_ENABLE: Final = {"O": "ENABLE", "R": "ENABLE REPLICA", "A": "ENABLE ALWAYS"}
# The foreign keys from and to tables; one of a partition belongs to the partitioned table.
_FOREIGN_KEYS: Final = """
WITH RECURSIVE touching AS (
    SELECT oid, conparentid FROM pg_constraint
    WHERE contype = 'f' AND (conrelid = ANY (%(tables)s) OR confrelid = ANY (%(tables)s))
    UNION
    SELECT parent.oid, parent.conparentid FROM pg_constraint parent
    JOIN touching ON parent.oid = touching.conparentid
)
SELECT c.conrelid::regclass::text, c.conname, pg_get_constraintdef(c.oid),
    obj_description(c.oid, 'pg_constraint')
FROM pg_constraint c JOIN touching USING (oid) WHERE c.conparentid = 0 ORDER BY 1, 2
"""
_FOREIGN_TABLES: Final = """
SELECT c.oid::regclass::text FROM pg_class c WHERE NOT pg_has_role(c.relowner, 'USAGE') AND (
    c.oid = ANY (%(tables)s) OR EXISTS (SELECT 1 FROM pg_constraint f WHERE f.contype = 'f'
        AND f.conrelid = c.oid AND f.confrelid = ANY (%(tables)s)))
ORDER BY 1
"""
_DEFERRED: Final = """
SELECT string_agg(format('%I.%I', n.nspname, c.conname), ', ') FROM pg_constraint c
JOIN pg_namespace n ON n.oid = c.connamespace WHERE c.condeferred
"""


@contextmanager
def in_replica_mode(connection: Connection, tables: Collection[Table]) -> Iterator[None]:
    """Apply the connection's changes as those of a replica, in this transaction."""
    connection.execute("SET LOCAL session_replication_role = replica")
    yield
    connection.execute("SET LOCAL session_replication_role = origin")


@contextmanager
def without_triggers(connection: Connection, tables: Collection[Table]) -> Iterator[None]:
    """Disable triggers and rules of tables and drop their foreign keys, in this transaction.

    Foreign keys that are added again are checked against all rows, so the time grows with the
    tables.
    """
    given = {"tables": [table.oid for table in tables]}
    acting = connection.execute(_ACTING, given).fetchall()
    keys = connection.execute(_FOREIGN_KEYS, given).fetchall()
    # A table cannot be altered while checks of its rows are deferred.
    connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
    for table, kind, name, _ in acting:
        _alter(connection, table, f"DISABLE {kind}", name)
    for table, name, _, _ in keys:
        _alter(connection, table, "DROP CONSTRAINT", name)
    yield
    for table, name, definition, comment in keys:
        _alter(connection, table, "ADD CONSTRAINT", name, definition)
        if comment is not None:
            describe = sql.SQL("COMMENT ON CONSTRAINT {} ON {} IS {}").format(
                sql.Identifier(name), _as_is(table), sql.Literal(comment)
            )
            connection.execute(describe)
    for table, kind, name, state in acting:
        _alter(connection, table, f"{_ENABLE[state]} {kind}", name)
    [(deferred,)] = connection.execute(_DEFERRED).fetchall()
    if deferred is not None:
        defer = sql.SQL("SET CONSTRAINTS {} DEFERRED").format(_as_is(deferred))
        connection.execute(defer)


def _alter(connection: Connection, table: str, what: str, name: str, rest: str = "") -> None:
    alter = sql.SQL("ALTER TABLE {} {} {} {}").format(
        _as_is(table), _as_is(what), sql.Identifier(name), _as_is(rest)
    )
    connection.execute(alter)


def _as_is(text: Any) -> sql.SQL:
    """Return a name or a definition that the server itself has quoted, or words of this module."""
    return sql.SQL(text)


def can_be_replica(connection: Connection) -> bool:
    """Return whether the role may apply changes as a replica."""
    try:
        with connection.transaction(force_rollback=True), in_replica_mode(connection, ()):
            return True
    except psycopg.errors.InsufficientPrivilege:
        return False


def require_owner(connection: Connection, tables: Collection[Table]) -> None:
    """Raise Conflict unless the role may disable the triggers and foreign keys of tables."""
    given = {"tables": [table.oid for table in tables]}
    foreign = [name for (name,) in connection.execute(_FOREIGN_TABLES, given)]
    if foreign:
        raise Conflict(
            "This role can neither restore rows in replica mode nor disable the triggers of "
            f"{', '.join(foreign)}. Use a superuser or the owner of the tables, or GRANT SET ON "
            "PARAMETER session_replication_role TO the role (PostgreSQL 15)."
        )
