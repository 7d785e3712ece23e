"""A call that another's row answers has a row of its own, so that it is never run later."""

from __future__ import annotations

from typing import Any

from holdfast import EffectFailed, Landed, NotDone, RequestMismatch, VirtualClock
from holdfast.testing.subject import Subject, done, raises
from tests.checkpoints.colours import both_colours
from tests.effects.world import World

DAY = 24 * 3600.0
TURN = [("c1", "v1"), ("c2", "v1"), ("c3", "v2")]


async def write_all(session: Any, tool: Any, turn: list[tuple[str, str]]) -> list[Any]:
    return [
        await done(session.call(tool, to="file", text=text, call_id=call_id))
        for call_id, text in turn
    ]


@both_colours
async def test_a_turn_that_is_run_again_runs_nothing_and_changes_nothing(subject: Subject) -> None:
    world, store = World(), await subject.open()
    write = world.tool(effect="write")
    session = await done(store.session("s"))
    first, second, third = await write_all(session, write, TURN)
    assert [text for _, text in world.done] == ["v1", "v2"]
    assert (second.replay_of, third.replayed) == (first.effect_id, False)
    rows = await done(store.effects(session=session))
    events = await done(store.events("s"))
    assert [(row.call_id, row.replay_of, row.status, row.result) for row in rows] == [
        ("c1", None, "completed", 1),
        ("c2", first.effect_id, "completed", 1),
        ("c3", None, "completed", 2),
    ]
    assert (rows[1].id, rows[1].key) == (second.effect_id, rows[0].key)
    told = [event.data for event in events if event.kind == "effect_replayed"]
    assert [(each["call_id"], each["effect_id"], each["replay_of"]) for each in told] == [
        ("c2", second.effect_id, first.effect_id)
    ]
    for _ in range(2):
        again = await write_all(session, write, TURN)
        assert [each.effect_id for each in again] == [row.id for row in rows]
        assert all(each.replayed for each in again)
        assert again[1].replay_of == first.effect_id
    assert [text for _, text in world.done] == ["v1", "v2"]
    assert await done(store.effects(session=session)) == rows
    assert await done(store.events("s")) == events


@both_colours
async def test_a_call_id_whose_first_use_was_a_replay_takes_no_other_arguments(
    subject: Subject,
) -> None:
    world, store = World(), await subject.open()
    write, mail = world.tool(effect="write", name="write"), world.tool()
    read = world.tool(effect="read", name="read")
    session = await done(store.session("s"))
    await write_all(session, write, TURN[:2])
    for tool, text in ((write, "v2"), (mail, "v1"), (read, "v1")):
        error = await raises(
            RequestMismatch,
            lambda: session.call(tool, to="file", text=text, call_id="c2"),  # noqa: B023
        )
        assert "call id 'c2' belongs to another request" in str(error)
    await done(session.call(read, to="file", call_id="c3"))
    await raises(RequestMismatch, lambda: session.call(read, to="other", call_id="c3"))
    await raises(RequestMismatch, lambda: session.call(mail, to="file", call_id="c3"))
    assert len(world.done) == 2


@both_colours
async def test_a_replay_is_no_write_and_no_attempt(subject: Subject) -> None:
    world, store = World(), await subject.open()
    undone: list[Any] = []
    write = world.tool(effect="write", undo=lambda arguments, result, key: undone.append(result))
    session = await done(store.session("s"))
    await done(session.save(n=1))
    first, second = await write_all(session, write, TURN[:2])
    assert (await done(session.call(write, to="file", text="v1"))).replay_of == first.effect_id
    assert len(await done(store.attempts(second.effect_id))) == 1
    assert len(await done(store.effects(key=(await done(store.effects()))[0].key))) == 2
    taken_back = await done(session.compensate(to=1))
    assert [effect.id for effect in taken_back.undone] == [first.effect_id]
    assert undone == [1]


@both_colours
async def test_what_was_undone_is_replayed_to_nobody(subject: Subject) -> None:
    world, store = World(), await subject.open()
    mail = world.tool(undo=lambda arguments, result, key: None)
    session = await done(store.session("s"))
    await done(session.save(n=1))
    for call_id in ("c1", "c2", "c3"):
        await done(session.call(mail, to="ann", call_id=call_id))
    await done(session.compensate(to=1))
    assert all(row.undone_by for row in await done(store.effects(tool="mail")))
    again = [await done(session.call(mail, to="ann", call_id=f"c{n}")) for n in (2, 1, 3)]
    assert [each.replay_of for each in again] == [None, *[again[0].effect_id] * 2]
    assert len(world.done) == 2


@both_colours
async def test_replays_of_every_policy_and_of_failures(subject: Subject) -> None:
    world, store = World(), await subject.open()
    a, b = [await done(store.session(name)) for name in ("a", "b")]
    everywhere = world.tool(dedupe="global", name="everywhere")
    chosen = world.tool(dedupe=lambda arguments: arguments["to"], name="chosen")
    for tool in (everywhere, chosen, world.tool()):
        sessions = (a, b) if tool is everywhere else (a,)
        calls = [(session, id) for session in sessions for id in (f"{tool.name} 1", tool.name)]
        found = [await done(s.call(tool, to="x", call_id=id)) for s, id in calls]
        assert [each.replay_of for each in found] == [
            None,
            *[found[0].effect_id] * (len(calls) - 1),
        ]
        assert len({each.effect_id for each in found}) == len(calls)
    assert len(world.done) == 3
    fragile = world.tool(cache_failures=True, name="fragile")
    world.fails_with = NotDone("no")
    await raises(NotDone, lambda: a.call(fragile, to="x", call_id="f1"))
    for _ in range(2):
        await raises(EffectFailed, lambda: a.call(fragile, to="x", call_id="f2"))
    await raises(RequestMismatch, lambda: a.call(fragile, to="y", call_id="f2"))
    failed = await done(store.effects(tool="fragile"))
    assert [(row.call_id, row.status, row.replay_of) for row in failed] == [
        ("f1", "failed", None),
        ("f2", "failed", failed[0].id),
    ]


@both_colours
async def test_a_failed_write_is_answered_by_what_an_equal_call_wrote_since(
    subject: Subject,
) -> None:
    world, store = World(), await subject.open()
    write = world.tool(effect="write")
    session = await done(store.session("s"))
    world.fails_with = OSError("full")
    await raises(OSError, lambda: session.call(write, to="file", text="v1", call_id="c1"))
    world.fails_with = None
    second, _ = await write_all(session, write, TURN[1:])
    again = await write_all(session, write, TURN)
    assert [each.replay_of for each in again[:2]] == [second.effect_id] * 2
    assert [text for _, text in world.done] == ["v1", "v1", "v2"]


@both_colours
async def test_a_call_that_finds_out_what_a_dead_one_did_has_a_row_too(subject: Subject) -> None:
    world, clock = World(), VirtualClock()
    store = await subject.open(clock=clock)
    write = world.tool(effect="write", verify=world.verify)
    session = await done(store.session("s"))
    begun = await done(session.begin(write, {"to": "file", "text": "v1"}, "c1"))
    id = begun.effect_id
    clock.advance(3600)
    world.verdict = Landed(7)
    for _ in range(2):
        found = await write_all(session, write, [("c2", "v1"), ("c3", "v2"), ("c1", "v1")])
        assert [each.replay_of for each in found[::2]] == [id, id]
        assert found[0].effect_id != id
    assert [text for _, text in world.done] == ["v2"]


@both_colours
async def test_a_replay_outlives_the_effect_that_it_names(subject: Subject) -> None:
    world, clock = World(), VirtualClock()
    store = await subject.open(clock=clock)
    mail = world.tool(dedupe="global")
    gone, session = [await done(store.session(name)) for name in ("gone", "s")]
    await done(gone.call(mail, to="ann"))
    await done(gone.delete())
    replayed = await done(session.call(mail, to="ann", call_id="c1"))
    clock.advance(91 * DAY)
    assert (await done(store.prune())).effects == 1
    again = await done(session.call(mail, to="ann", call_id="c1"))
    assert (again.value, again.effect_id) == (1, replayed.effect_id)
    assert again.replay_of == replayed.replay_of
    await done(session.delete())
    clock.advance(91 * DAY)
    assert (await done(store.prune())).effects == 1
    assert await done(store.effects()) == []


@both_colours
async def test_a_replay_expires_with_its_effect(subject: Subject) -> None:
    world, clock = World(), VirtualClock()
    store = await subject.open(clock=clock)
    mail = world.tool(ttl_seconds=100)
    session = await done(store.session("s"))
    await done(session.call(mail, to="ann", call_id="c1"))
    clock.advance(60)
    assert (await done(session.call(mail, to="ann", call_id="c2"))).replayed
    clock.advance(60)
    assert not (await done(session.call(mail, to="ann", call_id="c2"))).replayed
    # What expired does not hide what an equal call has done since.
    assert (await done(session.call(mail, to="ann", call_id="c1"))).replayed
    assert len(world.done) == 2


@both_colours
async def test_a_moved_session_brings_its_replays(subject: Subject) -> None:
    world, store = World(), await subject.open()
    write = world.tool(effect="write")
    session = await done(store.session("s"))
    await write_all(session, write, TURN)
    file = subject.directory / "file"
    rows = await done(store.effects())
    assert (await done(store.export(file))).effects == 3
    for _ in range(2):
        await done((await done(store.session("s"))).delete())
        await done(store.import_sessions(file))
        again = await done(store.effects())
        assert [(row.id, row.key, row.replay_of) for row in again] == [
            (row.id, row.key, row.replay_of) for row in rows
        ]
    target = await subject.open(**elsewhere(subject))
    await done(target.import_sessions(file))
    session = await done(target.session("s"))
    found = await write_all(session, write, TURN)
    assert [each.replay_of for each in found] == [rows[0].id, rows[0].id, rows[2].id]
    await raises(RequestMismatch, lambda: session.call(write, to="file", call_id="c2"))
    assert len(world.done) == 2


def elsewhere(subject: Subject) -> dict[str, Any]:
    if "namespace" in subject.place and "sqlite" not in str(subject.place["url"]):
        return {"namespace": f"{subject.place['namespace']}_b"}
    return {"url": f"sqlite:///{subject.directory}/b.db"}


# Rewinds and forks


@both_colours
async def test_a_read_after_a_rewind_returns_what_it_read_then(subject: Subject) -> None:
    world, store = World(), await subject.open()
    read = world.tool(effect="read")
    session = await done(store.session("s"))
    await done(session.save(n=1))
    values = []
    for _ in range(3):
        for _ in range(2):
            values.append((await done(session.call(read, to="x", call_id="c1"))).value)
        await done(session.rewind(1))
    assert values == [1, 1, 2, 2, 3, 3]


@both_colours
async def test_a_fork_has_read_what_its_origin_read_before_it(subject: Subject) -> None:
    world, store = World(), await subject.open()
    read = world.tool(effect="read")
    session = await done(store.session("s"))
    await done(session.save(n=1))
    before = await done(session.call(read, to="x", call_id="c1"))
    await done(session.save(n=2))
    await done(session.call(read, to="x", call_id="c2"))
    fork = await done(session.fork(2))
    assert (await done(fork.call(read, to="x", call_id="c1"))).replay_of == before.effect_id
    assert not (await done(fork.call(read, to="x", call_id="c2"))).replayed
    await raises(RequestMismatch, lambda: fork.call(read, to="y", call_id="c1"))


@both_colours
async def test_a_read_may_be_shared_like_any_other_call(subject: Subject) -> None:
    world, store = World(), await subject.open()
    search = world.tool(effect="read", dedupe="session", name="search")
    look = world.tool(effect="read", dedupe="latest", name="look")
    write = world.tool(effect="write", name="write")
    session = await done(store.session("s"))
    found = [await done(session.call(search, to="x", call_id=id)) for id in ("s1", "s2", "s2")]
    assert [each.replay_of for each in found] == [None, *[found[0].effect_id] * 2]
    assert found[1].effect_id == found[2].effect_id != found[0].effect_id
    for call_id in (None, "l1", "l2"):
        assert (await done(session.call(look, to="x", call_id=call_id))).value == 2
    await done(session.call(write, to="x"))
    assert (await done(session.call(look, to="x", call_id="l2"))).value == 2
    assert [(await done(session.call(look, to="x"))).value for _ in range(2)] == [4, 4]


@both_colours
async def test_a_rewind_leaves_replays_behind_and_their_effects_stand(subject: Subject) -> None:
    world, store = World(), await subject.open()
    write, mail = world.tool(effect="write", name="write", dedupe="session"), world.tool()
    session = await done(store.session("s"))
    await done(session.save(n=1))
    kept = await done(session.call(write, to="a", call_id="w1"))
    await done(session.save(n=2))
    for tool, to in ((write, "a"), (write, "b"), (mail, "ann"), (mail, "ann")):
        call_id = f"{tool.name} {to} {len(await done(store.effects()))}"
        await done(session.call(tool, to=to, call_id=call_id))
    calls = [(row.call_id, row.arguments) for row in await done(store.effects())]
    rewound = await done(session.rewind(2))
    assert [effect.tool for effect in rewound.irreversible] == ["mail"]
    before = list(world.done)
    # The write before the point is known, the one after it is not; what was sent stays sent.
    tools = {"write": write, "mail": mail}
    for _ in range(2):
        for call_id, arguments in calls:
            tool = tools["mail" if call_id.startswith("mail") else "write"]
            await done(session.call(tool, **arguments, call_id=call_id))
    assert world.done == [*before, ("b", "")]
    again = await done(session.call(write, to="a", call_id=calls[1][0]))
    assert again.replay_of == kept.effect_id


@both_colours
async def test_a_fork_knows_its_origins_last_write(subject: Subject) -> None:
    world, store = World(), await subject.open()
    write = world.tool(effect="write")
    session = await done(store.session("s"))
    await done(session.save(n=1))
    first, *_ = await write_all(session, write, [("c1", "v1")])
    await done(session.save(n=2))
    fork = await done(session.fork(2))
    deeper = await done(fork.fork(2))
    # What the origin writes after the fork is no part of the fork's history.
    await write_all(session, write, [("c2", "v2")])
    for each in (fork, deeper):
        found = await write_all(each, write, [("f1", "v1"), ("f2", "v1")])
        assert [result.replay_of for result in found] == [first.effect_id] * 2
        found = await write_all(each, write, [("f3", "v2"), ("f4", "v1"), ("f5", "v2")])
        assert not any(result.replayed for result in found)
        again = await write_all(each, write, [("c1", "v1"), ("f1", "v1"), ("f4", "v1")])
        assert all(result.replayed for result in again)
    await done(fork.rewind(1))
    # Of what was written since, nothing is known to be gone: it is written again.
    assert not (await write_all(fork, write, [("f6", "v1")]))[0].replayed
