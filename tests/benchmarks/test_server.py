"""What stands beside the server starts, and answers every request that the benchmark sends."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

import holdfast
from benchmarks.keepers import Place
from benchmarks.registers import VALUE
from benchmarks.server import TITLES, Client, free_port, process

TIMES = 3


@pytest.fixture(params=["sqlite", "postgres"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "sqlite":
        return Place(path=tmp_path / "a.db")
    schema: str = request.getfixturevalue("namespace")
    return Place(dsn=os.environ["HOLDFAST_TEST_POSTGRES"], schema=schema)


@contextlib.contextmanager
def bare(where: Place) -> Iterator[Client]:
    port = free_port()
    place = [where.dsn, where.schema] if where.path is None else [str(where.path)]
    with (
        process("benchmarks.bare_api", "sql", str(port), *place, port=port),
        closing(Client(port, None)) as client,
    ):
        yield client


@contextlib.contextmanager
def ours(where: Place) -> Iterator[Client]:
    with holdfast.open(where.url, namespace=where.schema or None) as store:
        store.session("root")
        secret = store.tokens.create("benchmark", permission="admin").secret
    port = free_port()
    named = [f"--namespace={where.schema}"] if where.schema else []
    with (
        process("holdfast", "serve", f"--url={where.url}", f"--port={port}", *named, port=port),
        closing(Client(port, secret)) as client,
    ):
        yield client


@contextlib.contextmanager
def closing(client: Client) -> Iterator[Client]:
    with contextlib.closing(client.connection):
        yield client


@pytest.mark.parametrize("served", [bare, ours])
def test_every_request_of_the_benchmark_is_answered_with_the_work_done(
    served: Callable[[Place], AbstractContextManager[Client]], where: Place
) -> None:
    with served(where) as client:
        assert set(client.works) == set(TITLES)
        before = json.loads(client.get())["version"]
        for work in client.works.values():
            for _ in range(TIMES):
                work()
        found = json.loads(client.get())
        assert (found["value"], found["version"]) == (VALUE, before + TIMES)
        assert json.loads(client.save())["version"] == TIMES + 1
