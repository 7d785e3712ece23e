"""Any turn made by one `call_all` equals the same calls one after the other: answers and world."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

import holdfast
from holdfast import NotDone, Result, ToolUse
from holdfast.testing.subject import Subject, done
from tests.checkpoints.colours import both_colours

RULES: dict[str, dict[str, Any]] = {
    "look": {"effect": "read"},
    "search": {"effect": "read", "dedupe": "session"},
    "now": {"effect": "read", "dedupe": "latest"},
    "write": {"effect": "write"},
    "pay": {},
    "hail": {"dedupe": "call"},
    "sign": {"dedupe": "latest"},
    "half": {"dedupe": lambda arguments: arguments["n"] % 2},
    "atomic": {"atomic": True},
    "cached": {"atomic": True, "cache_failures": True},
    "again": {"on_unknown": "retry"},
    "given up": {"on_unknown": "fail"},
}
Turn = list[tuple[str, int, str | None]]
"""The tool, its argument and the call id of each call; 7 is declined, and 8 fails."""
CALLS = st.tuples(
    st.sampled_from(list(RULES)),
    st.sampled_from([1, 1, 2, 2, 3, 7, 8]),
    st.sampled_from([None, *(f"c{n}" for n in range(6))]),
)
TURNS = st.lists(st.lists(CALLS, min_size=1, max_size=6), min_size=1, max_size=3)
LATE: list[Turn] = [[("look", 1, "c1"), ("pay", 1, "c1"), ("pay", 2, "c2")]]
TWICE: list[Turn] = [[("pay", 1, "c1"), ("pay", 2, "c1"), ("write", 1, "c1"), ("look", 1, "c1")]]
BEHIND: list[Turn] = [[("pay", 8, "c1"), ("look", 1, "c2"), ("pay", 1, "c3"), ("pay", 3, "c2")]]


class World:
    """Tools that say what they did, in order."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []

    def tool(self, name: str) -> holdfast.Tool[..., Any]:
        def function(n: int) -> str:
            self.log.append((name, n))
            if n == 7:
                raise NotDone("declined")
            if n == 8:
                raise ValueError("failed")
            return f"{name} {n}"

        return holdfast.tool(name=name, **RULES[name])(function)


def said(answer: Any) -> Any:
    if isinstance(answer, Result):
        return answer.value, answer.replayed
    return type(answer).__name__


async def answer_of(session: Any, use: ToolUse) -> Any:
    try:
        return await done(session.call_with(use.tool, use.arguments, call_id=use.call_id))
    except Exception as error:
        return error


async def lived(store: Any, session: Any, turns: list[Turn], together: bool) -> list[Any]:
    """Make the turns; return what was answered, what happened, and what the ledger says."""
    world, answers = World(), []
    for turn in turns:
        uses = [
            ToolUse(world.tool(name), {"n": n}, call_id or ("c" if name == "hail" else None))
            for name, n, call_id in turn
        ]
        if together:
            answers += await done(session.call_all(uses, wait_seconds=0))
        else:
            answers += [await answer_of(session, use) for use in uses]
    effects = await done(store.effects(session=session, limit=1000))
    rows = [(each.tool, each.arguments, each.status, each.reason, each.attempt) for each in effects]
    # Only a read may stand behind what was done after it: it has no intent.
    rows.sort(key=lambda row: RULES[row[0]].get("effect") == "read")
    return [[said(each) for each in answers], world.log, rows]


async def check(store: Any, name: str, turns: list[Turn]) -> None:
    found = []
    for together in (False, True):
        session = await done(store.session(f"{name} {together}"))
        found.append(await lived(store, session, turns, together))
    for one_by_one, together in zip(*found, strict=True):
        assert together == one_by_one


@both_colours
async def test_a_call_id_that_is_used_twice_is_the_first_ones(subject: Subject) -> None:
    store = await subject.open(durability="normal")
    for number, turns in enumerate((LATE, TWICE, BEHIND)):
        await check(store, str(number), turns)
    session = await done(store.session("s"))
    answers, log, _ = await lived(store, session, LATE, together=True)
    assert answers == [("look 1", False), "RequestMismatch", ("pay 2", False)]
    assert log == [("look", 1), ("pay", 2)]


@given(turns=TURNS)
@example(LATE)
@example(TWICE)
@example(BEHIND)
@settings(
    max_examples=30,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate),
)
def test_any_turns_are_alike(alike: Any, turns: list[Turn]) -> None:
    store, name = alike()
    run_to_the_end(check(store, name, turns))


@pytest.fixture
def alike(place: dict[str, Any]) -> Any:
    numbers = count()
    with holdfast.open(**place, durability="normal") as store:
        yield lambda: (store, str(next(numbers)))


def run_to_the_end(case: Any) -> None:
    """Run a coroutine on a sync store, which awaits nothing."""
    with pytest.raises(StopIteration):
        case.send(None)
