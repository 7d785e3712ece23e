"""What every operation and listing costs in stores that differ only in how much they hold.

Each store has as many sessions, events in one tree, effects, work items, writers, attempts in the
ledger of spend and versions of one session as its size says. An operation is measured in all of
them in turn. Its exponent is the slope of the line through its times on a doubly logarithmic scale:
0 is flat, 1 grows with the store. A search in a tree of pages is below 0.1.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console

import holdfast
from holdfast.store import check

from . import bulk, servers
from .bulk import BIG, RARE
from .measure import Contestant, Figures, Report, Target, compare, environment

EXPONENT = "exponent"
EXPONENT_MAX = 0.15
FAST_REPEATS = 7
SLOW_SECONDS = 0.1
PAGE = 100
# Pages so small that the smallest store fills them too: the time is that of the search.
FULL_PAGE, SHORT_PAGE = 10, 2


@dataclass(frozen=True, slots=True)
class Plan:
    """How much the stores hold, and how many rounds there are."""

    sizes: tuple[int, ...]
    rounds: int


FULL = Plan((1_000, 100_000, 1_000_000), 5)
QUICK = Plan((1_000, 10_000), 2)


@holdfast.tool(effect="mutate")
def send(text: str) -> str:
    """Do nothing, once."""
    return text


@dataclass(slots=True)
class Filled:
    """A store of one size, and what the operations are done with."""

    url: str
    namespace: str | None
    size: int
    store: holdfast.Store
    big: holdfast.Session = field(init=False)
    waiting: holdfast.WorkItem = field(init=False)
    running: holdfast.WorkItem = field(init=False)
    queue: str = field(init=False)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.big = self.store.find_session(BIG)
        [self.running] = self.store.work.list(status="in_progress", limit=1)
        self.queue = next(self._queues())
        [self.waiting] = self.store.work.list(queue=self.queue, status="pending", limit=1)

    def _queues(self) -> Iterator[str]:
        for item in self.store.work.list(status="pending", limit=1_000):
            if item.waits_for is None:
                yield item.queue

    def some(self) -> int:
        """Return the number of a session, another one each time."""
        return next(self.numbers) * 7_919 % self.size + 1

    def session(self) -> holdfast.Session:
        """Return one of the many sessions."""
        return self.store.find_session(bulk.session_id(self.some()))

    def new_id(self) -> str:
        """Return a name that nobody has used."""
        return f"new {self.size} {next(self.numbers)}"

    def work_one(self) -> None:
        """Submit, claim and complete one item of a queue of its own."""
        work = self.store.work
        work.submit("bench")
        [item] = work.claim("bench", queues="bench")
        item.heartbeat()
        item.complete()

    def claim_any(self) -> None:
        """Claim the best item of all queues, and give it back."""
        [item] = self.store.work.claim("bench")
        item.release()

    def first_write(self) -> None:
        """Open the store again and write once, as a new process does."""
        with holdfast.open(self.url, namespace=self.namespace) as store:
            store.find_session(BIG).append("notes", ["x"])

    def doctor(self) -> None:
        """Examine the store; it must be well."""
        problems = [
            each for each in check(self.url, namespace=self.namespace) if each.level == "problem"
        ]
        assert not problems, problems


Operation: TypeAlias = Callable[[Filled], object]
SESSIONS: dict[str, Operation] = {
    "start a session": lambda f: f.store.session(f.new_id()),
    "resume a session": lambda f: f.store.session(f.session().id, reopen=True),
    "find_session(id)": lambda f: f.store.find_session(bulk.session_id(f.some())),
    "find_session(8 characters)": lambda f: f.store.find_session(bulk.session_id(f.some())[:8]),
    "sessions(), last page": lambda f: f.store.sessions(after=f.size - PAGE),
    "sessions(status=), last page": lambda f: f.store.sessions(
        status="active", after=f.size - 4 * PAGE
    ),
    "sessions(agent=), rare": lambda f: f.store.sessions(agent=RARE),
    "sessions(status=), rare": lambda f: f.store.sessions(status="failed"),
    "sessions(agent=, status=), rare": lambda f: f.store.sessions(agent="writer", status="failed"),
    "session.info()": lambda f: f.session().info(),
    "session.tree()": lambda f: f.session().tree(),
    "events(), last page": lambda f: f.store.events(BIG, after=f.size - PAGE),
    "latest_events()": lambda f: f.store.latest_events(),
    "search_sessions()": lambda f: f.store.search_sessions(
        bulk.session_id(f.some())[:2], limit=SHORT_PAGE
    ),
    "first write of a new process": Filled.first_write,
}
CHECKPOINTS: dict[str, Operation] = {
    "append": lambda f: f.big.append("messages", ["one more"]),
    "save one value": lambda f: f.big.save(value="x" * 500),
    "record": lambda f: f.big.record("manual_checkpoint", {"a": 1}),
    "latest(last=50)": lambda f: f.big.latest(last=50),
    "at(version, last=50)": lambda f: f.big.at(f.size // 2, last=50),
    "history()": lambda f: f.big.history(),
    "history(before=middle)": lambda f: f.big.history(before=f.size // 2),
    "resume_point()": lambda f: f.big.resume_point(),
    "checkpoints()": lambda f: f.store.checkpoints(),
    "checkpoints(kind=), rare": lambda f: f.store.checkpoints(kind="manual_checkpoint", limit=5),
    "session.counts(at_most=)": lambda f: f.big.counts(at_most=1_000),
}
EFFECTS: dict[str, Operation] = {
    "call": lambda f: f.big.call(send, text=f.new_id()),
    "call again": lambda f: f.big.call(send, text="the same"),
    "effects(), last page": lambda f: f.store.effects(after=f.size - PAGE),
    "effects(status=failed)": lambda f: f.store.effects(status="failed"),
    "effects(status=unknown)": lambda f: f.store.effects(status="unknown"),
    "effects(tool=), rare": lambda f: f.store.effects(tool=RARE),
    "effects(tool=, status=), rare": lambda f: f.store.effects(tool="search", status="failed"),
    "effects(session=)": lambda f: f.store.effects(session=f.session()),
    "effects(session=, status=), rare": lambda f: f.store.effects(session=BIG, status="failed"),
    "effects(key=)": lambda f: f.store.effects(key=f"key {f.some()}"),
    "effects(key=), idempotency key": lambda f: f.store.effects(key=f"idempotency {f.some()}"),
    "unresolved()": lambda f: f.big.unresolved(),
    "pending()": lambda f: f.big.pending(),
    "recent_calls()": lambda f: f.big.recent_calls(),
    "spend": lambda f: f.big.spend("small", usd="0.01"),
    "spent(tree=True)": lambda f: f.big.spent(tree=True),
    "spends(state=uncertain)": lambda f: f.big.spends(state="uncertain"),
    "store.spends(state=uncertain)": lambda f: f.store.spends(state="uncertain"),
    "spends(), last page": lambda f: f.store.spends(session=BIG, after=f.size - PAGE),
}
WORK: dict[str, Operation] = {
    "submit, claim, heartbeat, complete": Filled.work_one,
    "claim of all queues": Filled.claim_any,
    "work.get": lambda f: f.store.work.get(f.running.id),
    "work.find(8 characters)": lambda f: f.store.work.find(f.running.id[:8]),
    "work.list()": lambda f: f.store.work.list(),
    **{
        f"work.list(status={status})": functools.partial(
            lambda status, f: f.store.work.list(status=status, limit=FULL_PAGE), status
        )
        for status in ("pending", "in_progress", "completed", "failed", "cancelled")
    },
    "work.list(type=), rare": lambda f: f.store.work.list(type=RARE),
    "work.list(type=, status=), rare": lambda f: f.store.work.list(type=RARE, status="pending"),
    "work.list(queue=)": lambda f: f.store.work.list(queue=f.queue, limit=FULL_PAGE),
    "work.list(queue=), rare": lambda f: f.store.work.list(queue=RARE),
    "work.list(queue=, status=pending)": lambda f: f.store.work.list(
        queue=f.queue, status="pending", limit=SHORT_PAGE
    ),
    "work.list(queue=, status=cancelled), rare": lambda f: f.store.work.list(
        queue=RARE, status="cancelled"
    ),
    "work.list(holder=)": lambda f: f.store.work.list(holder=f.running.holder, limit=FULL_PAGE),
    "work.dead()": lambda f: f.store.work.dead(),
    "work.why(waiting)": lambda f: f.store.work.why(f.waiting.id),
    "work.why(running)": lambda f: f.store.work.why(f.running.id),
    "work.sweep(), nothing expired": lambda f: f.store.work.sweep(),
    "work.health()": lambda f: f.store.work.health(at_most=FULL_PAGE),
    "work.counts(at_most=)": lambda f: f.store.work.counts(finished=False, at_most=FULL_PAGE),
}
GROUPS = {
    "sessions and events": SESSIONS,
    "checkpoints": CHECKPOINTS,
    "effects and spend": EFFECTS,
    "work": WORK,
}
# What reads all there is, and says so in its documentation.
WHOLE: dict[str, Operation] = {
    "doctor": Filled.doctor,
    "spending()": lambda f: f.store.spending(),
    "session.counts()": lambda f: f.big.counts(),
    "session.standing(newest)": lambda f: f.big.standing(f.size),
    "work.counts()": lambda f: f.store.work.counts(),
    "work.growth()": lambda f: f.store.work.growth(),
    "a prune that finds nothing": lambda f: f.store.prune(keep=10 * f.size),
}


def run(console: Console, *, quick: bool) -> Report:
    """Fill the stores and measure everything in them."""
    plan = QUICK if quick else FULL
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory,
        servers.postgres() as dsn,
    ):
        report = Report("growth", environment() | servers.settings(dsn))
        for database in ("SQLite", "PostgreSQL"):
            with contextlib.ExitStack() as stack:
                places: list[tuple[str, str | None]] = [
                    (f"sqlite:///{Path(directory) / f'{size}.db'}", None) for size in plan.sizes
                ]
                if database == "PostgreSQL":
                    schemas = stack.enter_context(servers.schemas(dsn, len(plan.sizes)))
                    places = [(dsn, schema) for schema in schemas]
                stores = [
                    filled(console, stack, *place, size)
                    for place, size in zip(places, plan.sizes, strict=True)
                ]
                _measure(console, report, plan, database, stores)
        report.environment["load after"] = f"{os.getloadavg()[0]:.2f}"
    return report


def filled(
    console: Console, stack: contextlib.ExitStack, url: str, namespace: str | None, size: int
) -> Filled:
    started = time.perf_counter()
    store = stack.enter_context(holdfast.open(url, namespace=namespace))
    bulk.fill(store, size)
    found = Filled(url, namespace, size, store)
    found.doctor()
    console.print(f"a store of {size:,} filled in {time.perf_counter() - started:.0f} s")
    return found


def _measure(
    console: Console, report: Report, plan: Plan, database: str, stores: Sequence[Filled]
) -> None:
    for group, operations in (*GROUPS.items(), ("what reads everything", WHOLE)):
        contestants = [
            Contestant(name, functools.partial(_round, stores, operation))
            for name, operation in operations.items()
        ]
        largest = _heading(plan.sizes[-1])
        title = f"{database}: {group}, by the size of the store"
        table = compare(title, contestants, rounds=plan.rounds, key=largest)
        report.tables.append(table)
        table.show(console)
        for name in operations if operations is not WHOLE else ():
            text = f"{database}: growth of {name}"
            exponent = table.median(name, EXPONENT)
            report.targets.append(Target(text, exponent, at_most=EXPONENT_MAX, unit=""))


def _round(stores: Sequence[Filled], operation: Operation) -> Figures:
    """Time one operation in each store."""
    found = {filled.size: _time(filled, operation) * 1e6 for filled in stores}
    figures = {_heading(size): time for size, time in found.items()}
    return {**figures, EXPONENT: slope(found)}


def _heading(size: int) -> str:
    return f"{size:,} µs"


def _time(filled: Filled, operation: Operation) -> float:
    """Return the least of several times, to which nothing else was added; or the only one."""
    spent: list[float] = []
    while len(spent) < FAST_REPEATS:
        started = time.perf_counter()
        operation(filled)
        spent.append(time.perf_counter() - started)
        if spent[0] > SLOW_SECONDS:
            break
    return min(spent)


def slope(times: dict[int, Any]) -> float:
    """Return the exponent of the power of the size that fits the times best."""
    points = [(math.log(size), math.log(time)) for size, time in times.items()]
    return statistics.linear_regression(*zip(*points, strict=True)).slope
