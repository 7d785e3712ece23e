"""A store whose effects are known by a key is not used with another one, or without."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

import holdfast
from holdfast import InvalidArgument, Redactor
from holdfast.kernel.driver import Hooks, Point, Trace
from holdfast.kernel.operation import rows
from holdfast.testing.subject import Subject, done, raises
from tests.checkpoints.colours import both_colours
from tests.effects.world import World

KEY, OTHER_KEY = b"kept beside the database", b"kept somewhere else"


def using(key: bytes | None, **more: Any) -> dict[str, Any]:
    return {"redaction": Redactor(key=key), **more}


def ways(store: Any, session: Any, world: World) -> list[Callable[[], Any]]:
    """Return every way to an effect."""
    mail, read = world.tool(), world.tool(effect="read", name="read")
    return [
        lambda: session.call(mail, to="ann"),
        lambda: session.call(mail, to="ann", call_id="c1"),
        lambda: session.call(read, to="ann", call_id="c2"),
        lambda: session.begin("mail", {"to": "ann"}),
        lambda: store.once("key", mail, request={"to": "ann"}),
    ]


CHANGES = [
    (None, KEY, "identified without a key.*Open the store without one"),
    (KEY, None, "identified with a key.*Open the store with it"),
    (KEY, OTHER_KEY, "identified with another key.*Open the store with that one"),
]


@both_colours
async def test_a_store_with_effects_is_refused_with_another_key(subject: Subject) -> None:
    for first, then, advice in CHANGES:
        world, store = World(), await subject.open(**using(first))
        session = await done(store.session("s"))
        # These were opened while no effect said which key counts.
        others = [await subject.open(**using(then)) for _ in range(5)]
        sent = await done(session.call(world.tool(), to="ann"))
        for number, other in enumerate(others):
            calls = ways(other, await done(other.session("s")), world)
            # Each of them is refused, whether it is the first of its process or not.
            for call in (calls[number], *calls):
                with pytest.raises(InvalidArgument, match=advice):
                    await done(call())
        with pytest.raises(InvalidArgument, match=advice):
            await subject.open(**using(then))
        assert len(world.done) == 1
        again = await subject.open(**using(first))
        session = await done(again.session("s"))
        assert (await done(session.call(world.tool(), to="ann"))).replay_of == sent.effect_id
        assert [effect.id for effect in await done(again.effects())] == [sent.effect_id]
        await done(store.run(forget))


@both_colours
async def test_a_store_without_effects_takes_any_key(subject: Subject) -> None:
    world = World()
    stores = [await subject.open(**using(key)) for key in (None, KEY, OTHER_KEY)]
    sessions = [await done(store.session("s")) for store in stores]
    tools = [world.tool(), world.tool(effect="read", name="read")]
    for _ in range(2):
        # Stores that are open notice as well, though they had learned what effects are known by.
        for store, session in zip(stores, sessions, strict=True):
            for tool in tools:
                assert not (await done(session.call(tool, to="ann", call_id=tool.name))).replayed
                assert (await done(session.call(tool, to="ann", call_id=tool.name))).replayed
                for other in sessions:
                    if other is not session:
                        call = lambda: other.call(tool, to="ann", call_id=tool.name)  # noqa: B023, E731
                        await raises(InvalidArgument, call)
            await done(store.run(forget))


def forget(tx: holdfast.Transaction) -> holdfast.Op[None]:
    yield from rows("DELETE FROM hf_effects")


def test_the_first_effect_and_another_key_cannot_come_at_the_same_time(place: Any) -> None:
    """Who takes a key on waits for an effect that is about to be committed."""
    is_reached, may_commit = threading.Event(), threading.Event()

    def hold_up(point: Point) -> None:
        if (point.boundary, point.moment) == ("commit", "before") and "take" in point.call:
            is_reached.set()
            may_commit.wait(120)

    world, refused = World(), []
    with (
        holdfast.open(**place, hooks=Hooks(probe=hold_up)) as plain,
        holdfast.open(**place, **using(KEY)) as keyed,
    ):
        first, second = plain.session("a"), keyed.session("b")

        def call_with_key() -> None:
            try:
                second.call(world.tool(), to="ann")
            except InvalidArgument as error:
                refused.append(error)

        slow = threading.Thread(target=lambda: first.call(world.tool(), to="ann"))
        slow.start()
        assert is_reached.wait(120)
        fast = threading.Thread(target=call_with_key)
        fast.start()
        fast.join(0.3)
        may_commit.set()
        slow.join()
        fast.join()
        assert (len(refused), len(plain.effects())) == (1, 1)


def test_it_costs_no_statement_per_call(place: Any) -> None:
    costs: list[list[int]] = []
    for key in (None, KEY):
        traces: list[Trace] = []
        with holdfast.open(**place, **using(key), hooks=Hooks(trace=traces.append)) as store:
            session, world = store.session("s"), World()
            for number in range(3):
                session.call(world.tool(), to=str(number))
            store.run(forget)
        costs.append([trace.statements for trace in traces if trace.call == "Ledger.take"])
    assert costs[0][1:] == costs[1][1:]
    assert costs[0][0] < costs[1][0], "a store takes its key on once"
