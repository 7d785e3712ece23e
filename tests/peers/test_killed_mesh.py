"""Requests to agents with peers while instances of both are killed: every one ends once.

Here an item has as many retries as it needs: how many leases expire in turn depends on how busy the
machine is. What follows when its retries are used up is shown in test_deadlines.py.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import apsw
import psycopg
import pytest

import holdfast
from holdfast.mesh import Service
from tests.crash.children import Child

LEASE_SECONDS = 3.0
WAIT_SECONDS = 240.0
RETRIES = 1_000


def plan(request: holdfast.PeerRequest[Any]) -> Any:
    for number, kind in enumerate(request.input):
        request.session.ask("peer", {"number": number, "kind": kind}, timeout_seconds="never")
    request.session.save(asked=len(request.input), key="asked")
    return request.session.pause({"kinds": request.input})


def planned(resumption: holdfast.Resumption[Any]) -> Any:
    if not resumption.is_consumed:
        resumption.session.save(went_on=True)
    return [[each.status, each.result] for each in resumption.answers]


def serve_peer(request: holdfast.PeerRequest[Any]) -> Any:
    time.sleep(0.01)
    number, kind = request.input["number"], request.input["kind"]
    if kind == "error":
        raise holdfast.WorkFailed(f"{number} fails")
    if kind == "twice":
        # What is delivered again counts once.
        store = holdfast.Store(request.session.runtime)
        for _ in range(2):
            store.answer(request.ask_id, f"{number} answers")
    return f"{number} answers"


async def plan_async(request: holdfast.PeerRequest[Any]) -> Any:
    session = request.session
    for number, kind in enumerate(request.input):
        await session.ask("peer", {"number": number, "kind": kind}, timeout_seconds="never")
    await session.save(asked=len(request.input), key="asked")
    return await session.pause({"kinds": request.input})


async def planned_async(resumption: holdfast.Resumption[Any]) -> Any:
    if not resumption.is_consumed:
        await resumption.session.save(went_on=True)
    return [[each.status, each.result] for each in resumption.answers]


async def serve_peer_async(request: holdfast.PeerRequest[Any]) -> Any:
    await asyncio.sleep(0.01)
    number, kind = request.input["number"], request.input["kind"]
    if kind == "error":
        raise holdfast.WorkFailed(f"{number} fails")
    if kind == "twice":
        for _ in range(2):
            await request.store.answer(request.ask_id, f"{number} answers")
    return f"{number} answers"


SERVICES = {
    "planner": Service("planner", plan, planned),
    "peer": Service("peer", serve_peer),
    "async planner": Service("planner", plan_async, planned_async),
    "async peer": Service("peer", serve_peer_async),
}
FLEET = ["planner", "async planner", "planner", "peer", "async peer"]


def allow_retries(place: dict[str, Any]) -> None:
    """Give every item of a store as many retries as it needs, whoever submits it."""
    with holdfast.open(**place):
        pass
    _, is_sqlite, path = place["url"].partition("sqlite:///")
    if is_sqlite:
        database = apsw.Connection(path)
        database.execute(
            "CREATE TRIGGER retry AFTER INSERT ON hf_work BEGIN "
            f"UPDATE hf_work SET max_retries = {RETRIES} WHERE number = new.number; END"
        )
        database.close()
        return
    schema = place["namespace"]
    with psycopg.connect(place["url"], autocommit=True) as connection:
        body = f"BEGIN NEW.max_retries := {RETRIES}; RETURN NEW; END"
        function = f'"{schema}".allow_retries()'
        statements = (
            f"CREATE FUNCTION {function} RETURNS trigger LANGUAGE plpgsql AS '{body}'",
            f'CREATE TRIGGER retry BEFORE INSERT ON "{schema}".hf_work '
            f"FOR EACH ROW EXECUTE FUNCTION {function}",
        )
        for statement in statements:
            connection.execute(statement.encode())


def serve_until_killed(
    place: dict[str, Any], name: str, transport: Any = None, *, lease_seconds: float
) -> None:
    service = SERVICES[name]
    given: dict[str, Any] = {"instances": 2, "lease_seconds": lease_seconds}
    given |= {"poll_seconds": 0.05, "sweep_interval_seconds": 0.2}

    async def serve_async() -> None:
        store = await holdfast.aopen(**place, durability="normal")
        await service.worker(store, transport, **given).run()

    if service.is_async:
        asyncio.run(serve_async())
    with holdfast.open(**place, durability="normal") as store:
        service.worker(store, transport, **given).run()


def start(place: dict[str, Any], name: str) -> Child:
    return Child(lambda say: serve_until_killed(place, name, lease_seconds=LEASE_SECONDS))


@pytest.mark.parametrize(
    ("requests", "kills"), [(40, 10), pytest.param(200, 120, marks=pytest.mark.slow)]
)
def test_every_request_ends_once_while_instances_are_killed(
    requests: int, kills: int, place: dict[str, Any]
) -> None:
    random.seed(kills)
    kinds = ["ok", "ok", "error", "twice"]
    wanted = {
        f"r{number}": [random.choice(kinds) for _ in range(random.randint(1, 5))]
        for number in range(requests)
    }
    allow_retries(place)
    children = [start(place, name) for name in FLEET]
    try:
        with holdfast.open(**place, durability="normal") as store:
            ends_at = time.monotonic() + WAIT_SECONDS
            for number, (id, input) in enumerate(wanted.items()):
                store.request("planner", input, request_id=id)
                if number * kills // requests != (number + 1) * kills // requests:
                    kill_one(place, children)
            kill_until_answered(store, partial(kill_one, place, children), ends_at)
            # Who was killed once it had answered leaves its item to another.
            while store.asks(state="open", limit=1) or unfinished(store):
                assert time.monotonic() < ends_at, "a request hangs"
                time.sleep(0.1)
            check(store, wanted)
    finally:
        for child in children:
            child.kill()
            child.wait()


def kill_one(place: dict[str, Any], children: list[Child]) -> None:
    time.sleep(random.uniform(0.02, 0.2))
    victim = random.randrange(len(children))
    children[victim].kill()
    children[victim].wait()
    children[victim] = start(place, FLEET[victim])


def kill_until_answered(store: holdfast.Store, kill: Callable[[], object], ends_at: float) -> None:
    """Kill somebody, and again whenever half of the open requests are answered, to the last one."""
    while left := open_requests(store):
        kill()
        while open_requests(store) > left // 2:
            assert time.monotonic() < ends_at, "a request hangs"
            time.sleep(0.05)


def open_requests(store: holdfast.Store) -> int:
    return len(store.asks(agent="planner", state="open", limit=1_000))


def unfinished(store: holdfast.Store) -> list[holdfast.WorkItem]:
    return store.work.list(status=["pending", "in_progress"])


def check(store: holdfast.Store, wanted: dict[str, list[str]]) -> None:
    pauses: dict[str, list[holdfast.Pause]] = {id: [] for id in wanted}
    for pause in store.pauses(limit=1_000):
        pauses[pause.session_id].append(pause)
    for id, kinds in wanted.items():
        answer = store.peer_call(id).answer
        expected = [
            ["error", f"{number} fails"] if kind == "error" else ["ok", f"{number} answers"]
            for number, kind in enumerate(kinds)
        ]
        assert answer is not None
        assert (answer.status, answer.result) == ("ok", expected), id
        session = store.find_session(id)
        assert len(session.asks()) == len(kinds)
        assert session.info().status == "completed"
        if len(pauses[id]) == 1:
            # However often it was begun anew, the turn after the pause was saved once.
            assert len(session.history(kind="turn")) == 2
    for state in ("waiting", "ready", "resumed"):
        assert store.pauses(state=state) == []
    resumed = [item.input["pause"] for item in store.work.list(type="resume", limit=1_000)]
    assert len(set(resumed)) == len(resumed)
    assert unfinished(store) == []
    assert {item.max_retries for item in store.work.list(limit=1_000)} == {RETRIES}
    assert [each for each in store.sessions(limit=1_000) if each.holder is not None] == []
