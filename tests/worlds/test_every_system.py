"""Every supplied system: a graph with cycles and a reset is explored whole by every strategy."""

from __future__ import annotations

import sqlite3
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import apsw
import httpx
import psycopg
import pytest

import holdfast
from holdfast import worlds
from holdfast.worlds import (
    ClockSystem,
    FileSystem,
    HoldfastSystem,
    MailSystem,
    MemorySystem,
    QueueSystem,
    SqliteConnectionSystem,
    SqliteSystem,
    StorageSystem,
    System,
    World,
    action,
    explore,
)
from holdfast.worlds.strategies import STRATEGIES
from holdfast.worlds.systems.http import HttpSystem
from holdfast.worlds.systems.postgres import PostgresSystem
from holdfast.worlds.systems.postgres_connection import PostgresConnectionSystem
from tests.worlds.systems import Stack
from tests.worlds.test_docs import SYSTEMS
from tests.worlds.test_http import client, system_of
from tests.worlds.test_postgres import dsn, template

__all__ = ["client", "dsn", "template"]

Write = Callable[[int], object]
Opened = Iterator[tuple[System, Write]]
SIZE = 8


@contextmanager
def memory(request: pytest.FixtureRequest) -> Opened:
    system = MemorySystem({"n": 0})
    yield system, lambda n: system.data.update(n=n)


@contextmanager
def stack(request: pytest.FixtureRequest) -> Opened:
    system = Stack()
    system.data["n"] = 0
    yield system, lambda n: system.data.update(n=n)


@contextmanager
def queue(request: pytest.FixtureRequest) -> Opened:
    system = QueueSystem()

    def write(n: int) -> None:
        while received := system.receive("q"):
            system.acknowledge(received[0])
        for number in range(n):
            system.publish("q", number)

    yield system, write


@contextmanager
def mail(request: pytest.FixtureRequest) -> Opened:
    system = MailSystem()

    def write(n: int) -> None:
        system.data["sent"].clear()
        for number in range(n):
            system.send("ann", str(number))

    yield system, write


@contextmanager
def storage(request: pytest.FixtureRequest) -> Opened:
    system = StorageSystem()
    yield system, lambda n: system.put("n", bytes([n])) if n else system.delete("n")


@contextmanager
def clock(request: pytest.FixtureRequest) -> Opened:
    system = ClockSystem(0)
    yield system, lambda n: system.data.update(now_ms=n)


@contextmanager
def sqlite_file(request: pytest.FixtureRequest) -> Opened:
    path: Path = request.getfixturevalue("tmp_path") / "n.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as made:
        made.execute("PRAGMA journal_mode = WAL")
        made.execute("CREATE TABLE t AS SELECT 0 AS n")
    system = SqliteSystem(path)
    connection = sqlite3.connect(path, isolation_level=None)
    # It is closed after the system, whose locks this process would lose otherwise.
    request.addfinalizer(connection.close)
    yield system, lambda n: connection.execute("UPDATE t SET n = ?", (n,))


@contextmanager
def sqlite_connection(request: pytest.FixtureRequest) -> Opened:
    connection = apsw.Connection(":memory:")
    connection.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, n); INSERT INTO t VALUES (1, 0)")
    yield (
        SqliteConnectionSystem(connection),
        lambda n: connection.execute("UPDATE t SET n = ?", (n,)),
    )


@contextmanager
def files(request: pytest.FixtureRequest) -> Opened:
    folder: Path = request.getfixturevalue("tmp_path")
    (folder / "n").write_text("0")
    yield FileSystem(folder), lambda n: (folder / "n").write_text(str(n))


@contextmanager
def postgres(request: pytest.FixtureRequest) -> Opened:
    place: str = request.getfixturevalue("dsn")
    with psycopg.connect(place, autocommit=True) as connection:
        connection.execute("INSERT INTO plain (n) VALUES (0)")
        yield PostgresSystem(place), lambda n: connection.execute("UPDATE plain SET n = %s", (n,))


@contextmanager
def postgres_connection(request: pytest.FixtureRequest) -> Opened:
    with psycopg.connect(request.getfixturevalue("dsn"), autocommit=True) as connection:
        connection.execute("INSERT INTO plain (n) VALUES (0)")
        system = PostgresConnectionSystem(connection)
        yield system, lambda n: connection.execute("UPDATE plain SET n = %s", (n,))


@contextmanager
def redis(request: pytest.FixtureRequest) -> Opened:
    module = pytest.importorskip("redis")
    from holdfast.worlds.systems.redis import RedisSystem

    url: str = request.getfixturevalue("redis_url")
    with module.Redis.from_url(url) as users:
        users.set("every:n", 0)
        request.addfinalizer(lambda: module.Redis.from_url(url).delete("every:n"))
        yield RedisSystem(url, prefix="every:"), lambda n: users.set("every:n", n)


@contextmanager
def http(request: pytest.FixtureRequest) -> Opened:
    users: httpx.Client = request.getfixturevalue("client")
    system = system_of(users)

    def write(n: int) -> None:
        for place in "ab":
            system.request("DELETE", f"/{place}")
            system.request("POST", f"/{place}", json={"by": n % 3})
            n //= 3

    write(0)
    yield system, write


@contextmanager
def holdfast_store(request: pytest.FixtureRequest) -> Opened:
    path: Path = request.getfixturevalue("tmp_path") / "agents.db"
    with holdfast.open(f"sqlite:///{path}") as store:
        session = store.session("counter")
        session.save(n=0)
        session.state.set("n", 0)

        def write(n: int) -> None:
            session.save(n=n)
            session.state.set("n", n)

        yield HoldfastSystem(store), write


OPENERS: dict[type[System], Any] = {
    ClockSystem: clock,
    FileSystem: files,
    HoldfastSystem: holdfast_store,
    HttpSystem: http,
    MailSystem: mail,
    MemorySystem: memory,
    PostgresConnectionSystem: postgres_connection,
    PostgresSystem: postgres,
    QueueSystem: queue,
    SqliteConnectionSystem: sqlite_connection,
    SqliteSystem: sqlite_file,
    StorageSystem: storage,
}


def test_no_system_is_missing_here() -> None:
    assert {system.__name__ for system in OPENERS} | {"RedisSystem"} == {
        system.__name__ for system in SYSTEMS
    }
    assert worlds.System not in OPENERS


@pytest.mark.parametrize(
    "opened", [*OPENERS.values(), redis, stack], ids=lambda opened: opened.__name__
)
def test_a_graph_with_cycles_and_a_reset_is_explored_by_every_strategy(
    opened: Callable[[pytest.FixtureRequest], Any], request: pytest.FixtureRequest
) -> None:
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Each checkpoint reads the whole of")
        system, write = stack.enter_context(opened(request))
        world = stack.enter_context(World({"system": system}, context={"n": 0}, verify=True))

        @action(parameters={"by": [-1, 1, 3]})
        def move(world: World, by: int) -> None:
            world.context["n"] = (world.context["n"] + by) % SIZE
            write(world.context["n"])

        @action
        def reset(world: World) -> None:
            world.context["n"] = 0
            write(0)

        for strategy in STRATEGIES:
            result = explore(world, [move, reset], strategy=strategy)
            assert result.is_complete, result.summary()
            assert len(result.graph.states) == SIZE
            assert {(step.step.action, step.from_id) for step in result.graph.transitions} == {
                (name, state) for name in ("move", "reset") for state in result.graph.states
            }
            assert len(result.graph.transitions) == 4 * SIZE
            assert result.leaks == ()
            # Only a stack loses checkpoints on the way.
            assert bool(result.replayed) <= (system.rollback_order == "stack")
            assert world.context["n"] == 0
