"""The ledger seen from outside: events, lists, recovery, and bad input."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast
from holdfast import (
    InvalidArgument,
    Landed,
    LeaseLost,
    NotFound,
    NotLanded,
    SessionBusy,
    Unknown,
    Unresolved,
    VirtualClock,
)
from holdfast.testing.subject import Subject, done, raises
from tests.checkpoints.colours import both_colours, sql
from tests.effects.world import World


@both_colours
async def test_events_tell_every_change_of_an_effect(subject: Subject) -> None:
    world, store = World(), await subject.open()
    mail = world.tool()
    session = await done(store.session("s"))
    await done(session.call(mail, to="ann", call_id="c1"))
    world.fails_with = OSError()
    error = await raises(Unresolved, lambda: session.call(mail, to="bob"))
    await done(store.resolve(error.effect_id, NotLanded(), by="ann"))
    events = (await done(store.events("s")))[1:]
    kinds = ["issued", "completed", "issued", "unknown", "resolved"]
    assert [event.kind for event in events] == [f"effect_{kind}" for kind in kinds]
    assert events[-1].data["decided_by"] == "ann"


@both_colours
async def test_listing_pages_and_filters(subject: Subject) -> None:
    world, store = World(), await subject.open()
    mail = world.tool()
    session = await done(store.session("s"))
    for number in range(5):
        await done(session.call(mail, to=str(number), item="item-1" if number % 2 else None))
    page = await done(store.effects(session=session, limit=3))
    rest = await done(store.effects(session="s", after=page[-1].number))
    assert [e.arguments["to"] for e in page + rest] == list("01234")
    assert len(await done(store.effects(item="item-1"))) == 2
    assert await done(store.effects(tool="nothing")) == []
    assert len(await done(store.effects(status="completed", tool="mail"))) == 5
    await raises(NotFound, lambda: store.effect("nothing"))
    await raises(NotFound, lambda: store.resolve("nothing", NotLanded(), by="me"))


@both_colours
async def test_recovery_settles_what_dead_owners_left(subject: Subject) -> None:
    world = World()
    verified = world.tool(verify=world.verify, name="verified")
    parked, written = world.tool(name="parked"), world.tool(name="written", effect="write")
    clock = VirtualClock()
    store = await subject.open(clock=clock)
    session = await done(store.session("s"))
    tools = [verified, parked, written]
    for each in (*tools, world.tool(name="foreign")):
        await done(session.begin(each, {"to": "ann"}))
    assert (await done(store.recover(tools=tools))).settled == ()
    clock.advance(3600)
    world.verdict = Landed("yes")
    found = await done(store.recover(tools=tools))
    states = {effect.tool: (effect.status, effect.reason) for effect in found.settled}
    assert states == {
        "verified": ("completed", "verified"),
        "parked": ("unknown", "owner_died"),
        "written": ("failed", "abandoned"),
    }
    assert [effect.tool for effect in found.left] == ["foreign"]
    assert (await done(store.recover(tools=tools))).settled == ()


@both_colours
async def test_recovery_fences_earlier_boots_of_an_instance(subject: Subject) -> None:
    world, store = World(), await subject.open()
    mail = world.tool(verify=world.verify)
    session = await done(store.session("s"))
    driven = await done(session.drive("boot-1", instance="box"))
    await done(driven.begin(mail, {"to": "ann"}))
    other = await done((await done(store.session("t"))).drive("boot-1", instance="other"))
    await raises(SessionBusy, lambda: session.drive("boot-2"))
    world.verdict = Landed("yes")
    found = await done(store.recover("boot-2", instance="box", tools=[mail]))
    assert found.fenced == 2
    assert [effect.status for effect in found.settled] == ["completed"]
    second = await done(session.drive("boot-2"))
    await raises(LeaseLost, lambda: driven.save(x=1))
    await done(other.save(x=1))
    for each in (driven, second, other):
        await done(each.close())


@both_colours
async def test_bad_input_writes_nothing(subject: Subject) -> None:
    world, store = World(), await subject.open()
    mail = world.tool()
    session = await done(store.session("s"))
    cases: list[Any] = [
        lambda: session.call(lambda: 1),
        lambda: session.call("mail", to="x"),
        lambda: session.call(mail),
        lambda: session.call(mail, to="x", cc="y"),
        lambda: session.call(mail, to="x", idempotency_key="mine"),
        lambda: session.call(mail, to="x", call_id=""),
        lambda: session.call(mail, to="x", call_id="a\0b"),
        lambda: session.call(mail, to="x", call_id=7),
        lambda: session.call(mail, to="x", wait_seconds=-1),
        lambda: session.call(mail, to="x", item=7),
        lambda: session.call_with(mail, ["x"]),
        lambda: session.begin("", {}),
        lambda: session.begin("bash", {}, effect="destroy"),
        lambda: session.begin("bash", [1]),
        lambda: store.once("", print),
        lambda: store.once("k" * 201, print),
        lambda: store.once("k", 7),
        lambda: store.once("k", print, ttl_seconds=0),
        lambda: store.once("k", print, session="s"),
        lambda: store.once("k", mail, request=["x"]),
        lambda: store.effects(status="done"),
        lambda: store.effects(limit=0),
        lambda: store.effects(after=-1),
        lambda: store.effects(key=7),
        lambda: store.effect(7),
        lambda: store.resolve("x", Unknown(), by="me"),
        lambda: store.resolve("x", Landed(), by=""),
        lambda: store.resolve("x", Landed(), by="me", note=7),
        lambda: store.recover(tools=mail),
        lambda: store.recover(tools=[mail, world.tool()]),
        lambda: store.recover(instance=""),
        lambda: session.rewind(1, tools=[print]),
        lambda: session.compensate(to=0),
    ]
    for number, case in enumerate(cases):
        error = await raises(InvalidArgument, case)
        assert str(error), number
    assert await done(sql(store, "SELECT id FROM hf_effects")) == []
    assert world.done == []


@pytest.mark.parametrize(
    "rules",
    [
        {"effect": "destroy"},
        {"effect": "read", "on_unknown": "guess"},
        {"dedupe": "never"},
        {"verify": 7},
        {"undo": "refund"},
        {"timeout_seconds": 0},
        {"settle_seconds": -1},
        {"lease_seconds": float("nan")},
        {"ttl_seconds": "1d"},
        {"wait_seconds": True},
        {"name": ""},
        {"name": "a\nb"},
    ],
    ids=str,
)
def test_a_tool_with_bad_rules_is_refused(rules: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        holdfast.tool(**rules)(lambda: None)


def test_a_tool_is_its_function() -> None:
    @holdfast.tool(effect="read")
    def look(place: str, *, deep: bool = False) -> str:
        """Look around."""
        return f"{place} {deep}"

    assert look("here", deep=True) == "here True"
    assert (look.name, look.description, look.effect) == ("look", "Look around.", "read")
    assert look.__wrapped__ is look.function  # type: ignore[attr-defined]
    for bad in (lambda call_id: 1, lambda *args: 1, lambda x, /: 1, lambda wait_seconds: 1):
        with pytest.raises(InvalidArgument):
            holdfast.tool(bad)


def test_a_joined_store_runs_no_effects(postgres_dsn: str, namespace: str) -> None:
    """SQLite refuses to join at all."""
    import psycopg

    world = World()
    with (
        holdfast.open(postgres_dsn, namespace=namespace) as store,
        psycopg.connect(postgres_dsn) as connection,
    ):
        store.session("s")
        connection.execute("SELECT 1")
        joined = store.within(connection)
        session = joined.session("s")
        with pytest.raises(InvalidArgument, match="nothing is durable yet"):
            session.call(world.tool(), to="x")
    assert world.done == []
