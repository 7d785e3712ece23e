"""The mesh over every transport: what is promised does not depend on how messages travel."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.mesh import Memory, Mesh, Service
from tests.mesh.meshes import PLANNER, QUICK, WEATHER, is_idle, running, until

SOUND = ["database", "memory", "memory, other store", "nats", "nats, other store"]
# It loses every tenth message, repeats others and keeps no order.
FAULTY = ["faulty", "faulty, other store"]


class Net:
    """A store, the store of the peers, which may be another, and what carries messages."""

    def __init__(self, store: holdfast.Store, peers: holdfast.Store, make: Callable[[], Any]):
        self.store = store
        self.clock: Any = store.runtime.settings.clock
        self.peers = peers
        self._make = make

    def mesh(self, **given: Any) -> Any:
        return Mesh(self.store, self._make(), **given)

    def workers(self, *services: Service, **given: Any) -> list[Any]:
        """Workers of planners on the first store, and of others on that of the peers."""
        return [
            each.worker(
                self.store if each.name == "planner" else self.peers,
                self._make(),
                **{**QUICK, **given},
            )
            for each in services
        ]


def netted(
    request: pytest.FixtureRequest, name: str, store: holdfast.Store, other: dict[str, Any]
) -> Iterator[Net]:
    kind, _, where = name.partition(", ")
    make: Callable[[], Any] = lambda: "database"  # noqa: E731
    if kind == "nats":
        make = request.getfixturevalue("make_nats")
    elif kind != "database":
        faults: dict[str, Any] = {"lose_every": 10, "repeat_every": 3, "reorder": True}
        memory = Memory(resend_seconds=0.3, seed=7, **(faults if kind == "faulty" else {}))
        make = lambda: memory  # noqa: E731
    if not where:
        yield Net(store, store, make)
        return
    with holdfast.open(**other, durability="normal") as peers:
        yield Net(store, peers, make)


@pytest.fixture(params=SOUND + FAULTY)
def net_of_each(
    request: pytest.FixtureRequest, place: dict[str, Any], other: dict[str, Any]
) -> Iterator[Net]:
    """Every transport on both databases."""
    with holdfast.open(**place, durability="normal") as store:
        yield from netted(request, request.param, store, other)


@pytest.fixture(params=SOUND)
def net(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Net]:
    """Every transport that is sound, on SQLite."""
    given: dict[str, Any] = {"durability": "normal", "clock": holdfast.VirtualClock()}
    with holdfast.open(f"sqlite:///{tmp_path}/a.db", **given) as store:
        yield from netted(request, request.param, store, {"url": f"sqlite:///{tmp_path}/b.db"})


def test_every_request_is_answered_once_with_the_answers_of_its_peers(net_of_each: Net) -> None:
    net, cities = net_of_each, ["Oslo", "Rome", "Lima"]
    ids = [f"r{number}" for number in range(10)]
    with net.mesh() as mesh, running(*net.workers(PLANNER, PLANNER, WEATHER, WEATHER)):
        for id in ids:
            mesh.request("planner", cities, request_id=id, user="ann", wait_seconds=0)
        for id in ids:
            call = mesh.request("planner", cities, request_id=id)
            assert call.answer.result == [["ok", f"{city}: sun for ann"] for city in cities]
        until(lambda: is_idle(net.store) and is_idle(net.peers), "something is left")
    served = net.peers.sessions(agent="weather", limit=100)
    asked = net.store.asks(agent="weather", limit=100)
    assert len(served) == len(asked) == len(ids) * len(cities)
    assert {each.status for each in served} == {"completed"}
    if net.peers is net.store:
        assert {each.root_id for each in served} == set(ids)
    else:
        assert {each.metadata["asked_by"]["ask"] for each in served} == {each.id for each in asked}
        assert {each.parent_id for each in served} == {None}
    resumed = [item.input["pause"] for item in net.store.work.list(type="resume", limit=100)]
    assert len(set(resumed)) == len(resumed)


def test_progress_errors_and_artifacts_travel_with_the_answers(net: Net) -> None:
    is_told = threading.Event()

    def serve(request: holdfast.PeerRequest[Any]) -> Any:
        holdfast.Store(request.session.runtime).progress(request.ask_id, "halfway")
        assert is_told.wait(120)
        if request.input == "fail":
            raise holdfast.WorkFailed("there is no such city")
        request.session.add_artifact("forecast", data={"big": 2**70, "days": [21, None]})
        return {"big": 2**80}

    def ask(request: holdfast.PeerRequest[Any]) -> Any:
        for each in request.input:
            request.session.ask("weather", each, correlation={"call": each})
        return request.session.pause()

    def go_on(resumption: holdfast.Resumption[Any]) -> Any:
        artifacts = [[each.name, each.data] for each in resumption.artifacts]
        answers = [[each.status, each.result, each.correlation] for each in resumption.answers]
        return [answers, artifacts]

    def told(note: Any) -> None:
        notes.append(note)
        if len(notes) == 2:
            is_told.set()

    notes: list[Any] = []
    services = (Service("planner", ask, go_on), Service("weather", serve))
    with net.mesh() as mesh, running(*net.workers(*services)):
        call = mesh.request("planner", ["sun", "fail"], on_progress=told)
    assert notes == ["halfway"] * 2
    assert call.answer.result == [
        [
            ["ok", {"big": 2**80}, {"call": "sun"}],
            ["error", "there is no such city", {"call": "fail"}],
        ],
        [["forecast", {"big": 2**70, "days": [21, None]}]],
    ]


@pytest.mark.parametrize("reason", ["cancelled", "timeout", "deleted"])
def test_a_peer_whose_answer_is_not_wanted_any_more_is_cancelled(net: Net, reason: str) -> None:
    begun, stopped = threading.Event(), threading.Event()

    def serve(request: holdfast.PeerRequest[Any]) -> Any:
        begun.set()
        until(lambda: request.session.item.is_cancelled or request.session.item.is_lost, "no stop")
        stopped.set()
        return "too late"

    def ask(request: holdfast.PeerRequest[Any]) -> Any:
        request.session.ask("weather", timeout_seconds=1)
        return request.session.pause()

    def go_on(resumption: holdfast.Resumption[Any]) -> Any:
        return [each.status for each in resumption.answers]

    services = (Service("planner", ask, go_on), Service("weather", serve))
    with net.mesh() as mesh, running(*net.workers(*services, lease_seconds=6)):
        mesh.request("planner", request_id="r1", wait_seconds=0)
        assert begun.wait(120)
        if reason == "cancelled":
            net.store.find_session("r1").cancel()
        elif reason == "deleted":
            net.store.find_session("r1").delete(force=True)
        else:
            # The lease of the peer's item is longer.
            net.clock.advance(1.5)
        if reason != "deleted":
            answer = mesh.request("planner", request_id="r1").answer
            expected = {"timeout": ["ok", ["timeout"]], "cancelled": ["cancelled", answer.result]}
            assert [answer.status, answer.result] == expected[reason]
        assert stopped.wait(120)
        until(lambda: is_idle(net.store) and is_idle(net.peers), "something is left")
    served = [each.status for each in net.peers.sessions(agent="weather")]
    is_gone = reason == "deleted"
    assert served == ([] if is_gone and net.peers is net.store else ["cancelled"])
    asked = [(each.state, each.late) for each in net.store.asks(agent="weather")]
    assert asked == ([] if is_gone else [(reason, None)])


def test_an_answer_that_comes_before_the_pause_is_not_lost(net: Net) -> None:
    def ask(request: holdfast.PeerRequest[Any]) -> Any:
        store = holdfast.Store(request.session.runtime)
        call = request.session.ask("weather", {"city": "Oslo"})
        until(lambda: store.peer_call(call.id).state == "ok", "no answer")
        return request.session.pause()

    def go_on(resumption: holdfast.Resumption[Any]) -> Any:
        return [each.result for each in resumption.answers]

    # Another instance of the planner takes the answer as well as the one that waits for it.
    planners = [Service("planner", ask, go_on)] * 2
    with net.mesh() as mesh, running(*net.workers(*planners, WEATHER)):
        call = mesh.request("planner", user="ann")
    assert call.answer.result == ["Oslo: sun for ann"]
    assert net.store.work.list(type="resume") == []


def test_a_session_that_waits_in_memory_resumes_without_a_pause(net: Net) -> None:
    begun = threading.Event()

    def ask(request: holdfast.PeerRequest[Any]) -> Any:
        request.session.ask("weather", {"city": "Oslo"})
        begun.set()
        return request.session.pause({"step": 1})

    def go_on(resumption: holdfast.Resumption[Any]) -> Any:
        return [resumption.context, *(each.result for each in resumption.answers)]

    with net.mesh() as mesh:
        planner = Service("planner", ask, go_on, stateless=False)
        with running(*net.workers(planner)):
            mesh.request("planner", user="ann", request_id="r1", wait_seconds=0)
            assert begun.wait(120)
            with running(*net.workers(WEATHER)):
                call = mesh.request("planner", user="ann", request_id="r1")
    assert call.answer.result == [{"step": 1}, "Oslo: sun for ann"]
    assert net.store.work.list(type="resume") == []
    assert net.store.find_session("r1").history(kind="state_transition")
