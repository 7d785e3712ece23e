"""An SQLite connection of this process, which the code under test uses too."""

from __future__ import annotations

import sqlite3
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast

import apsw

from ...arguments import shown
from ...errors import InvalidArgument, SystemBusy
from ..system import System
from ..tree import Node, SnapshotTree
from .sqlite import Reads, all_tables, copy_database, quoted

_VIRTUAL: Final = "SELECT 1 FROM sqlite_schema WHERE sql LIKE 'CREATE VIRTUAL%' LIMIT 1"
_TABLES: Final = (
    "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite~_%' ESCAPE '~'"
)
_HAS_COUNTERS: Final = "SELECT 1 FROM sqlite_schema WHERE name = 'sqlite_sequence'"


class SqliteConnectionSystem(System):
    """A connection and its main database, also one in memory; no other connection may write.

    With a connection of apsw a checkpoint costs what changed; changes of the schema cost a copy of
    the database, and so does each checkpoint of a connection of the standard library.
    """

    is_in_process = True
    not_covered = (
        "changes by other connections",
        "temporary tables and attached databases",
        "row numbers of tables without an INTEGER PRIMARY KEY",
        "AUTOINCREMENT counters are restored, but are not part of a state",
    )

    def __init__(
        self,
        connection: apsw.Connection | sqlite3.Connection,
        *,
        observe: Callable[[Any], object] | None = None,
    ) -> None:
        self._connection = connection
        self._observe = observe or all_tables
        if not isinstance(connection, apsw.Connection | sqlite3.Connection):
            raise InvalidArgument(
                f"connection must be an SQLite connection, not {shown(connection)}"
            )
        self._require_rest()
        problem = _why_no_changesets(connection)
        if problem is None:
            self._database: _Database = _Changesets(cast("apsw.Connection", connection))
        else:
            self._database = _WholeCopies(connection)
            warnings.warn(
                f"Each checkpoint copies the whole database, because {problem}.", stacklevel=2
            )
        self._tree = _Snapshots(Snapshot(self._database.copy(), ()))

    def checkpoint(self, name: str) -> int:
        """Store what changed since the last checkpoint or rollback."""
        self._require_rest()
        token = self._tree.add(self._database.pending())
        self._database.begin()
        return token

    def prepare(self, token: int) -> None:
        """Raise unless the token is known and no transaction is open."""
        self._tree.find(token)
        self._require_rest()

    def rollback(self, token: int) -> None:
        """Restore the content, by applying changes if possible, or else from a copy."""
        self._require_rest()
        target = self._tree.find(token)
        up, down, _ = self._tree.route(target)
        pending = self._database.pending()
        if all(step.copy is None for step in (pending, *(node.changes for node in (*up, *down)))):
            undo = [*reversed(pending.changes)]
            undo += [change for node in up for change in reversed(node.changes.changes)]
            redo = [change for node in down for change in node.changes.changes]
            self._database.apply(undo, redo)
        else:
            copy, redo = _whole(target)
            self._database.restore(copy)
            self._database.apply([], redo)
        self._tree.move(target)
        self._database.begin()

    def release(self, token: int) -> None:
        """Forget a checkpoint."""
        self._tree.release(token)

    def observe(self) -> object:
        """Return what the observer reads."""
        return self._observe(self._connection)

    def close(self) -> None:
        """Stop recording; the connection stays open."""
        self._database.close()

    def _require_rest(self) -> None:
        if self._connection.in_transaction:
            raise SystemBusy("the connection is in a transaction; commit it or roll it back first")


@dataclass(frozen=True, slots=True)
class Change:
    """A changeset, and the AUTOINCREMENT counters before and after it."""

    rows: bytes
    counters_before: tuple[tuple[str, int], ...]
    counters_after: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Changes since the parent; or, with a copy, since that copy."""

    copy: Any
    changes: tuple[Change, ...]


class _Snapshots(SnapshotTree[Snapshot]):
    def fold(self, first: Snapshot, second: Snapshot) -> Snapshot:
        if second.copy is not None:
            return second
        return Snapshot(first.copy, first.changes + second.changes)

    def is_empty(self, changes: Snapshot) -> bool:
        return changes.copy is None and not changes.changes


def _whole(target: Node[Snapshot]) -> tuple[Any, list[Change]]:
    """Return the nearest copy at or above a node, and the changes from it to the node."""
    changes = list(target.changes.changes)
    node = target
    while node.changes.copy is None:
        assert node.parent is not None, "the first node has a copy"
        node = node.parent
        changes = [*node.changes.changes, *changes]
    return node.changes.copy, changes


class _Database(Protocol):
    def pending(self) -> Snapshot: ...
    def begin(self) -> None: ...
    def apply(self, undo: list[Change], redo: list[Change]) -> None: ...
    def copy(self) -> Any: ...
    def restore(self, copy: Any) -> None: ...
    def close(self) -> None: ...


class _Copy(sqlite3.Connection):
    """A copy that closes itself once no snapshot holds it: Python 3.13 warns of open ones."""

    def __del__(self) -> None:
        self.close()


class _WholeCopies:
    """Every snapshot is a copy: slow, but always exact."""

    def __init__(self, connection: apsw.Connection | sqlite3.Connection) -> None:
        self._connection = connection

    def pending(self) -> Snapshot:
        return Snapshot(self.copy(), ())

    def begin(self) -> None:
        pass

    def apply(self, undo: list[Change], redo: list[Change]) -> None:
        assert not undo, "whole copies have no changes"
        assert not redo, "whole copies have no changes"

    def copy(self) -> apsw.Connection | sqlite3.Connection:
        copy = (
            sqlite3.connect(":memory:", check_same_thread=False, factory=_Copy)
            if isinstance(self._connection, sqlite3.Connection)
            else apsw.Connection(":memory:")
        )
        _copy(self._connection, copy)
        return copy

    def restore(self, copy: apsw.Connection | sqlite3.Connection) -> None:
        _copy(copy, self._connection)

    def close(self) -> None:
        pass


def _copy(source: Any, target: Any) -> None:
    if isinstance(source, sqlite3.Connection):
        source.backup(target)
    else:
        copy_database(source, target)


class _Changesets:
    """The connection of apsw: SQLite's session extension records which rows change."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection
        self._session: apsw.Session | None = None
        self.begin()

    def begin(self) -> None:
        """Start recording."""
        self.close()
        self._schema = self._schema_number()
        self._is_recordable = self._all_rows_have_keys()
        self._counters = self._read_counters()
        self._session = apsw.Session(self._connection, "main")
        self._session.config(apsw.SQLITE_SESSION_OBJCONFIG_ROWID, 1)
        self._session.attach()

    def pending(self) -> Snapshot:
        """Return what was recorded, or a copy if something happened that is not recorded."""
        assert self._session is not None, "the system is closed"
        if self._schema != self._schema_number():
            return Snapshot(self.copy(), ())
        if not (self._is_recordable and self._all_rows_have_keys()):
            return Snapshot(self.copy(), ())
        rows, counters = self._session.changeset(), self._read_counters()
        if not rows and counters == self._counters:
            return Snapshot(None, ())
        return Snapshot(None, (Change(rows, self._counters, counters),))

    def apply(self, undo: list[Change], redo: list[Change]) -> None:
        """Undo and redo recorded changes in one transaction, without triggers and cascades."""
        counters = redo[-1].counters_after if redo else undo[-1].counters_before if undo else None
        steps = [apsw.Changeset.invert(change.rows) for change in undo if change.rows]
        steps += [change.rows for change in redo if change.rows]
        trigger, foreign = apsw.SQLITE_DBCONFIG_ENABLE_TRIGGER, apsw.SQLITE_DBCONFIG_ENABLE_FKEY
        triggers, keys = (self._connection.config(option, -1) for option in (trigger, foreign))
        self._connection.config(trigger, 0)
        self._connection.config(foreign, 0)
        try:
            with self._unrecorded(), self._connection:
                for step in steps:
                    apsw.Changeset.apply(step, self._connection)
                if counters is not None:
                    self._write_counters(counters)
        finally:
            self._connection.config(trigger, int(triggers))
            self._connection.config(foreign, int(keys))

    def copy(self) -> apsw.Connection:
        copy = apsw.Connection(":memory:")
        copy_database(self._connection, copy)
        return copy

    def restore(self, copy: apsw.Connection) -> None:
        with self._unrecorded():
            copy_database(copy, self._connection)

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    @contextmanager
    def _unrecorded(self) -> Iterator[None]:
        """Apply changes without recording them; if that fails, nothing has changed."""
        assert self._session is not None, "the system is closed"
        self._session.enabled = False
        try:
            yield
        except BaseException:
            self._session.enabled = True
            raise

    def _schema_number(self) -> int:
        return int(self._connection.pragma("schema_version"))

    def _all_rows_have_keys(self) -> bool:
        """Return whether every change can be recorded: a NULL in a key hides its row."""
        if self._connection.execute(_VIRTUAL).fetchall():
            return False
        for table in (str(name) for (name,) in self._connection.execute(_TABLES).fetchall()):
            for name, is_required in _keys(self._connection, table):
                select = f"SELECT 1 FROM {quoted(table)} WHERE {quoted(name)} IS NULL LIMIT 1"  # noqa: S608
                if not is_required and self._connection.execute(select).fetchall():
                    return False
        return True

    def _read_counters(self) -> tuple[tuple[str, int], ...]:
        if not self._connection.execute(_HAS_COUNTERS).fetchall():
            return ()
        rows = self._connection.execute("SELECT name, seq FROM sqlite_sequence ORDER BY name")
        return tuple((str(name), int(number)) for name, number in rows)

    def _write_counters(self, counters: tuple[tuple[str, int], ...]) -> None:
        if self._connection.execute(_HAS_COUNTERS).fetchall():
            self._connection.execute("DELETE FROM sqlite_sequence")
            self._connection.executemany("INSERT INTO sqlite_sequence VALUES (?, ?)", counters)


def _why_no_changesets(connection: apsw.Connection | sqlite3.Connection) -> str | None:
    """Return why changes cannot be recorded and undone, or None; a scratch database is tried."""
    if isinstance(connection, sqlite3.Connection):
        return "sqlite3 cannot record changes; with an apsw connection it costs only what changed"
    try:
        with closing(apsw.Connection(":memory:")) as scratch:
            return _try_out(scratch)
    except (AttributeError, apsw.Error) as error:
        return f"a self-test of recording changes failed here: {error}"


def _try_out(scratch: apsw.Connection) -> str | None:
    """Change a table, undo and redo the change, and compare."""
    scratch.execute("CREATE TABLE t (a PRIMARY KEY, b); INSERT INTO t VALUES (1, 'x'), (2, NULL)")
    changesets = _Changesets(scratch)
    try:
        states = [all_tables(scratch)]
        scratch.execute("UPDATE t SET b = x'00' WHERE a = 1; DELETE FROM t WHERE a = 2")
        scratch.execute("INSERT INTO t VALUES (3, 0.5)")
        states.append(all_tables(scratch))
        changes = list(changesets.pending().changes)
        for wanted, steps in ((states[0], (changes, [])), (states[1], ([], changes))):
            changesets.apply(*steps)
            if all_tables(scratch) != wanted:
                return "a self-test of recording changes gave a different result here"
    finally:
        changesets.close()
    return None


def _keys(connection: Reads, table: str) -> list[tuple[str, bool]]:
    """Return the columns of a table's primary key, and whether each refuses NULL."""
    pragma = f"PRAGMA table_info({quoted(table)})"
    rows = connection.execute(pragma).fetchall()
    is_number = sum(row[5] > 0 for row in rows) == 1
    return [
        (row[1], bool(row[3]) or (is_number and str(row[2]).upper() == "INTEGER"))
        for row in rows
        if row[5]
    ]
