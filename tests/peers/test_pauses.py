"""Pauses: a waiting session holds nothing, goes on once, and is handed the same after a crash."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest

import holdfast
from holdfast.peers.asks import require_asks
from holdfast.testing.subject import Subject, done, raises
from tests.checkpoints.colours import sql
from tests.conftest import InColour
from tests.peers.agents import (
    claim,
    opened,
    planner,
    results,
    resume,
    serve,
    states,
    status,
    waiting_items,
)


def test_a_waiting_session_holds_no_lease_and_its_driver_is_fenced(in_colour: InColour) -> None:
    async def case(subject: Subject) -> None:
        store, _ = await opened(subject)
        session = await planner(store)
        driven = await done(session.drive())
        await done(driven.ask("a"))
        assert isinstance(await done(driven.pause()), holdfast.Parked)
        info = await done(session.info())
        assert (info.status, info.holder, info.is_driven) == ("waiting", None, False)
        await raises(holdfast.LeaseLost, lambda: driven.save(late=1))
        await done(driven.close())

    in_colour(case)


def test_a_pause_completes_the_item_that_led_to_it(in_colour: InColour) -> None:
    async def case(subject: Subject) -> None:
        store, clock = await opened(subject)
        caller = await planner(store, "top")
        call = await done(caller.ask("planner", "trip"))
        await done(caller.pause())
        item = await claim(store, "planner", lease_seconds=30)
        session = (await done(item.receive())).session
        await done(session.ask("a", timeout_seconds="never"))
        parked = await done(session.pause())
        assert item.status == "completed"
        stored = await done(store.work.get(item.id))
        assert stored.output == {"paused": parked.pause_id}
        # Its lease has gone with it: no sweep runs it again, and the call is still open.
        clock.advance(60)
        assert (await done(store.recover())).swept.requeued == 0
        assert (await done(store.peer_call(call.id))).state == "open"
        await serve(store, "a", 1)
        resumed, _ = await resume(store)
        await done(resumed.complete("planned"))
        assert (await done(store.peer_call(call.id))).answer.result == "planned"

    in_colour(case)


def test_a_zombie_cannot_pause(in_colour: InColour) -> None:
    async def case(subject: Subject) -> None:
        store, clock = await opened(subject)
        session = await planner(store)
        await done(session.ask("a", timeout_seconds="never"))
        await done(session.pause())
        zombie = (await done((await claim(store, "a", lease_seconds=30)).receive())).session
        for seconds in (31, 5):
            clock.advance(seconds)
            await done(store.recover())
        await done((await claim(store, "a")).receive())
        await raises(holdfast.LeaseLost, lambda: zombie.ask("b"))
        await raises(holdfast.LeaseLost, zombie.pause)
        assert await done(store.asks(agent="b")) == []

    in_colour(case)


def test_a_crash_while_resuming_hands_over_the_same_answers(in_colour: InColour) -> None:
    async def case(subject: Subject) -> None:
        store, clock = await opened(subject)
        session = await planner(store)
        call = await done(session.ask("a"))
        await done(session.pause({"k": 1}))
        await done(store.answer(call.id, "answer"))
        item = await claim(store, "planner", lease_seconds=30)
        first = await done(item.resume())
        await done(first.session.record("manual_checkpoint", {"evidence": "does not close it"}))
        assert await states(session) == ["resumed"]
        for seconds in (31, 5):
            clock.advance(seconds)
            await done(store.recover())
        item = await claim(store, "planner", lease_seconds=30)
        second = await done(item.resume())
        assert results(second.answers) == results(first.answers)
        assert (second.context, second.is_consumed) == ({"k": 1}, False)
        await done(second.session.save(turn=1))
        assert await states(session) == ["closed"]
        for seconds in (31, 10):
            clock.advance(seconds)
            await done(store.recover())
        again, third = await resume(store)
        assert third.is_consumed
        await done(again.complete())
        assert await waiting_items(store, "planner") == []
        assert await states(session) == ["closed"]

    in_colour(case)


def test_only_a_turn_after_the_resumption_closes_the_pause(in_colour: InColour) -> None:
    async def case(subject: Subject) -> None:
        store, _ = await opened(subject)
        session = await planner(store)
        await done(session.save(turn=1))
        call = await done(session.ask("a"))
        await done(session.pause({"k": 1}))
        await done(store.answer(call.id, "answer"))
        other = await done(store.work.submit("chat", session=session))
        [item] = await done(store.work.claim("w", queues="chat"))
        assert item.id == other.id
        driven = await done(item.drive())
        await done(driven.save(turn=2))
        await done(item.complete())
        assert await states(session) == ["ready"]
        _, resumption = await resume(store)
        assert (results(resumption.answers), resumption.is_consumed) == ([("ok", "answer")], False)
        await done(resumption.session.append("notes", ["a turn too"]))
        assert await states(session) == ["closed"]
        await done(resumption.session.append("notes", ["another"]))
        await done(resumption.session.ask("a", id="again"))
        await done(store.answer("again", "at once"))
        answered = await done(resumption.session.pause())
        assert results(answered.answers) == [("ok", "at once")]
        assert await states(session) == ["closed", "resumed"]
        await done(resumption.session.save(turn=3))
        assert await states(session) == ["closed", "closed"]

    in_colour(case)


def test_an_attempt_that_is_repeated_makes_no_call_twice(in_colour: InColour) -> None:
    async def case(subject: Subject) -> None:
        store, clock = await opened(subject)
        caller = await planner(store, "top")
        await done(caller.ask("planner", "trip", timeout_seconds="never"))
        await done(caller.pause())
        ids: list[list[str]] = []
        for seconds in (31, 5):
            session = (
                await done((await claim(store, "planner", lease_seconds=30)).receive())
            ).session
            asked = [await done(session.ask("a", {"n": 1})) for _ in range(2)]
            ids.append([call.id for call in asked])
            clock.advance(seconds)
            await done(store.recover())
            clock.advance(seconds)
            await done(store.recover())
        assert ids[0] == ids[1]
        assert len(set(ids[0])) == 2
        assert len(await done(store.asks(agent="a"))) == 2

    in_colour(case)


def test_an_ask_that_is_repeated_belongs_to_the_next_pause(in_colour: InColour) -> None:
    async def case(subject: Subject) -> None:
        store, _ = await opened(subject)
        session = await planner(store)
        call = await done(session.ask("a", 1, id="mine"))
        await done(store.answer("mine", "once"))
        assert results((await done(session.pause())).answers) == [("ok", "once")]
        again = await done(session.ask("a", 1, id="mine"))
        assert (again.number, again.state) == (call.number, "ok")
        assert results((await done(session.pause())).answers) == [("ok", "once")]
        await raises(holdfast.RequestMismatch, lambda: session.ask("a", 2, id="mine"))
        await raises(holdfast.RequestMismatch, lambda: session.ask("b", 1, id="mine"))
        await raises(holdfast.InvalidArgument, lambda: session.ask("b", 1, id="plan"))
        assert len(await waiting_items(store, "a")) == 0

    in_colour(case)


def test_a_pause_asks_and_waits_in_one_commit(in_colour: InColour) -> None:
    async def case(subject: Subject) -> None:
        store, clock = await opened(subject)
        session = await planner(store)
        kept = await done(session.ask("a", "before"))
        asks = [
            holdfast.Ask("a", 1, correlation={"tool_call": "c_1"}),
            holdfast.Ask("b", 2, timeout_seconds=5, id="mine"),
        ]
        parked = await done(session.pause({"step": 1}, asks=asks))
        assert isinstance(parked, holdfast.Parked)
        calls = await done(session.asks())
        assert [(call.agent, call.input) for call in calls] == [("a", "before"), ("a", 1), ("b", 2)]
        assert (calls[0].id, calls[2].id) == (kept.id, "mine")
        assert [call.timeout_seconds for call in calls] == [300, 300, 5]
        clock.advance(6)
        await done(store.recover())
        for call in calls[:2]:
            await done(store.answer(call.id, "answer"))
        _, resumption = await resume(store)
        assert [each.status for each in resumption.answers] == ["ok", "ok", "timeout"]
        assert resumption.answers[1].correlation == {"tool_call": "c_1"}
        # One that expires at once is answered at once.
        at_once = [holdfast.Ask("a", 3, timeout_seconds=0)]
        answered = await done(resumption.session.pause(asks=at_once))
        assert [each.status for each in answered.answers] == ["timeout"]

    in_colour(case)


def test_asks_of_a_pause_that_cannot_be_made_are_refused_before_anything_is_written(
    in_colour: InColour,
) -> None:
    async def case(subject: Subject) -> None:
        store, _ = await opened(subject)
        session = await planner(store)
        wrong: list[Any] = [
            "a",
            [{"agent": "a"}],
            [holdfast.Ask("")],
            [holdfast.Ask("a", timeout_seconds=-1)],
            [holdfast.Ask("a", id="x" * 300)],
            [holdfast.Ask("a", id="x"), holdfast.Ask("b", id="x")],
            [holdfast.Ask("a"), holdfast.Ask("a", id="plan")],
        ]
        for asks in wrong:
            await raises(holdfast.InvalidArgument, partial(session.pause, asks=asks))
        many = [holdfast.Ask("a")] * 10_001
        for asking in (session.pause, partial(session.answers, grace_seconds=0)):
            too_many = await raises(holdfast.LimitExceeded, partial(asking, asks=many))
            assert too_many.fields == {"limit": 10_000, "actual": 10_001}
        assert len(require_asks(many[1:])) == 10_000
        bad = [holdfast.Ask("a", {1, 2})]
        await raises(holdfast.InvalidValue, lambda: session.pause(asks=bad))
        assert await done(session.asks()) == []
        assert await status(store, "plan") == "active"
        assert await waiting_items(store, "a") == []

    in_colour(case)


def test_an_attempt_that_is_repeated_makes_no_ask_of_its_pause_twice(in_colour: InColour) -> None:
    async def case(subject: Subject) -> None:
        store, clock = await opened(subject)
        await done(store.request("planner", request_id="r"))
        item = await claim(store, "planner", lease_seconds=30)
        session = (await done(item.receive())).session
        made = [(await done(session.ask("a", 1))).id for _ in range(2)]
        late = await done(session.ask("b", timeout_seconds=900))
        for seconds in (31, 60):
            clock.advance(seconds)
            await done(store.recover())
        again = await claim(store, "planner")
        session = (await done(again.receive())).session
        asks = [*[holdfast.Ask("a", 1)] * 2, holdfast.Ask("b", timeout_seconds=900)]
        await done(session.pause(asks=[*asks, holdfast.Ask("a", 1)]))
        calls = [call.id for call in await done(session.asks())]
        assert calls[:3] == [*made, late.id]
        assert len(set(calls)) == 4

    in_colour(case)


def test_who_cannot_wait_is_told(in_colour: InColour) -> None:
    async def case(subject: Subject) -> None:
        store, _ = await opened(subject)
        nobody = await done(store.session("nobody"))
        await done(nobody.ask("a"))
        error = await raises(holdfast.InvalidArgument, nobody.pause)
        assert "has no agent" in str(error)
        session = await planner(store)
        await done(session.ask("a"))
        for need in (2, 0, "most", True):
            await raises(holdfast.InvalidArgument, partial(session.pause, need=need))
        await raises(holdfast.InvalidArgument, lambda: session.pause(rest="drop"))
        await raises(holdfast.InvalidArgument, lambda: session.ask("a", timeout_seconds=-1))
        await raises(holdfast.InvalidArgument, lambda: session.ask("a", timeout_seconds=None))
        await raises(holdfast.InvalidValue, lambda: session.ask("a", {1, 2}))
        await done(session.pause())
        for refused in (lambda: session.ask("a"), session.pause):
            await raises(holdfast.SessionWaiting, refused)

    in_colour(case)


def test_a_sleep_ends_when_it_is_due(in_colour: InColour) -> None:
    async def case(subject: Subject) -> None:
        store, clock = await opened(subject)
        session = await planner(store)
        until = datetime.fromtimestamp(clock.now_ms() / 1000 + 90, UTC)
        await done(session.sleep(until, context="later"))
        [pause] = await done(store.pauses(reason="time"))
        assert (pause.wakes_at, pause.state) == (clock.now_ms() + 90_000, "waiting")
        swept = (await done(store.recover())).swept
        assert (swept.promoted, swept.next_due_ms) == (0, 90_000)
        assert await done(store.work.claim("w", queues="agent:planner")) == []
        clock.advance(90)
        assert (await done(store.recover())).swept.promoted == 1
        _, resumption = await resume(store)
        assert (resumption.reason, resumption.context) == ("time", "later")
        assert await status(store, "plan") == "active"

    in_colour(case)


@pytest.mark.parametrize("is_approved", [True, False])
def test_a_person_decides_once_and_the_session_goes_on(
    is_approved: bool, in_colour: InColour
) -> None:
    async def case(subject: Subject) -> None:
        store, _ = await opened(subject)
        session = await planner(store)
        parked = await done(session.wait_for_approval({"delete": "all"}, context=1))
        assert (await status(store, "plan"), await waiting_items(store, "planner")) == (
            "waiting",
            [],
        )
        right, wrong = store.approve, store.reject
        if not is_approved:
            right, wrong = wrong, right
        await done(right(parked.pause_id, by="ann", note="why not"))
        await done(right(parked.pause_id, by="ann", note="again, a lost reply"))
        await raises(holdfast.Conflict, lambda: wrong(parked.pause_id, by="bob"))
        item, resumption = await resume(store)
        decision = resumption.decision
        assert (decision.is_approved, decision.by, decision.note) == (is_approved, "ann", "why not")
        await done(item.complete())
        records = await done(session.history(kind="approval_point"))
        assert [sorted(record.data) for record in records] == [
            ["by", "decision", "note", "pause"],
            ["pause", "question"],
        ]
        audited = [each.action for each in await done(store.audit.list())]
        assert audited == ["approved" if is_approved else "rejected"]
        await raises(holdfast.NotFound, lambda: store.approve("nobody", by="ann"))

    in_colour(case)


def test_only_an_approval_is_approved(in_colour: InColour) -> None:
    async def case(subject: Subject) -> None:
        store, clock = await opened(subject)
        session = await planner(store)
        parked = await done(session.sleep(clock.now_ms() + 1000))
        await raises(holdfast.InvalidArgument, lambda: store.approve(parked.pause_id, by="ann"))

    in_colour(case)


def test_quick_peers_are_waited_for_in_memory_and_slow_ones_let_go(in_colour: InColour) -> None:
    async def case(subject: Subject) -> None:
        store = await subject.open(durability="normal")
        session = await planner(store)
        call = await done(session.ask("a"))

        def answered() -> Any:
            return store.answer(call.id, "quick")

        def waited() -> Any:
            return session.answers(grace_seconds=60)

        outcome, _ = await subject.together([waited, answered])
        assert results(outcome.answers) == [("ok", "quick")]
        await done(session.ask("a", timeout_seconds=0.05))
        outcome = await done(session.answers(grace_seconds=60))
        assert [answer.status for answer in outcome.answers] == ["timeout"]
        await done(session.ask("a"))
        assert isinstance(await done(session.answers(grace_seconds=0.02)), holdfast.Parked)

    in_colour(case)


def test_who_drives_by_hand_goes_on_in_place_of_the_item(in_colour: InColour) -> None:
    async def case(subject: Subject) -> None:
        store, _ = await opened(subject)
        session = await planner(store)
        assert await done(session.resumption()) is None
        call = await done(session.ask("a"))
        await done(session.pause({"k": 1}))
        assert await done(session.resumption()) is None
        await done(store.answer(call.id, "in"))
        driven = await done(session.drive())
        resumption = await done(driven.resumption())
        assert (results(resumption.answers), resumption.context) == ([("ok", "in")], {"k": 1})
        info = await done(session.info())
        assert (info.status, info.is_driven) == ("active", True)
        assert await waiting_items(store, "planner") == []
        await done(driven.save(turn=1))
        assert (await done(driven.resumption())).is_consumed
        await done(driven.close())

    in_colour(case)


def test_a_session_that_asks_nobody_writes_no_row_here(place: dict[str, Any]) -> None:
    texts: list[str] = []
    hooks = holdfast.kernel.driver.Hooks(probe=lambda point: texts.append(point.sql))
    with holdfast.open(**place, hooks=hooks, durability="normal") as store:
        session = store.session("alone", agent="planner")
        with session.drive() as driven:
            driven.append("transcript", ["hello"])
            driven.state.set("k", 1)
        store.work.submit("mail", session=session)
        [item] = store.work.claim("w")
        item.drive().save(x=1)
        item.complete()
        session.end()
        written = [
            text
            for text in texts
            if any(table in text for table in ("hf_asks", "hf_pauses", "hf_artifacts"))
            and not text.lstrip().startswith("SELECT")
        ]
        assert written == []
        for table in ("hf_asks", "hf_pauses", "hf_artifacts"):
            assert sql(store, f"SELECT 1 FROM {table}") == []


def test_the_newest_calls_and_pauses_are_read_in_parts(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        session: Any = store.session("asker", agent="planner")
        store.session("other").ask("weather", -1)
        for number in range(5):
            session.ask("weather", number)
            parked = session.wait_for_approval(number)
            store.approve(parked.pause_id, by="ada")
            [item] = store.work.claim("an instance", queues=["agent:planner"])
            session = item.resume().session
        calls, pauses = session.asks(), session.pauses()
        assert [call.input for call in calls] == list(range(5))
        assert [pause.question for pause in pauses] == list(range(5))
        assert session.asks(last=3) == calls[-3:]
        assert session.asks(last=2, before=calls[4].number) == calls[2:4]
        assert session.asks(before=calls[2].number) == calls[:2]
        assert session.pauses(last=2) == pauses[-2:]
        assert session.pauses(last=2, before=pauses[3].generation) == pauses[1:3]
        for wrong in ({"last": 0}, {"last": 1_001}, {"before": 0}):
            with pytest.raises(holdfast.InvalidArgument):
                session.asks(**wrong)


PAUSES: dict[str, Callable[[holdfast.Session], object]] = {
    "asks of the pause": lambda session: session.pause(asks=[holdfast.Ask("peer")]),
    "an earlier ask": lambda session: (session.ask("peer"), session.pause())[1],
    "an approval": lambda session: session.wait_for_approval("may I?"),
    "a sleep": lambda session: session.sleep(session.info().updated_at + 3_600_000),
}


@pytest.mark.parametrize("pause", PAUSES.values(), ids=PAUSES)
def test_a_repeated_attempt_pauses_in_a_process_that_has_not_read_the_session(
    pause: Callable[[holdfast.Session], object], place: dict[str, Any]
) -> None:
    with holdfast.open(**place) as first, holdfast.open(**place) as second:
        first.request("planner", request_id="r")
        [item] = first.work.claim("one", queues="agent:planner")
        item.receive()
        # The failure is a version of the session that the second process does not know.
        item.fail("again", delay_seconds=0)
        [item] = second.work.claim("two", queues="agent:planner")
        pause(item.receive().session)
        info = second.find_session("r").info()
        assert (info.status, info.holder) == ("waiting", None)
        assert second.work.get(item.id).status == "completed"
        with pytest.raises(holdfast.LeaseLost):
            item.complete("too late")


def test_a_session_that_serves_nobody_is_free_when_its_resumption_is_completed(
    place: dict[str, Any],
) -> None:
    with holdfast.open(**place) as store:
        session = store.session("plan", agent="planner")
        store.answer(session.ask("peer").id, "early")
        call = session.ask("peer")
        session.pause()
        store.answer(call.id, "last")
        [item] = store.work.claim("one", queues="agent:planner")
        item.resume()
        item.complete("done")
        info = session.info()
        assert (info.status, info.holder) == ("active", None)
        session.save(by="anybody")


@pytest.mark.parametrize("ids", [["known", "new"], ["new"]], ids=["again", "not again"])
def test_a_call_that_was_made_before_counts_once_with_those_that_its_pause_makes(
    ids: list[str], place: dict[str, Any]
) -> None:
    with holdfast.open(**place) as store:
        session = store.session("plan", agent="planner")
        session.ask("peer", id="known")
        session.pause(asks=[holdfast.Ask("peer", id=id) for id in ids])
        assert [(each.state, each.open_asks) for each in session.pauses()] == [("waiting", 2)]
        for id in ("known", "new"):
            store.answer(id, "came")
        assert [(each.state, each.open_asks) for each in session.pauses()] == [("ready", 0)]


def test_a_repeated_attempt_that_waits_in_memory_makes_no_ask_twice(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        store.request("planner", request_id="r")
        asks = [holdfast.Ask("peer", "city")]
        [item] = store.work.claim("one", queues="agent:planner")
        with pytest.raises(holdfast.InvalidArgument, match="is 2, but the pause is for 1 ask"):
            item.receive().session.answers(grace_seconds=0, need=2, asks=asks)
        item.fail("again", delay_seconds=0)
        [item] = store.work.claim("two", queues="agent:planner")
        item.receive().session.answers(grace_seconds=0, asks=asks)
        assert [call.input for call in store.find_session("r").asks()] == ["city"]


def test_the_item_of_a_pause_is_cancelled_when_the_pause_is_closed(in_colour: InColour) -> None:
    """Also if an attempt at it has begun: nothing resumes from a pause that is over."""

    async def case(subject: Subject) -> None:
        store, clock = await opened(subject)
        for index, close in enumerate(("end", "pause", "cancel", "rewind")):
            session = await planner(store, f"plan {index}")
            await done(session.save(step=1))
            await done(session.ask("a"))
            await done(session.pause())
            await serve(store, "a", "sun")
            item, _ = await resume(store)
            if close == "rewind":
                clock.advance(3_600)
                await done(session.rewind(1))
            else:
                await done(item.fail("again", delay_seconds=60))
                await _close(session, close)
            [pause] = [each for each in await done(session.pauses()) if each.generation == 1]
            state = "cancelled" if close == "rewind" else "closed"
            assert (close, pause.state) == (close, state)
            left = await done(store.work.get(item.id))
            assert (close, left.status) == (close, "cancelled")
            assert await waiting_items(store, "planner") == []

    in_colour(case)


async def _close(session: Any, how: str) -> None:
    if how == "end":
        await done(session.end())
    elif how == "cancel":
        await done(session.cancel())
    else:
        await done(session.ask("b", timeout_seconds="never"))
        await done(session.pause())
