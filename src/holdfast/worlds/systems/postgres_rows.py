"""The rows of some schemas of PostgreSQL: changes are captured and can be undone."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import psycopg
from psycopg import sql

from ...arguments import shown
from ...errors import Conflict, InvalidArgument
from ..tree import Changes
from .postgres_silence import (
    Silence,
    can_be_replica,
    in_replica_mode,
    require_owner,
    without_triggers,
)
from .postgres_tables import (
    Definitions,
    Table,
    capture,
    captured,
    content_of,
    definitions_in,
    read_sequences,
    replace_rows,
    tables_in,
)

Connection = psycopg.Connection[Any]

PREFIX: Final = "holdfast_world_"


class CapturedRows:
    """The tables and sequences of some schemas, with a log of changes in a separate schema.

    A role that cannot restore rows without running triggers is refused; for one that has to disable
    triggers and foreign keys, a warning is issued. The caller opens the transaction in which an
    instance is created, and those of its methods.
    """

    def __init__(self, connection: Connection, schemas: Sequence[str], home: str) -> None:
        self._connection = connection
        self._schemas = list(schemas)
        self.home = home
        self._make_log()
        self.tables = tables_in(connection, self._schemas)
        self._silence = self._chosen_silence()
        for table in self.tables.values():
            capture(connection, home, table)
        self.sequences = read_sequences(connection, self._schemas)
        self._definitions = self._read_definitions()
        self._altered: Definitions | None = None
        keyless = [table for table in self.tables.values() if not table.key]
        self._whole = {table.oid: self.content(table) for table in keyless}
        if keyless:
            warnings.warn(
                f"Each checkpoint reads the whole of {', '.join(table.name for table in keyless)}, "
                "because there is no primary key and no unique index without NULLs.",
                stacklevel=4,
            )
        self._try_out()

    def observed(self) -> object:
        """Return the rows of every table."""
        return {table.name: content_of(self._connection, table) for table in self.tables.values()}

    def _chosen_silence(self) -> Silence:
        if can_be_replica(self._connection):
            return in_replica_mode
        require_owner(self._connection, self.tables.values())
        warnings.warn(
            "Each rollback disables triggers and checks all foreign keys of the tables that it "
            "changes, because this role may not set session_replication_role. A superuser may, "
            "and so may a role with GRANT SET ON PARAMETER (PostgreSQL 15).",
            stacklevel=5,
        )
        return without_triggers

    @contextmanager
    def silent(self, tables: Collection[Table]) -> Iterator[None]:
        """Change rows of these tables without running triggers, rules and foreign keys."""
        with self._silence(self._connection, tables):
            yield
        if self._silence is not in_replica_mode:
            self._altered = self._read_definitions()

    def _make_log(self) -> None:
        make = sql.SQL(
            "CREATE SCHEMA {schema}; CREATE TABLE {schema}.log (number bigint GENERATED ALWAYS AS "
            "IDENTITY PRIMARY KEY, relation oid NOT NULL, old_key text, new_key text, before text, "
            "after text); CREATE TABLE {schema}.probe (id integer PRIMARY KEY, value text);"
        ).format(schema=sql.Identifier(self.home))
        try:
            self._connection.execute(make)
        except psycopg.errors.InsufficientPrivilege as error:
            raise Conflict(
                "This role may not create the schema in which changes are logged; GRANT CREATE ON "
                "DATABASE to it."
            ) from error

    def _try_out(self) -> None:
        """Change and restore a scratch table, in the same way as the others."""
        connection = self._connection
        [probe] = [
            table for table in tables_in(connection, [self.home]).values() if "probe" in table.name
        ]
        with connection.transaction(force_rollback=True):
            capture(connection, self.home, probe)
            insert = sql.SQL("INSERT INTO {} VALUES (1, 'ä,\"'), (2, NULL)").format(
                probe.identifier
            )
            connection.execute(insert)
            self._read_log()
            wanted = content_of(connection, probe)
            update = sql.SQL("UPDATE {} SET id = id + 10, value = 'x'").format(probe.identifier)
            connection.execute(update)
            changed = _folded(self._read_log())
            with self._silence(connection, [probe]):
                replace_rows(
                    connection,
                    probe,
                    [after for _, after in changed.values() if after is not None],
                    wanted,
                )
            if content_of(connection, probe) != wanted or len(changed) != 4:
                raise Conflict(
                    "a self-test of capturing and restoring rows gave a different result"
                )

    def drain(self) -> Changes:
        """Return what changed since the head, and empty the log."""
        self._altered = None
        changes = _folded(self._read_log())
        for oid, before in self._whole.items():
            now = self.content(self.tables[oid])
            if now != before:
                changes[oid, None] = before, now
        sequences = read_sequences(self._connection, self._schemas)
        for name, value in sequences.items():
            if value != self.sequences[name]:
                changes[name] = self.sequences[name], value
        return changes

    def _read_log(self) -> list[tuple[Any, ...]]:
        take = sql.SQL(
            "WITH taken AS (DELETE FROM {}.log RETURNING *) SELECT relation, old_key, new_key,"
            " before, after FROM taken ORDER BY number"
        ).format(sql.Identifier(self.home))
        return self._connection.execute(take).fetchall()

    def look(self) -> None:
        """Record the current definitions, which must not change from now on."""
        self._definitions = self._read_definitions()

    def note(self, changes: Changes) -> None:
        """Record the current content of tables that are read as a whole."""
        self._definitions, self._altered = self._altered or self._definitions, None
        for key, (_, now) in changes.items():
            if isinstance(key, str):
                self.sequences[key] = now
            elif key[1] is None:
                self._whole[key[0]] = now

    def apply(self, changes: Changes) -> None:
        """Apply these changes, with triggers silent."""
        old: dict[int, list[str]] = {}
        new: dict[int, list[str]] = {}
        for key, (now, wanted) in changes.items():
            if isinstance(key, str):
                continue
            if key[1] is None:
                old.setdefault(key[0], []).extend(now)
                new.setdefault(key[0], []).extend(wanted)
            else:
                old.setdefault(key[0], []).extend([] if now is None else [now])
                new.setdefault(key[0], []).extend([] if wanted is None else [wanted])
        tables = [self.tables[oid] for oid in old.keys() | new.keys()]
        if tables:
            with self.silent(tables):
                for table in tables:
                    rows = (old.get(table.oid, []), new.get(table.oid, []))
                    replace_rows(self._connection, table, *rows)
        # Last, because no rollback of a transaction undoes the setting of a sequence.
        for key, (_, wanted) in changes.items():
            if isinstance(key, str):
                self._connection.execute("SELECT setval(%s::regclass, %s, %s)", (key, *wanted))

    def replace(self, table: Table, wanted: Sequence[str]) -> Changes:
        """Replace the rows of a table whose triggers are silent, and return what that changes."""
        now = self.content(table)
        if not table.key:
            replace_rows(self._connection, table, now, wanted)
            return {(table.oid, None): (now, tuple(wanted))} if now != tuple(wanted) else {}
        old, new = set(now) - set(wanted), set(wanted) - set(now)
        captured(self._connection, self.home, table, is_always=True)
        replace_rows(self._connection, table, sorted(old), sorted(new))
        captured(self._connection, self.home, table, is_always=False)
        self._altered = self._read_definitions()
        return _folded(self._read_log())

    def content(self, table: Table) -> tuple[str, ...]:
        """Return the rows of a table as text, in order."""
        return tuple(content_of(self._connection, table))

    def require_same_schema(self) -> None:
        """Raise Conflict, with names, if a table or sequence differs from the start.

        Also if somebody has disabled the triggers that capture changes, even if only for a while.
        """
        found = self._read_definitions()
        if found == self._definitions:
            return
        if found.triggers != self._definitions.triggers:
            raise Conflict(
                "Somebody has disabled triggers, or altered them, so rows may have changed "
                "unnoticed, and nothing can be restored; create a new world."
            )
        now = tables_in(self._connection, self._schemas)
        changed = sorted(
            {table.name for table in {*self.tables.values(), *now.values()}}
            - {table.name for table in {*self.tables.values()} & {*now.values()}}
        )
        sequences = read_sequences(self._connection, self._schemas).keys()
        changed += sorted(sequences ^ self.sequences.keys())
        if changed:
            raise Conflict(
                f"The schema changed: {', '.join(changed)}. A rollback covers rows, not "
                "definitions; create a new world after a migration."
            )
        self._definitions = found

    def _read_definitions(self) -> Definitions:
        return definitions_in(self._connection, self._schemas, self.home)


def _folded(log: Iterable[tuple[Any, ...]]) -> Changes:
    """Return the log as changes: what each row was at first, and what it is now."""
    changes: Changes = {}
    for relation, old_key, new_key, before, after in log:
        if old_key is not None:
            key = relation, old_key
            changes[key] = changes.get(key, (before, None))[0], None
        if new_key is not None:
            key = relation, new_key
            changes[key] = changes.get(key, (None, None))[0], after
    return {key: change for key, change in changes.items() if change[0] != change[1]}


def drop_home(connection: Connection, schema: str) -> None:
    """Remove the log and the triggers that write to it."""
    drop = sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(schema))
    connection.execute("SET client_min_messages = warning")
    connection.execute(drop)


def require_schemas(schemas: Sequence[str]) -> None:
    """Raise InvalidArgument unless this is a list of names."""
    if isinstance(schemas, str) or not schemas:
        raise InvalidArgument(f"schemas must be a list of names, not {shown(schemas)}")
