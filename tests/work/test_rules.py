"""The life of a work item, on both databases and in both colours."""

from __future__ import annotations

from functools import partial
from typing import Any

import holdfast
from holdfast import (
    InvalidArgument,
    LeaseLost,
    NotFound,
    SessionBusy,
    SessionEnded,
    Submission,
)
from holdfast.testing.subject import Subject, done, raises
from tests.checkpoints.colours import both_colours
from tests.work.items import claimed, dumped, kinds, opened

# Submitting and claiming


@both_colours
async def test_an_item_is_claimed_completed_and_read(subject: Subject) -> None:
    store, clock = await opened(subject)
    session = await done(store.session("s"))
    item = await done(store.work.submit("mail", {"to": "ann"}, session=session, priority=7))
    assert (item.status, item.queue, item.session_id, item.root_id) == ("pending", "mail", "s", "s")
    assert (item.fence, item.attempts, item.holder, item.started_at) == (0, 0, None, None)
    clock.advance(5)
    [held] = await done(store.work.claim("worker", lease_seconds=30))
    now = clock.now_ms()
    assert (held.id, held.input, held.status) == (item.id, {"to": "ann"}, "in_progress")
    assert (held.holder, held.fence, held.attempts) == ("worker", 1, 1)
    assert (held.lease_acquired_at, held.heartbeat_at, held.started_at) == (now, now, now)
    assert held.lease_expires_at == now + 30_000
    clock.advance(5)
    await done(held.complete({"sent": True}))
    read = await done(store.work.get(item.id))
    assert read.to_dict() == held.to_dict()
    assert (read.status, read.output, read.holder) == ("completed", {"sent": True}, None)
    assert (read.completed_at, read.updated_at, read.started_at) == (*[now + 5000] * 2, now)
    assert (read.lease_expires_at, read.error, read.retry_count) == (None, None, 0)
    assert await kinds(store, "s") == ["session_created", "work_submitted", "work_completed"]
    assert await done(store.work.claim("worker")) == []


@both_colours
async def test_no_output_is_not_an_output_of_none(subject: Subject) -> None:
    """A hit is told by the status: None, False and 0 are outputs like any other."""
    store, _ = await opened(subject)
    outputs: list[Any] = [None, False, 0, {}, ""]
    for output in outputs:
        item = await claimed(store)
        await done(item.complete(output))
        read = await done(store.work.get(item.id))
        assert (read.status, read.output) == ("completed", output)
        assert type(read.output) is type(output)


@both_colours
async def test_the_highest_priority_goes_first_then_the_oldest(subject: Subject) -> None:
    store, clock = await opened(subject)
    wanted = [(0, "a"), (5, "b"), (-1, "c"), (5, "d"), (0, "e")]
    await done(
        store.work.submit_many([Submission("t", name, priority=high) for high, name in wanted])
    )
    clock.advance(-3600)
    await done(store.work.submit("t", "f", priority=5))
    several = await done(store.work.claim("worker", limit=3))
    assert [item.input for item in several] == ["b", "d", "f"]
    rest = [(await done(store.work.claim("worker")))[0].input for _ in range(3)]
    assert rest == ["a", "e", "c"]


@both_colours
async def test_queues_are_served_apart_together_or_all_at_once(subject: Subject) -> None:
    store, _ = await opened(subject)
    for number in range(4):
        for queue in ("a", "b", "c"):
            high = {"a": 0, "b": 1, "c": 0}[queue]
            await done(store.work.submit("t", f"{queue}{number}", queue=queue, priority=high))

    async def claim(limit: int, queues: Any) -> list[str]:
        found = await done(store.work.claim("worker", limit=limit, queues=queues))
        return [item.input for item in found]

    assert await claim(2, "a") == ["a0", "a1"]
    assert await claim(3, ["c", "b", "c"]) == ["b0", "b1", "b2"]
    assert await claim(3, None) == ["b3", "c0", "c1"]
    assert await claim(9, ["nothing"]) == []
    assert await claim(9, None) == ["a2", "c2", "a3", "c3"]


@both_colours
async def test_a_claim_of_all_queues_takes_the_exact_next(subject: Subject) -> None:
    """More queues than are asked for: the best of all of them come, in order."""
    store, _ = await opened(subject)
    for number in range(60):
        await done(store.work.submit("t", number, queue=f"q{59 - number}", priority=number % 3))
    order = sorted(range(60), key=lambda number: (-(number % 3), number))
    found: list[int] = []
    for limit in (1, 2, 3, 50, 4):
        items = await done(store.work.claim("worker", limit=limit))
        found += [item.input for item in items]
    assert found == order


@both_colours
async def test_a_delayed_item_is_ready_when_its_time_has_come(subject: Subject) -> None:
    store, clock = await opened(subject)
    later = await done(store.work.submit("t", 1, delay_seconds=60))
    at = await done(store.work.submit("t", 2, available_at=clock.now_ms() + 30_000))
    past = await done(store.work.submit("t", 3, available_at=clock.now_ms() - 1))
    assert [item.waits_for for item in (later, at, past)] == ["time", "time", None]
    assert [item.status for item in (later, at, past)] == ["pending"] * 3
    assert [item.id for item in await done(store.work.claim("w", limit=9))] == [past.id]
    swept = await done(store.work.sweep())
    assert (swept.promoted, swept.next_due_ms) == (0, 30_000)
    clock.advance(30)
    assert await done(store.work.promote()) == 1
    assert [item.id for item in await done(store.work.claim("w", limit=9))] == [at.id]
    # Whoever cannot wait.
    assert (await done(store.work.retry(later.id))).waits_for is None
    assert [item.id for item in await done(store.work.claim("w", limit=9))] == [later.id]


@both_colours
async def test_one_item_lives_per_key_and_queue(subject: Subject) -> None:
    store, _ = await opened(subject)
    first = await done(store.work.submit("t", 1, key="k"))
    assert (await done(store.work.submit("t", 2, key="k"))).id == first.id
    assert (await done(store.work.submit("t", 2, key="k", queue="other"))).id != first.id
    many = await done(store.work.submit_many([Submission("t", 3, key="k"), Submission("t", 4)]))
    assert [item.id == first.id for item in many] == [True, False]
    [held] = await done(store.work.claim("w", queues="t"))
    assert (held.id, held.input) == (first.id, 1)
    assert (await done(store.work.submit("t", 5, key="k"))).id == first.id
    await done(held.complete())
    again = await done(store.work.submit("t", 6, key="k"))
    assert (again.id != first.id, again.input) == (True, 6)


@both_colours
async def test_a_batch_is_submitted_whole_or_not_at_all(subject: Subject) -> None:
    store, _ = await opened(subject)
    bad = [Submission("t", 1), Submission("t", object())]
    await raises(InvalidArgument, partial(store.work.submit_many, bad))
    missing = [Submission("t", 1), Submission("t", 2, session="nobody")]
    await raises(NotFound, partial(store.work.submit_many, missing))
    assert await done(store.work.list()) == []


@both_colours
async def test_an_ended_session_takes_no_item(subject: Subject) -> None:
    store, _ = await opened(subject)
    session = await done(store.session("s"))
    await done(session.end())
    for named in (session, "s"):
        await raises(SessionEnded, partial(store.work.submit, "t", session=named))


# Retries


@both_colours
async def test_a_worker_that_always_dies_is_given_the_budget_and_no_more(subject: Subject) -> None:
    store, clock = await opened(subject)
    for retries, executions in ((0, 1), (1, 2), (3, 4)):
        for session in (None, await done(store.session("s"))):
            item = await done(store.work.submit("t", max_retries=retries, session=session))
            runs = 0
            while await done(store.work.claim("w", lease_seconds=10)):
                runs += 1
                clock.advance(10)
                await done(store.work.sweep())
                clock.advance(300)
                await done(store.work.sweep())
            read = await done(store.work.get(item.id))
            assert (runs, read.attempts, read.status) == (executions, executions, "failed")
            assert (read.retry_count, read.rescues, read.failures) == (retries, executions, 0)
            assert read.error == "lease expired: w sent no heartbeat"


@both_colours
async def test_exceptions_use_the_same_budget(subject: Subject) -> None:
    store, clock = await opened(subject)
    item = await done(store.work.submit("t", max_retries=2))
    said = []
    for number in range(3):
        [held] = await done(store.work.claim("w", lease_seconds=10))
        assert held.error is None
        if number == 1:
            clock.advance(10)
            assert (await done(store.work.sweep())).requeued == 1
        else:
            said.append(await done(held.fail(ValueError("boom"))))
        clock.advance(300)
        await done(store.work.sweep())
    read = await done(store.work.get(item.id))
    assert said == ["pending", "failed"]
    assert (read.status, read.error) == ("failed", "ValueError: boom")
    assert (read.attempts, read.retry_count, read.failures, read.rescues) == (3, 2, 2, 1)


@both_colours
async def test_a_failure_that_is_final_ends_at_once(subject: Subject) -> None:
    store, _ = await opened(subject)
    item = await claimed(store, max_retries=3)
    assert await done(item.fail("no such address", retry=False)) == "failed"
    read = await done(store.work.get(item.id))
    assert (read.status, read.retry_count, read.attempts) == ("failed", 0, 1)


@both_colours
async def test_a_retry_waits_longer_each_time_and_never_quite_the_same(subject: Subject) -> None:
    store, clock = await opened(subject)
    await done(store.work.submit("t", max_retries=12))
    waits = []
    for _ in range(12):
        [held] = await done(store.work.claim("w"))
        await done(held.fail("no"))
        waits.append(held.available_at - clock.now_ms())
        clock.advance(400)
        await done(store.work.promote())
    longest = [min(1000 * 2**number, 300_000) for number in range(12)]
    assert all(most / 2 <= wait <= most for wait, most in zip(waits, longest, strict=True))
    [held] = await done(store.work.claim("w"))
    assert await done(held.fail("no")) == "failed"


@both_colours
async def test_the_caller_may_choose_the_wait(subject: Subject) -> None:
    store, _ = await opened(subject)
    item = await claimed(store)
    await done(item.fail("no", delay_seconds=0))
    [again] = await done(store.work.claim("w"))
    assert (again.id, again.retry_count) == (item.id, 1)


@both_colours
async def test_releasing_spends_no_retry(subject: Subject) -> None:
    store, clock = await opened(subject)
    item = await done(store.work.submit("t", max_retries=0))
    first = None
    for number in range(1, 5):
        [held] = await done(store.work.claim("w"))
        first = first or held.started_at
        assert (held.attempts, held.fence, held.started_at) == (number, number, first)
        clock.advance(1)
        await done(held.release())
    read = await done(store.work.get(item.id))
    assert (read.status, read.waits_for, read.releases) == ("pending", None, 4)
    assert (read.retry_count, read.failures, read.rescues, read.attempts) == (0, 0, 0, 4)


@both_colours
async def test_an_item_says_what_a_dead_worker_leads_to(subject: Subject) -> None:
    store, clock = await opened(subject)
    session = await done(store.session("s"))
    items = {
        policy: await done(store.work.submit("t", policy, on_crash=policy, session=session))
        for policy in ("retry", "fail", "review")
    }
    await done(store.work.claim("w", limit=3, lease_seconds=10))
    clock.advance(10)
    swept = await done(store.work.sweep())
    assert (swept.requeued, swept.failed, swept.parked) == (1, 1, 1)
    read = {policy: await done(store.work.get(item.id)) for policy, item in items.items()}
    assert [read[policy].status for policy in read] == ["pending", "failed", "pending"]
    assert [read[policy].waits_for for policy in read] == ["time", None, "review"]
    clock.advance(86_400)
    await done(store.work.sweep())
    [again] = await done(store.work.claim("w", limit=3))
    assert again.input == "retry"
    ready = await done(store.work.retry(items["review"].id))
    assert (ready.status, ready.waits_for, ready.retry_count) == ("pending", None, 0)
    assert (await kinds(store, "s")).count("work_parked") == 1


@both_colours
async def test_what_went_wrong_is_in_the_history_of_the_session(subject: Subject) -> None:
    store, clock = await opened(subject)
    session = await done(store.session("s"))
    item = await claimed(store, session=session, max_retries=1)
    await done(item.session.record("iteration_start", {"iteration": 3}, item=item))
    await done(item.fail("boom"))
    clock.advance(10)
    await done(store.work.sweep())
    await done(store.work.claim("other", lease_seconds=1))
    clock.advance(1)
    await done(store.work.sweep())
    records = await done(session.history(kind="error_boundary", item=item))
    assert [record.data for record in records] == [
        {
            "item": item.id,
            "type": "mail",
            "error": "lease expired: other sent no heartbeat",
            "reason": "lease expired",
            "holder": "other",
            "fence": 2,
            "retry": 1,
            "status": "failed",
        },
        {
            "item": item.id,
            "type": "mail",
            "error": "boom",
            "reason": "failed",
            "holder": "worker",
            "fence": 1,
            "retry": 1,
            "status": "pending",
        },
    ]
    assert (await done(session.resume_point())).iteration == 3


@both_colours
async def test_the_sweep_writes_between_a_driver_and_not_into_an_end(subject: Subject) -> None:
    store, clock = await opened(subject)
    driven, ended = await done(store.session("d")), await done(store.session("e"))
    for session in (driven, ended):
        await done(store.work.submit("t", session=session))
    await done(store.work.claim("w", limit=2, lease_seconds=10))
    await done(ended.end())
    lease = await done(driven.lease("driver", 60))
    clock.advance(10)
    assert (await done(store.work.sweep())).requeued == 2
    assert len(await done(driven.history(kind="error_boundary"))) == 1
    assert await done(ended.history(kind="error_boundary")) == []
    assert (await kinds(store, "e"))[-1] == "work_requeued"
    driven.fence = lease.fence
    assert (await done(driven.save(plan=1))).version == 2


# Leases and fences


@both_colours
async def test_a_heartbeat_prolongs_and_never_shortens(subject: Subject) -> None:
    store, clock = await opened(subject)
    item = await claimed(store)
    clock.advance(20)
    beat = await done(item.heartbeat())
    assert beat.lease_expires_at == clock.now_ms() + 30_000 == item.lease_expires_at
    assert (await done(item.heartbeat(lease_seconds=5))).lease_expires_at == beat.lease_expires_at
    clock.advance(-3600)
    assert (await done(item.heartbeat())).lease_expires_at == beat.lease_expires_at
    assert (await done(store.work.sweep())).requeued == 0


@both_colours
async def test_an_expired_lease_lives_until_the_sweep_takes_it(subject: Subject) -> None:
    store, clock = await opened(subject)
    item = await claimed(store)
    clock.advance(29.999)
    assert (await done(store.work.sweep())).requeued == 0
    clock.advance(0.001)
    assert (await done(store.work.health())).expired == 1
    await done(item.heartbeat())
    assert (await done(store.work.sweep())).requeued == 0
    clock.advance(30)
    assert (await done(store.work.sweep())).requeued == 1
    assert (await done(store.work.sweep())).requeued == 0
    error = await raises(LeaseLost, item.heartbeat)
    assert (error.id, error.fence) == (item.id, 1)
    item = await claimed(store)
    clock.advance(30)
    await done(item.complete("late, and still its own"))


@both_colours
async def test_a_batch_of_heartbeats_tells_which_are_lost_and_which_must_stop(
    subject: Subject,
) -> None:
    store, clock = await opened(subject)
    await done(store.work.submit_many([Submission("t", number) for number in range(4)]))
    items = await done(store.work.claim("w", limit=4, lease_seconds=30))
    await done(items[1].complete())
    await done(store.work.cancel(items[2].id))
    clock.advance(7)
    beats = await done(store.work.heartbeat(items))
    assert [beat.id for beat in beats] == [item.id for item in items]
    assert [beat.is_lost for beat in beats] == [False, True, False, False]
    assert [beat.cancel_requested for beat in beats] == [False, False, True, False]
    ends = [beat.lease_expires_at for beat in beats]
    assert ends == [clock.now_ms() + 30_000, None, *[clock.now_ms() + 30_000] * 2]
    assert await done(store.work.heartbeat([])) == []


def zombie_writes(item: Any, store: Any) -> dict[str, Any]:
    """Everything that somebody can try who once held an item."""
    session = item.session
    return {
        "complete": lambda: item.complete("late"),
        "fail": lambda: item.fail("late"),
        "release": item.release,
        "cancel": item.cancel,
        "heartbeat": item.heartbeat,
        "progress": lambda: item.progress("late"),
        "save": lambda: session.save(x=1),
        "append": lambda: session.append("log", [1]),
        "record": lambda: session.record("turn"),
        "pin": lambda: session.pin(1, "late"),
        "attest": lambda: session.attest(1, {"late": True}),
        "rewind": lambda: session.rewind(1),
        "fork": lambda: session.fork(1),
        "end": session.end,
        "cancel the session": session.cancel,
        "delete the session": lambda: session.delete(force=True),
        "drive": lambda: session.lease("me", 60),
        "submit": lambda: store.work.submit("late", session=session),
        "follow up": lambda: item.complete(then=[Submission("late")]),
        "composed": lambda: store.run(compose, item),
    }


def compose(tx: holdfast.Transaction, item: Any) -> holdfast.Op[None]:
    yield from tx.within(item.session).save(x=2)


@both_colours
async def test_a_zombie_writes_nothing_in_any_way(subject: Subject) -> None:
    """Also when the one who has the item now bears the same name."""
    store, clock = await opened(subject)
    session = await done(store.session("s"))
    await done(session.save(x=0))
    zombie = await claimed(store, session=session)
    clock.advance(30)
    await done(store.work.sweep())
    clock.advance(5)
    await done(store.work.promote())
    [item] = await done(store.work.claim("worker"))
    assert (item.id, item.holder, item.fence) == (zombie.id, "worker", 2)
    before = await dumped(store)
    for name, write in zombie_writes(zombie, store).items():
        error = await raises(LeaseLost, write)
        assert "nothing was written" in str(error), name
        assert (error.id, error.fence) == (zombie.id, 1), name
    assert await done(store.work.complete_many([(zombie, 1)])) == [False]
    assert await dumped(store) == before
    # And each of them works for who holds it; those that end something come last.
    for name in ("heartbeat", "progress", "save", "append", "record", "pin", "attest", "composed"):
        await done(zombie_writes(item, store)[name]())
    await done(item.complete("in time"))


@both_colours
async def test_a_driver_of_an_items_session_needs_both_leases(subject: Subject) -> None:
    store, clock = await opened(subject)
    session = await done(store.session("s"))
    item = await claimed(store, session=session)
    driven = await done(item.session.drive("worker"))
    try:
        assert (await done(driven.save(x=1))).version == 1
        await raises(SessionBusy, partial(item.session.save, x=2))
        clock.advance(30)
        await done(store.work.sweep())
        await raises(LeaseLost, partial(driven.save, x=3))
    finally:
        await done(driven.close())


@both_colours
async def test_a_handle_without_a_lease_ends_nothing(subject: Subject) -> None:
    store, _ = await opened(subject)
    item = await claimed(store)
    read = await done(store.work.get(item.id))
    for write in (read.complete, read.release, read.heartbeat, partial(read.fail, "no")):
        error = await raises(LeaseLost, write)
        assert "holds no lease" in str(error)
    await raises(LeaseLost, partial(store.work.get, item.id, fence=2))
    held = await done(store.work.get(item.id, fence=1))
    await done(held.complete("by somebody who knows the fence"))
    await raises(LeaseLost, partial(store.work.get, item.id, fence=1))


@both_colours
async def test_a_batch_completes_what_is_still_held(subject: Subject) -> None:
    store, _ = await opened(subject)
    roots = [await done(store.session(name)) for name in ("b", "a")]
    wanted = [Submission("t", number, session=roots[number % 2]) for number in range(6)]
    await done(store.work.submit_many([*wanted, Submission("t", 6)]))
    items = await done(store.work.claim("w", limit=7))
    await done(items[3].release())
    said = await done(store.work.complete_many([(item, item.input) for item in items]))
    assert said == [True, True, True, False, True, True, True]
    found = await done(store.work.list(status="completed"))
    assert sorted(item.output for item in found) == [0, 1, 2, 4, 5, 6]
    assert (await kinds(store, "a")).count("work_completed") == 2
    assert (await kinds(store, "b")).count("work_completed") == 3
