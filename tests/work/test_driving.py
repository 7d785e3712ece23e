"""Items that drive their session: one lease, which lives and ends with the attempt."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import holdfast
import holdfast.kernel.postgres  # Imported once, not in each child.
from holdfast import InvalidArgument, LeaseLost, SessionBusy, Worker
from holdfast.agent import Agent, call
from holdfast.testing.subject import Subject, done, raises
from tests.agent.helpers import World
from tests.checkpoints.colours import both_colours, sql
from tests.crash.children import run as run_child
from tests.work.items import claimed, opened
from tests.work.working import ended, running, unhurried, until
from tests.work.working import opened as opened_now


async def lease_of(store: Any, id: str = "s") -> tuple[Any, int, Any]:
    """Return who drives a session, its fence and the end of its lease."""
    columns = "holder, fence, lease_expires_at"
    [row] = await done(sql(store, f"SELECT {columns} FROM hf_sessions WHERE id = :id", id=id))
    return row["holder"], row["fence"], row["lease_expires_at"]


@both_colours
async def test_an_item_that_drives_writes_alone(subject: Subject) -> None:
    store, _ = await opened(subject)
    session = await done(store.session("s"))
    item = await claimed(store, session=session)
    driven = await done(item.drive())
    holder, fence, expires_at = await lease_of(store)
    assert item.id in holder
    assert (driven.fence, fence, expires_at) == (1, 1, item.lease_expires_at)
    error = await raises(SessionBusy, partial(session.save, x=1))
    assert item.id in str(error)
    await raises(SessionBusy, partial(session.drive, "other"))
    await done(driven.save(x=1))
    await done(item.session.save(x=2))
    await done(item.progress("half"))
    assert (await done(item.drive())).fence == 1
    await done(item.complete("ok", checkpoint={"channels": {"x": 3}}))
    assert (await done(session.latest())).channels == {"x": 3}
    assert await lease_of(store) == (None, 2, None)
    await raises(LeaseLost, partial(driven.save, x=4))
    await done(session.save(x=5))


@both_colours
async def test_effects_of_an_item_that_drives_run_once(subject: Subject) -> None:
    store, _ = await opened(subject)
    item = await claimed(store, session=await done(store.session("s")))
    await done(item.drive())
    assert (await done(item.once("k", lambda: 7))).value == 7
    charge = holdfast.tool(effect="mutate", name="charge")(lambda cents: cents)
    assert (await done(item.call(charge, cents=5))).value == 5
    assert (await done(item.session.call(charge, cents=6))).value == 6


@both_colours
async def test_the_items_heartbeat_renews_both_leases(subject: Subject) -> None:
    store, clock = await opened(subject)
    session = await done(store.session("s"))
    item = await claimed(store, session=session)
    driven = await done(item.drive())
    beats: list[Callable[[], Any]] = [
        item.heartbeat,
        partial(store.work.heartbeat, [item]),
        partial(item.progress, "half"),
    ]
    for beat in beats:
        clock.advance(20)
        await done(beat())
        _, fence, expires_at = await lease_of(store)
        assert (fence, expires_at) == (1, clock.now_ms() + 30_000)
        await raises(SessionBusy, partial(session.save, x=1))
        await done(driven.save(x=1))


async def _sweep(store: Any, clock: Any, item: Any) -> None:
    clock.advance(31)
    await done(store.work.sweep())


async def _sweep_in_review(store: Any, clock: Any, item: Any) -> None:
    await done(sql(store, "UPDATE hf_work SET on_crash = 'review'"))
    await _sweep(store, clock, item)


async def _complete_many(store: Any, clock: Any, item: Any) -> None:
    await done(store.work.complete_many([(item, 1)]))


async def _complete_elsewhere(store: Any, clock: Any, item: Any) -> None:
    """By a handle that does not know that the item drives."""
    other = await done(store.work.get(item.id, fence=item.fence))
    other.driving_fence = None
    await done(other.complete(1))


async def _cancel_session(store: Any, clock: Any, item: Any) -> None:
    await done((await done(store.find_session("s"))).cancel())


ENDS: dict[str, Any] = {
    "complete": lambda store, clock, item: done(item.complete(1)),
    "complete elsewhere": _complete_elsewhere,
    "complete many": _complete_many,
    "fail": lambda store, clock, item: done(item.fail("no")),
    "fail for good": lambda store, clock, item: done(item.fail("no", retry=False)),
    "release": lambda store, clock, item: done(item.release()),
    "cancel": lambda store, clock, item: done(item.cancel()),
    "sweep": _sweep,
    "sweep for review": _sweep_in_review,
    "cancel the session": _cancel_session,
}


@pytest.mark.parametrize("colour", ["sync", "async"])
@pytest.mark.parametrize("end", ENDS)
def test_whatever_ends_the_attempt_gives_the_session_back(
    place: dict[str, Any], tmp_path: Path, end: str, colour: str
) -> None:
    @both_colours
    async def case(subject: Subject) -> None:
        store, clock = await opened(subject)
        item = await claimed(store, session=await done(store.session("s")))
        driven = await done(item.drive())
        await ENDS[end](store, clock, item)
        holder, fence, expires_at = await lease_of(store)
        assert (holder, expires_at) == (None, None)
        assert fence > driven.fence
        await raises(LeaseLost, partial(driven.save, x=1))

    case(place, colour, tmp_path)


@both_colours
async def test_a_session_that_another_has_taken_is_not_taken_away_from_it(
    subject: Subject,
) -> None:
    store, clock = await opened(subject)
    session = await done(store.session("s"))
    item = await claimed(store, session=session)
    await done(item.drive())
    clock.advance(31)
    lease = await done(session.lease("person", 600))
    await done(store.work.sweep())
    assert await lease_of(store) == ("person", lease.fence, lease.expires_at)


@both_colours
async def test_driving_turns_a_waiting_session_active(subject: Subject) -> None:
    store, _ = await opened(subject)
    session = await done(store.session("s"))
    item = await claimed(store, session=session)
    await done(sql(store, "UPDATE hf_sessions SET status = 'waiting'"))
    await done(item.drive())
    assert (await done(session.info())).status == "active"
    [record] = await done(session.history(kind="state_transition"))
    assert record.data == {"from": "waiting", "to": "active"}


@both_colours
async def test_what_cannot_be_driven_is_refused(subject: Subject) -> None:
    store, clock = await opened(subject)
    alone = await claimed(store)
    await raises(InvalidArgument, alone.drive)
    item = await claimed(store, session=await done(store.session("s")))
    await raises(LeaseLost, (await done(store.work.get(item.id))).drive)
    clock.advance(31)
    await done(store.work.sweep())
    await raises(LeaseLost, item.drive)
    assert (await lease_of(store))[:2] == (None, 0)


@both_colours
async def test_an_item_drives_within_a_transaction(subject: Subject) -> None:
    store, _ = await opened(subject)
    item = await claimed(store, session=await done(store.session("s")))

    def several(tx: Any) -> Any:
        session = yield from tx.work.within(item).drive()
        yield from session.save(x=1)
        return session.fence

    assert await done(store.run(several)) == 1
    await raises(SessionBusy, partial(item.session.save, x=2))
    await done((await done(item.drive())).save(x=2))


@both_colours
async def test_another_item_that_wants_to_drive_waits_and_spends_no_retry(
    subject: Subject,
) -> None:
    store = await opened_now(subject)
    session = await done(store.session("s"))
    first = await done(store.work.submit("first", session=session))
    has_begun, may_end = threading.Event(), threading.Event()

    async def drives(item: Any) -> str:
        await done(item.drive())
        if item.type == "first":
            has_begun.set()
            await until(may_end.is_set, bool)
        return "drove"

    handlers = {"first": drives, "second": drives}
    async with running(store, handlers, poll_seconds=0.1):
        await until(has_begun.is_set, bool)
        second = await done(store.work.submit("second", session=session, max_retries=0))
        waiting = await until(lambda: store.work.get(second.id), lambda item: item.releases >= 2)
        assert "is driven by" in (waiting.error or "")
        may_end.set()
        first, second = [await ended(store, item.id) for item in (first, second)]
    assert (first.output, second.output) == ("drove", "drove")
    assert (second.retry_count, second.failures) == (0, 0)
    assert second.releases >= 2
    assert await done(session.history(kind="error_boundary")) == []


# Agents


@both_colours
async def test_an_agent_in_a_handler_drives_under_the_item(subject: Subject) -> None:
    store = await opened_now(subject)
    world = World(subject.directory)
    holders = []

    def listen(_: Any) -> None:
        with holdfast.open(**subject.place) as other:
            holders.append(other.find_session("s").info().holder)

    async def answer(item: Any) -> str:
        script = [[call("look", city="Oslo")], "done"]
        options: Any = {"tools": world.tools(), "on_progress": listen}
        agent = Agent(item.session, world.model(script), **options)
        if item.runtime.is_async:
            return (await agent.arun(item.input)).text
        return await asyncio.to_thread(lambda: agent.run(item.input).text)

    session = await done(store.session("s"))
    item = await done(store.work.submit("answer", "go", session=session))
    async with running(store, {"answer": answer}):
        found = await ended(store, item.id)
    assert (found.output, found.error) == ("done", None)
    assert {item.id in str(holder) for holder in holders} == {True}
    assert (await lease_of(store))[0] is None
    assert world.count("look") == 1


def _worker(
    place: dict[str, Any], world: World, options: dict[str, Any], colour: str, dies: bool
) -> None:
    """A process whose handler runs an agent with default settings; it may die in its tool."""
    signal.signal(signal.SIGINT, signal.default_int_handler)

    @holdfast.tool(effect="write", lease_seconds=1 if dies else None)
    def book(trip: str) -> str:
        """Book a trip."""
        world.note(f"book {trip}")
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return "booked"

    def agent(item: Any) -> Agent:
        script = [[call("book", trip="Oslo")], "done"]
        return Agent(item.session, world.model(script), tools=[book])

    def handler(item: Any) -> str:
        return agent(item).run(item.input, message_id=item.id).text

    async def async_handler(item: Any) -> str:
        return (await agent(item).arun(item.input, message_id=item.id)).text

    def made(store: Any, handler: Any) -> Any:
        worker: Any = Worker(store, {"answer": handler}, **options)
        if not dies:
            threading.Thread(target=_stop_when_done, args=(place, worker), daemon=True).start()
        return worker

    async def run_async() -> None:
        async with await holdfast.aopen(**place, durability="normal") as store:
            await made(store, async_handler).run()

    # Their leases are short, and the machine may stand still for as long.
    with unhurried():
        if colour == "async":
            asyncio.run(run_async())
            return
        with holdfast.open(**place, durability="normal") as store:
            made(store, handler).run()


def _stop_when_done(place: dict[str, Any], worker: Worker[Any]) -> None:
    with holdfast.open(**place) as store:
        while not all(item.completed_at for item in store.work.list()):
            threading.Event().wait(0.05)
    worker.stop()


def _survives(
    place: dict[str, Any], directory: Path, colour: str, *, dying: Any, next: Any
) -> None:
    world = World(directory)
    with holdfast.open(**place, durability="normal") as store:
        item = store.work.submit("answer", "go", session=store.session("s"))
    status, _ = run_child(lambda _: _worker(place, world, dying, colour, dies=True))
    assert status == -signal.SIGKILL
    status, _ = run_child(lambda _: _worker(place, world, next, colour, dies=False))
    assert status == 0
    with holdfast.open(**place) as store:
        found = store.work.get(item.id)
        assert (found.status, found.output) == ("completed", "done")
        assert (found.attempts, found.rescues, found.failures, found.retry_count) == (2, 1, 0, 1)
        assert store.find_session("s").info().holder is None
    assert world.count("asked") == 2
    assert world.count("book") == 2


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_an_agent_in_a_killed_worker_goes_on_in_the_next(
    place: dict[str, Any], tmp_path: Path, colour: str
) -> None:
    """The agent's settings are the defaults; only the lease of the worker that dies is short."""
    dying, next_one = {"lease_seconds": 2}, {"sweep_interval_seconds": 0.5}
    _survives(place, tmp_path, colour, dying=dying, next=next_one)


@pytest.mark.slow
@pytest.mark.parametrize("colour", ["sync", "async"])
def test_an_agent_in_a_killed_worker_goes_on_in_the_next_with_default_settings(
    place: dict[str, Any], tmp_path: Path, colour: str
) -> None:
    _survives(place, tmp_path, colour, dying={}, next={})
