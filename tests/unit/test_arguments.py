"""A value in a message is short and harmless whatever it is; each rule names its bounds."""

from __future__ import annotations

import ast
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import InvalidArgument, arguments
from holdfast.arguments import shown
from holdfast.clock import TIME_MS_MAX, iso

ROOT = Path(holdfast.__file__).parent


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError("no")


class Loud:
    def __repr__(self) -> str:
        return "<\x1b[31mred\u202e>" * 100


def deep() -> Any:
    value: Any = []
    for _ in range(100_000):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        ("odd", "'odd'"),
        ("\x1b[31m\ud800", r"'\x1b[31m\ud800'"),
        (["full", {"a": 1.5}], "['full', {'a': 1.5}]"),
        (10**39, str(10**39)),
        (-(10**5_000), "an integer of more than 40 digits"),
        (True, "True"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_is_shown_as_it_would_be_written(value: object, text: str) -> None:
    assert shown(value) == text


@pytest.mark.parametrize(
    "value",
    [deep(), [10**5_000], "x" * 100_000, b"x" * 100_000, list(range(10_000)), Broken(), Loud(),
     {"k" * 10_000: Loud()}, [["y" * 1_000] * 9] * 9],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_no_value_is_too_large_to_be_shown(value: object) -> None:
    text = shown(value)
    assert 0 < len(text) <= 200
    assert text.isprintable()


def test_errors_show_control_characters_escaped() -> None:
    told = "no file /tmp/\x1b[31mred\x9b\u202e\ud800\r\x00,\tbut\ntwo lines ü 👍"
    error = holdfast.StoreError(told)
    assert str(error) == (
        r"no file /tmp/\x1b[31mred\x9b\u202e\ud800\r\x00," + "\tbut\ntwo lines ü 👍"
    )


@pytest.mark.parametrize(
    ("rule", "given", "message"),
    [
        (arguments.require_text, ("name", "x" * 257), "name must be text of 1 to 256 printable"),
        (arguments.require_text, ("name", "a\0b"), "name must be text of 1 to 256 printable"),
        (arguments.require_text, ("name", "ab", 1), "name must be text of 1 to 1 printable"),
        (arguments.require_text_or_none, ("name", ""), "name must be text of 1 to 256 printable"),
        (arguments.require_whole, ("n", 0, 1), "n must be a whole number from 1 up, not 0"),
        (arguments.require_whole, ("n", 2**63, 1), f"n must be 1 to {2**63 - 1}, not {2**63}"),
        (arguments.require_whole, ("n", 1.0, 1, 5), "n must be 1 to 5, not 1.0"),
        (arguments.require_whole, ("n", True, 1, 5), "n must be 1 to 5, not True"),
        (arguments.require_limit, (6, 5), "limit must be 1 to 5, not 6"),
        (arguments.require_seconds, ("s", -1, 9), "s must be 0 to 9, not -1"),
        (arguments.require_seconds, ("s", float("nan"), 9), "s must be 0 to 9, not nan"),
        (arguments.require_seconds, ("s", "1", 9), "s must be 0 to 9, not '1'"),
        (arguments.require_one_of, ("a", ["x"], ("x",)), "a must be one of x, not ['x']"),
        (arguments.require_path, ("\ud800",), r"path must name a file, not '\ud800'"),
        (arguments.require_path, ("a\0b", "an archive"), "path must name an archive, not 'a"),
        (arguments.require_path, ("x" * 5_000,), "path must name a file, not 'xxx"),
        (arguments.require_path, (b"x",), "path must name a file, not b'x'"),
        (arguments.milliseconds_of, ("at", TIME_MS_MAX + 1), "at must be a datetime, or a time in"),
        (arguments.milliseconds_of, ("at", -1), "at must be a datetime, or a time in"),
    ],
)  # fmt: skip
def test_a_rule_names_what_it_takes(rule: Any, given: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        rule(*given)
    assert str(raised.value).startswith(message)


def test_what_the_rules_take_they_return() -> None:
    assert arguments.require_text("name", "x" * 256) == "x" * 256
    assert arguments.require_whole("n", 2**63 - 1, 0) == 2**63 - 1
    assert arguments.require_seconds("s", 1.5, 9) == 1_500
    with pytest.raises(InvalidArgument, match="s must be above 0 and at most 9, not 0"):
        arguments.require_seconds("s", 0, 9, may_be_least=False)
    assert arguments.require_path("/a/../b") == Path("/b")
    # A name with bytes that are no text is a name all the same.
    assert arguments.require_path("/b\udcff") == Path("/b\udcff")
    assert arguments.milliseconds_of("at", datetime(1970, 1, 2, tzinfo=UTC)) == 86_400_000
    assert arguments.milliseconds_of("at", datetime.max.replace(tzinfo=UTC)) == TIME_MS_MAX


def test_a_refused_argument_is_shown_by_one_rule() -> None:
    """`{value!r}` fails on some values, echoes others whole; `shown` does neither."""
    found = []
    for path in ROOT.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "InvalidArgument":
                for part in ast.walk(call):
                    if isinstance(part, ast.FormattedValue) and part.conversion == ord("r"):
                        found.append(f"{path.relative_to(ROOT)}:{part.lineno}")
    assert found == []


def test_every_number_has_a_text_as_a_time() -> None:
    last = "9999-12-31T23:59:59.999Z"
    assert iso(0) == "1970-01-01T00:00:00.000Z"
    assert iso(1_800_000_000_001) == "2027-01-15T08:00:00.001Z"
    assert [iso(each) for each in (TIME_MS_MAX - 1, TIME_MS_MAX)] == [f"{last[:-2]}8Z", last]
    assert [iso(each) for each in (TIME_MS_MAX + 1, 2**53, 2**63 - 1)] == [last] * 3
    assert iso(-1) == iso(-(2**63)) == iso(0)
