"""How work items end, alone or with their session, on both databases and in both colours."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import holdfast
from holdfast import (
    InvalidArgument,
    LeaseLost,
    Refused,
    SessionBusy,
    Submission,
)
from holdfast.checkpoints import Heads
from holdfast.testing.subject import Subject, done, raises
from tests.checkpoints.colours import both_colours, sql
from tests.work.items import claim_all, claimed, dumped, kinds, opened

# Ends


class Issued:
    """An effect under way, as `complete` needs it."""

    def __init__(self, session: Any, breaks: bool = False) -> None:
        self.session = session
        self.breaks = breaks

    def completing(self, value: Any) -> holdfast.Op[None]:
        yield from sql_rows(
            "UPDATE hf_sessions SET name = :value WHERE number = :number",
            value=value,
            number=self.session.number,
        )
        if self.breaks:
            raise InvalidArgument("this effect cannot be completed")


def sql_rows(statement: str, **parameters: object) -> holdfast.Op[Any]:
    from holdfast.kernel.operation import rows

    return rows(statement, **parameters)


@both_colours
async def test_output_checkpoint_effect_and_follow_ups_are_one_commit(subject: Subject) -> None:
    store, clock = await opened(subject)
    session = await done(store.session("s"))
    item = await claimed(store, session=session)
    broken: list[dict[str, Any]] = [
        {"effect": (Issued(session, breaks=True), "name")},
        {"then": [Submission("next", object())]},
        {"then": [Submission("next", session="nobody")]},
        {"checkpoint": {"kind": "nothing known"}},
        {"checkpoint": {"expected_version": 7}},
    ]
    before = await dumped(store)
    whole: dict[str, Any] = {
        "checkpoint": {"kind": "tool_executed", "data": {"pages": 42}, "plan": ["done"]},
        "effect": (Issued(session), "name"),
        "then": [Submission("next", 1), Submission("later", 2, delay_seconds=9)],
    }
    for wrong in broken:
        await raises(holdfast.HoldfastError, partial(item.complete, "out", **{**whole, **wrong}))
        assert await dumped(store) == before
    await done(item.complete("out", **whole))
    [record] = await done(session.history())
    assert (record.kind, record.data, record.item_id) == ("tool_executed", {"pages": 42}, item.id)
    assert (await done(session.latest()))["plan"] == ["done"]
    assert (await done(session.info())).name == "name"
    follow = await done(store.work.list(session=session, status="pending"))
    assert [(each.type, each.input) for each in follow] == [("later", 2), ("next", 1)]
    assert (await done(store.work.get(item.id))).output == "out"
    clock.advance(30)
    await done(store.work.sweep())
    with_session = {"checkpoint": {"kind": "turn"}}
    alone = await claimed(store, priority=9)
    await raises(InvalidArgument, partial(alone.complete, **with_session))


@both_colours
async def test_of_items_completed_together_a_lost_one_stays_with_its_new_holder(
    subject: Subject,
) -> None:
    store, _ = await opened(subject)
    old, kept = await claimed(store), await claimed(store)
    await done((await done(store.work.get(old.id, fence=old.fence))).release())
    [new] = await done(store.work.claim("another"))
    assert await done(store.work.complete_many([(old, "late"), (kept, "ok")])) == [False, True]
    now = await done(store.work.get(new.id, fence=new.fence))
    assert (now.id, now.holder, now.output) == (old.id, "another", None)
    assert (await done(store.work.get(kept.id))).output == "ok"


@both_colours
async def test_finished_items_are_immutable_in_the_database_too(subject: Subject) -> None:
    store, _ = await opened(subject)
    for end in ("complete", "fail", "cancel"):
        item = await claimed(store, session=await done(store.session("s")))
        await done({"fail": partial(item.fail, "no", retry=False)}.get(end, getattr(item, end))())
        for change in ("state = 'pending'", "output = NULL", "retry_count = 1", "fence = 9"):
            statement = f"UPDATE hf_work SET {change} WHERE number = {item.number}"
            await raises(Refused, partial(sql, store, statement))
        await raises(Refused, partial(sql, store, "DELETE FROM hf_work"))
        for write in (partial(item.complete, 2), item.release, item.heartbeat, item.cancel):
            await raises(LeaseLost, write)
    await done(store.work.submit("t"))
    await raises(Refused, partial(sql, store, "DELETE FROM hf_work WHERE state = 'pending'"))
    for wrong in ("state = 'expired'", "state = 'in_progress'", "retry_count = 4", "holder = 'x'"):
        where = "WHERE state = 'pending'"
        await raises(Refused, partial(sql, store, f"UPDATE hf_work SET {wrong} {where}"))


@both_colours
async def test_cancelling_reaches_who_runs_it(subject: Subject) -> None:
    store, clock = await opened(subject)
    session = await done(store.session("s"))
    waiting = await done(store.work.submit("t", session=session))
    assert await done(store.work.cancel(waiting.id)) == "cancelled"
    assert await done(store.work.cancel(waiting.id)) == "cancelled"
    ends: dict[str, Callable[[Any], Any]] = {
        "stop": lambda item: item.cancel(),
        "fail": lambda item: item.fail("no"),
        "release": lambda item: item.release(),
        "die": lambda item: clock.advance(30),
        "complete": lambda item: item.complete("it was done by then"),
    }
    for name, end in ends.items():
        item = await claimed(store, session=session)
        read = await done(store.work.get(item.id))
        for _ in range(2):
            assert await done(read.cancel()) == "in_progress"
        assert (await done(item.heartbeat())).cancel_requested
        await done(end(item))
        await done(store.work.sweep())
        read = await done(store.work.get(item.id))
        assert read.status == ("completed" if name == "complete" else "cancelled"), name
        assert read.retry_count == 0
    assert (await kinds(store, "s")).count("work_cancelled") == 5
    assert (await kinds(store, "s")).count("work_cancel_requested") == 5


@both_colours
async def test_a_running_item_is_taken_away_from_a_holder_that_can_write_nothing_more(
    subject: Subject,
) -> None:
    store, _ = await opened(subject)
    session = await done(store.session("s"))
    item = await claimed(store, session=session)
    driven = await done(item.drive())
    ready = await done(store.work.release(item.id, reason="it hangs"))
    assert (ready.status, ready.fence, ready.holder) == ("pending", item.fence + 1, None)
    assert (ready.retry_count, ready.releases) == (0, 1)
    await raises(LeaseLost, partial(item.complete, "too late"))
    await raises(LeaseLost, item.heartbeat)
    await raises(LeaseLost, partial(driven.save, {"n": 1}))
    [kept] = await done(store.work.errors(item.id))
    assert (kept.reason, kept.error, kept.holder) == ("taken away", "it hangs", item.holder)
    assert (await kinds(store, "s"))[-1] == "work_requeued"
    [again] = await done(store.work.claim("another"))
    assert again.id == item.id
    await done(store.work.cancel(item.id))
    assert (await done(store.work.release(item.id, reason="stop"))).status == "cancelled"
    for wrong in ("", "x" * 1_001):
        await raises(InvalidArgument, partial(store.work.release, item.id, reason=wrong))
    await raises(InvalidArgument, partial(store.work.release, item.id, reason="it has ended"))


@both_colours
async def test_an_item_that_is_taken_away_is_in_the_audit_trail(subject: Subject) -> None:
    store, _ = await opened(subject)
    item = await claimed(store)
    await done(store.work.release(item.id, reason="it hangs"))
    [last] = (await done(store.audit.list()))[-1:]
    assert (last.action, last.subject, last.reason) == ("work_released", item.id, None)


@both_colours
async def test_a_dead_item_is_redriven_once_as_a_new_one(subject: Subject) -> None:
    store, _ = await opened(subject)
    session = await done(store.session("s"))
    given = {"input": {"n": 1}, "priority": 4, "max_retries": 1, "queue": "q", "session": session}
    item = await claimed(store, **given)
    await raises(InvalidArgument, partial(store.work.redrive, item.id))
    await done(item.fail("no", retry=False))
    assert [dead.id for dead in await done(store.work.dead())] == [item.id]
    again = await done(store.work.redrive(item.id))
    assert (again.redriven_from, again.status, again.attempts) == (item.id, "pending", 0)
    for name in ("type", "queue", "input", "priority", "max_retries", "session_id", "on_crash"):
        assert getattr(again, name) == getattr(item, name), name
    assert (await done(store.work.redrive(item.id))).id == again.id
    assert await done(store.work.dead()) == []
    assert (await done(store.work.get(item.id))).status == "failed"
    await raises(InvalidArgument, partial(store.work.retry, item.id))


# Sessions


@both_colours
async def test_cancelling_a_session_cancels_its_items_and_fences_who_runs_them(
    subject: Subject,
) -> None:
    store, _ = await opened(subject)
    root = await done(store.session("root"))
    child = await done(store.session("child", parent=root))
    other = await done(store.session("other"))
    for session in (root, child, other):
        await done(store.work.submit("run", session=session))
        await done(store.work.submit("wait", session=session, delay_seconds=60))
        await done(store.work.submit("ready", session=session))
    held = await done(store.work.claim("w", queues="run", limit=3))
    await done(root.cancel())
    for session in (root, child):
        found = await done(store.work.list(session=session))
        assert [item.status for item in found] == ["cancelled"] * 3
    assert [item.status for item in await done(store.work.list(session=other))] == [
        *["pending"] * 2,
        "in_progress",
    ]
    beats = await done(store.work.heartbeat(held))
    assert [beat.is_lost for beat in beats] == [True, True, False]
    await raises(LeaseLost, held[1].complete)
    assert (await kinds(store, "root")).count("work_cancelled") == 6


@both_colours
async def test_deleting_a_session_removes_its_items(subject: Subject) -> None:
    store, _ = await opened(subject)
    root = await done(store.session("root"))
    item = await claimed(store, session=root)
    await done(store.work.submit("t", session=root))
    alone = await done(store.work.submit("t"))
    error = await raises(SessionBusy, root.delete)
    assert "has a running work item" in str(error)
    await done(root.delete(force=True))
    assert [each.id for each in await done(store.work.list())] == [alone.id]
    for write in (item.complete, item.heartbeat, partial(item.session.save, x=1)):
        await raises(LeaseLost, write)


@both_colours
async def test_progress_is_evidence_and_a_sign_of_life(subject: Subject) -> None:
    store, clock = await opened(subject)
    session = await done(store.session("s"))
    item = await claimed(store, session=session)
    clock.advance(20)
    await done(item.progress({"pages": 10}))
    assert item.lease_expires_at == clock.now_ms() + 30_000
    read = await done(store.work.get(item.id))
    assert (read.last_progress, read.heartbeat_at) == ({"pages": 10}, clock.now_ms())
    [record] = await done(session.history(item=item))
    assert (record.kind, record.data) == ("manual_checkpoint", {"progress": {"pages": 10}})
    alone = await claimed(store)
    await done(alone.progress("half"))
    assert (await done(store.work.get(alone.id))).last_progress == "half"


# Retention, wake-ups, damage


@both_colours
async def test_old_finished_items_are_pruned_and_nothing_else(subject: Subject) -> None:
    store, clock = await opened(subject)
    session = await done(store.session("s"))
    for name in ("old", "new"):
        for place in (None, session):
            await done(store.work.submit("t", name, session=place))
            await done(store.work.submit("f", name, session=place, max_retries=0))
        await done(store.work.complete_many([(i, 1) for i in await claim_all(store, "t")]))
        for item in await claim_all(store, "f"):
            await done(item.fail("no"))
        await done(store.work.submit("waits", name))
        clock.advance(20 * 86_400)
    pruned = await done(store.prune())
    assert pruned.items == 4
    left = await done(store.work.list())
    assert sorted((i.type, i.input) for i in left) == sorted(
        [("waits", "old"), *[(name, "new") for name in ("t", "t", "f", "f", "waits")]]
    )
    last = (await done(store.events("s")))[-1]
    assert (last.kind, last.data) == ("work_pruned", {"count": 2})
    assert (await done(store.prune(work_days=0))).items == 4
    assert (await done(store.prune(work_days=0))).items == 0
    assert await done(sql(store, "SELECT * FROM hf_doors")) == []


@both_colours
async def test_whoever_waits_is_woken_when_something_is_ready(subject: Subject) -> None:
    store, clock = await opened(subject)
    rings: list[str] = []
    store.runtime.signals._forward = rings.append
    item = await claimed(store)
    assert rings.pop() == "work:mail"
    await done(item.release())
    assert rings.pop() == "work:mail"
    await done(store.work.submit("t", queue="q", delay_seconds=5))
    assert rings == []
    clock.advance(5)
    await done(store.work.sweep())
    assert rings.pop() == "work:q"
    [item] = await done(store.work.claim("w", queues="mail"))
    await done(item.complete(then=[Submission("n"), Submission("n"), Submission("m")]))
    assert rings == ["work:m", "work:n"]


@both_colours
async def test_damage_in_one_item_stops_no_other(subject: Subject) -> None:
    store, clock = await opened(subject)
    session = await done(store.session("s"))
    await done(session.save(x=1))
    for number in range(2):
        await done(store.work.submit("t", number, session=session))
    damage = "UPDATE hf_work SET input = CAST(:damaged AS BLOB) WHERE type = 't' AND number = :n"
    first = (await done(store.work.list()))[-1]
    await done(sql(store, damage, damaged=b"damaged", n=first.number))
    first, second = await done(store.work.claim("w", limit=2, lease_seconds=10))
    await raises(holdfast.CorruptRecord, lambda: first.input)
    assert second.input == 1
    await done(second.release())
    # The newest record of the session is damaged: it takes no record, its item still ends.
    await done(sql(store, "INSERT INTO hf_doors (name) VALUES ('x')", "DELETE FROM hf_checkpoints"))
    await done(sql(store, "DELETE FROM hf_doors"))
    Heads.of(store.runtime).forget(session.number)
    clock.advance(10)
    assert (await done(store.work.sweep())).requeued == 1
    assert (await kinds(store, "s"))[-1] == "work_requeued"


@both_colours
async def test_secrets_in_an_error_are_not_stored(subject: Subject) -> None:
    store, _ = await opened(subject)
    session = await done(store.session("s"))
    item = await claimed(store, session=session)
    await done(item.fail(ValueError("401 for password=hunter2-and-more")))
    read = await done(store.work.get(item.id))
    [record] = await done(session.history(kind="error_boundary"))
    assert "401 for" in read.error
    assert "hunter2" not in read.error + record.data["error"]
