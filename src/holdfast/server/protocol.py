"""HTTP connections: a deadline for each request, and a limit of how many there are."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


def limited(request_seconds: float, connections: int) -> type[H11Protocol]:
    """Return a protocol that gives up clients which do not finish a request in time."""

    class LimitedProtocol(H11Protocol):
        """A connection whose client has so long to send a whole request."""

        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > connections:
                transport.abort()
                return
            self._wait()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            their_state = self.conn.their_state
            has_begun = their_state is h11.IDLE and bool(self.conn.trailing_data[0])
            # To h11, a request that became a WebSocket never ends.
            if their_state is h11.SEND_BODY or has_begun:
                self._wait()
            else:
                self._stop_waiting()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def _wait(self) -> None:
            if self._deadline is None:
                self._deadline = self.loop.call_later(request_seconds, self._give_up)

        def _stop_waiting(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _give_up(self) -> None:
            self._deadline = None
            # A WebSocket has the same time for its handshake, and lasts if that has succeeded.
            current: Any = self.transport.get_protocol()
            if current is self or not current.handshake_complete:
                self.transport.abort()

    return LimitedProtocol
