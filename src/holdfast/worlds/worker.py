"""A worker of an exploration: it leases batches of the frontier and tries them in its own world.

What it finds is written under the lease of the batch. A worker that was stopped for longer than its
lease, or taken for dead, can write nothing; it forgets what it knew and begins again.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Final

from ..arguments import require_text, require_whole
from ..errors import (
    Conflict,
    HoldfastError,
    LeaseLost,
    NotFound,
    SessionEnded,
    SessionNotFound,
    StoreBusy,
)
from ..explorations import KeptState, KeptStep
from ..explorations.frontier import Batch, Entry, Frontier
from ..kernel.backoff import Backoff
from ..leases import Keeper, Kept, default_holder, uptime_seconds
from .actions import Action
from .explore import Explorer, checked, made_world
from .findings import Limits
from .graph import State
from .invariants import Invariant
from .journal import frontier_of, journal_in, require_foreign, require_store
from .recording import Found, Notes, read_outcome, require_same, settings_of
from .shared import LEASE_SECONDS
from .strategies import Candidate, Strategy
from .values import decode, encode
from .world import World

if TYPE_CHECKING:
    from ..kernel.operation import Sync
    from ..store import Store
    from ..work.handle import ItemOps

# An action that has killed this many processes is left out.
DEATHS_MAX: Final = 3
_IDLE_SECONDS: Final = (0.002, 0.1)
_LOOK_SECONDS: Final = 1.0
_NOTHING: Final = {"value": None, "error": None, "seconds": 0.0, "is_expected": True}
# The exploration has ended, or was removed.
_OVER: Final = (SessionEnded, SessionNotFound)
# Another process has the lease, or the store was busy for longer than the lease may last.
_LOST: Final = (LeaseLost, StoreBusy)


class _Nothing(Strategy):
    """Chooses nothing: the process that publishes the frontier does."""

    def add(self, candidate: Candidate) -> None:
        """Ignore it."""

    def next(self) -> Candidate:
        """Choose nothing."""
        raise LookupError("there is nothing to choose from")

    def __len__(self) -> int:
        return 0


class _Report(Notes):
    """Collects what was found, until it is taken."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.states: list[KeptState] = []
        self.steps: list[KeptStep] = []

    def _write(self, states: Sequence[KeptState], steps: Sequence[KeptStep]) -> None:
        self.states += states
        self.steps += steps

    def take(self) -> tuple[list[KeptState], list[KeptStep]]:
        """Return what was collected since the last time."""
        taken = self.states, self.steps
        self.states, self.steps = [], []
        return taken


class Performer(Explorer):
    """Tries entries of the frontier in one world, and learns from the log what others tried."""

    def __init__(
        self,
        world: World,
        actions: Sequence[Action],
        invariants: Sequence[Invariant],
        frontier: Frontier[Sync],
    ) -> None:
        limits = Limits(2**62, None, None, None)
        super().__init__(world, actions, invariants, _Nothing(Random(0)), limits, None)
        self._frontier = frontier
        self.report = _Report(self._choices, invariants)
        self._notes = self.report
        self._leaks = 0
        self._last_step = 0
        # Own steps that the log has not shown yet.
        self._own: set[tuple[str, int]] = set()
        # States that others found, and how many candidates of each were tried.
        self._foreign: dict[str, int] = {}

    def begin(self, member: ItemOps[Sync], also: dict[str, Any]) -> None:
        """Checkpoint the initial state; require the one that the exploration began with."""
        self._start()
        [initial], _ = self.report.take()
        settings = {**settings_of(self._world, self._choices, self._invariants), **also}
        begun = self._frontier.under(member).begin(encode(settings, "settings"), initial)
        require_same(self._frontier.id, begun.settings, settings)
        if begun.initial_id != initial.id:
            raise Conflict(
                "The worlds of the workers have different initial states, or not the one that the "
                "exploration began with: each must be newly created, with its own systems."
            )

    def learn(self) -> None:
        """Read what was tried since the last time, by all workers."""
        while edges := self._frontier.edges(after=self._last_step):
            self._last_step = edges[-1].number
            for edge in edges:
                if (edge.from_id, edge.candidate) in self._own:
                    self._own.remove((edge.from_id, edge.candidate))
                else:
                    self._learn(edge.from_id, edge.candidate, edge.to_id)

    def perform(self, entry: Entry) -> None:
        """Try an entry, unless it has killed too many processes; the report tells the outcome."""
        state = self._state(entry.from_id)
        action, arguments = self._choices[entry.candidate]
        candidate = Candidate(state, action, arguments, entry.candidate)
        self._own.add((entry.from_id, entry.candidate))
        if entry.deaths < DEATHS_MAX:
            return self._try(candidate)
        self._warn(f"{action.name} was left out: {DEATHS_MAX} processes died of it")
        self.report.add_step(candidate, None, None, self._taken())
        return self._count_tried(state)

    def leave(self) -> None:
        """Bring the world back to its initial state."""
        self._notes = None
        self._leave()

    def _learn(self, from_id: str, number: int, to_id: str | None) -> None:
        graph = self.result.graph
        origin = graph.states[from_id]
        if from_id in self._left:
            self._count_tried(origin)
        else:
            self._foreign[from_id] += 1
        if to_id is not None:
            target, _ = graph.add_state(to_id, ())
            if to_id not in self._left:
                self._foreign.setdefault(to_id, 0)
            action, arguments = self._choices[number]
            graph.add_transition(origin, target, action, arguments, read_outcome(_NOTHING))

    def _state(self, id: str) -> State:
        """Return a state to go to; its checkpoint is kept until everything was tried there."""
        if id not in self._left:
            [kept] = self._frontier.given_states([id]).values()
            possible = decode(kept.body)["choices"]
            count = len(self._choices if possible is None else possible)
            self._left[id] = count - self._foreign.pop(id)
        return self.result.graph.states[id]

    def _is_to_discover(self, state: State) -> bool:
        return state.id not in self._foreign and super()._is_to_discover(state)

    def _taken(self) -> Found:
        new, leaks = super()._taken(), self._world.leaks
        new.leaks, self._leaks = list(leaks[self._leaks :]), len(leaks)
        return new


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How a worker takes part: its name, how long it may be silent, and when it leaves."""

    holder: str
    is_leaving: Callable[[], bool]
    lease_seconds: float = LEASE_SECONDS
    commit_every: int = 1
    also: dict[str, Any]
    """Settings that only the process with the limits knows."""


class Participant:
    """Takes part in an exploration until it ends."""

    def __init__(
        self,
        store: Store,
        frontier: Frontier[Sync],
        world: World | Callable[[], World],
        actions: Sequence[Action],
        invariants: Sequence[Invariant],
        terms: Terms,
    ) -> None:
        self._store = store
        self._frontier = frontier
        self._made = (world, actions, invariants)
        self._terms = terms
        self._keeper = Keeper.of(store.runtime)
        self._held: Kept | None = None
        self._is_dismissed = False
        self.steps = 0

    def run(self) -> None:
        """Try what is to be tried, until the exploration ends or this worker is to leave."""
        with suppress(*_OVER):
            while self._is_wanted() and self._frontier.is_running():
                with suppress(*_LOST):
                    self._take_part()

    def _take_part(self) -> None:
        """Take part from the beginning, with a world and a memory that are new."""
        world, actions, invariants = self._made
        with ExitStack() as closing:
            member = self._joined(closing)
            made = made_world(world, closing)
            require_foreign(self._store.store_id(), made.systems)
            performer = Performer(made, actions, invariants, self._frontier)
            performer.begin(member, self._terms.also)
            closing.callback(performer.leave)
            batch = None
            while self._is_wanted():
                batch = self._next(member) if batch is None else self._perform(performer, batch)

    def _joined(self, closing: ExitStack) -> ItemOps[Sync]:
        """Take part; at the end, when the world is closed, say so, or what went wrong."""
        asked_at = uptime_seconds()
        member = self._frontier.join(self._terms.holder, self._terms.lease_seconds)
        kept = self._keep(member, asked_at)

        def end(_: object, error: BaseException | None, trace: object) -> None:
            for each in (self._held, kept):
                if each is not None:
                    self._keeper.drop(each)
            self._held = None
            with suppress(HoldfastError):
                if error is None or isinstance(error, (*_OVER, *_LOST, KeyboardInterrupt)):
                    self._look_at(member)
                    member.complete()
                else:
                    member.fail(error, retry=False)

        closing.push(end)
        return member

    def _keep(self, item: ItemOps[Sync], asked_at: float) -> Kept:
        return self._keeper.keep(Kept(item, item._guard(), self._terms.lease_seconds, asked_at))

    def _look_at(self, member: ItemOps[Sync]) -> None:
        """Leave if the exploration is being removed; raise LeaseLost if this worker was."""
        if member.heartbeat().cancel_requested:
            self._is_dismissed = True

    def _is_wanted(self) -> bool:
        return not self._is_dismissed and not self._terms.is_leaving()

    def _next(self, member: ItemOps[Sync]) -> Batch | None:
        """Wait for a batch; None if the worker is to leave."""
        idle, looked_at = Backoff(*_IDLE_SECONDS), uptime_seconds()
        while self._is_wanted():
            asked_at = uptime_seconds()
            batch = self._frontier.claim(self._terms.holder, self._terms.lease_seconds)
            if batch is not None:
                self._held = self._keep(batch.item, asked_at)
                return batch
            if uptime_seconds() - looked_at > _LOOK_SECONDS:
                looked_at = uptime_seconds()
                self._look_at(member)
                if not self._frontier.is_running():
                    raise SessionEnded(f"exploration {self._frontier.id} is not running any more")
            time.sleep(idle.pause_seconds())
        return None

    def _perform(self, performer: Performer, batch: Batch) -> Batch | None:
        """Try the entries of a batch; return the next one, if it is ready."""
        performer.learn()
        frontier, report = self._frontier.under(batch.item), performer.report
        # If another process died of one of them, it must be known which.
        commit_every = 1 if batch.is_again else self._terms.commit_every
        for entry in batch.entries:
            if len(report.steps) >= commit_every:
                frontier.record(*report.take())
            if not self._is_wanted():
                frontier.record(*report.take())
                batch.item.release()
                return None
            performer.perform(entry)
            self.steps += 1
        asked_at, held = uptime_seconds(), self._held
        following = frontier.turn(batch, *report.take(), self._terms.holder)
        self._held = None if following is None else self._keep(following.item, asked_at)
        if held is not None:
            self._keeper.drop(held)
        return following


def take_part(
    world: World | Callable[[], World],
    actions: Sequence[Action | Callable[..., Any]],
    invariants: Sequence[Invariant | Callable[[World], object]] = (),
    *,
    store: Store,
    id: str,
    commit_every: int = 1,
) -> int:
    """Explore as another worker of a running exploration until it ends; return the steps tried.

    The exploration must have been started with `workers`, by a process on any machine that uses the
    same store, and with the same actions and invariants. The world must be newly created.
    """
    require_store(store)
    require_text("id", id)
    require_whole("commit_every", commit_every, 1)
    explored = checked(actions, invariants)
    journal = journal_in(store, id)
    if journal is None or journal.world().settings is None:
        raise NotFound(f"There is no exploration {id} to take part in.", id=id)
    frontier = frontier_of(journal)
    if not frontier.is_running():
        raise Conflict(f"Exploration {id} is not running: resume=True continues it.")
    # Threads of one process may take part, too.
    holder = f"{default_holder()}:{secrets.token_hex(4)}"
    terms = Terms(holder=holder, is_leaving=lambda: False, commit_every=commit_every, also={})
    participant = Participant(store, frontier, world, *explored, terms)
    participant.run()
    return participant.steps
