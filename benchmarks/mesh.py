"""Peers: fan-out and fan-in, what an answer costs, and what waiting costs.

Holdfast beside child workflows of DBOS and events of Absurd on PostgreSQL, each in a process
and a database of its own, and beside the design with three tables that Holdfast's peers come from.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from holdfast.formatting import plural

from . import mesh_waiting, servers
from .measure import (
    RATE,
    Contestant,
    Figures,
    Report,
    Target,
    compare,
    environment,
    percentile,
    versions,
)
from .meshes import Collector, Fan, HoldfastCollector, HoldfastFan, ThreeTables
from .meshes_apart import FanApart
from .meshes_peers import AbsurdFan, DbosFan
from .queues import database

PEERS = ("dbos", "absurd-sdk", "absurdctl")
FANS: dict[type[Fan], str] = {HoldfastFan: "holdfast", DbosFan: "dbos", AbsurdFan: "absurdctl"}
COLLECTORS: tuple[type[Collector], ...] = (HoldfastCollector, ThreeTables)
TIMES_FASTER = 2.0
LATENCY = "one alone, ms"


@dataclass(frozen=True, slots=True)
class Plan:
    """How many rounds, and how many round trips in each, by the number of peers."""

    rounds: int
    trips: int
    alone: int
    peers: tuple[int, ...]
    waiting: mesh_waiting.Plan


FULL = Plan(5, 200, 5, (1, 5, 50), mesh_waiting.FULL)
QUICK = Plan(1, 50, 1, (1, 5), mesh_waiting.QUICK)


def run(console: Console, *, quick: bool) -> Report:
    """Measure everything, on a server that is gone afterwards."""
    plan = QUICK if quick else FULL
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory,
        servers.postgres() as dsn,
    ):
        report = Report("mesh", environment() | versions(PEERS) | servers.settings(dsn))
        with _fans(dsn) as fans:
            for peers in plan.peers:
                _fan(console, report, plan, fans, peers)
        with _collectors(dsn) as collectors:
            for peers in plan.peers:
                _collect(console, report, plan, collectors, peers)
        mesh_waiting.run(console, report, plan.waiting, Path(directory), dsn)
        report.environment["load after"] = f"{os.getloadavg()[0]:.2f}"
    return report


@contextlib.contextmanager
def _fans(dsn: str) -> Iterator[list[FanApart]]:
    with contextlib.ExitStack() as stack:
        fans = []
        for kind, module in FANS.items():
            if importlib.util.find_spec(module) is not None:
                fan = FanApart(kind, stack.enter_context(database(dsn)))
                stack.callback(fan.close)
                fans.append(fan)
        yield fans


@contextlib.contextmanager
def _collectors(dsn: str) -> Iterator[list[Collector]]:
    with contextlib.ExitStack() as stack:
        found = []
        for kind in COLLECTORS:
            collector = kind(stack.enter_context(database(dsn)))
            stack.callback(collector.close)
            found.append(collector)
        yield found


def _fan(
    console: Console, report: Report, plan: Plan, fans: Sequence[FanApart], peers: int
) -> None:
    def measured(fan: FanApart) -> Figures:
        requests = max(1, plan.trips // peers)
        seconds = fan.seconds(requests, peers)
        alone = percentile([fan.seconds(1, peers) for _ in range(plan.alone)], 0.5)
        return {RATE: requests * peers / seconds, LATENCY: alone * 1e3}

    first = fans[0].name
    contestants = [
        Contestant(fan.name, functools.partial(measured, fan), None if fan is fans[0] else first)
        for fan in fans
    ]
    title = f"PostgreSQL: round trips to peers, {peers} for each request"
    table = compare(title, contestants, rounds=plan.rounds, key=RATE)
    table.show(console)
    report.tables.append(table)
    for fan in fans[1:]:
        text = f"PostgreSQL: round trips with {plural(peers, 'peer')}, times the rate of {fan.name}"
        times = table.times_slower(fan.name, first)
        report.targets.append(Target(text, times, at_least=TIMES_FASTER))


def _collect(
    console: Console, report: Report, plan: Plan, collectors: Sequence[Collector], peers: int
) -> None:
    def measured(collector: Collector) -> Figures:
        tasks = [collector.park(peers) for _ in range(max(1, plan.trips // peers))]
        started = time.perf_counter()
        for calls in tasks:
            if collector.collect(calls) != peers:
                raise RuntimeError(f"{collector.name} lost an answer")
        return {RATE: len(tasks) * peers / (time.perf_counter() - started)}

    first = collectors[0].name
    contestants = [
        Contestant(each.name, functools.partial(measured, each), None if not number else first)
        for number, each in enumerate(collectors)
    ]
    title = f"PostgreSQL: answers, {peers} for each session, and the session resumed and completed"
    table = compare(title, contestants, rounds=plan.rounds, key=RATE)
    table.show(console)
    report.tables.append(table)
