"""What cannot be is refused with a clear error, and nothing is written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import holdfast
from holdfast.state import State

DEEP: list[Any] = []
for _ in range(70):
    DEEP = [DEEP]

BAD_KEYS: list[Any] = ["", "k" * 257, "a\nb", "a\x00", "\x7f", "\x85", "\ud800", 1, None, b"k"]
CASES: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "value of bytes": (lambda s: s.set("k", b""), holdfast.InvalidValue, "k is of type bytes"),
    "value of a set": (lambda s: s.set("k", {1}), holdfast.InvalidValue, "sorted list"),
    "not a number": (lambda s: s.set("k", math.nan), holdfast.InvalidValue, "finite"),
    "infinity": (lambda s: s.set("k", {"a": [math.inf]}), holdfast.InvalidValue, r"k\.a\[0\]"),
    "key of a number": (lambda s: s.set("k", {1: 2}), holdfast.InvalidValue, "keys must be"),
    "too deep": (lambda s: s.set("k", DEEP), holdfast.LimitExceeded, "64 levels"),
    "too large": (lambda s: s.set("k", "x" * 2**21), holdfast.LimitExceeded, "1,048,576"),
    "too many digits": (lambda s: s.set("k", 10**5000), holdfast.LimitExceeded, "digits"),
    "a lone surrogate": (lambda s: s.set("k", "\udc00"), holdfast.InvalidValue, "surrogate"),
    "version of text": (
        lambda s: s.set("k", 1, if_version="1"), holdfast.InvalidArgument, "if_version"),
    "version below 0": (
        lambda s: s.set("k", 1, if_version=-1), holdfast.InvalidArgument, "if_version"),
    "version true": (
        lambda s: s.set("k", 1, if_version=True), holdfast.InvalidArgument, "if_version"),
    "version beyond": (
        lambda s: s.delete("k", if_version=2**60), holdfast.InvalidArgument, "if_version"),
    "unchanged list": (
        lambda s: s.set("k", 1, if_unchanged=["a"]), holdfast.InvalidArgument, "if_unchanged"),
    "unchanged version": (
        lambda s: s.set("k", 1, if_unchanged={"a": None}), holdfast.InvalidArgument, "'a'"),
    "unchanged key": (
        lambda s: s.set("k", 1, if_unchanged={"": 1}), holdfast.InvalidArgument, "key must be"),
    "idempotency key": (
        lambda s: s.set("k", 1, idempotency_key=""), holdfast.InvalidArgument, "idempotency_key"),
    "idempotency number": (
        lambda s: s.set("k", 1, idempotency_key=7), holdfast.InvalidArgument, "idempotency_key"),
    "increment by text": (lambda s: s.increment("n", "1"), holdfast.InvalidArgument, "number"),
    "increment by true": (lambda s: s.increment("n", True), holdfast.InvalidArgument, "number"),
    "increment by nan": (lambda s: s.increment("n", math.nan), holdfast.InvalidArgument, "finite"),
    "increment overflow": (
        lambda s: s.increment("huge", 1e308), holdfast.InvalidValue, "is not finite"),
    "append of text": (lambda s: s.append("xs", "ab"), holdfast.InvalidArgument, "list"),
    "append of a tuple": (lambda s: s.append("xs", (1,)), holdfast.InvalidArgument, "list"),
    "append of a bad item": (lambda s: s.append("xs", [b""]), holdfast.InvalidValue, "bytes"),
    "merge of a list": (lambda s: s.merge("o", [1]), holdfast.InvalidArgument, "object"),
    "merge of nothing": (lambda s: s.merge("o", None), holdfast.InvalidArgument, "object"),
    "add of an object": (lambda s: s.add("set", object()), holdfast.InvalidValue, "object"),
    "batch of text": (lambda s: s.batch("ab"), holdfast.InvalidArgument, "list"),
    "batch of nothing": (lambda s: s.batch([]), holdfast.LimitExceeded, "1 to 1,000"),
    "batch too long": (
        lambda s: s.batch([{"op": "increment", "key": "n"}] * 1001), holdfast.LimitExceeded,
        "1,001"),
    "batch of numbers": (lambda s: s.batch([1]), holdfast.InvalidArgument, "operation 1"),
    "batch without op": (lambda s: s.batch([{"key": "k"}]), holdfast.InvalidArgument, "op must"),
    "batch unknown op": (
        lambda s: s.batch([{"op": "drop", "key": "k"}]), holdfast.InvalidArgument, "'drop'"),
    "batch without key": (
        lambda s: s.batch([{"op": "delete"}]), holdfast.InvalidArgument, "operation 1: key"),
    "batch without value": (
        lambda s: s.batch([{"op": "set", "key": "k"}]), holdfast.InvalidArgument, "needs value"),
    "batch with more": (
        lambda s: s.batch([{"op": "delete", "key": "k", "value": 1}]), holdfast.InvalidArgument,
        "'value'"),
    "batch second bad": (
        lambda s: s.batch([{"op": "increment", "key": "k"}, {"op": "append", "key": "k"}]),
        holdfast.InvalidArgument, "operation 2"),
    "replace by a list": (lambda s: s.replace([1]), holdfast.InvalidArgument, "dict"),
    "replace bad key": (lambda s: s.replace({"": 1}), holdfast.InvalidArgument, "key must"),
    "replace bad value": (lambda s: s.replace({"a": 1, "b": b""}), holdfast.InvalidValue, "b is"),
    "patch of text": (lambda s: s.patch("a"), holdfast.InvalidArgument, "dict"),
    "patch bad version": (
        lambda s: s.patch({}, if_version="2"), holdfast.InvalidArgument, "if_version"),
    "snapshot before": (lambda s: s.snapshot(-1), holdfast.InvalidArgument, "at_sequence"),
    "snapshot beyond": (lambda s: s.snapshot(99), holdfast.InvalidArgument, "not yet at 99"),
    "snapshot of text": (lambda s: s.snapshot("1"), holdfast.InvalidArgument, "at_sequence"),
    "restore beyond": (lambda s: s.restore(99), holdfast.InvalidArgument, "not yet at 99"),
    "restore of nothing": (lambda s: s.restore(None), holdfast.InvalidArgument, "at_sequence"),
    "history limit": (lambda s: s.history("k", limit=0), holdfast.InvalidArgument, "limit"),
    "history before": (lambda s: s.history("k", before=0), holdfast.InvalidArgument, "before"),
    "events after": (lambda s: s.events(after=-1), holdfast.InvalidArgument, "after"),
    "events limit": (lambda s: s.events(limit=1001), holdfast.InvalidArgument, "limit"),
    "diff of text": (lambda s: s.diff("a", 1), holdfast.InvalidArgument, "before"),
    "summary of no keys": (lambda s: s.summary(max_keys=0), holdfast.InvalidArgument, "max_keys"),
    "summary bytes": (lambda s: s.summary(max_bytes=1), holdfast.InvalidArgument, "max_bytes"),
    "update retries": (
        lambda s: s.update("k", lambda v: v, retries=-1), holdfast.InvalidArgument, "retries"),
    "update of bytes": (lambda s: s.update("k", lambda v: b""), holdfast.InvalidValue, "bytes"),
    "compact beyond": (lambda s: s.compact(99), holdfast.InvalidArgument, "not yet at 99"),
    "keys of a number": (lambda s: s.keys(updated_by=1), holdfast.InvalidArgument, "updated_by"),
    "delete missing": (lambda s: s.delete("missing"), holdfast.NotFound, "'missing'"),
}  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[holdfast.Store]:
    with holdfast.open(f"sqlite:///{tmp_path_factory.mktemp('bad')}/store.db") as store:
        state = store.session("root").state
        state.set("huge", 1e308)
        state.set("k", 1)
        yield store


def refused(store: holdfast.Store, call: Callable[[State], Any], error: Any, words: str) -> None:
    state = store.session("root").state
    before, events = state.snapshot(), len(store.events("root", limit=10_000))
    with pytest.raises(error, match=words):
        call(state)
    assert state.snapshot() == before
    found = [e for e in store.events("root", limit=10_000)[events:] if e.kind == "state_changed"]
    assert found == []


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_refused(name: str, store: holdfast.Store) -> None:
    refused(store, *CASES[name])


@pytest.mark.parametrize("key", BAD_KEYS, ids=repr)
def test_bad_keys_are_refused(key: Any, store: holdfast.Store) -> None:
    calls: list[Callable[[State], Any]] = [
        lambda s: s.get(key),
        lambda s: s.entry(key),
        lambda s: s.set(key, 1),
        lambda s: s.delete(key),
        lambda s: s.increment(key),
        lambda s: s.history(key),
        lambda s: s.update(key, lambda value: value),
        lambda s: s.batch([{"op": "add", "key": key, "item": 1}]),
    ]
    for call in calls:
        refused(store, call, holdfast.InvalidArgument, "key must be text")


def test_keys_are_opaque_text(store: holdfast.Store) -> None:
    state = store.session("opaque").state
    for key in ("a.b", "a/b", "$set", "ключ", "🐙" * 256, " ", "%", "__proto__", "'; DROP"):
        state.set(key, key)
        assert state.get(key) == key
