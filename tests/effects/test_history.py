"""Effects in a session's history: drivers, rewinds, forks, undos, and loops of one's own."""

from __future__ import annotations

from typing import Any

import holdfast
from holdfast import (
    InvalidArgument,
    LeaseLost,
    NotDone,
    Replay,
    SessionBusy,
    SessionEnded,
    Unresolved,
)
from holdfast.testing.subject import Subject, done, raises
from tests.checkpoints.colours import both_colours
from tests.effects.world import World


@both_colours
async def test_begin_and_complete(subject: Subject) -> None:
    store = await subject.open()
    session = await done(store.session("s"))
    begun = await done(session.begin("bash", {"command": "ls"}, "call_1"))
    (row,) = await done(store.effects(status="issued"))
    assert (row.id, row.tool, row.arguments) == (begun.effect_id, "bash", {"command": "ls"})
    assert row.idempotency_key == begun.idempotency_key
    assert (await done(begun.complete({"exit_code": 0}))).value == {"exit_code": 0}
    again = await done(session.begin("bash", {"command": "ls"}, "call_1"))
    assert isinstance(again, Replay)
    assert again.result.value == {"exit_code": 0}
    failed = await done(session.begin("bash", {"command": "rm"}))
    await raises(InvalidArgument, lambda: failed.fail("x", happened=True))
    await done(failed.fail(OSError("denied"), happened=False))
    retried = await done(session.begin("bash", {"command": "rm"}))
    await done(retried.fail("broken pipe"))
    await raises(Unresolved, lambda: session.begin("bash", {"command": "rm"}))


@both_colours
async def test_an_outcome_and_a_checkpoint_are_one_commit(subject: Subject) -> None:
    store = await subject.open()
    session = await done(store.session("s"))
    begun = await done(session.begin("bash", {"command": "ls"}))

    def both(tx: Any) -> holdfast.Op[None]:
        yield from begun.completing("ok")
        yield from tx.within(session).record("tool_executed", {"tool": "bash"})

    await done(store.run(both))
    assert (await done(store.effect(begun.effect_id))).result == "ok"
    assert (await done(session.latest())).kind == "tool_executed"


@both_colours
async def test_only_the_driver_runs_effects(subject: Subject) -> None:
    world, store = World(), await subject.open()
    mail = world.tool()
    session = await done(store.session("s"))
    driven = await done(session.drive("me"))
    await raises(SessionBusy, lambda: session.call(mail, to="ann"))
    sent = await done(driven.call(mail, to="ann"))
    assert (await done(store.effect(sent.effect_id))).holder == "me"
    begun = await done(driven.begin(mail, {"to": "bob"}))
    await done(driven.close())
    second = await done(session.drive("you"))
    await raises(LeaseLost, lambda: begun.complete("late"))
    await raises(LeaseLost, lambda: driven.call(mail, to="eve"))
    await done(second.close())
    await done(session.end())
    await raises(SessionEnded, lambda: session.call(mail, to="eve"))
    assert len(world.done) == 1


@both_colours
async def test_effects_outlive_their_session(subject: Subject) -> None:
    world, store = World(), await subject.open()
    mail = world.tool()
    session = await done(store.session("s"))
    sent = await done(session.call(mail, to="ann"))
    await done(session.delete())
    again = await done(store.session("s"))
    assert (await done(again.call(mail, to="ann"))).replay_of == sent.effect_id
    assert len(world.done) == 1


@both_colours
async def test_a_rewind_keeps_what_cannot_be_undone(subject: Subject) -> None:
    world, store = World(), await subject.open()
    mail, write = world.tool(), world.tool(effect="write", name="write")
    session = await done(store.session("s"))
    await done(session.save(n=1))
    await done(session.save(n=2))
    sent = await done(session.call(mail, to="ann"))
    await done(session.call(write, to="f", call_id="w"))
    begun = await done(session.begin("bash", {"command": "x"}))
    rewound = await done(session.rewind(1))
    assert [effect.id for effect in rewound.irreversible] == [sent.effect_id]
    assert [effect.id for effect in rewound.in_flight] == [begun.effect_id]
    assert (rewound.version, rewound.kind, rewound.undone) == (3, "state_transition", ())
    assert (await done(session.call(mail, to="ann"))).replay_of == sent.effect_id
    assert not (await done(session.call(write, to="f", call_id="w"))).replayed
    await raises(LeaseLost, lambda: begun.complete("late"))
    await raises(Unresolved, lambda: session.begin("bash", {"command": "x"}))
    (parked,) = await done(session.unresolved())
    assert parked.reason == "rewound"


@both_colours
async def test_a_rewind_undoes_in_reverse_order_once(subject: Subject) -> None:
    world, store = World(), await subject.open()
    undone: list[Any] = []

    def undo(arguments: dict[str, Any], result: Any, idempotency_key: str) -> str:
        undone.append((arguments["to"], result, idempotency_key))
        if arguments["to"] == "stuck":
            raise NotDone("cannot")
        return "undone"

    mail = world.tool(undo=undo)
    session = await done(store.session("s"))
    await done(session.save(n=1))
    before = await done(session.call(mail, to="before"))
    await done(session.save(n=2))
    for name in ("ann", "bob", "stuck"):
        await done(session.call(mail, to=name))
    rewound = await done(session.rewind(2))
    assert [to for to, _, _ in undone] == ["stuck", "bob", "ann"]
    assert [result for _, result, _ in undone] == [4, 3, 2]
    assert [effect.arguments["to"] for effect in rewound.undone] == ["bob", "ann"]
    assert [(e.arguments["to"], why) for e, why in rewound.failed] == [("stuck", "NotDone: cannot")]
    assert [effect.arguments["to"] for effect in rewound.irreversible] == ["stuck"]
    assert len({key for _, _, key in undone}) == 3
    assert (await done(session.call(mail, to="before"))).replay_of == before.effect_id
    assert (await done(session.call(mail, to="stuck"))).replayed
    assert not (await done(session.call(mail, to="ann"))).replayed
    found = await done(store.effects(tool="mail.undo", status="completed"))
    assert len(found) == 2
    first = (await done(store.effects(tool="mail")))[1]
    assert first.undone_by in {effect.id for effect in found}


@both_colours
async def test_compensating_without_rewinding(subject: Subject) -> None:
    world, store = World(), await subject.open()
    mail = world.tool(undo=lambda arguments, result, idempotency_key: None)
    plain = world.tool(name="plain")
    session = await done(store.session("s"))
    await done(session.save(n=1))
    for each in (mail, plain):
        await done(session.call(each, to="ann"))
    taken_back = await done(session.compensate(to=1))
    assert [effect.tool for effect in taken_back.undone] == ["mail"]
    assert [effect.tool for effect in taken_back.irreversible] == ["plain"]
    again = await done(session.compensate(to=1))
    assert again.undone == ()
    assert not (await done(session.call(mail, to="ann"))).replayed


@both_colours
async def test_rewinding_forward_brings_its_effects_back(subject: Subject) -> None:
    world, store = World(), await subject.open()
    write = world.tool(effect="write", dedupe="session")
    session = await done(store.session("s"))
    for n in (1, 2, 3):
        await done(session.save(n=n))
        await done(session.call(write, to=str(n)))
    await done(session.rewind(1))
    assert not (await done(session.call(write, to="1"))).replayed
    assert not (await done(session.call(write, to="2"))).replayed
    await done(session.rewind(3))
    assert (await done(session.call(write, to="2"))).replayed
    assert not (await done(session.call(write, to="3"))).replayed


@both_colours
async def test_a_fork_sees_what_came_before_it_and_nothing_after(subject: Subject) -> None:
    world, store = World(), await subject.open()
    mail = world.tool()
    session = await done(store.session("s"))
    await done(session.call(mail, to="zero", call_id="c0"))
    for n in (1, 2):
        await done(session.save(n=n))
        await done(session.call(mail, to=str(n), call_id=f"c{n}"))
    fork = await done(session.fork(2))
    deeper = await done(fork.fork(2))
    await done(session.delete())
    for each in (fork, deeper):
        assert (await done(each.call(mail, to="zero"))).replayed
        assert (await done(each.call(mail, to="1", call_id="c1"))).replayed
        assert not (await done(each.call(mail, to="2", call_id="c2"))).replayed
    assert len(world.done) == 5
