"""Messages and blocks: stored without loss, migrated, and shown to a provider in legal order."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.agent import (
    Message,
    ReasoningBlock,
    TextBlock,
    ToolCall,
    ToolResult,
    legal,
    read_block,
    read_message,
    read_transcript,
)
from holdfast.agent.transcript import BLOCKS, TRANSCRIPT_FORMAT, dangling, with_unique_calls
from holdfast.codec import Codec
from holdfast.errors import UnknownBlock

GOLDEN = Path(__file__).parent / "golden"
CODEC = Codec()
relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
words = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
OWN: dict[str, dict[str, Any]] = {
    "text": {"text": words},
    "reasoning": {"text": words, "metadata": st.dictionaries(words, plain, max_size=2)},
    "tool_call": {"call_id": words, "name": words, "arguments": plain},
    "tool_result": {
        "call_id": words,
        "content": plain,
        "is_error": st.booleans(),
        "replay_of": st.none() | words,
    },
}
OPTIONAL = {"metadata", "is_error", "replay_of", "id", "created_at"}


@st.composite
def stored_blocks(draw: st.DrawFn) -> dict[str, Any]:
    """A block of any kind as a database may hold it: any order, fields missing, fields unknown."""
    kind = draw(st.sampled_from(sorted(OWN)))
    fields = {name: draw(values) for name, values in OWN[kind].items()}
    fields |= {"kind": kind, "id": draw(words), "created_at": draw(st.integers(0, 2**60))}
    for name in draw(st.sets(st.sampled_from(sorted(OPTIONAL)))):
        fields.pop(name, None)
    fields |= draw(st.dictionaries(words.map(lambda word: f"x_{word}"), plain, max_size=2))
    names = draw(st.permutations(sorted(fields)))
    return {name: fields[name] for name in names}


@relaxed
@given(stored_blocks())
def test_a_block_of_every_kind_comes_back_byte_for_byte(stored: dict[str, Any]) -> None:
    assert CODEC.encode(read_block(stored).to_plain()) == CODEC.encode(stored)


@relaxed
@given(st.lists(stored_blocks(), max_size=4), st.dictionaries(words.map("y_{}".format), plain))
def test_a_message_comes_back_byte_for_byte(
    blocks: list[dict[str, Any]], unknown: dict[str, Any]
) -> None:
    stored = {"role": "user", **unknown, "blocks": blocks, "format": TRANSCRIPT_FORMAT, "id": "m"}
    assert CODEC.encode(read_message(stored).to_plain()) == CODEC.encode(stored)


def test_every_kind_of_block_is_among_the_examples() -> None:
    assert set(OWN) == set(BLOCKS)


def test_every_kind_survives_a_real_store(place: dict[str, Any]) -> None:
    stored = json.loads((GOLDEN / "format_2.json").read_text())
    with holdfast.open(**place) as store:
        store.session("s").save(transcript=stored)
    with holdfast.open(**place) as store:
        latest = store.session("s").latest()
        assert latest is not None
        messages = read_transcript(latest["transcript"])
    again = [message.to_plain() for message in messages]
    assert CODEC.encode(again) == CODEC.encode(stored)
    assert {block.kind for message in messages for block in message.blocks} == set(BLOCKS)


@pytest.mark.parametrize("number", [1, 2])
def test_a_stored_format_reads_as_it_was_written_down_when_it_was_new(number: int) -> None:
    """The golden file of a format, read, is the golden reading; it may never change."""
    stored = json.loads((GOLDEN / f"format_{number}.json").read_text())
    reading = json.loads((GOLDEN / f"format_{number}.read.json").read_text())
    messages = read_transcript(stored)
    assert json.dumps([message.to_plain() for message in messages]) == json.dumps(reading)
    assert all(message.format == TRANSCRIPT_FORMAT for message in messages)


def test_every_format_has_its_golden_file() -> None:
    assert sorted(path.name for path in GOLDEN.glob("format_?.json")) == [
        f"format_{number}.json" for number in range(1, TRANSCRIPT_FORMAT + 1)
    ]


def test_an_unknown_kind_is_a_clear_error() -> None:
    stored = {"format": 2, "id": "m", "role": "user", "blocks": [{"kind": "hologram", "id": "b"}]}
    with pytest.raises(UnknownBlock, match=r"transcript\[0\]\.blocks\[0\] has the kind 'hologram'"):
        read_transcript([stored])


@pytest.mark.parametrize(
    ("stored", "says"),
    [
        ({"format": 3, "id": "m", "role": "user", "blocks": []}, "install a newer Holdfast"),
        ({"format": 2, "id": "m", "role": "robot", "blocks": []}, "role is 'robot'"),
        ({"format": 2, "id": "m", "blocks": []}, "has no 'role'"),
        ({"format": 2, "id": 7, "role": "user", "blocks": []}, "id must be str, not int"),
        ({"format": True, "role": "user", "blocks": []}, "format is True"),
        ({"id": "m", "role": "user", "created_at": "soon", "blocks": []}, "not an ISO-8601 time"),
        ("hello", "must be a dict, not str"),
        ({"format": 2, "role": "user", "blocks": [{"kind": "text"}]}, "has no 'text'"),
    ],
)
def test_what_is_no_message_says_why(stored: Any, says: str) -> None:
    with pytest.raises(holdfast.HoldfastError, match=says):
        read_transcript([stored])


def test_a_missing_and_an_empty_transcript_are_read() -> None:
    assert read_transcript(None) == read_transcript([]) == []


def said(*blocks: Any, role: Any = "assistant") -> Message:
    return Message(role=role, blocks=blocks)


def asks(call_id: str) -> ToolCall:
    return ToolCall(call_id=call_id, name="look", arguments={})


def gives(call_id: str, content: Any = "ok") -> ToolResult:
    return ToolResult(call_id=call_id, content=content)


def test_a_provider_gets_each_result_directly_behind_its_call() -> None:
    user = said(TextBlock(text="and?"), role="user")
    first = said(ReasoningBlock(text="hm"), asks("a"), asks("b"))
    late = said(gives("b", 2), gives("a", 1), role="tool")
    stray = said(gives("zzz"), role="tool")
    shown = legal([first, user, late, stray])
    assert [message.role for message in shown] == ["assistant", "tool", "tool", "user"]
    assert [result.content for message in shown for result in message.results] == [1, 2]


def test_a_dangling_call_is_told_to_have_been_interrupted() -> None:
    shown = legal([said(asks("a")), said(TextBlock(text="hello?"), role="user")])
    (result,) = shown[1].results
    assert result.is_error
    assert "interrupted" in result.content
    assert [message.role for message in shown] == ["assistant", "tool", "user"]


def test_results_in_a_users_message_are_taken_out_of_it() -> None:
    mixed = said(gives("a"), TextBlock(text="go on"), role="user")
    shown = legal([said(asks("a")), mixed])
    assert [message.role for message in shown] == ["assistant", "tool", "user"]
    assert shown[2].text == "go on"
    assert shown[2].results == []


def test_what_is_legal_is_shown_as_it_is() -> None:
    good = [said(asks("a")), said(gives("a"), role="tool"), said(TextBlock(text="done"))]
    assert legal(good) == good
    assert dangling(good) == []


def test_call_ids_are_unique_in_a_transcript() -> None:
    message = said(asks("a"), asks("a"), asks(""), TextBlock(text="x"))
    unique = with_unique_calls(message, {"a", "a_2"})
    assert [call.call_id for call in unique.calls] == ["a_3", "a_4", "call_1"]
    assert with_unique_calls(unique, set()) == unique


def test_a_changed_field_keeps_the_rest_of_a_stored_block() -> None:
    stored = {"note": 1, "text": "old", "kind": "text"}
    block = read_block(stored)
    assert isinstance(block, TextBlock)
    changed = replace(block, text="new")
    assert changed.to_plain() == {"note": 1, "text": "new", "kind": "text"}
