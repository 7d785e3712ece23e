"""What waiting costs: beside how many pauses one goes on, their memory, and waking on time."""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psycopg
from rich.console import Console

import holdfast
from holdfast.mesh import Service

from .keepers import Place
from .measure import TIME, Contestant, Figures, Report, Table, Target, compare, percentile
from .queues import database

AGENT, PEER, SLEEPER = "caller", "peer", "sleeper"
PER_COMMIT = 20
SLEEPING_INSTANCES = 3
GROWTH_MAX = 1.2
MEMORY_MIB_MAX = 10.0
LATE_SECONDS_MAX = 1.0
WAIT_SECONDS_MAX = 300.0
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Plan:
    """How many wait."""

    rounds: int
    times: int
    pauses: tuple[int, ...]
    paused: int
    sleepers: int
    spread_seconds: float


FULL = Plan(5, 30, (100, 10_000, 100_000), 10_000, 10_000, 300.0)
QUICK = Plan(1, 10, (100, 1_000), 1_000, 300, 6.0)


def run(console: Console, report: Report, plan: Plan, directory: Path, dsn: str) -> None:
    """Measure on both databases; sleepers only where several machines can serve them."""
    for name in ("SQLite", "PostgreSQL"):
        with contextlib.ExitStack() as stack:

            def place(name: str = name, stack: contextlib.ExitStack = stack) -> Place:
                if name == "PostgreSQL":
                    return stack.enter_context(database(dsn))
                made = tempfile.TemporaryDirectory(dir=directory)
                return Place(path=Path(stack.enter_context(made)) / "mesh.db")

            _growth(console, report, plan, name, place)
            _memory(console, report, plan, name, place())
    with database(dsn) as place_of_sleepers:
        _sleepers(console, report, plan, place_of_sleepers)


def fill(
    store: holdfast.Store, count: int, start: Callable[[Any, str], Any], before: int = 0
) -> None:
    """Make sessions that wait, many in a commit, until there are so many."""
    for first in range(before, count, PER_COMMIT):
        ids = [f"waits-{number:08}" for number in range(first, min(count, first + PER_COMMIT))]

        def some(tx: Any, ids: list[str] = ids) -> Any:
            for id in ids:
                yield from start(tx, id)

        store.run(some)
    if store.runtime.driver.dialect == "postgres":
        # As autovacuum does in time; SQLite needs nothing.
        target: Any = store.runtime.target
        with psycopg.connect(target.dsn, autocommit=True) as connection:
            connection.execute("VACUUM ANALYZE")


def park(tx: Any, id: str) -> Any:
    """Start a session, ask a peer, and pause."""
    session = yield from tx.session(id, agent=AGENT)
    yield from session.ask(PEER, None, id=f"ask {id}", timeout_seconds="never")
    yield from session.pause()


# Growth


def _growth(
    console: Console, report: Report, plan: Plan, name: str, place: Callable[[], Place]
) -> None:
    with contextlib.ExitStack() as stack:
        stores = {}
        for count in plan.pauses:
            store = stack.enter_context(holdfast.open(place().url))
            fill(store, count, park)
            stores[f"{count:,} pauses"] = store
        first = next(iter(stores))
        contestants = [
            Contestant(each, functools.partial(_go_on, store, plan.times), _other(each, first))
            for each, store in stores.items()
        ]
        title = f"{name}: ask, pause, answer and resume one session among others that wait"
        table = compare(title, contestants, rounds=plan.rounds, key=TIME)
        _add(console, report, table)
        last = contestants[-1].name
        text = f"{name}: going on among {last}, times that among {first}"
        times = table.times_slower(last, first)
        report.targets.append(Target(text, times, at_most=GROWTH_MAX))


def _other(name: str, first: str) -> str | None:
    return None if name == first else first


def _go_on(store: holdfast.Store, times: int) -> Figures:
    spent = []
    for _ in range(times):
        started = time.perf_counter()
        session = store.session(agent="one")
        call = session.ask("another")
        session.pause()
        store.answer(call.id, 1)
        [item] = store.work.claim("bench", queues="agent:one")
        item.resume()
        item.complete()
        spent.append(time.perf_counter() - started)
        session.end()
    return {TIME: statistics.median(spent) * 1e6}


def _add(console: Console, report: Report, table: Table) -> None:
    table.show(console)
    report.tables.append(table)


# Memory


def _memory(console: Console, report: Report, plan: Plan, name: str, place: Place) -> None:
    """Watch a process that serves an agent while more and more of its sessions wait."""
    figures: dict[str, list[Figures]] = {}
    with holdfast.open(place.url) as store, _child(serve_and_tell, place) as pipe:
        fill(store, 10, park)
        before = _told(pipe, store)
        fill(store, plan.paused, park, before=10)
        after = _told(pipe, store)
    for label, found in (("10 paused", before), (f"{plan.paused:,} paused", after)):
        figures[label] = [found]
    names = list(figures)
    contestants = [Contestant(each, dict, None) for each in names]
    title = f"{name}: a process that serves an agent, and one answer until its session went on"
    _add(console, report, Table(title, "MiB", contestants, figures))
    grown = after["MiB"] - before["MiB"]
    text = f"{name}: memory from 10 to {plan.paused:,} paused sessions"
    report.targets.append(Target(text, grown, at_most=MEMORY_MIB_MAX, unit="MiB"))


def _told(pipe: Connection, store: holdfast.Store) -> Figures:
    """Let one session go on, and ask the process how large it is."""
    waiting = store.asks(agent=PEER, state="open", limit=1)
    started = time.perf_counter()
    store.answer(waiting[0].id, 1)
    assert pipe.recv() == waiting[0].session_id
    seconds = time.perf_counter() - started
    pipe.send("")
    return {"MiB": pipe.recv() / MIB, "resumed after ms": seconds * 1e3}


def serve_and_tell(place: Place, pipe: Connection) -> None:
    """Serve the agent; say which session went on, and then how much memory is resident."""

    def on_resume(resumption: holdfast.Resumption[Any]) -> None:
        pipe.send(resumption.session.id)

    service = Service(AGENT, lambda request: None, on_resume)
    with holdfast.open(place.url) as store:
        worker = service.worker(store, poll_seconds=0.05)
        running = threading.Thread(target=worker.run)
        running.start()
        pipe.send("ready")
        while pipe.recv() != "stop":
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            pipe.send(pages * os.sysconf("SC_PAGE_SIZE"))
        worker.stop()
        running.join()


# Sleepers


def _sleepers(console: Console, report: Report, plan: Plan, place: Place) -> None:
    """Have many sessions wake at moments that are spread, with three processes that serve."""
    with holdfast.open(place.url) as store, contextlib.ExitStack() as stack:
        # Those that sleep were all put to bed before the first is due.
        bed_seconds = max(5.0, plan.sleepers * 0.02)
        first_at = store.now_ms() + round(bed_seconds * 1000)
        step = plan.spread_seconds * 1000 / plan.sleepers

        def sleep(tx: Any, id: str) -> Any:
            session = yield from tx.session(id, agent=SLEEPER)
            yield from session.sleep(first_at + round(int(id.rpartition("-")[2]) * step))

        fill(store, plan.sleepers, sleep)
        is_in_bed = store.now_ms() < first_at
        for _ in range(SLEEPING_INSTANCES):
            stack.enter_context(_child(wake, place))
        deadline = time.monotonic() + bed_seconds + plan.spread_seconds + WAIT_SECONDS_MAX
        while store.pauses(agent=SLEEPER, state="waiting", limit=1):
            if time.monotonic() > deadline:
                raise TimeoutError("sleepers did not wake")
            time.sleep(0.5)
        _all_awake(store, deadline)
        late = _late_ms(store)
    if len(late) != plan.sleepers or not is_in_bed:
        raise RuntimeError(f"{len(late)} of {plan.sleepers} woke once; all in bed: {is_in_bed}")
    figures = {
        "p50 ms late": percentile(late, 0.5),
        "p99 ms late": percentile(late, 0.99),
        "worst ms late": max(late),
    }
    name = f"{plan.sleepers:,} over {plan.spread_seconds:g} s"
    title = f"PostgreSQL: sessions that sleep, {SLEEPING_INSTANCES} processes that wake them"
    table = Table(title, "p99 ms late", [Contestant(name, dict)], {name: [figures]})
    _add(console, report, table)
    text = f"PostgreSQL: {name} wake once each; 99 % within"
    seconds = figures["p99 ms late"] / 1000
    report.targets.append(Target(text, seconds, at_most=LATE_SECONDS_MAX, unit="s"))


def _all_awake(store: holdfast.Store, deadline: float) -> None:
    while store.work.list(type="resume", status=["pending", "in_progress"], limit=1):
        if time.monotonic() > deadline:
            raise TimeoutError("sleepers did not wake")
        time.sleep(0.1)


def _late_ms(store: holdfast.Store) -> list[float]:
    """Return how late each woke; one that woke twice would be there twice."""
    found: list[float] = []
    before = None
    while page := store.work.list(type="resume", before=before, limit=1_000):
        found += [item.output for item in page if item.attempts == 1]
        before = page[-1].number
    return found


def wake(place: Place, pipe: Connection) -> None:
    """Serve sleepers, and note how late each is."""

    def on_resume(resumption: holdfast.Resumption[Any]) -> float:
        store = holdfast.Store(resumption.session.runtime)
        wakes_at = store.get_pause(resumption.pause_id).wakes_at
        assert wakes_at is not None
        return float(store.now_ms() - wakes_at)

    service = Service(SLEEPER, lambda request: None, on_resume)
    with holdfast.open(place.url) as store:
        worker = service.worker(store)
        running = threading.Thread(target=worker.run)
        running.start()
        pipe.send("ready")
        pipe.recv()
        worker.stop()
        running.join()


@contextlib.contextmanager
def _child(serve: Callable[[Place, Connection], None], place: Place) -> Any:
    """Run a function in another process, and yield the pipe to it."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=serve, args=(place, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        assert pipe.recv() == "ready"
        yield pipe
        pipe.send("stop")
        process.join(60)
    finally:
        process.kill()
        process.join()
