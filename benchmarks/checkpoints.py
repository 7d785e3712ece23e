"""Keeping a transcript: Holdfast beside LangGraph's savers, OpenAI's sessions and ADK's services.

One message of 2.2 KB per turn. All keepers are built up in small steps, in turn, and measured in
interleaved rounds: the save of the next turn, the bytes on disk, and then, by a keeper that was
closed and opened again, loads, forks and compactions. Every keeper is equally durable: WAL and
synchronous=FULL, or synchronous_commit=on, one commit at least for each turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import importlib.util
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table as RichTable

from . import checkpoints_growth, peers, servers
from .keepers import AsyncHoldfastKeeper, HoldfastKeeper, Keeper, Message, Place, messages
from .keepers import payload_bytes as payload_bytes_of
from .keepers_agents import AdkKeeper, OpenAiKeeper
from .keepers_langgraph import DeltaKeeper, SaverKeeper
from .measure import Contestant, Figures, Report, Table, Target, compare, environment, versions

HOLDFAST = "Holdfast append"
HOLDFAST_ALL = "Holdfast save(full list)"
HOLDFAST_ZSTD = "Holdfast append, zstd"
HOLDFAST_ASYNC = "Holdfast append, async"
SAVER, SAVER_LANGCHAIN = "LangGraph saver, dicts", "LangGraph saver, messages"
DELTA = "LangGraph DeltaChannel"
PEERS = (
    "langgraph",
    "langgraph-checkpoint-sqlite",
    "langgraph-checkpoint-postgres",
    "langchain-core",
    "openai-agents",
    "google-adk",
)
LAST_ITEMS = 50
STEP_TURNS = 50
SKIPPED_TURNS_MIN = 500
CALM_SECONDS_MAX = 0.3
CALM_TIMES = 1.5

SAVE, MEAN, WRITTEN, BYTES, PAYLOAD = "save", "mean", "written", "bytes", "payload"
COLD, AGAIN, NOTHING = "load", "again", "open+load"
LAST, LAST_AGAIN = "last 50", "again 50"
VERSION, FORK, COMPACT = "version", "fork", "compact"
LOADS = (COLD, AGAIN, NOTHING, LAST, LAST_AGAIN)
FIGURES = (SAVE, MEAN, WRITTEN, BYTES, PAYLOAD, *LOADS, VERSION, FORK, COMPACT)

NOTE = (
    "Milliseconds and megabytes. save: of turn {turns:,}; mean: of all turns, with every packing, "
    "snapshot and copy. written: kilobytes handed to the disk for a turn (SQLite on Linux). "
    "payload: bytes on disk against the messages as JSON. load and last 50: by a new store object; "
    "again: by the same object a second time; open+load: with opening it. version: load of turn "
    "{half:,}, by a new object; fork: from there. compact: a summary for the first 90 %."
)


@dataclass(frozen=True, slots=True)
class Plan:
    """How many turns, how many rounds, and how much of the growth is looked at."""

    turns: tuple[int, ...]
    rounds: int
    saves_per_round: int
    growth: checkpoints_growth.Plan


FULL = Plan((200, 1_000), 7, 5, checkpoints_growth.FULL)
QUICK = Plan((200,), 2, 3, checkpoints_growth.QUICK)


def run(console: Console, *, quick: bool) -> Report:
    """Measure everything, in a temporary directory and a server that are gone afterwards."""
    plan = QUICK if quick else FULL
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory,
        servers.postgres() as dsn,
        asyncio.Runner() as runner,
        contextlib.ExitStack() as stack,
    ):
        found = environment() | peers.versions() | versions(PEERS) | servers.settings(dsn)
        report = Report("checkpoints", found)
        calm = stack.enter_context(Calm(Path(directory) / "calm"))
        bench = Bench(plan, console, report, runner, Path(directory), dsn, calm)
        for turns in plan.turns:
            for database in ("SQLite", "PostgreSQL"):
                bench.transcripts(database, turns)
        checkpoints_growth.run(console, report, plan.growth, Path(directory), dsn)
        report.environment["load after"] = f"{os.getloadavg()[0]:.2f}"
    return report


@dataclass(slots=True)
class Spent:
    """What the turns of one keeper took so far."""

    seconds: float = 0.0
    written_bytes: int = 0

    def add(self, seconds: float, written_bytes: int) -> None:
        """Count some turns."""
        self.seconds += seconds
        self.written_bytes += written_bytes

    def per_turn(self, turns: int, place: Place) -> Figures:
        """Return the means; what a server writes is not known."""
        found = {MEAN: self.seconds / turns * 1e3}
        if place.path is not None and self.written_bytes:
            found[WRITTEN] = self.written_bytes / turns / 1e3
        return found


def _written_bytes() -> int:
    """Return what this process has handed to the kernel to write, or 0 where that is not told."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))


class Calm:
    """Waits until the disk is as quick as it was at its best, and for a moment at most.

    What one keeper leaves to be written must not delay the commits of the next; on a shared
    machine, neither should what others write.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._best_seconds = math.inf

    def wait(self) -> None:
        """Write everything to the disk, and look how long a small write takes."""
        os.sync()
        deadline = time.perf_counter() + CALM_SECONDS_MAX
        while True:
            seconds = statistics.median(self._probe() for _ in range(5))
            self._best_seconds = min(self._best_seconds, seconds)
            if seconds <= CALM_TIMES * self._best_seconds or time.perf_counter() > deadline:
                return
            time.sleep(0.02)

    def _probe(self) -> float:
        started = time.perf_counter()
        os.pwrite(self._descriptor, b"x" * 4096, 0)
        os.fdatasync(self._descriptor)
        return time.perf_counter() - started

    def __enter__(self) -> Calm:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


class Ratios(Table):
    """A table whose every figure is compared with Holdfast's, not one alone."""

    def ratio(self, name: str, figure: str, beside: str | None = None) -> float:
        """Return how many times `beside` it takes, round by round; see `_contestants`."""
        [chosen] = (each.beside for each in self.contestants if each.name == name)
        beside = beside or chosen or HOLDFAST
        pairs = zip(self.values(name, figure), self.values(beside, figure), strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)

    def show(self, console: Console) -> None:
        """Print the figures, then the same as ratios."""
        self._show(console, self.title, self.note, self._figure)
        note = f"Peers that are called in an event loop: times {HOLDFAST_ASYNC}."
        self._show(console, f"{self.title}: times {HOLDFAST}", note, self._ratio)

    def _show(
        self, console: Console, title: str, note: str, cell: Callable[[str, str], str]
    ) -> None:
        table = RichTable(title=title, title_justify="left", title_style="bold", padding=(0, 0))
        table.caption, table.caption_justify = note or None, "left"
        table.add_column("")
        for figure in FIGURES:
            table.add_column(figure, justify="right")
        for contestant in self.contestants:
            name = contestant.name
            cells = (cell(name, figure) if self.values(name, figure) else "" for figure in FIGURES)
            table.add_row(name, *cells)
        console.print(table)

    def _figure(self, name: str, figure: str) -> str:
        value = self.median(name, figure)
        return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"

    def _ratio(self, name: str, figure: str) -> str:
        if name == HOLDFAST:
            return "1"
        value = self.ratio(name, figure)
        return f"{value:,.0f}" if value >= 20 else f"{value:.1f}" if value >= 2 else f"{value:.2f}"

    def data(self) -> dict[str, object]:
        """Return the table for programs, with every ratio."""
        found = super().data()
        for row in found["rows"]:
            name = row["name"]
            row["ratios"] = {
                figure: self.ratio(name, figure) for figure in FIGURES if self.values(name, figure)
            }
        return found


@dataclass(slots=True)
class Bench:
    """The transcripts, on both databases."""

    plan: Plan
    console: Console
    report: Report
    runner: asyncio.Runner
    directory: Path
    dsn: str
    calm: Calm

    def transcripts(self, database: str, turns: int) -> None:
        """Build everybody's transcript, measure its next turns, its bytes and its loads."""
        with contextlib.ExitStack() as stack:
            places = self._places(stack, database)
            keepers = [*_all_keepers(places, self.runner, database == "SQLite", turns)]
            table = self._measure(keepers, f"{database}, {turns:,} turns", turns)
        self.report.tables.append(table)
        table.show(self.console)
        if turns == max(FULL.turns):
            self._targets(database, table)

    def _measure(self, keepers: Sequence[Keeper], title: str, turns: int) -> Ratios:
        rounds, saves = self.plan.rounds, self.plan.saves_per_round
        conversation = messages(turns)
        for keeper in keepers:
            keeper.open()
        # What was imported for the peers is not walked again by every collection of garbage.
        gc.collect()
        gc.freeze()
        spent = self._build(keepers, conversation[: turns - (rounds + 1) * saves], turns // 2)

        def save(keeper: Keeper) -> Figures:
            self.calm.wait()
            done = len(keeper.history)
            before = _written_bytes()
            seconds = [keeper.turn(message) for message in conversation[done : done + saves]]
            spent[keeper.name].add(sum(seconds), _written_bytes() - before)
            return {SAVE: statistics.median(seconds) * 1e3}

        saved = compare(title, _contestants(keepers, save), rounds=rounds, key=SAVE)
        payload_bytes = payload_bytes_of(conversation)
        fixed: dict[str, Figures] = {keeper.name: {} for keeper in keepers}
        for keeper in keepers:
            keeper.close()
            size = keeper.place.size_bytes()
            if not keeper.skips_turns:
                fixed[keeper.name] |= spent[keeper.name].per_turn(turns, keeper.place)
                fixed[keeper.name] |= {BYTES: size / 1e6, PAYLOAD: size / payload_bytes}
            keeper.open()
        loads = functools.partial(_load, calm=self.calm, turns=turns)
        loaded = compare(title, _contestants(keepers, loads), rounds=rounds, key=COLD)
        for keeper in keepers:
            keeper.close()
        merged = {
            name: [
                {**first, **fixed[name], **second}
                for first, second in zip(saved.rounds[name], loaded.rounds[name], strict=True)
            ]
            for name in saved.rounds
        }
        note = NOTE.format(turns=turns, half=turns // 2)
        return Ratios(title, SAVE, saved.contestants, merged, note)

    def _build(
        self, keepers: Sequence[Keeper], conversation: Sequence[Message], needed_turn: int
    ) -> dict[str, Spent]:
        """Save a conversation with everybody, some turns each at a time; return what it took."""
        spent = {keeper.name: Spent() for keeper in keepers}
        for start in range(0, len(conversation), STEP_TURNS):
            for keeper in keepers:
                self.calm.wait()
                seconds, before = 0.0, _written_bytes()
                for message in conversation[start : start + STEP_TURNS]:
                    if keeper.skips_turns and len(keeper.history) + 1 != needed_turn:
                        keeper.history.append(keeper.native(message))
                    else:
                        seconds += keeper.turn(message)
                spent[keeper.name].add(seconds, _written_bytes() - before)
        return spent

    def _places(self, stack: contextlib.ExitStack, database: str) -> Iterator[Place]:
        """Yield a new place for every keeper; all are gone when the stack is closed."""
        if database == "SQLite":
            directory = tempfile.TemporaryDirectory(dir=self.directory)
            path = Path(stack.enter_context(directory))
            for number in range(100):
                yield Place(path=path / f"{number}.db")
        for _ in range(100):
            (schema,) = stack.enter_context(servers.schemas(self.dsn, 1))
            place = Place(dsn=self.dsn, schema=schema)
            place.create()
            yield place

    def _targets(self, database: str, table: Ratios) -> None:
        names = {contestant.name for contestant in table.contestants}

        def target(
            text: str,
            name: str,
            figure: str,
            at_least: float | None = None,
            at_most: float | None = None,
            beside: str = HOLDFAST,
        ) -> None:
            if name in names:
                ratio = table.ratio(name, figure, beside)
                text = f"{database}: {text}"
                self.report.targets.append(Target(text, ratio, at_least, at_most))

        if database == "SQLite":
            target("append, times faster than LangGraph with messages", SAVER_LANGCHAIN, SAVE, 60)
            target("append, times faster than LangGraph with dicts", SAVER, SAVE, 50)
            target("save(full list), the same", SAVER, SAVE, 20, beside=HOLDFAST_ALL)
            target("bytes, times smaller than LangGraph's", SAVER, BYTES, 400)
            target("load, times faster than LangGraph with dicts", SAVER, COLD, 1.3)
            target("load, times faster than LangGraph with messages", SAVER_LANGCHAIN, COLD, 4)
            self._target_last(table)
            for name, bound in ((HOLDFAST, 1.2), (HOLDFAST_ZSTD, 0.45)):
                if name not in names:
                    continue
                text = f"SQLite: bytes of {name} against the payload"
                figure = table.median(name, PAYLOAD)
                self.report.targets.append(Target(text, figure, at_most=bound))
        else:
            target("append, times faster than LangGraph with dicts", SAVER, SAVE, 100)
        target("append, times faster than DeltaChannel", DELTA, SAVE, 1.5)
        bound = 6 if database == "SQLite" else 3
        target("bytes, times smaller than DeltaChannel's", DELTA, BYTES, bound)

    def _target_last(self, table: Ratios) -> None:
        if SAVER not in table.rounds:
            return
        pairs = zip(table.values(SAVER, COLD), table.values(HOLDFAST, LAST), strict=True)
        ratio = statistics.median(theirs / ours for theirs, ours in pairs)
        text = "SQLite: last 50, cold, times faster than LangGraph's cold load"
        self.report.targets.append(Target(text, ratio, at_least=10))


def _all_keepers(
    places: Iterator[Place], runner: asyncio.Runner, on_sqlite: bool, turns: int
) -> Iterator[Keeper]:
    """Yield everybody who is installed."""
    yield HoldfastKeeper(HOLDFAST, next(places))
    yield HoldfastKeeper(HOLDFAST_ALL, next(places), saves_all=True)
    if _has("zstandard"):
        yield HoldfastKeeper(HOLDFAST_ZSTD, next(places), compression="zstd")
    yield AsyncHoldfastKeeper(HOLDFAST_ASYNC, next(places), runner)
    if _has("langgraph"):
        yield SaverKeeper(SAVER, next(places))
        skips_turns = not on_sqlite and turns > SKIPPED_TURNS_MIN
        yield SaverKeeper(SAVER_LANGCHAIN, next(places), langchain=True, skips_turns=skips_turns)
    if _has("langgraph.channels.delta"):
        yield DeltaKeeper(DELTA, next(places))
    if _has("agents"):
        if on_sqlite:
            yield OpenAiKeeper("OpenAI SQLiteSession", next(places), runner, sqlalchemy=False)
        yield OpenAiKeeper("OpenAI SQLAlchemySession", next(places), runner, sqlalchemy=True)
    if _has("google.adk"):
        if on_sqlite:
            yield AdkKeeper("ADK SqliteSession…", next(places), runner, sqlalchemy=False)
        yield AdkKeeper("ADK DatabaseSession…", next(places), runner, sqlalchemy=True)


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _contestants(keepers: Sequence[Keeper], work: Callable[[Keeper], Figures]) -> list[Contestant]:
    """Return the keepers as contestants: an event loop is compared with an event loop."""

    def beside(keeper: Keeper) -> str:
        is_async_peer = keeper.runner is not None and keeper.name != HOLDFAST_ASYNC
        return HOLDFAST_ASYNC if is_async_peer else HOLDFAST

    return [
        Contestant(keeper.name, functools.partial(work, keeper), beside(keeper))
        for keeper in keepers
    ]


def _load(keeper: Keeper, *, calm: Calm, turns: int) -> Figures:
    """Do once what a keeper offers: loads by a new object, and then by the same once more."""
    keeper.close()
    calm.wait()
    started = time.perf_counter()
    keeper.open()
    opening = time.perf_counter() - started
    seconds = {}
    for figure in (COLD, AGAIN):
        seconds[figure], loaded = keeper.timed(keeper.load)
        assert len(loaded) == turns, f"{keeper.name} lost messages"
    seconds[NOTHING] = opening + seconds[COLD]
    if keeper.can_load_last:
        _reopen(keeper)
        for figure in (LAST, LAST_AGAIN):
            seconds[figure], loaded = keeper.timed(lambda: keeper.load_last(LAST_ITEMS))
            assert len(loaded) == LAST_ITEMS, f"{keeper.name} loaded another end"
    _reopen(keeper)
    half = turns // 2
    if keeper.can_load_version:
        seconds[VERSION], loaded = keeper.timed(lambda: keeper.load_version(half))
        assert len(loaded) == half, f"{keeper.name} loaded another version"
    if keeper.can_fork:
        seconds[FORK], _ = keeper.timed(lambda: keeper.fork(half))
    if keeper.can_compact:
        seconds[COMPACT], _ = keeper.timed(keeper.begin_compaction(keeper.history))
    return {figure: value * 1e3 for figure, value in seconds.items()}


def _reopen(keeper: Keeper) -> None:
    keeper.close()
    keeper.open()
