"""Following: each change once and in order, over server-sent events and WebSockets."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection

import holdfast
from holdfast.server.options import Options, ServerLimits
from tests.server.live import Live, live


@pytest.fixture(scope="module")
def server(database: dict[str, Any]) -> Iterator[Live]:
    with holdfast.open(**database) as store:
        for name in ("one", "two", "three", "four", "five", "six", "seven", "eight"):
            store.session(f"child-{name}", parent=store.session(name))
    with live(**database) as server:
        yield server


def lines(answer: httpx.Response, count: int) -> list[dict[str, Any]]:
    """Return the next events of a stream."""
    found: list[dict[str, Any]] = []
    event: dict[str, Any] = {}
    for line in answer.iter_lines():
        name, _, value = line.partition(": ")
        if name in {"id", "event"}:
            event[name] = value
        elif name == "data":
            event["data"] = json.loads(value)
        elif not line and "data" in event:
            found.append(event)
            event = {}
            if len(found) == count:
                return found
    return found


def received(watching: ClientConnection) -> Iterator[str | bytes]:
    """Yield what comes until the server closes."""
    with contextlib.suppress(ConnectionClosed):
        while True:
            yield watching.recv(30)


def test_websocket_events(server: Live) -> None:
    with server.socket("/sessions/child-one/state/stream?after_sequence=0") as watching:
        server.put("child-one", "progress", 42)
        told = json.loads(watching.recv(30))
        assert told.pop("timestamp").endswith("Z")
        assert told == {
            "type": "state_key_updated",
            "root_session_id": "one",
            "sequence": 1,
            "key": "progress",
            "value": 42,
            "version": 1,
            "updated_by": "child-one",
            "changed_by": "child-one",
        }
        server.client.delete("/sessions/one/state/keys/progress")
        gone = json.loads(watching.recv(30))
        assert (gone["type"], gone["version"]) == ("state_key_deleted", 2)
        assert gone["deleted_by"] == "one"
        merged = {"tasks_completed": 4, "other": "x" * 9_000}
        patch = {"content-type": "application/merge-patch+json"}
        server.client.patch("/sessions/one/state", json=merged, headers=patch)
        whole, *keys = [json.loads(watching.recv(30)) for _ in range(3)]
        assert (whole["type"], whole["version"], whole["changed_by"]) == ("state_updated", 3, "one")
        assert whole["patch"] == merged
        assert [(each["key"], each["sequence"]) for each in keys] == [
            ("other", 3), ("tasks_completed", 3),
        ]  # fmt: skip
        assert (keys[0]["value_omitted"], "value" in keys[0]) == (True, False)
    path = "/sessions/one/state/stream?after_sequence=0&kinds=state_event&values=true"
    with server.socket(path) as watching:
        told = json.loads(watching.recv(30))
        assert (told["type"], told["sequence"]) == ("state_event", 1)
        assert told["event"] == {"type": "set", "key": "progress", "value": 42}
        assert told["session_id"] == "child-one"
    with server.socket("/sessions/one/state/stream?after_sequence=0&values=false") as watching:
        assert "value" not in json.loads(watching.recv(30))


def test_a_reconnect_at_every_place_gives_each_change_once(server: Live) -> None:
    for number in range(6):
        server.put("two", f"k{number % 2}", number)
    for after in range(6):
        path = f"/sessions/two/state/stream?after_sequence={after}"
        with server.socket(path) as watching:
            found = [json.loads(watching.recv(30))["sequence"] for _ in range(6 - after)]
            assert found == list(range(after + 1, 7))
        wins = {"last-event-id": str(after)}
        with server.client.stream(
            "GET", "/sessions/two/state/stream?after_sequence=6", headers=wins
        ) as answer:
            assert answer.headers["content-type"] == "text/event-stream"
            got = lines(answer, 6 - after)
            assert [int(each["id"]) for each in got] == list(range(after + 1, 7))
            assert {each["event"] for each in got} == {"state_key_updated"}


def test_catching_up_and_live_changes_join_without_a_gap(server: Live) -> None:
    operation = {"op": "increment", "key": "n"}
    batch = {"operations": [operation] * 250}
    assert server.client.post("/sessions/three/state/batch", json=batch).status_code == 200
    with server.socket("/sessions/three/state/stream?after_sequence=0") as watching:
        for number in range(20):
            server.put("child-three", "n", number)
        found = [json.loads(watching.recv(30))["sequence"] for _ in range(270)]
    assert found == list(range(1, 271))


def test_clients_that_are_gone_leave_no_trace_in_the_log(
    server: Live, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(200):
        server.put("seven", f"k{number}", number)
    path = "/sessions/seven/state/stream?after_sequence=0"
    for _ in range(50):
        with server.raw() as connection:
            connection.sendall(handshake(server, path))
            # Closing then resets the connection.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with server.socket(path) as watching:
        assert len([json.loads(watching.recv(30)) for _ in range(200)]) == 200
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


def test_a_stream_says_where_it_begins_before_the_first_change(server: Live) -> None:
    """Whoever is disconnected before anything happens continues there, and misses nothing."""
    for number in range(3):
        server.put("eight", "k", number)
    path, accept = "/sessions/eight/state/stream", {"accept": "text/event-stream"}
    with server.client.stream("GET", path, headers=accept) as answer:
        assert next(answer.iter_lines()) == "id: 3"
    server.put("eight", "k", "meanwhile")
    resumed = {**accept, "last-event-id": "3"}
    with server.client.stream("GET", path, headers=resumed) as answer:
        [change] = lines(answer, 1)
        assert (change["id"], change["data"]["value"]) == ("4", "meanwhile")


def test_a_follower_that_answers_no_pings_is_closed_with_its_place(tmp_path: Path) -> None:
    place: dict[str, Any] = {"url": f"sqlite:///{tmp_path}/store.db"}
    with holdfast.open(**place) as store:
        store.session("one").state.set("k", 1)
    options = Options(limits=ServerLimits(ping_seconds=1.0))
    with live(options, **place) as server, server.raw() as silent:
        silent.sendall(handshake(server, "/sessions/one/state/stream?after_sequence=0"))
        received = b""
        while part := silent.recv(65_536):
            received += part
    # On a busy machine, it may be closed before it was sent anything.
    expected = [b"after=1"] if b'"key":"k"' in received else [b"after=0", b"after="]
    code, _, reason = received[received.rindex(b"\x88") + 2 :].partition(b"a")
    assert (struct.unpack(">H", code), b"a" + reason in expected) == ((1013,), True)


def handshake(server: Live, path: str) -> bytes:
    return (
        f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {server.secret}\r\n"
        "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    ).encode()


def test_without_a_place_only_what_comes_is_told(server: Live) -> None:
    server.put("four", "k", 1)
    with (
        server.socket("/sessions/four/state/stream") as watching,
        server.client.stream("GET", "/sessions/four/state/stream") as answer,
    ):
        # Both have begun when what is committed after their answers is told.
        server.put("four", "k", 2)
        assert json.loads(watching.recv(30))["sequence"] == 2
        assert [each["id"] for each in lines(answer, 1)] == ["2"]


def test_the_feed_of_a_tree_and_of_all(server: Live) -> None:
    page = server.client.get("/sessions/child-five/feed?limit=1").json()
    assert (page["has_more"], page["events"][0]["type"]) == (True, "session_created")
    server.put("five", "k", 1)
    asked = {"after": str(page["next_after"]), "kinds": "state_changed", "values": "false"}
    rest = server.client.get("/sessions/five/feed", params=asked).json()
    assert (rest["next_after"], rest["has_more"]) == (3, False)
    assert [sorted(each) for each in rest["events"]] == [
        ["position", "root_session_id", "session_id", "timestamp", "type"]
    ]
    asked = {"after": "0", "kinds": "none", "limit": "2"}
    nothing = server.client.get("/sessions/five/feed", params=asked).json()
    assert nothing == {"events": [], "next_after": 2, "has_more": True}
    with server.socket("/sessions/five/feed?after=2") as watching:
        told = json.loads(watching.recv(30))
        assert (told["type"], told["position"]) == ("state_changed", 3)
    found, cursor = [], ""
    while True:
        asked = {"limit": "7"} | ({"cursor": cursor} if cursor else {})
        body = server.client.get("/feed", params=asked).json()
        found += body["events"]
        cursor = body["next_cursor"]
        if not body["has_more"]:
            break
    mine = [each["position"] for each in found if each["root_session_id"] == "five"]
    assert mine == [1, 2, 3]
    changed = server.client.get("/feed", params={"kinds": "state_changed", "limit": "1000"}).json()
    assert {each["type"] for each in changed["events"]} == {"state_changed"}
    with server.client.stream(
        "GET", "/feed", params={"cursor": cursor}, headers={"accept": "text/event-stream"}
    ) as answer:
        server.put("five", "k", 2)
        [event] = lines(answer, 1)
    assert (event["data"]["root_session_id"], event["data"]["position"]) == ("five", 4)
    again = server.client.get("/feed", params={"cursor": event["id"]}).json()
    assert (again["events"], again["has_more"]) == ([], False)


def test_what_cannot_be_followed_is_refused(server: Live) -> None:
    with pytest.raises(InvalidStatus) as caught:
        server.socket("/sessions/none/state/stream")
    assert caught.value.response.status_code == 404
    assert json.loads(caught.value.response.body)["error"] == "session_not_found"
    with pytest.raises(InvalidStatus) as caught:
        server.socket("/sessions/one/state")
    assert caught.value.response.status_code == 404
    ahead = server.client.get("/sessions/six/state/stream?after_sequence=9")
    assert (ahead.status_code, ahead.json()["error"]) == (400, "sequence_in_future")
    wrong = server.client.get("/sessions/six/state/stream?kinds=other")
    assert wrong.status_code == 422


def test_history_that_was_removed_is_told_before_the_stream(
    server: Live, database: dict[str, Any]
) -> None:
    for number in range(4):
        server.put("six", "k", number)
    with holdfast.open(**database) as store:
        store.find_session("six").state.compact(3)
    gone = server.client.get("/sessions/six/state/stream?after_sequence=1")
    assert (gone.status_code, gone.json()["error"]) == (410, "history_compacted")
    for after, closing in ((1, (4410, "oldest=3")), (9, (4400, "after="))):
        path = f"/sessions/six/state/stream?after_sequence={after}"
        with server.socket(path) as watching:
            assert list(received(watching)) == []
            assert (watching.close_code, watching.close_reason) == closing


def test_a_follower_that_takes_nothing_is_closed_with_its_place(tmp_path: Path) -> None:
    place: dict[str, Any] = {"url": f"sqlite:///{tmp_path}/store.db"}
    with holdfast.open(**place) as store:
        store.session("one")
    options = Options(limits=ServerLimits(backlog_events=10, ping_seconds=600))
    with live(options, **place) as server:
        path = "/sessions/one/state/stream?after_sequence=0&kinds=state_event"
        with server.socket(path) as stuck, server.socket(path) as quick:
            number = 0
            # More than the sockets between them hold, and than the backlog.
            while number < 50:
                number += 1
                assert server.put("one", "k", "x" * 400_000).status_code == 200
                assert json.loads(quick.recv(30))["sequence"] == number
            taken = [json.loads(text)["sequence"] for text in received(stuck)]
        assert taken == list(range(1, len(taken) + 1))
        assert len(taken) < number
        assert (stuck.close_code, stuck.close_reason) == (1013, f"after={len(taken)}")
        with server.socket(path.replace("=0", f"={len(taken)}")) as again:
            rest = [json.loads(again.recv(30))["sequence"] for _ in range(number - len(taken))]
        assert rest == list(range(len(taken) + 1, number + 1))
