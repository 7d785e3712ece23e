"""Effects in a session's history: drivers, rewinds, forks, undos, and loops of one's own."""

from __future__ import annotations

from typing import Any

import holdfast
from holdfast import (
    CheckpointNotFound,
    InvalidArgument,
    LeaseLost,
    NotDone,
    Replay,
    RequestMismatch,
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
    left = [(effect.arguments["to"], why) for effect, why in rewound.not_undone]
    assert left == [("stuck", "NotDone: cannot")]
    assert rewound.irreversible == ()
    assert len({key for _, _, key in undone}) == 3
    assert (await done(session.call(mail, to="before"))).replay_of == before.effect_id
    assert (await done(session.call(mail, to="stuck"))).replayed
    assert not (await done(session.call(mail, to="ann"))).replayed
    found = await done(store.effects(tool="mail.undo", status="completed"))
    assert len(found) == 2
    first = (await done(store.effects(tool="mail")))[1]
    assert first.undone_by in {effect.id for effect in found}


def undoing(undone: list[Any]) -> Any:
    """Return an undo hook that notes whom it was asked for."""
    return lambda arguments, result, idempotency_key: undone.append(arguments["to"])


@both_colours
async def test_a_rewind_without_the_tools_makes_nothing_irreversible(subject: Subject) -> None:
    world, undone = World(), list[Any]()
    mail, plain = world.tool(undo=undoing(undone)), world.tool(name="plain")
    agent = await subject.open()
    session = await done(agent.session("s"))
    await done(session.save(n=1))
    booked = await done(session.call(mail, to="ann"))
    sent = await done(session.call(plain, to="bob"))
    # A person rewinds in another process, which knows no tools.
    person = await subject.open()
    rewound = await done((await done(person.find_session("s"))).rewind(1))
    assert [effect.id for effect in rewound.irreversible] == [sent.effect_id]
    ((left, why),) = rewound.not_undone
    assert (left.id, left.is_irreversible) == (booked.effect_id, False)
    assert "its tool was not given" in why
    assert (rewound.undone, undone) == ((), [])
    # It stands, so that an equal call must not do it again.
    assert (await done(session.call(mail, to="ann"))).replay_of == booked.effect_id
    second = await done((await done(person.find_session("s"))).rewind(1, tools=[plain]))
    assert [effect.id for effect, _ in second.not_undone] == [booked.effect_id]
    report = await done((await done(person.find_session("s"))).compensate(to=1, tools=[mail]))
    assert [effect.id for effect in report.undone] == [booked.effect_id]
    assert undone == ["ann"]
    assert not (await done(session.call(mail, to="ann"))).replayed
    assert (await done(session.call(plain, to="bob"))).replay_of == sent.effect_id
    assert len(world.done) == 3


@both_colours
async def test_a_rewind_that_cannot_be_made_undoes_nothing(subject: Subject) -> None:
    world, undone = World(), list[Any]()
    store = await subject.open()
    session = await done(store.session("s"))
    mail = world.tool(undo=undoing(undone))
    for n in (1, 2, 3):
        await done(session.save(n=n))
        await done(session.call(mail, to=str(n)))
    assert (await done(store.prune(keep=1))).checkpoints == 2
    await raises(CheckpointNotFound, lambda: session.rewind(2))
    driven = await done(session.drive("me"))
    await raises(SessionBusy, lambda: session.rewind(3))
    await done(driven.close())
    await raises(LeaseLost, lambda: driven.rewind(3))
    await done(session.end())
    await raises(SessionEnded, lambda: session.rewind(3))
    assert undone == []
    assert len(await done(store.effects())) == 3
    again = await done(store.session("s", reopen=True))
    assert len((await done(again.rewind(3))).undone) == 1
    assert undone == ["3"]


@both_colours
async def test_a_tool_that_lost_its_undo_hook_leaves_its_effects_not_undone(
    subject: Subject,
) -> None:
    world, undone = World(), list[Any]()
    store = await subject.open()
    session = await done(store.session("s"))
    await done(session.save(n=1))
    await done(session.call(world.tool(undo=undoing(undone)), to="ann"))
    rewound = await done(session.rewind(1, tools=[world.tool()]))
    assert [why for _, why in rewound.not_undone] == ["the tool no longer has an undo hook"]


@both_colours
async def test_later_undos_come_in_reverse_order_over_epochs(subject: Subject) -> None:
    world, undone = World(), list[Any]()
    write = world.tool(effect="write", name="write", undo=undoing(undone))
    store = await subject.open()
    session = await done(store.session("s"))
    await done(session.save(n=1))
    for name in ("a", "b"):
        await done(session.call(write, to=name))
    person = await subject.open()
    await done((await done(person.find_session("s"))).rewind(1))
    await done(session.call(write, to="c"))
    await done(session.compensate(to=1))
    assert undone == ["c", "b", "a"]


@both_colours
async def test_an_undo_hook_is_not_run_with_arguments_that_lost_a_secret(subject: Subject) -> None:
    world, undone = World(), list[Any]()
    mail = world.tool(undo=undoing(undone))
    store = await subject.open()
    session = await done(store.session("s"))
    await done(session.save(n=1))
    await done(session.call(mail, to="ann", text="password=hunter2hunter2"))
    await done(session.call(mail, to="bob"))
    report = await done(session.compensate(to=1))
    assert undone == ["bob"]
    ((left, why),) = report.not_undone
    assert left.arguments["to"] == "ann"
    assert "hunter2" not in str(left.arguments)
    assert "are redacted" in why
    rewound = await done(session.rewind(1))
    assert [(effect.id, why) for effect, why in rewound.not_undone] == [(left.id, why)]
    assert (await done(session.call(mail, to="ann", text="password=hunter2hunter2"))).replayed


@both_colours
async def test_what_a_rewind_puts_in_doubt_is_in_the_feed(subject: Subject) -> None:
    store = await subject.open()
    session = await done(store.session("s"))
    await done(session.save(n=1))
    begun = await done(session.begin("bash", {"command": "x"}, "c1"))
    await done(session.rewind(1))
    await done(session.rewind(1))
    told = [event for event in await done(store.events("s")) if event.kind == "effect_unknown"]
    assert [event.data for event in told] == [
        {
            "effect_id": begun.effect_id,
            "tool": "bash",
            "call_id": "c1",
            "status": "unknown",
            "reason": "rewound",
        }
    ]


@both_colours
async def test_calls_that_were_pending_are_listed_at_once(subject: Subject) -> None:
    world, store = World(), await subject.open()
    session = await done(store.session("s"))
    await done(session.call(world.tool(), to="ann"))
    assert await done(session.pending()) == []
    begun = await done(session.begin("bash", {"command": "x"}, "c1"))
    other = await done(store.session("t"))
    await done(other.begin("bash", {"command": "x"}, "c1"))
    # Somebody else looks while the lease of the owner lives.
    looker = await done((await subject.open()).find_session("s"))
    (found,) = await done(looker.pending())
    assert (found.id, found.tool, found.call_id) == (begun.effect_id, "bash", "c1")
    assert found.takeover_at > found.issued_at
    assert await done(looker.unresolved()) == []
    await done(begun.complete("ok"))
    assert await done(looker.pending()) == []


@both_colours
async def test_an_old_driver_of_a_cancelled_session_has_lost_its_lease(subject: Subject) -> None:
    world, store = World(), await subject.open()
    session = await done(store.session("s"))
    driven = await done(session.drive("me"))
    begun = await done(driven.begin(world.tool(), {"to": "bob"}))
    await done(session.cancel())
    for write in (
        lambda: driven.save(n=1),
        lambda: driven.record("tool_executed", {}),
        lambda: driven.call(world.tool(), to="ann"),
        lambda: driven.begin("bash", {}),
        lambda: driven.rewind(1),
        driven.end,
        lambda: begun.complete("late"),
    ):
        await raises(LeaseLost, write)
    await raises(SessionEnded, lambda: session.call(world.tool(), to="ann"))
    assert world.done == []


@both_colours
async def test_a_driver_that_ended_its_session_is_told_so(subject: Subject) -> None:
    store = await subject.open()
    driven = await done((await done(store.session("s"))).drive("me"))
    await done(driven.end())
    await raises(SessionEnded, lambda: driven.save(n=1))


@both_colours
async def test_a_tool_may_have_a_parameter_named_item(subject: Subject) -> None:
    bought: list[Any] = []

    @holdfast.tool
    def buy(item: str | None, count: int = 1) -> str:
        bought.append((item, count))
        return f"{item}!"

    store = await subject.open()
    session = await done(store.session("s"))
    assert (await done(session.call(buy, item="book"))).value == "book!"
    assert (await done(session.call(buy, item=None, count=2))).value == "None!"
    linked = await done(session.call_with(buy, {"item": "pen"}, item="item-1"))
    effect = await done(store.effect(linked.effect_id))
    assert (effect.arguments, effect.item_id) == ({"item": "pen"}, "item-1")
    assert bought == [("book", 1), (None, 2), ("pen", 1)]
    plain = await done(session.call(holdfast.tool(name="plain")(lambda: 1), item="item-2"))
    assert (await done(store.effect(plain.effect_id))).item_id == "item-2"


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


@both_colours
async def test_a_fork_of_a_rewound_session_repeats_nothing_that_stands(subject: Subject) -> None:
    world, store = World(), await subject.open()
    mail = world.tool()
    session = await done(store.session("s"))
    await done(session.save(n=1))
    sent = await done(session.call(mail, to="ann", call_id="c1"))
    await done(session.save(n=2))
    await done(session.rewind(1))
    assert (await done(session.call(mail, to="ann", call_id="c2"))).replayed
    await done(session.save(n=3))
    fork = await done(session.fork(4))
    deeper = await done(fork.fork(4))
    for each in (fork, deeper):
        for call_id in ("c2", "c3", None):
            again = await done(each.call(mail, to="ann", call_id=call_id))
            assert again.replay_of == sent.effect_id
    # A fork of the point before it has done nothing.
    before = await done(session.fork(1))
    assert not (await done(before.call(mail, to="ann"))).replayed
    assert len(world.done) == 2


@both_colours
async def test_a_call_that_failed_before_the_fork_finds_what_the_fork_did(subject: Subject) -> None:
    world, store = World(), await subject.open()
    fails = [NotDone("no answer")]

    @holdfast.tool(effect="mutate")
    def mail(to: str) -> None:
        if fails:
            raise fails.pop()
        world.done.append((to, ""))

    session = await done(store.session("s"))
    await done(session.save(n=1))
    await raises(NotDone, lambda: session.call(mail, to="ann", call_id="c1"))
    await done(session.save(n=2))
    fork = await done(session.fork(2))
    sent = await done(fork.call(mail, to="ann", call_id="c2"))
    assert (await done(fork.call(mail, to="ann", call_id="c1"))).replay_of == sent.effect_id
    assert len(world.done) == 1


@both_colours
async def test_a_fork_knows_its_origins_call_ids_for_every_policy(subject: Subject) -> None:
    world, store = World(), await subject.open()
    mail, post = world.tool(), world.tool(name="post", dedupe="global")
    session = await done(store.session("s"))
    await done(session.save(n=1))
    await done(session.call(mail, to="ann", call_id="c1"))
    await done(session.save(n=2))
    fork = await done(session.fork(2))
    await raises(RequestMismatch, lambda: fork.call(post, to="ann", call_id="c1"))
    assert len(world.done) == 1


@both_colours
async def test_a_fork_that_is_rewound_below_its_beginning_repeats_nothing(subject: Subject) -> None:
    world, store = World(), await subject.open()
    mail, write = world.tool(), world.tool(effect="write", name="write", dedupe="session")
    session = await done(store.session("s"))
    await done(session.save(n=1))
    sent = await done(session.call(mail, to="ann"))
    await done(session.call(write, to="file"))
    await done(session.save(n=2))
    fork = await done(session.fork(2))
    await done(session.call(mail, to="bob"))
    await done(fork.rewind(1))
    deeper = await done(fork.fork(3))
    for each in (fork, deeper):
        assert (await done(each.call(mail, to="ann"))).replay_of == sent.effect_id
        assert not (await done(each.call(write, to="file"))).replayed
        # What the origin did after the fork is no part of it.
        assert not (await done(each.call(mail, to="bob"))).replayed
