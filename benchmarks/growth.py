"""What must not grow: the save of a turn with the turns before it, a page of sessions with all."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from rich.console import Console

import holdfast

from . import servers
from .keepers import Message, messages
from .measure import TIME, Contestant, Figures, Report, Table, Target, compare

RUN_TURNS = 64
"""A full run of single items is packed into one row: every 64th append does that too."""
ITEMS_PER_VERSION = 1_000
PAGE_SESSIONS = 100
FLAT = 1.25
MEAN = "mean µs"
COLUMNS = (
    "id",
    "root_id",
    "agent",
    "status",
    "head",
    "metadata",
    "created_at",
    "updated_at",
    "last_resumed_at",
)


@dataclass(frozen=True, slots=True)
class Plan:
    """How far it is followed."""

    items: tuple[int, ...]
    rounds: int
    single_turns: int
    sessions: int


FULL = Plan((100, 1_000, 10_000, 100_000), 5, 10_000, 100_000)
QUICK = Plan((100, 1_000, 10_000), 2, 0, 20_000)


def run(console: Console, report: Report, plan: Plan, directory: Path, dsn: str) -> None:
    """Measure both databases."""
    with servers.schemas(dsn, 1) as (schema,):
        places: dict[str, tuple[str, str | None]] = {
            "SQLite": (f"sqlite:///{directory / 'growth.db'}", None),
            "PostgreSQL": (dsn, schema),
        }
        for database, (url, namespace) in places.items():
            with holdfast.open(url, namespace=namespace) as store:
                growth = Growth(console, report, plan, database, store)
                growth.saves()
                growth.singles()
                growth.pages(dsn, schema)


@dataclass(slots=True)
class Growth:
    """One database."""

    console: Console
    report: Report
    plan: Plan
    database: str
    store: holdfast.Store

    def saves(self) -> None:
        """Compare appends and windowed loads on transcripts of very different lengths."""
        sessions = {count: self._prepared(count) for count in self.plan.items}
        (message,) = messages(1)
        names = {count: f"after {count:,} messages" for count in sessions}
        first = names[min(names)]

        def work(session: holdfast.Session) -> Figures:
            append = functools.partial(_append, session, message)
            appends = [_timed(append) for _ in range(RUN_TURNS)]
            last = _timed(lambda: session.latest(last=50))
            return {
                TIME: statistics.median(appends) * 1e6,
                MEAN: statistics.mean(appends) * 1e6,
                "last 50 µs": last * 1e6,
            }

        contestants = [
            Contestant(names[count], functools.partial(work, session), first)
            for count, session in sessions.items()
        ]
        title = f"{self.database}: append of one message"
        note = f"mean: with the packing of every {RUN_TURNS}th"
        table = compare(title, contestants, rounds=self.plan.rounds, key=TIME, note=note)
        self._add(table)
        longest = names[max(names)]
        self._flat(f"append {longest} against {first}", table.times_slower(longest, first))

    def singles(self) -> None:
        """Append message by message, a version each, beside sessions that are new each time."""
        count = self.plan.single_turns
        if not count:
            return
        long, new = self.store.session("singles"), self.store.session()
        pool = messages(200)
        seconds: dict[str, list[float]] = {"long": [], "new": []}
        for number in range(count):
            message = pool[number % len(pool)]
            if number % RUN_TURNS == 0:
                new = self.store.session()
            pair = {"long": long, "new": new} if number >= count * 9 // 10 else {"long": long}
            for name, session in pair.items():
                seconds[name].append(_timed(functools.partial(_append, session, message)))
        last = f"turns {count * 9 // 10:,} to {count:,}"
        parts = {"new sessions": seconds["new"], last: seconds["long"][-count // 10 :]}
        rounds = {
            name: [{TIME: statistics.median(part) * 1e6, MEAN: statistics.mean(part) * 1e6}]
            for name, part in parts.items()
        }
        contestants = [Contestant(name, dict, "new sessions") for name in rounds]
        title = f"{self.database}: a long session, turn by turn, and new sessions at the same time"
        table = Table(title, TIME, contestants, rounds)
        self._add(table)
        times = table.times_slower(last, "new sessions")
        self._flat(f"{last} against new sessions", times)

    def pages(self, dsn: str, schema: str) -> None:
        """Compare pages of sessions: the first, one from the middle, the last, and rare ones."""
        count = self.plan.sessions
        rows = _session_rows(self.store, count)
        if self.database == "SQLite":
            _insert_sqlite(self.store, rows)
        else:
            _copy_postgres(dsn, schema, rows)
        newest = self.store.session("newest").number
        oldest = newest - count
        wanted: dict[str, Callable[[], Any]] = {
            "first page": lambda: self._page(after=oldest - 1),
            "middle page": lambda: self._page(after=oldest + count // 2),
            "last page": lambda: self._page(after=newest - PAGE_SESSIONS - 1),
            "last page of one status": lambda: self._page(
                after=newest - PAGE_SESSIONS - 1, status="active"
            ),
            "the few of a rare agent": lambda: self._page(agent="rare"),
            "the few of a rare status": lambda: self._page(status="failed"),
        }
        contestants = [
            Contestant(name, functools.partial(_median, page), "first page")
            for name, page in wanted.items()
        ]
        title = f"{self.database}: {PAGE_SESSIONS} of {count:,} sessions"
        table = compare(title, contestants, rounds=self.plan.rounds, key=TIME)
        self._add(table)
        for name in ("middle page", "last page", "the few of a rare agent"):
            self._flat(f"{name} of {count:,} sessions", table.times_slower(name, "first page"))

    def _page(self, **filters: Any) -> list[holdfast.SessionInfo]:
        return self.store.sessions(limit=PAGE_SESSIONS, **filters)

    def _prepared(self, count: int) -> holdfast.Session:
        """Return a session that has so many messages, many to a version."""
        session = self.store.session(f"with {count} messages")
        pool = messages(200) * (ITEMS_PER_VERSION // 200)
        for start in range(0, count, ITEMS_PER_VERSION):
            session.append("messages", pool[: min(ITEMS_PER_VERSION, count - start)])
        return session

    def _add(self, table: Table) -> None:
        self.report.tables.append(table)
        table.show(self.console)

    def _flat(self, text: str, times: float) -> None:
        self.report.targets.append(Target(f"{self.database}: {text}", times, at_most=FLAT))


def _append(session: holdfast.Session, message: Message) -> None:
    session.append("messages", [message])


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _median(work: Callable[[], object]) -> Figures:
    return {TIME: statistics.median(_timed(work) for _ in range(5)) * 1e6}


def _session_rows(store: holdfast.Store, count: int) -> list[tuple[Any, ...]]:
    """Return rows of sessions; to start each by itself would take a commit each."""
    codec, body = store.runtime.codec, store.runtime.codec.encode({})
    rows = []
    for number in range(count):
        id = f"session-{number:08}"
        sealed = codec.seal(body, context=("hf_sessions", id))
        is_rare = number % (count // 5) == 0
        agent, status = ("rare", "failed") if is_rare else ("common", "active")
        rows.append((id, id, agent, status, number, sealed, *[1_800_000_000_000] * 3))
    return rows


def _insert_sqlite(store: holdfast.Store, rows: Sequence[tuple[Any, ...]]) -> None:
    marks = ", ".join("?" * len(COLUMNS))
    driver: Any = store.runtime.driver
    with driver.twin().bulk() as connection:
        text = f"INSERT INTO hf_sessions ({', '.join(COLUMNS)}) VALUES ({marks})"
        connection.executemany(text, rows)
        connection.executemany(
            "INSERT INTO hf_trees (root_id) VALUES (?)", [(row[0],) for row in rows]
        )


def _copy_postgres(dsn: str, schema: str, rows: Sequence[tuple[Any, ...]]) -> None:
    with psycopg.connect(dsn) as connection, connection.cursor() as cursor:
        for table, columns, values in (
            ("hf_sessions", COLUMNS, rows),
            ("hf_trees", ("root_id",), [row[:1] for row in rows]),
        ):
            text = f'COPY "{schema}".{table} ({", ".join(columns)}) FROM STDIN'
            with cursor.copy(text.encode()) as copy:
                for row in values:
                    copy.write_row(row)
        cursor.execute(f'ANALYZE "{schema}".hf_sessions'.encode())
