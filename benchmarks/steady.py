"""Ten minutes of steady work on PostgreSQL: does anything grow that should not?

Agents start sessions, append, call a tool and end; a worker works items; sessions are deleted some
time after they ended, and `prune` keeps nothing that it may remove. All of them work at an even
rate, so that nothing grows only because the machine became faster. Each period is a row.
"""

from __future__ import annotations

import collections
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import psycopg
from rich.console import Console

import holdfast
from holdfast.formatting import plural

from . import servers
from .costs import MESSAGE, send
from .measure import Contestant, Figures, Report, Table, Target, environment, percentile

AGENTS = 3
TURNS = 20
TURNS_PER_SECOND = 20
"""Of each agent; the worker works as many items."""
KEPT_SESSIONS = 50
"""How many ended sessions of each agent are kept before the oldest is deleted."""
TIMES_MAX = 1.2
P50 = "append p50 ms"
SIZE = "tables MB"
INDEXES = "indexes MB"
DEAD = "dead rows"

SIZES = """
SELECT sum(pg_table_size(relid)) / 1e6 AS tables, sum(pg_indexes_size(relid)) / 1e6 AS indexes,
    sum(n_live_tup) AS live, sum(n_dead_tup) AS dead
FROM pg_stat_user_tables WHERE schemaname = %s
"""
LARGEST = """
SELECT relname, pg_total_relation_size(relid) / 1e6, n_live_tup, n_dead_tup
FROM pg_stat_user_tables WHERE schemaname = %s
ORDER BY pg_total_relation_size(relid) DESC LIMIT 5
"""


@dataclass(frozen=True, slots=True)
class Plan:
    """How long it runs, and how many of the last periods are compared with as many before them.

    Dead rows are cleared about once in a period: one period alone shows when, not how many.
    """

    periods: int
    period_seconds: float
    compared: int


FULL = Plan(periods=10, period_seconds=60, compared=3)
QUICK = Plan(periods=4, period_seconds=5, compared=1)


@dataclass(slots=True)
class Load:
    """Threads that work until they are told to stop; an error of one ends the run."""

    store: holdfast.Store
    is_over: threading.Event = field(default_factory=threading.Event)
    appends: list[float] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)

    def wait_turn(self, began: float) -> None:
        """Wait until the next turn is due after one that began then."""
        self.is_over.wait(max(0.0, began + 1 / TURNS_PER_SECOND - time.perf_counter()))

    def agent(self) -> None:
        """Live one session after the other."""
        ended: collections.deque[holdfast.Session] = collections.deque()
        while not self.is_over.is_set():
            session = self.store.session()
            for turn in range(TURNS):
                started = time.perf_counter()
                session.append("transcript", [MESSAGE])
                self.appends.append(time.perf_counter() - started)
                session.call(send, text=f"{session.id} {turn}")
                self.wait_turn(started)
            session.end("completed")
            ended.append(session)
            if len(ended) > KEPT_SESSIONS:
                ended.popleft().delete()

    def worker(self) -> None:
        """Work one item after the other."""
        while not self.is_over.is_set():
            started = time.perf_counter()
            self.store.work.submit("bench")
            for item in self.store.work.claim("bench"):
                item.complete()
            self.wait_turn(started)

    def pruner(self, seconds: float) -> None:
        """Remove again and again what may go."""
        while not self.is_over.wait(seconds):
            self.store.prune(keep=5, work_days=0, key_days=0, effect_days=0, history_days=0)

    def start(self, task: Callable[[], None]) -> threading.Thread:
        """Run a task in a thread of its own."""

        def guarded() -> None:
            try:
                task()
            except BaseException as error:
                self.errors.append(error)
                self.is_over.set()

        thread = threading.Thread(target=guarded)
        thread.start()
        return thread


def run(console: Console, *, quick: bool) -> Report:
    """Work steadily, and look at the server after each period."""
    plan = QUICK if quick else FULL
    with servers.postgres() as dsn, servers.schemas(dsn, 1) as [schema]:
        report = Report("steady", environment() | servers.settings(dsn))
        with holdfast.open(dsn, namespace=schema) as store:
            found = dict(watched(plan, store, dsn, schema))
        with psycopg.connect(dsn, autocommit=True) as connection:
            for name, size, live, dead in connection.execute(LARGEST, [schema]).fetchall():
                console.print(f"{name}: {size:.1f} MB, {live:,} rows, {dead:,} dead")
    contestants = [Contestant(name, dict) for name in found]
    table = Table(
        "PostgreSQL: steady work with prune, period by period",
        P50,
        contestants,
        {name: [figures] for name, figures in found.items()},
    )
    table.show(console)
    report.tables.append(table)
    periods = list(found.values())
    last, before = periods[-plan.compared :], periods[-2 * plan.compared : -plan.compared]
    for name in (P50, SIZE, INDEXES, DEAD):
        ended, settled = (
            statistics.fmean(figures[name] for figures in chosen) for chosen in (last, before)
        )
        text = f"{name} of the last {plural(plan.compared, 'period')} beside as many before"
        report.targets.append(Target(text, ended / max(1e-9, settled), at_most=TIMES_MAX))
    return report


def watched(
    plan: Plan, store: holdfast.Store, dsn: str, schema: str
) -> Iterator[tuple[str, Figures]]:
    """Work, and give the figures of each period."""
    load = Load(store)
    threads = [load.start(load.agent) for _ in range(AGENTS)]
    threads += [load.start(load.worker)]
    threads += [load.start(lambda: load.pruner(plan.period_seconds / 6))]
    try:
        with psycopg.connect(dsn, autocommit=True) as connection:
            for period in range(1, plan.periods + 1):
                if load.is_over.wait(plan.period_seconds):
                    break
                appends, load.appends = load.appends or [math.nan], []
                [row] = connection.execute(SIZES, [schema]).fetchall()
                names = (SIZE, INDEXES, "live rows", DEAD)
                yield (
                    f"period {period}",
                    {
                        "appends": len(appends),
                        P50: statistics.median(appends) * 1e3,
                        "append p99 ms": percentile(appends, 0.99) * 1e3,
                        **{name: float(value) for name, value in zip(names, row, strict=True)},
                    },
                )
    finally:
        load.is_over.set()
        for thread in threads:
            thread.join()
    if load.errors:
        raise load.errors[0]
