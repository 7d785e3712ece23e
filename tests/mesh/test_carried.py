"""The mesh over every transport: what is promised does not depend on how messages travel."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import holdfast
from holdfast.mesh import Memory, Mesh, Service
from tests.mesh.meshes import PLANNER, QUICK, WEATHER, is_idle, running, until

Carriers = Callable[[], Any]


@pytest.fixture(params=["database", "memory", "faulty"])
def transport(request: pytest.FixtureRequest) -> Any:
    """A transport; a faulty one loses every tenth message, repeats others and keeps no order."""
    if request.param == "database":
        return None
    if request.param == "memory":
        return Memory(resend_seconds=1)
    return Memory(lose_every=10, repeat_every=3, reorder=True, seed=7, resend_seconds=0.3)


@pytest.fixture
def store(place: dict[str, Any]) -> Iterator[holdfast.Store]:
    with holdfast.open(**place, durability="normal") as store:
        yield store


@pytest.fixture(params=["same store", "other store"])
def peer_store(
    request: pytest.FixtureRequest, store: holdfast.Store, transport: Any
) -> Iterator[holdfast.Store]:
    """Where the peers are served."""
    if request.param == "same store":
        yield store
        return
    if transport is None:
        pytest.skip("the database reaches only its own peers")
    with holdfast.open(**request.getfixturevalue("other"), durability="normal") as other:
        yield other


@contextlib.contextmanager
def serving(transport: Any, *pairs: tuple[Service, holdfast.Store]) -> Iterator[None]:
    with running(*(service.worker(store, transport, **QUICK) for service, store in pairs)):
        yield


def test_every_request_is_answered_once_with_the_answers_of_its_peers(
    store: holdfast.Store, peer_store: holdfast.Store, transport: Any
) -> None:
    cities = ["Oslo", "Rome", "Lima"]
    workers = ((PLANNER, store), (PLANNER, store), (WEATHER, peer_store), (WEATHER, peer_store))
    with Mesh(store, transport) as mesh, serving(transport, *workers):
        ids = [f"r{number}" for number in range(10)]
        for id in ids:
            mesh.request("planner", cities, request_id=id, user="ann", wait_seconds=0)
        for id in ids:
            call = mesh.request("planner", cities, request_id=id)
            assert call.answer is not None
            assert call.answer.result == [["ok", f"{city}: sun for ann"] for city in cities]
        until(lambda: is_idle(store) and is_idle(peer_store), "something is left")
    assert len(store.pauses(state="closed", limit=100)) <= len(ids)
    served = peer_store.sessions(agent="weather", limit=100)
    assert len(served) == len(ids) * len(cities)
    assert {each.status for each in served} == {"completed"}
    if peer_store is store:
        assert {each.root_id for each in served} == set(ids)
    else:
        named = {each.metadata["asked_by"]["ask"] for each in served}
        asked = [ask.id for ask in store.asks(agent="weather", limit=100)]
        assert named == set(asked)
        assert {each.parent_id for each in served} == {None}
