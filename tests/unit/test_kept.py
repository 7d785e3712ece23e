"""A mapping that keeps most of its entries on disk behaves like one that has them in memory."""

from __future__ import annotations

import tracemalloc
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.kernel.kept import Kept, KeptSet


class Place(NamedTuple):
    id: str
    version: int | None = None


KEYS = {
    "numbers": st.integers(-3, 12),
    "texts": st.sampled_from(["", "a", "A", "aa", "ü", "1", "日本"]),
    "tuples": st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 6)),
}
VALUES = st.builds(Place, st.sampled_from("xy"), st.none() | st.integers(0, 9))


@pytest.mark.parametrize("keys", KEYS)
@given(data=st.data())
def test_it_is_a_mapping(keys: str, data: st.DataObject) -> None:
    kept: Kept[Any, Place] = Kept(Place, at_most=3)
    plain: dict[Any, Place] = {}
    steps = st.sampled_from(["set", "set", "get", "pop", "setdefault", "list", "clear"])
    for step in data.draw(st.lists(steps, max_size=40)):
        key, value = data.draw(KEYS[keys]), data.draw(VALUES)
        assert (key in kept) == (key in plain)
        if step == "set":
            kept[key] = plain[key] = value
        elif step == "get":
            assert kept.get(key) == plain.get(key)
            assert kept.get(key, value) == plain.get(key, value)
        elif step == "list":
            assert len(kept) == len(plain)
            # Tuples have no promised order.
            assert keys == "tuples" or list(kept) == sorted(plain)
            assert dict(kept.items()) == plain
        elif step == "clear":
            kept.clear()
            plain.clear()
        else:
            assert getattr(kept, step)(key, value) == getattr(plain, step)(key, value)
    assert dict(kept) == plain


def test_what_is_not_there_is_an_error() -> None:
    kept: Kept[int, int] = Kept(int, at_most=2)
    for number in range(5):
        kept[number] = number
    for number in (7, -1):
        with pytest.raises(KeyError):
            kept[number]
        with pytest.raises(KeyError):
            del kept[number]


def test_entries_may_be_read_and_changed_while_they_are_listed() -> None:
    kept: Kept[int, int] = Kept(int, at_most=4)
    for number in range(50):
        kept[number] = number
    for number in kept:
        kept[number] += kept[49 - number]
    assert list(kept) == list(range(50))
    assert kept[0] == 49


def test_a_set_says_what_is_new() -> None:
    seen: KeptSet[str] = KeptSet(["b"])
    assert [seen.add(key) for key in "abca"] == [True, False, True, False]
    assert list(seen) == ["a", "b", "c"]
    assert seen.add_all("de") is None
    assert seen.add_all("fag") == "a"
    assert list(seen) == ["a", "b", "c", "d", "e", "f"]
    assert not seen.add("f")


def test_only_some_entries_are_in_memory() -> None:
    kept: Kept[int, str] = Kept(str, at_most=10)
    tracemalloc.start()
    try:
        for number in range(2_000):
            kept[number] = f"{number:0100}"
        assert sum(int(value) for value in kept.values()) == sum(range(2_000))
        assert tracemalloc.get_traced_memory()[1] < 40_000
    finally:
        tracemalloc.stop()
