"""What a fork or a rewound session lists is what its calls meet."""

from __future__ import annotations

from functools import partial
from typing import Any

from holdfast import EffectFailed, Landed, NotFound, Replay, Unresolved
from holdfast.testing.subject import Subject, done, raises
from tests.checkpoints.colours import both_colours
from tests.effects.world import World


def ids(effects: Any) -> list[str]:
    return [effect.id for effect in effects]


@both_colours
async def test_a_fork_lists_what_is_in_doubt_before_it(subject: Subject) -> None:
    store = await subject.open()
    session = await done(store.session("s"))
    await done(session.save(n=1))
    before = await done(session.begin("mail", {"to": "ann"}))
    await done(before.fail("broken pipe"))
    await done(session.save(n=2))
    after = await done(session.begin("mail", {"to": "bob"}))
    await done(after.fail("broken pipe"))
    fork = await done(session.fork(2, id="f"))
    second = await done(fork.fork(2, id="g"))
    for each in (fork, second):
        assert ids(await done(each.unresolved())) == [before.effect_id]
        await raises(Unresolved, partial(each.begin, "mail", {"to": "ann"}))
    own = await done(second.begin("mail", {"to": "eve"}))
    await done(own.fail("broken pipe"))
    assert ids(await done(second.unresolved())) == [before.effect_id, own.effect_id]
    assert ids(await done(session.unresolved())) == [before.effect_id, after.effect_id]
    await done(store.resolve(before.effect_id, Landed("sent"), by="ann"))
    assert ids(await done(second.unresolved())) == [own.effect_id]
    assert (await done(fork.begin("mail", {"to": "ann"}))).result.value == "sent"


@both_colours
async def test_a_fork_finds_what_was_pending_before_it(subject: Subject) -> None:
    store = await subject.open()
    session = await done(store.session("s"))
    await done(session.save(n=1))
    before = await done(session.begin("mail", {"to": "ann"}, "c1"))
    await done(session.save(n=2))
    after = await done(session.begin("mail", {"to": "bob"}, "c2"))
    fork = await done(session.fork(2, id="f"))
    assert ids(await done(fork.pending())) == [before.effect_id]
    assert ids(await done(session.pending())) == [before.effect_id, after.effect_id]
    await raises(NotFound, lambda: fork.begun("c2"))
    begun = await done(fork.begun("c1"))
    assert begun.effect_id == before.effect_id
    await done(begun.complete("sent"))
    assert (await done(session.begun("c1"))).result.value == "sent"
    assert (await done(fork.begun("c1"))).result.value == "sent"
    assert await done(fork.pending()) == []


@both_colours
async def test_what_a_rewind_left_behind_was_not_begun(subject: Subject) -> None:
    world, store = World(), await subject.open()
    mail, write = world.tool(), world.tool(effect="write", name="write")
    session = await done(store.session("s"))
    await done(session.save(n=1))
    await done(session.save(n=2))
    sent = await done(session.call(mail, to="ann", call_id="m"))
    await done(session.call(write, to="f", call_id="w"))
    look = await done(session.begin("look", {}, "r", effect="read"))
    assert ids(await done(session.pending())) == [look.effect_id]
    await done(session.rewind(1))
    assert await done(session.pending()) == []
    for call_id in ("w", "r"):
        await raises(NotFound, partial(session.begun, call_id))
    stands = await done(session.begun("m"))
    assert isinstance(stands, Replay)
    assert stands.result.effect_id == sent.effect_id
    again = await done(session.begin(write, {"to": "f"}, "w"))
    assert (await done(session.begun("w"))).effect_id == again.effect_id
    assert ids(await done(session.pending())) == [again.effect_id]


@both_colours
async def test_a_call_that_was_undone_was_not_begun(subject: Subject) -> None:
    world, store = World(), await subject.open()
    mail = world.tool(undo=lambda arguments, result, idempotency_key: None)
    session = await done(store.session("s"))
    await done(session.save(n=1))
    await done(session.call(mail, to="ann", call_id="m"))
    await done(session.compensate(to=1))
    await raises(NotFound, lambda: session.begun("m"))


@both_colours
async def test_a_rewind_lists_what_was_given_up(subject: Subject) -> None:
    world, store = World(), await subject.open()
    mail = world.tool(on_unknown="fail")
    world.fails_with = ConnectionError("broken pipe")
    session = await done(store.session("s"))
    await done(session.save(n=1))
    await done(session.save(n=2))
    await raises(ConnectionError, lambda: session.call(mail, to="ann"))
    (effect,) = await done(store.effects())
    assert effect.reason == "given_up"
    assert ids(await done(session.standing(2))) == [effect.id]
    rewound = await done(session.rewind(1))
    assert ids(rewound.given_up) == [effect.id]
    assert (rewound.irreversible, rewound.not_undone, rewound.in_flight) == ((), (), ())
    await raises(EffectFailed, lambda: session.call(mail, to="ann"))
    assert len(world.done) == 1


@both_colours
async def test_a_fork_that_goes_below_its_beginning_lists_what_it_inherited(
    subject: Subject,
) -> None:
    world, store = World(), await subject.open()
    undone: list[Any] = []
    mail = world.tool()
    book = world.tool(name="book", undo=lambda arguments, result, idempotency_key: undone.append(1))
    session = await done(store.session("s"))
    await done(session.save(n=1))
    early = await done(session.call(mail, to="early"))
    await done(session.save(n=2))
    sent = await done(session.call(mail, to="ann"))
    booked = await done(session.call(book, to="bob"))
    begun = await done(session.begin("bash", {"command": "x"}))
    await done(session.save(n=3))
    await done(session.call(mail, to="late"))
    fork = await done(session.fork(3, id="f"))
    own = await done(fork.call(mail, to="own"))
    rewound = await done(fork.rewind(2, tools=[book]))
    assert ids(rewound.irreversible) == [own.effect_id, sent.effect_id]
    assert [(effect.id, why) for effect, why in rewound.not_undone] == [
        (
            booked.effect_id,
            "it belongs to session s, which this one was forked from; compensate it there",
        )
    ]
    assert ids(rewound.in_flight) == [begun.effect_id]
    # Nothing changed for the origin, and equal calls in the fork run nothing.
    assert undone == []
    count = len(world.done)
    for tool, to, effect in ((mail, "ann", sent), (book, "bob", booked), (mail, "early", early)):
        assert (await done(fork.call(tool, to=to))).replay_of == effect.effect_id
    assert len(world.done) == count
    await done(begun.complete(0))
    assert ids((await done(session.compensate(to=2, tools=[book]))).undone) == [booked.effect_id]
