"""What many calls cost: one commit, and the same statements for each."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast
from holdfast.kernel.driver import Hooks, Trace
from holdfast.testing.subject import Subject, done
from tests.checkpoints.colours import both_colours
from tests.peers.agents import planner, status, waiting_items

# A change in these is a change of cost on every call: look before you update the numbers.
STATEMENTS_PER_ASK = 6
STATEMENTS_PER_ASK_TOGETHER = 4


def ask_many(
    tx: holdfast.Transaction, session: Any, count: int, *, fails: bool = False
) -> holdfast.Op[None]:
    inside = tx.within(session)
    for number in range(count):
        yield from inside.ask("a", number)
    yield from inside.pause()
    if fails:
        raise ValueError("after the last")


@both_colours
async def test_many_asks_and_a_pause_are_one_commit(subject: Subject) -> None:
    traces: list[Trace] = []
    store = await subject.open(hooks=Hooks(trace=traces.append), durability="normal")
    statements = {}
    for count in (1, 2, 12):
        session = await planner(store, f"asks {count}")
        traces.clear()
        await done(store.run(ask_many, session, count))
        [trace] = traces
        statements[count] = trace.statements
        assert [call.input for call in await done(session.asks())] == list(range(count))
        assert await status(store, session.id) == "waiting"
    assert statements[2] - statements[1] == STATEMENTS_PER_ASK
    # The events of an ask are written ten at a time.
    assert statements[12] - statements[2] == 10 * STATEMENTS_PER_ASK + 3


@both_colours
async def test_asks_that_are_made_with_a_pause_cost_four_statements_each(subject: Subject) -> None:
    traces: list[Trace] = []
    store = await subject.open(hooks=Hooks(trace=traces.append), durability="normal")
    statements = {}
    for count in (1, 2, 12):
        session = await planner(store, f"asks {count}")
        traces.clear()
        asks = [holdfast.Ask("a", number) for number in range(count)]
        parked = await done(session.pause({"step": 1}, asks=asks))
        [trace] = traces
        statements[count] = trace.statements
        assert isinstance(parked, holdfast.Parked)
        assert [call.input for call in await done(session.asks())] == list(range(count))
        assert await status(store, session.id) == "waiting"
    assert statements[2] - statements[1] == STATEMENTS_PER_ASK_TOGETHER
    assert statements[12] - statements[2] == 10 * STATEMENTS_PER_ASK_TOGETHER + 3


@both_colours
async def test_of_many_asks_that_fail_none_is_made(subject: Subject) -> None:
    store = await subject.open()
    session = await planner(store)
    with pytest.raises(ValueError, match="after the last"):
        await done(store.run(ask_many, session, 3, fails=True))
    assert await done(session.asks()) == []
    assert await waiting_items(store, "a") == []
    assert await status(store, session.id) == "active"
