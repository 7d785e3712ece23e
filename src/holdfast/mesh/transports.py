"""What carries messages between agents, if not the database itself.

A transport delivers each message to its address at least once, in any order. An address is shared
by all its receivers: each message goes to one of them, and to another if it is not acknowledged in
time. The stores at both ends do the rest: a message is sent again until the other end has confirmed
it, and one that arrives twice is recognised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from ..arguments import require_text, shown
from ..errors import HoldfastError, InvalidArgument


class TransportError(HoldfastError):
    """The transport cannot be reached or has not accepted a message, which is resent later."""

    http_status = 503


class Undeliverable(TransportError):
    """The transport will never accept this message, for example because it is too large."""

    http_status = 413


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A message between two stores.

    `id` is the same for every copy, `store_id` is the sender's store, `ask_id` the call that it
    belongs to, `number` its number in the sender's outbox. `user` is the user of a request. The
    `body` of a request is its input. `token` is, in a request, the digest of a secret of its
    asker, and in its cancel the secret itself. `headers` are credentials: they are created when the
    message is sent, and never stored.
    """

    kind: Literal["request", "answer", "progress", "cancel", "receipt"]
    id: str
    store_id: str
    ask_id: str
    number: int
    user: str | None = None
    token: str | None = None
    body: bytes = b""
    headers: Mapping[str, str] = {}


class Delivery(Protocol):
    """A received message, which is reserved for its receiver for a while."""

    message: Message

    def ack(self) -> None:
        """Acknowledge it, without waiting, so that it is not redelivered."""

    def nack(self, delay_seconds: float = 0.0) -> None:
        """Have it redelivered, to any receiver, after a delay."""

    def extend(self) -> None:
        """Reserve it for this receiver for the same time again."""


class Transport(Protocol):
    """Sends and receives messages; its methods are called from several threads."""

    name: str
    """The name under which stores record how a call was sent."""
    resend_seconds: float
    """How long after sending a message is sent again if it was not confirmed."""

    def send(self, address: str, message: Message) -> None:
        """Return once the transport has stored the message, or raise TransportError."""

    def receive(self, address: str, limit: int, wait_seconds: float) -> Sequence[Delivery]:
        """Wait for messages to an address that all its receivers share; they are not in order."""
        ...

    def close(self) -> None:
        """Close connections; messages received and not acknowledged are redelivered."""


def require_transport(transport: object) -> Transport | None:
    """Return a transport, or None for the database, which needs none."""
    if transport is None or transport == "database":
        return None
    wanted = ("send", "receive", "close")
    if not all(callable(getattr(transport, name, None)) for name in wanted):
        raise InvalidArgument(
            f'transport must be None, "database" or an object like Memory(), not {shown(transport)}'
        )
    require_text("name", getattr(transport, "name", None), 50)
    found: Transport = transport  # type: ignore[assignment]
    return found
