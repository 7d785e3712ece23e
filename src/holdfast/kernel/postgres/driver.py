"""The PostgreSQL drivers, sync and async: how each performs the steps of a transaction."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import psycopg

from ...errors import StoreReadOnly
from ..driver import AsyncDriver, DialectName, Progress, Settings, SyncDriver
from ..flow import drive, drive_async, finish, in_thread, require_loop
from ..operation import Call
from ..url import PostgresTarget
from .connections import Connections, connect_error
from .copy import copy_rows, vacuum
from .notify import Notifier
from .pipeline import Connect, DriverStep, Queue, Send, Sleep, Slot
from .transactions import Transactions, answer_seconds

R = TypeVar("R")

GOODBYE_SECONDS = 1.0


class PostgresDriver(SyncDriver):
    """The sync driver, with the connections of one store."""

    dialect: ClassVar[DialectName] = "postgres"

    def __init__(self, target: PostgresTarget, settings: Settings) -> None:
        """Connect once, so that a wrong URL fails here, with one of our own errors."""
        self.connections = Connections(target)
        self._notifier = Notifier(target, answer_seconds(settings))
        self.transactions = Transactions(target.schema, settings, self.connections, self._notifier)
        super().__init__(settings, self._notifier.signals, "the PostgreSQL store")
        self._target = target
        slot = self.connections.take()
        assert isinstance(slot, Slot)
        try:
            first = self.connections.connect(slot, settings.busy_timeout_seconds)
        except psycopg.Error as error:
            raise connect_error(error, target.dsn) from None
        self.connections.give(first)

    def _execute(self, call: Call[R]) -> R:
        try:
            return drive(self.transactions.run(call), self._perform)
        except (KeyboardInterrupt, SystemExit) as interrupt:
            # Otherwise a connection held by one of the frames lives as long as this error.
            traceback.clear_frames(interrupt.__traceback__)
            raise

    def copy_to(self, path: Path, progress: Progress | None) -> None:
        """Copy every table, in one snapshot, into a new SQLite file."""
        self.require_usable()
        copy_rows(self.connections, self._target.schema, self.settings, path, progress)

    def vacuum(self) -> None:
        """Vacuum and analyse every table."""
        self.require_usable()
        if self.mode == "read":
            raise StoreReadOnly(operation="vacuum")
        vacuum(self.connections, self._target.schema, self.settings)

    def close(self) -> None:
        """Close all connections; in a forked child this does nothing."""
        if self.is_closed or self.is_inherited:
            return
        self.require_outside()
        self.is_closed = True
        self._notifier.close()
        self._forget_writers()
        self.connections.close()

    def _forget_writers(self) -> None:
        """Remove our writer rows if the server answers soon; otherwise they expire."""
        if (link := self.connections.last()) is not None:
            with contextlib.suppress(psycopg.Error):
                link.run(self.transactions.forgetting(), GOODBYE_SECONDS)

    def _perform(self, step: DriverStep) -> Any:
        match step:
            case Send(connection, messages, _, is_patient):
                is_alive = self.transactions.is_alive if is_patient else None
                return connection.run(messages, self.transactions.answer_seconds, is_alive)
            case Connect(slot, seconds):
                return self.connections.connect(slot, seconds)
            case Queue(turn, seconds):
                # A lock: an interrupt can leave the one inside an Event locked for ever.
                asleep = threading.Lock()
                asleep.acquire()
                turn.wake = asleep.release
                if not turn.has_come:
                    asleep.acquire(timeout=seconds)
            case Sleep(seconds):
                time.sleep(seconds)
        return None


class AsyncPostgresDriver(AsyncDriver):
    """The async driver."""

    dialect: ClassVar[DialectName] = "postgres"

    def __init__(self, twin: PostgresDriver) -> None:
        super().__init__(twin)
        self._connections = twin.connections
        self._transactions = twin.transactions
        self._loop = asyncio.get_running_loop()

    async def run(self, call: Call[R]) -> R:
        """Run a call and return its result once it is durable."""
        self._twin.require_usable()
        require_loop(self._loop)
        return await drive_async(self._transactions.run(call, loop=self._loop), self._perform)

    async def close(self) -> None:
        """Close the store, in a thread because it may block."""
        await finish(asyncio.wrap_future(in_thread(self._twin.close)))

    async def _perform(self, step: DriverStep) -> Any:
        match step:
            case Send(connection, messages, is_commit, is_patient):
                limit_seconds = self._transactions.answer_seconds
                is_alive = self._transactions.is_alive if is_patient else None
                return await connection.run_async(
                    messages, limit_seconds, is_alive, to_the_end=is_commit
                )
            case Connect(slot, seconds):
                # Name resolution would block the event loop.
                made = in_thread(partial(self._connections.connect, slot, seconds))
                return await asyncio.wrap_future(made)
            case Queue(turn, seconds):
                event = asyncio.Event()
                turn.wake = partial(self._loop.call_soon_threadsafe, event.set)
                if not turn.has_come:
                    # `wait_for` of Python 3.11 drops a cancellation that comes with the event.
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(seconds):
                            await event.wait()
            case Sleep(seconds):
                await asyncio.sleep(seconds)
        return None
