"""An exploration by several processes, which share one frontier.

This process has the frontier, and is the only one that writes to the store; each worker has its own
world. What a worker was given belongs to it until it has reported or died; in that case another one
gets it. If this process dies, the workers end too, and what they had not reported is still to be
tried.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection, wait
from typing import Any, Final

from ..errors import Conflict, ExplorationAborted
from ..explorations import Journal
from .actions import Action
from .findings import Findings, Limits
from .graph import State, StateGraph
from .invariants import Invariant
from .recording import Found, Notes, Recording, read_outcome
from .reproduce import place_of
from .result import Ended, Exploration, Progress
from .strategies import Candidate, Strategy
from .system import Observation
from .values import canonical, decode, encode
from .world import Leak, World

_BATCH_MAX = 16
_POLL_SECONDS = 0.5
_CLOSE_SECONDS = 60
# An action that has killed this many processes is left out.
_DEATHS_MAX = 3
_NOTHING_FOUND: Final[dict[str, Any]] = {"violations": [], "warnings": []}


class _Worker:
    """A worker process, and the tasks it was given."""

    def __init__(self, task: bytes) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            number = theirs.fileno()
            paths = [path or os.getcwd() for path in sys.path]
            # What an action prints must not get into the output of a command.
            self.process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.worker", str(number)],
                pass_fds=[number],
                stdin=subprocess.DEVNULL,
                stdout=2,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )
            self.connection = Connection(ours.detach())
        self.is_ready = False
        self.batch: deque[Candidate] = deque()
        # The states that the worker knows, and those in which nothing is left to try.
        self.known: set[str] = set()
        self.done: list[str] = []
        self.send(task)

    def send(self, message: bytes) -> None:
        """Send a message; if the process has died, `hear` finds out."""
        try:
            self.connection.send_bytes(message)
        except ConnectionError:
            return

    def hear(self) -> dict[str, Any] | None:
        """Return the next message, or None if the process has died."""
        try:
            message: dict[str, Any] = decode(self.connection.recv_bytes())
        except (EOFError, ConnectionError):
            return None
        return message

    def close(self) -> None:
        """End the process, and wait until it has cleaned up."""
        self.connection.close()
        try:
            self.process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class SharedExplorer(Findings):
    """Distributes what a strategy chooses to workers, and collects what they find."""

    def __init__(
        self,
        make_world: Callable[[], World],
        actions: Sequence[Action],
        invariants: Sequence[Invariant],
        strategy: Strategy,
        limits: Limits,
        on_progress: Callable[[Progress], object] | None,
        workers: int,
        store_id: str | None,
    ) -> None:
        super().__init__(StateGraph(), actions, invariants, strategy, limits, on_progress)
        task = {
            "world": _name(make_world, make_world),
            "actions": [_name(action, action.run) for action in actions],
            "invariants": [_name(check, check.check) for check in invariants],
            "store_id": store_id,
        }
        self._make_world = make_world
        self._task = encode(task, "task")
        self._count = workers
        self._workers: list[_Worker] = []
        self._settings: dict[str, Any] | None = None
        self._reader: Notes = _Reader(self._choices, invariants)
        self._numbers = {
            (action.name, canonical(dict(arguments), "arguments")): number
            for number, (action, arguments) in enumerate(self._choices)
        }
        self._possible: dict[str, list[int]] = {}
        self._again: deque[Candidate] = deque()
        self._deaths: dict[tuple[str, int], int] = {}
        self._failed_starts = 0
        self._leaks: list[Leak] = []

    def record(self, journal: Journal, commit_every: int) -> None:
        """Record what is found in a store, and continue from what is already there."""
        given = (self._choices, self._invariants, commit_every)
        recording = Recording(journal, *given, totals=self._totals)
        if journal.checkpoints():
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
                for _ in range(self._count):
                    self._workers.append(_Worker(self._task))
                result.ended = self._loop(stop_on_violation)
            except KeyboardInterrupt:
                result.ended = "interrupted"
        self._conclude()
        result.seconds = self._seconds()
        result.leaks = tuple(self._leaks)
        return result

    def _close(self) -> None:
        if self._recording is not None:
            self._recording.commit()
        # All are told to end before any is waited for, so that they end at the same time.
        for worker in self._workers:
            worker.connection.close()
        for worker in self._workers:
            worker.close()

    def _loop(self, stop_on_violation: bool) -> Ended:
        while True:
            if (ended := self._ended(stop_on_violation)) is not None:
                return ended
            if self._is_exhausted() and not any(each.batch for each in self._workers):
                for state in self._nearer():
                    self._discover(state)
            self._assign()
            busy = [each for each in self._workers if each.batch or not each.is_ready]
            if not any(each.batch for each in busy) and self._is_exhausted():
                return "complete"
            heard = wait([each.connection for each in busy], _POLL_SECONDS)
            for worker in busy:
                # What other workers have tried beyond a limit is ignored.
                if worker.connection in heard and self._ended(stop_on_violation) is None:
                    self._hear(worker)

    def _ended(self, stop_on_violation: bool) -> Ended | None:
        """Return why the exploration must end now, or None."""
        limit = self._limits.reached(self.result, self._started)
        if limit is None and stop_on_violation and self._has_found():
            return "stop_on_violation"
        return limit

    def _is_exhausted(self) -> bool:
        is_begun = any(worker.is_ready for worker in self._workers)
        return is_begun and not self._again and not len(self._strategy)

    def _assign(self) -> None:
        for worker in self._workers:
            if worker.is_ready and not worker.batch:
                worker.batch.extend(self._next_batch())
                if worker.batch:
                    worker.send(self._task_for(worker))

    def _next_batch(self) -> Iterator[Candidate]:
        """Yield the next candidates, as long as they are in the same state."""
        state: State | None = None
        for _ in range(_BATCH_MAX):
            if not self._again and not len(self._strategy):
                return
            candidate = self._again.popleft() if self._again else self._strategy.next()
            if state is not None and candidate.state is not state:
                self._again.appendleft(candidate)
                return
            state = candidate.state
            yield candidate

    def _task_for(self, worker: _Worker) -> bytes:
        state = worker.batch[0].state
        path: list[tuple[int, str, str]] = []
        step, at = state.found_by, state.id
        while at not in worker.known and step is not None:
            given = canonical(dict(step.step.arguments), "arguments")
            path.append((self._numbers[step.step.action, given], step.from_id, step.to_id))
            worker.known.add(at)
            at = step.from_id
            step = self.result.graph.states[at].found_by
        task = {
            "state": state.id,
            "path": path[::-1],
            "numbers": [candidate.number for candidate in worker.batch],
            "done": worker.done,
        }
        worker.done = []
        return encode(task, "task")

    def _hear(self, worker: _Worker) -> None:
        message = worker.hear()
        if message is None:
            self._replace(worker)
        elif "failed" in message:
            raise ExplorationAborted(f"A worker failed. {message['failed']}")
        elif "settings" in message:
            self._begin(message["settings"])
        else:
            self._leaks += [Leak(**leak) for leak in message["leaks"]]
            for id, body in message["states"]:
                self._see(worker, id, decode(body))
            for from_id, number, to_id, body in message["steps"]:
                assert (from_id, number) == (worker.batch[0].state.id, worker.batch[0].number)
                self._take(worker.batch.popleft(), to_id, decode(body))

    def _begin(self, settings: dict[str, Any]) -> None:
        """Compare the settings of a worker with those of the others, and with the store's."""
        if self._settings is None:
            self._settings = settings
            if self._recording is not None:
                depth = {"max_depth": self._limits.depth}
                if self._recording.begin({**settings, **depth}):
                    self._load(self._recording.read(self.result.graph))
        elif settings != self._settings:
            raise Conflict("The workers' worlds have different systems, or different actions.")

    def _see(self, worker: _Worker, id: str, body: dict[str, Any]) -> None:
        """Record a state that a worker has reached; its first one is the initial state."""
        graph = self.result.graph
        initial = graph.initial
        state, _ = graph.add_state(id, (Observation(*seen) for seen in body["observations"]))
        worker.known.add(id)
        self._possible.setdefault(id, body["choices"])
        if worker.is_ready:
            return
        worker.is_ready, self._failed_starts = True, 0
        if initial is not None and state is not initial:
            raise Conflict(
                "The worlds of the workers have different initial states, or not the one that the "
                "exploration began with: each must be newly created, with its own systems."
            )
        if self._is_to_discover(state):
            self._note_found(self._reader.read_found(body["found"]))
            self._add_all(state, self._possible[id])
            if self._recording is not None:
                self._recording.add_initial(state, self._possible[id], self._taken())

    def _take(self, candidate: Candidate, to_id: str | None, body: dict[str, Any]) -> None:
        """Record what was tried and where it led."""
        graph, origin = self.result.graph, candidate.state
        reached = None if to_id is None else graph.states[to_id]
        outcome = None if body["outcome"] is None else read_outcome(body["outcome"])
        if reached is not None and outcome is not None:
            self.result.steps += 1
            self._tried.add(candidate.action.name)
            graph.add_transition(origin, reached, candidate.action, candidate.arguments, outcome)
            if self._is_to_discover(reached):
                self._discover(reached)
        self._note_found(self._reader.read_found(body["found"]))
        if self._recording is not None:
            self._recording.add_step(candidate, reached, outcome, self._taken())
        self._left[origin.id] -= 1
        if not self._left[origin.id]:
            for worker in self._workers:
                worker.done.append(origin.id)
        if self._on_progress is not None:
            self._on_progress(self._progress())

    def _discover(self, state: State) -> None:
        self._cut.discard(state.id)
        numbers: list[int] | None = self._possible[state.id]
        if numbers is None or self._is_too_deep(state):
            self._cut.add(state.id)
            numbers = None
        else:
            self._add_all(state, numbers)
        if self._recording is not None:
            self._recording.add_state(state, numbers)

    def _note_found(self, found: Found) -> None:
        for violation in found.violations:
            self._note(violation)
        for warning in found.warnings:
            self._warn(warning)

    def _replace(self, worker: _Worker) -> None:
        """Give another process the tasks that a dead one has not reported."""
        worker.close()
        if worker.batch:
            first = worker.batch[0]
            key = (first.state.id, first.number)
            self._deaths[key] = self._deaths.get(key, 0) + 1
            if self._deaths[key] >= _DEATHS_MAX:
                worker.batch.popleft()
                self._warn(f"{first.action.name} was left out: {_DEATHS_MAX} processes died of it")
                self._take(first, None, {"outcome": None, "found": _NOTHING_FOUND})
            self._again.extendleft(reversed(worker.batch))
        elif not worker.is_ready:
            self._failed_starts += 1
            if self._failed_starts >= _DEATHS_MAX:
                code = worker.process.returncode
                raise ExplorationAborted(
                    f"Workers exit as soon as they start, with exit code {code}."
                )
        self._workers[self._workers.index(worker)] = _Worker(self._task)


class _Reader(Notes):
    """Reads what workers found; the recording writes it."""

    def _write(self, states: object, steps: object) -> None:
        """Do nothing: the recording writes."""


def _name(thing: object, function: Callable[..., Any]) -> str:
    return ":".join(place_of(thing, function))
