"""What one operation costs: processor time, bytes written, bytes kept.

Processor time of the server is that of the connection's own process; bytes written are PostgreSQL's
log, or what SQLite hands to the operating system, checkpoints of its log included.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
from rich.console import Console

import holdfast

from . import servers
from .measure import Contestant, Figures, Report, compare, environment

CPU = "CPU µs"
SERVER_CPU = "server CPU µs"
MESSAGE = {"role": "user", "content": "x" * 1_000}
OPERATIONS = 1_000
ROUNDS = 5
QUICK_OPERATIONS = 100
QUICK_ROUNDS = 1

SIZE_OF_SCHEMA = """
SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0)
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = %s AND c.relkind = 'r'
"""


@holdfast.tool(effect="mutate")
def send(text: str) -> str:
    """Do nothing, once."""
    return text


@dataclass(slots=True)
class Subject:
    """A store with a session, and a look at what it costs from outside."""

    store: holdfast.Store
    numbers: Iterator[int] = field(default_factory=itertools.count)
    session: holdfast.Session = field(init=False)

    def __post_init__(self) -> None:
        self.session = self.store.session("costs")

    def work_one(self) -> None:
        """Submit, claim and complete one item."""
        self.store.work.submit("bench")
        [item] = self.store.work.claim("bench")
        item.complete()

    def spent(self) -> Figures:
        """Return counters that only grow; an operation's figures are their differences."""
        raise NotImplementedError


class SQLiteSubject(Subject):
    """A file of its own."""

    def __init__(self, store: holdfast.Store, file: Path) -> None:
        super().__init__(store)
        self.file = file

    def spent(self) -> Figures:
        """Return the time of this process, what it wrote, and the size of the file."""
        io = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return {
            CPU: time.process_time() * 1e6,
            "bytes written": int(io["wchar"]),
            "bytes kept": self.file.stat().st_size,
        }


class PostgresSubject(Subject):
    """A schema of its own."""

    def __init__(self, store: holdfast.Store, dsn: str, schema: str) -> None:
        super().__init__(store)
        self.schema = schema
        self.watcher = psycopg.connect(dsn, autocommit=True)

    def spent(self) -> Figures:
        """Return the times of both processes, the length of the log, and the schema's size."""
        [[log]] = self.watcher.execute("SELECT pg_current_wal_insert_lsn() - '0/0'").fetchall()
        [[kept]] = self.watcher.execute(SIZE_OF_SCHEMA, [self.schema]).fetchall()
        return {
            CPU: time.process_time() * 1e6,
            SERVER_CPU: server_time(self.watcher),
            "bytes written": float(log),
            "bytes kept": float(kept),
        }


def server_time(watcher: psycopg.Connection) -> float:
    """Return the processor time of the processes that serve other connections, in microseconds."""
    found = watcher.execute(
        "SELECT pid FROM pg_stat_activity "
        "WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
    ).fetchall()
    return sum(_processor_time(pid) for (pid,) in found)


def _processor_time(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        # Another connection of the server, which has been closed since it was listed.
        return 0.0
    return (int(fields[11]) + int(fields[12])) * 1e6 / os.sysconf("SC_CLK_TCK")


Operation = Callable[[Subject], object]
COSTS: dict[str, Operation] = {
    "append of 1 KB": lambda s: s.session.append("transcript", [MESSAGE]),
    "save of a value of 1 KB": lambda s: s.session.save(plan=f"{next(s.numbers)}{'x' * 1_000}"),
    "tool call": lambda s: s.session.call(send, text=f"{next(s.numbers)}"),
    "submit, claim, complete": Subject.work_one,
    "state: set of 1 KB": lambda s: s.session.state.set("k", f"{next(s.numbers)}{'x' * 1_000}"),
    "state: increment": lambda s: s.session.state.increment("n"),
}


def run(console: Console, *, quick: bool) -> Report:
    """Measure every operation on both databases."""
    count, rounds = (QUICK_OPERATIONS, QUICK_ROUNDS) if quick else (OPERATIONS, ROUNDS)
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory,
        servers.postgres() as dsn,
        servers.schemas(dsn, 1) as [schema],
        contextlib.ExitStack() as stack,
    ):
        report = Report("costs", environment() | servers.settings(dsn))
        file = Path(directory) / "store.db"
        subjects: dict[str, Subject] = {
            "SQLite": SQLiteSubject(stack.enter_context(holdfast.open(f"sqlite:///{file}")), file),
            "PostgreSQL": PostgresSubject(
                stack.enter_context(holdfast.open(dsn, namespace=schema)), dsn, schema
            ),
        }
        for database, subject in subjects.items():
            contestants = [
                Contestant(name, functools.partial(measure, subject, operation, count))
                for name, operation in COSTS.items()
            ]
            title = f"{database}: what one operation costs"
            table = compare(title, contestants, rounds=rounds, key=CPU)
            table.show(console)
            report.tables.append(table)
    return report


def measure(subject: Subject, operation: Operation, count: int) -> Figures:
    """Do an operation many times and return what one of them cost."""
    before = subject.spent()
    for _ in range(count):
        operation(subject)
    after = subject.spent()
    return {name: max(0.0, after[name] - value) / count for name, value in before.items()}
