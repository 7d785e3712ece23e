"""Invariants: conditions that must hold in every state of a world, and violations of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, get_args, overload

from ..arguments import require_one_of, require_text, shown
from ..errors import InvalidArgument
from .actions import Step
from .system import shown_id
from .words import FAILURES, said

if TYPE_CHECKING:
    from .world import World

Severity = Literal["low", "medium", "high", "critical"]
When = Literal["after", "before", "both"]

SEVERITIES: Final[tuple[Severity, ...]] = get_args(Severity)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Invariant:
    """A named check of a world that changes nothing: False, or an exception, is a violation.

    It runs after each action, or before it, or both; never during a rollback or a replay.
    """

    name: str
    check: Callable[[World], object]
    severity: Severity = "high"
    when: When = "after"
    message: str = ""

    def __post_init__(self) -> None:
        require_text("the name of an invariant", self.name)
        require_one_of("severity", self.severity, SEVERITIES)
        require_one_of("when", self.when, get_args(When))

    def __call__(self, world: World, /) -> object:
        """Call the check directly, as a test would."""
        return self.check(world)

    def problem(self, world: World) -> str | None:
        """Return what is wrong in the current state, or None."""
        try:
            if self.check(world) is not False:
                return None
        except FAILURES as error:
            return f"{self.message}: {said(error)}" if self.message else said(error)
        return self.message or f"{self.name} does not hold"


@overload
def invariant(function: Callable[[World], object], /) -> Invariant: ...
@overload
def invariant(
    *, name: str | None = ..., severity: Severity = ..., when: When = ..., message: str = ...
) -> Callable[[Callable[[World], object]], Invariant]: ...
def invariant(
    function: Callable[[World], object] | None = None,
    /,
    *,
    name: str | None = None,
    severity: Severity = "high",
    when: When = "after",
    message: str = "",
) -> Invariant | Callable[[Callable[[World], object]], Invariant]:
    """Turn a function of the world into an invariant, named after it."""

    def make(function: Callable[[World], object]) -> Invariant:
        return Invariant(
            name=name or function.__name__,
            check=function,
            severity=severity,
            when=when,
            message=message,
        )

    return make if function is None else make(function)


def as_invariant(what: Invariant | Callable[[World], object]) -> Invariant:
    """Return an invariant; a plain function is turned into one."""
    if isinstance(what, Invariant):
        return what
    if not callable(what):
        raise InvalidArgument(f"an invariant must be a function of the world, not {shown(what)}")
    return invariant(what)


def assert_holds(world: World, what: Invariant | Callable[[World], object]) -> None:
    """Raise AssertionError if an invariant is violated now."""
    checked = as_invariant(what)
    problem = checked.problem(world)
    if problem is not None:
        raise AssertionError(f"{checked.name}: {problem}")


@dataclass(slots=True, kw_only=True, eq=False)
class Violation:
    """An invariant that does not hold, or an action that raised an undeclared exception.

    `path` is the shortest known path to it from the initial state.
    """

    invariant: str
    severity: Severity
    message: str
    state_id: str
    path: Sequence[Step]
    # The check that failed; None for an action's exception.
    check: Invariant | None = None

    @property
    def key(self) -> tuple[str, str | None]:
        """The identity of a violation: an invariant counts once per state."""
        return self.invariant, self.state_id if self.check else None

    def __str__(self) -> str:
        way = " → ".join(map(str, self.path)) or "the initial state"
        place = f"{self.invariant} in {shown_id(self.state_id)}"
        return f"[{self.severity}] {place}: {self.message}\n  {way}"
