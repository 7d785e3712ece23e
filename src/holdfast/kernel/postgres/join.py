"""Running operations inside the caller's transaction: no commit, no retry.

Calls on one connection are made one after the other: each has a savepoint, and rolling back to it
would undo what another has written since.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import dict_row

from ...errors import InvalidArgument
from ..driver import AsyncDriver, DialectName, Progress, Settings, SyncDriver
from ..flow import drive, drive_async
from ..operation import Call
from ..signals import Signals
from .pipeline import DriverStep, Message, Reply, Send
from .transactions import Transactions

R = TypeVar("R")

_turns: WeakKeyDictionary[psycopg.Connection[Any], threading.RLock] = WeakKeyDictionary()
_async_turns: WeakKeyDictionary[psycopg.AsyncConnection[Any], asyncio.Lock] = WeakKeyDictionary()


class JoinedDriver(SyncDriver):
    """Runs calls inside the caller's transaction, each in a savepoint."""

    dialect: ClassVar[DialectName] = "postgres"
    is_joined: ClassVar[bool] = True

    def __init__(
        self, connection: Any, schema: str, settings: Settings, wanted: type = psycopg.Connection
    ) -> None:
        require_transaction(connection, wanted)
        super().__init__(settings, Signals(), "the joined store")
        self.connection = connection
        self.transactions = Transactions(schema, settings)

    def _execute(self, call: Call[R]) -> R:
        with _turns.setdefault(self.connection, threading.RLock()):
            require_unfailed(self.connection)
            return drive(self.transactions.join(self.connection, call), self._perform)

    def _perform(self, step: DriverStep) -> Any:
        assert isinstance(step, Send)
        return send(step.connection, step.messages)

    def twin(self) -> SyncDriver:
        """Refuse: there is no second connection."""
        raise InvalidArgument("a session cannot be driven inside a joined transaction")

    def require_own(self, what: str) -> None:
        """Refuse."""
        raise InvalidArgument(f"a store joined to a transaction by within() cannot {what}")

    def copy_to(self, path: Path, progress: Progress | None) -> None:
        """Refuse."""
        self.require_own("be backed up")

    def vacuum(self) -> None:
        """Refuse."""
        self.require_own("be vacuumed")

    def close(self) -> None:
        """Leave the connection to its owner."""


class AsyncJoinedDriver(AsyncDriver):
    """The same for an async connection."""

    dialect: ClassVar[DialectName] = "postgres"
    is_joined: ClassVar[bool] = True
    _twin: JoinedDriver

    def __init__(self, connection: Any, schema: str, settings: Settings) -> None:
        super().__init__(JoinedDriver(connection, schema, settings, psycopg.AsyncConnection))

    async def run(self, call: Call[R]) -> R:
        """Run a call; the caller's COMMIT makes it durable."""
        connection = self._twin.connection
        async with _async_turns.setdefault(connection, asyncio.Lock()):
            require_unfailed(connection)
            steps = self._twin.transactions.join(connection, call)
            return await drive_async(steps, self._perform)

    async def _perform(self, step: DriverStep) -> Any:
        assert isinstance(step, Send)
        return await send_async(step.connection, step.messages)

    def twin(self) -> SyncDriver:
        """Refuse: there is no second connection."""
        return self._twin.twin()

    def require_own(self, what: str) -> None:
        """Refuse."""
        self._twin.require_own(what)

    async def close(self) -> None:
        """Leave the connection to its owner."""


def require_transaction(connection: Any, wanted: type[Any]) -> None:
    """Refuse anything but a psycopg connection of this type inside a transaction."""
    if not isinstance(connection, wanted):
        raise InvalidArgument(
            f"within() takes a psycopg.{wanted.__name__}, not {type(connection).__name__}; "
            "SQLAlchemy has it as connection.connection.driver_connection"
        )
    if connection.closed:
        raise InvalidArgument("within() needs an open connection; this one is closed")
    require_unfailed(connection)
    status = connection.info.transaction_status
    is_ready = status == TransactionStatus.INTRANS or (
        status == TransactionStatus.IDLE and not connection.autocommit
    )
    if not is_ready:
        raise InvalidArgument("within() needs a connection that is in a transaction; begin one")


def require_unfailed(connection: Any) -> None:
    """Refuse a transaction that can only be rolled back."""
    if connection.info.transaction_status == TransactionStatus.INERROR:
        raise InvalidArgument("within() cannot join a transaction that has failed; roll it back")


def send(connection: Any, messages: Sequence[Message]) -> list[Reply]:
    """Send messages in one round trip and return their replies."""
    if len(messages) == 1:
        cursor = psycopg.RawCursor(connection, row_factory=dict_row)
        cursor.execute(messages[0].text.encode(), messages[0].values, binary=True)
        return [_reply(cursor, cursor.fetchall() if cursor.description else [])]
    cursors = []
    with connection.pipeline():
        for message in messages:
            cursor = psycopg.RawCursor(connection, row_factory=dict_row)
            cursor.execute(message.text.encode(), message.values, binary=True)
            cursors.append(cursor)
    return [_reply(cursor, cursor.fetchall() if cursor.description else []) for cursor in cursors]


async def send_async(connection: Any, messages: Sequence[Message]) -> list[Reply]:
    """Send messages in one round trip and return their replies."""
    cursors = []
    async with connection.pipeline():
        for message in messages:
            cursor = psycopg.AsyncRawCursor(connection, row_factory=dict_row)
            await cursor.execute(message.text.encode(), message.values, binary=True)
            cursors.append(cursor)
    return [
        _reply(cursor, await cursor.fetchall() if cursor.description else []) for cursor in cursors
    ]


def _reply(cursor: Any, rows: list[dict[str, Any]]) -> Reply:
    return Reply(rows, cursor.rowcount)
