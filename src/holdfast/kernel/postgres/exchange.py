"""One round trip: a batch of statements goes out as a whole, then its answers are read.

psycopg's own pipeline waits for the socket at every statement and makes a cursor for each, which
costs more than the statements themselves. Here libpq gets the whole batch at once and is waited
for once. Who runs the generator has the connection for itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple, TypeAlias, TypeVar

import psycopg
from psycopg import generators
from psycopg.abc import PQGen
from psycopg.adapt import PyFormat, Transformer
from psycopg.pq import ConnStatus, ExecStatus, Format
from psycopg.pq.abc import PGconn, PGresult
from psycopg.waiting import Wait

from ..operation import Row
from .protocol import Message, Reply

R = TypeVar("R")
_Key: TypeAlias = "tuple[str, tuple[int, ...]]"

PREPARED_MAX = 1_000
CANCEL_SECONDS_MAX = 5.0
_READ, _WRITE = int(Wait.R), int(Wait.W)
_FAILED = {ExecStatus.FATAL_ERROR, ExecStatus.PIPELINE_ABORTED}


class _Dumped(NamedTuple):
    """A message as bytes; its text and the types of its values tell its prepared form."""

    key: _Key
    values: Any
    formats: Any


class Link:
    """A connection as batches use it: its adapters and the statements prepared on it."""

    def __init__(self, connection: Any, *, prepares: bool) -> None:
        self._pgconn: PGconn = connection.pgconn
        self._transformer = Transformer(connection)
        self._prepares = prepares
        self._prepared: dict[_Key, bytes] = {}
        self._columns: dict[str, list[str]] = {}
        self._numbers = count()

    def exchange(self, messages: Sequence[Message]) -> PQGen[list[Reply]]:
        """Send a batch and return its replies; of several errors the first is raised."""
        pgconn = self._pgconn
        dumped = [self._dump(message) for message in messages]
        if len(dumped) == 1 and dumped[0].key in self._prepared:
            # One statement needs no pipeline around it, which would cost as much again.
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

    def _dump(self, message: Message) -> _Dumped:
        if not message.values:
            return _Dumped((message.text, ()), None, None)
        wanted = [PyFormat.AUTO] * len(message.values)
        values = self._transformer.dump_sequence(message.values, wanted)
        key = (message.text, self._transformer.types or ())
        return _Dumped(key, values, self._transformer.formats)

    def _enqueue(self, message: _Dumped) -> _Key | None:
        """Hand one message to libpq; return what it prepares besides, if anything."""
        key, values, formats = message
        text, types = key
        name, made = self._prepared.get(key), None
        if name is None:
            if not self._prepares or len(self._prepared) >= PREPARED_MAX:
                self._pgconn.send_query_params(text.encode(), values, types, formats, Format.BINARY)
                return None
            name, made = b"holdfast_%d" % next(self._numbers), key
            self._prepared[key] = name
            self._pgconn.send_prepare(name, text.encode(), types)
        self._pgconn.send_query_prepared(name, values, formats, Format.BINARY)
        return made

    def _fetch(
        self, prepared: Sequence[_Key | None]
    ) -> PQGen[tuple[list[PGresult], psycopg.Error | None]]:
        """Read the answers to their end, so that the connection can be used again."""
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
            # A server that ends the connection has said why in the answer before.
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


async def wait_async(
    steps: PQGen[R], descriptor: int, on_cancel: Callable[[], None], *, to_the_end: bool
) -> R:
    """Run a generator over a socket; with `to_the_end`, a cancellation is raised only after it,
    unless that takes too long.

    psycopg's own waiting sets a timer each time, and needs a task of its own to go on when it is
    cancelled.
    """
    loop = asyncio.get_running_loop()
    cancelled: asyncio.CancelledError | None = None
    deadline: float | None = None
    try:
        wanted = next(steps)
        while True:
            found = 0
            try:
                found = await _ready(loop, descriptor, wanted, deadline)
            except asyncio.CancelledError as error:
                if cancelled is None:
                    on_cancel()
                    deadline = loop.time() + CANCEL_SECONDS_MAX
                if not to_the_end:
                    raise
                cancelled = error
            except TimeoutError:
                assert cancelled is not None
                raise cancelled from None
            wanted = steps.send(found)
    except StopIteration as stop:
        if cancelled is not None:
            raise cancelled from None
        result: R = stop.value
        return result
    except psycopg.Error as error:
        if cancelled is not None:
            raise cancelled from error
        raise


async def _ready(
    loop: asyncio.AbstractEventLoop, descriptor: int, wanted: int, deadline: float | None
) -> int:
    """Wait until a socket can be read or written, as wanted, and return which."""
    ready: asyncio.Future[int] = loop.create_future()
    if wanted & _READ:
        loop.add_reader(descriptor, _settle, ready, _READ)
    if wanted & _WRITE:
        loop.add_writer(descriptor, _settle, ready, _WRITE)
    try:
        if deadline is None:
            return await ready
        async with asyncio.timeout_at(deadline):
            return await ready
    finally:
        if wanted & _READ:
            loop.remove_reader(descriptor)
        if wanted & _WRITE:
            loop.remove_writer(descriptor)


def _settle(ready: asyncio.Future[int], state: int) -> None:
    if not ready.done():
        ready.set_result(state)
