"""Connections: a deadline for each request, a limit on their number, and failed handshakes."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.http11 import Request

from ..answers.problems import Refusal
from .channels import Lagging
from .frames import PACKED
from .options import ServerLimits
from .problems import answer_of
from .stream import closing


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """A WebSocket that refuses a malformed handshake like any other malformed request."""

    def handle_connect(self, event: Request) -> None:
        """Begin with a handshake, or refuse it."""
        status = self.conn.accept(event).status_code
        if status == 101:
            super().handle_connect(event)
            extensions = self.scope.setdefault("extensions", {})
            extensions[PACKED] = {"write": self.write_now}
        else:
            code = "method_not_allowed" if status == 405 else "malformed"
            self._refuse(code, str(self.conn.handshake_exc))

    def write_now(self, frames: bytes) -> bool:
        """Write frames that were built for many sockets, if nothing is queued before them."""
        is_possible = self.handshake_complete and self.writable.is_set()
        if not is_possible or self.disconnected or self.close_sent:
            return False
        self.transport.write(frames)
        return True

    def keepalive_timeout(self) -> None:
        """End a client that answers no pings; a follower is told where to continue, like any other
        that does not read.
        """
        if not self._end_following(Lagging()):
            super().keepalive_timeout()

    def shutdown(self) -> None:
        """End when the server stops; a follower is told where to continue elsewhere."""
        if not self._end_following(Refusal("unavailable", "the server is stopping")):
            super().shutdown()

    def _end_following(self, error: Exception) -> bool:
        """End a client that follows with a reason; return False if it does not follow."""
        extensions: dict[str, Any] = (self.scope or {}).get("extensions") or {}
        place = extensions.get(PACKED, {}).get("place")
        if place is None or self.close_sent or self.transport.is_closing():
            return False
        self.stop_keepalive()
        self.conn.fail(*closing(error, place()))
        self.close_sent = True
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.transport.close()
        return True

    def data_received(self, data: bytes) -> None:
        """Receive data from the client; a handshake that cannot be parsed is refused at once."""
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.close_sent:
            self._refuse("malformed", str(self.conn.handshake_exc))

    async def send(self, message: Any) -> None:
        """Send a message; a complete response that refuses the handshake also completes it."""
        is_sent = message["type"] in {"websocket.accept", "websocket.send", "websocket.close"}
        if is_sent and self.transport.is_closing():
            # The loop calls `connection_lost` later, and has no turn while there is much to send.
            # Until then uvicorn would report a handshake that was left incomplete.
            self.handshake_complete = True
            raise ClientDisconnected
        await super().send(message)
        is_end = message["type"] == "websocket.http.response.body"
        if is_end and not message.get("more_body", False):
            self.handshake_complete = True

    def _refuse(self, code: str, why: str) -> None:
        headers = {"allow": "GET", "sec-websocket-version": "13"}
        refusal = Refusal(code, f"the WebSocket handshake failed: {why}", headers=headers)
        self.handshake_complete = self.close_sent = True
        _close_with(refusal, self.transport)


def _close_with(refusal: Refusal, transport: asyncio.Transport) -> None:
    """Send a response without the help of a protocol, and close the connection."""
    answer = answer_of(refusal, "")
    content = answer.content()
    fields = {
        "content-type": answer.content_type,
        "content-length": str(len(content)),
        "connection": "close",
        **answer.headers,
    }
    lines = [f"HTTP/1.1 {answer.status} {answer.body['title']}"]
    lines += [f"{name}: {value}" for name, value in fields.items()]
    transport.write("\r\n".join([*lines, "", ""]).encode("latin-1") + content)
    transport.close()


class LimitedProtocol(H11Protocol):
    """A connection with deadlines for sending the head of a request, and all of it."""

    head_seconds: ClassVar[float]
    request_seconds: ClassVar[float]
    connections_max: ClassVar[int]
    _deadline: asyncio.TimerHandle | None = None
    _head_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin, unless there are too many connections."""
        super().connection_made(transport)
        self._wait()
        if len(self.connections) > self.connections_max:
            why = f"the server has {self.connections_max:,} connections, which is its limit"
            _close_with(Refusal("rate_limited", why), transport)

    def data_received(self, data: bytes) -> None:
        """Receive data from the client."""
        super().data_received(data)
        self._set_deadlines()

    def on_response_complete(self) -> None:
        """Continue with what the client has already sent of the next request."""
        super().on_response_complete()
        if not self.transport.is_closing():
            self._set_deadlines()

    def _set_deadlines(self) -> None:
        their_state = self.conn.their_state
        has_begun = their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        # The handshake of a WebSocket is nothing but a head.
        self._await_head(has_begun=has_begun)
        # For h11, a request that was upgraded to a WebSocket never ends.
        if their_state is h11.SEND_BODY or has_begun:
            self._wait()
        else:
            self._stop_waiting()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP."""
        if self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            refusal = Refusal("malformed", "this is not a valid HTTP request")
            _close_with(refusal, self.transport)
        else:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Clean up."""
        self._await_head(has_begun=False)
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.request_seconds, self._give_up)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _await_head(self, *, has_begun: bool) -> None:
        if not has_begun and self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None
        elif has_begun and self._head_deadline is None:
            self._head_deadline = self.loop.call_later(self.head_seconds, self.transport.abort)

    def _give_up(self) -> None:
        self._deadline = None
        # The same deadline applies to the handshake of a WebSocket, and to nothing after it.
        current: Any = self.transport.get_protocol()
        if current is self or (current is not None and not current.handshake_complete):
            self.transport.abort()


def limited(limits: ServerLimits) -> type[H11Protocol]:
    """Return a protocol that drops clients that do not send a whole request in time."""
    given = {
        "head_seconds": limits.head_seconds,
        "request_seconds": limits.request_seconds,
        "connections_max": limits.connections,
    }
    return type("LimitedProtocol", (LimitedProtocol,), given)
