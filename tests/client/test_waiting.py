"""Waiting at a client: one WebSocket wakes all that wait; without it they poll."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed

import holdfast
from holdfast.effects.statements import topic as effect_topic
from holdfast.kernel.backoff import Backoff
from holdfast.kernel.signals import TREE_TOPIC, Signals
from holdfast.server.rings import Ringing
from holdfast.wire import TOPICS_MAX, Topics
from holdfast.work import topic as queue_topic
from tests.client.served import serving
from tests.server.live import Live, live
from tests.server.processes import free_port, made_token, server_process

# Longer than any test takes: what waits this long is woken, or the test fails.
FOR_EVER = 600.0
SECONDS_MAX = 60.0


@pytest.fixture(scope="module")
def server(database: dict[str, Any]) -> Iterator[Live]:
    with live(**database) as server:
        yield server


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server on SQLite, for what does not depend on the database."""
    with live(url=f"sqlite:///{tmp_path_factory.mktemp('local')}/store.db") as server:
        yield server


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def database(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Any]]:
    with ExitStack() as stack:
        place: dict[str, Any] = {"url": f"sqlite:///{tmp_path_factory.mktemp('s')}/store.db"}
        if request.param == "postgres":
            schemas = request.getfixturevalue("ready_schemas")
            namespace = stack.enter_context(schemas.lent())
            place = {"url": request.getfixturevalue("postgres_dsn"), "namespace": namespace}
        yield place


def open_client(server: Live, **given: Any) -> holdfast.Store:
    return holdfast.connect(server.url, token=server.secret, **given)


def until(is_so: Callable[[], object]) -> None:
    """Wait for something that has no signal of its own."""
    waiting = threading.Event()
    for _ in range(int(SECONDS_MAX / 0.01)):
        if is_so():
            return
        waiting.wait(0.01)
    raise AssertionError("it did not happen")


def followers(server: Live) -> int:
    [line] = [
        each
        for each in server.client.get("/metrics").text.splitlines()
        if each.startswith("holdfast_followers ")
    ]
    return int(float(line.split()[1]))


def test_followers_are_woken_and_do_not_poll(server: Live) -> None:
    with open_client(server) as watching, open_client(server) as writing:
        session = writing.session("sync")
        found = watching.session("sync").state.watch(poll_seconds=FOR_EVER)
        events = watching.follow("sync", after=2, poll_seconds=FOR_EVER)
        for number in range(1, 4):
            session.state.increment("n")
            assert next(found).sequence == number
            assert next(events).kind == "state_changed"
        # Both wait over one connection.
        assert followers(server) == 1
    until(lambda: followers(server) == 0)


def test_the_same_in_an_event_loop(server: Live) -> None:
    async def main() -> None:
        async with (
            holdfast.aconnect(server.url, token=server.secret) as watching,
            holdfast.aconnect(server.url, token=server.secret) as writing,
        ):
            session = await writing.session("async")
            found = (await watching.session("async")).state.watch(poll_seconds=FOR_EVER)
            every = watching.follow_all(poll_seconds=FOR_EVER)
            seen: list[str] = []
            for number in range(1, 4):
                reading = asyncio.ensure_future(anext(found))
                await session.state.increment("n")
                assert (await asyncio.wait_for(reading, SECONDS_MAX)).sequence == number
                while seen.count("state_changed async") < number:
                    event = await asyncio.wait_for(anext(every), SECONDS_MAX)
                    seen.append(f"{event.kind} {event.root_id}")

    asyncio.run(main())
    until(lambda: followers(server) == 0)


def test_the_end_of_an_effect_and_new_work_wake_their_waiters(server: Live) -> None:
    with open_client(server) as waiting, open_client(server) as working:
        session = working.session("waking")
        begun = session.begin("pay", {"n": 1}, "c1")
        assert isinstance(begun, holdfast.Issued)
        signals = waiting.runtime.signals
        changes: dict[str, Callable[[], object]] = {
            effect_topic(begun.ticket.id): lambda: begun.complete({"ok": True}),
            queue_topic("mail"): lambda: working.work.submit("mail", queue="mail"),
            TREE_TOPIC + "waking": lambda: session.save(n=1),
        }
        for topic, change in changes.items():
            # The first ring only tells that the server listens now.
            assert signals.wait(topic, signals.count(topic), SECONDS_MAX)
            seen = signals.count(topic)
            change()
            assert signals.wait(topic, seen, SECONDS_MAX)


def test_a_connection_that_is_lost_is_made_again(tmp_path: Path) -> None:
    place: dict[str, Any] = {"url": f"sqlite:///{tmp_path}/store.db"}
    secret, port = made_token(place), free_port()
    seen: list[int] = []

    def is_heard(store: holdfast.Store) -> bool:
        return store.runtime.signals.poll_seconds(TREE_TOPIC + "one", 1) > 1

    def is_deaf(store: holdfast.Store) -> bool:
        return not is_heard(store)

    def follow() -> None:
        assert store is not None
        for event in itertools.islice(store.find_session("one").state.watch(), 2):
            seen.append(event.sequence)

    store: holdfast.Store | None = None
    following = threading.Thread(target=follow)
    with ExitStack() as stack:
        for number in (1, 2):
            with server_process(f"--port={port}", **place) as (process, told):
                if store is None:
                    store = stack.enter_context(holdfast.connect(told["url"], token=secret))
                    following.start()
                until(partial(is_heard, store))
                # Made by another process, so that nothing but the server tells of it.
                with holdfast.open(**place) as writing:
                    writing.find_session("one").state.increment("n")
                until(lambda: seen[-1:] == [number])  # noqa: B023
                signals, topic = store.runtime.signals, TREE_TOPIC + "one"
                rung = signals.count(topic)
                process.kill()
                process.wait(SECONDS_MAX)
            # Who waited for the server to ring looks for itself from now on.
            assert signals.wait(topic, rung, SECONDS_MAX)
            until(partial(is_deaf, store))
        following.join(SECONDS_MAX)
    assert seen == [1, 2]


def test_without_a_websocket_waiting_polls(local: Live) -> None:
    """A proxy that passes no WebSockets is asked again and again, with pauses in between."""
    asked: list[str] = []

    async def proxy(scope: Any, receive: Any, send: Any) -> None:
        asked.append(f"{scope['method']} {scope['path']}")
        status, headers, content = 404, [], b""
        if scope["method"] == "POST":
            body = (await receive())["body"]
            given = {name.decode(): value.decode() for name, value in scope["headers"]}
            given["host"] = httpx.URL(local.url).netloc.decode()
            async with httpx.AsyncClient(verify=False, timeout=60) as client:
                answer = await client.post(local.url + scope["path"], content=body, headers=given)
            status, content = answer.status_code, answer.content
            headers = [(b"content-type", answer.headers["content-type"].encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    with serving(proxy) as url, holdfast.connect(url, token=local.secret) as store:
        state = store.session("polled").state
        found = state.watch(poll_seconds=0.02)
        waiting = threading.Thread(target=next, args=(found,))
        waiting.start()
        until(lambda: "GET /call" in asked)
        polls = len(asked)
        until(lambda: len(asked) > polls + 60)
        # So many attempts with their pauses would take minutes.
        assert asked[polls:].count("GET /call") < 30
        state.increment("n")
        waiting.join(SECONDS_MAX)
        assert not waiting.is_alive()


def test_pauses_grow_and_begin_anew_after_what_lasted() -> None:
    backoff = Backoff(1, 8)
    pauses = [backoff.pause_seconds() for _ in range(5)]
    assert all(
        most / 2 <= pause <= most for pause, most in zip(pauses, (1, 2, 4, 8, 8), strict=True)
    )
    backoff.forget(8)
    assert backoff.pause_seconds() >= 4
    backoff.forget(8.1)
    assert backoff.pause_seconds() <= 1


def test_a_token_of_one_tree_hears_of_that_tree_alone() -> None:
    """Whatever it listens to: an effect's end, too, is a change of its tree."""

    async def main() -> None:
        signals, root_id = Signals(), "mine"
        ringing, sent = Ringing(signals, root_id), asyncio.Queue[Any]()
        received = asyncio.Queue[Any]()
        serving = asyncio.create_task(ringing.serve(sent.put, received.get))
        assert (await sent.get())["type"] == "websocket.accept"
        topics = ["effect:1", f"{TREE_TOPIC}other"]
        text = next(Topics.messages(topics, ())).decode()
        await received.put({"type": "websocket.receive", "text": text})
        assert json.loads((await sent.get())["text"]) == topics
        for topic in topics:
            signals.ring(topic)
        for _ in range(10):
            await asyncio.sleep(0)
        assert sent.empty()
        signals.ring(TREE_TOPIC + root_id)
        assert json.loads((await sent.get())["text"]) == topics
        await received.put({"type": "websocket.disconnect"})
        await serving
        assert signals.awaited() == set()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("{", 4422),
        ("[]", 4422),
        ('{"listen": [1]}', 4422),
        (b"\xff\xfe", 4422),
        ('{"other": []}', 4422),
        (json.dumps({"listen": ["local read"]}), 4422),
        (json.dumps({"listen": ["x" * 1_001]}), 4422),
        (json.dumps({"listen": [f"t{number}" for number in range(TOPICS_MAX + 1)]}), 4413),
    ],
)
def test_hostile_messages_end_their_connection(
    local: Live, message: str | bytes, code: int
) -> None:
    with local.socket("/call") as talking:
        talking.send(message)
        with pytest.raises(ConnectionClosed):
            talking.recv(SECONDS_MAX)
        assert talking.close_code == code


def test_a_revoked_token_hears_nothing_more(local: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.server.rings.TICK_SECONDS", 0.05)
    with open_client(local) as store:
        secret = store.tokens.create("revoked", permission="read").secret
        with local.socket("/call", authorization=f"Bearer {secret}") as talking:
            store.tokens.revoke("revoked")
            with pytest.raises(ConnectionClosed):
                talking.recv(SECONDS_MAX)
            assert talking.close_code == 4401


def test_no_more_is_listened_to_than_the_server_takes(local: Live) -> None:
    with open_client(local) as store:
        signals = store.runtime.signals
        names = (f"{TREE_TOPIC}t{number}" for number in itertools.count())
        forget = signals.watch(itertools.islice(names, TOPICS_MAX), lambda: None)
        until(lambda: signals.poll_seconds(f"{TREE_TOPIC}t{TOPICS_MAX - 1}", 1) > 1)
        one_more = next(names)
        signals.wait(one_more, signals.count(one_more), 0)
        assert signals.poll_seconds(one_more, 1) == 1
        # As soon as nobody waits for the others, there is room.
        forget()
        signals.wait(one_more, signals.count(one_more), 0)
        until(lambda: signals.poll_seconds(one_more, 1) > 1)


def test_the_address_of_rings_is_for_websockets(local: Live) -> None:
    assert local.client.get("/call").status_code == 404
    assert httpx.get(f"{local.url}/call", timeout=60).status_code == 401
