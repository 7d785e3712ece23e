"""What must not grow: the save of a turn with the turns before it."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

import holdfast

from . import servers
from .keepers import Message, messages
from .measure import TIME, Contestant, Figures, Report, Table, Target, compare

RUN_TURNS = 64
"""A full run of single items is packed into one row: every 64th append does that too."""
ITEMS_PER_VERSION = 1_000
FLAT = 1.25
MEAN = "mean µs"


@dataclass(frozen=True, slots=True)
class Plan:
    """How far it is followed."""

    items: tuple[int, ...]
    rounds: int
    single_turns: int


FULL = Plan((100, 1_000, 10_000, 100_000), 5, 10_000)
QUICK = Plan((100, 1_000, 10_000), 2, 0)


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
