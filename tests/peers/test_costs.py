"""What many calls cost: one commit, and the same statements for each."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import holdfast
from holdfast.kernel.driver import Hooks, Point, Trace
from holdfast.kernel.operation import Call
from holdfast.peers.uptake import serve_turn
from holdfast.testing.subject import Subject, done
from holdfast.work.claims import Claim
from holdfast.work.transitions import Transition
from tests.checkpoints.colours import both_colours
from tests.peers.agents import planner, status, waiting_items

# A change in these is a change of cost on every call: look before you update the numbers.
STATEMENTS_OF_A_REQUEST = {
    "request": 6,
    "caller claimed": 5,
    "paused": 14,
    "peer claimed": 5,
    "peer completed": 12,
    "caller resumed": 10,
    "caller completed": 13,
}
# On PostgreSQL events are part of the statement that advances the feed, a record of a status is
# part of the one that changes it, and a pause is closed with its calls. A request is decided by one
# statement with its events.
MERGED_ON_POSTGRES = {
    "request": 2,
    "paused": 1,
    "peer completed": 2,
    "caller resumed": 2,
    "caller completed": 3,
}
SESSION_ROW_WRITES = 8
STATEMENTS_PER_ASK = 5
STATEMENTS_PER_ASK_TOGETHER = 3
STATEMENTS_PER_CANCELLED_PEER = 8


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
async def test_asks_that_are_made_with_a_pause_cost_three_statements_each(subject: Subject) -> None:
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
async def test_the_rest_of_many_peers_is_cancelled_together(subject: Subject) -> None:
    """One after the other, a thousand peers kept their tree locked for half a minute."""
    traces: list[Trace] = []
    store = await subject.open(hooks=Hooks(trace=traces.append), durability="normal")
    statements = {}
    for count in (11, 41):
        session = await planner(store, f"asks {count}")
        asks = [holdfast.Ask("a", number) for number in range(count)]
        await done(session.pause(asks=asks, need="any"))
        *_, last = await done(session.asks())
        traces.clear()
        await done(store.answer(last.id, "enough"))
        [trace] = traces
        statements[count] = trace.statements
        states = {call.state for call in await done(session.asks(last=count))}
        assert states == {"ok", "cancelled"}
    assert statements[41] - statements[11] <= 30 * STATEMENTS_PER_CANCELLED_PEER


@both_colours
async def test_of_many_asks_that_fail_none_is_made(subject: Subject) -> None:
    store = await subject.open()
    session = await planner(store)
    with pytest.raises(ValueError, match="after the last"):
        await done(store.run(ask_many, session, 3, fails=True))
    assert await done(session.asks()) == []
    assert await waiting_items(store, "a") == []
    assert await status(store, session.id) == "active"


@both_colours
async def test_what_a_request_with_one_peer_costs(subject: Subject) -> None:
    """Statements of each commit, and how often the rows of the two sessions are written."""
    traces: list[Trace] = []
    written: list[str] = []

    def probe(point: Point) -> None:
        if point.moment == "before" and re.search(
            r"(INSERT INTO|UPDATE) [^ ]*hf_sessions", point.sql
        ):
            written.append(point.sql)

    hooks = Hooks(trace=traces.append, probe=probe)
    store = await subject.open(hooks=hooks, durability="normal")
    costs = {}

    async def cost(step: str, make: Callable[[], Any]) -> Any:
        traces.clear()
        result = await done(make())
        [trace] = traces
        costs[step] = trace.statements
        return result

    # The first of everything also asks for what is not remembered yet.
    for _ in range(2):
        written.clear()
        call = await cost("request", lambda: store.request("caller", 1))
        session = await driven(store, cost, "caller claimed", "caller")
        asks = [holdfast.Ask("peer", 1)]
        await cost("paused", partial(session.pause, asks=asks))
        peer = await driven(store, cost, "peer claimed", "peer")
        await cost("peer completed", partial(turned, store, [completion(peer.item)]))
        caller = await driven(store, cost, "caller resumed", "caller")
        await cost("caller completed", partial(turned, store, [completion(caller.item)]))
        assert (await done(store.peer_call(call.id))).state == "ok"
    wanted = dict(STATEMENTS_OF_A_REQUEST)
    if store.runtime.driver.dialect == "postgres":
        wanted = {step: wanted[step] - MERGED_ON_POSTGRES.get(step, 0) for step in wanted}
    assert costs == wanted
    assert len(written) == SESSION_ROW_WRITES


def turned(store: Any, ended: Any, agent: str | None = None) -> Any:
    """Take a turn, as a service does."""
    claim = None if agent is None else Claim("one", 1, [f"agent:{agent}"], 30_000, drives=True)
    return store.runtime.driver.run(Call(serve_turn, store.runtime, (ended, claim)))


def completion(item: Any) -> Any:
    return item, Transition("completed", "completed", item.runtime.codec.encode("sun"))


async def driven(store: Any, cost: Any, step: str, agent: str) -> Any:
    """Claim the item of an agent, and return its session as the handler gets it."""
    _, ([row], taken) = await cost(step, lambda: turned(store, (), agent))
    item: Any = holdfast.WorkItem(store.runtime, row, 30)
    return item._session(taken[row["number"]].fence)
