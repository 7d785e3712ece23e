"""What becomes of an effect that failed, or whose owner died."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import holdfast
from holdfast import (
    EffectFailed,
    InProgress,
    InvalidValue,
    Landed,
    LeaseLost,
    NotDone,
    NotLanded,
    Refused,
    Unknown,
    Unresolved,
    VirtualClock,
)
from holdfast.testing.subject import Subject, done, raises
from tests.checkpoints.colours import both_colours
from tests.effects.test_processes import wait_for
from tests.effects.world import World, abandoned


@both_colours
async def test_an_exception_of_a_mutating_tool_parks_its_effect(subject: Subject) -> None:
    world, store = World(), await subject.open()
    mail = world.tool()
    session = await done(store.session("s"))
    world.fails_with = ConnectionError("reset")
    error = await raises(Unresolved, lambda: session.call(mail, to="ann"))
    assert isinstance(error.__cause__, ConnectionError)
    world.fails_with = None
    await raises(Unresolved, lambda: session.call(mail, to="ann"))
    await raises(Unresolved, lambda: session.call(mail, to="ann", call_id="other"))
    assert len(world.done) == 1
    (parked,) = await done(session.unresolved())
    assert (parked.id, parked.status, parked.reason) == (error.effect_id, "unknown", "raised")
    assert parked.error == "ConnectionError: reset"
    resolved = await done(store.resolve(parked.id, Landed({"id": 7}), by="ann", note="saw it"))
    assert (resolved.status, resolved.decided_by, resolved.note) == ("completed", "ann", "saw it")
    assert (await done(session.call(mail, to="ann"))).value == {"id": 7}
    assert await done(session.unresolved()) == []
    await raises(Refused, lambda: store.resolve(parked.id, NotLanded(), by="bob"))


@both_colours
async def test_what_did_not_land_runs_again_under_the_same_key(subject: Subject) -> None:
    world, store = World(), await subject.open()
    mail = world.tool()
    session = await done(store.session("s"))
    world.fails_with = ConnectionError("reset")
    error = await raises(Unresolved, lambda: session.call(mail, to="ann"))
    world.fails_with = None
    await done(store.resolve(error.effect_id, NotLanded(), by="ann"))
    assert (await done(session.call(mail, to="ann"))).value == 2
    assert world.keys[0] == world.keys[1]
    attempts = await done(store.attempts(error.effect_id))
    assert [(each.attempt, each.status) for each in attempts] == [(1, "failed"), (2, "completed")]


@both_colours
async def test_a_certain_failure_runs_again_under_a_new_key(subject: Subject) -> None:
    world, store = World(), await subject.open()
    session = await done(store.session("s"))
    for number, (rules, error) in enumerate(
        (({"atomic": True}, ValueError("no")), ({}, NotDone("declined")))
    ):
        mail = world.tool(name=f"mail{number}", **rules)
        world.fails_with = error
        await raises(type(error), lambda: session.call(mail, to="ann"))  # noqa: B023
        world.fails_with = None
        await done(session.call(mail, to="ann"))
    assert len(set(world.keys)) == 4
    assert await done(session.unresolved()) == []


@both_colours
async def test_failures_are_cached_where_the_tool_says_so(subject: Subject) -> None:
    world, store = World(), await subject.open()
    mail = world.tool(atomic=True, cache_failures=True)
    session = await done(store.session("s"))
    world.fails_with = ValueError("no such address")
    await raises(ValueError, lambda: session.call(mail, to="ann"))
    world.fails_with = None
    error = await raises(EffectFailed, lambda: session.call(mail, to="ann"))
    assert "no such address" in str(error)
    assert len(world.done) == 1


@both_colours
async def test_verify_decides_after_an_exception(subject: Subject) -> None:
    world, store = World(), await subject.open()
    mail = world.tool(verify=world.verify)
    session = await done(store.session("s"))
    world.fails_with = ConnectionError("reset")
    world.verdict = Landed("sent")
    found = await done(session.call(mail, to="landed"))
    assert (found.value, found.replayed) == ("sent", False)
    assert world.asked[0] == ({"to": "landed"}, world.keys[0])
    world.verdict = NotLanded
    await raises(ConnectionError, lambda: session.call(mail, to="not"))
    world.fails_with = None
    assert (await done(session.call(mail, to="not"))).value == 3
    assert world.keys[1] == world.keys[2]
    world.fails_with, world.verdict = ConnectionError("reset"), Unknown("no idea")
    await raises(Unresolved, lambda: session.call(mail, to="unknown"))
    assert len(world.done) == 4
    # Asked again at the next call, the hook may know.
    world.verdict = Landed("after all")
    assert (await done(session.call(mail, to="unknown"))).value == "after all"
    assert len(world.done) == 4


@both_colours
async def test_a_verify_hook_that_fails_has_not_told(subject: Subject) -> None:
    store = await subject.open()
    session = await done(store.session("s"))
    for name, verify in {"raising": lambda *_: 1 / 0, "odd": lambda *_: True}.items():

        @holdfast.tool(verify=verify, name=name)
        def act() -> None:
            raise ConnectionError

        error = await raises(Unresolved, lambda: session.call(act))
        assert "verify" in str(error)


@both_colours
async def test_a_result_that_cannot_be_stored_is_recorded_as_done(subject: Subject) -> None:
    store = await subject.open()
    session = await done(store.session("s"))
    runs = []

    @holdfast.tool
    def act() -> object:
        runs.append(1)
        return object()

    error = await raises(InvalidValue, lambda: session.call(act))
    assert str(error) == (
        "act ran, and that is recorded, but its result cannot be stored: result is of type object, "
        "which is not plain JSON data; return plain data from the tool"
    )
    error = await raises(EffectFailed, lambda: session.call(act))
    assert "it happened" in str(error)
    assert len(runs) == 1


@both_colours
async def test_a_dead_owner_without_verify_is_parked_and_surfaced(subject: Subject) -> None:
    world = World()
    mail = world.tool()
    _, session = await abandoned(subject, mail, to="ann")
    assert [effect.status for effect in await done(session.unresolved())] == ["issued"]
    await raises(Unresolved, lambda: session.call(mail, to="ann"))
    (parked,) = await done(session.unresolved())
    assert (parked.status, parked.reason) == ("unknown", "owner_died")
    assert world.done == []


@both_colours
async def test_a_dead_owner_is_verified_and_the_effect_run_once(subject: Subject) -> None:
    world = World()
    mail = world.tool(verify=world.verify)
    world.verdict = NotLanded()
    _, session = await abandoned(subject, mail, to="ann")
    found = await done(session.call(mail, to="ann"))
    assert (found.value, found.replayed, len(world.asked)) == (1, False, 1)
    assert world.asked[0][1] == world.keys[0]
    assert (await done(session.call(mail, to="ann"))).replayed


@both_colours
async def test_a_dead_owner_whose_effect_landed_is_believed(subject: Subject) -> None:
    world = World()
    mail = world.tool(verify=world.verify)
    world.verdict = Landed(42)
    store, session = await abandoned(subject, mail, to="ann")
    found = await done(session.call(mail, to="ann"))
    assert (found.value, found.replayed, world.done) == (42, True, [])
    (effect,) = await done(store.effects(session="s"))
    assert (effect.status, effect.reason, effect.result) == ("completed", "verified", 42)


@both_colours
async def test_on_unknown_fail_and_retry(subject: Subject) -> None:
    world = World()
    failing = world.tool(on_unknown="fail", name="failing")
    _, session = await abandoned(subject, failing, to="ann")
    for _ in range(2):
        await raises(EffectFailed, lambda: session.call(failing, to="ann"))
    assert world.done == []
    retrying = world.tool(on_unknown="retry", name="retrying")
    world.fails_with = ConnectionError("reset")
    await raises(ConnectionError, lambda: session.call(retrying, to="ann"))
    world.fails_with = None
    assert (await done(session.call(retrying, to="ann"))).value == 2
    assert world.keys[0] == world.keys[1]


@both_colours
async def test_a_write_of_a_dead_owner_runs_again(subject: Subject) -> None:
    world = World()
    write = world.tool(effect="write")
    _, session = await abandoned(subject, write, to="f")
    assert (await done(session.call(write, to="f"))).value == 1
    assert await done(session.unresolved()) == []


@both_colours
async def test_a_live_owner_is_waited_for_and_then_named(subject: Subject) -> None:
    world, store = World(), await subject.open()
    mail = world.tool()
    session = await done(store.session("s"))
    begun = await done(session.begin(mail, {"to": "ann"}))
    error = await raises(InProgress, lambda: session.call(mail, to="ann", wait_seconds=0.05))
    assert (error.effect_id, error.holder) == (begun.effect_id, store.ledger.holder)
    await raises(InProgress, lambda: store.resolve(begun.effect_id, NotLanded(), by="me"))

    async def end() -> None:
        await asyncio.sleep(0.1)
        await done(begun.complete("sent"))

    if subject.colour == "async":
        found, _ = await asyncio.gather(session.call(mail, to="ann", wait_seconds=10), end())
        assert (found.value, found.replayed) == ("sent", True)
    assert world.done == []


@both_colours
async def test_an_owner_that_was_stepped_in_for_records_nothing(subject: Subject) -> None:
    world = World()
    mail = world.tool()
    clock = VirtualClock()
    store = await subject.open(clock=clock)
    session = await done(store.session("s"))
    begun = await done(session.begin(mail, {"to": "ann"}))
    clock.advance(3600)
    await raises(Unresolved, lambda: session.call(mail, to="ann"))
    await raises(LeaseLost, lambda: begun.complete("sent"))
    await raises(LeaseLost, lambda: begun.fail("no", happened=False))
    (parked,) = await done(session.unresolved())
    assert (parked.status, parked.result) == ("unknown", None)


@both_colours
async def test_what_an_owner_says_too_late_is_kept_and_changes_nothing(subject: Subject) -> None:
    world = World()
    mail = world.tool()
    clock = VirtualClock()
    store = await subject.open(clock=clock)
    session = await done(store.session("s"))
    begun = await done(session.begin(mail, {"to": "ann"}))
    clock.advance(3600)
    await raises(Unresolved, lambda: session.call(mail, to="ann"))
    await raises(LeaseLost, lambda: begun.complete("sent"))
    (parked,) = await done(session.unresolved())
    assert (parked.status, parked.result) == ("unknown", None)
    assert parked.late == {
        "status": "completed",
        "error": None,
        "result": "sent",
        "holder": store.ledger.holder,
    }


@both_colours
async def test_not_landed_proves_nothing_when_secrets_are_missing(subject: Subject) -> None:
    """The card number is not stored, so the hook looked for another charge."""
    world = World()
    mail = world.tool(verify=world.verify)
    store, session = await abandoned(subject, mail, to="4242 4242 4242 4242")
    world.verdict = NotLanded()
    (settled,) = (await done(store.recover(tools=[mail]))).settled
    assert (settled.status, settled.arguments["to"]) == ("unknown", "[redacted:card]")
    assert "are redacted" in str(settled.error)
    assert (await done(store.verify(settled.id, [mail]))).status == "unknown"
    # A call brings the arguments themselves.
    assert (await done(session.call(mail, to="4242 4242 4242 4242"))).value == 1
    assert world.asked[-1][0] == {"to": "4242 4242 4242 4242"}
    assert await done(session.unresolved()) == []


@both_colours
async def test_recovery_believes_what_landed_though_its_result_cannot_be_stored(
    subject: Subject,
) -> None:
    world = World()
    mail = world.tool(verify=world.verify)
    store, session = await abandoned(subject, mail, to="ann")
    world.verdict = Landed(object())
    (settled,) = (await done(store.recover(tools=[mail]))).settled
    assert (settled.status, settled.reason) == ("completed", "not_storable")
    error = await raises(EffectFailed, lambda: session.call(mail, to="ann"))
    assert "it happened" in str(error)
    assert world.done == []


@both_colours
async def test_what_a_hook_found_is_not_recorded_as_a_persons_decision(subject: Subject) -> None:
    world = World()
    mail = world.tool(verify=world.verify)
    store, session = await abandoned(subject, mail, to="ann")
    cases: list[tuple[Any, tuple[str, str]]] = [
        (Landed({"id": 7}), ("completed", "verified")),
        (Landed(object()), ("completed", "not_storable")),
        (NotLanded(), ("failed", "not_landed")),
    ]
    for number, (verdict, expected) in enumerate(cases):
        world.fails_with, world.verdict = ConnectionError("reset"), Unknown()
        error = await raises(Unresolved, partial(session.call, mail, to=f"bob {number}"))
        world.verdict = verdict
        settled = await done(store.verify(error.effect_id, [mail]))
        assert (settled.status, settled.reason, settled.decided_by) == (*expected, None)
        last = (await done(store.events(session.root_id)))[-1]
        assert (last.kind, last.data["reason"]) == (f"effect_{expected[0]}", expected[1])
        await raises(Refused, partial(store.verify, error.effect_id, [mail]))


def test_an_effect_is_owned_until_its_outcome_is_recorded(
    postgres_dsn: str, namespace: str
) -> None:
    """Somebody holds the tree for several lease lengths when the tool has just acted."""
    import psycopg

    runs: list[Future[None]] = []
    clock, lease_seconds = VirtualClock(), 0.6
    place: dict[str, Any] = {"url": postgres_dsn, "namespace": namespace, "clock": clock}
    waiting = (
        "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND strpos(query, %s) > 0"
    )
    # Stores of one server are made one after the other.
    holdfast.open(**place).close()
    with (
        psycopg.connect(postgres_dsn) as other,
        psycopg.connect(postgres_dsn, autocommit=True) as admin,
        holdfast.open(**place, busy_timeout_seconds=0.3) as store,
        holdfast.open(**place) as watching,
        ThreadPoolExecutor(1) as beside,
    ):
        session = store.session("s")

        def expires_at() -> int:
            (effect,) = watching.effects(status="issued")
            return effect.lease_expires_at or 0

        def look() -> None:
            try:
                wait_for(lambda: admin.execute(waiting, [namespace]).rowcount > 0)
                for _ in range(6):
                    before = expires_at()
                    clock.advance(lease_seconds / 2)
                    wait_for(lambda: expires_at() > before)  # noqa: B023
            finally:
                other.rollback()

        @holdfast.tool(lease_seconds=lease_seconds, on_unknown="retry")
        def act() -> Any:
            runs.append(beside.submit(look))
            other.execute(f'SELECT 1 FROM "{namespace}".hf_trees FOR UPDATE')
            return "acted"

        assert session.call(act).value == "acted"
        assert session.call(act).replayed
    (looked,) = runs
    looked.result()
