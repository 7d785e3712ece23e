"""What a call is known by, and which arguments fit a tool."""

from __future__ import annotations

import hmac
import inspect
import re
from collections import UserDict
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest

import holdfast
from holdfast.codec import DEFAULT_LIMITS, Limits, canonical
from holdfast.effects.requests import EffectRequest
from holdfast.errors import InvalidArgument, LimitExceeded
from holdfast.sessions.access import Place


def nothing() -> None: ...


def two(amount: int, customer: str = "x") -> None: ...


def by_name(*, amount: int, note: str | None = None) -> None: ...


def with_key(amount: int, idempotency_key: str) -> None: ...


def any_name(amount: int, **others: Any) -> None: ...


def only_others(**others: Any) -> None: ...


GIVEN: tuple[Mapping[Any, Any], ...] = (
    {},
    {"amount": 1},
    {"customer": "c"},
    {"amount": 1, "customer": "c"},
    {"amount": 1, "note": None},
    {"amount": 1, "others": 2},
    {"amount": 1, "unknown": 2},
    {1: 2, "amount": 1},
    MappingProxyType({"amount": 1}),
    UserDict({"amount": 1, "unknown": 2}),
)


@pytest.mark.parametrize("function", [nothing, two, by_name, with_key, any_name, only_others])
@pytest.mark.parametrize("given", GIVEN, ids=repr)
def test_arguments_fit_a_tool_as_they_fit_its_function(
    function: Callable[..., None], given: Mapping[Any, Any]
) -> None:
    tool = holdfast.tool(function)
    key = {"idempotency_key": ""} if tool.takes_key else {}
    problem = None
    try:
        inspect.signature(function).bind(**given, **key)
    except TypeError as error:
        problem = str(error)
    if problem is not None:
        with pytest.raises(InvalidArgument, match=re.escape(problem)):
            tool.bind(given)
        return
    bound = tool.bind(given)
    assert type(bound) is dict
    assert bound == dict(given)
    assert bound is not given


def test_an_argument_under_another_name_is_named_with_those_there_are() -> None:
    def pay(cents: int, card: str = "", *, idempotency_key: str) -> None: ...
    def stop() -> None: ...
    def open_to_all(cents: int, **others: int) -> None: ...

    cases: list[tuple[Callable[..., None], dict[str, int], str]] = [
        (pay, {"cent": 5}, "pay: missing a required argument: 'cents'; "
         "it takes cents, card, not 'cent'"),
        (pay, {}, "pay: missing a required argument: 'cents'"),
        (stop, {"now": 1}, "stop: got an unexpected keyword argument 'now'; "
         "it takes no arguments, not 'now'"),
        (open_to_all, {"cent": 5}, "open_to_all: missing a required argument: 'cents'"),
    ]  # fmt: skip
    for function, given, told in cases:
        with pytest.raises(InvalidArgument) as caught:
            holdfast.tool(function).bind(given)
        assert str(caught.value) == told


def test_an_option_that_a_tool_does_not_have_is_named_with_those_it_has() -> None:
    make: Any = holdfast.tool
    for option in ("effects", "function", "takes_key"):
        with pytest.raises(InvalidArgument) as caught:
            make(**{option: "write"})
        told, _, known = str(caught.value).partition("; it has ")
        assert told == f"tool() has no option {option!r}"
        assert {"effect", "name", "dedupe", "wait_seconds"} < set(known.split(", "))


@pytest.mark.parametrize("function", [two, with_key, only_others])
def test_nobody_can_give_the_idempotency_key(function: Callable[..., None]) -> None:
    with pytest.raises(InvalidArgument, match="set by Holdfast"):
        holdfast.tool(function).bind({"amount": 1, "idempotency_key": "mine"})


def asked(
    arguments: Any, distinct: Any, policy: str = "session", place: Place | None = None
) -> EffectRequest:
    return EffectRequest(
        tool=holdfast.tool(name="Überweisung")(only_others),
        arguments=arguments,
        policy=policy,
        distinct=distinct,
        holder="h",
        place=place,
        guard=None,
    )


@pytest.mark.parametrize("length", [1, 16, 32, 63, 64, 65, 200])
@pytest.mark.parametrize("arguments", [{}, {"b": 1, "a": "x"}, {"e\u0301": ["n\u0303", 2**70]}])
@pytest.mark.parametrize("policy", ["session", "global"])
def test_keys_and_digests_are_an_hmac_of_the_canonical_form(
    length: int, arguments: dict[str, Any], policy: str
) -> None:
    salt = bytes(range(length))
    place = Place("s\u00e9ance", 1, "root", None)
    scope = "global" if policy == "global" else f"session:{place.session_id}"

    def expected(value: Any) -> str:
        return hmac.digest(salt, canonical(value), "sha256").hex()

    for distinct in (arguments, dict(arguments), ["chosen", 1]):
        request = asked(arguments, distinct, policy, place)
        found = request.identify(salt, DEFAULT_LIMITS)
        assert found.digest == expected([request.tool.name, arguments])
        assert found.key == f"{scope}:{expected([scope, request.tool.name, distinct])[:32]}"


def test_a_request_at_the_limit_counts_with_its_scope() -> None:
    arguments = {"a": "x" * 50}
    request = asked(arguments, arguments)
    size = len(canonical([request.tool.name, arguments]))
    for distinct in (arguments, dict(arguments)):
        with pytest.raises(LimitExceeded) as refused:
            asked(arguments, distinct).identify(b"salt", Limits(value_bytes=size))
        assert refused.value.path == "arguments"


def test_a_timeout_must_be_shorter_than_the_lease() -> None:
    for timeout, lease in ((20.0, 15.0), (15, 15), (0.5, 0.4)):
        with pytest.raises(InvalidArgument, match="timeout_seconds"):
            holdfast.tool(timeout_seconds=timeout, lease_seconds=lease)(lambda: 1)
    assert holdfast.tool(timeout_seconds=14, lease_seconds=15)(lambda: 1).lease_ms == 15_000
    assert holdfast.tool(timeout_seconds=20)(lambda: 1).lease_ms == 30_000
    assert holdfast.tool(timeout_seconds=2)(lambda: 1).lease_ms == 15_000
