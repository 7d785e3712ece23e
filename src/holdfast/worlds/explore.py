"""Exploration: try every action in every state, and check invariants after each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from random import Random
from typing import TYPE_CHECKING, Any

from ..arguments import require_new_id, require_whole, shown
from ..errors import (
    CheckpointError,
    CheckpointInvalid,
    CheckpointNotFound,
    ExplorationAborted,
    InvalidArgument,
    ReplayFailed,
    RollbackError,
)
from .actions import Action, Arguments, Outcome, Step, as_action
from .findings import Findings, Limits
from .graph import State
from .invariants import Invariant, Violation, as_invariant
from .journal import (
    discard,
    drive,
    frontier_of,
    journal_of,
    require_foreign,
    require_new,
    require_store,
)
from .recording import Recording, settings_of
from .result import Ended, Exploration, Progress
from .shared import BATCH_MAX, SCRATCH, SharedExplorer, scratch_store
from .shrink import shrink
from .strategies import Candidate, Strategy, as_strategy
from .words import FAILURES, said
from .world import World

if TYPE_CHECKING:
    from ..session import DrivenSession
    from ..store import Store

WORKERS_MAX = 100


def explore(
    world: World | Callable[[], World],
    actions: Sequence[Action | Callable[..., Any]],
    invariants: Sequence[Invariant | Callable[[World], object]] = (),
    *,
    strategy: str | Callable[[Random], Strategy] = "bfs",
    seed: int = 0,
    max_steps: int = 10_000,
    max_states: int | None = None,
    max_depth: int | None = None,
    max_seconds: float | None = None,
    stop_on_violation: bool = False,
    shrinks: bool = True,
    on_progress: Callable[[Progress], object] | None = None,
    store: Store | None = None,
    id: str | None = None,
    resume: bool = False,
    commit_every: int = 1,
    workers: int = 1,
) -> Exploration:
    """Explore a world, or one that a function returns, which is closed at the end.

    Whatever happens, the given world is restored to its initial state, and the checkpoints of the
    exploration are released. Ctrl-C ends it with what was found so far.

    With a `store`, each step is written there under the `id` of the exploration. If the process is
    killed, `resume` continues where it stopped, with the same actions and invariants; at most
    `commit_every` actions are repeated. What was not begun is begun.

    With `workers`, that many processes explore together, each with its own world from `world`.
    The functions must be importable: define them at the top level of modules.
    """
    limits = Limits(max_steps, max_states, max_depth, max_seconds)
    explored = checked(actions, invariants)
    order = as_strategy(strategy, seed)
    _require_place(store, id, resume)
    require_whole("commit_every", commit_every, 1)
    require_whole("workers", workers, 1, WORKERS_MAX)
    given = (*explored, order, limits, on_progress)
    with ExitStack() as closing:
        explorer: Explorer | SharedExplorer
        if workers == 1:
            made = made_world(world, closing)
            require_foreign(None if store is None else store.store_id(), made.systems)
            explorer = Explorer(made, *given, shrinks=shrinks)
        elif isinstance(world, World):
            raise InvalidArgument("workers need a function that returns a new world for each")
        else:
            explorer = SharedExplorer(world, *given, workers=workers)
            if store is None:
                store, id = closing.enter_context(scratch_store()), SCRATCH
                commit_every = BATCH_MAX
        explorer.result.strategy = strategy if isinstance(strategy, str) else type(order).__name__
        if store is None or id is None:
            return explorer.run(stop_on_violation=stop_on_violation)
        if not resume:
            require_new(store, id)
        session = closing.enter_context(drive(store, id))
        # Those of a process that was killed; its workers are fenced.
        discard(frontier_of(session))
        explorer.record(store, session, commit_every)
        result = explorer.run(stop_on_violation=stop_on_violation)
        if result.is_complete:
            session.end()
        return result


def checked(
    actions: Sequence[Action | Callable[..., Any]],
    invariants: Sequence[Invariant | Callable[[World], object]],
) -> tuple[list[Action], list[Invariant]]:
    """Return the actions and invariants of an exploration, or raise InvalidArgument."""
    explored = _unique("action", [as_action(what) for what in actions])
    checks = _unique("invariant", [as_invariant(what) for what in invariants])
    if not explored:
        raise InvalidArgument("actions must not be empty.")
    for known in explored:
        unknown = sorted(set(known.after) - {other.name for other in explored})
        if unknown:
            raise InvalidArgument(f"{known.name} comes after an unknown action: {unknown[0]}")
    return explored, checks


def made_world(world: World | Callable[[], World], closing: ExitStack) -> World:
    """Return a world; one that was created by the function is closed with the stack."""
    made = world if isinstance(world, World) else world()
    if not isinstance(made, World):
        raise InvalidArgument(
            f"world must be a World or a function that returns one, not {shown(made)}"
        )
    if made is not world:
        closing.callback(made.close)
    return made


def require_both(store: object, id: object) -> None:
    """Raise InvalidArgument if a store is given without an id, or an id without a store."""
    if (store is None) != (id is None):
        raise InvalidArgument(
            "store and id must be given together: the id identifies the exploration"
        )


def _require_place(store: object, id: object, resume: bool) -> None:
    require_both(store, id)
    if resume and store is None:
        raise InvalidArgument("resume=True needs the store and the id of the exploration")
    if store is not None:
        require_store(store)
        require_new_id("id", id)


class Explorer(Findings):
    """Tries the actions that a strategy chooses, in one world."""

    def __init__(
        self,
        world: World,
        actions: Sequence[Action],
        invariants: Sequence[Invariant],
        strategy: Strategy,
        limits: Limits,
        on_progress: Callable[[Progress], object] | None,
        *,
        shrinks: bool = False,
    ) -> None:
        super().__init__(world.start_graph(), actions, invariants, strategy, limits, on_progress)
        self._world = world
        self._shrinks = shrinks
        self._before = [check for check in invariants if check.when != "after"]
        self._after = [check for check in invariants if check.when != "before"]
        # The state that the world is in, as long as nothing was done since it was reached.
        self._at: State | None = None
        self._is_resumed = False

    def run(self, *, stop_on_violation: bool) -> Exploration:
        """Explore until the end or a limit, and leave the world as it was."""
        world, result = self._world, self.result
        self._start()
        try:
            result.ended = self._loop(stop_on_violation)
            self._conclude()
            if self._shrinks and result.ended not in ("complete", "interrupted"):
                self._shrink()
        finally:
            self._leave()
        result.seconds = self._seconds()
        result.leaks = tuple(world.leaks)
        return result

    def record(self, store: Store, session: DrivenSession, commit_every: int) -> None:
        """Record each step in a store, and continue from what is already there."""
        given = (self._choices, self._invariants, commit_every)
        recording = Recording(journal_of(session), *given, totals=self._totals)
        settings = settings_of(self._world, self._choices, self._invariants)
        self._is_resumed = recording.begin({**settings, "max_depth": self._limits.depth})
        self._recording = self._notes = recording

    def _start(self) -> None:
        """Bring the world to its initial state, and collect the possible actions."""
        world, recording = self._world, self._recording
        world.count_runs(self._counted())
        if recording is not None and self._is_resumed:
            recording.restore_initial(world)
            for system in world.systems.values():
                system.sweep()
            world.count_runs(self._counted())
            self._load(recording.read(self.result.graph))
            recording.require_initial(world, self.result.graph.initial)
        initial = world.observe_and_checkpoint("initial")
        self._initial = world.find("initial").id
        self._at = initial
        try:
            if recording is not None:
                recording.keep_initial(world, world.find(self._initial))
            if self._is_to_discover(initial):
                numbers = self._discover(initial)
                self._check(self._after, initial)
                if self._notes is not None:
                    self._notes.add_initial(initial, numbers, self._taken())
        except BaseException:
            self._leave()
            raise

    def _loop(self, stop_on_violation: bool) -> Ended:
        try:
            while len(self._strategy) or self._discover_nearer():
                limit = self._limits.reached(self.result, self._started)
                if limit is not None:
                    return limit
                self._try(self._strategy.next())
                if stop_on_violation and self._has_found():
                    return "stop_on_violation"
        except KeyboardInterrupt:
            return "interrupted"
        return "complete"

    def _discover_nearer(self) -> bool:
        """Continue with states within `max_depth` by a shorter path; return if there are any."""
        for state in self._nearer():
            if self._go_to(state):
                self._arrive(state, "found nearer")
            else:
                self._left[state.id] = 0
                self._cut.discard(state.id)
        return len(self._strategy) > 0

    def _try(self, candidate: Candidate) -> None:
        state, action, arguments = candidate.state, candidate.action, candidate.arguments
        reached, outcome = None, None
        if self._go_to(state) and self._is_possible(action, arguments):
            self._check(self._before, state)
            self.result.steps += 1
            self._tried.add(action.name)
            self._at = None
            outcome = self._world.act(action, **arguments)
            reached, _ = self._world.observe_state()
            self._arrive(reached, f"after_{action.name}_{self.result.steps}")
            if outcome.error is not None:
                self._judge(outcome, state, Step(action.name, arguments))
            self._check(self._after, reached)
        if self._notes is not None:
            self._notes.add_step(candidate, reached, outcome, self._taken())
        self._count_tried(state)
        if self._on_progress is not None:
            self._on_progress(self._progress())

    def _count_tried(self, state: State) -> None:
        """Count a candidate of a state as tried; with the last one, release its checkpoint."""
        self._left[state.id] = left = self._left[state.id] - 1
        if not left:
            self._release(state)

    def _arrive(self, reached: State, name: str) -> None:
        if self._is_to_discover(reached):
            self._cut.discard(reached.id)
            numbers = self._discover(reached)
            if self._notes is not None:
                self._notes.add_state(reached, numbers)
        if self._left.get(reached.id) and self._keep(reached, name):
            self._at = reached

    def _keep(self, state: State, name: str) -> bool:
        try:
            return self._world.keep_state(state, name)
        except CheckpointError as error:
            self._warn(
                f"{error.system} could not make a checkpoint, so states are replayed: {error}"
            )
            return False

    def _discover(self, state: State) -> list[int] | None:
        """Add the actions that are possible in the world's state, and return their numbers."""
        if self._is_too_deep(state):
            self._cut.add(state.id)
            return None
        possible = [
            number
            for number, (action, arguments) in enumerate(self._choices)
            if self._is_possible(action, arguments)
        ]
        self._add_all(state, possible)
        return possible

    def _is_possible(self, action: Action, arguments: Arguments) -> bool:
        try:
            return action.is_possible(self._world, arguments)
        except FAILURES as error:
            self._warn(f"the precondition of {action.name} raised {said(error)}")
            return False

    def _go_to(self, state: State) -> bool:
        """Bring the world to a state; return whether that was possible."""
        if self._at is state:
            return True
        self._at = None
        world = self._world
        try:
            if not self._roll_back(state):
                world.replay_to(state.id)
                self.result.replayed += 1
                self._keep(state, "replayed")
        except (RollbackError, ReplayFailed) as error:
            self._warn(f"state {state.shown_id} was not explored: {error}")
            self._recover(error)
            return False
        self._at = state
        return True

    def _roll_back(self, state: State) -> bool:
        """Restore the checkpoint of a state; return whether it has one that can be restored."""
        if state.checkpoint_id is None:
            return False
        try:
            self._world.rollback(state.checkpoint_id)
        except (CheckpointNotFound, CheckpointInvalid):
            return False
        return True

    def _recover(self, cause: Exception) -> None:
        if self._world.is_consistent:
            return
        try:
            self._world.rollback(self._initial)
        except RollbackError as error:
            raise ExplorationAborted(
                f"Neither a state nor the initial one could be restored: {error}"
            ) from cause

    def _check(self, invariants: list[Invariant], state: State) -> None:
        for check in invariants:
            key = (check.name, state.id)
            if key in self._found:
                continue
            problem = check.problem(self._world)
            if problem is not None:
                violation = Violation(
                    invariant=check.name,
                    severity=check.severity,
                    message=problem,
                    state_id=state.id,
                    path=(),
                    check=check,
                )
                self._note(violation)

    def _judge(self, outcome: Outcome, origin: State, step: Step) -> None:
        """Record an exception that the action does not declare as a violation."""
        failure = outcome.failure_of(step.action)
        if failure is None:
            return
        violation = Violation(
            invariant=failure[0],
            severity="high",
            message=failure[1],
            state_id=origin.id,
            path=(step,),
        )
        self._note(violation)

    def _shrink(self) -> None:
        """Shrink the path to the nearest violation of each invariant, and leave other paths."""
        nearest = self.result.nearest()
        for violation in nearest:
            try:
                shrink(self._world, violation, self._initial)
            except RollbackError as error:
                self._warn(f"the path to {violation.invariant} was not shortened: {error}")
            except KeyboardInterrupt:
                self._warn("interrupted: paths may be longer than necessary")
                break
        # A shorter path may end in a state whose violation was already found by a longer one.
        found = [*self.result.violations, *nearest]
        self.result.violations = list({violation.key: violation for violation in found}.values())

    def _release(self, state: State) -> None:
        if state is not self.result.graph.initial and state.checkpoint_id is not None:
            self._world.release(state.checkpoint_id)
            state.checkpoint_id = None

    def _leave(self) -> None:
        world = self._world
        is_back = True
        try:
            world.rollback(self._initial)
        except RollbackError as error:
            is_back = False
            self._warn(f"the world could not be restored to its initial state: {error}")
        for state in self.result.graph.states.values():
            if state.checkpoint_id is not None:
                world.release(state.checkpoint_id)
                state.checkpoint_id = None
        world.count_runs({})
        if self._notes is not None:
            self._notes.commit()
        if self._recording is not None and is_back:
            self._recording.forget_initial(world)


def _unique(kind: str, things: list[Any]) -> list[Any]:
    names = [thing.name for thing in things]
    for name in names:
        if names.count(name) > 1:
            raise InvalidArgument(f"two {kind}s are called {name}")
    return things
