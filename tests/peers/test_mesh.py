"""Agents as services, and callers that are no session: on both databases, sync and async."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import holdfast
from holdfast.mesh import Memory, Mesh, Service
from holdfast.testing.subject import Subject, done, raises
from tests.conftest import InColour
from tests.peers.agents import status

STORES = {False: "Store", True: "AsyncStore"}


def plan(request: holdfast.PeerRequest[Any]) -> Any:
    for city in request.input["cities"]:
        request.session.ask("weather", {"city": city})
    return request.session.pause({"cities": request.input["cities"]})


def planned(resumption: holdfast.Resumption[Any]) -> Any:
    assert type(resumption.store).__name__ == STORES[resumption.session.runtime.is_async]
    return [answer.result for answer in resumption.answers]


def weather(request: holdfast.PeerRequest[Any]) -> Any:
    assert isinstance(request.store, holdfast.Store)
    request.store.progress(request.ask_id, f"looking at {request.input['city']}")
    return f"{request.input['city']}: sun"


async def plan_async(request: holdfast.PeerRequest[Any]) -> Any:
    for city in request.input["cities"]:
        await request.session.ask("weather", {"city": city})
    return await request.session.pause()


async def planned_async(resumption: holdfast.Resumption[Any]) -> Any:
    return planned(resumption)


async def weather_async(request: holdfast.PeerRequest[Any]) -> Any:
    assert isinstance(request.store, holdfast.AsyncStore)
    await request.store.progress(request.ask_id, f"looking at {request.input['city']}")
    return f"{request.input['city']}: sun"


SERVICES = {
    "sync": [Service("planner", plan, planned), Service("weather", weather)],
    "async": [Service("planner", plan_async, planned_async), Service("weather", weather_async)],
}


class Served:
    """The workers of services, running until the end of the block."""

    def __init__(self, subject: Subject, store: Any, services: list[Service]) -> None:
        self._is_async = subject.colour == "async"
        self._workers: list[Any] = [each.worker(store, poll_seconds=0.05) for each in services]
        self._running: list[Any] = []

    async def __aenter__(self) -> None:
        for worker in self._workers:
            if self._is_async:
                self._running.append(asyncio.ensure_future(worker.run()))
            else:
                self._running.append(threading.Thread(target=worker.run))
                self._running[-1].start()

    async def __aexit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.stop()
        for running in self._running:
            await (running if self._is_async else asyncio.to_thread(running.join))


def test_a_caller_gets_progress_and_the_answer_and_again_when_it_reconnects(
    in_colour: InColour,
) -> None:
    async def case(subject: Subject) -> None:
        store = await subject.open(durability="normal")
        mesh = Mesh(store)
        notes: list[Any] = []
        given = {"cities": ["Oslo", "Rome"]}
        async with Served(subject, store, SERVICES[subject.colour]):
            asked = mesh.request(
                "planner", given, request_id="r1", user="ann", on_progress=notes.append
            )
            call = await done(asked) if subject.colour == "async" else asked
        assert call.answer.result == ["Oslo: sun", "Rome: sun"]
        assert sorted(notes) == ["looking at Oslo", "looking at Rome"]
        again = await done(mesh.request("planner", given, request_id="r1"))
        assert again.answer == call.answer
        await raises(holdfast.RequestMismatch, lambda: mesh.request("planner", {}, request_id="r1"))
        await raises(
            holdfast.RequestMismatch,
            lambda: mesh.request("planner", given, request_id="r1", user="bob"),
        )
        sessions = await done(store.sessions(root="r1"))
        assert {each.user for each in sessions} == {"ann"}
        assert [each.status for each in sessions] == ["completed"] * 3
        assert await done(store.asks(state="open")) == []

    in_colour(case)


def test_a_request_that_is_cancelled_has_a_final_answer(in_colour: InColour) -> None:
    async def case(subject: Subject) -> None:
        store = await subject.open(durability="normal")
        mesh = Mesh(store)
        call = await done(mesh.request("planner", {}, request_id="r1", wait_seconds=0))
        assert call.state == "open"
        await done((await done(store.find_session("r1"))).cancel())
        final = await done(mesh.request("planner", {}, request_id="r1"))
        assert (final.answer.status, await status(store, "r1")) == ("cancelled", "cancelled")

    in_colour(case)


def test_who_comes_back_after_the_history_was_pruned_still_gets_the_answer(
    place: dict[str, Any],
) -> None:
    clock = holdfast.VirtualClock()
    with holdfast.open(**place, clock=clock, durability="normal") as store:
        mesh, notes = Mesh(store), list[Any]()
        mesh.request("planner", request_id="r1", wait_seconds=0)
        store.progress("r1", "begun")
        Service("planner", lambda request: "done").worker(store).run(until_empty=True)
        clock.advance(2 * 86_400)
        store.prune(history_days=1)
        with pytest.raises(holdfast.Compacted):
            store.events("r1", after=0)
        found = mesh.wait("r1", on_progress=notes.append)
        assert found.answer is not None
        assert (found.answer.result, notes) == ("done", [])


def test_every_note_is_told_however_many_there_are(
    place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.mesh.requests.EVENTS_PER_READ_MAX", 3)
    monkeypatch.setattr("holdfast.peers.handle.EVENTS_PER_READ_MAX", 3)
    with holdfast.open(**place, durability="normal") as store:
        mesh, notes = Mesh(store), list[Any]()
        mesh.request("planner", request_id="r1", wait_seconds=0)
        for number in range(10):
            store.progress("r1", number)
        store.answer("r1", "done")
        mesh.wait("r1", on_progress=notes.append)
        assert notes == list(range(10))
        with pytest.raises(holdfast.AskNotFound):
            mesh.wait("r2")
        with pytest.raises(holdfast.InvalidArgument):
            mesh.wait("r1", wait_seconds=-1)


def test_a_deadline_is_noticed_on_time_and_not_at_the_next_sweep(place: dict[str, Any]) -> None:
    def ask(request: holdfast.PeerRequest[Any]) -> Any:
        request.session.ask("silent", timeout_seconds=0.2)
        return request.session.pause()

    def go_on(resumption: holdfast.Resumption[Any]) -> Any:
        return [answer.status for answer in resumption.answers]

    with holdfast.open(**place, durability="normal") as store:
        service = Service("asker", ask, go_on)
        worker = service.worker(store, poll_seconds=0.05, sweep_interval_seconds=3600)
        running = threading.Thread(target=worker.run)
        running.start()
        try:
            call = Mesh(store).request("asker", wait_seconds=120)
        finally:
            worker.stop()
            running.join()
        assert call.answer is not None
        assert call.answer.result == ["timeout"]


@pytest.mark.parametrize("is_carried", [False, True])
def test_who_waits_ends_a_call_at_its_deadline_where_no_worker_does(
    is_carried: bool, in_colour: InColour
) -> None:
    async def case(subject: Subject) -> None:
        store = await subject.open(durability="normal")
        mesh = Mesh(store, Memory() if is_carried else None)
        wanted: list[tuple[str, dict[str, Any]]] = [("r1", {}), ("r2", {"on_progress": print})]
        for id, given in wanted:
            given |= {"request_id": id, "timeout_seconds": 0.1, "wait_seconds": 120}
            call = await done(mesh.request("nobody", **given))
            assert call.state == "timeout"
            if not is_carried:
                assert await status(store, id) == "cancelled"
        at_once = await done(mesh.request("nobody", timeout_seconds=0, wait_seconds=0))
        assert at_once.state == "timeout"
        session = await done(store.session("plan", agent="planner"))
        call = await done(session.ask("nobody", timeout_seconds=0.1))
        await done(session.pause())
        assert (await done(mesh.wait(call.id, wait_seconds=120))).state == "timeout"
        assert [each.state for each in await done(session.pauses())] == ["ready"]
        await done(mesh.close())

    in_colour(case)


def test_who_can_only_read_waits_for_others_to_end_a_call(place: dict[str, Any]) -> None:
    with (
        holdfast.open(**place, durability="normal") as store,
        holdfast.open(**place, mode="read") as reader,
    ):
        store.request("nobody", request_id="r1", timeout_seconds=0)
        assert Mesh(reader).wait("r1", wait_seconds=0.01).state == "open"
        assert Mesh(store).wait("r1", wait_seconds=0).state == "timeout"
        assert Mesh(reader).wait("r1").state == "timeout"


def test_what_a_service_raises_is_an_error_answer(place: dict[str, Any]) -> None:
    def broken(request: Any) -> None:
        raise holdfast.WorkFailed("there is no such city")

    with holdfast.open(**place, durability="normal") as store:
        call = store.request("broken", request_id="r1")
        Service("broken", broken).worker(store, poll_seconds=0.05).run(until_empty=True)
        answer = store.peer_call(call.id).answer
        assert answer is not None
        assert (answer.status, answer.result) == ("error", "there is no such city")
        assert store.find_session("r1").info().status == "failed"


def test_an_exception_that_cannot_be_shown_is_an_error_answer(
    place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unshown(Exception):
        def __str__(self) -> str:
            raise ValueError("it cannot be shown")

    def broken(request: Any) -> None:
        raise Unshown

    monkeypatch.setattr("holdfast.work.transitions.RETRY_SECONDS", 0.02)
    with holdfast.open(**place, durability="normal") as store:
        call = store.request("broken")
        worker = Service("broken", broken).worker(store, poll_seconds=0.05)
        running = threading.Thread(target=worker.run)
        running.start()
        try:
            answer = Mesh(store).wait(call.id, wait_seconds=120).answer
        finally:
            worker.stop()
            running.join()
        assert answer is not None
        assert (answer.status, answer.result) == ("error", "Unshown")
        assert worker.counts == {"retried": 3, "failed": 1}


def test_a_service_without_on_resume_cannot_go_on_and_says_so(place: dict[str, Any]) -> None:
    def napping(request: holdfast.PeerRequest[Any]) -> None:
        request.session.sleep(0)

    with holdfast.open(**place, durability="normal") as store:
        store.request("napper", request_id="r1")
        Service("napper", napping).worker(store, poll_seconds=0.05).run(until_empty=True)
        answer = store.peer_call("r1").answer
        assert answer is not None
        assert "has no on_resume" in answer.result


def test_an_attempt_after_the_session_has_ended_only_completes_its_item(
    place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first worker ends before the next attempt, however slow it is.
    monkeypatch.setattr("holdfast.work.transitions.RETRY_SECONDS", 300.0)

    def ending(request: holdfast.PeerRequest[Any]) -> None:
        holdfast.Store(request.session.runtime).answer(request.ask_id, "answered")
        request.session.end()
        raise RuntimeError("died before it could say so")

    with holdfast.open(**place, durability="normal") as store:
        store.request("hasty", request_id="r1")
        worker = Service("hasty", ending).worker(store, poll_seconds=0.05)
        worker.run(until_empty=True)
        [item] = store.work.list(queue="agent:hasty")
        store.work.retry(item.id)
        Service("hasty", ending).worker(store, poll_seconds=0.05).run(until_empty=True)
        assert store.work.get(item.id).status == "completed"
        answer = store.peer_call("r1").answer
        assert answer is not None
        assert answer.result == "answered"


def test_a_service_goes_on_at_once_if_the_answers_are_in(place: dict[str, Any]) -> None:
    def ask(request: holdfast.PeerRequest[Any]) -> Any:
        store = holdfast.Store(request.session.runtime)
        store.answer(request.session.ask("peer", 1).id, "quick")
        return request.session.pause({"asked": 1})

    def go_on(resumption: holdfast.Resumption[Any]) -> Any:
        if resumption.generation == 1:
            store = holdfast.Store(resumption.session.runtime)
            store.answer(resumption.session.ask("peer", 2).id, "again")
            return resumption.session.pause({"asked": 2})
        return [resumption.context, *(answer.result for answer in resumption.answers)]

    with holdfast.open(**place, durability="normal") as store:
        store.request("asker", request_id="r1")
        Service("asker", ask, go_on).worker(store, poll_seconds=0.05).run(until_empty=True)
        answer = store.peer_call("r1").answer
        assert answer is not None
        assert answer.result == [{"asked": 2}, "again"]


def test_what_is_no_service_is_refused(place: dict[str, Any]) -> None:
    with pytest.raises(holdfast.InvalidArgument):
        Service("", plan)
    with pytest.raises(holdfast.InvalidArgument):
        Service("a", "plan")  # type: ignore[arg-type]
    with pytest.raises(holdfast.InvalidArgument):
        Mesh("store")  # type: ignore[arg-type]
    with holdfast.open(**place) as store:
        told = "a service sets the queues of its worker; omit queues"
        with pytest.raises(holdfast.InvalidArgument, match=told):
            Service("a", plan).worker(store, queues=["b"])
        with pytest.raises(holdfast.InvalidArgument):
            store.request("a", request_id="x" * 201)
