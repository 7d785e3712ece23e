"""Many writers of one PostgreSQL tree: are they together as fast as one alone?

Every writer is a connection of its own and appends to its own session of the same tree, so all of
them wait for the tree's row. They are threads of some processes, whose calls share transactions.
The other contestants show what that is good for, and the queue in front of the row: the same
writers with a transaction for each call, and these without the queue.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from unittest.mock import patch

import psycopg
from rich.console import Console

import holdfast
from holdfast.kernel.postgres import transactions

from . import servers
from .costs import MESSAGE, SERVER_CPU, server_time
from .measure import RATE, Contestant, Figures, Report, Target, compare, environment, percentile

ROOT = "root"
ONE, MANY = "one writer", "all writers"
APART, UNQUEUED = "all writers, a transaction each", "the same without the queue"
NOT_SHARED = ("gathering_of",)
NOT_QUEUED = ("gathering_of", "queue_of")
GRACE_SECONDS = 120.0
PATIENCE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How many processes and threads write, for how long, and how often."""

    processes: int
    threads: int
    seconds: float
    rounds: int


FULL = Plan(processes=8, threads=8, seconds=5, rounds=5)
QUICK = Plan(processes=2, threads=4, seconds=1, rounds=1)


@dataclass(frozen=True, slots=True)
class Order:
    """What a process is told to do: with how many writers, until when, and how."""

    threads: int
    seconds: float
    absent: Sequence[str] = ()
    """The functions that are to return nothing: `gathering_of`, `queue_of`."""


def write(pipe: Connection, dsn: str, schema: str, threads: int) -> None:
    """Write as ordered, and send the latency of each append."""
    with contextlib.ExitStack() as stack:
        stores = [
            stack.enter_context(
                holdfast.open(dsn, namespace=schema, busy_timeout_seconds=PATIENCE_SECONDS)
            )
            for _ in range(threads)
        ]
        sessions = [store.session(parent=ROOT) for store in stores]
        pipe.send([])
        while (order := pipe.recv()) is not None:
            with contextlib.ExitStack() as without:
                for name in order.absent:
                    without.enter_context(patch.object(transactions, name, return_value=None))
                pipe.send(_append(sessions[: order.threads], order.seconds))


def _append(sessions: Sequence[holdfast.Session], seconds: float) -> list[float]:
    latencies: list[float] = []
    deadline = time.perf_counter() + seconds

    def append(session: holdfast.Session) -> None:
        while (started := time.perf_counter()) < deadline:
            session.append("transcript", [MESSAGE])
            latencies.append(time.perf_counter() - started)

    with ThreadPoolExecutor(len(sessions)) as threads:
        list(threads.map(append, sessions))
    return latencies


@contextlib.contextmanager
def writers(plan: Plan, dsn: str, schema: str) -> Iterator[list[Connection]]:
    """Yield a pipe to each of the writing processes, once all are ready."""
    with holdfast.open(dsn, namespace=schema) as store:
        store.session(ROOT)
    context = multiprocessing.get_context("spawn")
    pipes = []
    with contextlib.ExitStack() as stack:
        for _ in range(plan.processes):
            pipe, theirs = context.Pipe()
            arguments = (theirs, dsn, schema, plan.threads)
            process = context.Process(target=write, args=arguments, daemon=True)
            process.start()
            theirs.close()
            stack.callback(process.join, GRACE_SECONDS)
            stack.callback(pipe.send, None)
            pipes.append(pipe)
        for pipe in pipes:
            _latencies(pipe)
        yield pipes


def together(pipes: Sequence[Connection], order: Order, dsn: str) -> Figures:
    """Have processes write at the same time, and return what they achieved together."""
    with psycopg.connect(dsn, autocommit=True) as watcher:
        before = server_time(watcher)
        for pipe in pipes:
            pipe.send(order)
        latencies = [each * 1e3 for pipe in pipes for each in _latencies(pipe)]
        spent = server_time(watcher) - before
    return {
        RATE: len(latencies) / order.seconds,
        SERVER_CPU: spent / len(latencies),
        "p50 ms": percentile(latencies, 0.5),
        "p99 ms": percentile(latencies, 0.99),
        "worst ms": max(latencies),
    }


def _latencies(pipe: Connection) -> list[float]:
    if not pipe.poll(GRACE_SECONDS):
        raise RuntimeError("a writing process does not answer")
    found: list[float] = pipe.recv()
    return found


def run(console: Console, *, quick: bool) -> Report:
    """Measure one writer, all, and all without what helps them."""
    plan = QUICK if quick else FULL
    with servers.postgres() as dsn, servers.schemas(dsn, 1) as [schema]:
        report = Report("writers", environment() | servers.settings(dsn))
        with writers(plan, dsn, schema) as pipes:
            count = plan.processes * plan.threads
            everybody = functools.partial(Order, plan.threads, plan.seconds)
            contestants = [
                Contestant(ONE, lambda: together(pipes[:1], Order(1, plan.seconds), dsn)),
                Contestant(MANY, lambda: together(pipes, everybody(), dsn), ONE),
                Contestant(APART, lambda: together(pipes, everybody(NOT_SHARED), dsn), ONE),
                Contestant(
                    UNQUEUED,
                    lambda: together(pipes, everybody(NOT_QUEUED), dsn),
                    ONE,
                ),
            ]
            title = f"PostgreSQL: appends to one tree by one and by {count} writers"
            table = compare(title, contestants, rounds=plan.rounds, key=RATE)
        table.show(console)
        report.tables.append(table)
        text = f"{count} writers of one tree beside one"
        report.targets.append(Target(text, 1 / table.times_slower(MANY, ONE), at_least=1.0))
    return report
