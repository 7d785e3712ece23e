"""What a durable tool call costs: Holdfast beside DBOS, LangGraph's savers and two bare commits.

The tool does nothing. Holdfast writes twice, the intent before and the outcome after, with an event
each; DBOS and LangGraph write only after the tool, so a crash inside it leaves no trace there.
Everybody is equally durable: WAL and synchronous=FULL, or synchronous_commit=on. DBOS on SQLite
runs a second time as it is installed, with SQLite's rollback journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import importlib.util
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from . import peers, servers
from .callers import (
    BY_HAND,
    HOLDFAST,
    HOLDFAST_ASYNC,
    SESSIONS_MAX,
    ByHandProduct,
    HoldfastProduct,
    Product,
    opened,
)
from .callers_apart import ApartProduct
from .callers_peers import (
    DBOS_STEP,
    DBOS_STEP_ASYNC,
    DbosProduct,
    LangGraphProduct,
    PlainDbosProduct,
)
from .keepers import Place
from .measure import TIME, Contestant, Report, Table, Target, compare, environment, versions

TIMES_FASTER_THAN_DBOS = {"SQLite": 4.0, "PostgreSQL": 2.0}
CROWD_TIMES_FASTER_THAN_DBOS = 10.0
TIMES_THE_COMMITS_MAX = 2.0
PEERS = (
    "dbos",
    "langgraph",
    "langgraph-checkpoint-sqlite",
    "langgraph-checkpoint-postgres",
)


@dataclass(frozen=True, slots=True)
class Plan:
    """How many rounds, and how long each contestant's part of a round takes."""

    rounds: int
    seconds: float
    crowd_seconds: float


FULL = Plan(rounds=9, seconds=0.3, crowd_seconds=1.0)
QUICK = Plan(rounds=2, seconds=0.1, crowd_seconds=0.4)


def run(console: Console, *, quick: bool) -> Report:
    """Measure everything, in a temporary directory and a server that are gone afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory,
        servers.postgres() as dsn,
        asyncio.Runner() as runner,
    ):
        found = environment() | peers.versions() | versions(PEERS) | servers.settings(dsn)
        report = Report("effects", found)
        bench = Bench(QUICK if quick else FULL, console, report, runner)
        bench.measure("SQLite", (Place(path=Path(directory) / f"{n}.db") for n in range(100)))
        with contextlib.ExitStack() as stack:
            bench.measure("PostgreSQL", schema_places(stack, dsn))
        report.environment["load after"] = f"{os.getloadavg()[0]:.2f}"
    return report


def schema_places(stack: contextlib.ExitStack, dsn: str) -> Iterator[Place]:
    """Yield a new schema each time; all are gone when the stack is closed."""
    while True:
        (schema,) = stack.enter_context(servers.schemas(dsn, 1))
        place = Place(dsn=dsn, schema=schema)
        place.create()
        yield place


@dataclass(slots=True)
class Bench:
    """The tables of the benchmark."""

    plan: Plan
    console: Console
    report: Report
    runner: asyncio.Runner

    def measure(self, database: str, places: Iterator[Place]) -> None:
        """Compare one caller, many sessions, and the other ways to call, on one database."""
        holdfast = HoldfastProduct(next(places), self.runner)
        products: list[Product] = [holdfast, ByHandProduct(next(places), self.runner)]
        if importlib.util.find_spec("langgraph") is not None:
            products.append(LangGraphProduct(next(places), self.runner))
        if importlib.util.find_spec("dbos") is not None:
            products.append(DbosProduct(next(places), self.runner))
            if holdfast.place.path is not None:
                # A process has one DBOS only. On PostgreSQL we set nothing that could be left out.
                products.append(ApartProduct(next(places), self.runner, PlainDbosProduct))
        with opened(products):
            # What was imported for the peers is not walked again by every collection of garbage.
            gc.collect()
            gc.freeze()
            self._one_caller(database, products)
            self._crowd(database, products)
            self._others(database, holdfast)

    def _one_caller(self, database: str, products: Sequence[Product]) -> None:
        seconds = self.plan.seconds
        contestants = []
        for product in products:
            for name, work in product.rounds().items():
                contestants.append(_contestant(name, functools.partial(work, seconds), HOLDFAST))
        for product in products:
            for name, work in product.awaited_rounds().items():
                round = functools.partial(work, seconds)
                contestants.append(_contestant(name, round, HOLDFAST_ASYNC))
        table = self._compare(f"{database}: one durable call after the other", contestants)
        bound = TIMES_FASTER_THAN_DBOS[database]
        for name, beside in ((DBOS_STEP, HOLDFAST), (DBOS_STEP_ASYNC, HOLDFAST_ASYNC)):
            self._target_faster(database, table, name, beside, bound)
        for name, beside in ((BY_HAND, HOLDFAST), (f"{BY_HAND}, async", HOLDFAST_ASYNC)):
            text = f"{database}: {beside}, times {name}"
            times = 1 / table.times_slower(name, beside)
            self.report.targets.append(Target(text, times, at_most=TIMES_THE_COMMITS_MAX))

    def _target_faster(
        self, where: str, table: Table, name: str, beside: str, bound: float
    ) -> None:
        if name in table.rounds:
            text = f"{where}: {beside}, times faster than {name}"
            times = table.times_slower(name, beside)
            self.report.targets.append(Target(text, times, at_least=bound))

    def _crowd(self, database: str, products: Sequence[Product]) -> None:
        contestants = [
            _contestant(
                name,
                functools.partial(work, SESSIONS_MAX, self.plan.crowd_seconds),
                HOLDFAST_ASYNC,
            )
            for product in products
            for name, work in product.crowds().items()
        ]
        note = (
            "µs: time of the run by the number of calls. stall: how late a task that sleeps 1 ms "
            "at a time woke up at worst"
        )
        table = self._compare(
            f"{database}: {SESSIONS_MAX} asyncio sessions in one process", contestants, note
        )
        if database == "SQLite":
            where = f"{database}, {SESSIONS_MAX} sessions"
            bound = CROWD_TIMES_FASTER_THAN_DBOS
            self._target_faster(where, table, DBOS_STEP_ASYNC, HOLDFAST_ASYNC, bound)

    def _others(self, database: str, holdfast: HoldfastProduct) -> None:
        works = holdfast.rounds() | holdfast.others()
        contestants = [
            _contestant(name, functools.partial(work, self.plan.seconds), HOLDFAST)
            for name, work in works.items()
        ]
        note = "A replay is answered from the ledger; a read is recorded once, after it was done."
        self._compare(f"{database}: Holdfast's other calls", contestants, note)

    def _compare(self, title: str, contestants: Sequence[Contestant], note: str = "") -> Table:
        table = compare(title, contestants, rounds=self.plan.rounds, key=TIME, note=note)
        self.report.tables.append(table)
        table.show(self.console)
        return table


def _contestant(name: str, work: functools.partial[dict[str, float]], beside: str) -> Contestant:
    return Contestant(name, work, None if name == beside else beside)
