"""A world: several systems and a context that are checkpointed and rolled back as one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from ..arguments import require_text, shown
from ..clock import IdSource, SystemClock
from ..errors import (
    CheckpointError,
    CheckpointInvalid,
    InvalidArgument,
    RollbackError,
    WorldInconsistent,
)
from .actions import Action, Outcome, as_action
from .checkpoints import Checkpoint, Checkpoints, has_stack
from .context import Context, copied
from .graph import State, StateGraph
from .journal import WorldJournal, require_foreign, require_store
from .replay import replay
from .rollback import (
    MOVED,
    Kept,
    Systems,
    Tokens,
    finish,
    in_order,
    keep_tokens,
    move,
    release,
    release_all,
    require_prepared,
    returning,
    take_origin,
    take_tokens,
)
from .system import Observation, System, identity_of, observation_of, state_id
from .values import canonical
from .words import FAILURES

if TYPE_CHECKING:
    from ..store import Store

_clock = SystemClock()
_new_id = IdSource(_clock)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """A system whose state after a rollback differs from that when the checkpoint was made."""

    system: str
    checkpoint_id: str
    before: Any
    after: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """How a reopened world finished the rollback of a process that died.

    `outcomes` says for each system whether it was moved; if one was not, the world is inconsistent.
    """

    checkpoint_id: str
    outcomes: Mapping[str, str]

    @property
    def is_complete(self) -> bool:
        """Whether all systems are at the checkpoint now."""
        return all(outcome == MOVED for outcome in self.outcomes.values())

    def __str__(self) -> str:
        return "; ".join(f"{name}: {outcome}" for name, outcome in self.outcomes.items())


class World:
    """Systems that are rolled back together. It belongs to one thread; `with` closes its systems.

    `identity` names values of the context that are part of a state's identity. `clients` are the
    caller's own and survive a rollback. With `verify`, each rollback to an observed state
    observes again, and adds what differs to `leaks`.

    With a `store`, checkpoints are kept under the `id` of the world until it is closed, and a
    rollback first records its target. If the process is killed, the world that is opened next with
    this id has the checkpoints, and finishes the rollback; `recovery` says how.
    """

    def __init__(
        self,
        systems: Mapping[str, System],
        *,
        context: Mapping[str, Any] | None = None,
        clients: Mapping[str, Any] | None = None,
        identity: tuple[str, ...] | list[str] = (),
        verify: bool = False,
        store: Store | None = None,
        id: str | None = None,
    ) -> None:
        if isinstance(identity, str):
            raise InvalidArgument("identity must be a list of names in the context.")
        self._systems: dict[str, System] = {}
        # The systems in the order in which they move, and those that may have to move back.
        self._moving: Mapping[str, System] = {}
        self._returning: Mapping[str, System] = {}
        self._has_stack = False
        for name, system in systems.items():
            self.add_system(name, system)
        self.context = Context(context)
        self.clients = dict(clients or {})
        self.identity = tuple(identity)
        self.verify = verify
        self.leaks: list[Leak] = []
        self.graph = StateGraph()
        # How often some actions ran on the path to this state, and up to which number it matters.
        self.runs: dict[str, int] = {}
        self._counted: dict[str, int] = {}
        self._checkpoints = Checkpoints()
        self._is_consistent = True
        self._state: State | None = None
        self._acts: list[tuple[Action, dict[str, Any], Outcome]] = []
        self._closing = ExitStack()
        self.recovery: Recovery | None = None
        self._journal: WorldJournal | None = None
        if store is not None or id is not None:
            self._open(store, id)

    @property
    def systems(self) -> Mapping[str, System]:
        """The systems by name."""
        return MappingProxyType(self._systems)

    @property
    def checkpoints(self) -> Mapping[str, Checkpoint]:
        """The checkpoints by id, in the order in which they were made."""
        return self._checkpoints

    @property
    def is_consistent(self) -> bool:
        """Whether all systems are at the same state; if not, only a rollback is possible."""
        return self._is_consistent

    def add_system(self, name: str, system: System) -> None:
        """Add a system; the checkpoints made before become invalid, because they lack it."""
        require_text("the name of a system", name)
        if not isinstance(system, System):
            problem = f"system {name} must be a holdfast.worlds.System, not {shown(system)}"
            raise InvalidArgument(problem)
        if name in self._systems:
            raise InvalidArgument(f"this world already has a system {name}")
        self._systems[name] = system
        self._moving = in_order(self._systems)
        self._returning = returning(self._moving)
        self._has_stack = has_stack(self._systems)

    def act(self, action: Action | Callable[..., Any], /, **arguments: Any) -> Outcome:
        """Run an action; an exception that it raises is its outcome, not an error of the world."""
        self._require_consistent("act")
        act = as_action(action)
        started = perf_counter()
        try:
            value = act.run(self, **arguments)
            outcome = Outcome(value=value, seconds=perf_counter() - started)
        except FAILURES as error:
            outcome = Outcome(
                error=error,
                seconds=perf_counter() - started,
                is_expected=isinstance(error, act.expects),
            )
        most = self._counted.get(act.name)
        if most is not None:
            self.runs[act.name] = min(self.runs.get(act.name, 0) + 1, most)
        self._acts.append((act, arguments, outcome))
        return outcome

    def observe(self) -> tuple[Observation, ...]:
        """Observe every system."""
        return self._observe({})

    def observe_state(self) -> tuple[State, bool]:
        """Observe, and return the state in the graph, and whether it is new there.

        If one action ran since the last observation, it becomes a transition of the graph.
        """
        seen: dict[str, Observation] = {}
        id = self._identify(seen)
        known = self.graph.states.get(id)
        if known is None or not known.observations:
            state, is_new = self.graph.add_state(id, self._observe(seen))
        else:
            state, is_new = known, False
        if self._state is not None and len(self._acts) == 1:
            [(action, arguments, outcome)] = self._acts
            self.graph.add_transition(self._state, state, action, arguments, outcome)
        self._state, self._acts = state, []
        return state, is_new

    def present_id(self) -> str:
        """Observe, and return the id of the current state, whether or not it is in the graph."""
        return self._identify({})

    def start_graph(self) -> StateGraph:
        """Begin a new graph; the next state that is observed is its initial one."""
        self.graph, self._state, self._acts = StateGraph(), None, []
        return self.graph

    def count_runs(self, most: Mapping[str, int]) -> None:
        """Count from now on how often these actions run on each path, up to a number each.

        The counts are part of a state's identity, and are rolled back with it.
        """
        self._counted, self.runs = dict(most), {}

    def checkpoint(self, name: str) -> str:
        """Checkpoint all systems and the context, or nothing; return the id of the checkpoint."""
        self._require_consistent("checkpoint")
        require_text("the name of a checkpoint", name)
        return self._keep(name, None).id

    def observe_and_checkpoint(self, name: str) -> State:
        """Observe, checkpoint the state unless it already has a valid one, and return the state."""
        self._require_consistent("checkpoint")
        require_text("the name of a checkpoint", name)
        state, _ = self.observe_state()
        self.keep_state(state, name)
        return state

    def keep_state(self, state: State, name: str) -> bool:
        """Make the checkpoint of a state that was just observed, unless it has a valid one."""
        old = state.checkpoint_id
        if old is not None and self.is_valid(old):
            return False
        state.checkpoint_id = self._keep(name, state).id
        if old is not None and old in self._checkpoints:
            self.release(old)
        return True

    def find(self, checkpoint: str) -> Checkpoint:
        """Return a checkpoint by its id, or the newest with this name."""
        return self._checkpoints.find(checkpoint)

    def is_valid(self, checkpoint: str) -> bool:
        """Return whether a checkpoint exists and can be restored, as far as the world knows."""
        try:
            return self._checkpoints.why_invalid(self.find(checkpoint), self._systems) is None
        except LookupError:
            return False

    def rollback(self, checkpoint: str, *, replay: bool = False) -> None:
        """Restore all systems and the context, or none of them.

        RollbackError lists each system; if undoing failed too, the world is inconsistent. An
        invalid checkpoint raises CheckpointInvalid; with `replay` its state is reached by repeating
        actions.
        """
        target = self.find(checkpoint)
        problem = self._checkpoints.why_invalid(target, self._systems)
        if problem is None:
            self._restore(target)
        elif replay and target.state_id is not None:
            self.replay_to(target.state_id)
        else:
            raise CheckpointInvalid(
                f"Checkpoint {target.name} cannot be restored: {problem}.", checkpoint=target.id
            )

    def replay_to(self, state: str) -> State:
        """Reach a state from the nearest valid checkpoint by repeating the recorded actions.

        If a state on the path is not the recorded one, ReplayFailed is raised; also, before
        anything is done, if an action on the path is not replayable.
        """
        return replay(self, state)

    def release(self, checkpoint: str) -> None:
        """Release a checkpoint; systems free what they keep only for it."""
        found = self.find(checkpoint)
        is_valid = self._checkpoints.why_invalid(found, self._systems) is None
        self._checkpoints.remove(found)
        if self._journal is not None:
            self._discard(self._journal.remove(found.id))
        for name, token in found.tokens.items():
            system = self._systems[name]
            if isinstance(token, Kept):
                continue
            # A stack has already destroyed its part of an invalid checkpoint.
            if is_valid or system.rollback_order == "any":
                release(system, token)

    def on_close(self, function: Callable[[], object]) -> None:
        """Call a function when the world is closed, after its systems; the last one first."""
        self._closing.callback(function)

    def close(self) -> None:
        """Release all checkpoints and close all systems, the last one first.

        An inconsistent world leaves its checkpoints in the store, for the next one with its id.
        """
        self._checkpoints.clear()
        with self._closing, ExitStack() as systems:
            if self._journal is not None:
                systems.callback(self._journal.close)
            for system in self._systems.values():
                systems.callback(system.close)
            if self._journal is not None and self._is_consistent:
                self._discard(self._journal.clear())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _require_consistent(self, what: str) -> None:
        if not self._is_consistent:
            raise WorldInconsistent(
                f"Cannot {what}: a rollback failed and the systems are at different states. Roll "
                f"back to a checkpoint first.{f' {self.recovery}.' if self.recovery else ''}"
            )

    def _open(self, store: object, id: str | None) -> None:
        """Take over what a dead process kept in the store, and finish its rollback."""
        if store is None or id is None:
            raise InvalidArgument(
                "store and id must be given together: the id identifies the world"
            )
        keeper = require_store(store)
        require_foreign(keeper.store_id(), self._systems)
        self._journal = WorldJournal(keeper, id)
        try:
            found, intent = self._journal.load()
            for checkpoint in found:
                self._checkpoints.add(checkpoint)
            if intent is not None:
                self._finish(self._checkpoints[intent])
        except BaseException:
            self._journal.close()
            raise

    def _finish(self, target: Checkpoint) -> None:
        assert self._journal is not None
        outcomes = finish(self._systems, target.tokens)
        self.recovery = Recovery(checkpoint_id=target.id, outcomes=outcomes)
        self._is_consistent = self.recovery.is_complete
        if self._is_consistent:
            self.context.restore(copied(target.context))
            self.runs = dict(target.runs)
            self._journal.end()

    def _discard(self, kept: Iterable[Mapping[str, Any]]) -> None:
        for one in kept:
            for name, data in one.items():
                if name in self._systems and data is not None:
                    self._systems[name].discard(data)

    def _observe(self, seen: Mapping[str, Observation]) -> tuple[Observation, ...]:
        """Return the observations of all systems, reusing those that were already made."""
        self._require_systems()
        return tuple(
            seen[name] if name in seen else observation_of(name, system)
            for name, system in self._systems.items()
        )

    def _require_systems(self) -> None:
        if not self._systems:
            raise InvalidArgument("This world has no system, so there is nothing to observe.")

    def _identify(self, seen: dict[str, Observation]) -> str:
        """Return the id of the current state, and add what was observed for it to `seen`."""
        self._require_systems()
        shown: dict[str, bytes] = {}
        for name, system in self._systems.items():
            identity = system.identity()
            if identity is None:
                seen[name] = observation_of(name, system)
                identity = identity_of(seen[name])
            shown[name] = identity
        facts: dict[str, object] = {
            f"context.{name}": self.context[name] for name in self.identity if name in self.context
        }
        if self._counted:
            facts["runs"] = self.runs
        return state_id(shown, facts)

    def _keep(self, name: str, state: State | None) -> Checkpoint:
        context = self.context.copied()
        made = Checkpoint(
            id=_new_id(),
            name=name,
            tokens=take_tokens(self._systems, name),
            context=context,
            runs=dict(self.runs),
            state_id=None if state is None else state.id,
            created_at=_clock.now_ms(),
        )
        if self._journal is not None:
            kept = keep_tokens(self._systems, made.tokens, name)
            try:
                self._journal.add(made, kept)
            except BaseException as error:
                release_all(self._systems, made.tokens, error)
                raise
        self._checkpoints.add(made)
        return made

    def _restore(self, target: Checkpoint) -> None:
        context = copied(target.context)
        require_prepared(self._systems, target.tokens)
        moving, origin = self._origin()
        # From here on, an interrupt at any point leaves the world flagged.
        was_consistent, self._is_consistent = self._is_consistent, False
        if self._journal is not None:
            try:
                self._journal.begin(target.id)
            except Exception:
                # Nothing has moved, so no other process may finish this rollback.
                if was_consistent:
                    self._end()
                    self._is_consistent = True
                    self._drop(origin)
                raise
        try:
            move(moving, target.tokens, origin)
        except RollbackError as error:
            if error.is_consistent:
                self._end()
                self._is_consistent = True
                self._drop(origin)
            raise
        self.context.restore(context)
        self.runs = dict(target.runs)
        self._state = self.graph.states.get(target.state_id or "")
        self._acts = []
        if self._has_stack:
            self._checkpoints.restored(target)
        self._end()
        self._is_consistent = True
        self._drop(origin)
        if self.verify and self._state is not None:
            self._find_leaks(target, self._state)

    def _end(self) -> None:
        self.recovery = None
        if self._journal is not None:
            self._journal.end()

    def _origin(self) -> tuple[Systems, Tokens | None]:
        """Return the systems in the order of moves, and tokens of the state if it is consistent."""
        if not self._is_consistent:
            return self._moving, None
        try:
            return take_origin(self._moving, self._returning)
        except CheckpointError as error:
            outcomes = dict.fromkeys(self._systems, "untouched")
            outcomes[error.system] = f"refused: {error}"
            raise RollbackError(
                f"Nothing was rolled back, because it could not have been undone: {error}",
                outcomes=outcomes,
                is_consistent=True,
            ) from error

    def _drop(self, origin: Tokens | None) -> None:
        for name, token in (origin or {}).items():
            if self._systems[name].rollback_order == "stack":
                continue  # It goes with the next rollback, or is gone already.
            try:
                release(self._systems[name], token)
            except Exception as error:
                warnings.warn(f"System {name} did not release a snapshot: {error}", stacklevel=4)

    def _find_leaks(self, checkpoint: Checkpoint, state: State) -> None:
        for now in self.observe():
            then = state.observation(now.system)
            if canonical(now.data, now.system) != canonical(then, now.system):
                self.leaks.append(
                    Leak(
                        system=now.system,
                        checkpoint_id=checkpoint.id,
                        before=then,
                        after=now.data,
                    )
                )
