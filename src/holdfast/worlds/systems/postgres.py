"""A PostgreSQL database whose users commit on connections of their own.

Triggers write each changed row, as it was and as it became, to a log in a schema of the system. A
checkpoint takes what the log holds; a rollback works out which rows differ and replaces those, in
one transaction, with triggers and foreign keys silent. The others see an ordinary commit.
"""

from __future__ import annotations

import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import psycopg
from psycopg import sql
from psycopg.rows import tuple_row

from ...arguments import require_seconds, shown
from ...errors import Conflict, InvalidArgument, SystemBusy
from ..system import System
from ..tree import Changes, DeltaTree
from .postgres_tables import (
    Table,
    capture,
    captured,
    content_of,
    read_sequences,
    replace_rows,
    tables_in,
    writers_in,
)

Connection = psycopg.Connection[Any]
Observer = Callable[[Connection], object]

_WAIT_SECONDS_MAX: Final = 3_600
_PAUSE_SECONDS: Final = 0.01
_PREFIX: Final = "holdfast_world_"
_LOCK_SPACE: Final = 0x486F6C64
# Rows are written as text; these settings make it the same text for everybody.
_SETTINGS: Final = (
    "SET datestyle = 'ISO, YMD'; SET intervalstyle = 'postgres'; SET bytea_output = 'hex';"
    " SET extra_float_digits = 1; SET timezone = 'UTC'"
)
_OTHERS: Final = (
    "SELECT pid, application_name, state FROM pg_stat_activity WHERE datname = current_database()"
    " AND pid <> pg_backend_pid() AND backend_type = 'client backend' AND xact_start IS NOT NULL"
)


class PostgresSystem(System):
    """The tables and sequences of some schemas; a checkpoint costs the rows that changed.

    `observe` is a function of a connection that returns what a state shows; by default it is the
    content of all tables. A rollback waits up to `wait_seconds` for the transactions of others.
    Changes of the schema between checkpoints are refused. The role must be a superuser, or may
    set session_replication_role.
    """

    not_covered = (
        "changes of the schema: they are refused by name",
        "tables without a key cost a copy of their content at each checkpoint",
        "large objects, notifications, advisory locks, system columns such as ctid and xmin",
        "what the code under test keeps in memory",
        "tables with inheritance other than partitions",
    )

    def __init__(
        self,
        dsn: str,
        *,
        schemas: Sequence[str] = ("public",),
        observe: Observer | None = None,
        wait_seconds: float = 5,
    ) -> None:
        require_seconds("wait_seconds", wait_seconds, _WAIT_SECONDS_MAX)
        if isinstance(schemas, str) or not schemas:
            raise InvalidArgument(f"schemas must be a list of names, not {shown(schemas)}")
        self._wait_seconds = wait_seconds
        self._schemas = list(schemas)
        self._observe = observe
        self._dsn = dsn
        self._name = f"{_PREFIX}{uuid.uuid4().hex[:16]}"
        self._connection = psycopg.connect(
            dsn, autocommit=True, row_factory=tuple_row, application_name="holdfast world"
        )
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def checkpoint(self, name: str) -> int:
        """Keep what was committed since the last checkpoint or rollback."""
        with self._connection.transaction():
            self._require_same_schema()
            pending = self._drain()
        token = self._tree.add(pending)
        self._note(pending)
        return token

    def prepare(self, token: int) -> None:
        """Raise unless the token is known, the schema the same, and nobody in a transaction."""
        self._tree.find(token)
        self._require_same_schema()
        self._wait_for_others()

    def rollback(self, token: int) -> None:
        """Replace the rows that differ, in one transaction."""
        target = self._tree.find(token)
        self._wait_for_others()
        with self._connection.transaction():
            self._lock_log()
            self._require_same_schema()
            pending = self._drain()
            changes = self._tree.changes_to(target, pending)
            self._apply(changes)
        self._note(pending)
        self._note(changes)
        self._tree.move(target)

    def release(self, token: int) -> None:
        """Forget a checkpoint."""
        self._tree.release(token)

    def keep(self, token: int) -> object:
        """Return the rows of every table, and where the sequences stand."""
        with self._connection.transaction():
            tables = {table.name: self._content(table) for table in self._tables.values()}
            return {"tables": tables, "sequences": dict(self._sequences)}

    def restore(self, kept: dict[str, Any]) -> None:
        """Replace the rows that differ from what a process that died has kept."""
        if kept["tables"].keys() != {table.name for table in self._tables.values()}:
            raise Conflict("The schema changed since: there are other tables.")
        self._wait_for_others()
        with self._connection.transaction():
            self._lock_log()
            self._require_same_schema()
            pending = self._drain()
            changes: Changes = {}
            self._connection.execute("SET LOCAL session_replication_role = replica")
            for table in self._tables.values():
                changes |= self._replace(table, kept["tables"][table.name])
            for name, value in kept["sequences"].items():
                now = pending.get(name, (None, self._sequences[name]))[1]
                if now != value:
                    changes[name] = now, value
            self._apply({key: change for key, change in changes.items() if isinstance(key, str)})
        self._note(pending)
        self._note(changes)
        self._tree.leave(self._tree.fold(pending, changes))

    def sweep(self) -> int:
        """Remove the schemas of killed processes, with their triggers."""
        return self.clean(self._dsn)

    def observe(self) -> object:
        """Return what the observer reads, in one transaction."""
        with self._connection.transaction():
            if self._observe is not None:
                return self._observe(self._connection)
            return {
                table.name: content_of(self._connection, table) for table in self._tables.values()
            }

    def close(self) -> None:
        """Remove the triggers and the log; the tables stay as they are."""
        if self._connection.closed:
            return
        try:
            _drop(self._connection, self._name)
        finally:
            self._connection.close()

    @staticmethod
    def clean(dsn: str) -> int:
        """Remove what processes that were killed left in a database; return how many."""
        find = "SELECT nspname FROM pg_namespace WHERE starts_with(nspname, %s)"
        removed = 0
        with psycopg.connect(dsn, autocommit=True, row_factory=tuple_row) as connection:
            for (name,) in connection.execute(find, (_PREFIX,)).fetchall():
                if _lock_name(connection, name):
                    _drop(connection, name)
                    removed += 1
        return removed

    def _start(self) -> None:
        connection = self._connection
        connection.execute(_SETTINGS)
        connection.execute(f"SET lock_timeout = {round(self._wait_seconds * 1000)}".encode())
        try:
            with connection.transaction():
                connection.execute("SET LOCAL session_replication_role = replica")
        except psycopg.errors.InsufficientPrivilege as error:
            raise Conflict(
                "This role cannot restore rows without running triggers; use a superuser, or "
                "GRANT SET ON PARAMETER session_replication_role TO it (PostgreSQL 15)."
            ) from error
        self._wait_for_others()
        _lock_name(connection, self._name)
        with connection.transaction():
            self._make_log()
            self._tables = tables_in(connection, self._schemas)
            for table in self._tables.values():
                capture(connection, self._name, table)
            self._sequences = read_sequences(connection, self._schemas)
            self._writers = writers_in(connection, self._schemas)
        keyless = [table for table in self._tables.values() if not table.key]
        self._whole = {table.oid: self._content(table) for table in keyless}
        if keyless:
            warnings.warn(
                f"Each checkpoint reads the whole of {', '.join(table.name for table in keyless)}, "
                "because there is no primary key and no unique index without NULLs.",
                stacklevel=4,
            )
        self._tree = DeltaTree()
        self._try_out()

    def _make_log(self) -> None:
        make = sql.SQL(
            "CREATE SCHEMA {schema}; CREATE TABLE {schema}.log (number bigint GENERATED ALWAYS AS "
            "IDENTITY PRIMARY KEY, relation oid NOT NULL, old_key text, new_key text, before text, "
            "after text); CREATE TABLE {schema}.probe (id integer PRIMARY KEY, value text);"
        ).format(schema=sql.Identifier(self._name))
        self._connection.execute(make)

    def _try_out(self) -> None:
        """Change and restore a table of our own, as the others will be."""
        connection = self._connection
        [probe] = [
            table for table in tables_in(connection, [self._name]).values() if "probe" in table.name
        ]
        with connection.transaction(force_rollback=True):
            capture(connection, self._name, probe)
            insert = sql.SQL("INSERT INTO {} VALUES (1, 'ä,\"'), (2, NULL)").format(
                probe.identifier
            )
            connection.execute(insert)
            self._read_log()
            wanted = content_of(connection, probe)
            update = sql.SQL("UPDATE {} SET id = id + 10, value = 'x'").format(probe.identifier)
            connection.execute(update)
            changed = _folded(self._read_log())
            connection.execute("SET LOCAL session_replication_role = replica")
            replace_rows(
                connection,
                probe,
                [after for _, after in changed.values() if after is not None],
                wanted,
            )
            if content_of(connection, probe) != wanted or len(changed) != 4:
                raise Conflict("a trial of capturing and restoring rows gave something else")

    def _drain(self) -> Changes:
        """Return what changed since the head, and empty the log."""
        changes = _folded(self._read_log())
        for oid, before in self._whole.items():
            now = self._content(self._tables[oid])
            if now != before:
                changes[oid, None] = before, now
        sequences = read_sequences(self._connection, self._schemas)
        for name, value in sequences.items():
            if value != self._sequences[name]:
                changes[name] = self._sequences[name], value
        return changes

    def _read_log(self) -> list[tuple[Any, ...]]:
        take = sql.SQL(
            "WITH taken AS (DELETE FROM {}.log RETURNING *) SELECT relation, old_key, new_key,"
            " before, after FROM taken ORDER BY number"
        ).format(sql.Identifier(self._name))
        return self._connection.execute(take).fetchall()

    def _note(self, changes: Changes) -> None:
        """Remember the content of what is read whole, as it is now."""
        for key, (_, now) in changes.items():
            if isinstance(key, str):
                self._sequences[key] = now
            elif key[1] is None:
                self._whole[key[0]] = now

    def _apply(self, changes: Changes) -> None:
        self._connection.execute("SET LOCAL session_replication_role = replica")
        old: dict[int, list[str]] = {}
        new: dict[int, list[str]] = {}
        for key, (now, wanted) in changes.items():
            if isinstance(key, str):
                self._connection.execute("SELECT setval(%s::regclass, %s, %s)", (key, *wanted))
            elif key[1] is None:
                old.setdefault(key[0], []).extend(now)
                new.setdefault(key[0], []).extend(wanted)
            else:
                old.setdefault(key[0], []).extend([] if now is None else [now])
                new.setdefault(key[0], []).extend([] if wanted is None else [wanted])
        for oid in old.keys() | new.keys():
            table = self._tables[oid]
            replace_rows(self._connection, table, old.get(oid, []), new.get(oid, []))

    def _replace(self, table: Table, wanted: Sequence[str]) -> Changes:
        """Replace the rows of a table, and return what that changes."""
        now = self._content(table)
        if not table.key:
            replace_rows(self._connection, table, now, wanted)
            return {(table.oid, None): (now, tuple(wanted))} if now != tuple(wanted) else {}
        old, new = set(now) - set(wanted), set(wanted) - set(now)
        captured(self._connection, self._name, table, is_always=True)
        replace_rows(self._connection, table, sorted(old), sorted(new))
        captured(self._connection, self._name, table, is_always=False)
        return _folded(self._read_log())

    def _content(self, table: Table) -> tuple[str, ...]:
        return tuple(content_of(self._connection, table))

    def _require_same_schema(self) -> None:
        writers = writers_in(self._connection, self._schemas)
        if writers == self._writers:
            return
        now = tables_in(self._connection, self._schemas)
        changed = sorted(
            {table.name for table in {*self._tables.values(), *now.values()}}
            - {table.name for table in {*self._tables.values()} & {*now.values()}}
        )
        sequences = read_sequences(self._connection, self._schemas).keys()
        changed += sorted(sequences ^ self._sequences.keys())
        if changed:
            raise Conflict(
                f"The schema changed: {', '.join(changed)}. A rollback covers rows, not "
                "definitions; make the world anew after a migration."
            )
        self._writers = writers

    def _lock_log(self) -> None:
        """Wait for everybody who has written in a transaction, and keep others from writing."""
        lock = sql.SQL("LOCK TABLE {}.log IN EXCLUSIVE MODE").format(sql.Identifier(self._name))
        try:
            self._connection.execute(lock)
        except psycopg.errors.LockNotAvailable as error:
            raise SystemBusy(
                f"a transaction of another connection has been open for {self._wait_seconds:g} s"
            ) from error

    def _wait_for_others(self) -> None:
        until = time.monotonic() + self._wait_seconds
        while others := self._connection.execute(_OTHERS).fetchall():
            if time.monotonic() > until:
                listed = "; ".join(f"{pid} {name} is {state}" for pid, name, state in others)
                raise SystemBusy(f"other connections are in a transaction: {listed}")
            time.sleep(_PAUSE_SECONDS)


def _folded(log: Iterable[tuple[Any, ...]]) -> Changes:
    """Return the log as changes: what each row was first, and what it is now."""
    changes: Changes = {}
    for relation, old_key, new_key, before, after in log:
        if old_key is not None:
            key = relation, old_key
            changes[key] = changes.get(key, (before, None))[0], None
        if new_key is not None:
            key = relation, new_key
            changes[key] = changes.get(key, (None, None))[0], after
    return {key: change for key, change in changes.items() if change[0] != change[1]}


def _lock_name(connection: Connection, schema: str) -> bool:
    """Take the lock that says that the schema's owner is alive."""
    number = int(schema[-7:], 16)
    take = "SELECT pg_try_advisory_lock(%s, %s)"
    found = connection.execute(take, (_LOCK_SPACE, number)).fetchone()
    return found is not None and bool(found[0])


def _drop(connection: Connection, schema: str) -> None:
    drop = sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(schema))
    connection.execute("SET client_min_messages = warning")
    connection.execute(drop)
