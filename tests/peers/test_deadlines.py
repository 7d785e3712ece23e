"""Deadlines: counted from the commit of the ask, swept oldest first; late answers kept aside."""

from __future__ import annotations

from typing import Any

import holdfast
from holdfast.kernel.operation import Call
from holdfast.peers.answers import expire, find_due
from holdfast.testing.subject import Subject, done
from tests.conftest import InColour
from tests.peers.agents import claim, opened, planner, results, resume, status, waiting_items


async def sweep(store: Any) -> Any:
    return (await done(store.recover())).swept


def test_a_call_that_is_not_answered_in_time_is_answered_by_its_timeout(
    in_colour: InColour,
) -> None:
    async def case(subject: Subject) -> None:
        store, clock = await opened(subject)
        session = await planner(store)
        call = await done(session.ask("a", timeout_seconds=60))
        begun = await done((await claim(store, "a")).receive())
        assert call.deadline_at == clock.now_ms() + 60_000
        clock.advance(20)
        await done(session.pause())
        clock.advance(39.999)
        swept = await sweep(store)
        assert (swept.timed_out, swept.next_due_ms) == (0, 1)
        clock.advance(0.001)
        assert (await sweep(store)).timed_out == 1
        assert (await sweep(store)).timed_out == 0
        assert await status(store, call.id) == "cancelled"
        assert await done(store.answer(call.id, "too late", status="ok")) == "late"
        assert await done(store.answer(call.id, "later still")) == "duplicate"
        found = await done(store.peer_call(call.id))
        assert (found.state, found.late.result) == ("timeout", "too late")
        _, resumption = await resume(store)
        assert [answer.status for answer in resumption.answers] == ["timeout"]
        assert begun.session.id == call.id

    in_colour(case)


def test_zero_expires_at_once_and_never_only_when_it_is_said(in_colour: InColour) -> None:
    async def case(subject: Subject) -> None:
        store, clock = await opened(subject)
        session = await planner(store)
        await done(session.ask("a", timeout_seconds=0))
        answered = await done(session.pause())
        assert [answer.status for answer in answered.answers] == ["timeout"]
        call = await done(session.ask("a"))
        assert call.timeout_seconds == 300
        patient = await done(session.ask("b", timeout_seconds="never"))
        assert patient.deadline_at is None
        await done(session.pause())
        clock.advance(365 * 24 * 3600)
        assert (await sweep(store)).timed_out == 1
        assert await waiting_items(store, "planner") == []
        await done(store.answer(patient.id, "at last"))
        _, resumption = await resume(store)
        assert [answer.status for answer in resumption.answers] == ["timeout", "ok"]

    in_colour(case)


def test_progress_starts_the_timeout_anew(in_colour: InColour) -> None:
    async def case(subject: Subject) -> None:
        store, clock = await opened(subject)
        session = await planner(store)
        call = await done(session.ask("a", timeout_seconds=60))
        await done(session.pause())
        clock.advance(50)
        assert await done(store.progress(call.id, {"half": True}))
        clock.advance(50)
        assert (await sweep(store)).timed_out == 0
        found = await done(store.peer_call(call.id))
        assert (found.progress, found.deadline_at) == ({"half": True}, clock.now_ms() + 10_000)
        clock.advance(10)
        assert (await sweep(store)).timed_out == 1
        assert not await done(store.progress(call.id, "late"))

    in_colour(case)


def test_the_oldest_deadlines_are_swept_first_until_none_is_due(place: dict[str, Any]) -> None:
    clock = holdfast.VirtualClock()
    with holdfast.open(**place, clock=clock, durability="normal") as store:
        ids = []
        for number in (3, 1, 2):
            session = store.session(f"s{number}", agent="planner")
            ids.append(session.ask("a", timeout_seconds=number).id)
            session.pause()
        clock.advance(10)
        noun = next(each for each in store.runtime.nouns if each.due and "hf_asks" in each.due)
        swept = store.runtime.run_flow(noun.sweep(store.runtime, 1))
        assert (swept.timed_out, swept.has_more, swept.next_due_ms) == (1, True, 0)
        assert [store.peer_call(id).state for id in ids] == ["open", "timeout", "open"]
        assert store._sweep().timed_out == 2
        assert store._sweep().timed_out == 0


def test_a_sweep_that_comes_after_the_answer_changes_nothing(place: dict[str, Any]) -> None:
    clock = holdfast.VirtualClock()
    with holdfast.open(**place, clock=clock, durability="normal") as store:
        session = store.session("plan", agent="planner")
        answered, extended = (
            session.ask("a", timeout_seconds=1),
            session.ask("b", timeout_seconds=1),
        )
        session.pause()
        clock.advance(2)
        runtime = store.runtime
        found, _ = runtime.run(Call(find_due, runtime, (10,)))
        store.answer(answered.id, "in between")
        store.progress(extended.id, "still there")
        assert runtime.run(Call(expire, runtime, (found,))) == 0
        states = [store.peer_call(call.id).state for call in (answered, extended)]
        assert states == ["ok", "open"]


def test_a_timeout_of_the_last_ask_counts_like_its_answer(in_colour: InColour) -> None:
    async def case(subject: Subject) -> None:
        store, clock = await opened(subject)
        session = await planner(store)
        quick = await done(session.ask("a"))
        await done(session.ask("b", timeout_seconds=1))
        await done(session.pause(need=1))
        clock.advance(2)
        await sweep(store)
        assert await waiting_items(store, "planner") == []
        await done(store.answer(quick.id, "ok"))
        _, resumption = await resume(store)
        assert results(resumption.answers)[0] == ("ok", "ok")

    in_colour(case)


def test_a_lease_that_expires_is_an_error_only_when_no_retry_is_left(in_colour: InColour) -> None:
    async def case(subject: Subject) -> None:
        store, clock = await opened(subject)
        session = await planner(store)
        call = await done(session.ask("a", timeout_seconds="never"))
        await done(session.pause())
        for attempt in range(4):
            item = await claim(store, "a", lease_seconds=30)
            assert (item.retry_count, item.rescues) == (attempt, attempt)
            await done(item.receive())
            assert (await done(store.peer_call(call.id))).state == "open"
            clock.advance(31)
            await done(store.recover())
            clock.advance(60)
            await done(store.recover())
        found = await done(store.peer_call(call.id))
        assert found.state == "error"
        assert "lease expired" in found.answer.result
        assert (await done(store.work.get(f"request {call.id}"))).rescues == 4

    in_colour(case)
