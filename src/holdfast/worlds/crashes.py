"""Crashes of an agent: before and after every commit of its store, each followed by a rerun."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..arguments import require_whole, shown
from ..clock import VirtualClock
from ..errors import InvalidArgument, Unresolved
from ..kernel.driver import Hooks, Point
from ..store import Store
from ..store import open as open_store
from ..testing.crashes import InjectedCrash
from .actions import Failures
from .invariants import Invariant, as_invariant
from .words import said
from .world import World

Agent = Callable[[World, Store], object]

# By then every lease of the crashed process has expired.
_RESTART_SECONDS: Final = 24 * 3600.0
_FINISHED: Final = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """One crash that was tried: where, how the run after it ended, and the problems found."""

    number: int
    place: str
    ended: str
    problems: tuple[str, ...]

    def __str__(self) -> str:
        wrong = "".join(f"; {problem}" for problem in self.problems)
        return f"{self.number}. {self.place}: {self.ended}{wrong}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CrashExploration:
    """Every crash that was tried, in order; `undisturbed` are the problems without a crash."""

    crashes: Sequence[Crash]
    undisturbed: tuple[str, ...]

    @property
    def violations(self) -> list[Crash]:
        """The crashes after which an invariant was violated."""
        return [crash for crash in self.crashes if crash.problems]

    @property
    def has_passed(self) -> bool:
        """Whether no problem was found, neither after a crash nor without one."""
        return not self.undisturbed and not self.violations

    def summary(self) -> str:
        """Return a line for each crash, with the problems found."""
        without = [f"without a crash: {problem}" for problem in self.undisturbed]
        finished = sum(crash.ended == _FINISHED for crash in self.crashes)
        counts = f"{len(self.crashes)} crashes, {finished} finished afterwards"
        wrong = f"{len(self.violations)} with violations"
        return "\n".join([*map(str, self.crashes), *without, f"{counts}, {wrong}"])


def explore_crashes(
    world: World | Callable[[], World],
    agent: Agent,
    invariants: Sequence[Invariant | Callable[[World], object]],
    *,
    expects: type[Exception] | Failures = Unresolved,
    max_crashes: int = 1_000,
) -> CrashExploration:
    """Run an agent, crash it at every durable step, resume it, and check the invariants.

    `agent(world, store)` runs it to its end as its program does, also after a crash. Each crash
    has a new SQLite store, and the world is rolled back before it. Then the function runs again
    on the same store, after every lease of the dead process has expired. An exception in `expects`
    is an ordinary end of that run; any other is a violation.
    """
    require_whole("max_crashes", max_crashes, 2)
    checked = [as_invariant(what) for what in invariants]
    if not checked:
        raise InvalidArgument("invariants must not be empty: nothing would be checked")
    with _made(world) as made, tempfile.TemporaryDirectory(prefix="holdfast-crashes-") as folder:
        return _Trial(made, agent, checked, expects, Path(folder)).run(max_crashes)


class _Probe:
    """Counts the moments before and after each commit of a store, and crashes at the chosen one."""

    def __init__(self, fatal: int | None) -> None:
        self.points: list[Point] = []
        self._fatal = fatal

    @property
    def is_dead(self) -> bool:
        return len(self.points) == self._fatal

    def visit(self, point: Point) -> None:
        if not self.is_dead and point.boundary == "commit":
            self.points.append(point)
        # Code that runs while the crash unwinds must not write: a dead process would not.
        if self.is_dead:
            raise InjectedCrash(f"{point.moment} {point.call}")


class _Trial:
    def __init__(
        self,
        world: World,
        agent: Agent,
        invariants: list[Invariant],
        expects: type[Exception] | Failures,
        folder: Path,
    ) -> None:
        self._world = world
        self._agent = agent
        self._invariants = invariants
        self._expects = expects
        self._folder = folder
        self._number = 0
        self._clock = VirtualClock()
        open_store(self._url("empty"), clock=self._clock).close()

    def run(self, max_crashes: int) -> CrashExploration:
        """Try every crash, and leave the world as it was."""
        start = self._world.checkpoint("before the agent")
        try:
            count = len(self._attempt(_Probe(None)).points)
            if count > max_crashes:
                raise InvalidArgument(
                    f"there are {count:,} crashes to try, and max_crashes is {max_crashes:,}"
                )
            undisturbed = tuple(self._problems())
            crashes = []
            for number in range(1, count + 1):
                self._world.rollback(start)
                crashes.append(self._crash(number))
            return CrashExploration(crashes=crashes, undisturbed=undisturbed)
        finally:
            self._world.rollback(start)
            self._world.release(start)

    def _attempt(self, probe: _Probe) -> _Probe:
        """Run the agent on a new store, until it ends or crashes."""
        self._number += 1
        shutil.copy(self._folder / "empty.db", self._folder / f"{self._number}.db")
        try:
            self._run(probe)
        except InjectedCrash:
            self._clock.advance(_RESTART_SECONDS)
        return probe

    def _crash(self, number: int) -> Crash:
        probe = self._attempt(_Probe(number))
        if not probe.is_dead:
            ended = "this commit was not reached again"
            return Crash(number=number, place="-", ended=ended, problems=(ended,))
        point = probe.points[-1]
        ended, problems = _FINISHED, []
        try:
            self._run(_Probe(None))
        except Exception as error:
            ended = said(error)
            if not isinstance(error, self._expects):
                problems.append(f"the resumption raises {ended}")
        return Crash(
            number=number,
            place=f"{point.moment} the commit of {point.call}",
            ended=ended,
            problems=(*problems, *self._problems()),
        )

    def _run(self, probe: _Probe) -> None:
        url = self._url(str(self._number))
        hooks = Hooks(probe=probe.visit)
        store = open_store(url, clock=self._clock, durability="normal", hooks=hooks)
        with store:
            self._agent(self._world, store)

    def _problems(self) -> list[str]:
        found = ((check.name, check.problem(self._world)) for check in self._invariants)
        return [f"{name}: {problem}" for name, problem in found if problem is not None]

    def _url(self, name: str) -> str:
        return f"sqlite:///{self._folder}/{name}.db"


@contextmanager
def _made(world: World | Callable[[], World]) -> Iterator[World]:
    """Yield a world; one that was created by the function is closed at the end."""
    if isinstance(world, World):
        yield world
        return
    made = world()
    if not isinstance(made, World):
        raise InvalidArgument(
            f"world must be a World or a function that returns one, not {shown(made)}"
        )
    with made:
        yield made
