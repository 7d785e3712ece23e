"""Reaching a state by repeating the actions that led to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ReplayFailed
from .system import shown_id

if TYPE_CHECKING:
    from .graph import State, Transition
    from .world import World


def replay(world: World, state_id: str) -> State:
    """Restore the nearest valid checkpoint on the path to a state, and act from there."""
    target = world.graph.state(state_id)
    path = world.graph.path_to(target.id)
    start, steps = _nearest(world, target, path)
    for step in steps:
        action = world.graph.action(step.step.action)
        if not action.is_replayable:
            raise ReplayFailed(
                f"State {target.shown_id} cannot be replayed: {action.name} must not be repeated.",
                state=target.id,
                action=action.name,
            )
    world.rollback(start)
    for number, step in enumerate(steps, 1):
        world.act(world.graph.action(step.step.action), **step.step.arguments)
        reached, _ = world.observe_state()
        if reached.id != step.to_id:
            raise ReplayFailed(
                f"Step {number} of the replay, {step}, led to state {reached.shown_id} instead of "
                f"{shown_id(step.to_id)}: the action is not deterministic.",
                state=target.id,
                action=step.step.action,
                step=number,
                expected=step.to_id,
                found=reached.id,
            )
    return target


def _nearest(world: World, target: State, path: list[Transition]) -> tuple[str, list[Transition]]:
    """Return the last valid checkpoint on a path, and the transitions after it."""
    ids = [step.from_id for step in path] + [target.id]
    for index in range(len(path), -1, -1):
        checkpoint = world.graph.states[ids[index]].checkpoint_id
        if checkpoint is not None and world.is_valid(checkpoint):
            return checkpoint, path[index:]
    raise ReplayFailed(
        f"State {target.shown_id} cannot be replayed: no state on its path has a valid checkpoint.",
        state=target.id,
    )
