"""Servers that the tests of one module share, on both databases."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.server.serving import Served, serving


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def database(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Any]]:
    """Where a store of the module's own can be opened."""
    if request.param == "sqlite":
        path: Path = tmp_path_factory.mktemp("server") / "store.db"
        yield {"url": f"sqlite:///{path}"}
        return
    url, name = os.environ["HOLDFAST_TEST_POSTGRES"], f"t_{uuid.uuid4().hex[:20]}"
    yield {"url": url, "namespace": name}
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f'DROP SCHEMA IF EXISTS "{name}" CASCADE')


@pytest.fixture(scope="module")
def shared(database: dict[str, Any]) -> Iterator[Served]:
    """A server for all tests of the module; each makes sessions of its own."""
    with serving(**database) as served:
        yield served


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server on SQLite, for what does not depend on the database."""
    path = tmp_path_factory.mktemp("server") / "store.db"
    with serving(url=f"sqlite:///{path}") as served:
        yield served
