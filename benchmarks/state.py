"""Shared state: get, compare-and-swap, increment, batch, followers, and reads of the past.

Holdfast beside the same transaction by hand in SQL, the same script in Redis with its log synced at
every write, and LangGraph's Store, which has no versions. Everybody is equally durable.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import importlib.util
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from rich.console import Console

import holdfast

from . import peers, servers
from .effects import schema_places
from .keepers import Place
from .load import timed
from .measure import (
    TIME,
    Contestant,
    Figures,
    Report,
    Table,
    Target,
    compare,
    environment,
    percentile,
    versions,
)
from .registers import (
    BY_HAND,
    HOLDFAST,
    REDIS,
    WORKS,
    ApswRegister,
    HoldfastRegister,
    LangGraphRegister,
    PsycopgRegister,
    RedisRegister,
    Register,
    places,
    redis,
    redis_server,
)

PEERS = ("langgraph", "langgraph-checkpoint-sqlite", "langgraph-checkpoint-postgres", "redis")
TIMES_BY_HAND_MAX = 1.5
TIMES_REDIS_MAX = 1.0
TIMES_WITH_FOLLOWERS_MAX = 1.2
TIMES_THE_PAST_MAX = 1.5
FOLLOWERS = 100
WRITES_PER_SECOND = 50
ALONE, FOLLOWED = "nobody follows", f"{FOLLOWERS} followers, one stuck"
BATCH_MAX = 1_000
TITLES = {
    "get": "read a value",
    "swap": "compare and swap",
    "increment": "increment",
    "batch": "a batch of ten increments",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """How many rounds, and how long or how large each is."""

    rounds: int
    seconds: float
    follow_rounds: int
    follow_writes: int
    events: tuple[int, int]


FULL = Plan(rounds=9, seconds=0.3, follow_rounds=7, follow_writes=100, events=(1_000, 100_000))
QUICK = Plan(rounds=2, seconds=0.1, follow_rounds=2, follow_writes=20, events=(1_000, 10_000))


def run(console: Console, *, quick: bool) -> Report:
    """Measure everything, in a temporary directory and servers that are gone afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory,
        servers.postgres() as dsn,
        asyncio.Runner() as runner,
        contextlib.ExitStack() as stack,
    ):
        found = environment() | peers.versions() | versions(PEERS) | servers.settings(dsn)
        report = Report("state", found)
        port = _redis(stack, report)
        bench = Bench(QUICK if quick else FULL, console, report, runner, port)
        bench.measure("SQLite", ApswRegister, places(Path(directory)))
        bench.measure("PostgreSQL", PsycopgRegister, schema_places(stack, dsn))
        report.environment["load after"] = f"{os.getloadavg()[0]:.2f}"
    return report


def _redis(stack: contextlib.ExitStack, report: Report) -> int | None:
    program = redis_server()
    if program is None or importlib.util.find_spec("redis") is None:
        report.environment["Redis"] = "no server found, left out; `make bench` installs one"
        return None
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    return stack.enter_context(redis(program, port))


@dataclass(slots=True)
class Bench:
    """The tables of the benchmark."""

    plan: Plan
    console: Console
    report: Report
    runner: asyncio.Runner
    redis_port: int | None

    def measure(
        self, database: str, by_hand: Callable[[Place], Register], where: Iterator[Place]
    ) -> None:
        """Measure one database."""
        registers: list[Register] = [HoldfastRegister(next(where)), by_hand(next(where))]
        if self.redis_port is not None:
            registers.append(RedisRegister(self.redis_port))
        if importlib.util.find_spec("langgraph") is not None:
            registers.append(LangGraphRegister(next(where)))
        with contextlib.ExitStack() as stack:
            for register in registers:
                stack.callback(register.close)
            gc.collect()
            gc.freeze()
            self._calls(database, registers)
        self._past(database, where)
        self._followers(database, next(where))

    def _calls(self, database: str, registers: Sequence[Register]) -> None:
        able = [(register.name, register.works()) for register in registers]
        for work in WORKS:
            contestants = [
                _contestant(name, functools.partial(timed, works[work], self.plan.seconds))
                for name, works in able
            ]
            table = self._compare(f"{database}: {TITLES[work]}", contestants, self.plan.rounds)
            if work in {"swap", "increment"}:
                self._target(database, work, table, BY_HAND, TIMES_BY_HAND_MAX)
                if database == "SQLite":
                    self._target(database, work, table, REDIS, TIMES_REDIS_MAX)

    def _target(self, database: str, work: str, table: Table, beside: str, bound: float) -> None:
        if beside in table.rounds:
            times = 1 / table.times_slower(beside, HOLDFAST)
            text = f"{database}: {work}, times {beside}"
            self.report.targets.append(Target(text, times, at_most=bound))

    def _past(self, database: str, where: Iterator[Place]) -> None:
        """Read a moment of the past in a short and in a long history."""
        with contextlib.ExitStack() as stack:
            contestants: list[Contestant] = []
            for count in self.plan.events:
                state = stack.enter_context(_filled(next(where), count)).find_session("root").state
                read = functools.partial(state.snapshot, at_sequence=count // 2)
                name = f"{count:,} events"
                beside = contestants[0].name if contestants else None
                round = functools.partial(timed, read, self.plan.seconds)
                contestants.append(Contestant(name, round, beside))
            title = f"{database}: the whole state, ten keys, half of its history ago"
            table = self._compare(title, contestants, self.plan.rounds)
        short, long = (each.name for each in contestants)
        text = f"{database}: a read of the past after {long}, times after {short}"
        times = table.times_slower(long, short)
        self.report.targets.append(Target(text, times, at_most=TIMES_THE_PAST_MAX))

    def _followers(self, database: str, place: Place) -> None:
        """Write from another process while nobody follows, and while many do."""
        with Writer(place) as writer:
            store = self.runner.run(_open(place))
            try:
                writes = self.plan.follow_writes
                contestants = [
                    Contestant(ALONE, lambda: {TIME: _median(writer.write(writes))}),
                    Contestant(
                        FOLLOWED,
                        lambda: self.runner.run(_followed(store, writer, writes)),
                        ALONE,
                    ),
                ]
                note = f"{WRITES_PER_SECOND} increments a second from another process"
                title = f"{database}: a write beside followers"
                table = self._compare(title, contestants, self.plan.follow_rounds, note)
            finally:
                self.runner.run(store.close())
        times = table.times_slower(FOLLOWED, ALONE)
        text = f"{database}: a write beside {FOLLOWED}, times without them"
        self.report.targets.append(Target(text, times, at_most=TIMES_WITH_FOLLOWERS_MAX))

    def _compare(
        self, title: str, contestants: Sequence[Contestant], rounds: int, note: str = ""
    ) -> Table:
        table = compare(title, contestants, rounds=rounds, key=TIME, note=note)
        self.report.tables.append(table)
        table.show(self.console)
        return table


def _contestant(name: str, round: functools.partial[Figures]) -> Contestant:
    return Contestant(name, round, None if name == HOLDFAST else HOLDFAST)


@contextlib.contextmanager
def _filled(place: Place, count: int) -> Iterator[holdfast.Store]:
    """Open a store whose state has so many events, on ten keys."""
    keys = [f"key-{number}" for number in range(10)]
    with holdfast.open(place.url, namespace=place.schema or None) as store:
        state = store.session("root").state
        state.batch([{"op": "set", "key": key, "value": {"text": "x" * 300}} for key in keys])
        for first in range(len(keys), count, BATCH_MAX):
            numbers = range(first, min(first + BATCH_MAX, count))
            state.batch(
                [{"op": "merge", "key": keys[n % 10], "patch": {"number": n}} for n in numbers]
            )
        yield store


class Writer:
    """Another process that writes at a steady pace when it is told to."""

    def __init__(self, place: Place) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, place.url, place.schema or None)
        self._process = context.Process(target=_write_when_told, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self._pipe.recv()

    def write(self, count: int) -> list[Written]:
        """Let it write so many times."""
        self._pipe.send(count)
        found: list[Written] = self._pipe.recv()
        return found

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.send(None)
        self._process.join()


@dataclass(frozen=True, slots=True)
class Written:
    """One write: how long it took, and when it was done."""

    seconds: float
    done_at: float


def _write_when_told(pipe: Connection, url: str, namespace: str | None) -> None:
    with holdfast.open(url, namespace=namespace) as store:
        state = store.session("root").state
        pipe.send("ready")
        while (count := pipe.recv()) is not None:
            found = []
            for _ in range(count):
                time.sleep(1 / WRITES_PER_SECOND)
                started = time.monotonic()
                state.increment("count")
                done_at = time.monotonic()
                found.append(Written(done_at - started, done_at))
            pipe.send(found)


def _median(writes: Sequence[Written]) -> float:
    return statistics.median(each.seconds for each in writes) * 1e6


async def _open(place: Place) -> holdfast.AsyncStore:
    return await holdfast.aopen(place.url, namespace=place.schema or None)


async def _followed(store: holdfast.AsyncStore, writer: Writer, count: int) -> Figures:
    """Follow while the other process writes: how long a write takes, and its event to come."""
    after = await (await store.find_session("root")).state.version()
    stuck = (await store.find_session("root")).state.watch()
    if after:
        await anext(stuck)
    tasks = [asyncio.create_task(_hear(store, after, count)) for _ in range(FOLLOWERS - 1)]
    writes = await asyncio.to_thread(writer.write, count)
    heard, *_ = await asyncio.gather(*tasks)
    late = [(at - write.done_at) * 1e3 for at, write in zip(heard, writes, strict=True)]
    return {
        TIME: _median(writes),
        "event p50 ms": percentile(late, 0.5),
        "event p95 ms": percentile(late, 0.95),
    }


async def _hear(store: holdfast.AsyncStore, after: int, count: int) -> list[float]:
    """Return when each of so many changes came."""
    heard: list[float] = []
    async for _ in (await store.find_session("root")).state.watch(after=after):
        heard.append(time.monotonic())
        if len(heard) == count:
            break
    return heard
