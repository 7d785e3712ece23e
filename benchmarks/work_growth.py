"""What finished and future items cost who claims: stores of one kind that hold more and more.

The rows are copies of an item that was completed, put in by one statement; the measured items are
submitted, claimed and completed as always.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apsw
import psycopg
from rich.console import Console

import holdfast

from .keepers import Place
from .measure import TIME, Contestant, Figures, Report, Target, compare
from .queues import QUEUE, database

TIMES_MAX = 1.1
DAY_MS = 24 * 3600 * 1000


@dataclass(frozen=True, slots=True)
class Plan:
    """How many rows, and how many rounds of how many items."""

    finished: tuple[int, ...]
    future: int
    rounds: int
    items: int


FULL = Plan((1_000, 100_000, 1_000_000), 200_000, 15, 40)
QUICK = Plan((1_000, 20_000), 5_000, 3, 15)

COPY = """
INSERT INTO hf_work ({names})
SELECT {values} FROM hf_work w, {series}
WHERE w.number = (SELECT min(number) FROM hf_work)
"""
SERIES = """
(WITH RECURSIVE n (value) AS (SELECT 1 UNION ALL SELECT value + 1 FROM n WHERE value < {count})
SELECT value FROM n) AS n
"""


@dataclass(slots=True)
class Stores:
    """Open stores, by what they hold."""

    stack: contextlib.ExitStack
    database: str
    directory: Path
    dsn: str

    def filled(self, finished: int, future: int) -> holdfast.Store:
        """Return a new store with so many finished and future items."""
        if self.database == "PostgreSQL":
            place = self.stack.enter_context(database(self.dsn))
        else:
            directory = tempfile.TemporaryDirectory(dir=self.directory)
            place = Place(path=Path(self.stack.enter_context(directory)) / "work.db")
        with holdfast.open(place.url) as store:
            store.work.submit(QUEUE, 0)
            [item] = store.work.claim("bench", queues=QUEUE)
            item.complete()
        with contextlib.closing(_connection(place)) as connection:
            _fill(connection, place, finished, future)
        return self.stack.enter_context(holdfast.open(place.url))


def _connection(place: Place) -> Any:
    if place.path is not None:
        return apsw.Connection(str(place.path))
    return psycopg.connect(place.url, autocommit=True, options="-csearch_path=holdfast")


def _fill(connection: Any, place: Place, finished: int, future: int) -> None:
    cursor = connection.execute("SELECT * FROM hf_work")
    description = cursor.description
    names = [column[0] for column in description if column[0] != "number"]
    now_ms = round(time.time() * 1000)
    values = {name: f"w.{name}" for name in names}
    values["id"] = "'finished-' || n.value"
    values["completed_at"] = f"{now_ms} - {finished} + n.value"
    later = {
        "id": "'future-' || n.value",
        "state": "'scheduled'",
        "completed_at": "NULL",
        "available_at": f"{now_ms + DAY_MS} + n.value",
    }
    for count, chosen in ((finished, values), (future, values | later)):
        if count:
            series = SERIES.format(count=count)
            listed = ", ".join(chosen[name] for name in names)
            text = COPY.format(names=", ".join(names), values=listed, series=series)
            connection.execute(text)
    # As autovacuum does in time; SQLite needs nothing.
    if place.path is None:
        connection.execute("VACUUM ANALYZE hf_work")


def run(console: Console, report: Report, plan: Plan, directory: Path, dsn: str) -> None:
    """Measure on both databases."""
    for name in ("SQLite", "PostgreSQL"):
        with contextlib.ExitStack() as stack:
            _measure(console, report, plan, Stores(stack, name, directory, dsn))


def _measure(console: Console, report: Report, plan: Plan, stores: Stores) -> None:
    """Compare stores of one database."""
    holding = {f"{count:,} finished": stores.filled(count, 0) for count in plan.finished}
    first = next(iter(holding))

    def compared(
        title: str, found: dict[str, holdfast.Store], work: Callable[..., Figures], beside: str
    ) -> float:
        contestants = [
            Contestant(
                name,
                functools.partial(work, store, plan.items),
                None if name == beside else beside,
            )
            for name, store in found.items()
        ]
        table = compare(title, contestants, rounds=plan.rounds, key=TIME)
        report.tables.append(table)
        table.show(console)
        return table.times_slower(contestants[-1].name, beside)

    title = f"{stores.database}: claim and complete one item among finished ones"
    compared(title, holding, _claim_and_complete, first)
    most = plan.finished[-1]
    crowded = f"{most:,} finished, {plan.future:,} future"
    found = {"an empty table": stores.filled(0, 0), crowded: stores.filled(most, plan.future)}
    title = f"{stores.database}: claim one item"
    times = compared(title, found, _claim, "an empty table")
    text = f"{stores.database}: claim among {crowded}, times the claim in an empty table"
    report.targets.append(Target(text, times, at_most=TIMES_MAX))


def _claim_and_complete(store: holdfast.Store, items: int) -> Figures:
    _submit(store, items)
    spent = []
    for _ in range(items):
        started = time.perf_counter()
        [item] = store.work.claim("bench", queues=QUEUE)
        item.complete()
        spent.append(time.perf_counter() - started)
    return {TIME: statistics.median(spent) * 1e6}


def _claim(store: holdfast.Store, items: int) -> Figures:
    _submit(store, items)
    spent, claimed = [], []
    for _ in range(items):
        started = time.perf_counter()
        [item] = store.work.claim("bench", queues=QUEUE)
        spent.append(time.perf_counter() - started)
        claimed.append((item, None))
    store.work.complete_many(claimed)
    return {TIME: statistics.median(spent) * 1e6}


def _submit(store: holdfast.Store, items: int) -> Sequence[object]:
    return store.work.submit_many([holdfast.Submission(QUEUE, number) for number in range(items)])
