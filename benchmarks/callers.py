"""Who makes a tool call durable: the contract of a product, Holdfast, and two commits by hand.

The tool does nothing and returns a small dict, so what is measured is the cost of keeping it.
Every call has another argument: none is a repetition of one before.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import holdfast

from . import peers
from .keepers import Place
from .load import many_tasks, timed, timed_async
from .measure import RATE, TIME, Figures
from .peers import Async, Sync

Round: TypeAlias = Callable[[float], Figures]
"""Makes calls for so many seconds, one after the other."""

Crowd: TypeAlias = Callable[[int, float], Figures]
"""Makes calls from so many sessions of one event loop, for so many seconds."""

SESSIONS_MAX = 64
HOLDFAST, HOLDFAST_ASYNC = "Holdfast call", "Holdfast call, async"
BY_HAND = "two commits by hand"
REPLAY, READ, BEGIN = "replayed call", "read call", "begin and complete"

numbers = itertools.count()


class Product:
    """Somebody who makes tool calls durable, open on a place of its own."""

    def __init__(self, place: Place, runner: asyncio.Runner) -> None:
        self.place = place
        self.runner = runner
        self._stack = contextlib.ExitStack()

    def open(self) -> None:
        """Open the place."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of the place."""
        self._stack.close()

    def rounds(self) -> dict[str, Round]:
        """Return the ways to call without an event loop, by name."""
        return {}

    def awaited_rounds(self) -> dict[str, Round]:
        """Return the ways to call from one task of an event loop, by name."""
        return {}

    def crowds(self) -> dict[str, Crowd]:
        """Return the ways to call from many tasks, by name."""
        return {}

    def _close_async(self, close: Callable[[], Any]) -> None:
        self._stack.callback(lambda: self.runner.run(close()))


class LoopProduct(Product):
    """A product whose sessions are plain functions and coroutine functions."""

    def calls(self) -> dict[str, Sync]:
        """Return one session for each way to call without an event loop."""
        return {}

    def sessions(self) -> dict[str, Sequence[Async]]:
        """Return many sessions for each way to call from an event loop."""
        return {}

    def rounds(self) -> dict[str, Round]:
        """Call one session."""
        return {name: functools.partial(timed, call) for name, call in self.calls().items()}

    def awaited_rounds(self) -> dict[str, Round]:
        """Await the first session."""

        def waited(call: Async, seconds: float) -> Figures:
            return self.runner.run(timed_async(call, seconds))

        return {
            name: functools.partial(waited, sessions[0])
            for name, sessions in self.sessions().items()
        }

    def crowds(self) -> dict[str, Crowd]:
        """Await some sessions at once."""

        def crowded(sessions: Sequence[Async], count: int, seconds: float) -> Figures:
            return per_call(self.runner.run(many_tasks(sessions[:count], seconds)))

        return {
            name: functools.partial(crowded, sessions) for name, sessions in self.sessions().items()
        }


def per_call(figures: Figures) -> Figures:
    """Return a crowd's figures with the time that one more call takes."""
    rest = {name: value for name, value in figures.items() if name != RATE}
    return {TIME: 1e6 / figures[RATE], RATE: figures[RATE], **rest}


# Holdfast


@holdfast.tool(effect="mutate")
def charge(number: int) -> dict[str, int]:
    """Do nothing."""
    return {"charged": number}


@holdfast.tool(effect="mutate", name="charge_async")
async def charge_async(number: int) -> dict[str, int]:
    """Do nothing."""
    return {"charged": number}


@holdfast.tool(effect="read")
def look(number: int) -> dict[str, int]:
    """Do nothing."""
    return {"seen": number}


class HoldfastProduct(LoopProduct):
    """`session.call`: the intent is durable before the tool runs, its outcome afterwards."""

    def open(self) -> None:
        """Open a store of each colour, with sessions in them."""
        namespace = self.place.schema or None
        self.store = self._stack.enter_context(holdfast.open(self.place.url, namespace=namespace))
        self.session = self.store.session()
        self.runner.run(self._open_async(namespace))
        self._close_async(self.async_store.close)

    async def _open_async(self, namespace: str | None) -> None:
        self.async_store = await holdfast.aopen(self.place.url, namespace=namespace)
        self.async_sessions = [await self.async_store.session() for _ in range(SESSIONS_MAX)]

    def calls(self) -> dict[str, Sync]:
        """Call a tool."""
        return {HOLDFAST: lambda: self.session.call(charge, number=next(numbers))}

    def sessions(self) -> dict[str, Sequence[Async]]:
        """Call a tool that is a coroutine function."""

        def calling(session: holdfast.Session[holdfast.Async]) -> Async:
            return lambda: session.call(charge_async, number=next(numbers))

        return {HOLDFAST_ASYNC: [calling(session) for session in self.async_sessions]}

    def others(self) -> dict[str, Round]:
        """Return what else a session does with tools."""
        first = next(numbers)
        self.session.call(charge, number=first)

        def begin() -> None:
            begun = self.session.begin(charge, {"number": next(numbers)})
            assert isinstance(begun, holdfast.Issued)
            begun.complete({"charged": 1})

        calls: dict[str, Sync] = {
            REPLAY: lambda: self.session.call(charge, number=first),
            READ: lambda: self.session.call(look, number=next(numbers)),
            BEGIN: begin,
        }
        return {name: functools.partial(timed, call) for name, call in calls.items()}


# Two commits by hand

CREATE = """
CREATE TABLE IF NOT EXISTS calls (
    id TEXT PRIMARY KEY, session TEXT NOT NULL, arguments TEXT NOT NULL,
    status TEXT NOT NULL, result TEXT
)
"""
INTENT = (
    "INSERT INTO calls (id, session, arguments, status) VALUES ({}, 's', '{{\"number\": 1}}', 'i')"
)
OUTCOME = "UPDATE calls SET status = 'c', result = '{{\"charged\": 1}}' WHERE id = {}"


class ByHandProduct(LoopProduct):
    """An INSERT and an UPDATE, each with a commit of its own: the least that is as durable."""

    def open(self) -> None:
        """Open connections as one opens them by hand."""
        if self.place.path is not None:
            self._connection = peers.open_apsw(self.place.path)
            # Two SQLite libraries of one process must not open one file.
            path = self.place.path.with_suffix(".aiosqlite.db")
            self._awaited = self.runner.run(peers.open_aiosqlite(path))
            self._close_async(self._awaited.close)
            self.runner.run(self._awaited.execute_fetchall(CREATE))
        else:
            self._server = peers.open_psycopg(self.place.conninfo)
            self._pool = self.runner.run(peers.open_psycopg_pool(self.place.conninfo))
            self._close_async(self._pool.close)
        connection = self._server if self.place.path is None else self._connection
        self._stack.callback(connection.close)
        connection.execute(CREATE)

    def calls(self) -> dict[str, Sync]:
        """Write with apsw, or with psycopg."""
        connection: Any = self._server if self.place.path is None else self._connection
        mark = "$1" if self.place.path is None else "?"
        intent, outcome = INTENT.format(mark), OUTCOME.format(mark)

        def call() -> None:
            id = str(uuid.uuid4())
            connection.execute(intent, (id,))
            connection.execute(outcome, (id,))

        return {BY_HAND: call}

    def sessions(self) -> dict[str, Sequence[Async]]:
        """Write with aiosqlite, or with a pool of psycopg."""
        mark = "$1" if self.place.path is None else "?"
        intent, outcome = INTENT.format(mark), OUTCOME.format(mark)

        async def on_sqlite() -> None:
            id = str(uuid.uuid4())
            await self._awaited.execute(intent, (id,))
            await self._awaited.execute(outcome, (id,))

        async def on_postgres() -> None:
            id = str(uuid.uuid4())
            for text in (intent, outcome):
                async with self._pool.connection() as connection:
                    await connection.execute(text, (id,))

        call = on_postgres if self.place.path is None else on_sqlite
        return {f"{BY_HAND}, async": [call] * SESSIONS_MAX}


@contextlib.contextmanager
def opened(products: Sequence[Product]) -> Iterator[None]:
    """Open products, and close those that were opened."""
    with contextlib.ExitStack() as stack:
        for product in products:
            product.open()
            stack.callback(product.close)
        yield
