"""What becomes of calls and pauses when their sessions are cancelled, ended, rewound or deleted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.peers.noun import CANCEL_PAUSES
from holdfast.testing.subject import Subject, done, raises
from tests.checkpoints.colours import sql
from tests.conftest import InColour
from tests.peers.agents import claim, opened, planner, results, resume, serve, status, waiting_items


def test_cancelling_reaches_every_open_peer_and_late_answers_change_nothing(
    in_colour: InColour,
) -> None:
    async def case(subject: Subject) -> None:
        store, _ = await opened(subject)
        top = await planner(store, "top")
        call = await done(top.ask("planner"))
        await done(top.pause())
        item = await claim(store, "planner")
        session = (await done(item.receive())).session
        running = await done(session.ask("a", 1))
        queued = await done(session.ask("b", 2))
        await done(session.pause())
        peer = await claim(store, "a")
        request = await done(peer.receive())
        cancelled = await done((await done(store.find_session(call.id))).cancel())
        assert set(cancelled) == {call.id, running.id, queued.id}
        for each in (running, queued):
            found = await done(store.peer_call(each.id))
            assert (found.state, await status(store, each.id)) == ("cancelled", "cancelled")
        await raises(holdfast.LeaseLost, lambda: request.session.save(x=1))
        assert await done(store.answer(running.id, "late")) == "late"
        assert await waiting_items(store, "b") == []
        # Whoever asked is told, and goes on.
        _, resumption = await resume(store)
        assert [answer.status for answer in resumption.answers] == ["cancelled"]
        assert await done(store.pauses(state="waiting")) == []

    in_colour(case)


def test_cancelling_a_ready_session_wins_or_loses_against_its_resumption(
    in_colour: InColour,
) -> None:
    async def case(subject: Subject) -> None:
        store, _ = await opened(subject)
        session = await planner(store)
        call = await done(session.ask("a"))
        await done(session.pause())
        await done(store.answer(call.id))
        item, resumption = await resume(store)
        await done(session.cancel())
        await raises(holdfast.LeaseLost, lambda: resumption.session.save(x=1))
        await raises(holdfast.LeaseLost, item.complete)
        assert await status(store, "plan") == "cancelled"
        late = await planner(store, "late")
        call = await done(late.ask("a"))
        await done(late.pause())
        await done(store.answer(call.id))
        item, resumption = await resume(store)
        await done(resumption.session.end())
        assert await done(late.cancel()) == []
        assert await status(store, "late") == "completed"

    in_colour(case)


def test_cancelling_a_session_with_very_many_peers_takes_several_passes(
    place: dict[str, Any],
) -> None:
    with holdfast.open(**place, durability="normal") as store:
        session = store.session("plan", agent="planner")
        calls = [session.ask("a", number).id for number in range(60)]
        session.pause()
        assert set(session.cancel()) == {"plan", *calls}
        assert {store.peer_call(id).state for id in calls} == {"cancelled"}
        assert [pause.state for pause in store.pauses()] == ["cancelled"]
        assert store.work.list(status=["pending", "in_progress"]) == []


def test_the_pauses_of_others_are_not_looked_at_when_a_session_ends(tmp_path: Path) -> None:
    with holdfast.open(f"sqlite:///{tmp_path}/store.db") as store:
        plan = sql(store, f"EXPLAIN QUERY PLAN {CANCEL_PAUSES}", numbers='{"1": 1}')
        [step] = [each["detail"] for each in plan if "hf_pauses" in each["detail"]]
        assert "(session_number=?" in step


def test_one_call_can_be_cancelled(in_colour: InColour) -> None:
    async def case(subject: Subject) -> None:
        store, _ = await opened(subject)
        session = await planner(store)
        call = await done(session.ask("a"))
        await done(session.pause())
        assert await done(store.cancel_ask(call.id))
        assert not await done(store.cancel_ask(call.id))
        assert (await status(store, call.id), await waiting_items(store, "a")) == ("cancelled", [])
        _, resumption = await resume(store)
        assert [answer.status for answer in resumption.answers] == ["cancelled"]

    in_colour(case)


def test_a_session_that_ends_cancels_what_it_waited_for(in_colour: InColour) -> None:
    async def case(subject: Subject) -> None:
        store, clock = await opened(subject)
        session = await planner(store)
        call = await done(session.ask("a"))
        await done(session.pause())
        await done(session.end("failed"))
        assert (await done(store.peer_call(call.id))).state == "cancelled"
        assert await status(store, call.id) == "cancelled"
        sleeper = await planner(store, "sleeper")
        await done(sleeper.sleep(clock.now_ms() + 1000))
        await done(sleeper.end())
        clock.advance(2)
        await done(store.recover())
        assert await waiting_items(store, "planner") == []
        assert [each.state for each in await done(store.pauses())] == ["cancelled", "cancelled"]

    in_colour(case)


def test_a_resumption_that_fails_for_good_fails_the_session_and_its_asker_is_told(
    in_colour: InColour,
) -> None:
    async def case(subject: Subject) -> None:
        store, _ = await opened(subject)
        top = await planner(store, "top")
        call = await done(top.ask("helper"))
        await done(top.pause())
        session = (await done((await claim(store, "helper")).receive())).session
        inner = await done(session.ask("a"))
        await done(session.pause())
        await done(store.answer(inner.id))
        item, _ = await resume(store, "helper")
        await done(item.fail("cannot go on", retry=False))
        assert await status(store, call.id) == "failed"
        _, resumption = await resume(store)
        assert results(resumption.answers) == [("error", "cannot go on")]

    in_colour(case)


def test_a_rewind_cancels_the_calls_and_the_pause_of_the_abandoned_epoch(
    in_colour: InColour,
) -> None:
    async def case(subject: Subject) -> None:
        store, _ = await opened(subject)
        session = await planner(store)
        await done(session.save(step=1))
        done_call = await done(session.ask("a", 1))
        await done(store.answer(done_call.id, "of the old epoch"))
        call = await done(session.ask("a", 2))
        await done(session.pause())
        await done(session.rewind(1))
        assert (await status(store, "plan"), await status(store, call.id)) == (
            "active",
            "cancelled",
        )
        assert await done(store.answer(call.id, "late")) == "late"
        assert results((await done(session.pause())).answers) == []
        assert await waiting_items(store, "planner") == []

    in_colour(case)


def test_a_ready_session_that_is_rewound_goes_on_from_there(in_colour: InColour) -> None:
    async def case(subject: Subject) -> None:
        store, _ = await opened(subject)
        session = await planner(store)
        await done(session.save(step=1))
        call = await done(session.ask("a"))
        await done(session.pause())
        await done(store.answer(call.id))
        await done(session.rewind(1))
        assert (await status(store, "plan"), await waiting_items(store, "planner")) == (
            "active",
            [],
        )
        assert await done(session.resumption()) is None

    in_colour(case)


def test_deleting_a_peer_answers_its_call_and_deleting_the_asker_removes_everything(
    in_colour: InColour,
) -> None:
    async def case(subject: Subject) -> None:
        store, _ = await opened(subject)
        session = await planner(store)
        await done(session.add_artifact("map", uri="file:///map"))
        call = await done(session.ask("a"))
        await done(session.pause())
        await done((await done(store.find_session(call.id))).delete(force=True))
        _, resumption = await resume(store)
        assert [answer.status for answer in resumption.answers] == ["cancelled"]
        await done(session.delete(force=True))
        for table in ("hf_asks", "hf_pauses", "hf_artifacts"):
            assert await done(sql(store, f"SELECT 1 FROM {table}")) == []

    in_colour(case)


def test_closed_calls_and_pauses_are_pruned_after_a_week(in_colour: InColour) -> None:
    async def case(subject: Subject) -> None:
        store, clock = await opened(subject)
        session = await planner(store)
        for number in range(2):
            call = await done(session.ask("a", number, timeout_seconds="never"))
            await done(session.pause())
            if number:
                break
            await done(store.answer(call.id))
            item, _ = await resume(store)
            await done(item.complete())
        clock.advance(6 * 24 * 3600)
        assert not {"asks", "pauses"} & set((await done(store.prune())).others)
        clock.advance(2 * 24 * 3600)
        pruned = (await done(store.prune())).others
        assert (pruned["asks"], pruned["pauses"]) == (1, 1)
        assert [each.input for each in await done(session.asks())] == [1]
        assert [each.state for each in await done(store.pauses())] == ["waiting"]

    in_colour(case)


def test_answers_that_no_pause_collected_are_pruned_after_their_session_has_ended(
    in_colour: InColour,
) -> None:
    async def case(subject: Subject) -> None:
        store, clock = await opened(subject)
        ended = await planner(store, "ended")
        await done(ended.ask("a"))
        await serve(store, "a", 1)
        await done(ended.end())
        # The same with the item of a request.
        call = await done(store.request("planner"))
        item = await claim(store, "planner")
        session = (await done(item.receive())).session
        await done(session.ask("a"))
        await serve(store, "a", 1)
        await done(session.ask("b", timeout_seconds="never"))
        await done(item.complete("planned"))
        asks = [*await done(ended.asks()), *await done(session.asks())]
        assert [each.state for each in asks] == ["ok", "ok", "cancelled"]
        clock.advance(8 * 24 * 3_600)
        # Those of the sessions, and the request.
        assert (await done(store.prune())).others["asks"] == len([*asks, call])

    in_colour(case)


@pytest.mark.parametrize("end", ["pause", "complete"])
def test_what_ends_an_attempt_raises_the_fence_of_its_session(
    in_colour: InColour, end: str
) -> None:
    async def case(subject: Subject) -> None:
        store, _ = await opened(subject)
        await done(store.request("planner"))
        item = await claim(store, "planner")
        session = (await done(item.receive())).session
        if end == "pause":
            await done(session.ask("a", timeout_seconds="never"))
            await done(session.pause())
        else:
            await done(item.complete("planned"))
        zombie = holdfast.Session(
            store.runtime, session.id, session.number, session.root_id, fence=session.fence
        )
        error = await raises(holdfast.LeaseLost, lambda: zombie.save(late=1))
        assert error.fields["current_fence"] == session.fence + 1

    in_colour(case)


def test_an_exported_tree_keeps_its_calls_and_nothing_goes_on_by_itself(
    place: dict[str, Any], other: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "trees.hfx"
    clock = holdfast.VirtualClock()
    with holdfast.open(**place, clock=clock, durability="normal") as store:
        session = store.session("plan", agent="planner")
        session.add_artifact("map", data=[1])
        old = session.ask("a", "old")
        store.answer(old.id, {"x": 1}, artifacts=[holdfast.Artifact(name="n", data=1)])
        session.pause()
        answered = session.ask("a", 1, correlation="c")
        call = session.ask("b", 2)
        session.pause({"step": 1}, need=2)
        store.answer(answered.id, "one")
        store.export(file, ["plan"])
        before = session.asks(), store.pauses(), session.artifacts()
    clock.advance(10_000)
    with holdfast.open(**other, clock=clock, durability="normal") as store:
        store.import_sessions(file)
        found = store.find_session("plan")
        after = found.asks(), store.pauses(), found.artifacts()
        assert [each.answer for each in after[0]] == [each.answer for each in before[0]]
        assert [each.context for each in after[1]] == [each.context for each in before[1]]
        assert after[2] == before[2]
        assert store.recover().swept.timed_out == 0
        assert store.answer(call.id, "by hand") == "counted"
        [item] = store.work.claim("w", queues="agent:planner")
        assert results(item.resume().answers) == [("ok", "one"), ("ok", "by hand")]
        with pytest.raises(holdfast.InvalidArgument):
            store.import_sessions(file)


def test_a_turn_closes_a_pause_that_was_resumed_before_the_export(
    place: dict[str, Any], other: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "trees.hfx"
    with holdfast.open(**place, durability="normal") as store:
        session = store.session("plan", agent="planner")
        store.answer(session.ask("a").id, "one")
        session.pause()
        store.export(file, ["plan"])
    with holdfast.open(**other, durability="normal") as store:
        store.import_sessions(file)
        found = store.find_session("plan")
        assert [pause.state for pause in found.pauses()] == ["resumed"]
        found.save(turn=1)
        assert [pause.state for pause in found.pauses()] == ["closed"]
