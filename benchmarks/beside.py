"""How long writers wait beside maintenance: prune, export, backup, cancel and delete of much.

A second process does the maintenance. The first one appends, calls a tool and works an item, over
and over, while it runs; in the quiet rounds nobody does anything beside it. Beside a cancel and a
delete it does so in sessions of other trees, and in the very tree that is cancelled or deleted
below another session of it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from rich.console import Console

import holdfast

from . import servers
from .costs import MESSAGE, send
from .measure import Contestant, Figures, Report, Table, Target, compare, environment, percentile

P99 = "p99 ms"
QUIET = "quiet"
TREE = "tree"
TIMES_MAX = 3.0
GRACE_SECONDS = 600.0
# Few enough that a busy machine prepares them within the limit of `store.run`.
PER_TRANSACTION = 20


@dataclass(frozen=True, slots=True)
class Plan:
    """How much the maintenance has to do, and how many rounds there are."""

    versions: int
    children: int
    rounds: int
    quiet_seconds: float


FULL = Plan(versions=20_000, children=5_000, rounds=3, quiet_seconds=10)
QUICK = Plan(versions=1_000, children=200, rounds=1, quiet_seconds=1)


@dataclass(frozen=True, slots=True)
class Place:
    """Where the store is, and where files may go."""

    url: str
    namespace: str | None
    directory: Path

    def open(self) -> holdfast.Store:
        """Open the store."""
        return holdfast.open(self.url, namespace=self.namespace)

    def file(self, name: str) -> Path:
        """Return the path of a file that is not there."""
        path = self.directory / name
        path.unlink(missing_ok=True)
        return path


def long_session(store: holdfast.Store, plan: Plan) -> holdfast.Session:
    """Return a new session with many versions."""
    session = store.session()
    for _ in range(plan.versions // PER_TRANSACTION):
        store.run(_append_some, session.id)
    return session


def _append_some(tx: holdfast.Transaction, id: str) -> holdfast.Op[None]:
    session = yield from tx.find_session(id)
    for _ in range(PER_TRANSACTION):
        yield from session.append("transcript", [MESSAGE])


def large_tree(store: holdfast.Store, plan: Plan, parent: str | None = None) -> holdfast.Session:
    """Return a new session with many children, below another one if that is named."""
    top = store.session(parent=None if parent is None else store.session(parent))
    for start in range(0, plan.children, PER_TRANSACTION):
        store.run(_add_children, top.id, min(PER_TRANSACTION, plan.children - start))
    return top


def _add_children(tx: holdfast.Transaction, top_id: str, count: int) -> holdfast.Op[None]:
    for _ in range(count):
        child = yield from tx.session(parent=top_id)
        yield from child.append("transcript", [MESSAGE])


# Each prepares what it needs and returns what is to be measured beside.
Task = Callable[[holdfast.Store, Place, Plan], Callable[[], object]]
Prepared = Callable[[], object]


def _prune(store: holdfast.Store, place: Place, plan: Plan) -> Prepared:
    session = long_session(store, plan)
    return lambda: store.prune(session=session, keep=10)


def _export(store: holdfast.Store, place: Place, plan: Plan) -> Prepared:
    root = large_tree(store, plan)
    return lambda: store.export(place.file("export.holdfast"), sessions=[root])


def _backup(store: holdfast.Store, place: Place, plan: Plan) -> Prepared:
    return lambda: store.backup(place.file("backup.db"))


def _cancel(parent: str | None, store: holdfast.Store, place: Place, plan: Plan) -> Prepared:
    return large_tree(store, plan, parent).cancel


def _delete(parent: str | None, store: holdfast.Store, place: Place, plan: Plan) -> Prepared:
    return functools.partial(large_tree(store, plan, parent).delete, force=True)


TASKS: dict[str, Task] = {
    "prune of a long session": _prune,
    "export of a large tree": _export,
    "backup": _backup,
    "cancel of a large tree": functools.partial(_cancel, None),
    "delete of a large tree": functools.partial(_delete, None),
    "cancel in the very tree": functools.partial(_cancel, TREE),
    "delete in the very tree": functools.partial(_delete, TREE),
}
IN_TREE = {"cancel in the very tree", "delete in the very tree"}


def maintain(pipe: Connection, place: Place, plan: Plan) -> None:
    """Do what is asked for by name: prepare, say so, wait for the word, do it, say so."""
    with place.open() as store:
        while name := pipe.recv():
            act = TASKS[name](store, place, plan)
            pipe.send("ready")
            pipe.recv()
            act()
            pipe.send("done")


@dataclass(slots=True)
class Writer:
    """Appends, calls and works items, one after the other."""

    store: holdfast.Store
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def _complete_one(self) -> None:
        [item] = self.store.work.claim("bench")
        item.complete()

    def until(self, is_over: Callable[[], bool], parent: str | None = None) -> Figures:
        """Write until it is over, and return the latencies of what was written."""
        session = self.store.session(parent=parent)
        latencies: list[float] = []
        steps = (
            lambda: session.append("transcript", [MESSAGE]),
            lambda: session.call(send, text=f"{next(self.numbers)}"),
            lambda: self.store.work.submit("bench"),
            self._complete_one,
        )
        while not (latencies and is_over()):
            for step in steps:
                started = time.perf_counter()
                step()
                latencies.append((time.perf_counter() - started) * 1e3)
        return {
            "p50 ms": percentile(latencies, 0.5),
            P99: percentile(latencies, 0.99),
            "worst ms": max(latencies),
            "writes": len(latencies),
        }


def run(console: Console, *, quick: bool) -> Report:
    """Measure on both databases."""
    plan = QUICK if quick else FULL
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory,
        servers.postgres() as dsn,
        servers.schemas(dsn, 1) as [schema],
    ):
        report = Report("beside", environment() | servers.settings(dsn))
        files = Path(directory)
        for database, place in (
            ("SQLite", Place(f"sqlite:///{files / 'store.db'}", None, files)),
            ("PostgreSQL", Place(dsn, schema, files)),
        ):
            table = _measure(place, plan, f"{database}: writes beside maintenance")
            table.show(console)
            report.tables.append(table)
            for name in TASKS:
                times = table.median(name) / table.median(QUIET)
                text = f"{database}: p99 beside {name}, as a multiple of the quiet one"
                report.targets.append(Target(text, times, at_most=TIMES_MAX))
    return report


def _measure(place: Place, plan: Plan, title: str) -> Table:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    with place.open() as store, contextlib.ExitStack() as stack:
        process = context.Process(target=maintain, args=(theirs, place, plan), daemon=True)
        process.start()
        theirs.close()
        stack.callback(process.join, GRACE_SECONDS)
        stack.callback(pipe.send, "")
        writer = Writer(store)

        def quiet() -> Figures:
            deadline = time.perf_counter() + plan.quiet_seconds
            return writer.until(lambda: time.perf_counter() > deadline)

        def beside(name: str) -> Figures:
            pipe.send(name)
            _expect(pipe, "ready")
            pipe.send("go")
            figures = writer.until(pipe.poll, TREE if name in IN_TREE else None)
            _expect(pipe, "done")
            return figures

        contestants = [
            Contestant(QUIET, quiet),
            *(Contestant(name, functools.partial(beside, name), QUIET) for name in TASKS),
        ]
        return compare(title, contestants, rounds=plan.rounds, key=P99)


def _expect(pipe: Connection, word: str) -> None:
    if not pipe.poll(GRACE_SECONDS) or pipe.recv() != word:
        raise RuntimeError(f"the process for maintenance did not say {word!r}")
