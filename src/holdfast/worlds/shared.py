"""An exploration by several processes, which share one frontier.

This process decides what is tried next: it publishes batches of the frontier in the store, as rows
and work items, and reads from the log of actions what came of them. Workers lease the items; each
has its own world. If this process is killed, its workers leave, and whoever resumes the exploration
publishes again what has no step yet.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final

from ..ciphers import keys_of_environment
from ..errors import (
    Conflict,
    ExplorationAborted,
    HoldfastError,
    InvalidArgument,
    LeaseLost,
)
from ..explorations import KeptStep
from ..explorations.frontier import Frontier
from ..kernel.backoff import Backoff
from ..kernel.url import SqliteTarget
from ..store import open as open_store
from .actions import Action
from .findings import Findings, Limits
from .folders import OwnFolder, sweep_folders
from .graph import State, StateGraph
from .invariants import Invariant
from .journal import discard, frontier_of
from .recording import Found, Recording, read_found, read_outcome, require_same, settings_of
from .reproduce import place_of
from .result import Ended, Exploration, Progress
from .strategies import Strategy
from .system import Observation
from .values import decode, encode
from .world import Leak, World

if TYPE_CHECKING:
    from ..kernel.operation import Sync
    from ..session import DrivenSession
    from ..store import Store

BATCH_MAX: Final = 16
LEASE_SECONDS: Final = 15.0
SCRATCH: Final = "frontier"
"""The id of an exploration without a store, and the kind of its folder."""
_AHEAD: Final = 2
_PAUSE_SECONDS: Final = (0.002, 0.05)
_LOOK_SECONDS: Final = 1.0
_CLOSE_SECONDS: Final = 60
# So many processes may die before they have tried anything.
_STARTS_MAX: Final = 3


@contextmanager
def scratch_store() -> Iterator[Store]:
    """Open a store for the frontier of an exploration without one; it is removed afterwards."""
    sweep_folders(SCRATCH)
    folder = OwnFolder(SCRATCH)
    try:
        with open_store(f"sqlite:///{folder.path}/store.db", durability="normal") as store:
            yield store
    finally:
        folder.close()


class _Process:
    """A worker process."""

    def __init__(self, task: dict[str, Any]) -> None:
        paths = [path or os.getcwd() for path in sys.path]
        # What an action prints must not get into the output of a command; the task contains
        # the address of the store, which others must not see among the arguments.
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.worker_process"],
            stdin=subprocess.PIPE,
            stdout=2,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        self.holder = f"{socket.gethostname()}:{self.process.pid}:{secrets.token_hex(4)}"
        assert self.process.stdin is not None
        with suppress(BrokenPipeError), self.process.stdin as stdin:
            stdin.write(encode({**task, "holder": self.holder}, "task"))

    def close(self) -> None:
        """Wait until the process, which was told to leave, has cleaned up and ended."""
        try:
            self.process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class SharedExplorer(Findings):
    """Publishes what a strategy chooses, and collects what workers find."""

    def __init__(
        self,
        make_world: Callable[[], World],
        actions: Sequence[Action],
        invariants: Sequence[Invariant],
        strategy: Strategy,
        limits: Limits,
        on_progress: Callable[[Progress], object] | None,
        workers: int,
    ) -> None:
        super().__init__(StateGraph(), actions, invariants, strategy, limits, on_progress)
        self._make_world = make_world
        self._names = {
            "world": _name(make_world, make_world),
            "actions": [_name(action, action.run) for action in actions],
            "invariants": [_name(check, check.check) for check in invariants],
        }
        self._count = workers
        self._checks = {check.name: check for check in invariants}
        self._processes: list[_Process] = []
        self._is_begun = False
        self._possible: dict[str, list[int] | None] = {}
        # What was published, and has no step yet.
        self._out: set[tuple[str, int]] = set()
        self._last_state = self._last_step = 0
        self._looked_at = 0.0
        self._failed_starts = 0
        self._leaks: list[Leak] = []
        self._store: Store
        self._frontier: Frontier[Sync]
        self._task: dict[str, Any]

    def record(self, store: Store, session: DrivenSession, commit_every: int) -> None:
        """Publish the frontier in a store, and continue from what is already there."""
        self._store, self._frontier = store, frontier_of(session)
        self._task = {
            **self._names,
            **_address(store),
            "id": session.id,
            "parent": os.getpid(),
            "lease_seconds": LEASE_SECONDS,
            "commit_every": commit_every,
            "also": {"max_depth": self._limits.depth},
        }
        recording = Recording(self._frontier, self._choices, self._invariants)
        if self._frontier.checkpoints():
            # It was killed while it explored a single world, which is not in its initial state.
            with self._make_world() as world:
                recording.restore_initial(world)
                recording.forget_initial(world)
        self._recording = recording

    def run(self, *, stop_on_violation: bool) -> Exploration:
        """Explore until the end or a limit; every worker leaves its world as it was."""
        result = self.result
        with ExitStack() as closing:
            closing.callback(self._close)
            try:
                self._begin()
                for _ in range(self._count):
                    self._processes.append(_Process(self._task))
                result.ended = self._loop(stop_on_violation)
            except KeyboardInterrupt:
                result.ended = "interrupted"
        self._conclude()
        result.seconds = self._seconds()
        result.leaks = tuple(self._leaks)
        return result

    def _close(self) -> None:
        try:
            # If another process has taken over, everything is its own now.
            with suppress(LeaseLost):
                if self._is_begun:
                    self._frontier.add((), (), self._totals())
                discard(self._frontier, with_workers=False)
        finally:
            # All are told to end before any is waited for, so that they end at the same time.
            for each in self._processes:
                each.process.terminate()
            for each in self._processes:
                each.close()
        with suppress(LeaseLost):
            discard(self._frontier)

    def _loop(self, stop_on_violation: bool) -> Ended:
        pause = Backoff(*_PAUSE_SECONDS)
        while True:
            has_moved = self._merge(stop_on_violation) if self._is_begun else self._begin()
            if (ended := self._ended(stop_on_violation)) is not None:
                return ended
            if self._is_begun and not self._out and not len(self._strategy):
                for state in self._nearer():
                    self._discover(state)
                if not len(self._strategy):
                    return "complete"
            self._publish()
            self._look_after()
            if has_moved:
                pause = Backoff(*_PAUSE_SECONDS)
            # Workers that have enough to do need the processor more than this process does.
            if not has_moved or len(self._out) > self._wanted() // 2:
                time.sleep(pause.pause_seconds())

    def _ended(self, stop_on_violation: bool) -> Ended | None:
        """Return why the exploration must end now, or None."""
        limit = self._limits.reached(self.result, self._started)
        if limit is None and stop_on_violation and self._has_found():
            return "stop_on_violation"
        return limit

    def _begin(self) -> bool:
        """Read what is in the store, once the first worker has begun; return whether it has."""
        known = self._frontier.world().settings
        if known is None:
            return False
        settings = settings_of(None, self._choices, self._invariants)
        require_same(self._frontier.id, known, {**settings, "max_depth": self._limits.depth})
        assert self._recording is not None
        recorded = self._recording.read(self.result.graph)
        self._last_state, self._last_step = recorded.last_state, recorded.last_step
        self._load(recorded)
        for found in recorded.found:
            self._leaks += found.leaks
        self._is_begun = True
        return True

    def _merge(self, stop_on_violation: bool) -> bool:
        """Take over what workers have found; return whether there was anything."""
        steps = self._frontier.steps(after=self._last_step)
        states = self.result.graph.states
        if any(step.to_id is not None and step.to_id not in states for step in steps):
            self._see()
        for step in steps:
            # What was tried beyond a limit stays in the store, and counts if this is resumed.
            if self._ended(stop_on_violation) is not None:
                break
            self._take(step)
        return bool(steps)

    def _see(self) -> None:
        """Read the states that were found since the last time."""
        while page := self._frontier.states(after=self._last_state):
            self._last_state = page[-1].number
            for kept in page:
                body = decode(kept.body)
                seen = (Observation(*each) for each in body["observations"])
                self.result.graph.add_state(kept.id, seen)
                self._possible[kept.id] = body["choices"]

    def _take(self, step: KeptStep) -> None:
        """Take over what was tried and where it led."""
        self._last_step, self._failed_starts = step.number, 0
        self._out.discard((step.from_id, step.candidate))
        graph, body = self.result.graph, decode(step.body)
        if step.to_id is not None:
            action, arguments = self._choices[step.candidate]
            origin, reached = graph.states[step.from_id], graph.states[step.to_id]
            self.result.steps += 1
            self._tried.add(action.name)
            graph.add_transition(origin, reached, action, arguments, read_outcome(body["outcome"]))
            if self._is_to_discover(reached):
                self._discover(reached)
        self._note_found(read_found(body["found"], self._checks))
        if self._on_progress is not None:
            self._on_progress(self._progress())

    def _discover(self, state: State) -> None:
        self._cut.discard(state.id)
        if self._is_too_deep(state):
            self._cut.add(state.id)
            return
        numbers = self._possible.get(state.id)
        # If it was too deep for a single process, nobody has looked what is possible there.
        self._add_all(state, range(len(self._choices)) if numbers is None else numbers)

    def _note_found(self, found: Found) -> None:
        for violation in found.violations:
            self._note(violation)
        for warning in found.warnings:
            self._warn(warning)
        self._leaks += found.leaks

    def _wanted(self) -> int:
        """Return how much should be published, so that no worker has to wait."""
        return _AHEAD * self._count * BATCH_MAX

    def _publish(self) -> None:
        """Publish what the strategy chooses next, but no more than the limit on steps allows."""
        room = min(self._wanted(), self._limits.steps - self.result.steps) - len(self._out)
        waiting = len(self._strategy) + len(self._out)
        size = min(max(waiting // (_AHEAD * self._count), 1), BATCH_MAX)
        batches: list[list[tuple[str, int]]] = []
        while room > 0 and len(self._strategy):
            batch = [self._chosen() for _ in range(min(size, room, len(self._strategy)))]
            room -= len(batch)
            batches.append(batch)
        if batches:
            self._frontier.publish(batches, self._totals())
            self._out.update(*batches)

    def _chosen(self) -> tuple[str, int]:
        candidate = self._strategy.next()
        return candidate.state.id, candidate.number

    def _look_after(self) -> None:
        """Replace workers that died, and give what others had to someone else."""
        for each in list(self._processes):
            if each.process.poll() is not None:
                self._replace(each)
        now = time.monotonic()
        if now - self._looked_at > min(_LOOK_SECONDS, self._task["lease_seconds"] / 3):
            self._looked_at = now
            self._store.work.sweep()

    def _replace(self, dead: _Process) -> None:
        """Give another process what a dead one had; raise what it has said, if anything."""
        work, frontier = self._store.work, self._frontier
        for member in work.list(queue=frontier.workers_queue):
            if member.last_holder == dead.holder and member.failures:
                raise _failure(member.error or "")
        held = work.list(queue=frontier.queue, holder=dead.holder)
        for item in held:
            with suppress(LeaseLost):
                work.get(item.id, fence=item.fence).fail("the process died", delay_seconds=0)
        self._failed_starts += not held
        if self._failed_starts >= _STARTS_MAX:
            raise ExplorationAborted(
                f"Workers exit as soon as they start, with exit code {dead.process.returncode}."
            )
        self._processes[self._processes.index(dead)] = _Process(self._task)

    def _progress(self) -> Progress:
        now = super()._progress()
        return replace(now, waiting=now.waiting + len(self._out))


def is_dead(holder: str) -> bool:
    """Whether a worker, as its leases name it, was a process of this machine that has ended."""
    host, _, rest = holder.partition(":")
    pid = rest.partition(":")[0]
    if host != socket.gethostname() or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _address(store: Store) -> dict[str, Any]:
    """Return how another process opens the store."""
    runtime = store.runtime
    if runtime.codec.has_cipher and keys_of_environment()[0] is None:
        raise InvalidArgument(
            "workers open the store themselves, so its keys must be in the file that "
            "$HOLDFAST_KEYS_FILE names"
        )
    target, settings = runtime.target, runtime.settings
    if isinstance(target, SqliteTarget):
        # A temporary store has a file too.
        target = replace(target, path=getattr(runtime.driver, "path", target.path))
    return {
        "url": target.url,
        "options": {
            "durability": settings.durability,
            "busy_timeout_seconds": settings.busy_timeout_seconds,
        },
        "limits": asdict(runtime.codec.limits),
    }


def _failure(said: str) -> HoldfastError:
    """Return the error that a worker has ended with."""
    kind, _, message = said.partition(": ")
    for known in (Conflict, InvalidArgument):
        if kind == known.__name__:
            return known(message)
    return ExplorationAborted(f"A worker failed. {said}")


def _name(thing: object, function: Callable[..., Any]) -> str:
    return ":".join(place_of(thing, function))
