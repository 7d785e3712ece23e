"""Work: enqueue, claim and complete, fleets of workers, and what a million finished items cost.

Holdfast beside Procrastinate, PgQueuer, Absurd and DBOS on PostgreSQL, each in a database of its
own on one server, and beside huey on SQLite. An item does nothing. Everybody is equally durable:
synchronous_commit=on, or WAL and synchronous=FULL.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import importlib.util
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from . import peers, servers, work_growth
from .keepers import Place
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
from .queues import BATCH, AsyncHoldfastQueue, Fleet, HoldfastQueue, Queue, database
from .queues_peers import AbsurdQueue, DbosQueue, HueyQueue, PgQueuerQueue, ProcrastinateQueue

PEERS = ("procrastinate", "pgqueuer", "absurd-sdk", "absurdctl", "dbos", "huey")
MODULES: dict[type[Queue], str] = {
    ProcrastinateQueue: "procrastinate",
    PgQueuerQueue: "pgqueuer",
    AbsurdQueue: "absurdctl",
    DbosQueue: "dbos",
    HueyQueue: "huey",
}
KINDS: dict[str, tuple[type[Queue], ...]] = {
    "SQLite": (HoldfastQueue, AsyncHoldfastQueue, HueyQueue),
    "PostgreSQL": (
        HoldfastQueue,
        AsyncHoldfastQueue,
        PgQueuerQueue,
        ProcrastinateQueue,
        AbsurdQueue,
        DbosQueue,
    ),
}
TIMES_FASTER = {"PgQueuer": 1.2, "Procrastinate": 2.0, "Absurd": 2.0}
LATENCY = "ms"
PAUSE_SECONDS = (0.05, 0.25)


@dataclass(frozen=True, slots=True)
class Plan:
    """How many rounds, and how many items in each."""

    rounds: int
    items: int
    fleets: tuple[int, ...]
    fleet_rounds: int
    fleet_share: float
    latency_rounds: int
    latency_items: int
    growth: work_growth.Plan


FULL = Plan(9, 50, (1, 4, 8), 3, 1.0, 3, 15, work_growth.FULL)
QUICK = Plan(2, 20, (1, 4), 1, 0.1, 1, 4, work_growth.QUICK)


def run(console: Console, *, quick: bool) -> Report:
    """Measure everything, in a temporary directory and a server that are gone afterwards."""
    plan = QUICK if quick else FULL
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory,
        servers.postgres() as dsn,
        asyncio.Runner() as runner,
    ):
        found = environment() | peers.versions() | versions(PEERS) | servers.settings(dsn)
        report = Report("work", found)
        bench = Bench(plan, console, report, runner, Path(directory), dsn)
        for name, kinds in KINDS.items():
            bench.measure(name, kinds)
        work_growth.run(console, report, plan.growth, Path(directory), dsn)
        report.environment["load after"] = f"{os.getloadavg()[0]:.2f}"
    return report


@dataclass(slots=True)
class Bench:
    """The tables that have peers in them."""

    plan: Plan
    console: Console
    report: Report
    runner: asyncio.Runner
    directory: Path
    dsn: str

    def measure(self, name: str, kinds: Sequence[type[Queue]]) -> None:
        """Compare everybody who is installed, on one database."""
        with contextlib.ExitStack() as stack:
            queues = []
            for kind in kinds:
                if importlib.util.find_spec(MODULES.get(kind, "holdfast")) is None:
                    continue
                queue = kind(self._place(stack, name), self.runner)
                queue.open()
                stack.callback(queue.close)
                queues.append(queue)
            # What was imported for the peers is not walked again by every collection of garbage.
            gc.collect()
            gc.freeze()
            self._by_hand(name, queues)
            self._fleets(name, queues)
            self._latency(name, queues)

    def _place(self, stack: contextlib.ExitStack, name: str) -> Place:
        if name == "PostgreSQL":
            return stack.enter_context(database(self.dsn))
        directory = tempfile.TemporaryDirectory(dir=self.directory)
        return Place(path=Path(stack.enter_context(directory)) / "work.db")

    def _by_hand(self, name: str, queues: Sequence[Queue]) -> None:
        claiming = [queue for queue in queues if queue.claims_by_hand]
        batching = [queue for queue in queues if queue.claims_many]
        self._compare(f"{name}: enqueue one item", queues, self._enqueue)
        table = self._compare(f"{name}: claim and complete, by 1", claiming, self._claim)
        self._compare(
            f"{name}: claim and complete, by {BATCH}, time per item", batching, self._tens
        )
        for queue in claiming:
            if queue.name in TIMES_FASTER and queue.beside is not None:
                text = f"{name}: {queue.beside}, claim and complete, times faster than {queue.name}"
                times = table.times_slower(queue.name, queue.beside)
                bound = TIMES_FASTER[queue.name]
                self.report.targets.append(Target(text, times, at_least=bound))

    def _enqueue(self, queue: Queue) -> Figures:
        spent, _ = queue.times(lambda: queue.enqueue(0), self.plan.items)
        queue.drain()
        return {TIME: statistics.median(spent) * 1e6}

    def _claim(self, queue: Queue) -> Figures:
        queue.do(lambda: queue.enqueue_many(range(self.plan.items)))
        spent, found = queue.times(lambda: queue.work(1), self.plan.items)
        assert set(found) == {1}, f"{queue.name} lost items"
        return {TIME: statistics.median(spent) * 1e6}

    def _tens(self, queue: Queue) -> Figures:
        batches = max(3, self.plan.items // BATCH)
        queue.do(lambda: queue.enqueue_many(range(batches * BATCH)))
        spent, found = queue.times(lambda: queue.work(BATCH), batches)
        assert set(found) == {BATCH}, f"{queue.name} lost items"
        return {TIME: statistics.median(spent) / BATCH * 1e6}

    def _fleets(self, name: str, queues: Sequence[Queue]) -> None:
        note = (
            "Items in a second, from the first that was begun until all were completed; the queue "
            "was filled before. A worker takes up to ten at a time where it can."
        )
        for count in self.plan.fleets:
            self._compare(
                f"{name}: worker processes: {count}",
                queues,
                functools.partial(self._fleet, count),
                key=RATE,
                rounds=self.plan.fleet_rounds,
                note=note,
            )

    def _fleet(self, count: int, queue: Queue) -> Figures:
        slots = range(round(queue.fleet_items * self.plan.fleet_share))
        with Fleet(queue, count, len(slots)) as fleet:
            queue.do(lambda: queue.enqueue_many(slots))
            fleet.go()
            begun = fleet.wait(slots)
            ended_at = fleet.finish()
        return {RATE: len(begun) / (ended_at - begun[0])}

    def _latency(self, name: str, queues: Sequence[Queue]) -> None:
        low, high = PAUSE_SECONDS
        note = (
            "Milliseconds from before the item was enqueued until a waiting worker process began "
            f"it, one item at a time, {low * 1e3:.0f} to {high * 1e3:.0f} ms apart."
        )
        self._compare(
            f"{name}: from enqueue to handler",
            queues,
            self._wake,
            key=LATENCY,
            rounds=self.plan.latency_rounds,
            note=note,
        )

    def _wake(self, queue: Queue) -> Figures:
        chance = random.Random(1)
        found = []
        with Fleet(queue, 1, self.plan.latency_items + 1) as fleet:
            fleet.go()
            for slot in range(self.plan.latency_items + 1):
                started = time.monotonic()
                queue.do(functools.partial(queue.enqueue, slot))
                [begun] = fleet.wait([slot])
                found.append((begun - started) * 1e3)
                time.sleep(chance.uniform(*PAUSE_SECONDS))
            fleet.finish()
        # The first waits for the worker to open.
        return {LATENCY: statistics.median(found[1:]), "worst ms": max(found[1:])}

    def _compare(
        self,
        title: str,
        queues: Sequence[Queue],
        work: Callable[[Queue], Figures],
        *,
        key: str = TIME,
        rounds: int | None = None,
        note: str = "",
    ) -> Table:
        contestants = [
            Contestant(queue.name, functools.partial(work, queue), queue.beside) for queue in queues
        ]
        rounds = rounds or self.plan.rounds
        table = compare(title, contestants, rounds=rounds, key=key, note=note)
        self.report.tables.append(table)
        table.show(self.console)
        return table
