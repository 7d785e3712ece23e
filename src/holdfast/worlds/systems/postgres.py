"""A PostgreSQL database whose users commit on their own connections.

Triggers write each changed row, as it was and as it became, to a log in a schema of the system. A
checkpoint takes what the log holds; a rollback works out which rows differ and replaces those, in
one transaction, with triggers and foreign keys silent. The others see an ordinary commit.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from ...arguments import require_seconds
from ...errors import Conflict, SystemBusy
from ...extras import required
from ..system import System
from ..tree import Changes, DeltaTree

with required("PostgresSystem", "postgres"):
    import psycopg
    from psycopg import sql
    from psycopg.rows import tuple_row

    from .postgres_rows import PREFIX, CapturedRows, drop_home, require_schemas

Connection = psycopg.Connection[Any]
Observer = Callable[[Connection], object]

_WAIT_SECONDS_MAX: Final = 3_600
_PAUSE_SECONDS: Final = 0.01
_LOCK_SPACE: Final = 0x486F6C64
# Rows are stored as text; with these settings the text does not depend on the session.
_SETTINGS: Final = (
    "SET datestyle = 'ISO, YMD'; SET intervalstyle = 'postgres'; SET bytea_output = 'hex';"
    " SET extra_float_digits = 1; SET timezone = 'UTC'; SET row_security = off"
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
    set session_replication_role; the owner of the tables can do without, more slowly, and a warning
    says so.
    """

    not_covered = (
        "changes of the schema: they are refused, with the names of what changed",
        "tables without a key cost a copy of their content at each checkpoint",
        "rows that change in replica mode; where triggers are disabled, the rest is refused",
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
        require_schemas(schemas)
        self._wait_seconds = wait_seconds
        self._schemas = list(schemas)
        self._observe = observe
        self._dsn = dsn
        self._name = f"{PREFIX}{uuid.uuid4().hex[:16]}"
        self._connection = psycopg.connect(
            dsn, autocommit=True, row_factory=tuple_row, application_name="holdfast world"
        )
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def checkpoint(self, name: str) -> int:
        """Store what was committed since the last checkpoint or rollback."""
        with self._connection.transaction():
            self._rows.require_same_schema()
            pending = self._rows.drain()
        token = self._tree.add(pending)
        self._rows.note(pending)
        return token

    def prepare(self, token: int) -> None:
        """Raise unless the token is known, the schema unchanged, and nobody in a transaction."""
        self._tree.find(token)
        self._rows.require_same_schema()
        self._wait_for_others()

    def rollback(self, token: int) -> None:
        """Replace the rows that differ, in one transaction."""
        target = self._tree.find(token)
        self._wait_for_others()
        with self._exclusive():
            self._rows.require_same_schema()
            pending = self._rows.drain()
            changes = self._tree.changes_to(target, pending)
            self._rows.apply(changes)
        self._rows.note(pending)
        self._rows.note(changes)
        self._tree.move(target)

    def release(self, token: int) -> None:
        """Forget a checkpoint."""
        self._tree.release(token)

    def keep(self, token: int) -> object:
        """Return the rows of every table, and the values of the sequences."""
        with self._connection.transaction():
            tables = {table.name: self._rows.content(table) for table in self._rows.tables.values()}
            return {"tables": tables, "sequences": dict(self._rows.sequences)}

    def restore(self, kept: dict[str, Any]) -> None:
        """Replace the rows that differ from what a dead process has kept."""
        if kept["tables"].keys() != {table.name for table in self._rows.tables.values()}:
            raise Conflict("The schema changed since: there are other tables.")
        self._wait_for_others()
        with self._exclusive():
            self._rows.require_same_schema()
            pending = self._rows.drain()
            changes: Changes = {}
            tables = self._rows.tables.values()
            with self._rows.silent(tables):
                for table in tables:
                    changes |= self._rows.replace(table, kept["tables"][table.name])
            for name, value in kept["sequences"].items():
                now = pending.get(name, (None, self._rows.sequences[name]))[1]
                if now != value:
                    changes[name] = now, value
            self._rows.apply(
                {key: change for key, change in changes.items() if isinstance(key, str)}
            )
        self._rows.note(pending)
        self._rows.note(changes)
        self._tree.leave(self._tree.fold(pending, changes))

    def sweep(self) -> int:
        """Remove the schemas of killed processes, with their triggers."""
        return self.clean(self._dsn)

    def observe(self) -> object:
        """Return what the observer reads, in one transaction."""
        with self._connection.transaction():
            if self._observe is not None:
                return self._observe(self._connection)
            return self._rows.observed()

    def close(self) -> None:
        """Remove the triggers and the log; the tables are left as they are."""
        if self._connection.closed:
            return
        try:
            drop_home(self._connection, self._name)
        finally:
            self._connection.close()

    @staticmethod
    def clean(dsn: str) -> int:
        """Remove what killed processes left in a database; return how many schemas."""
        find = "SELECT nspname FROM pg_namespace WHERE starts_with(nspname, %s)"
        removed = 0
        with psycopg.connect(dsn, autocommit=True, row_factory=tuple_row) as connection:
            for (name,) in connection.execute(find, (PREFIX,)).fetchall():
                if _lock_name(connection, name):
                    drop_home(connection, name)
                    removed += 1
        return removed

    def _start(self) -> None:
        connection = self._connection
        connection.execute(_SETTINGS)
        connection.execute(f"SET lock_timeout = {round(self._wait_seconds * 1000)}".encode())
        self._wait_for_others()
        _lock_name(connection, self._name)
        with connection.transaction():
            self._rows = CapturedRows(connection, self._schemas, self._name)
        self._tree = DeltaTree()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Open a transaction once all transactions that have written end, and keep writers out."""
        lock = sql.SQL("LOCK TABLE {}.log IN EXCLUSIVE MODE").format(sql.Identifier(self._name))
        try:
            with self._connection.transaction():
                self._connection.execute(lock)
                yield
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


def _lock_name(connection: Connection, schema: str) -> bool:
    """Take the lock that shows that the schema's owner is alive."""
    number = int(schema[-7:], 16)
    take = "SELECT pg_try_advisory_lock(%s, %s)"
    found = connection.execute(take, (_LOCK_SPACE, number)).fetchone()
    return found is not None and bool(found[0])
