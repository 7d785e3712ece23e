"""Services claim items and take up their sessions in one commit, and wait for no tree."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.kernel.driver import Hooks, Trace
from holdfast.kernel.operation import Call
from holdfast.mesh import Mesh, Service
from holdfast.peers.uptake import serve_turn
from holdfast.work.claims import Claim
from holdfast.work.transitions import Transition
from tests.peers.uptakes import held, taken_up


def test_requests_and_resumptions_are_taken_up_in_one_commit(place: dict[str, Any]) -> None:
    traces: list[Trace] = []
    with holdfast.open(**place, hooks=Hooks(trace=traces.append)) as store:
        session = store.session("plan", agent="planner", user="ann")
        session.pause({"step": 1}, asks=[holdfast.Ask("peer", number) for number in range(3)])
        asks = session.asks()
        traces.clear()
        found = taken_up(store, "peer")
        assert len(traces) == 1
        assert list(found) == [f"request {ask.id}" for ask in asks]
        for number, (ask, taken) in enumerate(zip(asks, found.values(), strict=True)):
            assert taken is not None
            assert isinstance(taken.given, holdfast.PeerRequest)
            assert (taken.given.input, taken.given.user) == (number, "ann")
            info = store.find_session(ask.id).info()
            assert info.holder == f"work item request {ask.id}, fence 1"
            item = held(store, f"request {ask.id}")
            assert item.driving_fence == taken.fence
            item.complete(number * 10)
        [taken] = taken_up(store, "planner").values()
        assert taken is not None
        assert isinstance(taken.given, holdfast.Resumption)
        assert taken.given.context == {"step": 1}
        assert [each.result for each in taken.given.answers] == [0, 10, 20]
        assert session.info().status == "active"
        assert session.pauses()[0].state == "resumed"


def test_a_session_that_somebody_drives_or_that_has_ended_is_left_to_the_handler(
    place: dict[str, Any],
) -> None:
    with holdfast.open(**place) as store:
        session = store.session("plan", agent="planner")
        calls = [session.ask("peer", number) for number in range(3)]
        with store.find_session(calls[0].id).drive() as driven:
            store.find_session(calls[1].id).end()
            found = taken_up(store, "peer")
            assert found[f"request {calls[0].id}"] is None
            # The end of the item leaves the lease of the other alone.
            held(store, f"request {calls[0].id}").release()
            driven.save(still="driven")
        assert found[f"request {calls[1].id}"] is None
        assert found[f"request {calls[2].id}"] is not None


def test_an_item_whose_tree_is_in_use_is_claimed_and_nobody_waits(place: dict[str, Any]) -> None:
    if "postgresql" not in place["url"]:
        pytest.skip("SQLite has one writer at a time")
    with holdfast.open(**place) as store, psycopg.connect(place["url"]) as other:
        busy, free = (store.session(id, agent="planner") for id in ("busy", "free"))
        asked = [session.ask("peer") for session in (busy, free)]
        schema = place.get("namespace") or "holdfast"
        lock = f"SELECT 1 FROM {schema}.hf_trees WHERE root_id = 'busy' FOR NO KEY UPDATE"
        other.execute(lock.encode())
        found = taken_up(store, "peer")
        assert found[f"request {asked[0].id}"] is None
        assert found[f"request {asked[1].id}"] is not None
        assert held(store, f"request {asked[0].id}").driving_fence is None
        other.rollback()
        # Its handler takes it up by itself.
        assert held(store, f"request {asked[0].id}").receive().ask_id == asked[0].id


def test_an_item_whose_tree_is_in_use_is_completed_by_itself_and_no_other_waits(
    place: dict[str, Any],
) -> None:
    if "postgresql" not in place["url"]:
        pytest.skip("SQLite has one writer at a time")
    begun, go = threading.Semaphore(0), threading.Event()

    def serve(request: holdfast.PeerRequest[Any]) -> Any:
        begun.release()
        assert go.wait(120)
        return request.input

    with holdfast.open(**place) as store, psycopg.connect(place["url"]) as other:
        worker = Service("peer", serve).worker(store, poll_seconds=0.05)
        running = threading.Thread(target=worker.run)
        running.start()
        try:
            asked = [store.request("peer", id, request_id=id) for id in ("busy", "free")]
            for _ in asked:
                assert begun.acquire(timeout=120)
            schema = place.get("namespace") or "holdfast"
            lock = f"SELECT 1 FROM {schema}.hf_trees WHERE root_id = 'busy' FOR NO KEY UPDATE"
            other.execute(lock.encode())
            go.set()
            call = Mesh(store).wait("free", wait_seconds=120)
            assert (call.state, store.peer_call("busy").state) == ("ok", "open")
            other.rollback()
            assert Mesh(store).wait("busy", wait_seconds=120).state == "ok"
        finally:
            go.set()
            worker.stop()
            running.join()
        assert worker.counts == {"completed": 2}


def test_an_item_that_cannot_be_taken_up_fails_alone(place: dict[str, Any]) -> None:
    service = Service("peer", lambda request: request.input)
    with holdfast.open(**place, durability="normal") as store:
        session = store.session("odd")
        store.work.submit("resume", None, session=session, queue="agent:peer", max_retries=0)
        worker = service.worker(store, poll_seconds=0.05)
        running = threading.Thread(target=worker.run)
        running.start()
        try:
            call = Mesh(store).request("peer", "fine", wait_seconds=120)
            assert call.answer is not None
            assert call.answer.result == "fine"
        finally:
            worker.stop()
            running.join()
        [item] = store.work.list(type="resume")
        assert item.status == "failed"


def test_the_item_of_a_function_drives_the_session_that_was_taken_up(place: dict[str, Any]) -> None:
    seen: list[bool] = []

    def serve(request: holdfast.PeerRequest[Any]) -> str:
        item: Any = request.session.item
        seen.append(item.taken_up is not None)
        item.session.save(through="the item")
        return "saved"

    with holdfast.open(**place, durability="normal") as store:
        call = store.request("peer")
        Service("peer", serve).worker(store).run(until_empty=True)
        answer = store.peer_call(call.id).answer
        assert answer is not None
        assert (answer.result, seen) == ("saved", [True])


def test_an_item_of_a_pause_that_is_gone_does_not_stop_the_others(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        odd = store.session("odd")
        gone = {"pause": "gone"}
        store.work.submit("resume", gone, session=odd, queue="agent:peer", id="odd")
        call = store.session("plan", agent="planner").ask("peer")
        found = taken_up(store, "peer")
        assert found["odd"] is None
        assert found[f"request {call.id}"] is not None


def test_what_a_turn_has_consumed_is_known_when_the_session_is_taken_up_again(
    place: dict[str, Any],
) -> None:
    with holdfast.open(**place) as store:
        session = store.session("plan", agent="planner")
        id = paused_and_answered(store, session)
        for is_consumed in (False, True):
            [taken] = taken_up(store, "planner").values()
            assert taken is not None
            assert isinstance(taken.given, holdfast.Resumption)
            assert taken.given.is_consumed is is_consumed
            item = held(store, id)
            assert item.session is not None
            item.session.save(went_on=True)
            item.fail("again", delay_seconds=0)


def test_a_turn_does_not_take_up_a_session_that_it_cancels(place: dict[str, Any]) -> None:
    """A session that ends no longer waits for its peer, whose item the same turn has claimed."""
    with holdfast.open(**place) as store:
        parent = store.request("agent", "parent")
        taken_up(store, "agent")
        item = held(store, f"request {parent.id}")
        assert item.session is not None
        child = item.session.ask("agent", "child")
        completion = Transition("completed", "completed", store.runtime.codec.encode("done"))
        claim = Claim("instance", 10, ["agent:agent"], 30_000, drives=True)
        call = Call(serve_turn, store.runtime, ([(item, completion)], claim))
        ended, (rows, given) = store.runtime.driver.run(call)
        assert [row["state"] for row in ended.values() if row is not None] == ["completed"]
        assert [row["id"] for row in rows] == [f"request {child.id}"]
        assert given == {}
        info = store.find_session(child.id).info()
        assert (info.status, info.holder) == ("cancelled", None)
        assert store.peer_call(child.id).state == "cancelled"


def test_of_two_items_of_one_session_one_is_taken_up(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        session = store.session("plan", agent="planner")
        left = paused_and_answered(store, session)
        [(_, taken)] = taken_up(store, "planner").items()
        assert taken is not None
        held(store, left).fail("again", delay_seconds=60)
        # Somebody else goes on with the session, and the item of the first pause is cancelled.
        next_one = paused_and_answered(store, session)
        assert list(taken_up(store, "planner")) == [next_one]
        gone = store.work.get(left)
        assert gone.status == "cancelled"
        given: dict[str, Any] = {"session": session, "queue": "agent:planner", "priority": 1}
        left = store.work.submit("resume", gone.input, **given, delay_seconds=60).id
        held(store, next_one).fail("again", delay_seconds=60)
        for id in (left, next_one):
            store.work.retry(id)
        found = taken_up(store, "planner")
        assert list(found) == [left, next_one]
        first, second = found.values()
        assert first is not None
        assert second is None
        with pytest.raises(holdfast.SessionBusy):
            held(store, next_one).resume()
        item = held(store, left)
        assert item.driving_fence == first.fence
        assert item.resume().is_consumed
        item.release()
        assert held(store, next_one).resume().context == {"pause": 2}


def paused_and_answered(store: holdfast.Store, session: holdfast.Session) -> str:
    """Pause a session until a peer has answered; return the id of the item that resumes it."""
    with session.drive() as driven:
        number = len(session.pauses()) + 1
        call = driven.ask("peer", number)
        parked = driven.pause({"pause": number})
    store.answer(call.id, number)
    return f"resume {parked.pause_id}"
