"""The transcript: typed messages and blocks, stored without loss, in a numbered format.

A message is one item of the session's channel `transcript`:

    {"format": 2, "id": …, "role": "assistant", "created_at": ms, "blocks": [{"kind": "text", …}]}

Fields that this version does not know are kept, byte for byte; a kind of block that it does not
know is an error, because a model would be shown half a conversation. Format 1, which had no number
(times as text, `args`, no ids of blocks), is read and becomes format 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, ClassVar, Literal, TypeAlias

from ..arguments import shown
from ..errors import InvalidValue, SchemaMismatch, UnknownBlock
from .shapes import Shape, read

TRANSCRIPT_FORMAT = 2
TRANSCRIPT_CHANNEL = "transcript"
Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, kw_only=True)
class BlockShape(Shape):
    """What every block of a message has."""

    kind: str = ""
    id: str = ""
    created_at: int = 0

    ALWAYS = frozenset({"kind"})


@dataclass(frozen=True, kw_only=True)
class TextBlock(BlockShape):
    """What was said."""

    kind: Literal["text"] = "text"
    text: str


@dataclass(frozen=True, kw_only=True)
class ReasoningBlock(BlockShape):
    """What a model thought; `metadata` is its provider's (a signature, for example)."""

    kind: Literal["reasoning"] = "reasoning"
    text: str
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ToolCall(BlockShape):
    """A tool that the model wants to be called.

    `call_id` is the model's and unique in a transcript. `id` is ours, and the call's name in the
    ledger of effects. `arguments` may be text where a model wrote no valid JSON.
    """

    kind: Literal["tool_call"] = "tool_call"
    call_id: str
    name: str
    arguments: Any


@dataclass(frozen=True, kw_only=True)
class ToolResult(BlockShape):
    """What a call returned, or why it did not; `replay_of` names the effect whose result it is."""

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
    """Return a stored block, or raise UnknownBlock if this version does not know its kind."""
    kind = data.get("kind") if isinstance(data, dict) else None
    shape = BLOCKS.get(kind) if isinstance(kind, str) else None
    if shape is None:
        raise UnknownBlock(
            f"{where} has the kind {kind!r}, and this Holdfast knows {', '.join(BLOCKS)}; a newer "
            "version may have written it",
            path=where,
            kind=kind,
        )
    return read(shape, data, where)


@dataclass(frozen=True, kw_only=True)
class Message(Shape):
    """One message; before it is stored it has no id. `metadata` says which model answered."""

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
    """Return a stored message of any format up to this one, or raise saying what is wrong."""
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
    """Return the messages of a stored channel; None and a missing one are an empty transcript."""
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
    """Return a message of format 1 as one of format 2, with everything else it held."""
    rest = {name: value for name, value in data.items() if name not in {"created_at", "blocks"}}
    said = data.get("created_at")
    created_at, is_exact = _milliseconds(said, f"{where}.created_at")
    if not is_exact:
        rest["created_at_1"] = said
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


def _milliseconds(said: Any, where: str) -> tuple[int, bool]:
    """Return a time that was written as text, and whether milliseconds are exact."""
    if said is None:
        return 0, True
    try:
        moment = datetime.fromisoformat(said)
    except (TypeError, ValueError):
        raise InvalidValue(f"{where} is not an ISO-8601 time: {shown(said)}", path=where) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    microseconds = round(moment.timestamp() * 1_000_000)
    return microseconds // 1000, microseconds % 1000 == 0 and not moment.utcoffset()


def user_message(text: str, message_id: str = "") -> Message:
    """Return a user's message, to be stored."""
    return Message(id=message_id, role="user", blocks=(TextBlock(text=text),))


def stamped(
    message: Message, message_id: str, created_at: int, block_ids: Sequence[str]
) -> Message:
    """Return a message with ids and times where it has none yet."""
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
    """Return a message whose call ids are unique: a result must find its one call."""
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
    """Return the calls that have no result, in order, each with its message."""
    answered = {result.call_id for message in messages for result in message.results}
    return [
        (message, call)
        for message in messages
        for call in message.calls
        if call.call_id not in answered
    ]


def legal(messages: Sequence[Message]) -> list[Message]:
    """Return the transcript as a provider accepts it, without changing what is stored.

    The results of a message's calls follow it directly, in the order of the calls and once each; a
    call without one is told to have been interrupted; a result without a call is left out.
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
    """Return the result of a call of which nothing is known."""
    content = f"{call.name} was interrupted and has no result; whether it ran is not known here."
    return Message(
        role="tool", blocks=(ToolResult(call_id=call.call_id, content=content, is_error=True),)
    )
