"""The judge of shared state finds every planted bug, and nothing in what is sound."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.testing.history import History, Recorded, read
from holdfast.testing.linearizability import (
    CLAIMED_CONFIGURATIONS_MAX,
    _Call,
    check,
    unexplained,
)
from holdfast.testing.recorded_state import RecordedState
from tests.state.calls import make_calls

THREADS = 3
CALLS = 120


class Wrapped:
    """Shared state with a bug; each subclass has another one."""

    def __init__(self, state: Any) -> None:
        self._state = state
        self._lock = threading.RLock()
        self._count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    def is_time(self, every: int = 4) -> bool:
        """Whether it is time for the bug."""
        self._count += 1
        return self._count % every == 0


class LostUpdate(Wrapped):
    def increment(self, key: str, delta: int) -> Any:
        with self._lock:
            entry = self._state.entry(key)
            if entry is None or not self.is_time():
                return self._state.increment(key, delta)
            return replace(
                entry,
                value=entry.value + delta,
                version=entry.version + 1,
                sequence=self._state.version() + 1,
            )


class StaleRead(Wrapped):
    def entry(self, key: str) -> Any:
        with self._lock:
            found = self._state.history(key, limit=2)
            if len(found) == 2 and self.is_time() and not found[1].is_deleted:
                return found[1]
            return self._state.entry(key)


class SwapOnOldVersion(Wrapped):
    def set(self, key: str, value: Any, *, if_version: int | None) -> Any:
        try:
            return self._state.set(key, value, if_version=if_version)
        except holdfast.VersionConflict:
            return self._state.set(key, value)


class IncrementTwice(Wrapped):
    def increment(self, key: str, delta: int) -> Any:
        with self._lock:
            if self.is_time():
                self._state.increment(key, delta)
            return self._state.increment(key, delta)


class AppendReordered(Wrapped):
    def append(self, key: str, items: list[Any]) -> Any:
        entry = self._state.append(key, items[::-1])
        kept = len(entry.value) - len(items)
        return replace(entry, value=[*entry.value[:kept], *items])


class Resurrected(Wrapped):
    def delete(self, key: str, *, if_version: int | None) -> Any:
        with self._lock:
            before = self._state.entry(key)
            entry = self._state.delete(key, if_version=if_version)
            self._state.set(key, before and before.value)
            return entry


class HalfBatch(Wrapped):
    def batch(self, operations: Sequence[Any]) -> Any:
        try:
            return self._state.batch(operations)
        except holdfast.VersionConflict:
            first = [each for each in operations if each.get("if_version") is None][:1]
            if first:
                self._state.batch(first)
            raise


class VersionsAgain(Wrapped):
    def set(self, key: str, value: Any, *, if_version: int | None) -> Any:
        with self._lock:
            before = self._state.history(key, limit=1)
            entry = self._state.set(key, value, if_version=if_version)
            return replace(entry, version=1) if before and before[0].is_deleted else entry


class ReadFromTheFuture(Wrapped):
    def entry(self, key: str) -> Any:
        entry = self._state.entry(key)
        if entry is not None and type(entry.value) is int and self.is_time():
            return replace(entry, value=entry.value + 1, version=entry.version + 1)
        return entry


class MemberTwice(Wrapped):
    def add(self, key: str, item: Any) -> Any:
        entry = self._state.add(key, item)
        return replace(entry, value=[*entry.value, item])


class LateWrite(Wrapped):
    """What was acknowledged is written by the next call."""

    def __init__(self, state: Any) -> None:
        super().__init__(state)
        self._late: tuple[str, Any] | None = None

    def set(self, key: str, value: Any, *, if_version: int | None) -> Any:
        with self._lock:
            if self._late is not None:
                late, self._late = self._late, None
                self._state.set(*late)
            entry = self._state.entry(key)
            if if_version is not None or entry is None:
                return self._state.set(key, value, if_version=if_version)
            self._late = (key, value)
            sequence = self._state.version() + 1
            return replace(entry, value=value, version=entry.version + 1, sequence=sequence)


class SequenceOfAnother(Wrapped):
    """Only the order that sequences claim is wrong."""

    def increment(self, key: str, delta: int) -> Any:
        entry = self._state.increment(key, delta)
        return replace(entry, sequence=entry.sequence + 3 * self.is_time())


BUGS = Wrapped.__subclasses__()


def record(system: Any, directory: Path) -> list[Recorded]:
    """Let threads call a system, and return what was asked and told."""

    def work(seed: int) -> None:
        make_calls(RecordedState(system, History(directory)), seed, CALLS)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    make_calls(RecordedState(system, History(directory)), THREADS, CALLS)
    return read(directory)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_found(bug: type[Wrapped], tmp_path: Path) -> None:
    with holdfast.open("sqlite://", durability="normal") as store:
        calls = record(bug(store.session("root").state), tmp_path)
    assert len(calls) >= (THREADS + 1) * CALLS
    assert check(calls) != []
    # Sequences are not needed to find what is wrong with values and versions.
    assert bool(unexplained(calls)) is (bug is not SequenceOfAnother)


def test_what_has_no_bug_is_sound(tmp_path: Path) -> None:
    with holdfast.open("sqlite://", durability="normal") as store:
        calls = record(Wrapped(store.session("root").state), tmp_path)
    assert check(calls) == []
    assert {call.name for call in calls} == {
        "get", "set", "delete", "increment", "append", "add", "remove", "batch",
    }  # fmt: skip
    refused = [call.result["refused"] for call in calls if "refused" in (call.result or {})]
    assert {"VersionConflict", "KeyNotFound"} <= set(refused)


def incremented(at: int, value: int | None, *, until: int | None = None) -> Recorded:
    """An increment: from when to when, and what it was told; None if it got no answer."""
    arguments = {"key": "n", "delta": 1}
    if value is None:
        return Recorded(f"i{at}", "increment", arguments, at)
    entry = {"key": "n", "value": value, "version": value, "sequence": value}
    return Recorded(f"i{at}", "increment", arguments, at, "ok", [entry], until or at + 1)


def seen(at: int, value: int | None, *, until: int | None = None) -> Recorded:
    found = None if value is None else {"value": value, "version": value}
    return Recorded(f"g{at}", "get", {"key": "n"}, at, "ok", found, until or at + 1)


ON_FIRST_OF_XS = [
    {"op": "increment", "key": "n", "delta": 1},
    {"op": "set", "key": "xs", "value": [], "if_version": 1},
]


@pytest.mark.parametrize(
    "calls",
    [
        [incremented(1, None), seen(3, 1)],
        [incremented(1, None), seen(3, None), seen(5, 1)],
        [incremented(1, None), seen(3, None), seen(5, None)],
        [incremented(1, None), incremented(2, None), incremented(4, 3)],
        [incremented(1, 1, until=10), seen(2, None), seen(4, 1), incremented(6, 2)],
        [incremented(1, 2, until=10), incremented(2, 1, until=11)],
        [incremented(1, 2, until=10), incremented(2, None)],
        [
            Recorded("u1", "append", {"key": "xs", "items": [1]}, 1),
            Recorded("u2", "batch", {"operations": ON_FIRST_OF_XS}, 2),
            incremented(4, 2),
        ],
        [seen(1, 1, until=9), seen(2, None, until=3), incremented(5, 1, until=6)],
    ],
)
def test_what_an_order_explains_is_sound(calls: list[Recorded]) -> None:
    assert check(calls) == []


@pytest.mark.parametrize(
    "calls",
    [
        [incremented(1, None), seen(3, 2)],
        [incremented(1, None), seen(3, 1), seen(5, None)],
        [incremented(1, None), incremented(2, None), incremented(4, 4)],
        [seen(1, 1), incremented(3, 1)],
        [incremented(1, 1), seen(3, None)],
        [incremented(1, 2), incremented(3, 1)],
        [incremented(1, 1), incremented(3, 3)],
    ],
)
def test_what_no_order_explains_is_found(calls: list[Recorded]) -> None:
    assert check(calls) != []


def told(at: int, name: str, after: Any, version: int, **arguments: Any) -> Recorded:
    """A write of n, and what it was told."""
    entry = {"key": "n", "value": after, "version": version, "sequence": version}
    return Recorded(f"w{at}", name, {"key": "n", **arguments}, at, "ok", [entry], at + 1)


def mistyped(at: int, name: str, **arguments: Any) -> Recorded:
    """A write of n that was refused for the type of its value."""
    why = {"refused": "TypeConflict", "key": "n", "version": None, "value": None}
    return Recorded(f"w{at}", name, {"key": "n", **arguments}, at, "ok", why, at + 1)


NULL_SET = told(1, "set", None, 1, value=None)
ONE_ADDED = told(1, "add", [1], 1, item=1)
TWICE_IN_LIST = told(1, "append", [1, 1], 1, items=[1, 1])


@pytest.mark.parametrize(
    ("sound", "wrong"),
    [
        (
            [NULL_SET, mistyped(3, "increment", delta=1)],
            [NULL_SET, told(3, "increment", 1, 2, delta=1)],
        ),
        ([NULL_SET, mistyped(3, "append", items=[1])], [NULL_SET, seen(3, None)]),
        ([told(1, "set", True, 1, value=True)], [told(1, "set", 1, 1, value=True)]),
        ([told(1, "set", 1.0, 1, value=1.0)], [told(1, "set", 1.0, 1, value=1.0), seen(3, 1)]),
        (
            [ONE_ADDED, told(3, "add", [1, True], 2, item=True)],
            [ONE_ADDED, told(3, "add", [1], 2, item=True)],
        ),
        (
            [ONE_ADDED, told(3, "remove", [1], 2, item=1.0)],
            [ONE_ADDED, told(3, "remove", [], 2, item=1.0)],
        ),
        (
            [TWICE_IN_LIST, mistyped(3, "add", item=2)],
            [TWICE_IN_LIST, told(3, "add", [1, 1, 2], 2, item=2)],
        ),
    ],
)
def test_null_is_a_value_and_types_are_told_apart(
    sound: list[Recorded], wrong: list[Recorded]
) -> None:
    assert check(sound) == []
    assert unexplained(wrong) != []


def test_an_answer_about_another_key_is_found() -> None:
    call = incremented(1, 1)
    call.result[0]["key"] = "m"
    assert unexplained([call]) != []


def test_a_violation_says_which_call_and_what_was_there() -> None:
    assert check([incremented(1, 1), seen(3, 2)]) == [
        'no order explains get({"key": "n"}) → {"value": 2, "version": 2} [g3]; '
        "before it there was n = 1 at version 1"
    ]


IN_FLIGHT = 6


def long_history(count: int) -> list[Recorded]:
    """A sound history: six calls are always under way, and of twenty no answer came."""
    held: dict[str, tuple[Any, int]] = {}
    sequence, calls = 0, []
    for number in range(count):
        register, counter = f"register-{number % 4}", f"counter-{number % 2}"
        operations: list[dict[str, Any]] = [
            {"op": "set", "key": register, "value": number, "if_version": None},
            {"op": "increment", "key": counter, "delta": 1 + number % 3},
        ]
        name, wanted = [
            ("set", operations[:1]), ("increment", operations[1:]), ("batch", operations),
        ][number % 3]  # fmt: skip
        arguments = {"operations": wanted} if name == "batch" else {**wanted[0]}
        arguments.pop("op", None)
        call = Recorded(f"c{number}", name, arguments, 10 * number)
        calls.append(call)
        is_lost = number % (count // 20) == 7 % (count // 20)
        is_made = number % (count // 10) == 7 % (count // 10)
        if is_lost and not is_made:
            continue
        told = []
        for each in wanted:
            value, version = held.get(each["key"], (0, 0))
            value = each["value"] if each["op"] == "set" else value + each["delta"]
            held[each["key"]] = value, version + 1
            sequence += 1
            entry = {"key": each["key"], "value": value, "version": version + 1}
            told.append({**entry, "sequence": sequence})
        if not is_lost:
            call.outcome, call.result = "ok", told
            call.answered_at_ns = 10 * (number + IN_FLIGHT) + 1
    return calls


@pytest.mark.parametrize("count", [500, 2_000])
def test_a_long_history_costs_by_its_length_alone(monkeypatch: Any, count: int) -> None:
    calls = long_history(count)
    assert sum(call.outcome != "ok" for call in calls) == 20
    tried = 0
    apply = _Call.apply

    def counted(self: _Call, state: Any) -> Any:
        nonlocal tried
        tried += 1
        # Fails here rather than never: without a guide the search would try every order.
        assert tried < 2 * CLAIMED_CONFIGURATIONS_MAX * count
        return apply(self, state)

    monkeypatch.setattr(_Call, "apply", counted)
    assert check(calls) == []


def test_the_order_that_sequences_claim_is_no_excuse_for_a_wrong_answer() -> None:
    calls = long_history(120)
    [wrong] = [each for each in calls if each.id == "c60"]
    wrong.result[0]["value"] += 1
    assert unexplained(calls) != []


def test_sequences_that_claim_a_wrong_order_do_not_hide_a_right_one() -> None:
    calls = long_history(60)
    first, second = (each for each in calls if each.id in {"c33", "c36"})
    first.result[0]["sequence"], second.result[0]["sequence"] = (
        second.result[0]["sequence"],
        first.result[0]["sequence"],
    )
    assert unexplained(calls) == []
