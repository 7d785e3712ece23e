"""The server: reads and writes over HTTP, beside a bare FastAPI route with the same transaction.

Both run in a process of their own under uvicorn, with the same parser of HTTP. The client is one
connection that writes bytes and reads them, so that it costs both the same. Embedded use is the
same call without a server; the client is it through one.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import cast

from rich.console import Console

import holdfast

from . import servers
from .keepers import Place
from .load import timed
from .measure import (
    TIME,
    Contestant,
    Figures,
    Report,
    Table,
    Target,
    compare,
    environment,
    versions,
)
from .registers import VALUE, HoldfastRegister

SHARE_OF_BARE_MIN = 0.8
TIMES_FOLLOWED_MAX = 1.2
SERVER, BARE, EMBEDDED = "Holdfast server", "bare FastAPI", "Holdfast embedded"
CLIENT, FOLLOWED = "Holdfast client", "Holdfast server, followed"
FOLLOWERS, WRITES_PER_SECOND = 200, 50
TITLES = {"get": "read a value", "swap": "compare and swap", "increment": "increment"}
START_SECONDS = 60


class Connection:
    """One connection that is kept open."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, method: str, path: str, body: object, headers: str = "") -> bytes:
        """Send a request and return the body of its answer."""
        content = b"" if body is None else json.dumps(body).encode()
        kind = "Content-Type: application/json\r\n" if content else ""
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{kind}{headers}"
            f"Content-Length: {len(content)}\r\n\r\n"
        )
        self._socket.sendall(head.encode() + content)
        answer = self._socket.recv(65_536)
        while b"\r\n\r\n" not in answer:
            answer += self._socket.recv(65_536)
        start, _, rest = answer.partition(b"\r\n\r\n")
        if start.split(b" ", 2)[1] not in {b"200", b"201"}:
            raise RuntimeError(answer.decode())
        [length] = [
            int(line.split(b":")[1])
            for line in start.lower().split(b"\r\n")
            if line.startswith(b"content-length:")
        ]
        while len(rest) < length:
            rest += self._socket.recv(65_536)
        return rest

    def close(self) -> None:
        """Close it."""
        self._socket.close()


class Client:
    """The three requests, to either server."""

    def __init__(self, port: int, secret: str | None) -> None:
        self.connection = Connection(port)
        self._is_bare = secret is None
        self._bearer = "" if secret is None else f"Authorization: Bearer {secret}\r\n"
        self._expected = "*"
        self.works: dict[str, Callable[[], object]] = {
            "get": self.get,
            "swap": self.swap,
            "increment": self.increment,
        }
        self.swap()

    def get(self) -> bytes:
        """Read a value."""
        path = "/get" if self._is_bare else "/sessions/root/state/keys/value"
        return self.connection.send("GET", path, None, self._bearer)

    def swap(self) -> None:
        """Write a value if it has the version that was seen last."""
        path = "/swap" if self._is_bare else "/sessions/root/state/keys/value"
        headers = f"{self._bearer}If-Match: {self._expected}\r\n"
        body = self.connection.send("PUT", path, {"value": VALUE}, headers)
        self._expected = f'"{json.loads(body)["version"]}"'

    def increment(self) -> bytes:
        """Add one on the server."""
        path = "/increment" if self._is_bare else "/sessions/root/state/keys/count/ops"
        body = {"operation": "increment", "delta": 1}
        return self.connection.send("POST", path, body, self._bearer)


@contextlib.contextmanager
def process(*arguments: str, port: int) -> Iterator[None]:
    """Run a server until the end of the block."""
    with subprocess.Popen([sys.executable, "-m", *arguments], stdout=subprocess.DEVNULL) as started:
        try:
            deadline = time.monotonic() + START_SECONDS
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                if started.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{arguments} did not start")
                time.sleep(0.05)
            yield
        finally:
            started.terminate()


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


class Measured:
    """The servers over one database, and what is called on them."""

    def __init__(self, places: Mapping[str, Place], stack: contextlib.ExitStack) -> None:
        self._stack = stack
        urls = {name: self._serve(places[name]) for name in (SERVER, FOLLOWED)}
        url, self._secret = urls[SERVER]
        self.followed_url, secret = urls[FOLLOWED]
        bare, place = free_port(), places[BARE]
        where = [place.dsn, place.schema] if place.path is None else [str(place.path)]
        stack.enter_context(process("benchmarks.bare_api", str(bare), *where, port=bare))
        clients = {
            SERVER: Client(_port(url), self._secret),
            BARE: Client(bare, None),
            FOLLOWED: Client(_port(self.followed_url), secret),
        }
        self.followed_secret = secret
        for client in clients.values():
            stack.callback(client.connection.close)
        self.calls: dict[str, Mapping[str, Callable[[], object]]] = {
            name: client.works for name, client in clients.items()
        }
        os.environ["HOLDFAST_TOKEN"] = self._secret
        for name, at in ((CLIENT, Place(dsn=url)), (EMBEDDED, places[EMBEDDED])):
            register = HoldfastRegister(at)
            stack.callback(register.close)
            self.calls[name] = cast("Mapping[str, Callable[[], object]]", register.works())

    def _serve(self, place: Place) -> tuple[str, str]:
        """Serve a new store; return its address and a token."""
        with holdfast.open(place.url, namespace=place.schema or None) as store:
            store.session("root")
            secret = store.tokens.create("benchmark", permission="admin").secret
        port = free_port()
        named = [f"--namespace={place.schema}"] if place.schema else []
        given = ("holdfast", "serve", f"--url={place.url}", f"--port={port}", *named)
        self._stack.enter_context(process(*given, port=port))
        return f"http://127.0.0.1:{port}", secret


def run(console: Console, *, quick: bool) -> Report:
    """Measure the server."""
    packages = ("uvicorn", "fastapi", "starlette", "h11")
    report = Report("server", environment() | versions(packages))
    names = (SERVER, FOLLOWED, BARE, EMBEDDED)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        dsn = stack.enter_context(servers.postgres())
        schemas = stack.enter_context(servers.schemas(dsn, len(names)))
        report.environment |= servers.settings(dsn)
        files = {name: Place(path=folder / f"{number}.db") for number, name in enumerate(names)}
        kept = {
            name: Place(dsn=dsn, schema=schema) for name, schema in zip(names, schemas, strict=True)
        }
        for database, places in (("SQLite", files), ("PostgreSQL", kept)):
            with contextlib.ExitStack() as opened:
                measured = Measured(places, opened)
                for table in _tables(measured, database, report.targets, quick=quick):
                    table.show(console)
                    report.tables.append(table)
    return report


def _tables(
    measured: Measured, database: str, targets: list[Target], *, quick: bool
) -> Iterator[Table]:
    rounds, seconds = (3, 0.5) if quick else (9, 2.0)
    for work, title in TITLES.items():
        contestants = [
            Contestant(
                name, _round(measured.calls[name][work], seconds), BARE if name == SERVER else None
            )
            for name in (SERVER, BARE, CLIENT, EMBEDDED)
        ]
        text = f"{database}: {title}, one connection"
        table = compare(text, contestants, rounds=rounds, key=TIME)
        share = 1 / table.times_slower(SERVER, BARE)
        text = f"{database}, {title}: requests of the bare route"
        targets.append(Target(text, share, at_least=SHARE_OF_BARE_MIN))
        yield table
    with followers(measured.followed_url, measured.followed_secret, FOLLOWERS):
        contestants = [
            Contestant(name, _paced(measured.calls[name]["swap"], seconds), beside)
            for name, beside in ((SERVER, None), (FOLLOWED, SERVER))
        ]
        text = f"{database}: {WRITES_PER_SECOND} writes per second, {FOLLOWERS} followers or none"
        table = compare(text, contestants, rounds=rounds, key=TIME)
    text = f"{database}: a write that {FOLLOWERS} follow"
    times = table.times_slower(FOLLOWED, SERVER)
    targets.append(Target(text, times, at_most=TIMES_FOLLOWED_MAX))
    yield table


@contextlib.contextmanager
def followers(url: str, secret: str, count: int) -> Iterator[None]:
    """Follow a server's state from a process of its own."""
    arguments = [sys.executable, "-m", "benchmarks.followers", url, str(count)]
    given = {**os.environ, "HOLDFAST_TOKEN": secret}
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, env=given) as started:
        try:
            assert started.stdout is not None
            if started.stdout.readline() != b"ready\n":
                raise RuntimeError("the followers did not start")
            yield
        finally:
            started.terminate()


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])


def _round(call: Callable[[], object], seconds: float) -> Callable[[], Figures]:
    return lambda: timed(call, seconds)


def _paced(call: Callable[[], object], seconds: float) -> Callable[[], Figures]:
    """Return a round that calls so many times a second and measures each call alone."""

    def round() -> Figures:
        latencies = []
        for _ in range(max(1, int(seconds * WRITES_PER_SECOND))):
            time.sleep(1 / WRITES_PER_SECOND)
            latencies.append(timed(call, 0.0001)[TIME])
        return {TIME: statistics.median(latencies)}

    return round
