"""The PostgreSQL driver: what both colours share, and the four steps that differ between them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psycopg

from ...errors import StoreClosed, StoreForked, StoreReadOnly
from ..driver import DialectName, Progress, Settings, StoreMode, SyncDriver
from ..execution import Entrance
from ..flow import drive, drive_async, finish, in_thread, require_loop
from ..operation import Call
from ..url import PostgresTarget
from .connections import Connections, connect_error
from .copy import copy_rows, vacuum
from .notify import Notifier
from .pipeline import Connect, Place, Queue, Send, Sleep, Step
from .transactions import Protocol

R = TypeVar("R")


class PostgresEngine:
    """One store's connections and what runs on them."""

    def __init__(self, target: PostgresTarget, settings: Settings) -> None:
        """Connect once, so that a wrong address is told at once; raises our own errors."""
        self.connections = Connections(target)
        self.protocol = Protocol(target.schema, settings, self.connections)
        self.target = target
        self.settings = settings
        self.entrance = Entrance()
        self.doorbell = Notifier(target, self.protocol.answer_seconds)
        self.signals = self.doorbell.signals
        self._pid = os.getpid()
        self._closed = False
        place = self.connections.take()
        assert isinstance(place, Place)
        try:
            first = self.connections.connect(place, settings.busy_timeout_seconds)
        except psycopg.Error as error:
            raise connect_error(error, target.dsn) from None
        self.connections.give(first)

    def require_usable(self) -> None:
        """Refuse a closed store, and one that a forked child fork."""
        if os.getpid() != self._pid:
            raise StoreForked(
                f"process {os.getpid()} inherited a PostgreSQL store by fork; open it again in it"
            )
        if self._closed:
            raise StoreClosed("the PostgreSQL store is closed; open it again")

    def close(self) -> None:
        """Close all connections; in a forked child this does nothing."""
        if self._closed or os.getpid() != self._pid:
            return
        self.entrance.require_outside()
        self._closed = True
        self.doorbell.close()
        self.connections.close()


class _Common:
    """What both colours have."""

    dialect: DialectName = "postgres"
    is_joined = False

    def __init__(self, engine: PostgresEngine) -> None:
        self.engine = engine
        self.mode: StoreMode = engine.settings.mode
        self.entrance = engine.entrance
        self.signals = engine.signals

    def require_own(self, what: str) -> None:
        """Refuse a closed store, and one that a forked child fork."""
        self.engine.require_usable()

    def copy_to(self, path: Path, progress: Progress | None) -> None:
        """Copy every table from one snapshot into a new SQLite file."""
        self.engine.require_usable()
        copy_rows(self.engine.target, self.engine.settings, path, progress)

    def vacuum(self) -> None:
        """Vacuum and analyse every table."""
        self.engine.require_usable()
        if self.mode == "read":
            raise StoreReadOnly(operation="vacuum")
        vacuum(self.engine.target.dsn, self.engine.target.schema)


class PostgresDriver(_Common):
    """The sync colour."""

    def run(self, call: Call[R]) -> R:
        """Run a call and return its result once it is durable."""
        self.engine.require_usable()
        return self.entrance.run(self._run, call)

    def _run(self, call: Call[R]) -> R:
        try:
            return drive(self.engine.protocol.run(call), self._perform)
        except KeyboardInterrupt as interrupt:
            # Else a connection on its way from one frame to the next lives as long as this error.
            traceback.clear_frames(interrupt.__traceback__)
            raise

    def twin(self) -> SyncDriver:
        """Return a sync driver on the same store, for threads of our own."""
        return self

    def close(self) -> None:
        """Close the store."""
        self.engine.close()

    def _perform(self, step: Step) -> Any:
        match step:
            case Send(connection, messages):
                return connection.run(messages, self.engine.protocol.answer_seconds)
            case Connect(place, seconds):
                return self.engine.connections.connect(place, seconds)
            case Queue(turn, seconds):
                # A lock, because an interrupt can leave the one inside an Event locked for ever.
                asleep = threading.Lock()
                asleep.acquire()
                turn.wake = asleep.release
                if not turn.has_come:
                    asleep.acquire(timeout=seconds)
            case Sleep(seconds):
                time.sleep(seconds)
        return None


class AsyncPostgresDriver(_Common):
    """The async colour."""

    def __init__(self, engine: PostgresEngine) -> None:
        super().__init__(engine)
        self._loop = asyncio.get_running_loop()

    async def run(self, call: Call[R]) -> R:
        """Run a call and return its result once it is durable."""
        self.engine.require_usable()
        require_loop(self._loop)
        return await drive_async(self.engine.protocol.run(call), self._perform)

    def twin(self) -> SyncDriver:
        """Return a sync driver on the same store, for threads of our own."""
        return PostgresDriver(self.engine)

    async def close(self) -> None:
        """Close the store; what may block runs in a thread."""
        await finish(asyncio.wrap_future(in_thread(self.engine.close)))

    async def _perform(self, step: Step) -> Any:
        match step:
            case Send(connection, messages, is_commit):
                limit_seconds = self.engine.protocol.answer_seconds
                return await connection.run_async(messages, limit_seconds, to_the_end=is_commit)
            case Connect(place, seconds):
                # Finding the host's address would block the event loop.
                made = in_thread(partial(self.engine.connections.connect, place, seconds))
                return await asyncio.wrap_future(made)
            case Queue(turn, seconds):
                event = asyncio.Event()
                turn.wake = partial(self._loop.call_soon_threadsafe, event.set)
                if not turn.has_come:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(event.wait(), seconds)
            case Sleep(seconds):
                await asyncio.sleep(seconds)
        return None
