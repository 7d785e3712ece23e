"""When another may step in for an owner, and when a result expires, on a clock that tests move."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast
from holdfast import InProgress, Landed, NotLanded, Unresolved, VirtualClock
from holdfast.effects.statements import RENEW_EFFECT
from holdfast.kernel.operation import rows
from holdfast.testing.subject import Subject, done, raises
from tests.checkpoints.colours import both_colours
from tests.effects.world import World

LEASE, SETTLE, TIMEOUT = 10.0, 5.0, 8.0
RULES: dict[str, dict[str, Any]] = {
    "park": {},
    "fail": {"on_unknown": "fail"},
    "retry": {"on_unknown": "retry"},
    "verify": {"verify": True},
    "write": {"effect": "write"},
}


async def left_alone(store: Any, session: Any, tool: Any) -> Any:
    """Return an effect whose owner is gone."""
    begun = await done(session.begin(tool, {"to": "ann"}))
    id = begun.effect_id
    del begun
    return await done(store.effect(id))


async def nobody_steps_in(store: Any, session: Any, tool: Any, world: World, effect: Any) -> None:
    """Make sure that an effect is its owner's still, whoever asks."""
    busy = await raises(InProgress, lambda: session.call(tool, to="ann", wait_seconds=0))
    assert (busy.effect_id, busy.takeover_at) == (effect.id, effect.takeover_at)
    await raises(InProgress, lambda: store.resolve(effect.id, NotLanded(), by="ann"))
    recovered = await done(store.recover(tools=[tool]))
    assert (recovered.settled, recovered.left) == ((), ())
    assert await done(session.unresolved()) == []
    assert await done(store.effect(effect.id)) == effect
    assert (world.done, world.asked) == ([], [])


async def somebody_steps_in(session: Any, tool: Any, world: World) -> None:
    """Make sure that an effect without an owner is settled, as its tool says."""
    if tool.name in {"park", "fail"}:
        error = Unresolved if tool.name == "park" else holdfast.EffectFailed
        await raises(error, lambda: session.call(tool, to="ann", wait_seconds=0))
    else:
        assert not (await done(session.call(tool, to="ann", wait_seconds=0))).replayed
    assert len(world.done) == (tool.name in {"retry", "verify", "write"})
    assert len(world.asked) == (tool.name == "verify")


def tools(**rules: Any) -> list[tuple[World, Any]]:
    """Return a tool of each kind, and its world."""
    made = []
    for name, own in RULES.items():
        world = World()
        world.verdict = NotLanded()
        hooks = {"verify": world.verify} if own.get("verify") else {}
        made.append((world, world.tool(name=name, **{**own, **hooks, **rules})))
    return made


@both_colours
async def test_after_the_lease_the_settling_time_is_waited_for(subject: Subject) -> None:
    clock = VirtualClock()
    store = await subject.open(clock=clock)
    for world, tool in tools(lease_seconds=LEASE, settle_seconds=SETTLE):
        session = await done(store.session(tool.name))
        effect = await left_alone(store, session, tool)
        assert effect.takeover_at == effect.issued_at + 15_000
        for seconds in (LEASE - 0.1, 0.2, SETTLE - 0.2):
            clock.advance(seconds)
            await nobody_steps_in(store, session, tool, world, effect)
        clock.advance(0.1)
        await somebody_steps_in(session, tool, world)


@both_colours
async def test_an_owner_that_was_fenced_is_waited_for_until_its_call_has_timed_out(
    subject: Subject,
) -> None:
    clock = VirtualClock()
    store = await subject.open(clock=clock)
    for world, tool in tools(timeout_seconds=TIMEOUT, settle_seconds=SETTLE):
        session = await done(store.session(tool.name))
        driven = await done(session.drive("boot-1", instance=tool.name))
        effect = await left_alone(store, driven, tool)
        # A new boot takes the lease away at once. What was asked for may be on its way.
        assert (await done(store.recover("boot-2", instance=tool.name))).fenced == 2
        effect = await done(store.effect(effect.id))
        assert effect.takeover_at == effect.issued_at + 13_000
        for seconds in (TIMEOUT - 0.1, 0.2, SETTLE - 0.2):
            clock.advance(seconds)
            await nobody_steps_in(store, session, tool, world, effect)
        clock.advance(0.1)
        await somebody_steps_in(session, tool, world)
        await done(driven.close())


@both_colours
async def test_a_heartbeat_puts_the_takeover_off(subject: Subject) -> None:
    world, clock = World(), VirtualClock()
    store = await subject.open(clock=clock)
    tool = world.tool(lease_seconds=LEASE, settle_seconds=SETTLE, timeout_seconds=TIMEOUT)
    session = await done(store.session("s"))
    begun = await done(session.begin(tool, {"to": "ann"}))
    clock.advance(LEASE - 1)
    await done(store.run(renew, begun))
    clock.advance(LEASE + SETTLE - 0.1)
    await raises(InProgress, lambda: session.call(tool, to="ann", wait_seconds=0))
    clock.advance(0.1)
    await raises(Unresolved, lambda: session.call(tool, to="ann", wait_seconds=0))


def renew(tx: Any, begun: Any) -> holdfast.Op[None]:
    """Do what the owner's heartbeat does."""
    given = {"number": begun.ticket.number, "fence": begun.ticket.fence}
    assert (yield from rows(RENEW_EFFECT, **given, lease_ms=round(LEASE * 1000)))


# Expiry

WAYS = ("once", "tool", "begin", "resolved", "verified")


@both_colours
async def test_a_result_expires_a_time_after_completion_not_after_the_call(
    subject: Subject,
) -> None:
    clock = VirtualClock()
    store = await subject.open(clock=clock)
    for way in WAYS:
        world = World()
        tool = world.tool(name=way, ttl_seconds=100, lease_seconds=10, verify=world.verify)
        session = await done(store.session(way))
        request = {"to": "ann"}

        async def call() -> Any:
            if way == "once":  # noqa: B023
                return await done(
                    store.once("key", tool, request=request, ttl_seconds=100)  # noqa: B023
                )
            return await done(session.call(tool, **request))  # noqa: B023

        if way in {"once", "tool"}:
            world.inside = lambda: clock.advance(60)
            await call()
            world.inside = None
        else:
            begun = await done(session.begin(tool, request))
            clock.advance(60)
            if way == "begin":
                await done(begun.complete(1))
            elif way == "resolved":
                await done(store.resolve(begun.effect_id, Landed(1), by="ann"))
            else:
                world.verdict = Landed(1)
                await call()
        (row,) = await done(store.effects(tool=way))
        assert (row.ended_at - row.issued_at, row.expires_at - row.ended_at) == (60_000, 100_000)
        before = len(world.done)
        for seconds in (50, 49.9):
            clock.advance(seconds)
            await done(store.prune(key_days=0))
            assert (await call()).replayed
        clock.advance(0.2)
        assert not (await call()).replayed
        assert len(world.done) == before + 1


@pytest.mark.parametrize("effect", ["read", "write"])
def test_a_read_expires_like_a_write(place: dict[str, Any], effect: Any) -> None:
    world, clock = World(), VirtualClock()
    tool = world.tool(effect=effect, ttl_seconds=100)
    with holdfast.open(**place, clock=clock) as store:
        session = store.session("s")
        world.inside = lambda: clock.advance(60)
        session.call(tool, to="x", call_id="c1")
        world.inside = None
        clock.advance(99.9)
        assert session.call(tool, to="x", call_id="c1").replayed
        clock.advance(0.2)
        assert not session.call(tool, to="x", call_id="c1").replayed
