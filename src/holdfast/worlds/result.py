"""The result of an exploration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from ..formatting import plural
from .graph import StateGraph
from .invariants import SEVERITIES, Severity, Violation
from .world import Leak

_SHOWN_MAX: Final = 20

Ended = Literal[
    "complete", "max_steps", "max_states", "max_seconds", "stop_on_violation", "interrupted"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far an exploration has come."""

    steps: int
    states: int
    waiting: int
    violations: int
    seconds: float


@dataclass(slots=True, kw_only=True)
class Exploration:
    """The graph that was explored, the problems found in it, and why the exploration ended.

    `is_cut` says that no actions were tried in states at `max_depth`; `replayed` counts the states
    that were reached by repeating actions. Warnings say what could not be done.
    """

    graph: StateGraph
    strategy: str
    ended: Ended = "complete"
    steps: int = 0
    seconds: float = 0.0
    violations: list[Violation] = field(default_factory=list)
    leaks: Sequence[Leak] = ()
    warnings: list[str] = field(default_factory=list)
    unused_actions: list[str] = field(default_factory=list)
    replayed: int = 0
    is_cut: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether every possible action was tried in every state."""
        return self.ended == "complete" and not self.is_cut and not self.warnings

    @property
    def has_passed(self) -> bool:
        """Whether no problem was found; a limit may still have ended the exploration early."""
        return not self.violations and not self.leaks

    def worst(self) -> Severity | None:
        """Return the highest severity of the violations."""
        found = [SEVERITIES.index(violation.severity) for violation in self.violations]
        return SEVERITIES[max(found)] if found else None

    def nearest(self) -> list[Violation]:
        """Return the violation with the shortest path for each invariant, nearest first."""
        nearest: dict[str, Violation] = {}
        for violation in sorted(self.violations, key=lambda found: len(found.path)):
            nearest.setdefault(violation.invariant, violation)
        return list(nearest.values())

    def summary(self) -> str:
        """Return a summary of a few lines, as text."""
        extent = f"ended by {self.ended}"
        if self.ended == "complete":
            extent = "with warnings" if self.warnings else "all of it"
        if self.is_cut:
            extent += ", not beyond max_depth"
        size = f"{len(self.graph.states)} states, {len(self.graph.transitions)} transitions"
        time = f"{self.steps} steps in {self.seconds:.2f} s"
        lines = [f"{size}, {time} ({self.strategy}; {extent})"]
        if self.unused_actions:
            lines.append(f"never possible: {', '.join(self.unused_actions)}")
        lines += [f"leak: {leak.system} was not fully restored" for leak in self.leaks]
        lines += [f"warning: {warning}" for warning in self.warnings]
        lines += [*self.listed(), plural(len(self.violations), "violation")]
        return "\n".join(lines)

    def listed(self) -> list[str]:
        """Return the nearest violations as text, with their paths, and how many more there are."""
        nearest = sorted(self.violations, key=lambda violation: len(violation.path))
        lines = [str(violation) for violation in nearest[:_SHOWN_MAX]]
        if len(nearest) > _SHOWN_MAX:
            lines.append(f"… and {len(nearest) - _SHOWN_MAX} more, farther away")
        return lines
