"""A tool of a turn may make calls itself: it gets what it would get in a turn made call by call."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

import holdfast
from holdfast import InProgress, Result, ToolUse
from holdfast.testing.subject import Subject, done
from tests.checkpoints.colours import both_colours

# The second call of the turn calls an earlier one, a later one, or one that is not of the turn.
INNER = ("a", "c", "d", "e")
KINDS: tuple[dict[str, Any], ...] = (
    {"effect": "mutate"},
    {"effect": "write"},
    {"effect": "mutate", "dedupe": "call"},
)


class Nested:
    """A tool that makes another call when it does `b`."""

    def __init__(self, session: Any, is_async: bool, inner: str, call_id: str | None) -> None:
        self.done: list[str] = []
        self.answers: list[Any] = []
        self.rules: dict[str, Any] = {}

        def begin(name: str) -> Any:
            self.done.append(name)
            if name == "b":
                return session.call(self.tool, name=inner, call_id=call_id, wait_seconds=0)
            return None

        def act(name: str) -> str:
            self.note(begin(name))
            return f"did {name}"

        async def act_async(name: str) -> str:
            begun = begin(name)
            self.note(None if begun is None else await begun)
            return f"did {name}"

        self.function = act_async if is_async else act

    def note(self, answer: Any) -> None:
        if answer is not None:
            self.answers.append(answer)

    @property
    def tool(self) -> holdfast.Tool[..., Any]:
        return holdfast.tool(name="act", **self.rules)(self.function)

    def uses(self) -> list[ToolUse]:
        return [ToolUse(self.tool, {"name": name}, f"call {name}") for name in "abcd"]


def said(answers: list[Any]) -> list[Any]:
    return [
        (answer.value, answer.replayed) if isinstance(answer, Result) else repr(answer)
        for answer in answers
    ]


async def lived(store: Any, subject: Subject, name: str, together: bool, *given: Any) -> list[Any]:
    rules, inner, call_id = given
    session = await done(store.session(f"{name} {together}"))
    nested = Nested(session, subject.colour == "async", inner, call_id)
    nested.rules = rules
    if together:
        answers = await done(session.call_all(nested.uses(), wait_seconds=0))
    else:
        answers = []
        for use in nested.uses():
            called = session.call_with(use.tool, use.arguments, call_id=use.call_id)
            answers.append(await done(called))
    effects = await done(store.effects(session=session))
    rows = [(row.call_id, row.arguments, row.status, row.result) for row in effects]
    completed = sorted([row for row in rows if row[2] != "failed"], key=repr)
    return [said(answers), said(nested.answers), nested.done, completed]


@both_colours
async def test_a_tool_that_makes_another_call_of_its_turn_gets_its_result(
    subject: Subject,
) -> None:
    store = await subject.open(durability="normal")
    for number, (rules, inner, has_id) in enumerate(product(KINDS, INNER, (False, True))):
        call_id = f"call {inner}" if has_id else None
        if rules.get("dedupe") == "call" and call_id is None:
            continue
        given = (rules, inner, call_id)
        found = [await lived(store, subject, str(number), each, *given) for each in (False, True)]
        assert found[1] == found[0], given
        _, inner_answers, log, _ = found[1]
        assert len(inner_answers) == 1, given
        if rules["effect"] == "mutate":
            assert sorted(log) == sorted({*"abcd", inner}), given


@both_colours
async def test_a_call_of_a_turn_that_another_made_is_answered_with_its_result(
    subject: Subject,
) -> None:
    store = await subject.open()
    answers, inner, log, _ = await lived(
        store, subject, "s", True, {"effect": "mutate"}, "d", "call d"
    )
    assert log == ["a", "b", "d", "c"]
    assert inner == [("did d", False)]
    assert answers == [("did a", False), ("did b", False), ("did c", False), ("did d", True)]


def test_a_tool_that_waits_for_its_own_turn_from_outside_is_told_why_it_waits_in_vain(
    place: dict[str, Any],
) -> None:
    @holdfast.tool(effect="mutate")
    def act(name: str) -> str:
        if name == "a":
            with (
                holdfast.open(**place) as other,
                pytest.raises(InProgress, match="a later call of the same turn"),
            ):
                other.find_session("s").call(act, name="b", wait_seconds=0)
        return name

    with holdfast.open(**place) as store:
        session = store.session("s")
        answers = session.call_all([ToolUse(act, {"name": name}) for name in "ab"])
        assert said(answers) == [("a", False), ("b", False)]
