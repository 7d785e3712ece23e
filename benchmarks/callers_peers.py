"""DBOS and LangGraph as they make a call durable.

DBOS: a step inside a workflow. It looks for a recorded result, runs the step and writes its result
in one transaction; before the step runs nothing is written. Who wants an intent that is durable
before the call writes a step of its own for it: two steps, each with its look and its commit.

LangGraph: what its loop writes for a superstep with one tool: `put_writes` with the result of the
task, then `put` with the next checkpoint. The checkpoint holds only that result and never grows,
and the graph itself is left out. Before the tool runs nothing is written.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import sqlite3
import time
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from .callers import SESSIONS_MAX, Crowd, LoopProduct, Product, Round, numbers, per_call
from .keepers import Place
from .load import rates, repeat, tick, timed, timed_async
from .measure import Figures
from .peers import CONNECTIONS_MAX, Async, Sync

DBOS_STEP, DBOS_STEP_ASYNC = "DBOS step", "DBOS step, async"
DBOS_TWO_STEPS = "DBOS, two steps (intent, then call)"
DBOS_AS_IT_COMES = "DBOS step, as it comes (rollback journal)"
CHANNEL = "result"


def make_wal(path: Any) -> None:
    """Make a file that is opened with defaults as durable and as fast as everybody's.

    The mode is kept in the file; synchronous=FULL is SQLite's default.
    """
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode=WAL").fetchall()
    connection.close()


def journal_mode(path: Any) -> str:
    """Return how a file is written by those who set no mode themselves."""
    connection = sqlite3.connect(path)
    [(mode,)] = connection.execute("PRAGMA journal_mode").fetchall()
    connection.close()
    return str(mode)


# DBOS


def dbos_step(number: int) -> dict[str, int]:
    """Do nothing."""
    return {"charged": number}


async def dbos_step_async(number: int) -> dict[str, int]:
    """Do nothing."""
    return {"charged": number}


def dbos_intent(number: int) -> dict[str, int]:
    """Say what is about to be done."""
    return {"number": number}


async def dbos_intent_async(number: int) -> dict[str, int]:
    """Say what is about to be done."""
    return {"number": number}


class _Gathering:
    """Workflows that wait until all of them have started."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.deadline = 0.0
        self.ended_at = 0.0
        self.latencies: list[float] = []


class _Steps:
    """The functions that DBOS knows; it wants them registered once in a process."""

    gathering: _Gathering

    def __init__(self) -> None:
        from dbos import DBOS  # type: ignore[import-not-found]

        step, awaited_step = DBOS.step()(dbos_step), DBOS.step()(dbos_step_async)
        intent, awaited_intent = DBOS.step()(dbos_intent), DBOS.step()(dbos_intent_async)

        def call() -> None:
            step(next(numbers))

        def call_with_intent() -> None:
            number = next(numbers)
            intent(number)
            step(number)

        async def awaited_call() -> None:
            await awaited_step(next(numbers))

        async def awaited_call_with_intent() -> None:
            number = next(numbers)
            await awaited_intent(number)
            await awaited_step(number)

        def one_session(seconds: float, has_intent: bool) -> Figures:
            return timed(call_with_intent if has_intent else call, seconds)

        async def one_awaited_session(seconds: float, has_intent: bool) -> Figures:
            return await timed_async(
                awaited_call_with_intent if has_intent else awaited_call, seconds
            )

        async def session_of_many(has_intent: bool) -> None:
            gathering = self.gathering
            await gathering.gate.wait()
            await repeat(
                awaited_call_with_intent if has_intent else awaited_call,
                gathering.deadline,
                gathering.latencies,
            )
            gathering.ended_at = time.perf_counter()

        self.one_session = DBOS.workflow()(one_session)
        self.one_awaited_session = DBOS.workflow()(one_awaited_session)
        self.session_of_many = DBOS.workflow()(session_of_many)

    @staticmethod
    @functools.cache
    def registered() -> _Steps:
        """Return the one copy of this process."""
        return _Steps()


class DbosProduct(Product):
    """DBOS on SQLite with WAL, or on PostgreSQL, with its own defaults otherwise."""

    has_wal = True
    ways: Mapping[str, bool] = {DBOS_STEP: False, DBOS_TWO_STEPS: True}
    """The ways to call, by name, and whether an intent is written before the call."""

    def open(self) -> None:
        """Launch it; it takes a loop of its own, whose threads it replaces."""
        from dbos import DBOS

        if self.place.path is not None and self.has_wal:
            make_wal(self.place.path)
        configure_dbos(self.place)
        self._steps = _Steps.registered()
        DBOS.launch()
        self._stack.callback(DBOS.destroy)
        self.runner = self._stack.enter_context(asyncio.Runner())

    def rounds(self) -> dict[str, Round]:
        """Run steps in a workflow."""

        def called(has_intent: bool, seconds: float) -> Figures:
            return dict(self._steps.one_session(seconds, has_intent))

        return {
            name: functools.partial(called, has_intent) for name, has_intent in self.ways.items()
        }

    def awaited_rounds(self) -> dict[str, Round]:
        """Run steps in a workflow that is a coroutine function."""

        def awaited(has_intent: bool, seconds: float) -> Figures:
            return dict(self.runner.run(self._steps.one_awaited_session(seconds, has_intent)))

        return {
            f"{name}, async": functools.partial(awaited, has_intent)
            for name, has_intent in self.ways.items()
        }

    def crowds(self) -> dict[str, Crowd]:
        """Run steps in many workflows of one event loop; starting these is not counted."""

        def crowded(has_intent: bool, count: int, seconds: float) -> Figures:
            return per_call(self.runner.run(self._crowd(has_intent, count, seconds)))

        return {
            f"{name}, async": functools.partial(crowded, has_intent)
            for name, has_intent in self.ways.items()
        }

    async def _crowd(self, has_intent: bool, count: int, seconds: float) -> Figures:
        from dbos import DBOS

        gathering = self._steps.gathering = _Gathering()
        workflow = self._steps.session_of_many
        handles = [await DBOS.start_workflow_async(workflow, has_intent) for _ in range(count)]
        started = time.perf_counter()
        gathering.deadline = started + seconds
        ticker = asyncio.create_task(tick(gathering.deadline))
        gathering.gate.set()
        await asyncio.gather(*(handle.get_result() for handle in handles))
        figures = rates(gathering.latencies, gathering.ended_at - started)
        return figures | {"stall ms": await ticker * 1e3}


class PlainDbosProduct(DbosProduct):
    """DBOS on SQLite as it is installed: it leaves the journal to SQLite's default."""

    has_wal = False
    ways: Mapping[str, bool] = {DBOS_AS_IT_COMES: False}

    def open(self) -> None:
        """Launch it, and see that its name is still true."""
        super().open()
        if (mode := journal_mode(self.place.path)) != "delete":
            raise RuntimeError(
                f"DBOS has chosen the journal mode {mode} by itself: {DBOS_AS_IT_COMES!r} needs "
                f"another name"
            )


def configure_dbos(place: Place) -> None:
    """Make the one instance of this process, without telemetry."""
    from dbos import DBOS

    DBOS(
        config={
            "name": "bench",
            "system_database_url": place.url,
            "dbos_system_schema": place.schema or "dbos",
            "enable_otlp": False,
            "log_level": "ERROR",
        }
    )
    logging.getLogger("dbos").setLevel(logging.ERROR)


# LangGraph


class LangGraphCalls:
    """Calls of one session through a saver."""

    def __init__(self, saver: Any) -> None:
        self._saver = saver
        self._config = saver.put(*_first())

    def writes(self) -> None:
        """Write the result of a task."""
        self._saver.put_writes(self._config, _writes(), str(uuid.uuid4()))

    def both(self) -> None:
        """Write the result of a task, and the checkpoint that follows."""
        written = _writes()
        self._saver.put_writes(self._config, written, str(uuid.uuid4()))
        self._config = self._saver.put(self._config, *_checkpoint(written))


class LangGraphProduct(LoopProduct):
    """`SqliteSaver` and `PostgresSaver`, and their async forms."""

    def open(self) -> None:
        """Open a saver of each colour, with a first checkpoint for every session."""
        if self.place.path is not None:
            self._saver = self._sqlite_saver(self.place.path)
            self._async_saver = self.runner.run(self._async_sqlite_saver(self.place.path))
        else:
            self._saver = self._postgres_saver()
            self._saver.setup()
            self._async_saver = self.runner.run(self._async_postgres_saver())
        self._calls = LangGraphCalls(self._saver)
        self._configs = [
            self.runner.run(self._async_saver.aput(*_first())) for _ in range(SESSIONS_MAX)
        ]

    def calls(self) -> dict[str, Sync]:
        """Write the result of a task, and the checkpoint that follows."""
        calls = self._calls
        return {"LangGraph put_writes": calls.writes, "LangGraph put_writes + put": calls.both}

    def sessions(self) -> dict[str, Sequence[Async]]:
        """Do the same in an event loop, each session with a thread of its own."""

        def session(number: int) -> Async:
            async def both() -> None:
                written, config = _writes(), self._configs[number]
                await self._async_saver.aput_writes(config, written, str(uuid.uuid4()))
                self._configs[number] = await self._async_saver.aput(config, *_checkpoint(written))

            return both

        return {"LangGraph put_writes + put, async": [session(n) for n in range(SESSIONS_MAX)]}

    def _sqlite_saver(self, path: Any) -> Any:
        from langgraph.checkpoint.sqlite import SqliteSaver  # type: ignore[import-not-found]

        make_wal(path)
        connection = sqlite3.connect(path, check_same_thread=False)
        connection.execute("PRAGMA synchronous=FULL")
        self._stack.callback(connection.close)
        return SqliteSaver(connection)

    async def _async_sqlite_saver(self, path: Any) -> Any:
        import aiosqlite
        from langgraph.checkpoint.sqlite.aio import (  # type: ignore[import-not-found]
            AsyncSqliteSaver,
        )

        connection = await aiosqlite.connect(path)
        await connection.execute("PRAGMA synchronous=FULL")
        self._close_async(connection.close)
        return AsyncSqliteSaver(connection)

    def _postgres_saver(self) -> Any:
        import psycopg
        from langgraph.checkpoint.postgres import PostgresSaver  # type: ignore[import-not-found]
        from psycopg.rows import dict_row

        connection = psycopg.connect(
            self.place.conninfo, autocommit=True, prepare_threshold=0, row_factory=dict_row
        )
        self._stack.callback(connection.close)
        return PostgresSaver(connection)

    async def _async_postgres_saver(self) -> Any:
        import psycopg_pool
        from langgraph.checkpoint.postgres.aio import (  # type: ignore[import-not-found]
            AsyncPostgresSaver,
        )
        from psycopg.rows import dict_row

        pool = psycopg_pool.AsyncConnectionPool(
            self.place.conninfo,
            kwargs={"autocommit": True, "prepare_threshold": 0, "row_factory": dict_row},
            min_size=1,
            max_size=CONNECTIONS_MAX,
            open=False,
        )
        await pool.open(wait=True)
        self._close_async(pool.close)
        return AsyncPostgresSaver(pool)


def _writes() -> list[tuple[str, dict[str, int]]]:
    return [(CHANNEL, {"charged": next(numbers)})]


def _first() -> tuple[Any, ...]:
    thread = {"configurable": {"thread_id": str(uuid.uuid4()), "checkpoint_ns": ""}}
    return (thread, *_checkpoint(_writes()))


def _checkpoint(written: list[tuple[str, dict[str, int]]]) -> tuple[Any, ...]:
    from langgraph.checkpoint.base.id import uuid6  # type: ignore[import-not-found]

    version = f"{next(numbers):032}.{0.5:016}"
    checkpoint = {
        "v": 4,
        "id": str(uuid6(clock_seq=-2)),
        "ts": datetime.now(UTC).isoformat(),
        "channel_values": dict(written),
        "channel_versions": {CHANNEL: version},
        "versions_seen": {},
    }
    return checkpoint, {"source": "loop", "step": 1, "parents": {}}, {CHANNEL: version}
