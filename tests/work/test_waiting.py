"""Attempts that end without a fault of their own: in doubt, busy, or rewound."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

import holdfast
from holdfast import (
    InProgress,
    Landed,
    LeaseLost,
    NotLanded,
    SessionBusy,
    StoreBusy,
    Unknown,
    Unresolved,
)
from holdfast.testing.subject import Subject, done, raises
from tests.checkpoints.colours import both_colours, sql
from tests.work.items import claimed, kinds, opened
from tests.work.working import ended, running, until, work
from tests.work.working import opened as opened_now

# In doubt


def charging(calls: list[int], **rules: Any) -> Any:
    """Return a tool that fails once, in a way that leaves open whether it has happened."""

    @holdfast.tool(effect="mutate", **rules)
    def charge(cents: int) -> str:
        """Charge a card."""
        calls.append(cents)
        if len(calls) == 1:
            raise ConnectionError("no answer")
        return "charged"

    return charge


async def resolved(store: Any, effect_id: str, verdict: Any) -> None:
    await done(store.resolve(effect_id, verdict, by="ann"))


async def verified(store: Any, effect_id: str, verdict: Any) -> None:
    tool = charging([], verify=lambda *_: verdict, settle_seconds=0)
    await done(store.verify(effect_id, [tool]))


@pytest.mark.parametrize("settle", [resolved, verified])
@pytest.mark.parametrize(
    ("verdict", "calls_made"), [(Landed("charged before"), 1), (NotLanded(), 2)]
)
@pytest.mark.parametrize("with_session", [True, False])
def test_an_item_waits_for_its_effect_to_be_resolved_and_spends_no_retry(
    place: dict[str, Any], tmp_path: Any, settle: Any, verdict: Any, calls_made: int,
    with_session: bool,
) -> None:  # fmt: skip
    @both_colours
    async def case(subject: Subject) -> None:
        store = await opened_now(subject)
        session = await done(store.session("s")) if with_session else None
        calls: list[int] = []
        charge = charging(calls, settle_seconds=0)

        async def handler(item: Any) -> str:
            return str((await done(item.call(charge, cents=5))).value)

        item = await done(store.work.submit("pay", session=session, max_retries=0))
        async with running(store, {"pay": handler}, poll_seconds=0.1) as worker:
            found = await until(
                lambda: store.work.get(item.id), lambda item: item.waits_for == "review"
            )
            assert (found.status, found.retry_count, found.failures) == ("pending", 0, 1)
            [effect] = await done(store.effects(status="unknown"))
            assert found.waits_for_effect == effect.id
            assert effect.id in await done(store.work.why(item.id))
            assert len(calls) == 1
            await settle(store, effect.id, verdict)
            found = await ended(store, item.id)
            assert worker.counts["parked"] == 1
        assert (found.status, found.retry_count, found.attempts) == ("completed", 0, 2)
        assert (found.waits_for_effect, len(calls)) == (None, calls_made)
        assert found.output == ("charged" if calls_made == 2 else "charged before")

    for colour in ("sync", "async"):
        # Each colour in a store of its own.
        there = {**place, "namespace": f"{place.get('namespace', 'n')}_{colour}"}
        case(there, colour, tmp_path)


@both_colours
async def test_a_group_of_errors_that_spend_no_retry_spends_none(subject: Subject) -> None:
    """What a handler raises whose calls run in a TaskGroup."""
    store = await opened_now(subject)
    calls: list[int] = []
    charge = charging(calls, settle_seconds=0)

    async def handler(item: Any) -> str:
        try:
            return str((await done(item.call(charge, cents=5))).value)
        except Unresolved as error:
            inner = ExceptionGroup("tasks", [InProgress("it runs"), error])
            raise ExceptionGroup("tasks", [SessionBusy("it is driven"), inner]) from None

    item = await done(store.work.submit("pay", max_retries=0))
    async with running(store, {"pay": handler}, poll_seconds=0.1):
        found = await until(
            lambda: store.work.get(item.id), lambda item: item.failures + item.releases > 0
        )
        [effect] = await done(store.effects(status="unknown"))
        assert (found.waits_for, found.waits_for_effect) == ("review", effect.id)
        await resolved(store, effect.id, NotLanded())
        assert (await ended(store, item.id)).output == "charged"


@both_colours
async def test_a_group_with_another_error_spends_a_retry(subject: Subject) -> None:
    store = await opened_now(subject)

    async def handler(item: Any) -> None:
        raise ExceptionGroup("tasks", [StoreBusy("full"), ValueError("no")])

    item = await done(store.work.submit("t", max_retries=0))
    await work(store, {"t": handler})
    assert (await done(store.work.get(item.id))).status == "failed"


@both_colours
async def test_resolving_makes_the_item_ready_in_the_same_transaction(subject: Subject) -> None:
    store, _ = await opened(subject)
    session = await done(store.session("s"))
    other = await done(store.session("other"))
    begun = await done(session.begin("charge", {"cents": 5}))
    item = await claimed(store, session=other)
    await done(sql(store, "UPDATE hf_effects SET status = 'unknown', ended_at = 1"))
    assert await done(item.fail(Unresolved("in doubt", effect_id=begun.effect_id))) == "pending"
    assert await done(store.work.claim("w")) == []
    seen = []

    def resolve(tx: Any) -> Any:
        yield from tx.resolve(begun.effect_id, NotLanded(), by="ann")
        found = yield from tx.work.get(item.id)
        seen.append(found.stored_state)
        raise ZeroDivisionError

    await raises(ZeroDivisionError, partial(store.run, resolve))
    assert seen[-1] == "pending"
    assert (await done(store.work.get(item.id))).waits_for == "review"
    await done(store.resolve(begun.effect_id, NotLanded(), by="ann"))
    [again] = await done(store.work.claim("w"))
    assert again.id == item.id
    assert (await kinds(store, "other"))[-2:] == ["work_parked", "work_requeued"]


@both_colours
async def test_an_equal_call_that_settles_the_effect_makes_the_item_ready(subject: Subject) -> None:
    """A verify hook that could not tell at first parks the item; later it can."""
    store, _ = await opened(subject)
    session = await done(store.session("s"))
    verdicts = [Unknown("no connection"), Unknown("no connection"), Landed("charged before")]
    charge = charging([], verify=lambda *_: verdicts.pop(0), settle_seconds=0)
    item = await claimed(store, session=session)
    error = await raises(Unresolved, partial(session.call, charge, cents=5))
    await done(item.fail(error))
    await raises(Unresolved, partial(session.call, charge, cents=5))
    assert (await done(store.work.get(item.id))).waits_for == "review"
    assert (await done(session.call(charge, cents=5))).value == "charged before"
    [again] = await done(store.work.claim("w"))
    assert (again.id, again.waits_for_effect) == (item.id, None)


@both_colours
async def test_an_effect_that_was_resolved_meanwhile_is_not_waited_for(subject: Subject) -> None:
    store, _ = await opened(subject)
    session = await done(store.session("s"))
    begun = await done(session.begin("charge", {"cents": 5}))
    item = await claimed(store, session=session)
    await done(begun.complete("charged"))
    await done(item.fail(Unresolved("in doubt", effect_id=begun.effect_id)))
    [again] = await done(store.work.claim("w"))
    assert (again.id, again.retry_count) == (item.id, 0)


@both_colours
async def test_an_item_in_doubt_can_be_retried_or_cancelled_by_hand(subject: Subject) -> None:
    store, _ = await opened(subject)
    for _ in range(2):
        item = await claimed(store)
        await done(item.fail(Unresolved("in doubt")))
        assert (await done(store.work.get(item.id))).waits_for == "review"
    [cancelled, retried] = await done(store.work.list())
    assert await done(store.work.cancel(cancelled.id)) == "cancelled"
    await done(store.work.retry(retried.id))
    [again] = await done(store.work.claim("w"))
    assert (again.id, again.retry_count) == (retried.id, 0)


# Busy


@both_colours
async def test_what_is_busy_is_tried_again_and_spends_no_retry(subject: Subject) -> None:
    store, clock = await opened(subject)
    session = await done(store.session("s"))
    item = await claimed(store, session=session, max_retries=0)
    for round_, error in enumerate([SessionBusy("a"), InProgress("b"), StoreBusy("c")] * 4):
        assert await done(item.fail(error)) == "pending"
        found = await done(store.work.get(item.id))
        assert (found.retry_count, found.failures, found.releases) == (0, 0, round_ + 1)
        assert found.error == f"{type(error).__name__}: {error}"
        assert 0 < found.available_at - clock.now_ms() <= 10_000
        clock.advance(10)
        await done(store.work.promote())
        [item] = await done(store.work.claim("w"))
    assert await done(session.history(kind="error_boundary")) == []
    assert await done(store.work.errors(item.id)) == []
    assert await done(item.fail(SessionBusy("a"), retry=False)) == "failed"


@both_colours
async def test_a_worker_waits_for_a_session_that_a_person_drives(subject: Subject) -> None:
    store = await opened_now(subject)
    session = await done(store.session("s"))
    lease = await done(session.lease("person", 600))

    async def handler(item: Any) -> str:
        await done(item.session.save(done=True))
        return "ok"

    item = await done(store.work.submit("t", session=session, max_retries=0))
    async with running(store, {"t": handler}, poll_seconds=0.1):
        await until(lambda: store.work.get(item.id), lambda item: item.releases > 0)
        await done(session.release(lease))
        found = await ended(store, item.id)
    assert (found.output, found.retry_count, found.failures) == ("ok", 0, 0)


# Lost


@both_colours
async def test_a_worker_that_runs_until_empty_waits_for_what_it_lost(subject: Subject) -> None:
    store = await opened_now(subject)
    runs: list[int] = []

    async def handler(item: Any) -> int:
        runs.append(item.fence)
        if len(runs) == 1:
            await done(sql(store, "UPDATE hf_work SET lease_expires_at = 1, sweep_at = 1"))
            assert (await done(store.work.sweep())).requeued == 1
        return len(runs)

    item = await done(store.work.submit("t"))
    worker = await work(store, {"t": handler})
    assert worker.counts == {"lost": 1, "completed": 1}
    assert (await done(store.work.get(item.id))).output == 2


@both_colours
async def test_a_lost_item_that_waits_for_a_person_is_not_waited_for(subject: Subject) -> None:
    store = await opened_now(subject)

    async def handler(item: Any) -> None:
        await done(sql(store, "UPDATE hf_work SET lease_expires_at = 1, sweep_at = 1"))
        await done(store.work.sweep())

    item = await done(store.work.submit("t", on_crash="review"))
    worker = await work(store, {"t": handler})
    assert worker.counts == {"lost": 1}
    assert (await done(store.work.get(item.id))).waits_for == "review"


# Rewound


@both_colours
async def test_a_rewind_fences_who_runs_an_item_of_the_session(subject: Subject) -> None:
    store, _ = await opened(subject)
    session = await done(store.session("s"))
    await done(session.save(x=1))
    other = await claimed(store, session=await done(store.session("other")))
    item = await claimed(store, session=session, max_retries=0)
    waits = await done(store.work.submit("later", session=session, delay_seconds=60))
    await done(item.session.save(x=2))
    await done(session.rewind(1))
    for write in (item.complete, item.heartbeat, item.drive, partial(item.session.save, x=3)):
        await raises(LeaseLost, write)
    assert (await done(session.latest())).channels == {"x": 1}
    await done(other.heartbeat())
    assert (await done(store.work.get(waits.id))).waits_for == "time"
    [again] = await done(store.work.claim("w", queues="mail"))
    assert (again.id, again.retry_count, again.releases) == (item.id, 0, 1)
    assert again.fence > item.fence + 1
    await done(again.session.save(x=4))


@both_colours
async def test_an_item_may_rewind_its_own_session_and_goes_on(subject: Subject) -> None:
    store, _ = await opened(subject)
    session = await done(store.session("s"))
    await done(session.save(x=1))
    item = await claimed(store, session=session)
    for drives in (False, True):
        here = await done(item.drive()) if drives else item.session
        await done(here.save(x=2))
        await done(here.rewind(1))
        await done(here.save(y=1))
    await done(item.complete())


@both_colours
async def test_a_rewind_is_refused_while_somebody_drives(subject: Subject) -> None:
    store, clock = await opened(subject)
    session = await done(store.session("s"))
    await done(session.save(x=1))
    item = await claimed(store, session=session)
    driven = await done(item.drive())
    await raises(SessionBusy, partial(session.rewind, 1))
    await done(driven.save(x=2))
    clock.advance(31)
    await done(session.rewind(1))
    await raises(LeaseLost, partial(driven.save, x=3))
    await raises(LeaseLost, item.heartbeat)


@both_colours
async def test_a_rewind_fences_an_expired_driver(subject: Subject) -> None:
    """Its lease could be revived by a late heartbeat otherwise."""
    store, clock = await opened(subject)
    session = await done(store.session("s"))
    await done(session.save(x=1))
    lease = await done(session.lease("frozen", 30))
    clock.advance(31)
    await done(session.rewind(1))
    await raises(LeaseLost, partial(session.renew, lease, 30))


@both_colours
async def test_a_worker_runs_a_rewound_item_again(subject: Subject) -> None:
    store = await opened_now(subject)
    session = await done(store.session("s"))
    await done(session.save(x=1))
    runs: list[int] = []

    async def handler(item: Any) -> str:
        runs.append(item.fence)
        if len(runs) == 1:
            await done((await done(store.find_session("s"))).rewind(1))
            await done(item.session.save(x=2))
        return "ok"

    item = await done(store.work.submit("t", session=session, max_retries=0))
    worker = await work(store, {"t": handler})
    assert worker.counts == {"lost": 1, "completed": 1}
    found = await done(store.work.get(item.id))
    assert (found.output, found.retry_count, len(runs)) == ("ok", 0, 2)
    assert (await done(session.latest())).channels == {"x": 1}
