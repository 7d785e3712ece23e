"""What people ask of the queue."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import holdfast
from holdfast import (
    Growth,
    InvalidArgument,
    LeaseHealth,
    NotFound,
    Submission,
    VirtualClock,
    WorkCount,
)
from holdfast.testing.subject import Subject, done, raises
from tests.checkpoints.colours import both_colours


async def opened(subject: Subject) -> tuple[Any, VirtualClock]:
    clock = VirtualClock()
    return await subject.open(clock=clock, durability="normal"), clock


def count(
    type: str, status: Any, items: int, average: float, oldest: float, *, is_more: bool = False
) -> WorkCount:
    return WorkCount(
        type=type,
        status=status,
        items=items,
        average_age_seconds=average,
        oldest_age_seconds=oldest,
        is_more=is_more,
    )


@both_colours
async def test_counts_are_by_type_and_status_with_ages(subject: Subject) -> None:
    store, clock = await opened(subject)
    assert await done(store.work.counts()) == []
    await done(store.work.submit("a"))
    clock.advance(10)
    await done(store.work.submit_many([Submission("a", delay_seconds=60), Submission("b")]))
    [item] = await done(store.work.claim("w", queues="b"))
    clock.advance(10)
    live = [count("a", "pending", 2, 15.0, 20.0), count("b", "in_progress", 1, 10.0, 10.0)]
    assert await done(store.work.counts()) == live
    assert await done(store.work.counts(finished=False)) == live
    await done(item.complete())
    assert await done(store.work.counts()) == [live[0], count("b", "completed", 1, 10.0, 10.0)]
    assert await done(store.work.counts(finished=False)) == live[:1]


def test_an_item_of_a_clock_that_is_ahead_has_no_negative_age(
    place: dict[str, Any], tmp_path: Path
) -> None:
    ahead = VirtualClock()
    ahead.advance(3_600)
    with holdfast.open(f"sqlite:///{tmp_path}/other.db", clock=ahead) as other:
        other.work.submit("a", session=other.session("s"))
        other.export(tmp_path / "s.export")
    with holdfast.open(**place, clock=VirtualClock()) as store:
        store.import_sessions(tmp_path / "s.export")
        assert store.work.counts() == [count("a", "pending", 1, 0.0, 0.0)]
        assert store.work.counts(at_most=9) == store.work.counts()


@both_colours
async def test_counting_ends_where_it_is_told_to(subject: Subject) -> None:
    store, clock = await opened(subject)
    assert await done(store.work.counts(at_most=1)) == []
    for _ in range(3):
        await done(store.work.submit("a"))
        clock.advance(10)
    await done(store.work.submit_many([Submission("b"), Submission("b", delay_seconds=60)]))
    assert await done(store.work.counts(at_most=2)) == [
        count("a", "pending", 2, 25.0, 30.0, is_more=True),
        count("b", "pending", 2, 0.0, 0.0),
    ]
    assert await done(store.work.counts(at_most=10)) == await done(store.work.counts())
    [item] = await done(store.work.claim("w", queues="a"))
    await done(item.complete())
    finished = await done(store.work.counts(at_most=10))
    assert finished == await done(store.work.counts())
    live = await done(store.work.counts(finished=False, at_most=10))
    assert live == [each for each in finished if each.status == "pending"]


@both_colours
async def test_health_tells_stale_and_expired_leases_apart(subject: Subject) -> None:
    store, clock = await opened(subject)
    nothing = LeaseHealth(
        active=0,
        stale=0,
        expired=0,
        cancelling=0,
        average_heartbeat_seconds=0.0,
        longest_heartbeat_seconds=0.0,
    )
    assert await done(store.work.health()) == nothing
    await done(store.work.submit_many([Submission("a")] * 3))
    items = await done(store.work.claim("w", limit=3, lease_seconds=200))
    clock.advance(150)
    await done(items[0].heartbeat())
    await done(store.work.cancel(items[1].id))
    clock.advance(60)
    assert await done(store.work.health()) == LeaseHealth(
        active=3,
        stale=2,
        expired=2,
        cancelling=1,
        average_heartbeat_seconds=160.0,
        longest_heartbeat_seconds=210.0,
    )
    assert (await done(store.work.health(stale_seconds=59))).stale == 3


@both_colours
async def test_health_looks_at_the_leases_first_that_expire_first(subject: Subject) -> None:
    store, clock = await opened(subject)
    await done(store.work.submit_many([Submission("a")] * 4))
    await done(store.work.claim("w", limit=2, lease_seconds=900))
    await done(store.work.claim("w", limit=2, lease_seconds=100))
    clock.advance(200)
    all_of_them = await done(store.work.health())
    assert (all_of_them.active, all_of_them.expired, all_of_them.is_more) == (4, 2, False)
    some = await done(store.work.health(at_most=2))
    assert (some.active, some.expired, some.is_more) == (2, 2, True)
    await raises(InvalidArgument, lambda: store.work.health(at_most=0))


@both_colours
async def test_a_lease_is_swept_when_it_expires_whenever_it_was_renewed(subject: Subject) -> None:
    """A heartbeat early in a lease leaves the moment alone from which sweeps look at it."""
    store, clock = await opened(subject)
    for pauses in ([10], [10, 80], [80], [40, 30, 29]):
        await done(store.work.submit("a"))
        [item] = await done(store.work.claim("w", lease_seconds=100))
        for pause in pauses:
            clock.advance(pause)
            await done(item.heartbeat(lease_seconds=100))
        clock.advance(99.9)
        assert (await done(store.work.sweep())).requeued == 0, pauses
        clock.advance(0.1)
        assert (await done(store.work.sweep())).requeued == 1, pauses
        await done(store.work.cancel(item.id))


@both_colours
async def test_growth_names_the_sessions_with_the_most_checkpoints(subject: Subject) -> None:
    store, clock = await opened(subject)
    began = clock.now_ms()
    for number, name in enumerate(("a", "b", "c")):
        session = await done(store.session(name))
        for _ in range(number + 1):
            await done(session.record("turn"))
            clock.advance(1)
    grown = await done(store.work.growth(limit=2))
    assert grown == [
        Growth(
            session_id="c", checkpoints=3, newest=3, first_at=began + 3000, last_at=began + 5000
        ),
        Growth(
            session_id="b", checkpoints=2, newest=2, first_at=began + 1000, last_at=began + 2000
        ),
    ]


@both_colours
async def test_why_is_a_sentence_for_every_state(subject: Subject) -> None:
    store, clock = await opened(subject)
    work = store.work
    first = await done(work.submit("t", key="first"))
    second = await done(work.submit("t", max_retries=1, on_crash="review"))

    async def why(item: Any) -> str:
        return str(await done(work.why(item.id)))

    nobody = (
        "no item of the queue is leased now. Either no worker serves the queue, or all of its "
        "workers' slots are taken by handlers that did not stop after their items were cancelled "
        "or lost; their logs say so."
    )
    assert await why(first) == f"It is ready, with nothing before it in queue 't'; {nobody}"
    [held] = await done(work.claim("ann", lease_seconds=60))
    ready = "It is ready, with nothing before it in queue 't'; 1 of the queue runs now."
    assert await why(second) == ready
    clock.advance(12.5)
    running = "ann has been running it for 12.5 s, last heartbeat 12.5 s ago; "
    assert await why(first) == f"{running}its lease ends in 47.5 s."
    await done(work.cancel(first.id))
    assert await why(first) == f"{running}its lease ends in 47.5 s. It was asked to stop."
    await done(held.complete())
    assert await why(first) == "It was completed 0.0 s ago."
    [held] = await done(work.claim("bob", lease_seconds=60))
    await done(held.fail("no paper", delay_seconds=240))
    assert (await why(second)).endswith(
        ", 4 min from now, before retry 1 of 1. Last error: no paper."
    )
    clock.advance(250)
    waits = "It has been due for 10.0 s and waits for a sweep. Last error: no paper."
    assert await why(second) == waits
    await done(work.promote())
    assert await why(second) == (
        f"It is ready, with nothing before it in queue 't'; {nobody} Last error: no paper."
    )
    [held] = await done(work.claim("bob", lease_seconds=60))
    clock.advance(10_000)
    assert "its lease ended 2.8 h ago: the next sweep takes it." in await why(second)
    await done(work.sweep())
    choices = [f"`holdfast work {name} {second.number}`" for name in ("retry", "cancel")]
    assert f"check it, then run {' or '.join(choices)}." in await why(second)
    third = await done(work.submit("t"))
    [held] = await done(work.claim("bob"))
    await done(held.fail("no ink.\n", retry=False))
    again = f"`holdfast work redrive {third.number}` submits it again"
    assert await why(third) == f"It failed permanently; {again}. Last error: no ink."
    await done(store.request("printer", request_id="r1"))
    [served] = await done(work.claim("printer", queues="agent:printer"))
    await done(served.fail("no paper", retry=False))
    assert await why(served) == (
        "It failed permanently; its session is failed, and a call that it served has its answer. "
        "To run it nevertheless: `holdfast sessions reopen r1`, then "
        f"`holdfast work redrive {served.number}`. Last error: no paper."
    )
    await done(work.cancel(second.id))
    assert await why(second) == "It was cancelled 0.0 s ago."
    await done(work.submit_many([Submission("t") for _ in range(1200)]))
    last = await done(work.submit("t"))
    assert "with 1000 items or more before it" in await why(last)
    await raises(NotFound, partial(work.why, "nobody"))


@both_colours
async def test_lists_filter_and_page_from_the_newest(subject: Subject) -> None:
    store, _ = await opened(subject)
    work = store.work
    session = await done(store.session("s"))
    for number in range(3):
        await done(work.submit("a", number, session=session))
        await done(work.submit("b", number, delay_seconds=5, queue="q"))
        await done(work.submit("c", number, max_retries=0))
    running = await done(work.claim("ann", queues="a", limit=2))
    for item in await done(work.claim("bob", queues="c", limit=2)):
        await done(item.fail("no"))
    await done(work.complete_many([(running[0], None)]))
    await done(work.cancel((await done(work.list(type="c", status="pending")))[0].id))

    async def listed(**given: Any) -> list[str]:
        return [f"{item.type}{item.input}" for item in await done(work.list(**given))]

    assert await listed() == ["c2", "b2", "a2", "c1", "b1", "a1", "c0", "b0", "a0"]
    assert await listed(session=session) == await listed(session="s") == ["a2", "a1", "a0"]
    assert await listed(status="pending") == ["b2", "a2", "b1", "b0"]
    assert await listed(status="in_progress") == await listed(holder="ann") == ["a1"]
    assert await listed(holder="ann", status="completed") == []
    assert await listed(status="completed") == ["a0"]
    assert await listed(status="failed") == ["c1", "c0"]
    assert await listed(status="cancelled") == ["c2"]
    assert await listed(type="b", status="pending") == await listed(queue="q") == ["b2", "b1", "b0"]
    assert await listed(session="s", status="pending", type="a") == ["a2"]
    assert await listed(session="nobody") == []
    assert await listed(root=session) == await listed(root="s") == ["a2", "a1", "a0"]
    assert await listed(root="s", status="completed") == ["a0"]
    assert await listed(root="s", session="s", type="a", holder="ann") == ["a1"]
    assert await listed(root="nobody") == await listed(root="nobody", session="s") == []
    page = await done(work.list(limit=4))
    rest = await done(work.list(before=page[-1].number))
    assert [item.id for item in page + rest] == [item.id for item in await done(work.list())]
    dead = await done(work.dead(limit=1))
    assert [item.input for item in dead] == [1]
    assert [item.input for item in await done(work.dead(before=dead[0].number))] == [0]
