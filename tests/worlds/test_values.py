"""Values of a world: equal ones have equal bytes, different ones never, and all come back."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import InvalidValue
from holdfast.worlds.values import canonical, decode, encode

DIFFERENT: list[Any] = [
    None, False, True, 0, 1, 1.0, 0.0, -0.0, "1", "", b"1", b"", 2**70, -(2**70), str(2**70),
    [], {}, (), set(), frozenset(), [1], (1,), {1}, frozenset({1}), {"1": 1}, {1: 1}, {1.0: 1},
    [[1], 2], [1, [2]], "é", "e\u0301", "\ud800", {"\ud800": 1}, float("nan"), float("inf"),
    datetime(2026, 1, 2, tzinfo=UTC), datetime.fromisoformat("2026-01-02"), date(2026, 1, 2),
    "2026-01-02",
    Decimal("1.0"), Decimal("1.00"), "1.0", UUID(int=1), str(UUID(int=1)),
]  # fmt: skip

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False)
    | st.text(st.characters()) | st.binary() | st.decimals(allow_nan=False) | st.uuids()
)  # fmt: skip
keys = st.text() | st.integers() | st.binary() | st.tuples(st.integers(), st.text())
values = st.recursive(
    scalars | st.frozensets(keys) | st.sets(keys),
    lambda inner: (
        st.lists(inner) | st.dictionaries(keys, inner) | st.tuples(inner, inner)
    ),
    max_leaves=12,
)  # fmt: skip


def test_values_of_different_type_or_content_have_different_bytes() -> None:
    seen: dict[bytes, Any] = {}
    for value in DIFFERENT:
        body = canonical(value, "value")
        assert body not in seen, (value, seen.get(body))
        seen[body] = value


@settings(max_examples=40, deadline=None)
@given(values)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    for body in (encode(value, "value"), canonical(value, "value")):
        back = decode(body)
        assert back == value
        assert canonical(back, "value") == canonical(value, "value")


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(keys, scalars))
def test_the_order_of_keys_does_not_matter_to_identity_and_is_kept_by_a_copy(
    value: dict[Any, Any],
) -> None:
    turned = dict(reversed(value.items()))
    assert canonical(turned, "value") == canonical(value, "value")
    assert list(decode(encode(turned, "value"))) == list(turned)


def test_the_bytes_are_the_same_in_every_process() -> None:
    code = (
        "from holdfast.worlds.values import canonical;"
        "print(canonical({'b': {'x', 'y', 'z', 1}, 2: frozenset('abc')}, 'v').hex())"
    )
    shown = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(shown) == 1


def test_what_is_not_plain_data_is_named_by_its_path() -> None:
    with pytest.raises(InvalidValue, match=r"data\.orders\[1\]\.lock is a object") as refused:
        encode({"orders": [1, {"lock": object()}]}, "data")
    assert refused.value.path == "data.orders[1].lock"
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(InvalidValue, match="contains itself"):
        encode(loop, "data")


@pytest.mark.parametrize(
    "wrap", [lambda v: (v,), lambda v: frozenset((v,)), lambda v: {1: v}, lambda v: [{"a": (v,)}]]
)
def test_what_is_written_can_be_read_however_deep_it_is(wrap: Any) -> None:
    value: Any = 1
    for _ in range(64):
        value = wrap(value)
        assert decode(encode(value, "value")) == value
    with pytest.raises(InvalidValue, match="nested too deeply"):
        encode(wrap(value), "value")


@pytest.mark.parametrize("number", [2**64 - 1, -(2**63), 2**64, -(2**63) - 1])
def test_a_dict_has_the_same_bytes_alone_and_inside_of_a_list(number: int) -> None:
    for flat in ({"b": number, "a": None}, {"b": "\udc80", "a": number}, {"\udc80": True}):
        assert canonical([flat], "value") == b"\x91" + canonical(flat, "value")
        assert encode([flat], "value") == b"\x91" + encode(flat, "value")
        assert decode(encode(flat, "value")) == flat
