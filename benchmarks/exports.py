"""How many sessions an export writes and an import reads per second, by the size of the store.

Every session is a tree of its own, with one message. Processor time is that of this process and of
the server's processes that serve it, for one session; imports go into new stores.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
from rich.console import Console

import holdfast

from . import servers
from .beside import PER_TRANSACTION
from .costs import CPU, SERVER_CPU, server_time
from .measure import RATE, Contestant, Figures, Report, Target, compare, environment

MESSAGE = {"role": "user", "content": "x" * 100}
PER_SECOND = 3_000


@dataclass(frozen=True, slots=True)
class Plan:
    """How many sessions the stores have, and how many rounds there are."""

    sizes: tuple[int, ...]
    rounds: int


FULL = Plan((1_000, 10_000), 5)
QUICK = Plan((100, 1_000), 1)


@dataclass(slots=True)
class Database:
    """Where new stores are opened: files in a directory, or schemas of a server."""

    directory: Path
    dsn: str | None = None
    numbers: Iterator[int] = field(default_factory=itertools.count)

    @contextlib.contextmanager
    def store(self) -> Iterator[holdfast.Store]:
        """Yield a new store, and remove it in the end."""
        with contextlib.ExitStack() as stack:
            if self.dsn is None:
                url = f"sqlite:///{self.new_file()}"
                yield stack.enter_context(holdfast.open(url))
            else:
                [schema] = stack.enter_context(servers.schemas(self.dsn, 1))
                yield stack.enter_context(holdfast.open(self.dsn, namespace=schema))

    def new_file(self) -> Path:
        """Return the path of a file that does not exist."""
        return self.directory / f"{next(self.numbers)}"

    def measure(self, size: int, act: Callable[[], object]) -> Figures:
        """Return the sessions per second, and the processor time for each."""
        before, started = self._spent(), time.perf_counter()
        act()
        seconds, after = time.perf_counter() - started, self._spent()
        spent = {name: (after[name] - value) / size for name, value in before.items()}
        return {RATE: size / seconds, **spent}

    def _spent(self) -> Figures:
        own = {CPU: time.process_time() * 1e6}
        if self.dsn is None:
            return own
        with psycopg.connect(self.dsn, autocommit=True) as watcher:
            return {**own, SERVER_CPU: server_time(watcher)}


@dataclass(slots=True)
class Source:
    """A store with so many sessions, and an export of all of them."""

    database: Database
    store: holdfast.Store
    size: int
    file: Path = field(init=False)

    def __post_init__(self) -> None:
        for first in range(0, self.size, PER_TRANSACTION):
            self.store.run(_add_sessions, first, min(self.size, first + PER_TRANSACTION))
        self.file = self.database.new_file()
        self.store.export(self.file)

    def export(self) -> Figures:
        """Export all sessions to a new file."""
        file = self.database.new_file()
        figures = self.database.measure(self.size, lambda: self.store.export(file))
        file.unlink()
        return figures

    def import_into_new(self) -> Figures:
        """Import all sessions into a new store."""
        with self.database.store() as store:
            return self.database.measure(self.size, lambda: store.import_sessions(self.file))


def _add_sessions(tx: holdfast.Transaction, first: int, last: int) -> holdfast.Op[None]:
    for number in range(first, last):
        session = yield from tx.session(f"session {number}")
        yield from session.append("transcript", [MESSAGE])


def run(console: Console, *, quick: bool) -> Report:
    """Measure both ways on both databases."""
    plan = QUICK if quick else FULL
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory,
        servers.postgres() as dsn,
    ):
        report = Report("exports", environment() | servers.settings(dsn))
        for title, given in (("SQLite", None), ("PostgreSQL", dsn)):
            own = Path(directory) / title
            own.mkdir()
            _measure(console, report, plan, title, Database(own, given))
    return report


def _measure(console: Console, report: Report, plan: Plan, name: str, database: Database) -> None:
    with contextlib.ExitStack() as stack:
        sources = [
            Source(database, stack.enter_context(database.store()), size) for size in plan.sizes
        ]
        ways = {"export": Source.export, "import": Source.import_into_new}
        contestants = [
            Contestant(f"{way} of {source.size:,}", functools.partial(act, source))
            for way, act in ways.items()
            for source in sources
        ]
        title = f"{name}: sessions exported and imported"
        table = compare(title, contestants, rounds=plan.rounds, key=RATE)
    table.show(console)
    report.tables.append(table)
    for way in ways:
        rate = table.median(f"{way} of {plan.sizes[-1]:,}")
        text = f"{name}: sessions per second of an {way}"
        report.targets.append(Target(text, rate, at_least=PER_SECOND, unit="per second"))
