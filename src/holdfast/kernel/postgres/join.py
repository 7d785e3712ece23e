"""Running operations inside the caller's transaction: no commit, no retry.

Each call has a savepoint, which is set with its first round trip and released with its last one. A
call that fails, is cancelled or interrupted is undone; if that cannot be made sure, the connection
is closed, and with it the caller's transaction ends: half of a call is never committed.

Calls on one connection are made one after the other, because rolling back to a savepoint would undo
what another has written since.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Generator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import psycopg
from psycopg.abc import PQGen
from psycopg.pq import PipelineStatus, TransactionStatus

from ...errors import InvalidArgument
from ..driver import AsyncDriver, DialectName, Execution, Progress, Settings, SyncDriver
from ..flow import drive, drive_async, finish
from ..operation import Call
from ..signals import Signals
from .errors import translate
from .pipeline import CANCEL_SECONDS_MAX, Link, Message, Reply, Slot
from .transactions import Transactions

R = TypeVar("R")
Exchange: TypeAlias = PQGen[list[Reply]]

# PostgreSQL treats both in the same way.
JOINABLE = ("read committed", "read uncommitted")

_turns: WeakKeyDictionary[psycopg.Connection[Any], threading.RLock] = WeakKeyDictionary()
_async_turns: WeakKeyDictionary[psycopg.AsyncConnection[Any], asyncio.Lock] = WeakKeyDictionary()
_numbers = itertools.count(1)


class JoinedCall(Generic[R]):
    """A call inside the caller's transaction. Who performs its exchanges holds the connection."""

    def __init__(self, transactions: Transactions, connection: Any, call: Call[R]) -> None:
        transactions.require_allowed(call)
        self.link = Link(connection, Slot(), prepares=False)
        self.is_settled = True
        """Whether the transaction has the whole call or nothing of it."""
        self.may_cancel = False
        """Whether what is running is undone with the savepoint, if the server cancels it."""
        self._transactions = transactions
        self._connection = connection
        self._execution = Execution(call, transactions.settings.services)
        self._execution.advance()
        # One that the caller has set, or an outer call, has another name.
        self._savepoint = f"SAVEPOINT holdfast_{next(_numbers)}"

    def run(self) -> Generator[Exchange, list[Reply], R]:
        """Run the call; every exchange is performed to its end, or the call is undone."""
        execution, message = self._execution, self._transactions.message
        try:
            yield self._enter()
            self.may_cancel = True
            while execution.queries:
                replies = yield self._go_on([message(query) for query in execution.queries])
                execution.advance([reply.rows for reply in replies])
            closing = [message(query) for query in execution.closing(at_once=True)]
            yield self._go_on([*closing, Message(f"RELEASE {self._savepoint}")])
        except psycopg.Error as error:
            raise translate(error) from error
        self.is_settled = True
        return execution.result

    def _enter(self) -> Exchange:
        """Set the savepoint, in a transaction that is begun as the caller's own statement would."""
        require_ready(self._connection)
        begin = []
        if self._connection.info.transaction_status == TransactionStatus.IDLE:
            if self._connection.autocommit:
                raise _not_begun()
            begin = [_begin(self._connection)]
        self.is_settled = False
        opening = [*begin, *self._transactions.local({}), Message(self._savepoint)]
        replies = yield from self.link.exchange([*opening, Message("SHOW transaction_isolation")])
        isolation = replies[-1].rows[0]["transaction_isolation"]
        if isolation not in JOINABLE:
            raise InvalidArgument(
                f"within() needs a READ COMMITTED transaction, this one is {isolation.upper()}"
            )
        return replies

    def _go_on(self, messages: Sequence[Message]) -> Exchange:
        # Otherwise each statement would be committed by itself.
        if self._connection.info.transaction_status != TransactionStatus.INTRANS:
            raise InvalidArgument("the transaction was ended during a call that had joined it")
        return (yield from self.link.exchange(messages))

    @property
    def is_waiting(self) -> bool:
        """Whether a statement runs that can be cancelled."""
        status = self._connection.info.transaction_status
        return self.may_cancel and status == TransactionStatus.ACTIVE

    def undo(self) -> PQGen[None]:
        """Roll back to the savepoint, if the transaction has it."""
        yield from self.link.drain()
        guard, back = f"{self._savepoint}_undo", f"ROLLBACK TO {self._savepoint}"
        undo = [Message(back), Message(f"RELEASE {self._savepoint}")]
        status = self._connection.info.transaction_status
        if status == TransactionStatus.INTRANS:
            try:
                yield from self.link.exchange([Message(guard), *undo])
            except psycopg.errors.InvalidSavepointSpecification:
                # It was not set yet, or is released: the transaction has nothing or all of it.
                restored = [Message(f"ROLLBACK TO {guard}"), Message(f"RELEASE {guard}")]
                yield from self.link.exchange(restored)
        elif status == TransactionStatus.INERROR:
            with suppress(psycopg.errors.InvalidSavepointSpecification):
                yield from self.link.exchange(undo)
        self.is_settled = True

    def close_unless_settled(self) -> None:
        """Close a connection whose transaction may have half of the call."""
        if not self.is_settled:
            self._connection.pgconn.finish()


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
            require_open(self.connection)
            joined = JoinedCall(self.transactions, self.connection, call)
            try:
                return drive(joined.run(), partial(self._perform, joined))
            except BaseException:
                with self.connection.lock:
                    self._undo(joined)
                raise
            finally:
                joined.close_unless_settled()

    def _perform(self, joined: JoinedCall[Any], exchange: Exchange) -> list[Reply]:
        with self.connection.lock:
            try:
                return joined.link.perform(exchange, self.transactions.answer_seconds, _always)
            except BaseException:
                # Before another thread can use the connection.
                self._undo(joined)
                raise

    def _undo(self, joined: JoinedCall[Any]) -> None:
        if joined.is_settled:
            return
        with suppress(psycopg.Error):
            if joined.is_waiting:
                self.connection.cancel_safe(timeout=CANCEL_SECONDS_MAX)
            joined.link.perform(joined.undo(), CANCEL_SECONDS_MAX)

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
        connection, transactions = self._twin.connection, self._twin.transactions
        async with _async_turns.setdefault(connection, asyncio.Lock()):
            require_open(connection)
            joined = JoinedCall(transactions, connection, call)
            try:
                return await drive_async(joined.run(), partial(self._perform, joined))
            except GeneratorExit:
                # The task is thrown away, and can wait for nothing more.
                raise
            except BaseException:
                async with connection.lock:
                    await finish(self._undo(joined))
                raise
            finally:
                joined.close_unless_settled()

    async def _perform(self, joined: JoinedCall[Any], exchange: Exchange) -> list[Reply]:
        limit_seconds = self._twin.transactions.answer_seconds
        async with self._twin.connection.lock:
            try:
                return await joined.link.perform_async(exchange, limit_seconds, _always)
            except GeneratorExit:
                raise
            except BaseException:
                await finish(self._undo(joined))
                raise

    async def _undo(self, joined: JoinedCall[Any]) -> None:
        if joined.is_settled:
            return
        with suppress(psycopg.Error):
            if joined.is_waiting:
                await self._twin.connection.cancel_safe(timeout=CANCEL_SECONDS_MAX)
            await joined.link.perform_async(joined.undo(), CANCEL_SECONDS_MAX)

    def twin(self) -> SyncDriver:
        """Refuse: there is no second connection."""
        return self._twin.twin()

    def require_own(self, what: str) -> None:
        """Refuse."""
        self._twin.require_own(what)

    async def close(self) -> None:
        """Leave the connection to its owner."""


def require_transaction(connection: Any, wanted: type[Any]) -> None:
    """Refuse anything but a psycopg connection of this type that is, or may be, in a transaction.

    One that another thread is using shows that only when it is this call's turn.
    """
    if not isinstance(connection, wanted):
        raise InvalidArgument(
            f"within() takes a psycopg.{wanted.__name__}, not {type(connection).__name__}; "
            "SQLAlchemy has it as connection.connection.driver_connection"
        )
    require_open(connection)
    status = connection.info.transaction_status
    if status == TransactionStatus.INERROR:
        raise _failed()
    if status == TransactionStatus.IDLE and connection.autocommit and not _is_pipelined(connection):
        raise _not_begun()


def require_open(connection: Any) -> None:
    """Refuse a closed connection."""
    if connection.closed:
        raise InvalidArgument("within() needs an open connection; this one is closed")


def require_ready(connection: Any) -> None:
    """Refuse a connection that cannot take statements now; the caller has exclusive use of it."""
    if _is_pipelined(connection):
        raise InvalidArgument(
            "within() cannot join a connection in pipeline mode; leave `with connection.pipeline()`"
        )
    status = connection.info.transaction_status
    if status == TransactionStatus.INERROR:
        raise _failed()
    if status == TransactionStatus.ACTIVE:
        raise InvalidArgument(
            "within() cannot use a connection whose last statement has not ended (COPY, for "
            "example); finish it first"
        )


def _is_pipelined(connection: Any) -> bool:
    return bool(connection.pgconn.pipeline_status != PipelineStatus.OFF)


def _failed() -> InvalidArgument:
    return InvalidArgument("within() cannot join a transaction that has failed; roll it back")


def _not_begun() -> InvalidArgument:
    return InvalidArgument("within() needs a connection that is in a transaction; begin one")


def _begin(connection: Any) -> Message:
    """Return the statement with which psycopg would begin a transaction."""
    text = "BEGIN"
    if connection.isolation_level is not None:
        text += " ISOLATION LEVEL " + connection.isolation_level.name.replace("_", " ")
    if connection.read_only is not None:
        text += " READ ONLY" if connection.read_only else " READ WRITE"
    if connection.deferrable is not None:
        text += " DEFERRABLE" if connection.deferrable else " NOT DEFERRABLE"
    return Message(text)


def _always() -> bool:
    """Wait for as long as the caller's own settings allow."""
    return True
