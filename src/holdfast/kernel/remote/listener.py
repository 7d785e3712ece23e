"""Wake-ups of a remote store: one WebSocket on which its server signals what has changed.

It is opened by the first wait and kept until the store is closed. A thread with its own event loop
serves it, for sync and async stores alike. While there is no connection, waiters poll.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec

from ...wire import RINGS_PATH, TOPICS_MAX, Topics
from ..backoff import Backoff
from ..signals import LOCAL_TOPIC, Signals
from ..threads import Thread
from ..url import RemoteTarget

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

RECONNECT_SECONDS_MIN = 0.1
RECONNECT_SECONDS_MAX = 10.0
PING_SECONDS = 20.0
CLOSE_SECONDS = 1.0


class Listener:
    """The thread that sends a server the topics that are waited for, and receives its signals."""

    def __init__(
        self, target: RemoteTarget, limit_seconds: float, certificates: ssl.SSLContext | None
    ) -> None:
        self.signals = Signals(listen=self._want, hears=self._hears)
        self._target = target
        self._limit_seconds = limit_seconds
        self._certificates = certificates
        # Reentrant, because a signal handler may wait while its own thread holds the lock.
        self._lock = threading.RLock()
        self._wanted: set[str] = set()
        self._heard: set[str] = set()
        """The topics that the server has signalled on this connection, each at least once."""
        self._is_closed = False
        self._thread: Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._serving: asyncio.Task[Any] | None = None
        self._changed = asyncio.Event()

    def close(self) -> None:
        """Close the connection and end the thread."""
        with self._lock:
            self._is_closed = True
            thread, serving = self._thread, self._serving
        if thread is None or thread.ident is None:
            return
        if serving is not None:
            self._in_loop(serving.cancel)
        thread.join(self._limit_seconds)

    def _hears(self, topic: str) -> bool:
        return topic in self._heard

    def _want(self, topic: str) -> None:
        """Have the server signal a topic; beyond TOPICS_MAX topics at once, waiters poll."""
        if topic in self._wanted or topic.startswith(LOCAL_TOPIC):
            return
        with self._lock:
            if self._is_closed:
                return
            if len(self._wanted) >= TOPICS_MAX:
                self._wanted &= self.signals.awaited()
            if len(self._wanted) >= TOPICS_MAX:
                return
            self._wanted.add(topic)
            if self._thread is None:
                self._thread = Thread(self._run, "holdfast-rings")
            # An earlier call may have been interrupted before it started the thread.
            if self._thread.ident is None:
                self._thread.start()
        self._in_loop(self._changed.set)

    def _in_loop(self, function: Any) -> None:
        if self._loop is not None:
            # The loop may have ended in the meantime.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(function)

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._serve())

    async def _serve(self) -> None:
        """Keep a connection until the store is closed."""
        from websockets.exceptions import WebSocketException

        with self._lock:
            self._loop, self._serving = asyncio.get_running_loop(), asyncio.current_task()
        backoff = Backoff(RECONNECT_SECONDS_MIN, RECONNECT_SECONDS_MAX)
        while not self._is_closed:
            began = time.monotonic()
            try:
                async with self._connect() as connection:
                    await self._converse(connection)
            except (OSError, WebSocketException):
                pass  # Waiters poll until there is a connection again.
            finally:
                if self._heard:
                    self._heard = set()
                    self.signals.ring_here(None)
            backoff.forget(time.monotonic() - began)
            await asyncio.sleep(backoff.pause_seconds())

    def _connect(self) -> Any:
        from websockets.asyncio.client import connect

        class Direct(connect):
            """Follows no redirect, so that the token goes only to the named server."""

            def process_redirect(self, exc: Exception) -> Exception | str:
                """Return the redirect as a failure."""
                return exc

        target = self._target
        where: dict[str, Any] = {}
        if target.uds is not None:
            where = {"unix": True, "path": target.uds}
        return Direct(
            target.address.replace("http", "ws", 1) + RINGS_PATH,
            ssl=self._certificates,
            **where,
            additional_headers=target.headers,
            compression=None,
            proxy=None,
            open_timeout=self._limit_seconds,
            ping_interval=PING_SECONDS,
            ping_timeout=PING_SECONDS,
            close_timeout=CLOSE_SECONDS,
        )

    async def _converse(self, connection: ClientConnection) -> None:
        telling = asyncio.create_task(self._tell(connection))
        try:
            async for message in connection:
                for topic in msgspec.json.decode(message, type=list[str]):
                    self._heard.add(topic)
                    self.signals.ring_here(topic)
        except msgspec.MsgspecError:
            return  # Not one of our servers.
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)

    async def _tell(self, connection: ClientConnection) -> None:
        """Send the server the topics that are waited for, as they change."""
        told: set[str] = set()
        while True:
            self._changed.clear()
            with self._lock:
                wanted = set(self._wanted)
            self._heard &= wanted
            for message in Topics.messages(wanted - told, told - wanted):
                await connection.send(message, text=True)
            told = wanted
            await self._changed.wait()
