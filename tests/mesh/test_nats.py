"""NATS that goes away and comes back, and instances on it that are killed."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client

import holdfast
from holdfast.mesh import Mesh, TransportError, nats
from holdfast.mesh.nats import Nats
from holdfast.testing.subject import Colour, Subject, done
from tests.crash.children import Child
from tests.mesh.faulty import FaultyNats
from tests.mesh.meshes import (
    PATIENCE_SECONDS,
    PLANNER,
    QUICK,
    WEATHER,
    is_idle,
    outbox,
    running,
    until,
)
from tests.mesh.test_couriers import couriers
from tests.nats_server import NatsServer
from tests.peers.test_killed_mesh import (
    FLEET,
    allow_retries,
    check,
    kill_until_answered,
    serve_until_killed,
)

# Long enough for heartbeats on a busy machine: a lease that expires uses up a retry.
LEASE_SECONDS = 6.0
REPLY_SECONDS = 30.0


def test_a_server_that_is_stopped_and_started_again_delays_and_loses_nothing(
    nats_server: NatsServer, place: dict[str, Any], other: dict[str, Any]
) -> None:
    transport = Nats(nats_server.url, resend_seconds=1)
    with (
        holdfast.open(**place, durability="normal") as store,
        holdfast.open(**other, durability="normal") as peers,
        Mesh(store, transport) as mesh,
        running(
            PLANNER.worker(store, transport, **QUICK), WEATHER.worker(peers, transport, **QUICK)
        ),
    ):
        ids = [f"r{number}" for number in range(12)]
        for number, id in enumerate(ids):
            if number % 4 == 1:
                nats_server.stop()
            mesh.request("planner", ["Oslo", "Rome"], request_id=id, wait_seconds=0)
            if number % 4 == 3:
                until(lambda: any(attempts for _, _, attempts in outbox(store)), "nothing is tried")
                nats_server.start()
        for id in ids:
            call = mesh.wait(id, wait_seconds=180)
            assert call.answer is not None
            assert [status for status, _ in call.answer.result] == ["ok", "ok"]
        until(lambda: is_idle(store) and is_idle(peers), "something is left")
        assert len(peers.sessions(agent="weather", limit=100)) == 2 * len(ids)
    transport.close()


@pytest.mark.parametrize("colour", ["sync", "async"])
@pytest.mark.parametrize("is_connected", [False, True])
def test_a_mesh_is_closed_soon_while_the_server_does_not_respond(
    nats_server: NatsServer,
    place: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    colour: Colour,
    is_connected: bool,
) -> None:
    async def run() -> None:
        subject = Subject(place, colour, tmp_path)
        store: Any = await subject.open(durability="normal")
        mesh: Mesh[Any] = Mesh(store, transport)
        if not is_connected:
            nats_server.freeze()
        await done(mesh.request("nobody", request_id="first", wait_seconds=0))
        if is_connected:
            receiver = Nats(nats_server.url)
            arrived = partial(receiver.receive, "agent:nobody", 1, 1.0)
            await asyncio.to_thread(until, arrived, "the first request is not sent")
            receiver.close()
            nats_server.freeze()
            await done(mesh.request("nobody", request_id="second", wait_seconds=0))
        await asyncio.to_thread(until, lambda: len(couriers()) == 2, "no thread has begun")
        began = time.monotonic()
        await done(mesh.close())
        transport.close()
        await subject.close()
        # A send or a fetch alone would take longer.
        assert time.monotonic() - began < REPLY_SECONDS
        await asyncio.to_thread(until, lambda: not couriers(), "a thread waits for ever")

    monkeypatch.setattr(nats, "REPLY_SECONDS", REPLY_SECONDS)
    transport = Nats(nats_server.url)
    asyncio.run(run())


def test_a_client_that_is_closed_while_it_gives_up_a_server_leaves_no_socket(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    is_giving_up = threading.Event()

    class Slow(Client):
        """Takes its time when it closes a connection that the server did not answer."""

        async def _flush_pending(self, *given: Any) -> None:
            if not is_giving_up.is_set():
                made.append(self)
                is_giving_up.set()
                await asyncio.sleep(3_600)

    monkeypatch.setattr(nats, "Client", Slow)
    nats_server.freeze()
    transport = Nats(nats_server.url, connect_timeout=1)

    def receive() -> None:
        with pytest.raises(TransportError):
            transport.receive("agent:planner", 1, 1.0)

    receiving = threading.Thread(target=receive)
    receiving.start()
    assert is_giving_up.wait(60)
    transport.close()
    receiving.join()
    [client] = made
    assert client._transport._io_writer.is_closing()


def test_an_error_that_repeats_is_logged_once(
    nats_server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "holdfast.mesh")
    nats_server.stop()
    transport = Nats(nats_server.url)
    with pytest.raises(TransportError):
        transport.receive("agent:planner", 1, 0.1)

    def told(level: int) -> list[str]:
        found = [each.getMessage() for each in caplog.records if each.levelno == level]
        return [each for each in found if each.startswith("NATS: ")]

    until(lambda: len(told(logging.DEBUG)) > 2, "it is not tried again")
    assert len(told(logging.INFO)) == len(set(told(logging.INFO))) > 0
    transport.close()


def start(place: dict[str, Any], url: str, prefix: str, name: str) -> Child:
    def serve(say: Any) -> None:
        transport = FaultyNats(url, prefix=prefix, ack_seconds=6, resend_seconds=1)
        serve_until_killed(place, name, transport, lease_seconds=LEASE_SECONDS)

    return Child(serve)


@pytest.mark.parametrize(
    ("requests", "kills"), [(40, 8), pytest.param(200, 100, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("where", ["same store", "other store"])
def test_every_request_ends_once_while_messages_get_lost_and_instances_are_killed(
    requests: int,
    kills: int,
    where: str,
    nats_url: str,
    prefix: str,
    postgres_dsn: str,
    ready_namespace: str,
    namespace: str,
) -> None:
    random.seed(kills)
    own: dict[str, Any] = {"url": postgres_dsn, "namespace": ready_namespace}
    far: dict[str, Any] = (
        own if where == "same store" else {"url": postgres_dsn, "namespace": namespace}
    )
    wanted = {
        f"r{number}": [random.choice(["ok", "ok", "error"]) for _ in range(random.randint(1, 5))]
        for number in range(requests)
    }
    places = {name: own if "planner" in name else far for name in FLEET}
    for place in [own] if far is own else [own, far]:
        allow_retries(place)
    children = [start(places[name], nats_url, prefix, name) for name in FLEET]
    transport = FaultyNats(nats_url, prefix=prefix, resend_seconds=1)
    try:
        with (
            holdfast.open(**own, durability="normal") as store,
            holdfast.open(**far, durability="normal") as peers,
            Mesh(store, transport) as mesh,
        ):

            def kill_one() -> None:
                victim = random.randrange(len(children))
                time.sleep(random.uniform(0.02, 0.2))
                children[victim].kill()
                children[victim].wait()
                name = FLEET[victim]
                children[victim] = start(places[name], nats_url, prefix, name)

            for number, (id, input) in enumerate(wanted.items()):
                mesh.request("planner", input, request_id=id, wait_seconds=0)
                if number * kills // requests != (number + 1) * kills // requests:
                    kill_one()
            kill_until_answered(store, kill_one, time.monotonic() + PATIENCE_SECONDS)
            until(lambda: is_idle(store) and is_idle(peers), "a request hangs")
            check(store, wanted)
            served = peers.sessions(agent="peer", limit=1_000)
            assert len(served) == sum(map(len, wanted.values()))
            assert [each for each in served if each.holder is not None] == []
    finally:
        for child in children:
            child.kill()
            child.wait()
        transport.close()
