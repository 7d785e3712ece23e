"""The plan: typed steps with postconditions and the evidence that they hold.

It is stored in the session's channel `plan`. A session that never had a plan has no such channel,
an abandoned plan is None, and `{}` is an empty plan; the three are kept apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import msgspec

from ..arguments import shown
from ..errors import InvalidArgument, InvalidValue, SchemaMismatch
from .shapes import Shape, read

PLAN_FORMAT = 1
PLAN_CHANNEL = "plan"
StepStatus = Literal["pending", "active", "done", "failed", "skipped"]
STEP_STATUSES: tuple[StepStatus, ...] = get_args(StepStatus)
UNSET = msgspec.UNSET


@dataclass(frozen=True, kw_only=True)
class Postcondition(Shape):
    """What must hold when a step is done; `evidence` is UNSET until it is shown to hold."""

    text: str
    evidence: Any = UNSET

    @property
    def is_met(self) -> bool:
        """Whether there is non-empty evidence."""
        return self.evidence is not UNSET and bool(self.evidence)


@dataclass(frozen=True, kw_only=True)
class Step(Shape):
    """One step of a plan; `evidence` is UNSET until there is any."""

    id: str
    title: str = ""
    status: StepStatus = "pending"
    postconditions: tuple[Postcondition, ...] = ()
    evidence: Any = UNSET


@dataclass(frozen=True, kw_only=True)
class Plan(Shape):
    """What an agent intends to do, step by step."""

    format: int = PLAN_FORMAT
    goal: str | None = None
    steps: tuple[Step, ...] = ()

    ALWAYS = frozenset({"format"})

    def step(self, step_id: str) -> Step:
        """Return a step by its id."""
        for step in self.steps:
            if step.id == step_id:
                return step
        raise InvalidArgument(f"the plan has no step {shown(step_id)}")

    def with_step(self, step: Step) -> Plan:
        """Return the plan with the step of this id replaced, or added at the end."""
        if all(each.id != step.id for each in self.steps):
            return replace(self, steps=(*self.steps, step))
        return replace(
            self, steps=tuple(step if each.id == step.id else each for each in self.steps)
        )

    @property
    def is_done(self) -> bool:
        """Whether every step is skipped, or done with all its postconditions met."""
        return all(
            step.status == "skipped"
            or (step.status == "done" and all(each.is_met for each in step.postconditions))
            for step in self.steps
        )


def read_plan(data: Any) -> Plan | None:
    """Return a stored plan; None stays None. Raises InvalidValue or SchemaMismatch."""
    if data is None:
        return None
    plan = read(Plan, data, PLAN_CHANNEL)
    if plan.format > PLAN_FORMAT:
        raise SchemaMismatch(
            f"the plan has format {plan.format}; this Holdfast reads formats up to {PLAN_FORMAT}",
            current=plan.format,
            newest=PLAN_FORMAT,
        )
    if len({step.id for step in plan.steps}) < len(plan.steps):
        raise InvalidValue(
            f"{PLAN_CHANNEL}.steps has two steps with the same id", path=f"{PLAN_CHANNEL}.steps"
        )
    return plan


def write_plan(plan: Plan | None) -> dict[str, Any] | None:
    """Return a plan as it is stored."""
    return None if plan is None else plan.to_plain()
