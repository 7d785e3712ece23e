"""What the kernel costs: one operation, many sessions, many processes, and the codec.

`Counter.add` locks a tree, changes a row and appends an event: four statements in one commit, plus
the row by which Holdfast settles a lost COMMIT. The peers run the same four by hand.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

import holdfast
from holdfast.codec import Codec
from holdfast.testing.nouns import Counter

from . import peers, servers
from .load import Opener, Workers, only_tick, rates, run_tasks, run_threads, timed
from .measure import RATE, TIME, Contestant, Figures, Report, Table, Target, compare, environment
from .peers import Sync
from .sides import (
    HOLDFAST,
    PIPELINED,
    ROOTS,
    PostgresSide,
    SqliteSide,
    Work,
    apsw_worker,
    holdfast_worker,
    psycopg_worker,
)

SESSIONS = (1, 8, 64)
PROCESSES = 8
THREADS = 32
TASKS = 64
BLOCK_BYTES = 4096
BLOCKS = 4096
FDATASYNC = "4 KB write + fdatasync"
MIXED_ROOTS = [f"mixed-{number}" for number in range(THREADS + TASKS)]
MESSAGE = {
    "role": "assistant",
    "content": "The order was placed and the invoice is on its way. " * 34,
    "tool_calls": [
        {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": "charge_card", "arguments": {"card": "c_1", "cents": 500}},
        }
        for number in range(3)
    ],
    "usage": {"input_tokens": 1812, "output_tokens": 401, "seconds": 3.25},
    "model": "some-model-2026-01-01",
    "stop_reason": None,
}
WORK: dict[Work, str] = {
    "save": "one operation of four statements, committed",
    "tally": "one operation of one statement, committed",
    "read": "one point read",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """How many rounds, and how long each contestant's part of a round takes."""

    rounds: int
    write_seconds: float
    read_seconds: float
    session_rounds: int
    session_seconds: float
    mixed_seconds: float
    process_rounds: int
    process_seconds: float


FULL = Plan(7, 0.2, 0.05, 5, 0.4, 2.0, 3, 3.0)
QUICK = Plan(2, 0.05, 0.01, 1, 0.1, 0.4, 1, 0.4)


def run(console: Console, *, quick: bool) -> Report:
    """Measure everything, in a temporary directory and a server that are gone afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory,
        servers.postgres() as dsn,
        servers.schemas(dsn, 2) as names,
        asyncio.Runner() as runner,
        SqliteSide(runner, Path(directory)) as sqlite,
        PostgresSide(runner, dsn, *names) as postgres,
    ):
        found = environment() | peers.versions() | servers.settings(dsn)
        report = Report("kernel", found)
        bench = Bench(QUICK if quick else FULL, console, report, runner, sqlite, postgres)
        bench.one_caller()
        bench.sessions()
        bench.threads_and_tasks()
        bench.processes()
        bench.codec()
        report.environment["load after"] = f"{os.getloadavg()[0]:.2f}"
    return report


@dataclass(slots=True)
class Bench:
    """The parts of the benchmark."""

    plan: Plan
    console: Console
    report: Report
    runner: asyncio.Runner
    sqlite: SqliteSide
    postgres: PostgresSide

    def one_caller(self) -> None:
        """Compare single operations; on SQLite also with the disk itself."""
        found: dict[tuple[str, Work], Table] = {}
        for side in (self.sqlite, self.postgres):
            for work, title in WORK.items():
                seconds = self.plan.read_seconds if work == "read" else self.plan.write_seconds
                contestants = side.one_caller(work, seconds)
                with contextlib.ExitStack() as stack:
                    if side is self.sqlite and work == "save":
                        contestants += self._disk(stack, seconds)
                    table = self._compare(f"{side.name}: {title}", contestants, TIME)
                found[side.name, work] = table
        share = 100 * found["SQLite", "save"].times_slower(FDATASYNC, HOLDFAST)
        self._target(f"SQLite write: speed against one {FDATASYNC}", share, at_least=60, unit="%")
        times = found["PostgreSQL", "save"].times_slower("psycopg by hand", HOLDFAST)
        self._target("PostgreSQL write: speed against psycopg by hand", times, at_least=1.0)

    def _disk(self, stack: contextlib.ExitStack, seconds: float) -> list[Contestant]:
        """Return the limit: a write of one block, into a file that was filled before or grows."""
        filled = stack.enter_context(_blocks(self.sqlite.directory / "filled", fills=True))
        growing = stack.enter_context(_blocks(self.sqlite.directory / "growing", fills=False))
        return [
            Contestant(FDATASYNC, functools.partial(timed, filled, seconds), HOLDFAST),
            Contestant(
                "the same, file grows", functools.partial(timed, growing, seconds), HOLDFAST
            ),
        ]

    def sessions(self) -> None:
        """Compare many asyncio sessions in one process, and how long they keep the loop busy."""
        seconds = self.plan.session_seconds
        control = Contestant(
            "only the ticker", lambda: self.runner.run(only_tick(seconds)), beside=None
        )
        note = "stall: how late a task that sleeps 1 ms at a time woke up at worst"
        found: dict[tuple[str, int], Table] = {}
        for side in (self.sqlite, self.postgres):
            for count in SESSIONS:
                title = f"{side.name}: asyncio sessions in one process: {count}"
                contestants = [*side.sessions(count, seconds), control]
                found[side.name, count] = self._compare(
                    title, contestants, RATE, rounds=self.plan.session_rounds, note=note
                )
        many = max(SESSIONS)
        times = found["SQLite", many].times_slower("aiosqlite + lock", HOLDFAST)
        self._target(f"SQLite, {many} sessions: rate against aiosqlite + lock", times, at_least=15)
        times = found["PostgreSQL", many].times_slower("psycopg pool", HOLDFAST)
        self._target(f"PostgreSQL, {many} sessions: rate against psycopg", times, at_least=1.0)

    def threads_and_tasks(self) -> None:
        """Load one file through a sync and an async store of one process at once."""
        url = f"sqlite:///{self.sqlite.file('mixed')}"
        with holdfast.open(url) as store:
            before = sum(Counter(store, root).value() for root in MIXED_ROOTS)
            for root in MIXED_ROOTS:
                Counter(store, root).plant()
        acknowledged = 0

        def both() -> Figures:
            nonlocal acknowledged
            latencies, seconds = self.runner.run(self._mixed(url))
            acknowledged += len(latencies)
            return rates(latencies, seconds)

        title = f"SQLite: {THREADS} threads and {TASKS} tasks on one file in one process"
        rounds = self.plan.process_rounds
        table = self._compare(title, [Contestant(HOLDFAST, both)], RATE, rounds=rounds)
        with holdfast.open(url) as store:
            stored = sum(Counter(store, root).value() for root in MIXED_ROOTS) - before
        lost = abs(acknowledged - stored)
        wait = table.worst(HOLDFAST, "worst ms")
        self._target("threads and tasks: commits lost or doubled", lost, at_most=0, unit="")
        self._target("threads and tasks: longest wait", wait, at_most=1000, unit="ms")

    async def _mixed(self, url: str) -> tuple[list[float], float]:
        seconds = self.plan.mixed_seconds
        with holdfast.open(url) as store:
            async with await holdfast.aopen(url) as async_store:
                threads = [Counter(store, root).add for root in MIXED_ROOTS[:THREADS]]
                tasks = [Counter(async_store, root).add for root in MIXED_ROOTS[THREADS:]]
                started = time.perf_counter()
                of_threads, of_tasks = await asyncio.gather(
                    asyncio.to_thread(run_threads, threads, seconds), run_tasks(tasks, seconds)
                )
                spent = time.perf_counter() - started
        return of_threads + of_tasks, spent

    def processes(self) -> None:
        """Compare processes that write one file or one schema, each to a tree of its own."""
        with Workers([self._openers(root) for root in ROOTS[:PROCESSES]]) as workers:
            self._crowd(workers, "SQLite: 1 process on a file", 1, "apsw")
            table = self._crowd(
                workers, f"SQLite: {PROCESSES} processes on one file", PROCESSES, "apsw"
            )
            postgres = self._crowd(
                workers, f"PostgreSQL: {PROCESSES} processes", PROCESSES, "psycopg", PIPELINED
            )
        share = min(table.values(HOLDFAST, "share"))
        wait = table.worst(HOLDFAST, "worst ms")
        total = table.times_slower("apsw", HOLDFAST)
        self._target(
            f"SQLite, {PROCESSES} processes: slowest against fastest", share, at_least=1 / 3
        )
        self._target(f"SQLite, {PROCESSES} processes: longest wait", wait, at_most=250, unit="ms")
        self._target(
            f"SQLite, {PROCESSES} processes: rate against the busy handler", total, at_least=0.7
        )
        times = postgres.times_slower("psycopg", HOLDFAST)
        self._target(
            f"PostgreSQL, {PROCESSES} processes: rate against psycopg", times, at_least=1.0
        )

    def _openers(self, root: str) -> dict[str, Opener]:
        postgres, url = self.postgres, f"sqlite:///{self.sqlite.file('processes')}"
        partial = functools.partial
        return {
            "SQLite Holdfast": partial(holdfast_worker, url, root),
            "SQLite apsw": partial(apsw_worker, self.sqlite.file("busy-handler"), root),
            "PostgreSQL Holdfast": partial(holdfast_worker, postgres.dsn, root, postgres.schema),
            **{
                f"PostgreSQL {name}": partial(
                    psycopg_worker, write, postgres.dsn, root, postgres.peer_schema
                )
                for name, write in (
                    ("psycopg", peers.psycopg_write),
                    (PIPELINED, peers.psycopg_pipelined_write),
                )
            },
        }

    def _crowd(self, workers: Workers, title: str, count: int, *peers: str) -> Table:
        place = title.partition(":")[0]
        seconds, rounds = self.plan.process_seconds, self.plan.process_rounds
        if count == 1:
            seconds /= 3

        def contestant(name: str, beside: str | None) -> Contestant:
            work = functools.partial(workers.round, f"{place} {name}", count, seconds)
            return Contestant(name, work, beside)

        contestants = [contestant(HOLDFAST, None), *(contestant(p, HOLDFAST) for p in peers)]
        note = "share: commits of the slowest process against those of the fastest"
        return self._compare(title, contestants, RATE, note=note, rounds=rounds)

    def codec(self) -> None:
        """Compare the codec with json, on one message of 2.2 KB."""
        codec, seconds = Codec(), self.plan.read_seconds
        text, record = json.dumps(MESSAGE), codec.pack(MESSAGE)
        assert codec.unpack(record) == json.loads(text) == MESSAGE
        operations: dict[str, tuple[Sync, str | None]] = {
            "Codec.pack": (lambda: codec.pack(MESSAGE), None),
            "json.dumps": (lambda: json.dumps(MESSAGE), "Codec.pack"),
            "Codec.unpack": (lambda: codec.unpack(record), None),
            "json.loads": (lambda: json.loads(text), "Codec.unpack"),
        }
        contestants = [
            Contestant(name, functools.partial(timed, operation, seconds), beside)
            for name, (operation, beside) in operations.items()
        ]
        title = f"Codec: a message of {len(text):,} bytes of JSON"
        note = "The codec also checks every value and, on loading, a SHA-256 of the record."
        self._compare(title, contestants, TIME, note=note)

    def _compare(
        self,
        title: str,
        contestants: Sequence[Contestant],
        key: str,
        *,
        rounds: int | None = None,
        note: str = "",
    ) -> Table:
        rounds = rounds or self.plan.rounds
        table = compare(title, contestants, rounds=rounds, key=key, note=note)
        self.report.tables.append(table)
        table.show(self.console)
        return table

    def _target(
        self,
        text: str,
        figure: float,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
        unit: str = "x",
    ) -> None:
        self.report.targets.append(Target(text, figure, at_least, at_most, unit))


@contextlib.contextmanager
def _blocks(path: Path, *, fills: bool) -> Iterator[Sync]:
    """Yield a function that writes the next block of a file and syncs it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    block, position = b"x" * BLOCK_BYTES, 0
    if fills:
        os.write(descriptor, block * BLOCKS)
        os.fsync(descriptor)

    def write() -> None:
        nonlocal position
        os.pwrite(descriptor, block, position * BLOCK_BYTES)
        os.fdatasync(descriptor)
        position = (position + 1) % BLOCKS if fills else position + 1

    try:
        yield write
    finally:
        os.close(descriptor)
