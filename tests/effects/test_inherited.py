"""A call that another session's effect answers leaves a row in its own session, which stays."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast import EffectFailed, Landed, NotLanded, Unknown, VirtualClock
from holdfast.effects.ledger import Ledger
from holdfast.kernel.operation import Call
from holdfast.testing.subject import Subject, done, raises
from tests.checkpoints.colours import both_colours
from tests.effects.test_replays import elsewhere
from tests.effects.world import World
from tests.faults.test_shared_commits_postgres import waiting_for
from tests.work.fleet import wait_until


async def created_again(store: Any, id: str) -> Any:
    await done((await done(store.session(id))).delete())
    session = await done(store.session(id))
    await done(session.save(n=1))
    return session


async def forked(store: Any, tool: Any, call_id: str | None) -> tuple[Any, Any]:
    """Return what a session did, and a fork of it from afterwards."""
    session = await done(store.session("s"))
    await done(session.save(n=1))
    first = await done(session.call(tool, to="ann", call_id=call_id))
    await done(session.save(n=2))
    return first, await done(session.fork(2, id="f"))


@both_colours
async def test_a_fork_that_is_created_again_knows_what_it_was_answered(subject: Subject) -> None:
    await fork_created_again(await subject.open(), "c1")


@both_colours
async def test_a_fork_that_is_created_again_knows_calls_without_an_id(subject: Subject) -> None:
    await fork_created_again(await subject.open(), None)


async def fork_created_again(store: Any, call_id: str | None) -> None:
    world = World()
    mail = world.tool()
    first, fork = await forked(store, mail, call_id)
    answered = [await done(fork.call(mail, to="ann", call_id=call_id)) for _ in range(2)]
    (row,) = await done(store.effects(session=fork))
    for each in answered:
        assert (each.value, each.replay_of) == (1, first.effect_id)
    assert (answered[0].effect_id, row.replay_of) == (row.id, first.effect_id)
    assert [each.id for each in await done(store.attempts(row.id))] == [first.effect_id]
    for _ in range(2):
        fork = await created_again(store, "f")
        for asked in (call_id, "c2", None):
            again = await done(fork.call(mail, to="ann", call_id=asked))
            assert (again.value, again.replay_of) == (1, first.effect_id)
    assert len(world.done) == 1


@both_colours
async def test_a_fork_of_a_session_created_again_has_what_that_was_answered(
    subject: Subject,
) -> None:
    await fork_of_created_again(await subject.open(), "c1")


@both_colours
async def test_a_fork_of_a_session_created_again_has_calls_without_an_id(subject: Subject) -> None:
    await fork_of_created_again(await subject.open(), None)


async def fork_of_created_again(store: Any, call_id: str | None) -> None:
    mail = World().tool()
    first = await done((await done(store.session("s"))).call(mail, to="ann", call_id=call_id))
    session = await created_again(store, "s")
    assert (await done(session.call(mail, to="ann", call_id=call_id))).replayed
    await done(session.save(n=2))
    for version, is_known in ((2, True), (1, False)):
        for asked in (call_id, "c2", None):
            fork = await done(session.fork(version))
            found = await done(fork.call(mail, to="ann", call_id=asked))
            assert (found.replay_of == first.effect_id) is is_known
            deeper = await done(fork.fork(version))
            found = await done(deeper.call(mail, to="ann", call_id=asked))
            assert (found.replay_of == first.effect_id) is is_known


@both_colours
async def test_a_moved_session_brings_what_it_was_answered(subject: Subject) -> None:
    world, store = World(), await subject.open()
    mail = world.tool()
    first, fork = await forked(store, mail, None)
    await done(fork.call(mail, to="ann"))
    fork = await created_again(store, "f")
    await done(fork.call(mail, to="ann"))
    await done(fork.save(n=2))
    file = subject.directory / "file"
    await done(store.export(file, sessions=["f"]))
    target = await subject.open(**elsewhere(subject))
    await done(target.import_sessions(file))
    moved = await done(target.session("f"))
    for each in (moved, await done(moved.fork(2))):
        assert (await done(each.call(mail, to="ann"))).replay_of == first.effect_id
    assert len(world.done) == 1


@both_colours
async def test_what_its_session_undid_answers_no_other(subject: Subject) -> None:
    world, store = World(), await subject.open()
    mail = world.tool(undo=lambda arguments, result, key: None)
    _, fork = await forked(store, mail, "c1")
    await done(fork.call(mail, to="ann", call_id="c1"))
    fork = await created_again(store, "f")
    await done(fork.call(mail, to="ann", call_id="c1"))
    assert (await done(fork.compensate(to=1))).undone == ()
    await done((await done(store.session("s"))).compensate(to=1))
    assert not (await done(fork.call(mail, to="ann", call_id="c1"))).replayed
    assert len(world.done) == 2


@both_colours
async def test_an_answer_from_before_a_fork_is_no_write(subject: Subject) -> None:
    world, store = World(), await subject.open()
    write = world.tool(effect="write")
    look = world.tool(effect="read", dedupe="latest", name="look")
    first, fork = await forked(store, write, None)
    looked = await done((await done(store.session("s"))).call(look, to="x"))
    fork = await done((await done(store.session("s"))).fork(2, id="g"))
    assert not (await done(fork.call(look, to="x"))).replayed
    for _ in range(2):
        assert (await done(fork.call(write, to="ann"))).replay_of == first.effect_id
    assert (await done(fork.call(look, to="x"))).value == looked.value + 1
    assert not (await done(fork.call(write, to="bob"))).replayed
    assert not (await done(fork.call(write, to="ann"))).replayed
    assert [to for to, _ in world.done] == ["ann", "x", "x", "bob", "ann"]


# What an origin left in doubt


async def in_doubt(subject: Subject, tool: Any, call_id: str | None) -> tuple[Any, Any, str]:
    """Return a fork from after a call whose owner died, and the effect of that call."""
    clock = VirtualClock()
    store = await subject.open(clock=clock)
    session = await done(store.session("s"))
    await done(session.save(n=1))
    begun = await done(session.begin(tool, {"to": "ann"}, call_id))
    id: str = begun.effect_id
    del begun
    await done(session.save(n=2))
    fork = await done(session.fork(2, id="f"))
    clock.advance(3600)
    return store, fork, id


@both_colours
async def test_a_fork_that_is_created_again_knows_what_it_found_done(subject: Subject) -> None:
    await fork_that_settled(subject, Landed(1), "c1", "c1")


@both_colours
async def test_a_fork_that_is_created_again_knows_what_it_found_done_without_an_id(
    subject: Subject,
) -> None:
    await fork_that_settled(subject, Landed(1), None, None)


@both_colours
async def test_a_fork_that_is_created_again_knows_what_it_ran_for_its_origin(
    subject: Subject,
) -> None:
    await fork_that_settled(subject, NotLanded(), "c1", "c1")


@both_colours
async def test_a_fork_that_is_created_again_knows_what_it_ran_under_an_id_of_its_own(
    subject: Subject,
) -> None:
    await fork_that_settled(subject, NotLanded(), "c1", "c2")


@both_colours
async def test_a_fork_that_is_created_again_knows_what_it_began_for_its_origin(
    subject: Subject,
) -> None:
    world = World()
    world.verdict = NotLanded()
    mail = world.tool(verify=world.verify)
    store, fork, _ = await in_doubt(subject, mail, "c1")
    await done((await done(fork.begin(mail, {"to": "ann"}, "c1"))).complete("sent"))
    fork = await created_again(store, "f")
    assert (await done(fork.call(mail, to="ann", call_id="c1"))).value == "sent"
    assert world.done == []


def test_a_fork_that_is_created_again_knows_what_it_completed_within_a_transaction(
    place: dict[str, Any],
) -> None:
    world, clock = World(), VirtualClock()
    world.verdict = NotLanded()
    mail = world.tool(verify=world.verify)
    with holdfast.open(**place, clock=clock) as store:
        session = store.session("s")
        session.begin(mail, {"to": "ann"}, "c1")
        session.save(n=1)
        fork = session.fork(1, id="f")
        clock.advance(3600)
        begun = fork.begin(mail, {"to": "ann"}, "c1")
        assert isinstance(begun, holdfast.Issued)
        issued = begun
        store.run(lambda tx: issued.completing("sent"))
        fork.delete()
        assert store.session("f").call(mail, to="ann", call_id="c1").value == "sent"
        assert world.done == []


async def fork_that_settled(
    subject: Subject, verdict: Any, call_id: str | None, asked: str | None
) -> None:
    world = World()
    world.verdict = verdict
    mail = world.tool(verify=world.verify)
    store, fork, _ = await in_doubt(subject, mail, call_id)
    assert (await done(fork.call(mail, to="ann", call_id=asked))).value == 1
    (row,) = await done(store.effects(session=fork))
    assert (row.call_id, row.result, row.replay_of is None) == (asked, 1, False)
    count = len(world.done)
    fork = await created_again(store, "f")
    assert (await done(fork.call(mail, to="ann", call_id=asked))).replayed
    session = await done(store.find_session("s"))
    assert (await done(session.call(mail, to="ann", call_id=call_id))).replayed
    assert len(world.done) == count


@both_colours
async def test_a_fork_that_is_created_again_knows_what_it_gave_up(subject: Subject) -> None:
    await fork_that_gave_up(subject)


@both_colours
async def test_a_fork_that_is_created_again_knows_what_nobody_could_tell(subject: Subject) -> None:
    await fork_that_gave_up(subject, verify=lambda arguments, idempotency_key: Unknown())


async def fork_that_gave_up(subject: Subject, **rules: Any) -> None:
    world = World()
    mail = world.tool(on_unknown="fail", **rules)
    store, fork, _ = await in_doubt(subject, mail, "c1")
    await raises(EffectFailed, lambda: fork.call(mail, to="ann", call_id="c1"))
    fork = await created_again(store, "f")
    await raises(EffectFailed, lambda: fork.call(mail, to="ann", call_id="c1"))
    assert world.done == []


async def told(store: Any, root_id: str) -> list[tuple[str, str]]:
    """Return what a tree's feed tells of effects."""
    events = await done(store.events(root_id))
    return [(e.kind, e.data["effect_id"]) for e in events if e.kind.startswith("effect_")]


@both_colours
async def test_what_a_fork_settles_is_told_in_the_feed_of_the_session_it_belongs_to(
    subject: Subject,
) -> None:
    world = World()
    world.verdict = NotLanded()
    mail = world.tool(verify=world.verify)
    store, fork, first = await in_doubt(subject, mail, "c1")
    assert (await done(fork.call(mail, to="ann", call_id="c1"))).value == 1
    _, second, row = [effect.id for effect in await done(store.effects())]
    assert await told(store, "s") == [
        ("effect_issued", first),
        ("effect_failed", first),
        ("effect_issued", second),
        ("effect_completed", second),
    ]
    assert await told(store, "f") == [("effect_replayed", row)]


@both_colours
async def test_an_outcome_that_a_fork_records_is_told_where_its_call_was_begun(
    subject: Subject,
) -> None:
    store = await subject.open()
    session = await done(store.session("s"))
    await done(session.save(n=1))
    begun = await done(session.begin("mail", {"to": "ann"}, "c1"))
    await done(session.save(n=2))
    fork = await done(session.fork(2, id="f"))
    await done((await done(fork.begun("c1"))).complete("sent"))
    kinds = ["effect_issued", "effect_completed"]
    assert await told(store, "s") == [(kind, begun.effect_id) for kind in kinds]
    assert await told(store, "f") == []


@both_colours
async def test_what_others_settle_is_told_in_the_feed_of_the_session_that_left_it(
    subject: Subject,
) -> None:
    world, clock = World(), VirtualClock()
    world.verdict = Landed("sent")
    store = await subject.open(clock=clock)
    everywhere = world.tool(verify=world.verify, dedupe="global", name="everywhere")
    mail = world.tool(verify=world.verify)
    one, two = [await done(store.session(name)) for name in ("one", "two")]
    left = [
        (await done(one.begin(everywhere, {"to": "ann"}))).effect_id,
        (await done(store.begin("key", {"to": "ann"}, session=one))).effect_id,
    ]
    clock.advance(3600)
    assert (await done(two.call(everywhere, to="ann"))).value == "sent"
    assert (await done(store.once("key", mail, request={"to": "ann"}))).value == "sent"
    issued, completed = [
        [(kind, id) for id in left] for kind in ("effect_issued", "effect_completed")
    ]
    assert await told(store, "one") == issued + completed
    assert await told(store, "two") == []


# Trees are waited for in the order of their ids; one out of order must be free.
@pytest.mark.parametrize("id", ["later", "earlier"])
def test_whoever_settles_an_effect_waits_for_the_tree_of_its_session_before_it_locks_the_effect(
    postgres_dsn: str, namespace: str, id: str
) -> None:
    world, clock = World(), VirtualClock()
    given_up = world.tool(on_unknown="fail", name="given_up")
    found = world.tool(verify=world.verify, name="found")
    again = world.tool(verify=world.verify, name="again")
    verdicts = {given_up: Unknown(), found: Landed(1), again: NotLanded()}
    place: dict[str, Any] = {"url": postgres_dsn, "namespace": namespace, "clock": clock}
    with (
        holdfast.open(**place) as store,
        psycopg.connect(postgres_dsn) as other,
        psycopg.connect(postgres_dsn, autocommit=True) as admin,
        ThreadPoolExecutor(1) as beside,
    ):
        session = store.session(id)
        for tool in verdicts:
            session.begin(tool, {"to": "ann"})
        session.save(n=1)
        fork = session.fork(1, id="fork")
        session.begin("mail", {"to": "bob"})
        interrupted = store.effects()[-1].id
        withdraw = Call(Ledger.withdraw, store.ledger, (fork._place, None, [interrupted]))
        calls = [partial(fork.call, tool, to="ann") for tool in verdicts]
        clock.advance(3600)
        for call in (*calls, partial(store.runtime.run, withdraw)):
            tool = next(iter(call.args))
            world.verdict = verdicts.get(tool)
            lock = f"SELECT 1 FROM {namespace}.hf_trees WHERE root_id = %s FOR UPDATE"
            other.execute(lock.encode(), [id])
            running = beside.submit(call)
            wait_until(lambda: waiting_for(other, admin) == 1)
            free = f"SELECT 1 FROM {namespace}.hf_effects FOR UPDATE NOWAIT"
            assert len(admin.execute(free.encode()).fetchall()) == len(store.effects())
            other.rollback()
            assert running.exception(timeout=60) is None or tool is given_up
        assert store.effect(interrupted).reason == "not_landed"
