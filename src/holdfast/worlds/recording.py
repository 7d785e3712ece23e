"""An exploration in a store: written step by step, and read again if the process was killed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from ..errors import Conflict, CorruptRecord, ExplorationAborted, InvalidArgument, InvalidValue
from ..explorations import Journal, KeptState, KeptStep, Totals
from .actions import Action, Arguments, Outcome, Step
from .checkpoints import Checkpoint
from .graph import State, StateGraph
from .invariants import Invariant, Violation
from .journal import checkpoint_of, kept_checkpoint
from .rollback import MOVED, finish, keep_tokens
from .strategies import Candidate
from .system import Observation
from .values import canonical, decode, encode
from .words import message_of, text_of
from .world import Leak, World

Choice = tuple[Action, Arguments]


@dataclass(slots=True)
class Found:
    """What a step, or the first check of the initial state, found besides the state itself."""

    violations: list[Violation] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    leaks: list[Leak] = field(default_factory=list)
    """Those of a worker's world, which this process does not have."""


@dataclass(slots=True)
class Recorded:
    """An exploration read from a store: the graph, what was found, and what is left to try."""

    graph: StateGraph = field(default_factory=StateGraph)
    found: list[Found] = field(default_factory=list)
    left: dict[str, list[int]] = field(default_factory=dict)
    """The numbers of the candidates left in each state; states at `max_depth` are missing."""
    cut: set[str] = field(default_factory=set)
    steps: int = 0
    tried: set[str] = field(default_factory=set)
    last_state: int = 0
    last_step: int = 0
    """The numbers of the rows that were read last."""


def settings_of(
    world: World | None, choices: Sequence[Choice], invariants: Sequence[Invariant]
) -> dict[str, Any]:
    """Return the settings that must not differ between resumptions and between workers.

    Without a world, they lack those of the world.
    """
    settings: dict[str, Any] = {
        "actions": [
            [action.name, canonical(dict(arguments), "arguments")] for action, arguments in choices
        ],
        "invariants": [[check.name, check.when] for check in invariants],
    }
    if world is not None:
        settings |= {"identity": list(world.identity), "systems": list(world.systems)}
    return settings


class Notes(ABC):
    """Collects what an exploration does, and writes it `commit_every` steps at a time.

    `choices` are all actions with all arguments, in an order that is the same in every process.
    """

    def __init__(
        self, choices: Sequence[Choice], invariants: Sequence[Invariant], commit_every: int = 1
    ) -> None:
        self._choices = choices
        self._invariants = {check.name: check for check in invariants}
        self._commit_every = commit_every
        self._states: list[KeptState] = []
        self._steps: list[KeptStep] = []
        self._reached: list[KeptState] = []
        self._known: set[str] = set()

    @abstractmethod
    def _write(self, states: Sequence[KeptState], steps: Sequence[KeptStep]) -> None:
        """Write all of this, or nothing."""

    def add_initial(self, state: State, numbers: Sequence[int] | None, found: Found) -> None:
        """Write the initial state, with what was found in it."""
        self._states.append(self._kept_state(state, numbers, found))
        self.commit()

    def add_state(self, state: State, numbers: Sequence[int] | None) -> None:
        """Add a state that a step led to, with what can be tried there; None if it is too deep."""
        self._reached.append(self._kept_state(state, numbers, None))

    def add_step(
        self, candidate: Candidate, reached: State | None, outcome: Outcome | None, found: Found
    ) -> None:
        """Add what was tried and where it led, and write it if it is time."""
        body = {"outcome": None if outcome is None else _outcome(outcome), "found": _found(found)}
        step = KeptStep(
            from_id=candidate.state.id,
            candidate=candidate.number,
            to_id=None if reached is None else reached.id,
            body=encode(body, "step"),
            has_findings=bool(found.violations or found.warnings),
        )
        # A state is written together with the step that led to it, or not at all.
        self._states += self._reached
        self._reached = []
        self._steps.append(step)
        if len(self._steps) >= self._commit_every:
            self.commit()

    def commit(self) -> None:
        """Write what was collected."""
        if self._states or self._steps:
            self._write(self._states, self._steps)
            self._states, self._steps = [], []

    def _kept_state(
        self, state: State, numbers: Sequence[int] | None, found: Found | None
    ) -> KeptState:
        body = {
            "observations": [_observation(seen) for seen in state.observations],
            "choices": None if numbers is None else list(numbers),
            "found": None if found is None else _found(found),
        }
        is_known = state.id in self._known
        self._known.add(state.id)
        return KeptState(id=state.id, body=encode(body, "state"), is_nearer=is_known)

    def read_found(self, body: dict[str, Any]) -> Found:
        """Return what was found, as it was recorded."""
        return read_found(body, self._invariants)


class Recording(Notes):
    """An exploration in a store: its settings, its initial state, and each step."""

    def __init__(
        self,
        journal: Journal,
        choices: Sequence[Choice],
        invariants: Sequence[Invariant],
        commit_every: int = 1,
        totals: Callable[[], Totals] | None = None,
    ) -> None:
        super().__init__(choices, invariants, commit_every)
        self.journal = journal
        self._totals = totals
        self._kept: list[Mapping[str, Any]] = []

    def _write(self, states: Sequence[KeptState], steps: Sequence[KeptStep]) -> None:
        self.journal.add(states, steps, None if self._totals is None else self._totals())

    def begin(self, settings: dict[str, Any]) -> bool:
        """Write the settings; return whether this continues an earlier exploration."""
        known = self.journal.world().settings
        if known is None:
            self.journal.set_settings(encode(settings, "settings"))
            return False
        require_same(self.journal.id, known, settings)
        return True

    def keep_initial(self, world: World, initial: Checkpoint) -> None:
        """Keep the initial state for another process, in all systems that can."""
        if not self._kept:
            kept = keep_tokens(world.systems, initial.tokens, initial.name)
            self._kept.append(kept)
            self.journal.add_checkpoint(kept_checkpoint(initial, kept))

    def restore_initial(self, world: World) -> None:
        """Restore a world to the initial state that a dead process has kept."""
        for checkpoint in map(checkpoint_of, self.journal.checkpoints()):
            tokens = checkpoint.tokens
            self._kept.append({name: kept.data for name, kept in tokens.items()})
            can_keep = {name: kept for name, kept in tokens.items() if kept.data is not None}
            systems = {name: world.systems[name] for name in can_keep if name in world.systems}
            outcomes = finish(systems, can_keep)
            if any(outcome != MOVED for outcome in outcomes.values()):
                listed = "; ".join(f"{name}: {outcome}" for name, outcome in outcomes.items())
                raise ExplorationAborted(f"The initial state was not restored. {listed}.")
            world.context.restore(dict(checkpoint.context))

    def require_initial(self, world: World, initial: State | None) -> None:
        """Raise Conflict unless the world is at the initial state that was recorded."""
        if initial is None or world.present_id() == initial.id:
            return
        private = [name for kept in self._kept for name, data in kept.items() if data is None]
        why = f"; {', '.join(private)} cannot be restored by another process" if private else ""
        raise Conflict(
            f"The world is not at the initial state of exploration {self.journal.id}{why}. Make it "
            "as it was at the beginning."
        )

    def forget_initial(self, world: World) -> None:
        """Discard what was kept of the initial state, which is not needed any more."""
        self.journal.clear()
        for kept in self._kept:
            for name, data in kept.items():
                if data is not None and name in world.systems:
                    world.systems[name].discard(data)
        self._kept.clear()

    def read(self, into: StateGraph | None = None) -> Recorded:
        """Return everything that was written; a given new graph is filled."""
        recorded = Recorded(graph=into or StateGraph())
        try:
            self._read(recorded)
        except (LookupError, TypeError, ValueError, msgspec.MsgspecError) as error:
            # It may have been imported from a file that somebody else wrote.
            raise CorruptRecord(
                f"The stored exploration {self.journal.id} cannot be read: {error!r}"
            ) from error
        return recorded

    def _read(self, recorded: Recorded) -> None:
        graph = recorded.graph
        for action, _ in self._choices:
            graph.add_action(action)
        # The steps first: even if the exploration is running, all states that they name exist then.
        steps = list(self._all_steps())
        recorded.last_step = steps[-1].number if steps else 0
        for state in self._all_states():
            recorded.last_state = state.number
            body = decode(state.body)
            self._known.add(state.id)
            graph.add_state(state.id, read_observations(body))
            if body["choices"] is None:
                recorded.cut.add(state.id)
            else:
                recorded.left[state.id] = body["choices"]
            if body["found"] is not None:
                recorded.found.append(self.read_found(body["found"]))
        tried: dict[str, set[int]] = {}
        for step in steps:
            tried.setdefault(step.from_id, set()).add(step.candidate)
            self._read_step(step, recorded)
        for id, numbers in recorded.left.items():
            done = tried.get(id, ())
            recorded.left[id] = [number for number in numbers if number not in done]
        self._cut(recorded)

    def _cut(self, recorded: Recorded) -> None:
        """Leave out what is beyond `max_depth`: workers record what is possible at any depth."""
        depth = decode(self.journal.world().settings or encode({}, "settings")).get("max_depth")
        if depth is None:
            return
        recorded.graph.shorten()
        for id in [id for id in recorded.left if recorded.graph.states[id].depth >= depth]:
            del recorded.left[id]
            recorded.cut.add(id)

    def _read_step(self, step: KeptStep, recorded: Recorded) -> None:
        body = decode(step.body)
        recorded.found.append(self.read_found(body["found"]))
        if step.to_id is None:
            return
        action, arguments = self._choices[step.candidate]
        origin, target = (recorded.graph.states[id] for id in (step.from_id, step.to_id))
        outcome = read_outcome(body["outcome"])
        recorded.graph.add_transition(origin, target, action, arguments, outcome)
        recorded.steps += 1
        recorded.tried.add(action.name)

    def _all_states(self) -> Iterator[KeptState]:
        after = 0
        while page := self.journal.states(after=after):
            yield from page
            after = page[-1].number

    def _all_steps(self) -> Iterator[KeptStep]:
        after = 0
        while page := self.journal.steps(after=after):
            yield from page
            after = page[-1].number


def require_same(id: str, known: bytes, settings: Mapping[str, Any]) -> None:
    """Raise InvalidArgument if an exploration began with other settings than these."""
    before = decode(known)
    different = [name for name, value in settings.items() if before.get(name) != value]
    if different:
        raise InvalidArgument(
            f"exploration {id} cannot be resumed with different settings: {', '.join(different)}"
        )


def read_found(body: dict[str, Any], invariants: Mapping[str, Invariant]) -> Found:
    """Return what was found, as it was recorded; invariants are looked up by name."""
    violations = [_read_violation(one, invariants) for one in body["violations"]]
    return Found(violations, body["warnings"], [Leak(**leak) for leak in body.get("leaks", ())])


def _read_violation(body: dict[str, Any], invariants: Mapping[str, Invariant]) -> Violation:
    path = tuple(Step(*step) for step in body["path"])
    check = invariants[body["invariant"]] if body["is_checked"] else None
    given = {name: body[name] for name in ("invariant", "severity", "message", "state_id")}
    return Violation(**given, path=path, check=check)


def read_observations(body: dict[str, Any]) -> tuple[Observation, ...]:
    """Return the observations of a state, as they were recorded."""
    return tuple(Observation(*seen) for seen in body["observations"])


def _observation(seen: Observation) -> tuple[str, Any, dict[str, Any]]:
    try:
        encode(dict(seen.metadata), "metadata")
    except InvalidValue:
        # Metadata is not part of the state, so it need not be plain data.
        return seen.system, seen.data, {}
    return seen.system, seen.data, dict(seen.metadata)


def _found(found: Found) -> dict[str, Any]:
    leaks = {"leaks": [asdict(leak) for leak in found.leaks]} if found.leaks else {}
    return {
        "violations": [_violation(violation) for violation in found.violations],
        "warnings": list(found.warnings),
        **leaks,
    }


def _violation(violation: Violation) -> dict[str, Any]:
    return {
        "invariant": violation.invariant,
        "severity": violation.severity,
        "message": violation.message,
        "state_id": violation.state_id,
        "path": [(step.action, dict(step.arguments)) for step in violation.path],
        "is_checked": violation.check is not None,
    }


def _outcome(outcome: Outcome) -> dict[str, Any]:
    error = outcome.error
    body = {
        "value": outcome.value,
        "error": None if error is None else (type(error).__name__, message_of(error)),
        "seconds": outcome.seconds,
        "is_expected": outcome.is_expected,
    }
    try:
        encode(body, "outcome")
    except InvalidValue:
        body["value"] = text_of(outcome.value)
    return body


def read_outcome(body: dict[str, Any]) -> Outcome:
    """Return the outcome of an action, as it was recorded."""
    error = None
    if body["error"] is not None:
        kind, message = body["error"]
        # Of an error in another process, only the name is known.
        error = type(kind, (Exception,), {})(message)
    return Outcome(**{**body, "error": error})
