"""Fingerprints: equal for equal values of equal types, and for nothing else."""

from __future__ import annotations

import enum
import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoints.changes import fingerprint, fingerprint_of
from holdfast.codec import Codec
from tests.unit.test_codec import values


class Text(str):
    __slots__ = ()


class Number(enum.IntEnum):
    ONE = 1


def digest(*items: Any) -> bytes:
    found = fingerprint_of(list(items))
    assert found is not None
    return found.digest()


def test_whatever_differs_in_value_type_or_order_has_another_fingerprint() -> None:
    lists: list[list[Any]] = [
        *([], [None], [0], [0.0], [-0.0], [False], [1], [1.0], [True], ["1"], [""], [[]], [{}]),
        *([2**31], [2.0**31], [2**70], [2**70 + 1], ["é"], ["e\u0301"], ["a", "b"], ["ab"]),
        *([["a"], "b"], [["a", "b"]], [{"a": 1, "b": 2}], [{"b": 2, "a": 1}], [{"a": True}]),
        *([()], [("a", "b")], [b"ab"], [{"ab"}], [frozenset({"ab"})], [1 + 0j], [{1: 2}], [...]),
    ]
    for one, other in itertools.combinations(lists, 2):
        assert digest(*one) != digest(*other), (one, other)


def test_what_only_looks_like_plain_data_has_none() -> None:
    loop: list[Any] = []
    loop.append(loop)
    for wrong in (Text("a"), Number.ONE, {Text("a"): 1}, [object()], loop):
        assert fingerprint_of([wrong]) is None


@given(st.lists(values, max_size=5), st.lists(values, max_size=5))
def test_a_list_has_one_fingerprint_however_it_was_put_together(
    first: list[Any], then: list[Any]
) -> None:
    parts: list[list[bytes]] = [[], []]
    for items, forms in zip((first, then), parts, strict=True):
        Codec().encode_each(items, forms=forms)
    before = fingerprint(parts[0])
    assert digest(*first, *then) == fingerprint(parts[1], before).digest()
    assert digest(*first) == before.digest(), "the shorter list has not changed"


def test_shared_and_interned_text_makes_no_difference() -> None:
    shared = "".join(["shared ", "text"])
    apart = ["".join(["shared ", "text"]) for _ in range(2)]
    assert digest(shared, shared, "role") == digest(*apart, "".join(["ro", "le"]))
