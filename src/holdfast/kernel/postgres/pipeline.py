"""One round trip: a batch of statements is sent as a whole, then its answers are read.

psycopg's own pipeline waits for the socket at every statement and creates a cursor for each, which
costs more than the statements themselves. Here libpq gets the whole batch at once, with one wait.
The caller has exclusive use of the connection.

Every wait has a timeout: a server that accepts input and never answers is taken for lost.
"""

from __future__ import annotations

import asyncio
import hashlib
import select
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec
import psycopg
from psycopg import generators
from psycopg.abc import PQGen
from psycopg.adapt import AdaptersMap, PyFormat, Transformer
from psycopg.postgres import register_default_adapters
from psycopg.postgres import types as postgres_types
from psycopg.pq import ConnStatus, ExecStatus, Format, PGnotify, PipelineStatus, TransactionStatus
from psycopg.pq.abc import PGconn, PGresult
from psycopg.types.numeric import Int8Dumper
from psycopg.waiting import Wait

from ..driver import Boundary
from ..flow import in_thread
from ..operation import Row

T = TypeVar("T")
_Key: TypeAlias = "tuple[str, tuple[int, ...]]"

PREPARED_MAX = 1_000
CANCEL_SECONDS_MAX = 5.0
_READ, _WRITE = int(Wait.R), int(Wait.W)
_FAILED = {ExecStatus.FATAL_ERROR, ExecStatus.PIPELINE_ABORTED}


class _Dumped(NamedTuple):
    """An encoded message; `key`, its text and value types, identifies its prepared statement."""

    key: _Key
    values: Any
    formats: Any
    may_prepare: bool


class Silent(psycopg.OperationalError):
    """The server has not answered in time."""

    def __init__(self, limit_seconds: float) -> None:
        super().__init__(f"the server gave no answer for {limit_seconds:g} s")


class _Adapters:
    """How values travel, whatever is registered on the connection or for the whole process."""

    adapters = AdaptersMap(types=postgres_types)

    def __init__(self, connection: Any) -> None:
        self.connection = connection


register_default_adapters(_Adapters(None))
# With one dumper for all integers, each statement has one prepared form.
_Adapters.adapters.register_dumper(int, Int8Dumper)


class Slot:
    """The right to one connection, until it is freed or unreferenced."""

    __slots__ = ("__weakref__", "is_free")

    def __init__(self) -> None:
        self.is_free = False


class Link:
    """A connection with its writer id, its adapters and its prepared statements.

    The connection must not refer to its link: the last reference to a link closes it.
    """

    def __init__(self, connection: Any, slot: Slot, *, prepares: bool):
        self.writer_id = ""
        self.batch = 0
        self.made_at = self.used_at = time.monotonic()
        self._slot = slot
        self._connection = connection
        self._pgconn: PGconn = connection.pgconn
        self.backend_pid = connection.info.backend_pid
        self.descriptor = connection.fileno()
        self._readable = select.poll()
        self._readable.register(self.descriptor, select.POLLIN)
        self._transformer = Transformer(_Adapters(connection))
        self._prepares = prepares
        self._prepared: dict[_Key, bytes] = {}
        self._columns: dict[str, list[str]] = {}

    def is_quiet(self) -> bool:
        """Whether the server has sent nothing; it sends something when it closes the connection."""
        return not self._readable.poll(0)

    def close(self) -> None:
        """Close without waiting; a running statement is cancelled on the server."""
        self._slot.is_free = True
        if self._pgconn.transaction_status == TransactionStatus.ACTIVE:
            in_thread(self._cancel_and_close)
        else:
            self._connection.close()

    def cancel(self) -> None:
        """Ask the server to cancel the running statement; blocks for CANCEL_SECONDS_MAX at most."""
        with suppress(psycopg.Error):
            self._connection.cancel_safe(timeout=CANCEL_SECONDS_MAX)

    def _cancel_and_close(self) -> None:
        self.cancel()
        self._connection.close()

    def listen(self, hear: Callable[[str, str], object]) -> None:
        """Call `hear` with the channel and payload of notifications from other connections."""
        own = self.backend_pid

        def pass_on(notification: PGnotify) -> None:
            if notification.be_pid != own:
                hear(notification.relname.decode(), notification.extra.decode())

        self._pgconn.notify_handler = pass_on

    def read_notifications(self) -> None:
        """Process notifications that have arrived; an exchange does so too."""
        self._pgconn.consume_input()
        while (notification := self._pgconn.notifies()) is not None:
            if self._pgconn.notify_handler is not None:
                self._pgconn.notify_handler(notification)

    def run(
        self,
        messages: Sequence[Message],
        limit_seconds: float,
        is_alive: Callable[[], bool] | None = None,
    ) -> list[Reply]:
        """Make one round trip on this thread; after the limit, go on as long as `is_alive`."""
        return self.perform(self.exchange(messages), limit_seconds, is_alive)

    def perform(
        self, steps: PQGen[T], limit_seconds: float, is_alive: Callable[[], bool] | None = None
    ) -> T:
        """Run what waits for the socket on this thread."""
        try:
            wanted = next(steps)
            while True:
                while not (found := self._wait(wanted, limit_seconds)):
                    if is_alive is None or not is_alive():
                        raise Silent(limit_seconds)
                wanted = steps.send(found)
        except StopIteration as stop:
            result: T = stop.value
            return result

    def _wait(self, wanted: int, limit_seconds: float) -> int:
        """Wait until the socket can be read or written, as wanted; return which, or 0."""
        if wanted & _WRITE:
            ready = select.poll()
            events = select.POLLOUT | (select.POLLIN if wanted & _READ else 0)
            ready.register(self.descriptor, events)
        else:
            ready = self._readable
        found = ready.poll(limit_seconds * 1000)
        if not found:
            return 0
        # An error on the socket is reported by the next read or write.
        is_writable = found[0][1] & select.POLLOUT
        return wanted & (_READ | (_WRITE if is_writable else 0)) or wanted

    async def run_async(
        self,
        messages: Sequence[Message],
        limit_seconds: float,
        is_alive: Callable[[], bool] | None = None,
        *,
        to_the_end: bool = False,
    ) -> list[Reply]:
        """Make one round trip in the event loop; with `to_the_end`, a cancellation is raised only
        after it, unless it takes too long.
        """
        steps = self.exchange(messages)
        return await self.perform_async(steps, limit_seconds, is_alive, to_the_end=to_the_end)

    async def perform_async(
        self,
        steps: PQGen[T],
        limit_seconds: float,
        is_alive: Callable[[], bool] | None = None,
        *,
        to_the_end: bool = False,
    ) -> T:
        """Run what waits for the socket in the event loop.

        psycopg's own wait would need an extra task to continue after a cancellation.
        """
        loop = asyncio.get_running_loop()
        cancelled: asyncio.CancelledError | None = None
        try:
            wanted = next(steps)
            while True:
                found = 0
                try:
                    while not (found := await _ready(loop, self.descriptor, wanted, limit_seconds)):
                        if is_alive is None or not await asyncio.wrap_future(in_thread(is_alive)):
                            raise Silent(limit_seconds)
                except asyncio.CancelledError as error:
                    if not to_the_end:
                        raise
                    if cancelled is None:
                        # Otherwise the server would continue, and wait for locks.
                        in_thread(self.cancel)
                        limit_seconds = min(limit_seconds, CANCEL_SECONDS_MAX)
                    cancelled = error
                wanted = steps.send(found)
        except StopIteration as stop:
            if cancelled is not None:
                raise cancelled from None
            result: T = stop.value
            return result
        except psycopg.Error as error:
            if cancelled is not None:
                raise cancelled from error
            raise

    def exchange(self, messages: Sequence[Message]) -> PQGen[list[Reply]]:
        """Send a batch and return its replies; raises the first error."""
        pgconn = self._pgconn
        dumped = [self._dump(message) for message in messages]
        if len(dumped) == 1 and dumped[0].key in self._prepared:
            # A pipeline would double the cost of a single statement.
            self._enqueue(dumped[0])
            result = (yield from generators.execute(pgconn))[-1]
            if result.status in _FAILED:
                raise psycopg.errors.error_from_result(result)
            return [self._reply(messages[0], result)]
        pgconn.enter_pipeline_mode()
        prepared = [self._enqueue(message) for message in dumped]
        pgconn.pipeline_sync()
        yield from generators.send(pgconn)
        results, error = yield from self._fetch(prepared)
        if pgconn.status == ConnStatus.OK:
            pgconn.exit_pipeline_mode()
        if error is not None:
            raise error
        return [*map(self._reply, messages, results)]

    def drain(self) -> PQGen[None]:
        """Read what is left of an exchange that was cut off anywhere, if there was one."""
        pgconn = self._pgconn
        if pgconn.pipeline_status == PipelineStatus.OFF:
            return
        pgconn.pipeline_sync()
        yield from generators.send(pgconn)
        while pgconn.pipeline_status != PipelineStatus.OFF:
            yield from generators.fetch_many(pgconn)
            # Refused until the last answer has been read.
            with suppress(psycopg.OperationalError):
                pgconn.exit_pipeline_mode()
            if pgconn.status != ConnStatus.OK:
                raise psycopg.OperationalError("the connection was lost")

    def _dump(self, message: Message) -> _Dumped:
        if not message.values:
            return _Dumped((message.text, ()), None, None, message.may_prepare)
        wanted = [PyFormat.AUTO] * len(message.values)
        values = self._transformer.dump_sequence(message.values, wanted)
        key = (message.text, self._transformer.types or ())
        return _Dumped(key, values, self._transformer.formats, message.may_prepare)

    def _enqueue(self, message: _Dumped) -> _Key | None:
        """Pass one message to libpq; return the key of what it also prepares, if anything."""
        key, values, formats, may_prepare = message
        text, types = key
        name, made = self._prepared.get(key), None
        if name is None:
            if not (self._prepares and may_prepare) or len(self._prepared) >= PREPARED_MAX:
                self._pgconn.send_query_params(text.encode(), values, types, formats, Format.BINARY)
                return None
            name, made = _name_of(key), key
            self._prepared[key] = name
            self._pgconn.send_prepare(name, text.encode(), types)
        self._pgconn.send_query_prepared(name, values, formats, Format.BINARY)
        return made

    def _fetch(
        self, prepared: Sequence[_Key | None]
    ) -> PQGen[tuple[list[PGresult], psycopg.Error | None]]:
        """Read all answers, so that the connection can be used again."""
        found: list[PGresult] = []
        error: psycopg.Error | None = None
        try:
            for made in prepared:
                results = yield from generators.fetch_many(self._pgconn)
                if made is not None:
                    if results[-1].status in _FAILED:
                        del self._prepared[made]
                        error = error or psycopg.errors.error_from_result(results[-1])
                    results = yield from generators.fetch_many(self._pgconn)
                if results[-1].status in _FAILED:
                    error = error or psycopg.errors.error_from_result(results[-1])
                found.append(results[-1])
            yield from generators.fetch_many(self._pgconn)
        except psycopg.OperationalError:
            # A server that closes the connection has given the reason in the answer before.
            if error is None:
                raise
        return found, error

    def _reply(self, message: Message, result: PGresult) -> Reply:
        if message.is_unread or result.status != ExecStatus.TUPLES_OK:
            return Reply([], result.command_tuples or 0)
        if not result.ntuples:
            return Reply([], 0)
        names = self._columns.get(message.text)
        if names is None:
            names = [(result.fname(i) or b"").decode() for i in range(result.nfields)]
            if len(self._columns) < PREPARED_MAX:
                self._columns[message.text] = names
        self._transformer.set_pgresult(result, set_loaders=True, format=Format.BINARY)

        def row(values: Sequence[Any]) -> Row:
            return dict(zip(names, values, strict=True))

        return Reply(self._transformer.load_rows(0, result.ntuples, row), result.ntuples)


def _name_of(key: _Key) -> bytes:
    """Return the name of a prepared statement, which no other statement has.

    A pooler may let a client use what another has prepared.
    """
    return b"holdfast_" + hashlib.blake2b(repr(key).encode(), digest_size=16).hexdigest().encode()


async def _ready(
    loop: asyncio.AbstractEventLoop, descriptor: int, wanted: int, limit_seconds: float
) -> int:
    """Wait until a socket can be read or written, as wanted; return which, or 0 on timeout."""
    ready: asyncio.Future[int] = loop.create_future()
    timer = loop.call_later(limit_seconds, _settle, ready, 0)
    if wanted & _READ:
        loop.add_reader(descriptor, _settle, ready, _READ)
    if wanted & _WRITE:
        loop.add_writer(descriptor, _settle, ready, _WRITE)
    try:
        return await ready
    finally:
        timer.cancel()
        if wanted & _READ:
            loop.remove_reader(descriptor)
        if wanted & _WRITE:
            loop.remove_writer(descriptor)


def _settle(ready: asyncio.Future[int], state: int) -> None:
    if not ready.done():
        ready.set_result(state)


class Message(msgspec.Struct):
    """One statement to send: its text in the server's dialect and its values in order."""

    text: str
    values: Sequence[object] = ()
    boundary: Boundary = "statement"
    is_unread: bool = False
    """Whether the returned rows are ignored."""
    may_prepare: bool = True
    """False if a generic plan is not good enough."""


class Reply(msgspec.Struct):
    """The server's answer to one message."""

    rows: list[Row]
    row_count: int


class Connect(msgspec.Struct):
    """Open a connection in a slot."""

    slot: Any
    timeout_seconds: float


class Queue(msgspec.Struct):
    """Wait in the queue for a connection, or until the timeout."""

    turn: Any
    seconds: float


class Send(msgspec.Struct):
    """Send a batch in one round trip; the answer is one `Reply` per message."""

    connection: Any
    messages: Sequence[Message]
    is_commit: bool = False
    """Whether the outcome must be known: even a cancelled caller waits for it."""
    is_patient: bool = False
    """Whether to go on waiting as long as the server answers others."""


class Sleep(msgspec.Struct):
    """Wait before a retry."""

    seconds: float


DriverStep: TypeAlias = Connect | Queue | Send | Sleep
