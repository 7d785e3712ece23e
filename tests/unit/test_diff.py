"""A diff says exactly what differs, for programs to apply and for people to read."""

from __future__ import annotations

import asyncio
import copy
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.checkpoints.diff import (
    Diff,
    ItemDiff,
    ListDiff,
    ValueDiff,
    brief,
    compare,
    same,
)
from holdfast.codec import Codec

TEXT = st.text("aü\n\x1b\u202e", max_size=3)
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner),
    max_leaves=12,
)
CHANNELS = st.dictionaries(st.sampled_from("abcd"), VALUES, max_size=4)


def apply(before: dict[str, Any], diff: Diff) -> dict[str, Any]:
    """Make the newer channels from the older ones and what a program can read of the diff."""
    channels = copy.deepcopy(before)
    for found in diff.to_dict()["channels"]:
        name = found["channel"]
        if found["change"] == "removed":
            del channels[name]
        elif "items" in found:
            old, items = channels.get(name, []), found["items"]
            kept = old[len(old) - items["suffix"] :] if items["suffix"] else []
            added = [item["value"] for item in items["added"]]
            channels[name] = [*old[: items["prefix"]], *added, *kept]
        else:
            for change in found["values"]:
                put(channels, [name, *change["path"]], change)
    return channels


def put(place: Any, path: list[Any], change: dict[str, Any]) -> None:
    for key in path[:-1]:
        place = place[key]
    if "after" in change:
        if isinstance(place, list) and change["change"] == "added":
            place.insert(path[-1], change["after"])
        else:
            place[path[-1]] = change["after"]
    elif isinstance(place, list):
        # Those behind it move up, so each that is removed is found where the first was.
        del place[min(path[-1], len(place) - 1)]
    else:
        del place[path[-1]]


def nested_lists_keep_their_length(before: Any, after: Any) -> bool:
    if type(before) is list and type(after) is list:
        pairs = zip(before, after, strict=False)
        return len(before) == len(after) and all(nested_lists_keep_their_length(*p) for p in pairs)
    if type(before) is dict and type(after) is dict:
        return all(
            nested_lists_keep_their_length(before[k], after[k]) for k in before if k in after
        )
    return True


@given(CHANNELS, CHANNELS)
def test_the_older_channels_and_the_diff_give_the_newer_ones(
    before: dict[str, Any], after: dict[str, Any]
) -> None:
    shared = [name for name in before if name in after and type(before[name]) is not list]
    if all(nested_lists_keep_their_length(before[name], after[name]) for name in shared):
        assert same(apply(before, compare(before, after)), after)


@given(CHANNELS)
def test_equal_channels_have_no_diff(channels: dict[str, Any]) -> None:
    assert compare(channels, copy.deepcopy(channels)) == Diff(channels=())


@given(CHANNELS, CHANNELS)
def test_it_is_plain_data_and_text_without_control_characters(
    before: dict[str, Any], after: dict[str, Any]
) -> None:
    diff = compare(before, after)
    assert json.loads(json.dumps(diff.to_dict())) == diff.to_dict()
    assert all(line.isprintable() for line in diff.lines())


@pytest.mark.parametrize(
    ("left", "right"),
    [(1, 1.0), (1, True), (0, False), (0.0, -0.0), (None, False), ([], {}), ("", None),
     ([1], [1.0]), ({"a": 1}, {"a": True}), ({"a": None}, {})],
)  # fmt: skip
def test_what_is_equal_in_python_and_not_in_json_differs(left: Any, right: Any) -> None:
    assert not same(left, right)
    (channel,) = compare({"a": left}, {"a": right}).channels
    assert channel.change == "changed"


def test_the_order_of_keys_does_not_matter() -> None:
    assert compare({"a": {"x": 1, "y": 2}}, {"a": {"y": 2, "x": 1}}).channels == ()


def test_a_channel_is_added_removed_or_changed() -> None:
    diff = compare({"gone": 1, "same": 2, "new": None}, {"same": 2, "new": 3, "added": None})
    assert [(found.channel, found.change) for found in diff.channels] == [
        ("added", "added"), ("gone", "removed"), ("new", "changed"),
    ]  # fmt: skip
    assert diff.to_dict() == {
        "channels": [
            {"channel": "added", "change": "added",
             "values": [{"path": [], "change": "added", "after": None}]},
            {"channel": "gone", "change": "removed",
             "values": [{"path": [], "change": "removed", "before": 1}]},
            {"channel": "new", "change": "changed",
             "values": [{"path": [], "change": "changed", "before": None, "after": 3}]},
        ]
    }  # fmt: skip


def items(before: list[Any], after: list[Any]) -> ListDiff:
    (channel,) = compare({"a": before}, {"a": after}).channels
    assert channel.items is not None
    return channel.items


def test_lists_name_the_items_between_what_stays() -> None:
    found = items([1, 2, 3, 4], [1, 9, 8, 7, 4])
    assert (found.prefix, found.suffix) == (1, 1)
    assert [(item.index, item.value) for item in found.removed] == [(1, 2), (2, 3)]
    assert [(item.index, item.value) for item in found.added] == [(1, 9), (2, 8), (3, 7)]
    grown = items([1, 1], [1, 1, 1])
    assert (grown.prefix, grown.suffix, len(grown.added)) == (2, 0, 1)
    cleared = items([1], [])
    assert (cleared.prefix, [item.value for item in cleared.removed]) == (0, [1])


def test_values_name_each_change_by_its_path() -> None:
    before = {"steps": [{"done": False, "text": "a"}, {"done": False}], "n": 1}
    after = {"steps": [{"done": True, "text": "a"}, {"done": False}, {"x": 1}], "m": []}
    (channel,) = compare({"plan": before}, {"plan": after}).channels
    assert channel.values == (
        ValueDiff(path=("m",), change="added", before=None, after=[]),
        ValueDiff(path=("n",), change="removed", before=1, after=None),
        ValueDiff(path=("steps", 0, "done"), change="changed", before=False, after=True),
        ValueDiff(path=("steps", 2), change="added", before=None, after={"x": 1}),
    )


def test_a_transcript_reads_like_one() -> None:
    before = {"transcript": [{"role": "user", "content": "Hi"}, {"role": "user", "content": "B"}]}
    after = {
        "transcript": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": [
                {"type": "text", "text": "Let me\nlook"},
                {"type": "tool_use", "name": "search", "input": {"q": "ü"}}]},
            {"role": "tool", "blocks": [{"kind": "tool_result", "content": "found \x1b[31m"}]},
            {"role": "user", "content": None},
            {"no": "role"},
        ],
        "plan": {"a": 1},
    }  # fmt: skip
    assert compare(before, after).lines() == [
        "plan (added)",
        '+ plan: {"a": 1}',
        "transcript (changed): 1 stay, 1 removed, 4 added",
        "- [1] user: B",
        '+ [1] assistant: Let me look search({"q": "ü"})',
        "+ [2] tool: found \N{REPLACEMENT CHARACTER}[31m",
        "+ [3] user:",
        '+ [4] {"no": "role"}',
    ]


def test_long_lists_and_long_texts_are_cut_short() -> None:
    lines = compare({"a": list(range(200))}, {"a": ["x" * 500]}).lines(items_max=3)
    assert lines[:5] == [
        "a (changed): 0 stay, 200 removed, 1 added", "- [0] 0", "- [1] 1", "- [2] 2",
        "  … 197 more removed",
    ]  # fmt: skip
    assert len(lines[5]) == len("+ [0] ") + 120
    assert lines[5].endswith("…")
    many = compare({"v": {}}, {"v": {str(n): n for n in range(60)}}).lines(items_max=2)
    assert many[-1] == "  … 58 more changes"
    assert brief("x" * 500, 10) == '"xxxxxxxx…'


def test_what_is_shared_counts_and_is_not_needed() -> None:
    (channel,) = compare({"a": [1]}, {"a": [2, 3]}, {"a": 1_000}).channels
    assert channel.items == ListDiff(
        prefix=1_000,
        suffix=0,
        removed=(ItemDiff(index=1_000, value=1),),
        added=(ItemDiff(index=1_000, value=2), ItemDiff(index=1_001, value=3)),
    )
    assert compare({"a": []}, {"a": []}, {"a": 1_000}).channels == ()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.lists(st.integers(0, 3), max_size=70)),
        st.tuples(st.just("save"), st.lists(st.integers(0, 2), max_size=5)),
        st.tuples(st.just("trim"), st.integers(0, 60)),
        st.tuples(
            st.just("plan"), st.dictionaries(st.sampled_from("ab"), st.text("ab", max_size=200))
        ),
        st.tuples(st.just("rewind"), st.integers(1, 9)),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(STEPS)
def test_comparing_versions_equals_comparing_what_they_load(steps: list[Any]) -> None:
    with holdfast.open("sqlite://", durability="normal") as store:
        session = store.session()
        session.save(transcript=[0])
        for verb, value in steps:
            latest = session.latest()
            assert latest is not None
            match verb:
                case "append":
                    session.append("transcript", value)
                case "save":
                    session.save(transcript=value)
                case "trim":
                    session.save(transcript=[9, *latest["transcript"][value:]])
                case "plan":
                    session.save(plan=value)
                case "rewind":
                    session.rewind(min(value, latest.version))
        newest = session.info().version
        loaded = {version: session.at(version).channels for version in range(1, newest + 1)}
        for before, old in loaded.items():
            for after, new in loaded.items():
                assert session.diff(before, after) == compare(old, new)


def test_comparing_reads_only_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    with holdfast.open("sqlite://") as store:
        session = store.session()
        session.save(transcript=[{"n": n} for n in range(5_000)], plan={"x": "y" * 500})
        session.append("transcript", [{"n": -1}])
        decoded: list[object] = []
        decode = Codec.decode

        def counting(self: Codec, body: bytes) -> Any:
            decoded.append(body)
            return decode(self, body)

        monkeypatch.setattr(Codec, "decode", counting)
        (channel,) = session.diff(1, 2).channels
        assert channel.items is not None
        assert (channel.items.prefix, len(channel.items.added)) == (5_000, 1)
        assert len(decoded) < 20


def test_both_colours_and_a_fork_compare(place: Any) -> None:
    with holdfast.open(**place) as store:
        session = store.session("a")
        session.save(transcript=[1], plan=1)
        session.append("transcript", [2])
        fork = session.fork(2, id="b")
        fork.append("transcript", [3])
        expected = fork.diff(1, 3)
        assert [found.channel for found in expected.channels] == ["transcript"]
        with pytest.raises(holdfast.CheckpointNotFound):
            session.diff(1, 9)
        for wrong in (0, -1, True, "1", None):
            with pytest.raises(holdfast.InvalidArgument):
                session.diff(wrong, 1)  # type: ignore[arg-type]

    async def body() -> None:
        async with await holdfast.aopen(**place) as other:
            assert await (await other.find_session("b")).diff(1, 3) == expected

    asyncio.run(body())


def test_a_line_of_a_diff_shows_tool_calls() -> None:
    blocks = [
        {"kind": "text", "text": "I look."},
        {"kind": "tool_call", "call_id": "c1", "name": "look", "arguments": {"city": "Oslo"}},
    ]
    ours = {"role": "assistant", "blocks": blocks}
    assert brief(ours) == 'assistant: I look. look({"city": "Oslo"})'
    called = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
    openai = {"role": "assistant", "content": None, "tool_calls": [called]}
    assert brief(openai) == 'assistant: look({"a": 1})'
    assert brief({**openai, "content": "Now."}) == 'assistant: Now. look({"a": 1})'
    diff = compare({"t": []}, {"t": [openai]})
    assert diff.lines()[1] == '+ [0] assistant: look({"a": 1})'
