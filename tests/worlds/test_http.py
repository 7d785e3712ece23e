"""A service behind HTTP: reset and replay, with answers compared."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random
from typing import Any

import httpx
import pytest

from holdfast.errors import Conflict, InvalidArgument, InvalidValue, ReplayFailed
from holdfast.worlds import check_system
from holdfast.worlds.systems.http import HttpSystem


class Counters(BaseHTTPRequestHandler):
    """Named counters: POST adds, DELETE removes, GET shows all; /reset forgets them."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True
    values: dict[str, int]
    noise: int

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"{}")
        if self.path == "/reset":
            self.values.clear()
            self.answer({})
            return
        name = self.path[1:]
        self.values[name] = (self.values.get(name, 0) + body.get("by", 1)) % 3
        type(self).noise += 1
        self.answer({name: self.values[name]} | ({"noise": self.noise} if name == "noisy" else {}))

    def do_DELETE(self) -> None:
        self.values.pop(self.path[1:], None)
        self.answer({})

    def do_GET(self) -> None:
        self.answer(self.values)

    def answer(self, data: object) -> None:
        body = json.dumps(data).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    handler = type("Handler", (Counters,), {"values": {}, "noise": 0})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
            yield client
        server.shutdown()
        thread.join()


def system_of(client: httpx.Client, **options: Any) -> HttpSystem:
    given: dict[str, Any] = {
        "reset": lambda: client.post("/reset").raise_for_status(),
        "observe": lambda: client.get("/").json(),
    }
    return HttpSystem(client, **{**given, **options})


@pytest.mark.parametrize("steps", [120, pytest.param(300, marks=pytest.mark.slow)])
def test_a_rollback_sends_the_requests_again(client: httpx.Client, steps: int) -> None:
    system = system_of(client)

    def change(random: Random) -> str:
        name = random.choice(["/a", "/b"])
        if random.random() < 0.3:
            system.request("DELETE", name)
        else:
            system.request("POST", name, json={"by": random.randrange(3)})
        system.request("GET", "/")
        return name

    # What is sent again grows with what was sent before, so usually there are fewer steps.
    check_system(system, change, lambda: client.get("/").json(), steps=steps)


def test_an_answer_that_differs_is_named(client: httpx.Client) -> None:
    system = system_of(client)
    system.request("POST", "/a")
    system.request("POST", "/noisy")
    token = system.checkpoint("x")
    with pytest.raises(ReplayFailed, match="Request 2 of the replay, POST /noisy, got a different"):
        system.rollback(token)
    for compare in ("status", "nothing"):
        lenient = system_of(client, compare=compare)
        lenient.request("POST", "/noisy")
        lenient.rollback(lenient.checkpoint("x"))


def test_a_reset_that_does_not_reset_and_options_that_are_no_data_are_refused(
    client: httpx.Client,
) -> None:
    with pytest.raises(Conflict, match="Two resets lead to different states"):
        system_of(client, reset=lambda: client.post("/a"))
    with pytest.raises(InvalidArgument, match="compare"):
        system_of(client, compare="headers")
    system = system_of(client)
    with pytest.raises(InvalidValue, match=r"options\.content is a"):
        system.request("POST", "/a", content=iter([b"x"]))
    assert client.get("/").json() == {}
