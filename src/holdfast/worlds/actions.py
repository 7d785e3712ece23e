"""Actions: what can be done to a world, with which arguments, and when."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, overload

import msgspec

from ..arguments import require_text, require_whole, shown
from ..errors import InvalidArgument
from .words import message_of, text_of

if TYPE_CHECKING:
    from .world import World

P = ParamSpec("P")
Arguments = Mapping[str, Any]
Failure = Exception | SystemExit
Failures = tuple[type[Failure], ...]

_ARGUMENTS_MAX: Final = 10_000


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How an action ended: its value, or the exception that it raised."""

    value: Any = None
    error: Failure | None = None
    seconds: float = 0.0
    is_expected: bool = True

    @property
    def is_failure(self) -> bool:
        """Whether the action raised an exception that it does not declare."""
        return self.error is not None and not self.is_expected

    def failure_of(self, action: str) -> tuple[str, str] | None:
        """Return the name and message of the violation that a failure is, or None."""
        if self.error is None or not self.is_failure:
            return None
        kind = type(self.error).__name__
        return f"{action} raises {kind}", message_of(self.error) or kind


class Step(msgspec.Struct, frozen=True):
    """A call of an action: its name and its arguments."""

    action: str
    arguments: Arguments

    def __str__(self) -> str:
        given = ", ".join(f"{name}={text_of(value)}" for name, value in self.arguments.items())
        return f"{self.action}({given})"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Action:
    """A named function of a world, with what an exploration needs to know about it.

    `requires` says whether the action is possible now; it is also called with the arguments if
    `parameters` are given. `after` names actions that must have run on the path before, `limit`
    how often this one may run on a path. `expects` are exceptions that are ordinary results.
    """

    name: str
    run: Callable[..., Any]
    parameters: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    requires: Callable[..., bool] | None = None
    after: tuple[str, ...] = ()
    limit: int | None = None
    expects: Failures = ()
    is_replayable: bool = True
    weight: float = 1.0
    tags: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        require_text("the name of an action", self.name)
        if self.limit is not None:
            require_whole("limit", self.limit, 1)
        if not isinstance(self.weight, int | float) or not 0 < self.weight < float("inf"):
            raise InvalidArgument(f"weight must be a positive number, not {shown(self.weight)}")
        count = 1
        for name, values in self.parameters.items():
            if not isinstance(values, Sequence) or isinstance(values, str) or not values:
                raise InvalidArgument(
                    f"parameter {name} of {self.name} must have a list of values that is not "
                    f"empty, not {shown(values)}"
                )
            count *= len(values)
        if count > _ARGUMENTS_MAX:
            raise InvalidArgument(
                f"{self.name} has {count:,} combinations of arguments; {_ARGUMENTS_MAX:,} are "
                "allowed"
            )

    def __call__(self, world: World, /, **arguments: Any) -> Any:
        """Call the function directly, as a test would."""
        return self.run(world, **arguments)

    def is_possible(self, world: World, arguments: Arguments) -> bool:
        """Return whether the action may run now: by its limit, what ran before, and `requires`."""
        if self.limit is not None and world.runs.get(self.name, 0) >= self.limit:
            return False
        if self.after and not all(world.runs.get(name) for name in self.after):
            return False
        return self.requires is None or bool(self.requires(world, **arguments))

    def combinations(self) -> list[dict[str, Any]]:
        """Return every combination of arguments, in the order of the values."""
        values = itertools.product(*self.parameters.values())
        return [dict(zip(self.parameters, combination, strict=True)) for combination in values]


@overload
def action(function: Callable[Concatenate[World, P], Any], /) -> Action: ...
@overload
def action(
    *,
    name: str | None = ...,
    parameters: Mapping[str, Sequence[Any]] | None = ...,
    requires: Callable[..., bool] | None = ...,
    after: Sequence[str] = ...,
    limit: int | None = ...,
    expects: type[Failure] | Failures = ...,
    replayable: bool = ...,
    weight: float = ...,
    tags: Sequence[str] = ...,
) -> Callable[[Callable[..., Any]], Action]: ...
def action(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    parameters: Mapping[str, Sequence[Any]] | None = None,
    requires: Callable[..., bool] | None = None,
    after: Sequence[str] = (),
    limit: int | None = None,
    expects: type[Failure] | Failures = (),
    replayable: bool = True,
    weight: float = 1.0,
    tags: Sequence[str] = (),
) -> Action | Callable[[Callable[..., Any]], Action]:
    """Turn a function whose first parameter is the world into an action, named after it."""

    def make(function: Callable[..., Any]) -> Action:
        return Action(
            name=name or function.__name__,
            run=function,
            parameters=dict(parameters or {}),
            requires=requires,
            after=(after,) if isinstance(after, str) else tuple(after),
            limit=limit,
            expects=expects if isinstance(expects, tuple) else (expects,),
            is_replayable=replayable,
            weight=weight,
            tags=frozenset(tags),
        )

    return make if function is None else make(function)


def as_action(what: Action | Callable[..., Any]) -> Action:
    """Return an action; a plain function is turned into one."""
    if isinstance(what, Action):
        return what
    if not callable(what):
        raise InvalidArgument(f"an action must be a function of the world, not {shown(what)}")
    return action(what)
