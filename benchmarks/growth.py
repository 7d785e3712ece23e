"""What every operation and listing costs in stores that differ only in how much they hold.

Each store has as many sessions, events in one tree, effects, work items, writers, attempts in the
ledger of spend and versions of one session as its size says. An operation is measured in all of
them in turn. Its exponent is the slope of the line through its times on a doubly logarithmic scale:
0 is flat, 1 grows with the store. A search in a tree of pages is below 0.1.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

import holdfast

from . import bulk, servers
from .growth_operations import GROUPS, WHOLE, Filled, Operation
from .measure import Contestant, Figures, Report, Target, compare, environment

READS_ALL = "what reads everything"
EXPONENT = "exponent"
EXPONENT_MAX = 0.15
# Some listings begin a few pages before the end.
SIZE_MIN = 500
FAST_REPEATS = 7
SLOW_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Plan:
    """How much the stores hold, and how many rounds there are."""

    sizes: tuple[int, ...]
    rounds: int


FULL = Plan((1_000, 100_000, 1_000_000), 5)
QUICK = Plan((1_000, 10_000), 2)


def run(
    console: Console, *, quick: bool, only: Sequence[str] = (), sizes: Sequence[int] = ()
) -> Report:
    """Fill the stores and measure everything in them.

    With `only`, what has one of these texts in its name; with `sizes`, in stores of these.
    """
    plan = QUICK if quick else FULL
    plan = replace(plan, sizes=tuple(sizes) or plan.sizes)
    chosen = choose(only)
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory,
        servers.postgres() as dsn,
    ):
        report = Report("growth", environment() | servers.settings(dsn))
        if only:
            report.environment["only"] = ", ".join(only)
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
                _measure(console, report, plan, database, stores, chosen)
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


def choose(only: Sequence[str]) -> dict[str, dict[str, Operation]]:
    """Return the operations of each group that have one of these texts in their names, or all."""
    chosen = {
        group: {
            name: operation
            for name, operation in operations.items()
            if not only or any(text in name for text in only)
        }
        for group, operations in {**GROUPS, READS_ALL: WHOLE}.items()
    }
    return {group: operations for group, operations in chosen.items() if operations}


def _measure(
    console: Console,
    report: Report,
    plan: Plan,
    database: str,
    stores: Sequence[Filled],
    chosen: dict[str, dict[str, Operation]],
) -> None:
    for group, operations in chosen.items():
        contestants = [
            Contestant(name, functools.partial(_round, stores, operation))
            for name, operation in operations.items()
        ]
        largest = _heading(plan.sizes[-1])
        title = f"{database}: {group}, by the size of the store"
        table = compare(title, contestants, rounds=plan.rounds, key=largest)
        report.tables.append(table)
        table.show(console)
        for name in operations if group != READS_ALL else ():
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
