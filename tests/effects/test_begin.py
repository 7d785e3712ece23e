"""Effects that somebody else runs: begun by a key, ended from another process, listed at once."""

from __future__ import annotations

from typing import Any

from holdfast import (
    EffectFailed,
    InProgress,
    InvalidArgument,
    InvalidValue,
    LeaseLost,
    NotFound,
    Replay,
    RequestMismatch,
    Unresolved,
    VirtualClock,
    tool,
)
from holdfast.testing.subject import Subject, done, raises
from tests.checkpoints.colours import both_colours
from tests.effects.world import World


@both_colours
async def test_a_client_brings_its_own_key(subject: Subject) -> None:
    clock = VirtualClock()
    store = await subject.open(clock=clock)
    request = {"month": "2026-11"}
    assert await done(store.compare("invoice", request)) == "none"
    begun = await done(store.begin("invoice", request, ttl_seconds=60))
    assert await done(store.compare("invoice", request)) == "match"
    assert await done(store.compare("invoice", {"month": "2026-12"})) == "conflict"
    await raises(InProgress, lambda: store.begin("invoice", request, wait_seconds=0))
    await raises(RequestMismatch, lambda: store.begin("invoice", {"month": "2026-12"}))
    await done(begun.complete({"number": 41}))
    again = await done(store.begin("invoice", request))
    assert isinstance(again, Replay)
    assert (again.result.value, again.result.replay_of) == ({"number": 41}, begun.effect_id)
    # It is the same key as that of `once`.
    found = await done(store.once("invoice", lambda: None, request=request))
    assert found.replay_of == begun.effect_id
    clock.advance(61)
    assert await done(store.compare("invoice", {"month": "2026-12"})) == "none"
    assert not isinstance(await done(store.begin("invoice", {"month": "2026-12"})), Replay)
    assert len(await done(store.effects())) == 2


@both_colours
async def test_to_compare_writes_nothing(subject: Subject) -> None:
    store = await subject.open()
    assert await done(store.compare("k")) == "none"
    assert await done(store.effects()) == []
    await raises(InvalidArgument, lambda: store.compare(""))
    failed = await done(store.begin("k", 1))
    await done(failed.fail("no", happened=False))
    assert await done(store.compare("k", 1)) == "match"
    assert await done(store.compare("k", 1.0)) == "conflict"


@both_colours
async def test_an_outcome_is_recorded_from_another_process(subject: Subject) -> None:
    world, store, other = World(), await subject.open(), await subject.open()
    mail = world.tool()
    session = await done(store.session("s"))
    there = await done(other.find_session("s"))
    await raises(NotFound, lambda: there.begun("c1"))
    begun = await done(session.begin(mail, {"to": "ann"}, "c1"))
    taken = await done(there.begun("c1"))
    assert (taken.effect_id, taken.idempotency_key) == (begun.effect_id, begun.idempotency_key)
    await done(taken.complete("sent"))
    assert (await done(session.call(mail, to="ann", call_id="c1"))).value == "sent"
    assert (await done(there.begun("c1"))).result.value == "sent"
    # There is one outcome: the owner's comes too late.
    await raises(LeaseLost, lambda: begun.complete("again"))
    late = await done(store.effect(begun.effect_id))
    assert (late.result, late.late["result"]) == ("sent", "again")
    for call_id, end in (("c2", {"happened": False}), ("c3", {})):
        await done(session.begin(mail, {"to": call_id}, call_id))
        await done((await done(there.begun(call_id))).fail("no", **end))
    await raises(EffectFailed, lambda: there.begun("c2"))
    await raises(Unresolved, lambda: there.begun("c3"))
    await raises(InvalidArgument, lambda: there.begun(""))
    assert world.done == []


@both_colours
async def test_who_steps_in_makes_an_outcome_from_elsewhere_too_late(subject: Subject) -> None:
    clock = VirtualClock()
    store = await subject.open(clock=clock)
    world = World()
    write = world.tool(effect="write", name="write")
    session = await done(store.session("s"))
    await done(session.begin(write, {"to": "f"}, "c1"))
    taken = await done(session.begun("c1"))
    clock.advance(3600)
    assert (await done(session.call(write, to="f", call_id="c1"))).value == 1
    await raises(LeaseLost, lambda: taken.complete("late"))
    assert (await done(session.begun("c1"))).result.value == 1


@both_colours
async def test_what_a_fenced_owner_asked_for_is_recorded_from_elsewhere(subject: Subject) -> None:
    world, store = World(), await subject.open()
    session = await done(store.session("s"))
    driven = await done(session.drive("boot-1", instance="a"))
    begun = await done(driven.begin(world.tool(), {"to": "ann"}, "c1"))
    assert (await done(store.recover("boot-2", instance="a"))).fenced == 2
    taken = await done(session.begun("c1"))
    await done(taken.complete("sent"))
    assert (await done(session.call(world.tool(), to="ann", call_id="c1"))).value == "sent"
    await raises(LeaseLost, lambda: begun.complete("late"))
    await done(driven.close())
    assert world.done == []


@both_colours
async def test_a_caller_brings_an_idempotency_key_of_its_own(subject: Subject) -> None:
    clock = VirtualClock()
    store = await subject.open(clock=clock)
    world = World()
    mail = world.tool(on_unknown="retry")
    session = await done(store.session("s"))
    begun = await done(session.begin(mail, {"to": "ann"}, "c1", idempotency_key="order-7"))
    assert begun.idempotency_key == "order-7"
    assert [row.id for row in await done(store.effects(key="order-7"))] == [begun.effect_id]
    clock.advance(3600)
    # An attempt that may have reached its receiver is repeated under the same key.
    again = await done(session.begin(mail, {"to": "ann"}, "c1", idempotency_key="order-8"))
    assert (again.effect_id != begun.effect_id, again.idempotency_key) == (True, "order-7")
    for bad in ("", "a" * 300, "a\nb", 7):
        await raises(InvalidArgument, lambda: session.begin(mail, {"to": "x"}, idempotency_key=bad))  # noqa: B023


@both_colours
async def test_a_new_session_of_an_old_id_lists_what_it_meets(subject: Subject) -> None:
    world, store = World(), await subject.open()
    mail = world.tool()
    session = await done(store.session("s"))
    done_before = await done(session.call(mail, to="bob"))
    world.fails_with = ConnectionError("reset")
    doubt = await raises(Unresolved, lambda: session.call(mail, to="ann", call_id="c1"))
    begun = await done(session.begin(mail, {"to": "eve"}))
    await done(session.delete())
    parked = await done(store.effect(doubt.effect_id))
    assert parked.session_id is None
    assert parked.unlinked_at >= parked.ended_at
    assert await done(store.effects(session="s")) == []
    again = await done(store.session("s"))
    met = await raises(Unresolved, lambda: again.call(mail, to="ann"))
    assert met.effect_id == doubt.effect_id
    assert [effect.id for effect in await done(again.unresolved())] == [doubt.effect_id]
    assert [effect.id for effect in await done(again.pending())] == [begun.effect_id]
    listed = [effect.id for effect in await done(store.effects(session=again))]
    assert listed == [done_before.effect_id, doubt.effect_id, begun.effect_id]
    assert await done((await done(store.session("t"))).unresolved()) == []
    assert (await done(again.call(mail, to="bob"))).replay_of == done_before.effect_id
    await done(begun.complete("it was recorded all the same"))
    assert len(world.done) == 2


def deep() -> dict[str, Any]:
    return {"deep": [{1}]}


@both_colours
async def test_errors_name_what_was_passed(subject: Subject) -> None:
    store = await subject.open()
    session = await done(store.session("s"))

    def act(x: Any) -> None:
        raise AssertionError("it is refused before")

    def nothing() -> None:
        raise AssertionError("it is refused before")

    kinds: list[Any] = ["read", "write", "mutate"]
    tools: list[Any] = [tool(effect=effect)(act) for effect in kinds]
    tools += [tool(dedupe="global")(act), tool(dedupe="call")(act)]
    await done(store.work.submit("t", session=session))
    (item,) = await done(store.work.claim("me"))
    begun = await done(session.begin("bash", {}))
    calls = {
        "x.deep[0]": [
            *(lambda t=t: session.call(t, x=deep(), call_id="c") for t in tools),
            *(lambda t=t: session.call_with(t, {"x": deep()}, call_id="c") for t in tools),
            *(lambda t=t: item.call(t, x=deep(), call_id="c") for t in tools),
            lambda: session.call(tools[0], x=deep()),
            lambda: session.begin("bash", {"x": deep()}),
            lambda: session.save(x=deep()),
            lambda: session.save({"x": deep()}),
        ],
        "x[0].deep[0]": [lambda: session.append("x", [deep()])],
        "request.x.deep[0]": [
            lambda: store.once("k", nothing, request={"x": deep()}),
            lambda: store.once("k", tools[2], request={"x": deep()}),
            lambda: store.once("k", nothing, request={"x": deep()}, effect="read"),
            lambda: store.once("k", tools[0], request={"x": deep()}),
            lambda: store.begin("k", {"x": deep()}),
            lambda: store.compare("k", {"x": deep()}),
            lambda: item.once("k", nothing, request={"x": deep()}),
        ],
        "request[1].deep[0]": [lambda: store.begin("k", [1, deep()])],
        "what dedupe returned[0]": [
            lambda: session.call(tool(dedupe=lambda _: [{1}])(act), x=1),
        ],
        "data.deep[0]": [lambda: session.record("manual_checkpoint", deep())],
        "metadata.deep[0]": [
            lambda: session.save(x=1, metadata=deep()),
            lambda: store.session("t", metadata=deep()),
        ],
        "input.deep[0]": [lambda: store.work.submit("t", deep())],
        "output.deep[0]": [lambda: item.complete(deep())],
        "progress.deep[0]": [lambda: item.progress(deep())],
        "result.deep[0]": [lambda: begun.complete(deep())],
    }
    for path, refused in calls.items():
        for call in refused:
            error = await raises(InvalidValue, call)
            assert (error.path, str(error).startswith(path)) == (path, True), error
    assert len(await done(store.effects())) == 1
