"""`holdfast bench`: what calls cost on this disk or this server."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Annotated, Any, NamedTuple

from .. import store as stores
from ..arguments import require_seconds, require_whole
from ..effects import tool
from ..kernel.scratch import scratch
from ..kernel.url import parse
from ..store import Store
from . import output
from .command import Answer, DatabaseUrl, Namespace, option

MESSAGE = {"role": "assistant", "content": "x" * 2_000}
MESSAGES = 1_000
# Calls that are not counted: statements are planned and files grow in them.
WARM_UP = 10
SECONDS_MAX = 600
SESSIONS_MAX = 256


class Measured(NamedTuple):
    """What one kind of call costs."""

    operation: str
    calls: int
    median_ms: float
    p95_ms: float
    per_second: float


@tool(effect="mutate")
def nothing(number: int) -> None:
    """Do nothing: what is left is what keeping the call costs."""


def bench(
    url: DatabaseUrl = None,
    namespace: Namespace = None,
    seconds: Annotated[float, option("SECONDS", "How long to measure each kind of call.")] = 1.0,
    sessions: Annotated[int, option("N", "How many sessions append at once, in threads.")] = 16,
    durability: Annotated[
        str, option("NAME", "full, or normal: a power loss may lose the last calls.")
    ] = "full",
) -> Answer:
    """Measure what calls cost on a store's disk or server.

    It works in a temporary store next to yours, which is removed afterwards; yours is neither
    opened nor needed.
    """
    require_seconds("seconds", seconds, SECONDS_MAX)
    require_whole("sessions", sessions, 1, SESSIONS_MAX)
    target = parse(url, namespace)
    chosen: Any = durability
    with scratch(target) as place, stores.open(place, durability=chosen) as store:
        found = list(_measured(store, seconds, sessions))
    where = "a temporary file" if target.shown == "sqlite://" else target.shown
    shown_columns: output.Columns = {
        "operation": "operation",
        "median ms": lambda each: _digits(each.median_ms),
        "p95 ms": lambda each: _digits(each.p95_ms),
        "per second": lambda each: f"{each.per_second:,.0f}",
    }

    def shown() -> Iterator[Any]:
        yield f"Next to {where}, durability {durability}:\n"
        yield output.table(found, shown_columns)

    operations = [each._asdict() for each in found]
    return Answer({"beside": where, "durability": durability, "operations": operations}, shown)


def _digits(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:,.0f}"


def _measured(store: Store, seconds: float, sessions: int) -> Iterator[Measured]:
    numbers = count()
    session = store.session("bench")
    long = store.session("long")
    long.append("transcript", [MESSAGE] * MESSAGES)
    state = session.state
    calls: dict[str, Callable[[], object]] = {
        "append a message of 2 KB": lambda: session.append("transcript", [MESSAGE]),
        "call a tool": lambda: session.call(nothing, number=next(numbers)),
        "submit, claim and complete an item": lambda: _work(store),
        "increment a shared number": lambda: state.increment("n"),
        "read a shared number": lambda: state.get("n"),
        f"load {MESSAGES:,} messages": lambda: store.session("long").latest(),
    }
    with output.progress("Measuring") as move:
        for done, (name, call) in enumerate(calls.items()):
            move(done, len(calls) + 1)
            for _ in range(WARM_UP):
                call()
            started = time.perf_counter()
            yield _summary(name, _timed(call, started + seconds), time.perf_counter() - started)
        move(len(calls), len(calls) + 1)
        yield _together(store, seconds, sessions)


def _work(store: Store) -> None:
    store.work.submit("bench", None)
    for item in store.work.claim("bench", queues=["bench"]):
        item.complete(None)


def _together(store: Store, seconds: float, sessions: int) -> Measured:
    from concurrent.futures import ThreadPoolExecutor

    handles = [store.session(f"bench-{number}") for number in range(sessions)]
    started = time.perf_counter()

    def appends(handle: Any) -> list[float]:
        return _timed(lambda: handle.append("transcript", [MESSAGE]), started + seconds)

    with ThreadPoolExecutor(sessions) as threads:
        took = [each for times in threads.map(appends, handles) for each in times]
    elapsed = time.perf_counter() - started
    return _summary(f"append, {sessions} sessions at once", took, elapsed)


def _timed(call: Callable[[], object], until: float) -> list[float]:
    """Return what each call took, in seconds; there is at least one."""
    times: list[float] = []
    before = time.perf_counter()
    while not times or before < until:
        call()
        after = time.perf_counter()
        times.append(after - before)
        before = after
    return times


def _summary(name: str, times: list[float], elapsed: float) -> Measured:
    ordered = sorted(times)
    median, p95 = (ordered[math.ceil(len(ordered) * part) - 1] * 1000 for part in (0.5, 0.95))
    return Measured(name, len(times), median, p95, len(times) / elapsed)
