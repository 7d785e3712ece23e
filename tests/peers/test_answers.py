"""Answers: each counts once, and the last one makes the session ready once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.peers.pauses import is_met
from holdfast.testing.subject import Subject, done, raises
from tests.checkpoints.colours import sql
from tests.conftest import InColour
from tests.peers.agents import claim, opened, planner, results, resume, serve, status, waiting_items


def test_the_last_answer_makes_the_session_ready_once_in_dispatch_order(
    in_colour: InColour,
) -> None:
    async def case(subject: Subject) -> None:
        store, _ = await opened(subject)
        session = await planner(store)
        first = await done(session.ask("researcher", {"q": 1}, correlation={"tool_call": "c_7"}))
        second = await done(session.ask("pricer", {"sku": 2}))
        parked = await done(session.pause({"step": 3}))
        assert isinstance(parked, holdfast.Parked)
        assert (await status(store, "plan"), parked.generation) == ("waiting", 1)
        request = await serve(store, "pricer", {"cents": 5})
        assert (request.input, request.user, request.session.id) == ({"sku": 2}, "ann", second.id)
        assert await waiting_items(store, "planner") == []
        await serve(store, "researcher", ["found"])
        assert await waiting_items(store, "planner") == ["resume"]
        _, resumption = await resume(store)
        assert results(resumption.answers) == [("ok", ["found"]), ("ok", {"cents": 5})]
        assert resumption.answers[0].correlation == {"tool_call": "c_7"}
        assert [answer.ask_id for answer in resumption.answers] == [first.id, second.id]
        assert (resumption.context, resumption.reason) == ({"step": 3}, "peers")
        assert await status(store, "plan") == "active"

    in_colour(case)


INDEXES = """
SELECT indexname, indexdef FROM pg_indexes
WHERE schemaname = %s AND tablename = 'hf_asks' AND indexname LIKE 'ix_%%'
"""


@asynccontextmanager
async def rows_reversed(store: Any, place: dict[str, Any]) -> AsyncIterator[None]:
    """Let calls be read in the reverse order, where a query asks for none."""
    if "namespace" not in place:
        await done(sql(store, "PRAGMA reverse_unordered_selects = 1"))
        yield
        return
    with psycopg.connect(place["url"], autocommit=True) as connection:
        connection.execute(f'SET search_path TO "{place["namespace"]}"')
        connection.execute("CREATE INDEX reverse ON hf_asks (number DESC)")
        connection.execute("CLUSTER hf_asks USING reverse")
        connection.execute("DROP INDEX reverse")
        # An index could give the order that is to be asked for.
        indexes = connection.execute(INDEXES, [place["namespace"]]).fetchall()
        for name, _ in indexes:
            connection.execute(f"DROP INDEX {name}")
        try:
            yield
        finally:
            for _, definition in indexes:
                connection.execute(definition)


def test_answers_come_in_dispatch_order_wherever_their_rows_are(
    in_colour: InColour, place: dict[str, Any]
) -> None:
    async def case(subject: Subject) -> None:
        store, clock = await opened(subject)
        session = await planner(store)
        calls = [await done(session.ask("peer", number)) for number in range(6)]
        for number in (4, 0):
            await done(store.answer(calls[number].id, number))
        await done(session.pause())
        for number in (5, 2, 3, 1):
            await done(store.answer(calls[number].id, number))
        other = await planner(store, "other")
        for number, call in reversed([(n, await done(other.ask("peer", n))) for n in range(6)]):
            await done(store.answer(call.id, number))
        async with rows_reversed(store, place):
            expected = [("ok", number) for number in range(6)]
            assert results((await done(other.pause())).answers) == expected
            item = await claim(store, "planner", lease_seconds=30)
            assert results((await done(item.resume())).answers) == expected
            for seconds in (31, 5):
                clock.advance(seconds)
                await done(store.recover())
            _, again = await resume(store)
            assert results(again.answers) == expected

    in_colour(case)


def test_an_answer_before_the_pause_is_not_lost(in_colour: InColour) -> None:
    async def case(subject: Subject) -> None:
        store, _ = await opened(subject)
        session = await planner(store)
        first = await done(session.ask("a", 1))
        second = await done(session.ask("b", 2))
        assert await done(store.answer(second.id, "early")) == "counted"
        assert isinstance(await done(session.pause()), holdfast.Parked)
        await done(store.answer(first.id, "then"))
        _, resumption = await resume(store)
        assert results(resumption.answers) == [("ok", "then"), ("ok", "early")]

    in_colour(case)


def test_with_all_answers_in_nothing_is_parked(in_colour: InColour) -> None:
    async def case(subject: Subject) -> None:
        store, _ = await opened(subject)
        session = await planner(store)
        for number in range(2):
            call = await done(session.ask("a", number))
            await done(store.answer(call.id, number))
        answered = await done(session.pause())
        assert results(answered.answers) == [("ok", 0), ("ok", 1)]
        assert (await status(store, "plan"), await waiting_items(store, "planner")) == (
            "active",
            [],
        )
        assert results((await done(session.pause())).answers) == []

    in_colour(case)


def test_a_duplicate_changes_nothing_and_an_unknown_ask_is_an_error(in_colour: InColour) -> None:
    async def case(subject: Subject) -> None:
        store, _ = await opened(subject)
        session = await planner(store)
        call = await done(session.ask("a"))
        other = await done(session.ask("b"))
        await done(session.pause())
        assert await done(store.answer(call.id, 1)) == "counted"
        assert await done(store.answer(call.id, 2)) == "duplicate"
        assert await done(store.answer(call.id, 1, status="error")) == "duplicate"
        found = await done(store.peer_call(call.id))
        assert (found.answer.result, found.late, found.state) == (1, None, "ok")
        assert await status(store, "plan") == "waiting"
        error = await raises(holdfast.AskNotFound, lambda: store.answer("nobody", 1))
        assert error.id == "nobody"
        await raises(holdfast.InvalidArgument, lambda: store.answer("\ud800", 1))
        await raises(holdfast.InvalidArgument, lambda: store.progress("\ud800", 1))
        [pause] = await done(store.pauses(state="waiting"))
        assert (pause.open_asks, pause.ok_asks) == (1, 1)
        await done(store.answer(other.id))
        assert await waiting_items(store, "planner") == ["resume"]

    in_colour(case)


NEEDS: dict[str, tuple[Any, list[Any], int]] = {
    # The need, the answers that come, and with which of them the session is ready.
    "all, whatever their status": ("all", ["error", "ok", "error"], 3),
    "any": ("any", ["error", "ok"], 2),
    "two of three": (2, ["ok", "error", "ok"], 3),
    "two of three, early": (2, ["ok", "ok"], 2),
    "two of three can no longer come": (2, ["error", "error"], 2),
    "none came": ("any", ["error", "error", "cancelled"], 3),
}


@pytest.mark.parametrize("name", NEEDS)
def test_a_pause_is_ready_as_soon_as_its_need_is_met_or_cannot_be(
    name: str, place: dict[str, Any]
) -> None:
    need, statuses, at = NEEDS[name]
    with holdfast.open(**place, durability="normal") as store:
        session = store.session("plan", agent="planner")
        calls = [session.ask("a", number) for number in range(3)]
        session.pause(need=need)
        for number, each in enumerate(statuses, 1):
            store.answer(calls[number - 1].id, each, status=each)
            [pause] = store.pauses()
            assert pause.state == ("ready" if number == at else "waiting"), number
        [item] = store.work.claim("w", queues="agent:planner")
        answers = item.resume().answers
        rest = ["cancelled"] * (3 - len(statuses))
        assert [answer.status for answer in answers] == [*statuses, *rest]
        assert store.asks(state="open") == []
        assert [each for each in store.sessions(status="active") if each.agent == "a"] == []


def test_the_need_is_met_by_enough_that_are_ok_or_when_too_few_can_come() -> None:
    assert is_met(None, 0, 0)
    assert not is_met(None, 1, 5)
    assert is_met(2, 3, 2)
    assert not is_met(2, 1, 1)
    assert is_met(2, 0, 1)
    assert is_met(2, 1, 0)


def test_the_rest_can_be_kept_for_the_next_pause(in_colour: InColour) -> None:
    async def case(subject: Subject) -> None:
        store, _ = await opened(subject)
        session = await planner(store)
        quick = await done(session.ask("a", "quick"))
        slow = await done(session.ask("a", "slow"))
        await done(session.pause(need="any", rest="keep"))
        await done(store.answer(quick.id, 1))
        item, resumption = await resume(store)
        assert results(resumption.answers) == [("ok", 1)]
        assert isinstance(await done(resumption.session.pause()), holdfast.Parked)
        assert (await done(store.work.get(item.id))).output["paused"]
        await done(store.answer(slow.id, 2))
        _, again = await resume(store)
        assert (results(again.answers), again.generation) == ([("ok", 2)], 2)

    in_colour(case)


def test_a_session_pauses_again_and_again(in_colour: InColour) -> None:
    async def case(subject: Subject) -> None:
        store, _ = await opened(subject)
        session = await planner(store)
        item: Any = None
        for generation in range(1, 4):
            call = await done(session.ask("a", generation))
            parked = await done(session.pause({"n": generation}))
            assert parked.generation == generation
            await done(store.answer(call.id, generation))
            item, resumption = await resume(store)
            assert results(resumption.answers) == [("ok", generation)]
            session = resumption.session
        await done(item.complete("done"))
        states = [pause.state for pause in await done(store.pauses())]
        assert states == ["closed", "closed", "closed"]

    in_colour(case)


def test_a_peer_that_fails_for_good_answers_with_its_error(in_colour: InColour) -> None:
    async def case(subject: Subject) -> None:
        store, _ = await opened(subject)
        session = await planner(store)
        call = await done(session.ask("a"))
        await done(session.pause())
        item = await claim(store, "a")
        await done(item.receive())
        await done(item.fail("no such city", retry=False))
        _, resumption = await resume(store)
        assert results(resumption.answers) == [("error", "no such city")]
        assert await status(store, call.id) == "failed"

    in_colour(case)


def test_a_peer_that_ends_without_an_answer_is_an_error(in_colour: InColour) -> None:
    async def case(subject: Subject) -> None:
        store, _ = await opened(subject)
        session = await planner(store)
        await done(session.ask("a"))
        await done(session.pause())
        request = await done((await claim(store, "a")).receive())
        await done(request.session.end())
        _, resumption = await resume(store)
        [(kind, text)] = results(resumption.answers)
        assert (kind, "without an answer" in text) == ("error", True)

    in_colour(case)


def test_a_retried_peer_answers_once(in_colour: InColour) -> None:
    async def case(subject: Subject) -> None:
        store, clock = await opened(subject)
        session = await planner(store)
        await done(session.ask("a", timeout_seconds=3600))
        await done(session.pause())
        item = await claim(store, "a", lease_seconds=30)
        await done(item.receive())
        clock.advance(31)
        await done(store.recover())
        clock.advance(5)
        await done(store.recover())
        await serve(store, "a", "second attempt")
        await raises(holdfast.LeaseLost, lambda: item.complete("zombie"))
        _, resumption = await resume(store)
        assert results(resumption.answers) == [("ok", "second attempt")]

    in_colour(case)


def test_a_person_may_answer_for_a_peer_that_has_not_begun(in_colour: InColour) -> None:
    async def case(subject: Subject) -> None:
        store, _ = await opened(subject)
        session = await planner(store)
        call = await done(session.ask("a"))
        await done(session.pause())
        await done(store.answer(call.id, "by hand"))
        assert await waiting_items(store, "a") == []
        assert await status(store, call.id) == "cancelled"
        _, resumption = await resume(store)
        assert results(resumption.answers) == [("ok", "by hand")]

    in_colour(case)


def test_both_peers_artifacts_are_there_after_the_pause_and_go_out_with_the_answer(
    in_colour: InColour,
) -> None:
    async def case(subject: Subject) -> None:
        store, _ = await opened(subject)
        caller = await done(store.session("top", agent="boss"))
        await done(caller.ask("planner", "a trip"))
        await done(caller.pause())
        item = await claim(store, "planner")
        session = (await done(item.receive())).session
        first = await done(session.add_artifact("draft", data={"v": 1}))
        # A retried attempt adds it again.
        assert await done(session.add_artifact("draft", data={"v": 1})) == first
        await done(session.add_artifact("draft", data={"v": 2}))
        await done(session.add_artifact("secret", data="kept", returned=False))
        calls = [await done(session.ask("a", number)) for number in range(2)]
        await done(session.pause())
        for number, call in enumerate(calls):
            made = holdfast.Artifact(name=f"map {number}", uri=f"file:///{number}", data=None)
            await done(store.answer(call.id, number, artifacts=[made]))
        item, resumption = await resume(store)
        names = ["draft", "draft", "secret", "map 0", "map 1"]
        assert [each.name for each in resumption.artifacts] == names
        assert [each.version for each in resumption.artifacts] == [1, 2, 1, 1, 1]
        await done(item.complete("planned"))
        _, final = await resume(store, "boss")
        assert [each.name for each in final.answers[0].artifacts] == [
            "draft", "draft", "map 0", "map 1",
        ]  # fmt: skip
        assert final.answers[0].artifacts[1].data == {"v": 2}

    in_colour(case)


def test_an_artifact_that_cannot_be_stored_is_refused_before_anything_is_written(
    place: dict[str, Any],
) -> None:
    wrong: list[Any] = [
        holdfast.Artifact(name="", data=1),
        holdfast.Artifact(name="both", data=1, uri="file:///x"),
        holdfast.Artifact(name="neither"),
        holdfast.Artifact(name="n", data=1, version=0),
        holdfast.Artifact(name="n", data={1}),
        {"name": "a dict"},
    ]
    with holdfast.open(**place, durability="normal") as store:
        session = store.session("plan", agent="planner")
        call = session.ask("a")
        for each in wrong:
            with pytest.raises(holdfast.InvalidArgument):
                store.answer(call.id, artifacts=[each])
        for given in ({"data": 1, "uri": "x"}, {}, {"uri": "x" * 1_001}):
            with pytest.raises(holdfast.InvalidArgument):
                session.add_artifact("n", **given)
        assert (store.peer_call(call.id).state, session.artifacts()) == ("open", [])


def test_peers_share_the_state_of_the_whole_tree(in_colour: InColour) -> None:
    async def case(subject: Subject) -> None:
        store, _ = await opened(subject)
        session = await planner(store)
        await done(session.state.set("budget", 7))
        await done(session.ask("a"))
        await done(session.pause())
        request = await done((await claim(store, "a")).receive())
        assert request.session.root_id == "plan"
        assert await done(request.session.state.get("budget")) == 7

    in_colour(case)


def test_two_items_of_a_session_that_end_together_answer_once(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        asker = store.session("asker", agent="asker")
        call, other = asker.ask("peer"), asker.ask("another")
        parked = asker.pause()
        [request] = store.work.claim("one", queues="agent:peer")
        request.receive()
        gone = {"pause": "gone"}
        store.work.submit("resume", gone, session=call.id, queue="agent:peer")
        [extra] = store.work.claim("two", queues="agent:peer")
        assert store.work.complete_many([(request, "first"), (extra, "second")]) == [True, True]
        answer = store.peer_call(call.id).answer
        assert answer is not None
        assert answer.result == "first"
        assert store.find_session(call.id).info().status == "completed"
        [pause] = asker.pauses()
        assert (pause.id, pause.state, pause.open_asks) == (parked.pause_id, "waiting", 1)
        store.answer(other.id, "last")
        assert [each.state for each in asker.pauses()] == ["ready"]


def test_of_items_that_end_together_one_whose_lease_was_lost_answers_nothing(
    place: dict[str, Any],
) -> None:
    with holdfast.open(**place) as store:
        asker = store.session("asker", agent="asker")
        calls = [asker.ask("peer", number) for number in range(2)]
        asker.pause()
        stale, held = store.work.claim("one", queues="agent:peer", limit=2)
        for item in (stale, held):
            item.receive()
        store.work.release(stale.id, reason="taken away")
        assert store.work.complete_many([(stale, "zombie"), (held, "fine")]) == [False, True]
        assert [store.peer_call(call.id).state for call in calls] == ["open", "ok"]
        assert store.find_session(calls[0].id).info().status == "active"
        assert [(each.state, each.open_asks) for each in asker.pauses()] == [("waiting", 1)]


def test_two_answers_that_come_together_and_are_each_enough_make_ready_once(
    place: dict[str, Any],
) -> None:
    with holdfast.open(**place) as store:
        asker = store.session("asker", agent="asker")
        asker.pause(need="any", asks=[holdfast.Ask("peer", number) for number in range(2)])
        items = store.work.claim("one", queues="agent:peer", limit=2)
        for item in items:
            item.receive()
        assert store.work.complete_many([(item, "came") for item in items]) == [True, True]
        assert [call.state for call in asker.asks()] == ["ok", "ok"]
        kinds = [event.kind for event in store.events("asker")]
        assert kinds.count("pause_ready") == 1
        assert len(store.work.list(type="resume")) == 1
