"""Holdfast and its peers, opened side by side on each database and handed out as contestants."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeAlias

import holdfast
from holdfast.kernel.operation import C, Handle, Op, one, operation
from holdfast.store import StoreHandle
from holdfast.testing.nouns import ADD, Counter

from . import peers
from .load import many_tasks, timed, timed_async
from .measure import Contestant
from .peers import READ, SAVE, TALLY, Async, Sync, steps

Work: TypeAlias = Literal["save", "tally", "read"]
TEXTS: dict[Work, tuple[str, ...]] = {"save": SAVE, "tally": TALLY, "read": READ}
ROOTS = [f"root-{number}" for number in range(64)]
HOLDFAST, HOLDFAST_ASYNC = "Holdfast", "Holdfast async"
PIPELINED = "psycopg, pipelined"


class Tally(Handle[C]):
    """The smallest noun: a number that one statement changes, without a tree or an event."""

    def __init__(self, store: StoreHandle[C], root_id: str) -> None:
        super().__init__(store.runtime)
        self.root_id = root_id

    @operation
    def bump(self) -> Op[None]:
        """Add one."""
        yield from one(ADD, id=self.root_id, amount=1)


class Side:
    """One database with everything that is open on it until the end of the run."""

    name: str

    def __init__(self, runner: asyncio.Runner) -> None:
        self.runner = runner
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def one_caller(self, work: Work, seconds: float) -> list[Contestant]:
        """Return everybody who does this work one operation after the other."""
        raise NotImplementedError

    def sessions(self, count: int, seconds: float) -> list[Contestant]:
        """Return everybody who serves many asyncio sessions, each with a tree of its own."""
        raise NotImplementedError

    def _open_store(self, url: str, namespace: str | None = None) -> holdfast.Store:
        return self._stack.enter_context(holdfast.open(url, namespace=namespace))

    def _open_async_store(self, url: str, namespace: str | None = None) -> holdfast.AsyncStore:
        store = self.runner.run(holdfast.aopen(url, namespace=namespace))
        self._close_async(store.close)
        return store

    def _close_async(self, close: Callable[[], Any]) -> None:
        self._stack.callback(lambda: self.runner.run(close()))

    def _sync(self, name: str, operation: Sync, seconds: float, beside: str | None) -> Contestant:
        return Contestant(name, functools.partial(timed, operation, seconds), beside)

    def _async(self, name: str, operation: Async, seconds: float, beside: str) -> Contestant:
        return Contestant(name, lambda: self.runner.run(timed_async(operation, seconds)), beside)

    def _tasks(
        self, name: str, operations: Sequence[Async], seconds: float, beside: str | None
    ) -> Contestant:
        return Contestant(name, lambda: self.runner.run(many_tasks(operations, seconds)), beside)

    def _holdfast(
        self, store: holdfast.Store, async_store: holdfast.AsyncStore, work: Work, seconds: float
    ) -> list[Contestant]:
        mine, awaited = ROOTS[:2]
        counter, awaited_counter = Counter(store, mine), Counter(async_store, awaited)
        operations: dict[Work, tuple[Sync, Async]] = {
            "save": (counter.add, awaited_counter.add),
            "tally": (Tally(store, mine).bump, Tally(async_store, awaited).bump),
            "read": (counter.value, awaited_counter.value),
        }
        operation, async_operation = operations[work]
        return [
            self._sync(HOLDFAST, operation, seconds, None),
            self._async(HOLDFAST_ASYNC, async_operation, seconds, HOLDFAST),
        ]


class SqliteSide(Side):
    """SQLite: a file for each contestant, in one directory."""

    name = "SQLite"

    def __init__(self, runner: asyncio.Runner, directory: Path) -> None:
        super().__init__(runner)
        self.directory = directory
        self.url = f"sqlite:///{self.file('holdfast')}"
        self.store = self._open_store(self.url)
        self.async_store = self._open_async_store(f"sqlite:///{self.file('holdfast-async')}")
        self._apsw = peers.open_apsw(self.file("apsw"))
        self._stack.callback(self._apsw.close)
        self._aiosqlite = runner.run(peers.open_aiosqlite(self.file("aiosqlite")))
        self._close_async(self._aiosqlite.close)
        self._engine = peers.open_sqlalchemy_sqlite(self.file("sqlalchemy"))
        self._stack.callback(self._engine.dispose)
        self._async_engine = peers.open_async_sqlalchemy_sqlite(self.file("sqlalchemy-async"))
        self._close_async(self._async_engine.dispose)
        self._executor = self._stack.enter_context(ThreadPoolExecutor(1))

    def file(self, name: str) -> Path:
        """Return a contestant's file, with the tables and trees in it."""
        path = self.directory / f"{name}.db"
        if not path.exists():
            peers.prepare(f"sqlite:///{path}", ROOTS)
        return path

    def one_caller(self, work: Work, seconds: float) -> list[Contestant]:
        """Return everybody who does this work one operation after the other."""
        do = steps(TEXTS[work], ROOTS[0])
        read = peers.sqlalchemy_read if work == "read" else peers.sqlalchemy_write
        by_hand = peers.apsw_write if work == "save" else peers.apsw_one
        in_loop = (
            peers.aiosqlite_write(self._aiosqlite, asyncio.Lock(), do)
            if work == "save"
            else peers.aiosqlite_one(self._aiosqlite, do)
        )
        return [
            *self._holdfast(self.store, self.async_store, work, seconds),
            self._sync("apsw by hand", by_hand(self._apsw, do), seconds, HOLDFAST),
            self._sync("SQLAlchemy Core", read(self._engine, do), seconds, HOLDFAST),
            self._async("aiosqlite", in_loop, seconds, HOLDFAST_ASYNC),
        ]

    def sessions(self, count: int, seconds: float) -> list[Contestant]:
        """Return everybody who serves many asyncio sessions, each with a tree of its own."""
        roots, lock = ROOTS[:count], asyncio.Lock()
        each = [steps(SAVE, root) for root in roots]
        return [
            self._tasks(
                HOLDFAST,
                [Counter(self.async_store, root).add for root in roots],
                seconds,
                None,
            ),
            self._tasks(
                "aiosqlite + lock",
                [peers.aiosqlite_write(self._aiosqlite, lock, do) for do in each],
                seconds,
                HOLDFAST,
            ),
            self._tasks(
                "one-thread executor",
                [peers.executor_write(self._executor, self._apsw, do) for do in each],
                seconds,
                HOLDFAST,
            ),
            self._tasks(
                "SQLAlchemy async",
                [peers.async_sqlalchemy_write(self._async_engine, do) for do in each],
                seconds,
                HOLDFAST,
            ),
        ]


class PostgresSide(Side):
    """PostgreSQL: one schema for Holdfast, one for the peers."""

    name = "PostgreSQL"

    def __init__(self, runner: asyncio.Runner, dsn: str, schema: str, peer_schema: str) -> None:
        super().__init__(runner)
        self.dsn, self.schema, self.peer_schema = dsn, schema, peer_schema
        peers.prepare(dsn, ROOTS, schema)
        peers.prepare(dsn, ROOTS, peer_schema)
        self._store = self._open_store(dsn, schema)
        self._async_store = self._open_async_store(dsn, schema)
        self._connection = peers.open_psycopg(dsn)
        self._stack.callback(self._connection.close)
        self._pool = runner.run(peers.open_psycopg_pool(dsn))
        self._close_async(self._pool.close)
        self._engine = peers.open_sqlalchemy_postgres(dsn)
        self._stack.callback(self._engine.dispose)

    def one_caller(self, work: Work, seconds: float) -> list[Contestant]:
        """Return everybody who does this work one operation after the other."""
        do = steps(TEXTS[work], ROOTS[0], self.peer_schema)
        read = peers.sqlalchemy_read if work == "read" else peers.sqlalchemy_write
        by_hand = peers.psycopg_write if work == "save" else peers.psycopg_one
        in_loop = peers.psycopg_pool_write if work == "save" else peers.psycopg_pool_one
        found = [
            *self._holdfast(self._store, self._async_store, work, seconds),
            self._sync("psycopg by hand", by_hand(self._connection, do), seconds, HOLDFAST),
            self._sync("SQLAlchemy Core", read(self._engine, do), seconds, HOLDFAST),
            self._async("psycopg pool, async", in_loop(self._pool, do), seconds, HOLDFAST_ASYNC),
        ]
        if work == "save":
            pipelined = peers.psycopg_pipelined_write(self._connection, do)
            found.insert(3, self._sync(PIPELINED, pipelined, seconds, HOLDFAST))
            pipelined_in_loop = peers.psycopg_pool_pipelined_write(self._pool, do)
            found.append(
                self._async(f"{PIPELINED}, async", pipelined_in_loop, seconds, HOLDFAST_ASYNC)
            )
        return found

    def sessions(self, count: int, seconds: float) -> list[Contestant]:
        """Return everybody who serves many asyncio sessions, each with a tree of its own."""
        roots = ROOTS[:count]
        each = [steps(SAVE, root, self.peer_schema) for root in roots]
        return [
            self._tasks(
                HOLDFAST,
                [Counter(self._async_store, root).add for root in roots],
                seconds,
                None,
            ),
            self._tasks(
                "psycopg pool",
                [peers.psycopg_pool_write(self._pool, do) for do in each],
                seconds,
                HOLDFAST,
            ),
            self._tasks(
                PIPELINED,
                [peers.psycopg_pool_pipelined_write(self._pool, do) for do in each],
                seconds,
                HOLDFAST,
            ),
        ]


# What a worker process opens


@contextlib.contextmanager
def holdfast_worker(url: str, root_id: str, namespace: str | None = None) -> Iterator[Sync]:
    """Open a store."""
    with holdfast.open(url, namespace=namespace) as store:
        yield Counter(store, root_id).add


@contextlib.contextmanager
def apsw_worker(path: Path, root_id: str) -> Iterator[Sync]:
    """Open a file with SQLite's own busy handler."""
    connection = peers.open_apsw(path)
    with contextlib.closing(connection):
        yield peers.apsw_write(connection, steps(SAVE, root_id))


@contextlib.contextmanager
def psycopg_worker(
    write: Callable[..., Sync], dsn: str, root_id: str, schema: str
) -> Iterator[Sync]:
    """Open a connection for one of the ways to write by hand."""
    with contextlib.closing(peers.open_psycopg(dsn)) as connection:
        yield write(connection, steps(SAVE, root_id, schema))
