"""The transcript: typed messages and blocks, stored losslessly in a versioned format.

A message is one item of the session's channel `transcript`:

    {"format": 2, "id": …, "role": "assistant", "created_at": ms, "blocks": [{"kind": "text", …}]}

Unknown fields are preserved exactly; an unknown kind of block is an error, because the model would
get an incomplete conversation. Format 1, which had no number (times as text, `args`, no ids of
blocks), is read as format 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, ClassVar, Literal, TypeAlias

from ..arguments import shown
from ..errors import InvalidValue, SchemaMismatch, UnknownBlock
from ..wire import travels
from .shapes import Shape, read

TRANSCRIPT_FORMAT = 2
TRANSCRIPT_CHANNEL = "transcript"
Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, kw_only=True)
class BlockShape(Shape):
    """The fields of every block."""

    kind: str = ""
    id: str = ""
    created_at: int = 0

    ALWAYS = frozenset({"kind"})


@travels
@dataclass(frozen=True, kw_only=True)
class TextBlock(BlockShape):
    """Text of a message."""

    kind: Literal["text"] = "text"
    text: str


@travels
@dataclass(frozen=True, kw_only=True)
class ReasoningBlock(BlockShape):
    """A model's reasoning; `metadata` comes from the provider (a signature, for example)."""

    kind: Literal["reasoning"] = "reasoning"
    text: str
    metadata: dict[str, Any] = field(default_factory=dict)


@travels
@dataclass(frozen=True, kw_only=True)
class ToolCall(BlockShape):
    """A tool call that the model requests.

    `call_id` comes from the model and is unique in a transcript. `id` is Holdfast's, and the call
    id in the ledger of effects. `arguments` may be text if the model wrote invalid JSON.
    """

    kind: Literal["tool_call"] = "tool_call"
    call_id: str
    name: str
    arguments: Any


@travels
@dataclass(frozen=True, kw_only=True)
class ToolResult(BlockShape):
    """The result or error of a call; `replay_of` is the effect whose stored result it is."""

    kind: Literal["tool_result"] = "tool_result"
    call_id: str
    content: Any
    is_error: bool = False
    replay_of: str | None = None


Block: TypeAlias = TextBlock | ReasoningBlock | ToolCall | ToolResult
BLOCKS: dict[str, type[Block]] = {
    "text": TextBlock,
    "reasoning": ReasoningBlock,
    "tool_call": ToolCall,
    "tool_result": ToolResult,
}


def read_block(data: Any, where: str = "block") -> Block:
    """Return a stored block, or raise UnknownBlock if its kind is unknown."""
    kind = data.get("kind") if isinstance(data, dict) else None
    shape = BLOCKS.get(kind) if isinstance(kind, str) else None
    if shape is None:
        raise UnknownBlock(
            f"{where} has the kind {kind!r}; this Holdfast knows {', '.join(BLOCKS)}; a newer "
            "version may have written it",
            path=where,
            kind=kind,
        )
    return read(shape, data, where)


@travels
@dataclass(frozen=True, kw_only=True)
class Message(Shape):
    """One message; it gets its id when it is stored. `metadata` names the model of an answer."""

    format: int = TRANSCRIPT_FORMAT
    id: str = ""
    role: Role
    created_at: int = 0
    blocks: tuple[Block, ...]
    metadata: dict[str, Any] = field(default_factory=dict)

    ALWAYS = frozenset({"format"})
    ITEMS: ClassVar = {"blocks": read_block}

    @property
    def text(self) -> str:
        """Its texts, joined."""
        return "\n".join(block.text for block in self.blocks if isinstance(block, TextBlock))

    @property
    def calls(self) -> list[ToolCall]:
        """The tool calls in it."""
        return [block for block in self.blocks if isinstance(block, ToolCall)]

    @property
    def results(self) -> list[ToolResult]:
        """The tool results in it."""
        return [block for block in self.blocks if isinstance(block, ToolResult)]


def read_message(data: Any, where: str = "message") -> Message:
    """Return a stored message of this or an earlier format, or raise InvalidValue."""
    if not isinstance(data, dict):
        raise InvalidValue(f"{where} must be a dict, not {type(data).__name__}", path=where)
    format_number = data.get("format", 1)
    if type(format_number) is not int or format_number < 1:
        raise InvalidValue(f"{where}.format is {shown(format_number)}", path=f"{where}.format")
    if format_number > TRANSCRIPT_FORMAT:
        raise SchemaMismatch(
            f"{where} has format {format_number}; this Holdfast reads formats up to "
            f"{TRANSCRIPT_FORMAT}; install a newer Holdfast",
            current=format_number,
            newest=TRANSCRIPT_FORMAT,
        )
    return read(Message, _from_1(data, where) if format_number == 1 else data, where)


def read_transcript(data: Any) -> list[Message]:
    """Return the messages of a stored channel; None means an empty transcript."""
    if data is None:
        return []
    if type(data) is not list:
        raise InvalidValue(
            f"transcript must be a list, not {type(data).__name__}", path=TRANSCRIPT_CHANNEL
        )
    return [
        read_message(each, f"{TRANSCRIPT_CHANNEL}[{number}]") for number, each in enumerate(data)
    ]


def _from_1(data: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a message of format 1 as format 2, with all its other fields."""
    rest = {name: value for name, value in data.items() if name not in {"created_at", "blocks"}}
    text = data.get("created_at")
    created_at, is_exact = _milliseconds(text, f"{where}.created_at")
    if not is_exact:
        rest["created_at_1"] = text
    blocks = data.get("blocks")
    if not isinstance(blocks, list):
        raise InvalidValue(f"{where}.blocks must be a list", path=f"{where}.blocks")
    raised = [
        _block_from_1(block, f"{data.get('id', '')}/{number}", created_at)
        for number, block in enumerate(blocks)
    ]
    return {"format": TRANSCRIPT_FORMAT, **rest, "created_at": created_at, "blocks": raised}


def _block_from_1(data: Any, block_id: str, created_at: int) -> Any:
    if not isinstance(data, dict):
        return data
    raised = dict(data)
    if data.get("kind") == "tool_call":
        raised["call_id"] = raised.pop("id", None)
        raised["arguments"] = raised.pop("args", None)
    raised.setdefault("id", block_id)
    raised.setdefault("created_at", created_at)
    return raised


def _milliseconds(text: Any, where: str) -> tuple[int, bool]:
    """Return an ISO-8601 time in milliseconds, and whether that is exact."""
    if text is None:
        return 0, True
    try:
        moment = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        raise InvalidValue(f"{where} is not an ISO-8601 time: {shown(text)}", path=where) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    microseconds = round(moment.timestamp() * 1_000_000)
    return microseconds // 1000, microseconds % 1000 == 0 and not moment.utcoffset()


def user_message(text: str, message_id: str = "") -> Message:
    """Return a user's message that is not stored yet."""
    return Message(id=message_id, role="user", blocks=(TextBlock(text=text),))


def stamped(
    message: Message, message_id: str, created_at: int, block_ids: Sequence[str]
) -> Message:
    """Return a message with missing ids and times filled in."""
    blocks = tuple(
        replace(block, id=block.id or block_id, created_at=block.created_at or created_at)
        for block, block_id in zip(message.blocks, block_ids, strict=True)
    )
    return replace(
        message,
        id=message.id or message_id,
        created_at=message.created_at or created_at,
        blocks=blocks,
    )


def with_unique_calls(message: Message, taken: set[str]) -> Message:
    """Return a message with unique call ids, so that a result refers to one call."""
    blocks: list[Block] = []
    seen = set(taken)
    for block in message.blocks:
        if not isinstance(block, ToolCall):
            blocks.append(block)
        else:
            wanted, number = block.call_id or "call", 1
            call_id = wanted if block.call_id else f"{wanted}_{number}"
            while call_id in seen:
                number += 1
                call_id = f"{wanted}_{number}"
            seen.add(call_id)
            blocks.append(block if call_id == block.call_id else replace(block, call_id=call_id))
    return replace(message, blocks=tuple(blocks))


def dangling(messages: Sequence[Message]) -> list[tuple[Message, ToolCall]]:
    """Return the calls without a result, in order, each with its message."""
    answered = {result.call_id for message in messages for result in message.results}
    return [
        (message, call)
        for message in messages
        for call in message.calls
        if call.call_id not in answered
    ]


def legal(messages: Sequence[Message]) -> list[Message]:
    """Return the transcript in the form that providers accept; the stored one is unchanged.

    The results of a message's calls follow it directly, once each and in order; a call without a
    result gets one that says it was interrupted; a result without a call is omitted.
    """
    results: dict[str, Message] = {}
    for message in messages:
        for result in message.results:
            results.setdefault(
                result.call_id, replace(message, role="tool", blocks=(result,), keys=None)
            )
    shown: list[Message] = []
    for message in messages:
        rest = tuple(block for block in message.blocks if not isinstance(block, ToolResult))
        if rest or not message.blocks:
            shown.append(
                message if len(rest) == len(message.blocks) else replace(message, blocks=rest)
            )
        for call in message.calls:
            shown.append(results.get(call.call_id) or interrupted(call))
    return shown


def interrupted(call: ToolCall) -> Message:
    """Return a result for a call whose outcome is unknown."""
    content = f"{call.name} was interrupted and has no result; it is unknown whether it ran."
    return Message(
        role="tool", blocks=(ToolResult(call_id=call.call_id, content=content, is_error=True),)
    )
