"""Worlds: what a checkpoint and a rollback cost, and how fast a graph is explored.

Holdfast stands beside VenomQA and beside state machines of Hypothesis, on the same content and the
same model. VenomQA documents for itself: PostgreSQL about 1 ms and 1 KB, SQLite about 50 ms and a
full copy, memory about 0.1 ms and the size of the state, for a checkpoint as for a rollback.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import socket
import statistics
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from urllib.parse import urlsplit

import psycopg
from rich.console import Console

from . import servers
from .growth import EXPONENT, EXPONENT_MAX, slope
from .measure import (
    RATE,
    TIME,
    Contestant,
    Figures,
    Report,
    Table,
    Target,
    compare,
    environment,
    versions,
)
from .registers import redis, redis_server
from .worlds_explorers import (
    holdfast_durable_rate,
    holdfast_rate,
    hypothesis_rate,
    venomqa_rate,
)
from .worlds_subjects import (
    CopiedFiles,
    HoldfastFiles,
    HoldfastPostgres,
    HoldfastPostgresConnection,
    HoldfastSqlite,
    RedisKeys,
    Subject,
    VenomPostgres,
    VenomRedis,
    VenomSqlite,
)

PEERS = ("venomqa", "hypothesis", "redis")
HOLDFAST, VENOMQA, HYPOTHESIS = "Holdfast", "VenomQA", "Hypothesis"
SHARED = "Holdfast, shared connection"
COPIES = "copied by hand"
TIMES_VENOMQA_SQLITE_MIN = 50
TIMES_VENOMQA_RATE_MIN = 10
TIMES_SIZE_MAX = 1.5
CYCLE_SECONDS = 1.0
DOCUMENTED = "VenomQA documents about 1 ms (PostgreSQL), 50 ms (SQLite), 0.1 ms (memory) for each."


@dataclass(frozen=True, slots=True)
class Plan:
    """How large everything is, and how many rounds there are."""

    megabytes: tuple[int, int]
    rounds: int
    repeats: int
    states: int
    sizes: tuple[int, ...]
    growth_rounds: int


FULL = Plan((1, 100), 5, 10, 2_000, (100, 1_000, 10_000, 100_000), 3)
QUICK = Plan((1, 10), 2, 3, 400, (100, 1_000), 2)


def run(console: Console, *, quick: bool) -> Report:
    """Measure everything, in a temporary directory and servers that are gone afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory,
        servers.postgres() as dsn,
        contextlib.ExitStack() as stack,
    ):
        report = Report("worlds", environment() | versions(PEERS))
        bench = Bench(QUICK if quick else FULL, console, report, Path(directory), stack)
        bench.sqlite()
        bench.postgres(dsn)
        bench.redis()
        bench.files()
        bench.explorations()
        bench.growth()
        report.environment["load after"] = f"{os.getloadavg()[0]:.2f}"
    return report


@dataclass(slots=True)
class Bench:
    """The tables of the benchmark."""

    plan: Plan
    console: Console
    report: Report
    folder: Path
    stack: contextlib.ExitStack

    def sqlite(self) -> None:
        """A file of each size."""
        makers: dict[str, Callable[[Path, int], Subject]] = {HOLDFAST: HoldfastSqlite}
        if is_installed("venomqa"):
            makers[VENOMQA] = VenomSqlite
        subjects = {
            _sized(name, size): make(self.folder / f"{name}-{size}.db", size)
            for size in self.plan.megabytes
            for name, make in makers.items()
        }
        table = self._snapshots("SQLite, 20 rows changed", subjects)
        self._same_at_any_size("SQLite", HOLDFAST, table)
        if VENOMQA in makers:
            peer, mine = (_sized(name, self.plan.megabytes[1]) for name in (VENOMQA, HOLDFAST))
            text = f"SQLite, {self.plan.megabytes[1]} MB: times as fast as VenomQA"
            self._at_least(text, table.times_slower(peer, mine), TIMES_VENOMQA_SQLITE_MIN)

    def postgres(self, dsn: str) -> None:
        """A database of each size."""
        makers: dict[str, Callable[[str, int], Subject]] = {
            HOLDFAST: HoldfastPostgres,
            SHARED: HoldfastPostgresConnection,
        }
        if is_installed("venomqa"):
            makers[VENOMQA] = VenomPostgres
        subjects = {
            _sized(name, size): make(self.stack.enter_context(_database(dsn)), size)
            for size in self.plan.megabytes
            for name, make in makers.items()
        }
        table = self._snapshots("PostgreSQL, 20 rows changed", subjects)
        for name in (HOLDFAST, SHARED):
            self._same_at_any_size("PostgreSQL", name, table)

    def redis(self) -> None:
        """Ten thousand keys, of which ten change."""
        program = redis_server()
        if program is None or not is_installed("redis"):
            self.report.environment["Redis"] = "no server found, left out"
            return
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = int(free.getsockname()[1])
        url = f"redis://127.0.0.1:{self.stack.enter_context(redis(program, port, durable=False))}"
        subjects: dict[str, Subject] = {HOLDFAST: RedisKeys(url)}
        if is_installed("venomqa"):
            subjects[VENOMQA] = VenomRedis(url)
        self._snapshots("Redis, 10,000 keys, 10 changed", subjects)

    def files(self) -> None:
        """Two thousand files, of which ten change."""
        self._snapshots(
            "Files, 2,000 of 5 KB, 10 changed",
            {
                HOLDFAST: HoldfastFiles(self.folder / "files"),
                COPIES: CopiedFiles(self.folder / "copied"),
            },
        )

    def explorations(self) -> None:
        """Explore one grid in memory, and with each step in a store."""
        states = self.plan.states
        contestants = [Contestant(HOLDFAST, functools.partial(holdfast_rate, states))]
        if is_installed("venomqa"):
            venomqa = functools.partial(venomqa_rate, states)
            contestants.append(Contestant(VENOMQA, venomqa, HOLDFAST))
        if is_installed("hypothesis"):
            walk = functools.partial(hypothesis_rate, states)
            contestants.append(Contestant(HYPOTHESIS, walk, HOLDFAST))
        title = f"states per second, a grid of {states:,} in memory"
        note = "Hypothesis walks at random and has no rollback; it takes as many steps."
        table = self._compare(title, contestants, RATE, self.plan.rounds, note)
        if is_installed("venomqa"):
            text = f"states per second at {states:,}, times VenomQA's"
            self._at_least(text, table.times_slower(VENOMQA, HOLDFAST), TIMES_VENOMQA_RATE_MIN)
        durable = [
            Contestant("in memory", functools.partial(holdfast_rate, states)),
            *(
                Contestant(
                    f"in a store, a commit for each {count}",
                    functools.partial(holdfast_durable_rate, states, self.folder, count),
                    "in memory",
                )
                for count in (100, 1)
            ),
        ]
        self._compare(
            f"states per second, a grid of {states:,}, durable", durable, RATE, self.plan.rounds
        )

    def growth(self) -> None:
        """Explore grids of several sizes."""
        first, *_, last = self.plan.sizes

        def round() -> Figures:
            times = {size: 1 / holdfast_rate(size)[RATE] for size in self.plan.sizes}
            figures = {_each(size): 1e6 * time for size, time in times.items()}
            return {**figures, EXPONENT: slope(times)}

        contestants = [Contestant(HOLDFAST, round)]
        title = "the time of a state as graphs grow"
        table = self._compare(title, contestants, _each(last), self.plan.growth_rounds)
        text = f"exploration in memory from {first:,} to {last:,} states"
        exponent = table.median(HOLDFAST, EXPONENT)
        self.report.targets.append(Target(text, exponent, at_most=EXPONENT_MAX, unit=EXPONENT))

    def _snapshots(self, title: str, subjects: dict[str, Subject]) -> Table:
        contestants = [
            Contestant(
                name,
                functools.partial(_cycle, subject, self.plan.repeats),
                _beside(name),
            )
            for name, subject in subjects.items()
        ]
        try:
            return self._compare(title, contestants, TIME, self.plan.rounds, DOCUMENTED)
        finally:
            for subject in subjects.values():
                subject.close()

    def _compare(
        self, title: str, contestants: Sequence[Contestant], key: str, rounds: int, note: str = ""
    ) -> Table:
        table = compare(title, contestants, rounds=rounds, key=key, note=note)
        table.show(self.console)
        self.report.tables.append(table)
        return table

    def _at_least(self, text: str, times: float, bound: float) -> None:
        self.report.targets.append(Target(text, times, at_least=bound))

    def _same_at_any_size(self, database: str, name: str, table: Table) -> None:
        small, large = (
            table.values(_sized(name, megabytes), "rollback µs")
            for megabytes in self.plan.megabytes
        )
        ratio = statistics.median(b / a for a, b in zip(small, large, strict=True))
        sizes = " and ".join(f"{megabytes} MB" for megabytes in self.plan.megabytes)
        text = f"{database}, {name}: a rollback at {sizes}"
        self.report.targets.append(Target(text, ratio, at_most=TIMES_SIZE_MAX))


def _beside(name: str) -> str | None:
    """Return Holdfast's own row of the same size."""
    _, comma, size = name.rpartition(", ")
    mine = f"{HOLDFAST}{comma}{size}" if comma and size.endswith(" MB") else HOLDFAST
    return None if name == mine else mine


def _sized(name: str, megabytes: int) -> str:
    return f"{name}, {megabytes} MB"


def _cycle(subject: Subject, repeats: int) -> Figures:
    """Change, keep, change and restore, some times; the figures are medians."""
    kept: list[float] = []
    restored: list[float] = []
    sizes = []
    # What is slow is measured less often.
    while len(kept) < repeats and sum(kept) + sum(restored) < CYCLE_SECONDS:
        subject.change()
        started = perf_counter()
        token = subject.checkpoint()
        kept.append(perf_counter() - started)
        sizes.append(subject.bytes_kept(token))
        subject.change()
        started = perf_counter()
        subject.rollback(token)
        restored.append(perf_counter() - started)
        subject.release(token)
    checkpoint, rollback = (1e6 * statistics.median(times) for times in (kept, restored))
    return {
        TIME: checkpoint + rollback,
        "checkpoint µs": checkpoint,
        "rollback µs": rollback,
        "bytes kept": statistics.median(sizes),
    }


def _each(size: int) -> str:
    return f"{size:,} states: µs each"


def is_installed(module: str) -> bool:
    """Say whether a peer can be imported."""
    return importlib.util.find_spec(module) is not None


@contextlib.contextmanager
def _database(dsn: str) -> Iterator[str]:
    """Make a database, and drop it in the end."""
    name = f"bench_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
        try:
            yield urlsplit(dsn)._replace(path=f"/{name}").geturl()
        finally:
            connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')
