"""The server: reads and writes over HTTP, beside a bare FastAPI route with the same transaction.

Both run in a process of their own under uvicorn, with the same parser of HTTP. Requests are sent by
one connection that writes bytes and reads them, so that it costs both the same. Embedded use is the
same call without a server; the client is it through one. The client's turns and tool calls stand
beside a LangGraph saver behind FastAPI, and beside DBOS, which has no server and runs embedded.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
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
from .callers import charge, numbers
from .callers_peers import DBOS_STEP, DbosProduct
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
LANGGRAPH, DBOS = "LangGraph saver behind FastAPI", "DBOS step, embedded"
FOLLOWERS, WRITES_PER_SECOND = 200, 50
TITLES = {
    "get": "read a value",
    "swap": "compare and swap",
    "increment": "increment",
    "save": "save a turn",
    "claim": "submit, claim and complete an item",
}
MESSAGE = {"role": "user", "content": "x" * 200}
START_SECONDS = 60
SERVER_CPU = "µs of the server's CPU"


class Connection:
    """One connection that is kept open."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connect()

    def _connect(self) -> None:
        self._socket = socket.create_connection(("127.0.0.1", self._port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, method: str, path: str, body: object, headers: str = "") -> bytes:
        """Send a request and return the body of its answer."""
        content = b"" if body is None else json.dumps(body).encode()
        kind = "Content-Type: application/json\r\n" if content else ""
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{kind}{headers}"
            f"Content-Length: {len(content)}\r\n\r\n"
        )
        message = head.encode() + content
        self._socket.sendall(message)
        answer = self._socket.recv(65_536)
        if not answer:
            # It was idle for so long that the server has closed it.
            self.close()
            self._connect()
            self._socket.sendall(message)
        while b"\r\n\r\n" not in answer:
            answer += self._received()
        start, _, rest = answer.partition(b"\r\n\r\n")
        if start.split(b" ", 2)[1] not in {b"200", b"201"}:
            raise RuntimeError(answer.decode())
        [length] = [
            int(line.split(b":")[1])
            for line in start.lower().split(b"\r\n")
            if line.startswith(b"content-length:")
        ]
        while len(rest) < length:
            rest += self._received()
        return rest

    def _received(self) -> bytes:
        received = self._socket.recv(65_536)
        if not received:
            raise RuntimeError("the server has closed the connection")
        return received

    def close(self) -> None:
        """Close it."""
        self._socket.close()


class Client:
    """The requests, to either server."""

    def __init__(self, port: int, secret: str | None) -> None:
        self.connection = Connection(port)
        self._is_bare = secret is None
        self._bearer = "" if secret is None else f"Authorization: Bearer {secret}\r\n"
        self._expected = "*"
        self.works: dict[str, Callable[[], object]] = {
            "get": self.get,
            "swap": self.swap,
            "increment": self.increment,
            "save": self.save,
            "claim": self.claim,
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

    def save(self) -> bytes:
        """Save a turn with one message."""
        path = "/save" if self._is_bare else "/sessions/root/checkpoints"
        body = {"append": {"channel": "transcript", "items": [MESSAGE]}}
        return self.connection.send("POST", path, body, self._bearer)

    def claim(self) -> None:
        """Submit an item, claim it and complete it."""
        items = "" if self._is_bare else "/work-items"
        asked = {"type": "step", "input": {"number": 1}}
        submit = "/submit" if self._is_bare else items
        self.connection.send("POST", submit, asked, self._bearer)
        found = self.connection.send("POST", f"{items}/claim", {"holder": "h"}, self._bearer)
        [item] = json.loads(found)["items"]
        id, body = item["id"], {"fence": item["fence"], "output": {"done": True}}
        complete = f"/complete/{id}" if self._is_bare else f"{items}/{id}/complete"
        self.connection.send("POST", complete, body, self._bearer)


class StoreCalls:
    """What is called on a store of ours, embedded or through the client."""

    def __init__(self, place: Place) -> None:
        self._store = holdfast.open(place.url, namespace=place.schema or None)
        self._session = self._store.session("turns")

    def works(self) -> dict[str, Callable[[], object]]:
        """Return the calls by name."""
        return {
            "save": lambda: self._session.append("transcript", [MESSAGE]),
            "claim": self._claim,
            "call": lambda: self._session.call(charge, number=next(numbers)),
        }

    def _claim(self) -> None:
        self._store.work.submit("step", {"number": 1})
        [item] = self._store.work.claim("h")
        item.complete({"done": True})

    def close(self) -> None:
        """Close the store."""
        self._store.close()


@contextlib.contextmanager
def process(*arguments: str, port: int) -> Iterator[int]:
    """Run a server until the end of the block; yield the id of its process."""
    with subprocess.Popen([sys.executable, "-m", *arguments], stdout=subprocess.DEVNULL) as started:
        try:
            deadline = time.monotonic() + START_SECONDS
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                if started.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{arguments} did not start")
                time.sleep(0.05)
            yield started.pid
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
        self.processes: dict[str, int] = {}
        urls = {name: self._serve(name, places[name]) for name in (SERVER, FOLLOWED)}
        url, self._secret = urls[SERVER]
        self.followed_url, secret = urls[FOLLOWED]
        clients = {
            SERVER: Client(_port(url), self._secret),
            BARE: Client(self._serve_bare("sql", places[BARE]), None),
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
            register, calls = HoldfastRegister(at), StoreCalls(at)
            stack.callback(register.close)
            stack.callback(calls.close)
            works = cast("Mapping[str, Callable[[], object]]", register.works())
            self.calls[name] = {**works, **calls.works()}
        langgraph = Connection(self._serve_bare("langgraph", places[LANGGRAPH]))
        stack.callback(langgraph.close)
        self.calls[LANGGRAPH] = {
            "save": lambda: langgraph.send("POST", "/append", {"message": MESSAGE}),
            "call": lambda: langgraph.send("POST", "/call", {}),
        }
        runner = stack.enter_context(asyncio.Runner())
        steps = DbosProduct(places[DBOS], runner)
        steps.open()
        stack.callback(steps.close)
        self.step_round = steps.rounds()[DBOS_STEP]

    def _serve_bare(self, kind: str, place: Place) -> int:
        """Serve what stands beside; return its port."""
        port = free_port()
        where = [place.dsn, place.schema] if place.path is None else [str(place.path)]
        given = ("benchmarks.bare_api", kind, str(port), *where)
        started = self._stack.enter_context(process(*given, port=port))
        if kind == "sql":
            self.processes[BARE] = started
        return port

    def _serve(self, name: str, place: Place) -> tuple[str, str]:
        """Serve a new store; return its address and a token."""
        with holdfast.open(place.url, namespace=place.schema or None) as store:
            store.session("root")
            secret = store.tokens.create("benchmark", permission="admin").secret
        port = free_port()
        named = [f"--namespace={place.schema}"] if place.schema else []
        given = ("holdfast", "serve", f"--url={place.url}", f"--port={port}", *named)
        self.processes[name] = self._stack.enter_context(process(*given, port=port))
        return f"http://127.0.0.1:{port}", secret

    def round(self, name: str, work: str, seconds: float) -> Callable[[], Figures]:
        """Return a round of one contestant, with the processor time of its server."""
        return spending(self.processes.get(name), self.calls[name][work], seconds, timed)

    def paced(self, name: str, seconds: float) -> Callable[[], Figures]:
        """Return a round of writes at a pace."""
        return spending(self.processes[name], self.calls[name]["swap"], seconds, _paced)


def run(console: Console, *, quick: bool) -> Report:
    """Measure the server."""
    packages = ("uvicorn", "fastapi", "starlette", "h11", "langgraph-checkpoint", "dbos")
    report = Report("server", environment() | versions(packages))
    names = (SERVER, FOLLOWED, BARE, EMBEDDED, LANGGRAPH, DBOS)
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
            Contestant(name, measured.round(name, work, seconds), BARE if name == SERVER else None)
            for name in (SERVER, BARE, CLIENT, EMBEDDED)
        ]
        text = f"{database}: {title}, one connection"
        table = compare(text, contestants, rounds=rounds, key=TIME)
        share = 1 / table.times_slower(SERVER, BARE)
        text = f"{database}, {title}: requests of the bare route"
        targets.append(Target(text, share, at_least=SHARE_OF_BARE_MIN))
        yield table
    for work, title in (("save", "a turn"), ("call", "a tool call")):
        rivals = {LANGGRAPH: _round(measured.calls[LANGGRAPH][work], seconds)}
        if work == "call":
            rivals[DBOS] = functools.partial(measured.step_round, seconds)
        ours = _round(measured.calls[CLIENT][work], seconds)
        contestants = [
            Contestant(CLIENT, ours, LANGGRAPH),
            *(Contestant(name, round) for name, round in rivals.items()),
            Contestant(EMBEDDED, _round(measured.calls[EMBEDDED][work], seconds)),
        ]
        text = f"{database}: {title} through a server"
        yield compare(text, contestants, rounds=rounds, key=TIME)
    with followers(measured.followed_url, measured.followed_secret, FOLLOWERS):
        contestants = [
            Contestant(name, measured.paced(name, seconds), beside)
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


def _paced(call: Callable[[], object], seconds: float) -> Figures:
    """Call so many times a second and measure each call alone."""
    latencies = []
    for _ in range(max(1, int(seconds * WRITES_PER_SECOND))):
        time.sleep(1 / WRITES_PER_SECOND)
        started = time.perf_counter()
        call()
        latencies.append((time.perf_counter() - started) * 1e6)
    return {TIME: statistics.median(latencies)}


def spending(
    process_id: int | None,
    call: Callable[[], object],
    seconds: float,
    measure: Callable[[Callable[[], object], float], Figures],
) -> Callable[[], Figures]:
    """Return a round that also tells the processor time of a server for each call.

    Beside other programs it says more than the clock: a thread that serves all waits for its turn.
    """

    def round() -> Figures:
        calls = 0

        def counted() -> None:
            nonlocal calls
            calls += 1
            call()

        before = _cpu_seconds(process_id)
        figures = measure(counted, seconds)
        if before is not None and (after := _cpu_seconds(process_id)) is not None:
            figures[SERVER_CPU] = (after - before) / calls * 1e6
        return figures

    return round


def _cpu_seconds(process_id: int | None) -> float | None:
    """Return the processor time of a process so far, where the system tells it."""
    stat = Path(f"/proc/{process_id}/stat")
    if process_id is None or not stat.exists():
        return None
    user, system = stat.read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
