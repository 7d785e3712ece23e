"""The PostgreSQL driver: a pool in each colour, and the four steps that differ between them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import psycopg
import psycopg_pool
from psycopg.rows import dict_row
from psycopg.types.numeric import Int8Dumper

from ...errors import HoldfastError, StoreBusy, StoreClosed, StoreForked, StoreUnavailable
from ..entrance import Entrance
from ..flow import drive, drive_async, finish, require_loop
from ..marks import FORGET, MARK, WRITER_KEPT_MS
from ..operation import Call, Query, SyncDriver
from ..settings import Settings
from ..signals import Signals
from ..url import PostgresTarget
from .doorbell import Doorbell
from .exchange import CANCEL_SECONDS_MAX, Link, wait_async
from .protocol import (
    POOL_CONNECTIONS_MAX,
    Acquire,
    Message,
    Protocol,
    Release,
    Reply,
    Send,
    Sleep,
    Step,
)

R = TypeVar("R")

KEEPALIVES = {
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
    "connect_timeout": 10,
}


class Connection(psycopg.Connection[dict[str, Any]]):
    """A sync connection with its writer's name and batch number."""

    writer_id: str = ""
    batch: int = 0
    link: Link


class AsyncConnection(psycopg.AsyncConnection[dict[str, Any]]):
    """An async connection with its writer's name and batch number."""

    writer_id: str = ""
    batch: int = 0
    link: Link


class PostgresBase:
    """What both colours share: the protocol, the settings of a connection, the guards."""

    dialect = "postgres"

    def __init__(self, target: PostgresTarget, settings: Settings) -> None:
        self.protocol = Protocol(target.schema, settings)
        self.signals = Signals()
        self.entrance = Entrance()
        self.doorbell = Doorbell(target.listen_dsn, target.schema, self.signals)
        self._target = target
        self._settings = settings
        self._pid = os.getpid()
        self._closed = False
        self._lent: set[int] = set()
        self._arguments: dict[str, Any] = {
            **KEEPALIVES,
            "autocommit": True,
            "row_factory": dict_row,
            "application_name": "holdfast",
            "prepare_threshold": None,
        }

    def _pool_arguments(self) -> dict[str, Any]:
        return {
            "conninfo": self._target.dsn,
            "kwargs": self._arguments,
            # The first call makes the first connection. One made ahead would not be ready for it:
            # the pool would make a second, and from then on hand the two out in turn.
            "min_size": 0,
            "max_size": POOL_CONNECTIONS_MAX,
            "open": False,
            "name": "holdfast",
            "configure": self._configure,
        }

    def _configure(self, connection: Any) -> Any:
        raise NotImplementedError

    def _prepare(self, connection: Any) -> list[Message]:
        """Name a new connection's writer; its row exists before its first transaction."""
        # One dumper for all integers: each text then has one prepared form.
        connection.adapters.register_dumper(int, Int8Dumper)
        # Old poolers cannot keep prepared statements from one transaction to the next.
        connection.link = Link(connection, prepares=self._target.prepares)
        if not self.protocol.is_marking:
            return []
        connection.writer_id = self._settings.services.new_id()
        mark = Query(MARK, {"writer_id": connection.writer_id, "batch": 0})
        forget = Query(FORGET, {"age_ms": WRITER_KEPT_MS})
        return [self.protocol.message(mark), self.protocol.message(forget)]

    def require_usable(self) -> None:
        """Refuse a closed store, and one that a forked child inherited."""
        if os.getpid() != self._pid:
            raise StoreForked(
                f"process {os.getpid()} inherited a PostgreSQL store by fork; open it again in it"
            )
        if self._closed:
            raise StoreClosed("the PostgreSQL store is closed; open it again")

    def _no_connection(self, error: Exception) -> HoldfastError:
        if len(self._lent) >= POOL_CONNECTIONS_MAX:
            return StoreBusy(
                f"all {POOL_CONNECTIONS_MAX} connections were in use for "
                f"{self._settings.busy_timeout_seconds:g} seconds; nothing was written"
            )
        return StoreUnavailable(f"PostgreSQL cannot be reached: {error}; nothing was written")


class PostgresDriver(PostgresBase):
    """The sync colour."""

    def __init__(self, target: PostgresTarget, settings: Settings) -> None:
        super().__init__(target, settings)
        self.pool = psycopg_pool.ConnectionPool(
            connection_class=Connection, **self._pool_arguments()
        )

    def open(self) -> None:
        """Open the pool; the first call connects."""
        self.protocol.is_marking = True
        self.pool.open()

    def run(self, call: Call[R]) -> R:
        """Run a call and return its result once it is durable."""
        self.require_usable()
        return self.entrance.run(self._run, call)

    def _run(self, call: Call[R]) -> R:
        return drive(self.protocol.run(call), self._perform)

    def twin(self) -> SyncDriver:
        """Return a sync driver on the same store, for threads of our own."""
        return self

    def close(self) -> None:
        """Close the pool; in a forked child this does nothing."""
        if self._closed or os.getpid() != self._pid:
            return
        self.entrance.require_outside()
        self._closed = True
        self.doorbell.close()
        self.pool.close()

    def _perform(self, step: Step) -> Any:
        match step:
            case Send(connection, messages):
                return connection.wait(connection.link.exchange(messages))
            case Acquire(timeout_seconds):
                try:
                    connection = self.pool.getconn(timeout_seconds)
                except psycopg_pool.PoolTimeout as error:
                    raise self._no_connection(error) from error
                self._lent.add(id(connection))
                return connection
            case Release(connection, is_sound):
                self._lent.discard(id(connection))
                if not is_sound:
                    connection.close()
                self.pool.putconn(connection)
            case Sleep(seconds):
                time.sleep(seconds)
        return None

    def _configure(self, connection: Connection) -> None:
        for message in self._prepare(connection):
            connection.wait(connection.link.exchange([message]))


class AsyncPostgresDriver(PostgresBase):
    """The async colour."""

    def __init__(self, target: PostgresTarget, settings: Settings) -> None:
        super().__init__(target, settings)
        self._twin: PostgresDriver | None = None
        self._twin_lock = threading.Lock()
        self.pool = psycopg_pool.AsyncConnectionPool(
            connection_class=AsyncConnection, **self._pool_arguments()
        )

    async def open(self) -> None:
        """Open the pool; the first call connects."""
        self.protocol.is_marking = True
        self._loop = asyncio.get_running_loop()
        await self.pool.open()

    async def run(self, call: Call[R]) -> R:
        """Run a call and return its result once it is durable."""
        self.require_usable()
        require_loop(self._loop)
        return await drive_async(self.protocol.run(call), self._perform)

    def twin(self) -> SyncDriver:
        """Return a sync driver on the same store, for threads of our own; opened when needed."""
        with self._twin_lock:
            self.require_usable()
            if self._twin is None:
                self._twin = PostgresDriver(self._target, self._settings)
                self._twin.open()
            return self._twin

    async def close(self) -> None:
        """Close the pool; in a forked child this does nothing."""
        if self._closed or os.getpid() != self._pid:
            return
        with self._twin_lock:
            self._closed = True
            if self._twin is not None:
                await finish(asyncio.to_thread(self._twin.close))
        self.doorbell.close()
        await self.pool.close()

    async def _perform(self, step: Step) -> Any:
        match step:
            case Send(connection, messages, is_commit):
                return await self._exchange(connection, messages, is_commit=is_commit)
            case Acquire(timeout_seconds):
                try:
                    connection = await self.pool.getconn(timeout_seconds)
                except psycopg_pool.PoolTimeout as error:
                    raise self._no_connection(error) from error
                self._lent.add(id(connection))
                return connection
            case Release(connection, is_sound):
                self._lent.discard(id(connection))
                if not is_sound:
                    await finish(connection.close())
                await finish(self.pool.putconn(connection))
            case Sleep(seconds):
                await asyncio.sleep(seconds)
        return None

    async def _exchange(
        self, connection: AsyncConnection, messages: Sequence[Message], *, is_commit: bool
    ) -> list[Reply]:
        """Make one round trip. A COMMIT under way is waited for: its outcome must be known."""
        stopping: asyncio.Future[None] | None = None

        def stop() -> None:
            # The server would go on, and wait for locks, until it notices.
            nonlocal stopping
            stopping = asyncio.ensure_future(connection.cancel_safe(timeout=CANCEL_SECONDS_MAX))

        steps = connection.link.exchange(messages)
        try:
            return await wait_async(steps, connection.fileno(), stop, to_the_end=is_commit)
        finally:
            if stopping is not None:
                with contextlib.suppress(psycopg.Error):
                    await finish(stopping)

    async def _configure(self, connection: AsyncConnection) -> None:
        for message in self._prepare(connection):
            await self._exchange(connection, [message], is_commit=False)
