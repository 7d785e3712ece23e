"""Attempts of one effect: how many there are, and the key that its receiver is given."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast
from holdfast import InvalidArgument, Landed, NotLanded, Unknown, Unresolved, VirtualClock
from holdfast.testing.subject import Subject, done, raises
from tests.checkpoints.colours import both_colours
from tests.effects.world import World

SAYS = "not run again after attempt 2, as max_attempts is 2"


async def die(session: Any, tool: Any, clock: VirtualClock) -> str:
    """Take an effect, and be gone before its outcome is known."""
    begun = await done(session.begin(tool, {"to": "ann"}))
    id = str(begun.effect_id)
    del begun
    clock.advance(3600)
    return id


async def opened(subject: Subject) -> tuple[Any, Any, VirtualClock]:
    clock = VirtualClock()
    store = await subject.open(clock=clock)
    return store, await done(store.session("s")), clock


def crashing(world: World) -> list[Any]:
    """Return tools that are run again when their owner has died."""
    return [
        world.tool(on_unknown="retry", max_attempts=2),
        world.tool(name="checked", verify=world.verify, max_attempts=2),
        world.tool(name="writes", effect="write", max_attempts=2),
    ]


@both_colours
async def test_it_is_parked_after_so_many_attempts(subject: Subject) -> None:
    world = World()
    world.verdict = NotLanded()
    store, session, clock = await opened(subject)
    for tool in crashing(world):
        first = await die(session, tool, clock)
        second = await die(session, tool, clock)
        assert first != second
        for _ in range(2):
            doubt = await raises(Unresolved, lambda: session.call(tool, to="ann"))  # noqa: B023
            assert doubt.effect_id == second
            assert SAYS in str(doubt)
        attempts = await done(store.attempts(first))
        assert [(each.status, each.attempt) for each in attempts] == [("failed", 1), ("unknown", 2)]
        assert world.done == []
        # A person can let it go on; one attempt more is then made.
        await done(store.resolve(second, NotLanded(), by="ann"))
        third = await die(session, tool, clock)
        doubt = await raises(Unresolved, lambda: session.call(tool, to="ann"))  # noqa: B023
        assert doubt.effect_id == third
        await done(store.resolve(third, NotLanded(), by="ann"))
        assert (await done(session.call(tool, to="ann"))).value == 1
        world.done.clear()


@both_colours
async def test_a_verify_hook_may_still_find_it(subject: Subject) -> None:
    world = World()
    world.verdict = NotLanded()
    _, session, clock = await opened(subject)
    tool = crashing(world)[1]
    for _ in range(2):
        await die(session, tool, clock)
    await raises(Unresolved, lambda: session.call(tool, to="ann"))
    world.verdict = Landed(7)
    assert (await done(session.call(tool, to="ann"))).value == 7
    assert world.done == []


@both_colours
async def test_recovery_keeps_to_it(subject: Subject) -> None:
    world = World()
    world.verdict = NotLanded()
    store, session, clock = await opened(subject)
    for tool in crashing(world):
        seen = []
        for _ in range(2):
            await die(session, tool, clock)
            recovered = await done(store.recover(tools=[tool]))
            seen += [(effect.status, effect.attempt) for effect in recovered.settled]
        assert seen == [("failed", 1), ("unknown", 2)]
        await raises(Unresolved, lambda: session.call(tool, to="ann"))  # noqa: B023
    assert world.done == []


@both_colours
async def test_without_it_there_is_no_end(subject: Subject) -> None:
    world = World()
    world.verdict = Unknown()
    _, session, clock = await opened(subject)
    tool = world.tool(verify=world.verify, on_unknown="retry")
    assert len({await die(session, tool, clock) for _ in range(5)}) == 5
    assert (await done(session.call(tool, to="ann"))).value == 1


@both_colours
async def test_errors_that_are_certain_are_the_callers_to_count(subject: Subject) -> None:
    world = World()
    _, session, _ = await opened(subject)
    tool = crashing(world)[0]
    world.fails_with = holdfast.NotDone("no")
    for _ in range(4):
        await raises(holdfast.NotDone, lambda: session.call(tool, to="ann"))
    world.fails_with = None
    assert (await done(session.call(tool, to="ann"))).value == 5


@both_colours
async def test_a_certain_error_does_not_settle_an_attempt_before_it(subject: Subject) -> None:
    world = World()
    store, session, clock = await opened(subject)
    tool = world.tool(on_unknown="retry")
    first = await die(session, tool, clock)
    world.fails_with = holdfast.NotDone("nothing was sent")
    for _ in range(2):
        await raises(holdfast.NotDone, lambda: session.call(tool, to="ann"))
    world.fails_with = None
    await done(session.call(tool, to="ann"))
    # The receiver may have got the first one, and knows it by its key.
    assert set(world.keys) == {(await done(store.effect(first))).idempotency_key}
    assert len(world.keys) == 3


@both_colours
async def test_a_rewind_settles_nothing_that_may_have_happened(subject: Subject) -> None:
    world = World()
    _, session, _ = await opened(subject)
    again = world.tool(on_unknown="retry", name="again")
    never = world.tool(on_unknown="fail", name="never")
    await done(session.save(n=1))
    world.fails_with = ConnectionError("no answer")
    for tool in (again, never):
        await raises(ConnectionError, lambda: session.call(tool, to="ann"))  # noqa: B023
    await done(session.rewind(1))
    world.fails_with = None
    await raises(holdfast.EffectFailed, lambda: session.call(never, to="ann"))
    await done(session.call(again, to="ann"))
    first, _, repeated = world.keys
    assert first == repeated


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "2"])
def test_it_is_a_number_of_attempts(wrong: Any) -> None:
    with pytest.raises(InvalidArgument, match="max_attempts must be a whole number from 1 up"):
        World().tool(max_attempts=wrong)
