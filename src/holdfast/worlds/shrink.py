"""Shrinking: removing the steps of a path that a violation does not need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .actions import Step
from .words import FAILURES

if TYPE_CHECKING:
    from .invariants import Violation
    from .world import World


def shrink(world: World, violation: Violation, initial: str) -> None:
    """Make the path of a violation shorter, as long as it ends in the same violation.

    Larger parts are removed first, then single steps, until no more can be removed. The message
    and the state become those at the end of the new path. A path with an action that must not be
    repeated is left as it is.
    """
    steps = list(violation.path)
    if any(not world.graph.action(step.action).is_replayable for step in steps):
        return
    size = len(steps) // 2
    while size:
        start = 0
        while start < len(steps):
            shorter = steps[:start] + steps[start + size :]
            problem = _problem_after(world, violation, initial, shorter)
            if problem is None:
                start += size
                continue
            steps = shorter
            violation.path, violation.message = steps, problem
            if violation.check is not None:
                violation.state_id = world.present_id()
        size //= 2


def _problem_after(
    world: World, violation: Violation, initial: str, steps: Sequence[Step]
) -> str | None:
    """Return what is wrong at the end of a path, if it is the same violation."""
    world.rollback(initial)
    failure: tuple[str, str] | None = None
    for step in steps:
        action = world.graph.action(step.action)
        try:
            if not action.is_possible(world, step.arguments):
                return None
        except FAILURES:
            return None
        failure = world.act(action, **step.arguments).failure_of(action.name)
    if violation.check is not None:
        return violation.check.problem(world)
    return failure[1] if failure is not None and failure[0] == violation.invariant else None
