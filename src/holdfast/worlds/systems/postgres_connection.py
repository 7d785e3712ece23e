"""One PostgreSQL connection that the code under test shares with the world.

Everything happens in one transaction that is never committed. A checkpoint is a savepoint, plus the
rows that changed, as recorded by triggers. While its savepoint exists, a checkpoint is restored by
rolling back to it; otherwise by rolling back to an ancestor's and reapplying the changes after it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

from ...arguments import shown
from ...errors import Conflict, InvalidArgument, SystemBusy
from ...extras import required
from ..system import System
from ..tree import Changes, DeltaTree, Node

with required("PostgresConnectionSystem", "postgres"):
    import psycopg
    from psycopg.pq import TransactionStatus
    from psycopg.rows import tuple_row

    from .postgres_rows import PREFIX, CapturedRows, drop_home, require_schemas
    from .postgres_tables import read_sequences

# A row that is changed many times in one transaction becomes slow to find.
_SAVEPOINTS_MAX: Final = 200


class PostgresConnectionSystem(System):
    """A connection of psycopg and what it sees of some schemas; nothing is ever committed.

    The code under test uses the same connection, with `connection.transaction()` blocks, and
    neither commits nor rolls back the connection. A statement that fails outside such a block
    undoes everything since the last checkpoint or rollback. `close()` undoes all changes.
    """

    is_in_process = True
    not_covered = (
        "changes of the schema: they are refused, with the names of what changed",
        "other connections: they see no changes, and wait if they write to the same tables",
        "tables without a key cost a copy of their content at each checkpoint",
        "rows that change in replica mode; where triggers are disabled, the rest is refused",
        "large objects, notifications, advisory locks, system columns such as ctid and xmin",
        "tables with inheritance other than partitions",
    )

    def __init__(
        self,
        connection: psycopg.Connection[Any],
        *,
        schemas: Sequence[str] = ("public",),
        observe: Callable[[psycopg.Connection[Any]], object] | None = None,
    ) -> None:
        if not isinstance(connection, psycopg.Connection):
            raise InvalidArgument(
                f"connection must be a psycopg connection, not {shown(connection)}"
            )
        require_schemas(schemas)
        if connection.info.transaction_status != TransactionStatus.IDLE:
            raise SystemBusy("the connection is in a transaction; commit it or roll it back first")
        self._raw = connection
        self._schemas = list(schemas)
        self._observe = observe
        self._connection = cast("psycopg.Connection[Any]", _Tuples(connection))
        self._home = f"{PREFIX}{uuid.uuid4().hex[:16]}"
        self._first = self._sequences()
        connection.rollback()
        try:
            self._start()
        except BaseException:
            connection.rollback()
            raise

    def checkpoint(self, name: str) -> int:
        """Store what changed since the last checkpoint or rollback."""
        self._settle()
        self._rows.require_same_schema()
        pending = self._rows.drain()
        token = self._tree.add(pending)
        self._rows.note(pending)
        head = self._tree.head
        if len(self._stack) >= _SAVEPOINTS_MAX:
            self._go_to(head)
        elif head is not self._stack[-1]:
            self._save(head)
        return token

    def prepare(self, token: int) -> None:
        """Raise unless the token is known and the transaction is still the same."""
        self._tree.find(token)
        self._require_same_transaction()

    def rollback(self, token: int) -> None:
        """Roll back to the savepoint, or to an ancestor's and forward from there."""
        target = self._tree.find(token)
        self._require_same_transaction()
        self._go_to(target)
        self._tree.move(target)

    def release(self, token: int) -> None:
        """Forget a checkpoint; its savepoint goes with the next rollback to an earlier one."""
        self._tree.release(token)

    def observe(self) -> object:
        """Return what the observer reads; by default the rows of every table."""
        self._settle()
        if self._observe is not None:
            return self._observe(self._raw)
        return self._rows.observed()

    def close(self) -> None:
        """Undo everything, and leave the connection outside a transaction."""
        if self._raw.closed:
            return
        self._raw.rollback()
        # The log still exists only if the code under test has committed.
        with self._raw.transaction():
            drop_home(self._connection, self._home)
            for name, value in self._first.items():
                self._set_sequence(name, value)

    def _start(self) -> None:
        if self._raw.autocommit:
            self._raw.execute("BEGIN")
        self._transaction = self._transaction_id()
        self._rows = CapturedRows(self._connection, self._schemas, self._home)
        self._tree = DeltaTree()
        # Every other node is reached from the first one, so it is never folded away.
        base = self._tree.find(self._tree.add({}))
        self._stack: list[Node[Changes]] = []
        self._save(base)

    def _save(self, node: Node[Changes]) -> None:
        self._connection.execute(f"SAVEPOINT {_name(len(self._stack))}".encode())
        self._stack.append(node)

    def _go_to(self, target: Node[Changes]) -> None:
        """Bring the content to that of a node, which is then on top of the stack."""
        live = {node.number: index for index, node in enumerate(self._stack)}
        down: list[Node[Changes]] = []
        node = target
        is_long = len(self._stack) >= _SAVEPOINTS_MAX
        while node.number not in live or (is_long and live[node.number]):
            down.append(node)
            assert node.parent is not None, "the first node is on the stack"
            node = node.parent
        place = live[node.number]
        self._connection.execute(f"ROLLBACK TO SAVEPOINT {_name(place)}".encode())
        del self._stack[place + 1 :]
        changes: Changes = {}
        for step in reversed(down):
            changes = self._tree.fold(changes, step.changes)
        if down:
            self._redo(changes)
            self._save(target)
        self._rows.look()
        self._restore_whole(target)

    def _redo(self, changes: Changes) -> None:
        self._rows.apply({key: change for key, change in changes.items() if type(key) is tuple})

    def _restore_whole(self, target: Node[Changes]) -> None:
        """Set the sequences, which savepoints do not cover, and note tables that are read whole."""
        wanted = self._tree.changes_to(target, {})
        for name, value in self._sequences().items():
            meant = wanted.get(name, (None, self._rows.sequences[name]))[1]
            if value != meant:
                self._set_sequence(name, meant)
        self._rows.note(wanted)

    def _settle(self) -> None:
        """Undo what a failed statement left, as its own transaction would have."""
        if self._raw.info.transaction_status == TransactionStatus.INERROR:
            self._go_to(self._stack[-1])
        self._require_same_transaction()

    def _require_same_transaction(self) -> None:
        status = self._raw.info.transaction_status
        if status == TransactionStatus.INERROR:
            return
        if status == TransactionStatus.IDLE or self._transaction_id() != self._transaction:
            raise Conflict(
                "The code under test has committed or rolled back the connection that it shares "
                "with the world. Use connection.transaction() blocks in it, or PostgresSystem."
            )

    def _transaction_id(self) -> int:
        found = self._connection.execute("SELECT pg_current_xact_id()::text::bigint").fetchone()
        return int(cast("tuple[int]", found)[0])

    def _sequences(self) -> dict[str, tuple[int, bool]]:
        return read_sequences(self._connection, self._schemas)

    def _set_sequence(self, name: str, value: tuple[int, bool]) -> None:
        self._connection.execute("SELECT setval(%s::regclass, %s, %s)", (name, *value))


class _Tuples:
    """A connection whose rows are tuples, whatever the code under test has chosen."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection
        self.transaction = connection.transaction

    def execute(self, query: Any, parameters: Any = None) -> psycopg.Cursor[Any]:
        return self._connection.cursor(row_factory=tuple_row).execute(query, parameters)


def _name(place: int) -> str:
    return f"holdfast_{place}"
