"""Links to sessions and work items change nothing; an item's own calls count by its first item."""

from __future__ import annotations

from typing import Any

from holdfast import Landed, NotDone, RequestMismatch, Unresolved, VirtualClock
from holdfast.testing.subject import Subject, done, raises
from tests.checkpoints.colours import both_colours
from tests.effects.world import World
from tests.work.items import claimed

DAY = 24 * 3600.0


async def redriven(store: Any, item: Any) -> Any:
    """Let an item fail for good; return the one that was submitted for it, held."""
    await done(item.fail("no", retry=False))
    again = await done(store.work.redrive(item.id))
    (held,) = await done(store.work.claim("me"))
    assert held.id == again.id
    return held


@both_colours
async def test_once_is_one_execution_whatever_it_is_linked_to(subject: Subject) -> None:
    store, runs = await subject.open(), []
    session = await done(store.session("s"))
    a, b = [await claimed(store, session=session) for _ in range(2)]

    def invoice() -> int:
        runs.append(1)
        return len(runs)

    links: list[dict[str, Any]] = [
        {"item": a}, {"item": b}, {}, {"session": session}, {"session": session, "item": b.id},
    ]  # fmt: skip
    found = [await done(store.once("invoice", invoice, **link)) for link in links]
    assert (len(runs), {each.effect_id for each in found}) == (1, {found[0].effect_id})
    (row,) = await done(store.effects(item=a))
    assert row.key == "once:invoice"
    await raises(RequestMismatch, lambda: store.once("invoice", invoice, request=1, item=b))


@both_colours
async def test_once_is_not_run_again_because_a_session_was_rewound(subject: Subject) -> None:
    world, store = World(), await subject.open()
    session = await done(store.session("s"))
    await done(session.save(n=1))
    write = world.tool(effect="write")
    request = {"to": "file"}
    for _ in range(2):
        await done(store.once("key", write, request=request, session=session))
        await done(store.once("key", write, request=request))
        await done(session.rewind(1))
    assert len(world.done) == 1


@both_colours
async def test_a_sessions_call_is_one_whatever_item_it_is_linked_to(subject: Subject) -> None:
    world, store = World(), await subject.open()
    session = await done(store.session("s"))
    a, b = [await claimed(store, session=session) for _ in range(2)]
    mail = world.tool()
    for call_id in ("c1", None):
        for item in (a, b, None, b.id):
            await done(session.call(mail, to=str(call_id), call_id=call_id, item=item))
    assert len(world.done) == 2
    begun = await done(session.begin("bash", {"command": "ls"}, "c2", item=a))
    await done(begun.complete(0))
    again = await done(session.begin("bash", {"command": "ls"}, "c2", item=b))
    assert again.result.replay_of == begun.effect_id
    await raises(RequestMismatch, lambda: session.call(mail, to="bob", call_id="c1", item=b))
    # An item's own call is another one: it counts for the item.
    assert not (await done(a.call(mail, to="c1"))).replayed
    assert len(world.done) == 3


@both_colours
async def test_a_redriven_item_replays_what_its_predecessors_did(subject: Subject) -> None:
    for name in (None, "s"):
        world, store = World(), await subject.open()
        session = None if name is None else await done(store.session(name))
        charge, write = world.tool(), world.tool(effect="write", name="write")
        item = await claimed(store, session=session)
        first, found = item, []
        for number in range(3):
            found.append(await done(item.call(charge, to="ann", call_id="c1")))
            found.append(await done(item.call(charge, to="ann", call_id=f"again {number}")))
            once = await done(item.once("key", charge, request={"to": "bob"}))
            await done(item.call(write, to="f", text="v1"))
            assert (once.value, len(world.done)) == (2, 3)
            assert (item.first_id, item.id == first.id) == (
                (None, True) if number == 0 else (first.id, False)
            )
            item = await redriven(store, item)
        assert [each.replayed for each in found] == [False, *[True] * 5]
        await raises(RequestMismatch, lambda: item.call(charge, to="eve", call_id="again 0"))  # noqa: B023
        # Another item of the same kind is none of the chain.
        await done((await claimed(store, session=session)).call(charge, to="ann"))
        assert len(world.done) == 4


@both_colours
async def test_a_redriven_item_writes_again_what_another_write_came_after(
    subject: Subject,
) -> None:
    world, store = World(), await subject.open()
    write = world.tool(effect="write")
    item = await claimed(store)
    for text in ("v1", "v2"):
        await done(item.call(write, to="f", text=text))
    other = await claimed(store)
    await done(other.call(write, to="f", text="v3"))
    item = await redriven(store, item)
    for text in ("v2", "v1", "v1"):
        await done(item.call(write, to="f", text=text))
    assert [text for _, text in world.done] == ["v1", "v2", "v3", "v1"]


@both_colours
async def test_what_a_person_resolved_or_a_receiver_knows_survives_a_redrive(
    subject: Subject,
) -> None:
    world, clock = World(), VirtualClock()
    store = await subject.open(clock=clock)
    charge = world.tool()
    item = await claimed(store)
    world.fails_with = ConnectionError("no answer")
    doubt = await raises(Unresolved, lambda: item.call(charge, to="ann"))
    await done(store.resolve(doubt.effect_id, Landed("paid"), by="ann"))
    retried = world.tool(name="retried", on_unknown="retry")
    await raises(ConnectionError, lambda: item.call(retried, to="ann"))
    item = await redriven(store, item)
    world.fails_with = None
    assert (await done(item.call(charge, to="ann"))).value == "paid"
    await done(item.call(retried, to="ann"))
    # The receiver of what may have been done is given the same key.
    assert len(world.done) == 3
    assert world.keys[1] == world.keys[2] != world.keys[0]
    world.fails_with = NotDone("no")
    await raises(NotDone, lambda: item.call(retried, to="bob"))


@both_colours
async def test_effects_of_a_chain_stay_while_an_item_of_it_is_there(subject: Subject) -> None:
    world, clock = World(), VirtualClock()
    store = await subject.open(clock=clock)
    charge = world.tool()
    item = await claimed(store)
    await done(item.call(charge, to="ann"))
    item = await redriven(store, item)
    await done(item.release())
    clock.advance(91 * DAY)
    assert (await done(store.prune())).effects == 0
    (item,) = await done(store.work.claim("me"))
    assert (await done(item.call(charge, to="ann"))).replayed
    await done(item.complete())
    clock.advance(91 * DAY)
    await done(store.prune())
    assert (await done(store.prune())).effects == 0
    assert await done(store.effects()) == []
