"""Fixtures of the fault tests."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

import holdfast
from holdfast.testing.proxy import PostgresProxy

MEMORY = Path("/dev/shm")


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is one: thousands of files are written to it."""
    with TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else tmp_path) as path:
        yield Path(path)


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that is ready and closed, to be copied: making one takes longer."""
    from tests.faults.workload import prepare

    path = tmp_path_factory.mktemp("template") / "live.db"
    with holdfast.open(f"sqlite:///{path}") as store:
        prepare(store, "root", "big")
    return path


@pytest.fixture
def path(directory: Path, template: Path) -> Path:
    """The database file of a store that is ready."""
    return Path(shutil.copy(template, directory))


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Print a line although the test runner captures."""

    def show(line: str) -> None:
        with capsys.disabled():
            print(f"\n{line}")

    return show


@pytest.fixture
def direct(postgres_dsn: str, namespace: str) -> dict[str, Any]:
    """The way around the proxy, to a store that is ready."""
    from tests.faults.workload import prepare

    place: dict[str, Any] = {"url": postgres_dsn, "namespace": namespace}
    with holdfast.open(**place) as store:
        prepare(store)
    return place


@pytest.fixture
def through(proxy: PostgresProxy, postgres_dsn: str, direct: dict[str, Any]) -> dict[str, Any]:
    """The way through the proxy."""
    return {**direct, "url": f"{proxy.dsn(postgres_dsn)}&listen=off"}
