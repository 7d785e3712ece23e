"""The observed states of a world, and the actions that lead from one to another."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..errors import NotFound
from .actions import Action, Arguments, Outcome, Step
from .system import Observation, shown_id
from .values import canonical


@dataclass(slots=True, kw_only=True, eq=False)
class State:
    """One state, the same whichever path leads to it. `checkpoint_id` may be set later."""

    id: str
    observations: tuple[Observation, ...]
    checkpoint_id: str | None = None
    depth: int = 0
    found_by: Transition | None = field(default=None, repr=False)

    @property
    def shown_id(self) -> str:
        """The part of the id that is displayed."""
        return shown_id(self.id)

    def observation(self, system: str) -> Any:
        """Return the observation of a system in this state."""
        for seen in self.observations:
            if seen.system == system:
                return seen.data
        raise NotFound(f"State {self.shown_id} has no observation of {system!r}.", system=system)


class Transition(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One run of an action: the states before and after it, its arguments and its outcome."""

    number: int
    from_id: str
    to_id: str
    step: Step
    outcome: Outcome

    def __str__(self) -> str:
        return str(self.step)


class StateGraph:
    """States by id and the transitions between them; adding either takes constant time."""

    def __init__(self) -> None:
        self.initial: State | None = None
        self.states: dict[str, State] = {}
        self.transitions: list[Transition] = []
        self._actions: dict[str, Action] = {}
        self._edges: dict[tuple[str, str, str, bytes], Transition] = {}
        self._from: dict[str, list[Transition]] = {}

    def state(self, id: str) -> State:
        """Return a state by its id, or by the displayed part of it."""
        found = self.states.get(id)
        if found is None and len(id) == len(shown_id(id)):
            matching = [state for name, state in self.states.items() if name.startswith(id)]
            found = matching[0] if len(matching) == 1 else None
        if found is None:
            raise NotFound(f"There is no state {id!r} in this graph.", state=id)
        return found

    def action(self, name: str) -> Action:
        """Return an action that was run, by its name."""
        try:
            return self._actions[name]
        except KeyError:
            raise NotFound(f"No action called {name!r} was run.", action=name) from None

    def add_state(self, id: str, observations: Iterable[Observation]) -> tuple[State, bool]:
        """Return the state with this id, and whether it is new; the first one is the initial."""
        known = self.states.get(id)
        if known is not None:
            # Another process reached it first, and has the observations.
            known.observations = known.observations or tuple(observations)
            return known, False
        state = State(id=id, observations=tuple(observations))
        self.states[id] = state
        self.initial = self.initial or state
        return state, True

    def add_action(self, action: Action) -> None:
        """Register an action, for replays."""
        self._actions[action.name] = action

    def add_transition(
        self, origin: State, target: State, action: Action, arguments: Arguments, outcome: Outcome
    ) -> Transition:
        """Add a run of an action, unless one with equal states, action and arguments is known."""
        self.add_action(action)
        given = canonical(dict(arguments), "arguments") if arguments else b""
        key = (origin.id, target.id, action.name, given)
        transition = self._edges.get(key)
        if transition is None:
            transition = Transition(
                number=len(self.transitions) + 1,
                from_id=origin.id,
                to_id=target.id,
                step=Step(action.name, dict(arguments)),
                outcome=outcome,
            )
            self.transitions.append(transition)
            self._edges[key] = transition
            self._from.setdefault(origin.id, []).append(transition)
        is_found = target is self.initial or target.found_by is not None
        # Depths only decrease, so a parent's is always less than its child's and there is no cycle.
        if not is_found or origin.depth + 1 < target.depth:
            target.found_by = transition
            target.depth = origin.depth + 1
        return transition

    def transitions_from(self, id: str) -> list[Transition]:
        """Return the transitions that leave a state."""
        return list(self._from.get(id, ()))

    def path_to(self, id: str) -> list[Transition]:
        """Return the transitions from the initial state to this one."""
        state = self.state(id)
        path: list[Transition] = []
        while state.found_by is not None:
            path.append(state.found_by)
            state = self.states[state.found_by.from_id]
        if state is not self.initial:
            raise NotFound(
                f"No path to state {shown_id(id)} is known: observe after each action.", state=id
            )
        return path[::-1]

    def shorten(self) -> None:
        """Make every path a shortest one; takes time proportional to the size of the graph."""
        if self.initial is None:
            return
        self.initial.depth, self.initial.found_by = 0, None
        reached = {self.initial.id}
        waiting = deque([self.initial])
        while waiting:
            origin = waiting.popleft()
            for transition in self._from.get(origin.id, ()):
                if transition.to_id not in reached:
                    reached.add(transition.to_id)
                    target = self.states[transition.to_id]
                    target.depth, target.found_by = origin.depth + 1, transition
                    waiting.append(target)
