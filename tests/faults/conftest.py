"""Fixtures of the fault tests."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.testing.proxy import PostgresProxy


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that is ready and closed, to be copied: making one takes longer."""
    from tests.faults.workload import prepare

    path = tmp_path_factory.mktemp("template") / "live.db"
    with holdfast.open(f"sqlite:///{path}") as store:
        prepare(store, "root", "big")
    return path


@pytest.fixture
def path(tmp_path: Path, template: Path) -> Path:
    """The database file of a store that is ready."""
    return Path(shutil.copy(template, tmp_path))


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Print a line although the test runner captures."""

    def show(line: str) -> None:
        with capsys.disabled():
            print(f"\n{line}")

    return show


@pytest.fixture
def direct(postgres_dsn: str, ready_namespace: str) -> dict[str, Any]:
    """The way around the proxy, to a store that is ready."""
    from tests.faults.workload import prepare

    place: dict[str, Any] = {"url": postgres_dsn, "namespace": ready_namespace}
    with holdfast.open(**place) as store:
        prepare(store)
    return place


@pytest.fixture
def through(proxy: PostgresProxy, postgres_dsn: str, direct: dict[str, Any]) -> dict[str, Any]:
    """The way through the proxy."""
    return {**direct, "url": f"{proxy.dsn(postgres_dsn)}&listen=off"}
