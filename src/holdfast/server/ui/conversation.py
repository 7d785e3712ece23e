"""Messages of agents for display, from Holdfast's own format and those of providers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ...agent.transcript import TRANSCRIPT_CHANNEL

CHANNELS = (TRANSCRIPT_CHANNEL, "messages", "conversation", "history")
RoleLook = Literal["user", "assistant", "tool", "system", "other"]
ROLES: dict[str, RoleLook] = {
    "user": "user", "human": "user", "assistant": "assistant", "ai": "assistant",
    "model": "assistant", "tool": "tool", "function": "tool", "system": "system",
    "developer": "system",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a message: text, reasoning, a tool call, a tool's result, or anything else."""

    kind: Literal["text", "reasoning", "call", "result", "other"]
    value: Any
    name: str = ""
    call_id: str = ""
    is_error: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message: its role and its parts."""

    role: str
    look: RoleLook
    parts: tuple[Part, ...]


def conversation_of(channels: Mapping[str, Any]) -> str:
    """Return the channel that holds the conversation; an empty text if none does."""
    for name in (*CHANNELS, *channels):
        items = channels.get(name)
        if isinstance(items, list) and items and isinstance(items[0], dict) and "role" in items[0]:
            return name
    return ""


def message_of(item: Any) -> Message:
    """Return an item of a conversation; an unknown format is shown as it is stored."""
    if not isinstance(item, dict) or not isinstance(item.get("role"), str):
        return Message(role="item", look="other", parts=(Part(kind="other", value=item),))
    role = item["role"]
    look = ROLES.get(role, "other")
    return Message(role=role, look=look, parts=tuple(_parts(item, look)))


def _parts(item: Mapping[str, Any], look: RoleLook) -> Iterator[Part]:
    said = next((item[name] for name in ("blocks", "parts", "content") if name in item), None)
    if look == "tool" and not isinstance(said, list):
        yield Part(
            kind="result",
            value=_decoded(said),
            name=str(item.get("name", "")),
            call_id=str(item.get("tool_call_id", "")),
        )
    elif isinstance(said, list):
        for each in said:
            yield _part(each)
    elif said is not None:
        yield Part(kind="text", value=str(said)) if isinstance(said, str) else _part(said)
    calls = item.get("tool_calls")
    for each in calls if isinstance(calls, list) else ():
        yield _part(each)


def _part(block: Any) -> Part:
    match block:
        case str(text):
            return Part(kind="text", value=text)
        case {"kind": "reasoning", "text": str(text)} | {"type": "thinking", "thinking": str(text)}:
            return Part(kind="reasoning", value=text)
        case {"function": {"name": str(name), "arguments": given}}:
            return _call(name, given, block.get("id", ""))
        case (
            {"name": str(name), "arguments": given}
            | {"name": str(name), "args": given}
            | {"name": str(name), "input": given}
        ):
            return _call(name, given, block.get("call_id") or block.get("id", ""))
        case {"kind": "tool_result", "content": value} | {"type": "tool_result", "content": value}:
            return Part(
                kind="result",
                value=value,
                call_id=str(block.get("call_id") or block.get("tool_use_id", "")),
                is_error=block.get("is_error") is True,
            )
        case {"text": str(text)}:
            return Part(kind="text", value=text)
        case _:
            return Part(kind="other", value=block)


def _call(name: str, given: Any, id: object) -> Part:
    return Part(kind="call", name=name, value=_decoded(given), call_id=str(id))


def _decoded(value: Any) -> Any:
    """Return arguments as data, if a provider has them as text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
