"""What an agent is told when it is made, checked once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast, get_args

from ..arguments import require_one_of, require_seconds, require_whole, shown
from ..effects.schema import parameters_of, taking_plain
from ..effects.tools import Tool, by_name
from ..errors import InvalidArgument
from .budget import Budget
from .models import Model
from .progress import Progress
from .transcript import ToolCall

Verdict = Literal["allow", "deny", "ask"]
Decision: TypeAlias = Verdict | tuple[Verdict, str]
Permit: TypeAlias = Callable[[ToolCall, Any], Decision | Awaitable[Decision]]
Approve: TypeAlias = Callable[[ToolCall, Any], bool | Awaitable[bool]]
OnProgress: TypeAlias = Callable[[Progress], object]
OnUnresolved = Literal["stop", "tell"]

TURNS_MAX = 50
REPEATS_MAX = 3
RETRIES = 2
BACKOFF_SECONDS = 0.5
BACKOFF_SECONDS_MAX = 30.0
CADENCE_SECONDS_MAX = 366 * 24 * 3600
CONTENT_BYTES_MAX = 262_144


@dataclass(frozen=True, slots=True)
class Cadence:
    """When a turn is saved by a commit of its own: after each call, or every so often."""

    each_call: bool = False
    turns: int | None = 1
    seconds: float | None = None


def every(*, turns: int | None = None, seconds: float | None = None) -> Cadence:
    """Save every so many turns, or whenever so many seconds have passed, whichever comes first."""
    if turns is None and seconds is None:
        raise InvalidArgument("every takes turns=, seconds=, or both")
    if turns is not None:
        require_whole("turns", turns, 1)
    if seconds is not None:
        require_seconds("seconds", seconds, CADENCE_SECONDS_MAX)
    return Cadence(turns=turns, seconds=seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How one agent works."""

    model: Model
    tools: Mapping[str, Tool[..., Any]]
    system: str | None
    budget: Budget
    cadence: Cadence
    settings: Mapping[str, Any]
    planning: bool
    permit: Permit | None
    approve: Approve | None
    on_unresolved: OnUnresolved
    on_progress: OnProgress | None
    repeats_max: int | None
    turns_max: int
    retries: int
    backoff_seconds: float
    retry_on: tuple[type[BaseException], ...]
    scratchpad: Path | None
    source: str
    instance: str | None
    content_bytes_max: int = field(default=CONTENT_BYTES_MAX)


def make_rules(
    *,
    model: object,
    tools: Sequence[Tool[..., Any]],
    budget: Budget | None,
    cadence: Cadence | Literal["turn", "call"],
    on_unresolved: str,
    repeats_max: int | None,
    turns_max: int,
    retries: int,
    backoff_seconds: float,
    scratchpad: str | Path | None,
    settings: Mapping[str, Any] | None,
    **rest: Any,
) -> Rules:
    """Check an agent's arguments before anything is done."""
    if not callable(model):
        raise InvalidArgument(
            f"a model is a callable from a Request to a Response, not {type(model).__name__}"
        )
    if budget is not None and not isinstance(budget, Budget):
        raise InvalidArgument(f"budget must be a Budget, not {type(budget).__name__}")
    require_one_of("on_unresolved", on_unresolved, get_args(OnUnresolved))
    if repeats_max is not None:
        require_whole("repeats_max", repeats_max, 1)
    require_whole("turns_max", turns_max, 1)
    require_whole("retries", retries, 0)
    require_seconds("backoff_seconds", backoff_seconds, CADENCE_SECONDS_MAX)
    for name in ("permit", "approve", "on_progress"):
        if rest[name] is not None and not callable(rest[name]):
            raise InvalidArgument(f"{name} must be a function, not {type(rest[name]).__name__}")
    return Rules(
        model=cast("Model", model),
        tools={name: _ready(known) for name, known in by_name(list(tools)).items()},
        budget=Budget() if budget is None else budget,
        cadence=_cadence(cadence),
        on_unresolved="tell" if on_unresolved == "tell" else "stop",
        repeats_max=repeats_max,
        turns_max=turns_max,
        retries=retries,
        backoff_seconds=backoff_seconds,
        scratchpad=None if scratchpad is None else Path(scratchpad).absolute(),
        settings=dict(settings or {}),
        **rest,
    )


def _ready(known: Tool[..., Any]) -> Tool[..., Any]:
    """Return a tool that can be described to a model and called with what a model writes."""
    parameters_of(known.function)
    return replace(known, function=taking_plain(known.function))


def _cadence(cadence: object) -> Cadence:
    if isinstance(cadence, Cadence):
        return cadence
    if cadence == "turn":
        return Cadence()
    if cadence == "call":
        return Cadence(each_call=True)
    raise InvalidArgument(
        f"cadence must be 'turn', 'call' or every(turns=…, seconds=…), not {shown(cadence)}"
    )
