"""What is too large, too deep, malformed, too much or too slow: refused, and the server goes on."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from uvicorn.server import ServerState
from websockets.exceptions import ConnectionClosed

import holdfast
from holdfast.server.options import Options, ServerLimits
from holdfast.server.protocol import limited
from tests.server.live import Live, live
from tests.server.serving import Served, error, serving

LIMITS = ServerLimits(body_bytes=100_000, header_bytes=4_096)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    url = f"sqlite:///{tmp_path_factory.mktemp('limits')}/store.db"
    limits = holdfast.Limits(value_bytes=50_000, keys_per_root=3, batch_operations=2)
    with serving(Options(limits=LIMITS), url=url, limits=limits) as served:
        served.runner.run(served._make("one", None))
        yield served


def put(served: Served, content: bytes, **headers: str) -> Any:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    path = "/sessions/one/state/keys/k"
    return served.put(path, content=content, headers={"if-match": "*"} | named)


def test_limits_are_told(small: Served) -> None:
    told = small.get("/limits").json()
    assert (told["server"]["body_bytes"], told["store"]["value_bytes"]) == (100_000, 50_000)


def test_bodies_up_to_their_limit_are_taken(small: Served) -> None:
    around = len(b'{"value": ""}')
    most = b'{"value": "%b"}' % (b"x" * (LIMITS.body_bytes - around))
    assert error(put(small, most)) == (413, "too_large")
    assert "value_bytes" in put(small, most).json()["detail"]
    over = put(small, most + b" ")
    assert error(over) == (413, "too_large")
    assert (over.json()["limit"], over.json()["actual"]) == (100_000, 100_001)
    assert put(small, b'{"value": "%b"}' % (b"x" * 49_000)).status_code == 200
    chunks = small.put(
        "/sessions/one/state/keys/k",
        content=pieces(),
        headers={"if-match": "*"},
    )
    assert error(chunks) == (413, "too_large")


async def pieces() -> Any:
    yield b'{"value": "'
    for _ in range(200):
        yield b"x" * 1_000


MALFORMED = [
    b"", b"{", b'{"value": 1', b'{"value": NaN}', b'{"value": Infinity}', b'{"value": -Infinity}',
    b'{"value": 1, "value": 2}', b'{"value": {"a": 1, "a": 2}}', b'{"value": "\\ud800"}',
    b'{"value": 1e999}', b'{"value": 01}', b'{"value": \'a\'}', b'{"value": 1}x', b"\xff\xfe",
    b'{"value": "\x00"}', b'\xef\xbb\xbf{"value": 1}', b'{"value": "\xff"}', b'{"value": 1,}',
    b'{value: 1}', b'{"value": "a\nb"}', b"null x", b'{"value": tru}', b'{"value": [1, 2}',
]  # fmt: skip
UNFIT = [
    b"null", b"[]", b"{}", b'"text"', b"1", b'{"value": 1, "version": 2}', b'{"Value": 1}',
    b'{"other": 1}',
]  # fmt: skip


@pytest.mark.parametrize("content", MALFORMED)
def test_what_is_no_json_is_malformed(small: Served, content: bytes) -> None:
    assert error(put(small, content)) == (400, "malformed")


@pytest.mark.parametrize("content", UNFIT)
def test_what_does_not_fit_names_the_place(small: Served, content: bytes) -> None:
    answer = put(small, content)
    assert error(answer) == (422, "invalid_request")
    assert "pointer" in answer.json()


@pytest.mark.parametrize(
    ("bomb", "expected"),
    [
        (b'{"value": ' + b"[" * 40_000 + b"]" * 40_000 + b"}", (422, "invalid_request")),
        (
            b'{"value": ' + b'{"a":' * 15_000 + b"1" + b"}" * 15_000 + b"}",
            (422, "invalid_request"),
        ),
        (b'{"value": ' + b"9" * 90_000 + b"}", (422, "invalid_request")),
        (b'{"value": ' + b"9" * 4_097 + b"}", (422, "invalid_request")),
        (b'{"value": [' + b"[" * 64 + b"]" * 64 + b"]}", (422, "invalid_request")),
    ],
)
def test_bombs_are_refused(small: Served, bomb: bytes, expected: tuple[int, str]) -> None:
    assert error(put(small, bomb)) == expected
    nested = b'{"value": ' + b"[" * 60 + b"]" * 60 + b"}"
    assert put(small, nested).status_code == 200


SHAPE = ServerLimits(json_nodes=40, json_keys=6, json_string_bytes=30)
# What a body may have at most, and the same with one more; the body itself has two values more.
SHAPES = {
    "json_nodes": [
        (b"[" + b",".join([part] * 38) + b"]", b"[" + b",".join([part] * 39) + b"]")
        for part in (b"1", b"[]", b"{ }", b"[ \r\n\t]", b'"[,{"', b'"\\",["', b'"\\\\"', b" null ")
    ]
    + [
        (b"[" * 38 + b"1" + b"]" * 38, b"[" * 39 + b"1" + b"]" * 39),
        (
            b'[{"a": 1, "b": [1, 2]}' + b', ""' * 33 + b"]",
            b'[{"a": 1, "b": [1, 2]}' + b', ""' * 34 + b"]",
        ),
    ],
    "json_keys": [
        (b'{"":1' + b"".join(b',"%d":1' % n for n in range(5)) + b"}",
         b'{"":1' + b"".join(b',"%d":1' % n for n in range(6)) + b"}"),
        (b'[1, {"a": {"1":1,"2":2,"3":3,"4":4,"5":5,"6":6}}]',
         b'[1, {"a": {"1":1,"2":2,"3":3,"4":4,"5":5,"6":6,"7":7}}]'),
    ],
    "json_string_bytes": [
        (b'"' + b"x" * 30 + b'"', b'"' + b"x" * 31 + b'"'),
        (b'"' + "é".encode() * 15 + b'"', b'"' + "é".encode() * 15 + b'x"'),
        (b'["a", {"b": "' + b"\\u0041" * 30 + b'"}]', b'["a", {"b": "' + b"\\u0041" * 31 + b'"}]'),
        (b'{"' + b"k" * 30 + b'": 1}', b'{"' + b"k" * 31 + b'": 1}'),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def shaped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    url = f"sqlite:///{tmp_path_factory.mktemp('shapes')}/store.db"
    with serving(Options(limits=SHAPE), url=url) as served:
        served.runner.run(served._make("one", None))
        yield served


@pytest.mark.parametrize(
    ("name", "most", "more"), [(name, *each) for name, pairs in SHAPES.items() for each in pairs]
)
def test_json_of_a_body_has_limits(shaped: Served, name: str, most: bytes, more: bytes) -> None:
    taken = put(shaped, b'{"value": ' + most + b"}")
    assert taken.status_code == 200, taken.text
    refused = put(shaped, b'{"value": ' + more + b"}")
    assert error(refused) == (422, "invalid_request")
    assert name in refused.json()["detail"]


@pytest.mark.parametrize(
    ("start", "rest", "expected"),
    [
        (b"[", b"[],", (422, "invalid_request")),
        (b'""', b'""', (422, "invalid_request")),
        (b'["', b'\\"', (400, "malformed")),
    ],
)
def test_json_without_end_is_refused_before_it_is_parsed(
    shaped: Served, start: bytes, rest: bytes, expected: tuple[int, str]
) -> None:
    """Parsed, the first two would be malformed; the third is one string, which is read once."""
    most = SHAPE.body_bytes - len(start)
    assert error(put(shaped, start + rest * (most // len(rest)))) == expected


def test_mcp_takes_no_more_than_rest(shaped: Served) -> None:
    headers = {"x-agent-session-id": "one", "accept": "application/json, text/event-stream"}

    def sent(text: bytes) -> Any:
        body = b'{"jsonrpc": "2.0", "id": 1, "method": "ping", "params": %b}' % text
        media = {"content-type": "application/json"}
        return shaped.post("/mcp", content=body, headers=headers | media)

    for name, text in (
        ("json_nodes", b'{"a": [%b]}' % b",".join([b"1"] * 40)),
        ("json_keys", b"{%b}" % b",".join(b'"%d": 1' % n for n in range(7))),
        ("json_string_bytes", b'{"a": "%b"}' % (b"x" * 31)),
    ):
        refused = sent(text)
        assert error(refused) == (422, "invalid_request")
        assert name in refused.json()["detail"]


def test_values_keep_their_types(small: Served) -> None:
    for text in ("null", "false", "0", '""', "[]", "{}", "1.0", "true", "-0.0", "9" * 4_000):
        content = b'{"value": ' + text.encode() + b"}"
        assert put(small, content).status_code == 200
        body = small.get("/sessions/one/state/keys/k").text
        assert f'"value":{text},' in body


def test_other_types_of_bodies_are_refused(small: Served) -> None:
    body = b'{"value": 1}'
    for media in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "x"):
        assert error(put(small, body, content_type=media)) == (415, "unsupported_media_type")
    assert put(small, body, content_type="application/json; charset=utf-8").status_code == 200
    assert error(put(small, body, content_encoding="gzip")) == (415, "unsupported_media_type")


def test_headers_have_a_limit(small: Served) -> None:
    assert error(put(small, b"{}", x="y" * 4_096)) == (431, "headers_too_large")


def test_keys_and_batches_have_limits(small: Served) -> None:
    path = "/sessions/one/state"
    small.put(path, json={"state": {"a": 1, "b": 2}}, headers={"if-match": "*"})
    body = {"operations": [{"op": "set", "key": key, "value": 1} for key in "cd"]}
    assert error(small.post(f"{path}/batch", json=body)) == (413, "too_large")
    three = {"operations": [{"op": "set", "key": "a", "value": 1}] * 3}
    assert error(small.post(f"{path}/batch", json=three)) == (413, "too_large")
    assert error(small.post(f"{path}/batch", json={"operations": []})) == (422, "invalid_request")


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=x", "limit=1&limit=2", "other=1", "since=-1", "since=%FF"]
)
def test_queries_are_checked(small: Served, query: str) -> None:
    answer = small.get(f"/sessions/one/state/events?{query}")
    assert answer.status_code in {400, 422}
    assert "body" not in answer.json()["detail"]
    assert small.get("/sessions/one/state/events?limit=999999").status_code == 200


PRECONDITIONS = [
    {"if-match": '"1", "2"'}, {"if-match": "x"}, {"if-match": '"1'}, {"if-match": 'W/"1"'},
    {"if-match": "-1"}, {"if-match": '""'}, {"if-match": "1.0"}, {"if-match": '"g1"'},
    {"if-match": '"1"', "if-none-match": "*"}, {"if-none-match": '"1"'},
    {"x-if-match": "other"}, {"x-if-match": "skip", "if-match": '"1"'},
    {"x-if-match": "skip", "if-none-match": "*"},
]  # fmt: skip


@pytest.mark.parametrize("headers", PRECONDITIONS)
def test_preconditions_that_say_nothing_clear_are_refused(
    small: Served, headers: dict[str, str]
) -> None:
    answer = small.put("/sessions/one/state/keys/k", json={"value": 1}, headers=headers)
    assert error(answer) == (400, "precondition_invalid")


def test_a_bare_version_and_zero_are_taken(small: Served) -> None:
    path = "/sessions/one/state/keys/bare"
    small.put("/sessions/one/state", json={"state": {}}, headers={"if-match": "*"})
    assert small.put(path, json={"value": 1}, headers={"if-match": '"0"'}).status_code == 200
    assert small.put(path, json={"value": 2}, headers={"if-match": "1"}).status_code == 200
    missing = small.put("/sessions/one/state/keys/no", json={"value": 1}, headers={"if-match": "5"})
    told = missing.json()
    assert (told["current_version"], told["current_value"], told["your_version"]) == (0, None, 5)


def test_a_token_may_ask_only_so_often(tmp_path: Path) -> None:
    options = Options(limits=ServerLimits(requests_per_second=5))
    with serving(options, url=f"sqlite:///{tmp_path}/store.db") as served:
        codes = [served.get("/limits").status_code for _ in range(40)]
        assert codes[:10] == [200] * 10
        assert 429 in codes
        assert served.get("/healthz").status_code == 200


def test_a_follower_too_many_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    options = Options(limits=ServerLimits(streams_per_token=0))
    with serving(options, url=f"sqlite:///{tmp_path}/store.db") as served:
        root, _ = served.tree()
        path = f"/sessions/{root}/state/stream"
        refused = served.get(path, headers={"accept": "text/event-stream"})
        assert error(refused) == (429, "rate_limited")
        assert not served.api.context.hub._followed, "a channel that nobody follows is kept"


def test_a_conflict_has_the_current_value_up_to_a_limit(tmp_path: Path) -> None:
    options = Options(limits=ServerLimits(conflict_bytes=100))
    with serving(options, url=f"sqlite:///{tmp_path}/store.db") as served:
        root, _ = served.tree()
        path, any_version = f"/sessions/{root}/state", {"if-match": "*"}
        sizes = {"a": 98, "b": 99, "c": 60, "d": 30, "e": 20}
        for key, size in sizes.items():
            served.put(f"{path}/keys/{key}", json={"value": "x" * size}, headers=any_version)

        def refused(key: str) -> Any:
            answer = served.put(f"{path}/keys/{key}", json={"value": 1}, headers={"if-match": "9"})
            assert error(answer) == (409, "version_conflict")
            return answer.json()

        whole = refused("a")
        assert (whole["current_value"], whole["current_version"]) == ("x" * 98, 1)
        assert "current_value_omitted" not in whole
        cut = refused("b")
        assert (cut["current_value"], cut["current_value_omitted"]) == (None, True)
        assert cut["current_version"] == 1
        # In a batch the limit is for all together: 62 bytes of c are shown, 32 of d, and none of e.
        operations = [{"op": "delete", "key": key, "if_match": 9} for key in "cbdec"]
        batch = served.post(f"{path}/batch", json={"operations": operations}).json()
        assert batch["current_value"] == "x" * 60
        shown = [
            (each.get("current_value"), each.get("current_value_omitted"))
            for each in batch["results"]
        ]
        cut_off, unchecked = (None, True), (None, None)
        assert shown == [("x" * 60, None), cut_off, ("x" * 30, None), cut_off, unchecked]
        document = served.put(path, json={"state": {}}, headers={"if-match": "1"}).json()
        assert (document["current_state"], document["current_state_omitted"]) == (None, True)
        assert document["current_version"] == 5


def test_unknown_addresses_and_methods_have_the_same_shape(small: Served) -> None:
    for path in ("/nothing", "/sessions//state", "/sessions/one/state/"):
        assert error(small.get(path)) == (404, "not_found")
    wrong = small.request("POST", "/sessions/one/state/keys/k")
    assert error(wrong) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "DELETE, GET, PATCH, PUT"


def test_a_base_path_is_part_of_every_address(tmp_path: Path) -> None:
    options = Options(base_path="/holdfast")
    with serving(options, url=f"sqlite:///{tmp_path}/store.db") as served:
        assert served.get("/holdfast/healthz").status_code == 200
        assert error(served.get("/healthz")) == (404, "not_found")
        made = served.post("/holdfast/sessions", json={})
        assert made.headers["location"] == f"/holdfast/sessions/{made.json()['id']}"
        assert served.get("/holdfast/openapi.json").json()["servers"] == [{"url": "/holdfast"}]


# On a socket


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    place: dict[str, Any] = {"url": f"sqlite:///{tmp_path_factory.mktemp('slow')}/store.db"}
    with holdfast.open(**place) as store:
        store.session("one")
    limits = ServerLimits(request_seconds=1.0, connections=150, frame_bytes=10_000)
    with live(Options(limits=limits), **place) as server:
        yield server


def is_closed(connection: socket.socket) -> bool:
    """Whether the server has ended a connection; it has 30 s."""
    connection.settimeout(30)
    try:
        while connection.recv(65_536):
            pass
    except ConnectionError:
        pass
    return True


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /limits HTTP/1.1\r\nHost: loc",
        b"PUT /sessions/one/state HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{",
        b"PUT /limits HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
        b"GET /feed HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"X: " + b"a" * 20_000 + b"\r\n\r\n",
        b"POST /feed HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Content-Length: 3\r\n\r\nabc",
    ],
)
def test_clients_that_do_not_finish_a_request_are_given_up(server: Live, sent: bytes) -> None:
    with server.raw() as connection:
        connection.sendall(sent)
        assert is_closed(connection)
    assert server.client.get("/limits").status_code == 200


def test_headers_have_a_deadline_of_their_own(tmp_path: Path) -> None:
    options = Options(limits=ServerLimits(head_seconds=1, request_seconds=600))
    with live(options, url=f"sqlite:///{tmp_path}/store.db") as server, ExitStack() as opened:
        head = f"Host: localhost\r\nAuthorization: Bearer {server.secret}\r\n".encode()
        length = b"Content-Length: 2\r\nConnection: close\r\n\r\n"
        shaking = b"GET /feed HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n" + head
        idle, kept, unfinished, slow = (opened.enter_context(server.raw()) for _ in range(4))
        slow.sendall(b"POST /sessions HTTP/1.1\r\n" + head + length + b"{")
        kept.sendall(b"GET /limits HTTP/1.1\r\n" + head + b"\r\n")
        kept.sendall(shaking)
        unfinished.sendall(shaking)
        assert is_closed(unfinished)
        assert is_closed(kept)
        # A slow body and a connection that was not used yet have longer.
        slow.sendall(b"}")
        assert received(slow).startswith(b"HTTP/1.1 201 ")
        idle.sendall(b"GET /limits HTTP/1.1\r\n" + head + b"Connection: close\r\n\r\n")
        assert received(idle).startswith(b"HTTP/1.1 200 ")


class Pipe(asyncio.Transport):
    """A connection of which only its end matters."""

    is_aborted = False

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True

    def close(self) -> None:
        """Nothing is left to send."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


@pytest.mark.parametrize("is_complete", [True, False])
def test_headers_that_arrive_in_parts_stop_their_deadline(is_complete: bool) -> None:
    async def never(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.Event().wait()

    async def case() -> bool:
        config = uvicorn.Config(never, lifespan="off", log_config=None)
        config.load()
        kind = limited(ServerLimits(head_seconds=0, request_seconds=600))
        protocol, pipe = kind(config, ServerState(), {}), Pipe()
        protocol.connection_made(pipe)
        protocol.data_received(b"POST / HTTP/1.1\r\nHost: localhost\r\n")
        if is_complete:
            protocol.data_received(b"Content-Length: 2\r\n\r\n{")
        for _ in range(10):
            await asyncio.sleep(0)
        is_aborted = pipe.is_aborted
        protocol.connection_lost(None)
        return is_aborted

    assert asyncio.run(case()) is not is_complete


def test_a_websocket_lasts_longer_than_a_request_may_take(server: Live) -> None:
    with server.socket("/sessions/one/state/stream") as watching, server.raw() as later:
        assert is_closed(later)
        server.put("one", "lasting", 1)
        assert json.loads(watching.recv(30))["key"] == "lasting"


@pytest.mark.parametrize(
    "sent",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /limits HTTP/1.1\r\n\r\n",
        b"GET /limits HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /limits HTTP/1.1\r\nX: " + b"a" * 100_000,
    ],
)
def test_malformed_requests_are_refused(server: Live, sent: bytes) -> None:
    with server.raw() as connection:
        connection.sendall(sent)
        connection.settimeout(30)
        first = b""
        while b"}" not in first and (part := connection.recv(65_536)):
            first += part
        head, _, body = first.partition(b"\r\n\r\n")
        assert head.split(b" ")[1] in {b"400", b"421", b"414", b"431"}
        assert json.loads(body)["status"] == int(head.split(b" ")[1])
    assert server.client.get("/limits").status_code == 200


def received(connection: socket.socket) -> bytes:
    """Return what the server sends until it closes the connection."""
    connection.settimeout(30)
    parts = []
    while part := connection.recv(65_536):
        parts.append(part)
    return b"".join(parts)


def test_a_request_whose_end_is_ambiguous_is_refused_with_what_follows_it(server: Live) -> None:
    head = f"Host: localhost\r\nAuthorization: Bearer {server.secret}\r\n"
    for method in ("GET", "POST"):
        hidden = f"GET /sessions HTTP/1.1\r\n{head}\r\n"
        sent = (
            f"{method} /sessions HTTP/1.1\r\n{head}Content-Type: application/json\r\n"
            f"Content-Length: {len(hidden) + 5}\r\nTransfer-Encoding: chunked\r\n\r\n"
            f"0\r\n\r\n{hidden}"
        )
        with server.raw() as connection:
            connection.sendall(sent.encode())
            answers = received(connection)
        assert answers.startswith(b"HTTP/1.1 400 ")
        assert answers.count(b"HTTP/1.1 ") == 1


def test_a_body_that_breaks_off_after_the_answer_ends_the_connection(
    server: Live, caplog: pytest.LogCaptureFixture
) -> None:
    sent = (
        f"PUT /sessions/one/state/keys/k HTTP/1.1\r\nHost: localhost\r\n"
        f"Authorization: Bearer {server.secret}\r\nContent-Type: application/json\r\n"
        'If-Match: *\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{"val\r\nnone\r\n'
    )
    with server.raw() as connection:
        connection.sendall(sent.encode())
        head, _, body = received(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"] == "malformed"
    assert not [each for each in caplog.records if each.exc_info or each.levelname == "ERROR"]


@pytest.mark.parametrize("path", ["/feed", "/sessions/one/feed", "/sessions/one/state/stream"])
def test_the_head_of_a_stream_has_no_end_to_wait_for(server: Live, path: str) -> None:
    before = server.client.get("/metrics").text
    answer = server.client.head(path, headers={"accept": "text/event-stream"})
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-type"] == "text/event-stream"
    followers = [line for line in before.splitlines() if line.startswith("holdfast_followers ")]
    assert followers[0] in server.client.get("/metrics").text


SHAKING = (
    b"GET /sessions/one/state/stream HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\n"
    b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
HANDSHAKES = {
    "without a key": (SHAKING.replace(b"Key: dGhlIHNhbXBsZSBub25jZQ==", b"Keys: x"), 400),
    "with two keys": (SHAKING.replace(b"\r\n\r\n", b"\r\nSec-WebSocket-Key: x\r\n\r\n"), 400),
    "with a key that is none": (SHAKING.replace(b"dGhlIHNhbXBsZSBub25jZQ==", b"!"), 400),
    "with a short key": (SHAKING.replace(b"dGhlIHNhbXBsZSBub25jZQ==", b"YWJj"), 400),
    "of another version": (SHAKING.replace(b"Version: 13", b"Version: 8"), 400),
    "without a version": (SHAKING.replace(b"Sec-WebSocket-Version: 13\r\n", b""), 400),
    "by another method": (SHAKING.replace(b"GET", b"PUT", 1), 405),
    "with a body": (SHAKING.replace(b"\r\n\r\n", b"\r\nContent-Length: 3\r\n\r\nabc"), 400),
    "with chunks": (
        SHAKING.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
        400,
    ),
    "with many headers": (SHAKING.replace(b"\r\n\r\n", b"\r\nA: b" * 200 + b"\r\n\r\n"), 400),
    "with a long header": (
        SHAKING.replace(b"\r\n\r\n", b"\r\nA: " + b"b" * 9_000 + b"\r\n\r\n"),
        400,
    ),
    "with extensions that are none": (
        SHAKING.replace(b"\r\n\r\n", b"\r\nSec-WebSocket-Extensions: ;;=\r\n\r\n"),
        401,
    ),
    "without a token": (SHAKING, 401),
}


@pytest.mark.parametrize("name", HANDSHAKES)
def test_handshakes_that_are_none_are_refused(
    server: Live, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    sent, status = HANDSHAKES[name]
    with server.raw() as connection:
        connection.sendall(sent)
        connection.settimeout(30)
        received = b""
        while part := connection.recv(65_536):
            received += part
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.split(b" ")[1] == str(status).encode()
    assert b"application/problem+json" in head
    assert json.loads(body)["status"] == status
    assert not [each for each in caplog.records if each.exc_info or each.levelname == "ERROR"]
    assert server.client.get("/limits").status_code == 200


def test_handshakes_that_fail_leave_nothing_behind(server: Live) -> None:
    # There are more of them than the server has connections.
    for sent, _ in list(HANDSHAKES.values()) * 15:
        with server.raw() as connection:
            connection.sendall(sent)
            assert is_closed(connection)
    with server.socket("/sessions/one/state/stream") as watching:
        server.put("one", "shaken", 1)
        assert json.loads(watching.recv(30))["key"] == "shaken"


def test_many_idle_connections_leave_the_server_responsive(server: Live) -> None:
    idle = [server.raw() for _ in range(200)]
    try:
        # Those above the limit are ended at once, the others when they have said nothing for long.
        assert all(map(is_closed, idle))
    finally:
        for each in idle:
            each.close()
    assert server.client.get("/limits").status_code == 200
    # New ones are taken again as soon as the server has noticed that the old ones are gone.
    deadline = time.monotonic() + 30
    while not is_served(server):
        assert time.monotonic() < deadline


def test_a_connection_too_many_is_refused(tmp_path: Path) -> None:
    options = Options(limits=ServerLimits(connections=3, request_seconds=600))
    with live(options, url=f"sqlite:///{tmp_path}/store.db") as server, ExitStack() as opened:
        for _ in range(3):
            opened.enter_context(server.raw())
        with server.raw() as connection:
            head, _, body = received(connection).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 429 ")
        assert json.loads(body)["error"] == "rate_limited"


def is_served(server: Live) -> bool:
    """Whether a new connection is served."""
    try:
        return httpx.get(f"{server.url}/healthz").status_code == 200
    except httpx.TransportError:
        return False


def test_frames_that_are_too_large_end_their_socket(server: Live) -> None:
    with server.socket("/sessions/one/state/stream") as watching:
        watching.send("ignored")
        server.put("one", "k", 1)
        assert json.loads(watching.recv(30))["key"] == "k"
        watching.send("x" * 20_000)
        with pytest.raises(ConnectionClosed):
            watching.recv(30)
        # The rest of the frame may be on its way: then the connection is reset.
        assert watching.close_code in {1009, 1006}
    assert server.client.get("/limits").status_code == 200


def test_requests_and_followers_are_counted(server: Live) -> None:
    with server.socket("/sessions/one/state/stream"):
        deadline = time.monotonic() + 30
        while "holdfast_followers 1\n" not in server.client.get("/metrics").text:
            assert time.monotonic() < deadline
    text = server.client.get("/metrics").text
    assert 'holdfast_requests_total{method="GET",route="/limits",status="200"}' in text
    assert 'route="/sessions/{id}/state/stream"' in text
    assert "one" not in text.replace("none", "")
