"""What an exploration has found so far, and what it still has to try."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from time import perf_counter

from ..arguments import require_seconds, require_whole
from ..explorations import Totals
from .actions import Action
from .graph import State, StateGraph
from .invariants import Invariant, Violation
from .recording import Found, Notes, Recorded, Recording
from .result import Ended, Exploration, Progress
from .strategies import Candidate, Strategy

_SECONDS_MAX = 10**9
_WARNINGS_MAX = 100


class Limits:
    """When to stop before everything was tried."""

    def __init__(
        self, steps: int, states: int | None, depth: int | None, seconds: float | None
    ) -> None:
        self.steps = require_whole("max_steps", steps, 1)
        self.states = states if states is None else require_whole("max_states", states, 1)
        self.depth = depth if depth is None else require_whole("max_depth", depth, 1)
        if seconds is not None:
            require_seconds("max_seconds", seconds, _SECONDS_MAX)
        self.seconds = seconds

    def reached(self, result: Exploration, started: float) -> Ended | None:
        """Return the limit that ends the exploration now, if any."""
        if result.steps >= self.steps:
            return "max_steps"
        if self.states is not None and len(result.graph.states) >= self.states:
            return "max_states"
        if self.seconds is not None and perf_counter() - started >= self.seconds:
            return "max_seconds"
        return None


class Findings:
    """The result as it grows, and the frontier: the candidates that a strategy chooses from."""

    def __init__(
        self,
        graph: StateGraph,
        actions: Sequence[Action],
        invariants: Sequence[Invariant],
        strategy: Strategy,
        limits: Limits,
        on_progress: Callable[[Progress], object] | None,
    ) -> None:
        # Every action with every combination of arguments; a candidate's number is its index here.
        self._choices = [
            (action, arguments) for action in actions for arguments in action.combinations()
        ]
        self._invariants = invariants
        self._strategy = strategy
        self._limits = limits
        self._on_progress = on_progress
        self._started = perf_counter()
        self._found: dict[object, Violation] = {}
        # The exceptions of actions, by the state they arose in; the nearest is known at the end.
        self._raised: dict[object, dict[str, Violation]] = {}
        # How many candidates of a state are left; its checkpoint is kept until there are none.
        self._left: dict[str, int] = {}
        self._cut: set[str] = set()
        self._tried: set[str] = set()
        # What was found since the last step was recorded.
        self._new = Found()
        self._notes: Notes | None = None
        self._recording: Recording | None = None
        self.result = Exploration(graph=graph, strategy="")

    def _load(self, recorded: Recorded) -> None:
        """Continue from what was read from a store."""
        self.result.steps = recorded.steps
        self._tried, self._cut = recorded.tried, recorded.cut
        for id, numbers in recorded.left.items():
            self._add_all(recorded.graph.states[id], numbers)
        for found in recorded.found:
            for violation in found.violations:
                self._note(violation)
            for warning in found.warnings:
                self._warn(warning)
        self._taken()

    def _add_all(self, state: State, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._strategy.add(Candidate(state, *self._choices[number], number))
        self._left[state.id] = len(numbers)

    def _is_too_deep(self, state: State) -> bool:
        return self._limits.depth is not None and state.depth >= self._limits.depth

    def _is_to_discover(self, state: State) -> bool:
        """Whether a state is new, or was too deep and no longer is."""
        if state.id in self._cut:
            return not self._is_too_deep(state)
        return state.id not in self._left

    def _nearer(self) -> list[State]:
        """Return the states that were too deep on the first path to them, but no longer are."""
        if not self._cut:
            return []
        self.result.graph.shorten()
        cut = [state for id, state in self.result.graph.states.items() if id in self._cut]
        return [state for state in cut if not self._is_too_deep(state)]

    def _note(self, violation: Violation) -> None:
        """Record a violation, if it is the first of its kind in this state."""
        if violation.check is not None:
            known, key = self._found, violation.key
            is_new = key not in known
            known[key] = known.get(key, violation)
        else:
            states = self._raised.setdefault(violation.key, {})
            is_new = violation.state_id not in states
            states.setdefault(violation.state_id, violation)
        if is_new:
            self._new.violations.append(violation)

    def _has_found(self) -> bool:
        return bool(self._found or self._raised)

    def _conclude(self) -> None:
        """Complete the result with the shortest paths to the violations."""
        result, states = self.result, self.result.graph.states
        result.graph.shorten()
        found = list(self._found.values())
        for by_state in self._raised.values():
            found.append(min(by_state.values(), key=lambda each: states[each.state_id].depth))
        result.violations = [self._with_path(violation) for violation in found]
        result.is_cut = bool(self._cut)
        names = dict.fromkeys(action.name for action, _ in self._choices)
        result.unused_actions = [name for name in names if name not in self._tried]

    def _seconds(self) -> float:
        return perf_counter() - self._started

    def _with_path(self, violation: Violation) -> Violation:
        path = [found.step for found in self.result.graph.path_to(violation.state_id)]
        violation.path = [*path, *violation.path]
        return violation

    def _counted(self) -> dict[str, int]:
        counted = {action.name: action.limit for action, _ in self._choices if action.limit}
        for action, _ in self._choices:
            for name in action.after:
                counted[name] = max(counted.get(name, 1), 1)
        return counted

    def _taken(self) -> Found:
        new, self._new = self._new, Found()
        return new

    def _warn(self, warning: str) -> None:
        if len(self.result.warnings) < _WARNINGS_MAX and warning not in self.result.warnings:
            self.result.warnings.append(warning)
            self._new.warnings.append(warning)

    def _totals(self) -> Totals:
        return Totals(
            states=len(self.result.graph.states),
            steps=self.result.steps,
            violations=len(self._found) + len(self._raised),
        )

    def _progress(self) -> Progress:
        waiting, seconds = len(self._strategy), self._seconds()
        return Progress(**asdict(self._totals()), waiting=waiting, seconds=seconds)
