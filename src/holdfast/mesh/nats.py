"""NATS JetStream as a transport: one stream, a durable consumer for each address, explicit acks.

The client library is asynchronous; it runs in an event loop on its own thread, so that sync and
async stores use it alike. A message stays in the stream until one of its receivers acknowledges it;
the server drops copies that are sent within the stream's duplicate window.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import re
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import SplitResult, parse_qsl, urlsplit, urlunsplit

import msgspec

from ..arguments import require_seconds, require_whole, shown
from ..errors import InvalidArgument
from ..extras import required
from ..kernel.threads import Thread
from .transports import Message, TransportError, Undeliverable

with required("NATS", "nats"):
    from nats.aio.client import Client
    from nats.js.api import ConsumerConfig, RetentionPolicy, StreamConfig
    from nats.js.errors import APIError, BadRequestError

T = TypeVar("T")

SECONDS_MAX = 24 * 3600
REPLY_SECONDS = 5.0
CLOSE_SECONDS = 2.0
CANCEL_SECONDS = 0.1
# For this long the server drops messages with the same id; a later copy is a new message.
DUPLICATES_SECONDS = 120.0
RECONNECT_SECONDS = 0.25
# How long the same error is not logged again: while a server is down, it comes at every attempt.
TELL_SECONDS = 60.0
ADDRESS_CHARACTERS_MAX = 1_000
SCHEMES = ("nats", "tls", "ws", "wss")
ADDRESS_OPTIONS = ("prefix", "ack_seconds", "credentials")
UNACKNOWLEDGED_MAX = 10_000
PREFIX = re.compile(r"[A-Za-z0-9_-]{1,50}")
# What can be used unescaped in a subject and in the name of a consumer.
PLAIN = re.compile(r"[A-Za-z0-9_-]{1,64}")

MESSAGE_ID = "Nats-Msg-Id"
# JetStream's error code for a message that its stream's settings do not allow.
MESSAGE_TOO_LARGE = 10054
TOO_LARGE = "the message is larger than the NATS server accepts; see {}"

log = logging.getLogger("holdfast.mesh")
encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Message).decode


class Nats:
    """Carries messages over a NATS server with JetStream.

    All stores that use the same `prefix` on a server reach each other. Messages that nobody
    receives are kept for `message_days`. Other `options` are those of `nats.connect`.
    """

    name = "nats"

    def __init__(
        self,
        servers: str | Sequence[str] = "nats://127.0.0.1:4222",
        *,
        prefix: str = "holdfast",
        ack_seconds: float = 30.0,
        resend_seconds: float = 150.0,
        message_days: float = 7.0,
        replicas: int = 1,
        **options: Any,
    ) -> None:
        given = list(servers) if isinstance(servers, list | tuple) else [servers]
        for server in given or [None]:
            parts = _split(server)
            if parts.path.strip("/") or parts.query or parts.fragment:
                raise InvalidArgument(
                    "an address of NATS has nothing after its port: give several servers as a "
                    "list; Nats.at takes an address with options"
                )
        if not isinstance(prefix, str) or not PREFIX.fullmatch(prefix):
            raise InvalidArgument(
                f"prefix must be 1 to 50 letters, digits, - and _, not {shown(prefix)}"
            )
        require_seconds("ack_seconds", ack_seconds, SECONDS_MAX, least=0.1)
        require_seconds("resend_seconds", resend_seconds, SECONDS_MAX, least=0.1)
        require_seconds("message_days", message_days, 3650, least=0.001)
        require_whole("replicas", replicas, 1, 5)
        self.resend_seconds = resend_seconds
        self._servers: Sequence[Any] = given
        self._options = options
        self._prefix = prefix
        self._ack_seconds = ack_seconds
        self._stream = StreamConfig(
            name=f"{prefix}-messages",
            subjects=[f"{prefix}.>"],
            retention=RetentionPolicy.WORK_QUEUE,
            max_age=message_days * 24 * 3600,
            duplicate_window=min(DUPLICATES_SECONDS, message_days * 24 * 3600),
            num_replicas=replicas,
        )
        self._gate = threading.Lock()
        self._lines: _Lines | None = None

    @classmethod
    def at(cls, address: str) -> Nats:
        """Return the transport for an address with options: `nats://host:4222?prefix=travel-team`.

        The options are `prefix`, `ack_seconds` and `credentials`, a user's credentials file.
        """
        parts = _split(address)
        try:
            pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        except ValueError:
            raise InvalidArgument(f"options are NAME=VALUE, not {shown(parts.query)}") from None
        given: dict[str, Any] = {}
        for name, text in pairs:
            if name not in ADDRESS_OPTIONS or name in given:
                known = ", ".join(ADDRESS_OPTIONS)
                raise InvalidArgument(
                    f"the options of a NATS address are {known}, each once, not {shown(name)}"
                )
            given[name] = text
        if "ack_seconds" in given:
            given["ack_seconds"] = _seconds(given["ack_seconds"])
        if (file := given.pop("credentials", None)) is not None:
            if not os.path.isfile(file):
                raise InvalidArgument(f"there is no file {shown(file)} with credentials for NATS")
            given["user_credentials"] = file
        return cls(urlunsplit(parts._replace(query="")), **given)

    def __repr__(self) -> str:
        return f"<Nats {self._prefix}>"

    def send(self, address: str, message: Message) -> None:
        """Return once the stream has the message."""
        lines = self._open()
        lines.run(lines.send(self._subject(address), message), 3 * REPLY_SECONDS)

    def receive(self, address: str, limit: int, wait_seconds: float) -> Sequence[NatsDelivery]:
        """Fetch messages through the consumer that all receivers of the address share."""
        lines = self._open()
        subject = self._subject(address)
        return lines.run(
            lines.receive(subject, limit, wait_seconds), wait_seconds + 3 * REPLY_SECONDS
        )

    def close(self) -> None:
        """Close the connection."""
        with self._gate:
            lines, self._lines = self._lines, None
        if lines is not None and lines.pid == os.getpid():
            lines.close()

    def _open(self) -> _Lines:
        with self._gate:
            # A connection does not survive a fork.
            if self._lines is None or self._lines.pid != os.getpid():
                given = {"servers": self._servers, **self._options}
                self._lines = _Lines(given, self._stream, self._ack_seconds)
            return self._lines

    def _subject(self, address: str) -> str:
        kind, _, name = address.partition(":")
        token = f"n-{name}" if PLAIN.fullmatch(name) else _digest(name)
        return f"{self._prefix}.{kind}.{token}"


def _split(address: object) -> SplitResult:
    """Split an address. Errors do not repeat it: any part of one that is wrong may be a secret."""
    told = "an address of NATS is nats://HOST:PORT, nats://USER:PASSWORD@HOST:PORT or with a TOKEN"
    if not isinstance(address, str) or len(address) > ADDRESS_CHARACTERS_MAX:
        raise InvalidArgument(f"{told}, a text of up to {ADDRESS_CHARACTERS_MAX} characters")
    try:
        parts = urlsplit(address)
        is_complete = parts.scheme in SCHEMES and bool(parts.hostname) and parts.port != 0
    except ValueError:
        parts, is_complete = urlsplit(""), False
    if not is_complete or not address.isprintable():
        raise InvalidArgument(f"{told}, without line breaks")
    if "@" in parts.path + parts.query + parts.fragment:
        raise InvalidArgument(
            f"{told}; a password with / ? or # is given to Nats as user= and password=, and @ "
            "after the host is written as %40"
        )
    return parts


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidArgument(f"ack_seconds must be a number, not {shown(text)}") from None


def _header_bytes(headers: Mapping[str, str]) -> int:
    """Return how many bytes headers add to a message: a version line, theirs, and an empty one."""
    lines = ["NATS/1.0", *(f"{name}: {value}" for name, value in headers.items()), ""]
    return sum(len(line.encode()) + 2 for line in lines)


def _digest(name: str) -> str:
    return f"d-{hashlib.sha256(name.encode()).hexdigest()[:40]}"


class _Lines:
    """The connection of one process, in the event loop of its own thread."""

    def __init__(self, given: dict[str, Any], stream: StreamConfig, ack_seconds: float) -> None:
        self.pid = os.getpid()
        self._given = given
        self._stream = stream
        self._ack_seconds = ack_seconds
        self._connection: Any = None
        self._jetstream: Any = None
        self._consumers: dict[str, Any] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._told = ""
        self._tell_again_at = 0.0
        self.loop = asyncio.new_event_loop()
        self._opening = asyncio.Lock()
        self._thread = Thread(self._live, "holdfast-nats")
        self._thread.start()

    def _live(self) -> None:
        self.loop.run_forever()
        # Threads wait for what is still in progress.
        ends_at = time.monotonic() + CLOSE_SECONDS
        while (left := asyncio.all_tasks(self.loop)) and time.monotonic() < ends_at:
            for task in left - self._closing:
                task.cancel()
            self.loop.run_until_complete(asyncio.wait(left, timeout=CANCEL_SECONDS))
        self.loop.close()

    def run(self, steps: Coroutine[Any, Any, T], seconds: float) -> T:
        """Run a coroutine in the loop, from another thread, for a limited time."""
        try:
            ended = asyncio.run_coroutine_threadsafe(asyncio.wait_for(steps, seconds), self.loop)
            # The loop may have been closed meanwhile.
            return ended.result(seconds + CLOSE_SECONDS)
        except TransportError:
            raise
        except Exception as error:
            told = str(error) or type(error).__name__
            raise TransportError(f"NATS cannot be used now: {told}") from error

    async def send(self, subject: str, message: Message) -> None:
        """Publish a message, and wait for the stream's acknowledgement."""
        jetstream = await self._ready()
        headers, payload = {MESSAGE_ID: message.id}, encode(message)
        # The client compares the payload alone, and the server closes the connection.
        if len(payload) + _header_bytes(headers) > self._connection.max_payload:
            raise Undeliverable(TOO_LARGE.format("max_payload"))
        try:
            await jetstream.publish(subject, payload, timeout=REPLY_SECONDS, headers=headers)
        except APIError as error:
            if error.err_code == MESSAGE_TOO_LARGE:
                raise Undeliverable(TOO_LARGE.format("the stream's max_msg_size")) from None
            self._jetstream = None
            raise
        except Exception:
            # The stream may have been lost with the server's files.
            self._jetstream = None
            raise

    async def receive(self, subject: str, limit: int, wait_seconds: float) -> list[NatsDelivery]:
        """Fetch messages that are waiting for the subject's consumer."""
        consumer = await self._consumer(subject)
        try:
            found = await consumer.fetch(limit, timeout=max(0.01, wait_seconds))
        except TimeoutError:
            return []
        except Exception:
            self._consumers.pop(subject, None)
            self._jetstream = None
            raise
        deliveries = []
        for each in found:
            try:
                message = decode(each.data)
            except Exception:
                # Its bytes decide what a decoder raises.
                log.error("a message on %s is not one of Holdfast's; it is dropped", subject)
                await _quietly(each.term())
            else:
                deliveries.append(NatsDelivery(message, each, self.loop))
        return deliveries

    async def _consumer(self, subject: str) -> Any:
        jetstream = await self._ready()
        if subject not in self._consumers:
            config = ConsumerConfig(
                ack_wait=self._ack_seconds,
                max_deliver=-1,
                max_ack_pending=UNACKNOWLEDGED_MAX,
                # No message waits for a consumer longer than this.
                inactive_threshold=self._stream.max_age,
            )
            durable = subject.replace(".", "_")
            self._consumers[subject] = await jetstream.pull_subscribe(
                subject, durable=durable, stream=self._stream.name, config=config
            )
        return self._consumers[subject]

    async def _ready(self) -> Any:
        """Return the context of the stream; connect and create the stream if necessary."""
        async with self._opening:
            if self._connection is None or self._connection.is_closed:
                self._consumers.clear()
                self._jetstream = None
                options = {
                    "max_reconnect_attempts": -1,
                    "reconnect_time_wait": RECONNECT_SECONDS,
                    "error_cb": self._log_error,
                    **self._given,
                }
                connection = Client()
                connecting = self.loop.create_task(connection.connect(**options))
                try:
                    await asyncio.wait_for(asyncio.shield(connecting), REPLY_SECONDS)
                except BaseException:
                    # In a task of its own, because this one may be cancelled again.
                    closing = self.loop.create_task(_abandon(connection, connecting))
                    self._closing.add(closing)
                    closing.add_done_callback(self._closing.discard)
                    await asyncio.shield(closing)
                    raise
                self._connection = connection
            if not self._connection.is_connected:
                raise TransportError("NATS cannot be reached; reconnecting")
            if self._jetstream is None:
                jetstream = self._connection.jetstream(timeout=REPLY_SECONDS)
                try:
                    await jetstream.add_stream(self._stream)
                except BadRequestError as error:
                    # It exists with other settings, which an operator may have chosen.
                    log.debug("the stream %s is used as it is: %s", self._stream.name, error)
                self._jetstream = jetstream
            return self._jetstream

    async def _log_error(self, error: Exception) -> None:
        """Log what the client reports at each attempt to connect: again after a while, if ever."""
        text = str(error) or type(error).__name__
        now = time.monotonic()
        is_told = text == self._told and now < self._tell_again_at
        log.log(logging.DEBUG if is_told else logging.INFO, "NATS: %s", text)
        if not is_told:
            self._told, self._tell_again_at = text, now + TELL_SECONDS

    def close(self) -> None:
        """Close the connection, and end the thread."""
        if self._connection is not None:
            try:
                self.run(self._connection.close(), CLOSE_SECONDS)
            except TransportError as error:
                log.debug("%s", error)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()


class NatsDelivery:
    """A message received through a consumer."""

    def __init__(self, message: Message, received: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.message = message
        self._received = received
        self._loop = loop

    def ack(self) -> None:
        """Remove it from the stream."""
        self._tell(self._received.ack())

    def nack(self, delay_seconds: float = 0.0) -> None:
        """Have the server deliver it again."""
        self._tell(self._received.nak(delay_seconds or None))

    def extend(self) -> None:
        """Restart its acknowledgement deadline."""
        self._tell(self._received.in_progress())

    def _tell(self, steps: Coroutine[Any, Any, None]) -> None:
        """Send without waiting; if it is lost, the message is redelivered and recognised."""
        try:
            asyncio.run_coroutine_threadsafe(_quietly(steps), self._loop)
        except RuntimeError:
            steps.close()
            log.debug("the connection is closed")


async def _abandon(connection: Any, connecting: asyncio.Task[None]) -> None:
    """End an attempt to connect, and close its socket.

    The client may overhear a cancellation. One that is cancelled while it closes a connection, to
    try again, leaves the socket open, and takes itself for closed.
    """
    while not connecting.done():
        connecting.cancel()
        await asyncio.wait([connecting], timeout=CANCEL_SECONDS)
    with contextlib.suppress(Exception):
        await connection.close()
        if (socket := connection._transport) is not None:
            socket.close()
            await socket.wait_closed()


async def _quietly(steps: Coroutine[Any, Any, None]) -> None:
    try:
        await steps
    except Exception as error:
        log.info("a message was not acknowledged, and will be redelivered: %s", error)
