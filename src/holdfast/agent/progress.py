"""The events of a run that are passed to the `on_progress` callback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from .budget import Usage
from .transcript import Message, ToolCall, ToolResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """The session was loaded, with this many messages and calls without a result."""

    messages: int
    dangling_calls: int
    uncertain_attempts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """The model is about to be called; the estimate is recorded in the ledger of spend."""

    iteration: int
    attempt: int
    estimate: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFailed:
    """A model call failed; it is retried after `retry_seconds`, or not if that is None."""

    iteration: int
    attempt: int
    error: str
    retry_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The model's message is stored, with its cost."""

    iteration: int
    message: Message
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Calling:
    """A tool is about to be called, or its stored result to be looked up."""

    iteration: int
    call: ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """A tool call has its result; `result.replay_of` is set if the tool was not run for it."""

    iteration: int
    call: ToolCall
    result: ToolResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A turn was saved."""

    iteration: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """The run ended without an answer."""

    iteration: int
    error: str
    fields: dict[str, Any]


Progress: TypeAlias = (
    Resumed | Asking | AttemptFailed | Answered | Calling | Called | Saved | Stopped
)
