"""The options of an agent, checked when it is created."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from ..arguments import require_one_of, require_seconds, require_whole, shown
from ..effects.tools import Tool, by_name, parameters_of, taking_plain
from ..errors import InvalidArgument
from ..kernel.flow import require_function
from .budget import Budget
from .models import Model
from .peers import Peer
from .progress import Progress
from .transcript import ToolCall

Permission = Literal["allow", "deny", "ask"]
Decision: TypeAlias = Permission | tuple[Permission, str]
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
    """How often a commit of its own saves the turn: after each call, or by turns and time."""

    each_call: bool = False
    turns: int | None = 1
    seconds: float | None = None


def every(*, turns: int | None = None, seconds: float | None = None) -> Cadence:
    """Save after this many turns or seconds, whichever comes first."""
    if turns is None and seconds is None:
        raise InvalidArgument("every takes turns=, seconds=, or both")
    if turns is not None:
        require_whole("turns", turns, 1)
    if seconds is not None:
        require_seconds("seconds", seconds, CADENCE_SECONDS_MAX)
    return Cadence(turns=turns, seconds=seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The options of one agent."""

    model: Model
    tools: Mapping[str, Tool[..., Any]]
    peers: Mapping[str, Peer]
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

    def __post_init__(self) -> None:
        if not callable(self.model):
            raise InvalidArgument(
                "a model must be a callable from a Request to a Response, not "
                f"{type(self.model).__name__}"
            )
        require_function("a model", self.model)
        if not isinstance(self.budget, Budget):
            raise InvalidArgument(f"budget must be a Budget, not {type(self.budget).__name__}")
        require_one_of("on_unresolved", self.on_unresolved, get_args(OnUnresolved))
        if self.repeats_max is not None:
            require_whole("repeats_max", self.repeats_max, 1)
        require_whole("turns_max", self.turns_max, 1)
        require_whole("retries", self.retries, 0)
        require_seconds("backoff_seconds", self.backoff_seconds, CADENCE_SECONDS_MAX)
        for name in ("permit", "approve", "on_progress"):
            hook = getattr(self, name)
            if hook is not None:
                require_function(name, hook)


def described(tools: Sequence[Tool[..., Any]]) -> dict[str, Tool[..., Any]]:
    """Return tools by name that a model can call: described, and taking plain arguments."""
    found = by_name(list(tools))
    for name, tool in found.items():
        parameters_of(tool.function)
        found[name] = replace(tool, function=taking_plain(tool.function))
    return found


def cadence_of(cadence: object) -> Cadence:
    """Return a cadence, given by name or as itself."""
    if isinstance(cadence, Cadence):
        return cadence
    if cadence == "turn":
        return Cadence()
    if cadence == "call":
        return Cadence(each_call=True)
    raise InvalidArgument(
        f"cadence must be 'turn', 'call' or every(turns=…, seconds=…), not {shown(cadence)}"
    )
