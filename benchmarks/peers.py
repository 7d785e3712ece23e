"""The same statements by hand: apsw, aiosqlite, SQLAlchemy Core and psycopg, as one writes them.

The tables are Holdfast's own, made by opening a store once. Every peer has its own file or schema,
runs the texts of `holdfast.feed` and `holdfast.testing.nouns`, with values that are ready before
the clock starts, and is as durable: WAL and synchronous=FULL, synchronous_commit=on.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import aiosqlite
import apsw
import psycopg
import psycopg_pool
import sqlalchemy
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

import holdfast
from holdfast.feed.events import ADVANCE_FEED, LOCK_TREE, append_events
from holdfast.kernel.sql import Dialect
from holdfast.testing.nouns import ADD, VALUE, Counter, Setup

Sync: TypeAlias = Callable[[], object]
Async: TypeAlias = Callable[[], Awaitable[object]]

SAVE = (LOCK_TREE, ADD, ADVANCE_FEED, append_events(1))
"""What `Counter.add` runs: lock the tree, change a row, and append an event."""
TALLY = (ADD,)
READ = (VALUE,)

BUSY_MS = 10_000
CONNECTIONS_MAX = 16


@dataclass(frozen=True, slots=True)
class Step:
    """One statement with its values: numbered, and by name as SQLAlchemy takes them."""

    text: str
    values: list[object]
    named_text: str
    named: dict[str, object]


def steps(texts: Sequence[str], root_id: str, schema: str | None = None) -> list[Step]:
    """Return statements on one tree, for SQLite or for a PostgreSQL schema."""
    parameters: dict[str, object] = {
        "root_id": root_id,
        "id": root_id,
        "amount": 1,
        "count": 1,
        "back": 0,
        "session_id0": root_id,
        "kind0": "counter_added",
        "data0": b"x" * 56,
        "now": 1_800_000_000_000,
    }
    dialect = Dialect(schema)
    found = []
    for text in texts:
        statement = dialect.statement(text)
        named_text = statement.text
        for number, name in reversed([*enumerate(statement.parameters, 1)]):
            named_text = named_text.replace(f"${number}", f":{name}")
        named = {name: parameters[name] for name in statement.parameters}
        found.append(Step(statement.text, list(named.values()), named_text, named))
    return found


def prepare(url: str, roots: Sequence[str], namespace: str | None = None) -> None:
    """Create the tables and plant the trees; the store is closed again."""
    with holdfast.open(url, namespace=namespace) as store:
        Setup(store).install()
        for root in roots:
            counter = Counter(store, root)
            counter.plant()
            counter.add()


# SQLite


def open_apsw(path: Path) -> apsw.Connection:
    """Open a file as durably as Holdfast does."""
    connection = apsw.Connection(str(path))
    connection.set_busy_timeout(BUSY_MS)
    for pragma in _PRAGMAS:
        connection.execute(pragma).fetchall()
    return connection


_PRAGMAS = ("PRAGMA journal_mode=WAL", "PRAGMA synchronous=FULL", "PRAGMA foreign_keys=ON")


def apsw_write(connection: apsw.Connection, work: Sequence[Step]) -> Sync:
    """Return one transaction by hand, the least that SQLite can do from Python."""
    pairs = [(step.text, step.values) for step in work]

    def write() -> None:
        connection.execute("BEGIN IMMEDIATE")
        try:
            for text, values in pairs:
                connection.execute(text, values).fetchall()
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")

    return write


def apsw_one(connection: apsw.Connection, work: Sequence[Step]) -> Sync:
    """Return one statement by hand, in the transaction that SQLite makes for it."""
    (step,) = work
    return lambda: connection.execute(step.text, step.values).fetchall()


def executor_write(
    executor: ThreadPoolExecutor, connection: apsw.Connection, work: Sequence[Step]
) -> Async:
    """Return one transaction that runs as a whole in the executor's only thread."""
    write = apsw_write(connection, work)
    return lambda: asyncio.get_running_loop().run_in_executor(executor, write)


async def open_aiosqlite(path: Path) -> aiosqlite.Connection:
    """Open a file with aiosqlite, transactions by hand."""
    connection = await aiosqlite.connect(path, isolation_level=None)
    for pragma in _PRAGMAS:
        await connection.execute_fetchall(pragma)
    return connection


def aiosqlite_write(
    connection: aiosqlite.Connection, lock: asyncio.Lock, work: Sequence[Step]
) -> Async:
    """Return one transaction; the lock keeps the tasks' transactions on one connection apart."""

    async def write() -> None:
        async with lock:
            await connection.execute("BEGIN IMMEDIATE")
            try:
                for step in work:
                    await connection.execute_fetchall(step.named_text, step.named)
            except BaseException:
                await connection.rollback()
                raise
            await connection.commit()

    return write


def aiosqlite_one(connection: aiosqlite.Connection, work: Sequence[Step]) -> Async:
    """Return one statement without a transaction of its own."""
    (step,) = work

    async def run() -> None:
        await connection.execute_fetchall(step.named_text, step.named)

    return run


# SQLAlchemy Core


def open_sqlalchemy_sqlite(path: Path) -> sqlalchemy.Engine:
    """Return an engine on a file, with the transactions that SQLAlchemy's own recipe makes."""
    engine = sqlalchemy.create_engine(f"sqlite:///{path}")
    _make_immediate(engine)
    return engine


def open_async_sqlalchemy_sqlite(path: Path) -> AsyncEngine:
    """Return an async engine on a file; its one connection serves the tasks in turn."""
    engine = create_async_engine(
        f"sqlite+aiosqlite:///{path}", pool_size=1, max_overflow=0, pool_timeout=60
    )
    _make_immediate(engine.sync_engine)
    return engine


def _make_immediate(engine: sqlalchemy.Engine) -> None:
    @sqlalchemy.event.listens_for(engine, "connect")
    def connected(connection: Any, _: object) -> None:
        connection.isolation_level = None
        cursor = connection.cursor()
        for pragma in _PRAGMAS:
            cursor.execute(pragma)
        cursor.close()

    @sqlalchemy.event.listens_for(engine, "begin")
    def begun(connection: sqlalchemy.Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")


def open_sqlalchemy_postgres(dsn: str) -> sqlalchemy.Engine:
    """Return an engine over psycopg that prepares statements as early as Holdfast does."""

    def connect() -> psycopg.Connection[Any]:
        return psycopg.connect(dsn, prepare_threshold=1)

    return sqlalchemy.create_engine("postgresql+psycopg://", creator=connect)


def sqlalchemy_write(engine: sqlalchemy.Engine, work: Sequence[Step]) -> Sync:
    """Return one transaction in Core."""
    pairs = [(sqlalchemy.text(step.named_text), step.named) for step in work]

    def write() -> None:
        with engine.begin() as connection:
            for text, named in pairs:
                result = connection.execute(text, named)
                if result.returns_rows:
                    result.fetchall()

    return write


def sqlalchemy_read(engine: sqlalchemy.Engine, work: Sequence[Step]) -> Sync:
    """Return one SELECT in Core, in the transaction that Core begins by itself."""
    (step,) = work
    text = sqlalchemy.text(step.named_text)

    def read() -> None:
        with engine.connect() as connection:
            connection.execute(text, step.named).fetchall()

    return read


def async_sqlalchemy_write(engine: AsyncEngine, work: Sequence[Step]) -> Async:
    """Return one transaction in Core's async form."""
    pairs = [(sqlalchemy.text(step.named_text), step.named) for step in work]

    async def write() -> None:
        async with engine.begin() as connection:
            for text, named in pairs:
                result = await connection.execute(text, named)
                if result.returns_rows:
                    result.fetchall()

    return write


# PostgreSQL


def open_psycopg(dsn: str) -> psycopg.Connection[tuple[Any, ...]]:
    """Connect; every statement is prepared at once."""
    return psycopg.connect(
        dsn, autocommit=True, prepare_threshold=0, cursor_factory=psycopg.RawCursor
    )


def psycopg_write(connection: psycopg.Connection[Any], work: Sequence[Step]) -> Sync:
    """Return one transaction as psycopg's documentation writes it: a round trip a statement."""

    def write() -> None:
        with connection.transaction():
            for step in work:
                connection.execute(step.text, step.values, binary=True)

    return write


def psycopg_pipelined_write(connection: psycopg.Connection[Any], work: Sequence[Step]) -> Sync:
    """Return the same in two round trips, the fewest that its answers allow, as few write it."""

    def write() -> None:
        with connection.pipeline():
            connection.execute("BEGIN")
            asked = [connection.execute(step.text, step.values, binary=True) for step in work[:2]]
            asked[-1].fetchall()
            for step in work[2:]:
                connection.execute(step.text, step.values, binary=True)
            connection.execute("COMMIT")

    return write


def psycopg_one(connection: psycopg.Connection[Any], work: Sequence[Step]) -> Sync:
    """Return one statement without a transaction of its own."""
    (step,) = work
    return lambda: connection.execute(step.text, step.values, binary=True).fetchall()


async def open_psycopg_pool(dsn: str) -> psycopg_pool.AsyncConnectionPool[Any]:
    """Open a pool of as many connections as Holdfast's."""
    arguments = {
        "autocommit": True,
        "prepare_threshold": 0,
        "cursor_factory": psycopg.AsyncRawCursor,
    }
    pool: psycopg_pool.AsyncConnectionPool[Any] = psycopg_pool.AsyncConnectionPool(
        dsn, kwargs=arguments, min_size=1, max_size=CONNECTIONS_MAX, open=False
    )
    await pool.open(wait=True)
    return pool


def psycopg_pool_write(pool: psycopg_pool.AsyncConnectionPool[Any], work: Sequence[Step]) -> Async:
    """Return one transaction on a connection of the pool."""

    async def write() -> None:
        async with pool.connection() as connection, connection.transaction():
            for step in work:
                await connection.execute(step.text, step.values, binary=True)

    return write


def psycopg_pool_pipelined_write(
    pool: psycopg_pool.AsyncConnectionPool[Any], work: Sequence[Step]
) -> Async:
    """Return one transaction in two round trips, on a connection of the pool."""

    async def write() -> None:
        async with pool.connection() as connection, connection.pipeline():
            await connection.execute("BEGIN")
            asked = [
                await connection.execute(step.text, step.values, binary=True) for step in work[:2]
            ]
            await asked[-1].fetchall()
            for step in work[2:]:
                await connection.execute(step.text, step.values, binary=True)
            await connection.execute("COMMIT")

    return write


def psycopg_pool_one(pool: psycopg_pool.AsyncConnectionPool[Any], work: Sequence[Step]) -> Async:
    """Return one statement on a connection of the pool."""
    (step,) = work

    async def run() -> None:
        async with pool.connection() as connection:
            await (await connection.execute(step.text, step.values, binary=True)).fetchall()

    return run


def versions() -> dict[str, str]:
    """Return the versions of the libraries that are compared."""
    return {
        "SQLite": f"{apsw.sqlite_lib_version()} in apsw, {sqlite3.sqlite_version} in Python",
        "psycopg": psycopg.__version__,
        "SQLAlchemy": sqlalchemy.__version__,
        "aiosqlite": getattr(aiosqlite, "__version__", "?"),
    }
