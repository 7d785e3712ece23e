"""Whatever cannot be meant is refused with a sentence, and nothing is written or lost."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

import holdfast
from holdfast import InvalidArgument, LeaseLost, LimitExceeded, NotFound, Submission, VirtualClock
from holdfast.clock import TIME_MS_MAX
from holdfast.testing.subject import Subject, done, raises
from tests.checkpoints.colours import both_colours, sql

NAMES: list[Any] = ["", "x" * 257, "a\nb", "a\0b", 7, True, b"b", ["a"], {}, object(), 1.5]
WHOLE: list[Any] = [True, 1.5, "3", [], {}, object(), float("nan"), 2**70]
SECONDS: list[Any] = [-1, -0.001, float("nan"), float("inf"), "5", True, [], 10**12]

SUBMITTED: dict[str, list[Any]] = {
    "type": [None, *NAMES],
    "queue": NAMES,
    "key": NAMES,
    "priority": [None, 2**31, -(2**31), *WHOLE],
    "max_retries": [None, -1, 1001, *WHOLE],
    "available_at": [-1, TIME_MS_MAX + 1, 2**53, 2**60, *WHOLE],
    "delay_seconds": SECONDS,
    "on_crash": [None, "", "RETRY", 7, True],
    "session": [7, True, b"s", [], object(), ""],
    "input": [object(), float("nan"), {1: 2}, b"bytes", {"deep": {1, 2}}],
}


@both_colours
async def test_nothing_bad_is_submitted(subject: Subject) -> None:
    store = await subject.open(durability="normal")
    for name, values in SUBMITTED.items():
        for value in values:
            given = {"type": "t", **{name: value}}
            await raises(InvalidArgument, partial(store.work.submit, **given))
            await raises(InvalidArgument, partial(store.work.submit_many, [Submission(**given)]))
    both = {"available_at": 1, "delay_seconds": 1}
    await raises(InvalidArgument, partial(store.work.submit, "t", **both))
    await raises(NotFound, partial(store.work.submit, "t", session="nobody"))
    for wrong in (None, "t", {"type": "t"}, [{"type": "t"}], ["t"], [None], 7):
        await raises(InvalidArgument, partial(store.work.submit_many, wrong))
    await raises(InvalidArgument, partial(store.work.submit_many, [Submission("t")] * 10_001))
    assert await done(store.work.submit_many([])) == []
    assert await done(store.work.list()) == []


@both_colours
async def test_oversized_values_are_refused_and_the_item_stays(subject: Subject) -> None:
    store = await subject.open(limits=holdfast.Limits(value_bytes=1000), durability="normal")
    await raises(LimitExceeded, partial(store.work.submit, "t", "x" * 1001))
    item = await done(store.work.submit("t", "x" * 900))
    [held] = await done(store.work.claim("w"))
    await raises(LimitExceeded, partial(held.complete, "x" * 1001))
    await raises(LimitExceeded, partial(held.progress, "x" * 1001))
    read = await done(store.work.get(item.id))
    assert (read.status, read.output, read.last_progress) == ("in_progress", None, None)


@both_colours
async def test_a_long_error_is_cut_because_failing_must_not_fail(subject: Subject) -> None:
    store = await subject.open(durability="normal")
    await done(store.work.submit_many([Submission("t", max_retries=0)] * 4))
    items = await done(store.work.claim("w", limit=4))
    errors = ["e" * 100_000, ValueError(), "a lone surrogate: \udc80", ""]
    for item, error in zip(items, errors, strict=True):
        assert await done(item.fail(error)) == "failed"
    read = [(await done(store.work.get(item.id))).error for item in items]
    assert read == ["e" * 9_999 + "…", "ValueError", r"a lone surrogate: \udc80", ""]


@both_colours
async def test_claims_and_heartbeats_refuse_what_cannot_be_meant(subject: Subject) -> None:
    store = await subject.open(durability="normal")
    item = await done(store.work.submit("t"))
    work = store.work
    for holder in [None, *NAMES]:
        await raises(InvalidArgument, partial(work.claim, holder))
    for limit in (None, 0, -1, 1001, *WHOLE):
        await raises(InvalidArgument, partial(work.claim, "w", limit=limit))
    for queues in ([], "", [""], [7], 7, ["a"] * 51, {"a": 1}, [None]):
        await raises(InvalidArgument, partial(work.claim, "w", queues=queues))
    for seconds in (0, None, 8 * 24 * 3600, *SECONDS):
        await raises(InvalidArgument, partial(work.claim, "w", lease_seconds=seconds))
    assert (await done(work.get(item.id))).attempts == 0
    [held] = await done(work.claim("w"))
    for seconds in (0, 8 * 24 * 3600, *SECONDS):
        await raises(InvalidArgument, partial(held.heartbeat, lease_seconds=seconds))
        await raises(InvalidArgument, partial(work.heartbeat, [held], lease_seconds=seconds))
    for items in ([None], [held.id], [7]):
        await raises(InvalidArgument, partial(work.heartbeat, items))
    for outputs in (None, held, [(held.id, 1)], [(None, 1)]):
        await raises(InvalidArgument, partial(work.complete_many, outputs))
    assert (await done(work.get(item.id))).status == "in_progress"


@both_colours
async def test_ends_refuse_what_cannot_be_meant(subject: Subject) -> None:
    store = await subject.open(durability="normal")
    session = await done(store.session("s"))
    await done(store.work.submit("t", session=session))
    [held] = await done(store.work.claim("w"))
    before = await done(sql(store, "SELECT * FROM hf_work"))
    for output in SUBMITTED["input"]:
        await raises(InvalidArgument, partial(held.complete, output))
        await raises(InvalidArgument, partial(held.progress, output))
    for checkpoint in (7, "turn", ["turn"], {"kind": "no such kind"}, {"data": object()}):
        await raises(InvalidArgument, partial(held.complete, checkpoint=checkpoint))
    for effect in (7, (), (1, 2, 3), ["a", "b"], ("nope", 1), (None, 1), (7, 1), (held, 1)):
        await raises(InvalidArgument, partial(held.complete, effect=effect))
    for then in ("next", {"type": "t"}, [7], [Submission("")], None):
        await raises(InvalidArgument, partial(held.complete, then=then))
    for error in (None, 7, b"no", ["no"], object()):
        await raises(InvalidArgument, partial(held.fail, error))
    for seconds in SECONDS:
        await raises(InvalidArgument, partial(held.fail, "no", delay_seconds=seconds))
    assert await done(sql(store, "SELECT * FROM hf_work")) == before
    assert await done(session.history()) == []
    await done(held.complete())


@both_colours
async def test_wrong_ids_and_fences_change_nothing(subject: Subject) -> None:
    store = await subject.open(durability="normal")
    item = await done(store.work.submit("t"))
    work = store.work
    calls = (work.get, work.cancel, work.retry, work.redrive, work.why)
    for call in calls:
        await raises(NotFound, partial(call, "nobody"))
        for id in [None, *NAMES]:
            await raises(InvalidArgument, partial(call, id))
    [held] = await done(work.claim("w"))
    for fence in (0, -1, *WHOLE):
        await raises(InvalidArgument, partial(work.get, item.id, fence=fence))
    for fence in (2, 99, 2**62):
        await raises(LeaseLost, partial(work.get, item.id, fence=fence))
        held.fence = fence
        for write in (held.complete, held.release, held.heartbeat, held.cancel):
            error = await raises(LeaseLost, write)
            assert (error.fence, error.current_fence) == (fence, 1)
    assert (await done(work.get(item.id))).status == "in_progress"


@both_colours
async def test_listings_refuse_what_cannot_be_meant(subject: Subject) -> None:
    store = await subject.open(durability="normal")
    work = store.work
    for limit in (None, 0, -1, 1001, *WHOLE):
        for call in (work.list, work.dead, work.growth, work.sweep, work.promote):
            await raises(InvalidArgument, partial(call, limit=limit))
    for before in (-1, *WHOLE):
        await raises(InvalidArgument, partial(work.list, before=before))
        await raises(InvalidArgument, partial(work.dead, before=before))
    for status in ("", "queued", "expired", 7, [], ["pending", "queued"], [["pending"]]):
        await raises(InvalidArgument, partial(work.list, status=status))
    for name in ("holder", "type", "queue", "session"):
        for value in NAMES:
            await raises(InvalidArgument, partial(work.list, **{name: value}))
    for seconds in SECONDS:
        await raises(InvalidArgument, partial(work.health, stale_seconds=seconds))
    for days in (-1, None, "30", True, float("nan"), 10**9):
        await raises(InvalidArgument, partial(store.prune, work_days=days))


@pytest.mark.parametrize("jump_seconds", [3600, -3600])
def test_a_clock_that_jumps_an_hour_loses_nothing(
    place: dict[str, Any], jump_seconds: float
) -> None:
    """Forward, leases run out and items are tried again; back, they last longer. All end once."""
    clock = VirtualClock()
    with holdfast.open(**place, clock=clock, durability="normal") as store:
        for number in range(20):
            store.work.submit("t", number, delay_seconds=60 if number % 5 == 0 else None)
        held = store.work.claim("a", limit=8, lease_seconds=30)
        clock.advance(jump_seconds)
        store.work.sweep()
        done_by_a = store.work.complete_many([(item, "a") for item in held[:4]])
        assert done_by_a == [jump_seconds < 0] * 4
        for _ in range(200):
            clock.advance(60)
            store.work.sweep()
            ready = store.work.claim("b", limit=5, lease_seconds=30)
            assert all(store.work.complete_many([(item, "b") for item in ready]))
        found = store.work.list(limit=100)
        assert [item.status for item in found] == ["completed"] * 20
        assert sorted(item.input for item in found) == list(range(20))
        assert all(item.attempts <= 2 for item in found)


@both_colours
async def test_every_time_ends_with_the_year_9999(subject: Subject) -> None:
    store = await subject.open(durability="normal")
    session = await done(store.session("s", agent="a"))
    for beyond in (TIME_MS_MAX + 1, 2**53):
        await raises(InvalidArgument, partial(session.sleep, beyond))
        await raises(InvalidArgument, partial(store.checkpoints, since=beyond))
    assert await done(session.pauses()) == []
    await done(session.sleep(TIME_MS_MAX))
    item = await done(store.work.submit("t", available_at=TIME_MS_MAX))
    assert item.available_at == TIME_MS_MAX
