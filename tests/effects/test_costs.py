"""What a call through the ledger costs: transactions, and statements in each."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast import ToolUse
from holdfast.effects import recorder, turns
from holdfast.kernel.driver import Hooks, Trace
from holdfast.testing.subject import Subject, done
from tests.checkpoints.colours import both_colours
from tests.effects.world import World

# A change in one of these is a change of cost on every call: look before you update the number.
# On PostgreSQL the event, its position and the mark of a COMMIT are part of the statement that
# decides.
SQLITE = {
    "call": [("Ledger.take", 3), ("Ledger.finish", 3)],
    "call with an id": [("Ledger.take", 3), ("Ledger.finish", 3)],
    "begin": [("Ledger.take", 3)],
    "complete": [("Ledger.finish", 3)],
    "read": [("Ledger.take", 3)],
    "once": [("Ledger.take", 1), ("Ledger.finish", 1)],
    "replay": [("Ledger.take", 6)],
    "next replay": [("Ledger.take", 5)],
    "replay of another call": [("Ledger.take", 8)],
    "eight together": [("Ledger.take_all", 10), ("Ledger.finish_all", 10)],
}
POSTGRES = {
    "call": [("Ledger.take", 2), ("Ledger.finish", 2)],
    "call with an id": [("Ledger.take", 2), ("Ledger.finish", 2)],
    "begin": [("Ledger.take", 2)],
    "complete": [("Ledger.finish", 2)],
    "read": [("Ledger.take", 2)],
    "once": [("Ledger.take", 1), ("Ledger.finish", 1)],
    "replay": [("Ledger.take", 6)],
    "next replay": [("Ledger.take", 6)],
    "replay of another call": [("Ledger.take", 8)],
    "eight together": [("Ledger.take_all", 10), ("Ledger.finish_all", 10)],
}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outcomes wait for each other however slow the machine is."""
    monkeypatch.setattr(recorder, "HOLD_SECONDS", 3600)
    monkeypatch.setattr(turns, "LOOK_SECONDS", 3600)


@both_colours
async def test_every_call_costs_the_statements_it_should(subject: Subject) -> None:
    traces: list[Trace] = []
    store = await subject.open(hooks=Hooks(trace=traces.append), durability="normal")
    session = await done(store.session("s"))
    world = World()
    mail, look = world.tool(), world.tool(effect="read", name="look")
    await done(session.call(mail, to="first"))
    begun: Any = None

    async def begin() -> None:
        nonlocal begun
        begun = await done(session.begin(mail, {"to": "begun"}))

    calls: dict[str, Any] = {
        "call": lambda: session.call(mail, to="ann"),
        "call with an id": lambda: session.call(mail, to="bob", call_id="c1"),
        "begin": begin,
        "complete": lambda: begun.complete(1),
        "read": lambda: session.call(look, to="ann"),
        "once": lambda: store.once("k", lambda: 1),
        "replay": lambda: session.call(mail, to="bob", call_id="c1"),
        "next replay": lambda: session.call(mail, to="bob", call_id="c1"),
        "replay of another call": lambda: session.call(mail, to="ann", call_id="c2"),
        "eight together": lambda: session.call_all(
            [ToolUse(mail, {"to": str(n)}) for n in range(8)]
        ),
    }
    found = {}
    for name, call in calls.items():
        traces.clear()
        await done(call())
        found[name] = [(trace.call, trace.statements) for trace in traces if trace.statements]
    is_sqlite = subject.place["url"].startswith("sqlite")
    assert found == (SQLITE if is_sqlite else POSTGRES)
