"""What several tests of worlds need: a real Redis server, a temporary directory to look into."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

REDIS = "HOLDFAST_TEST_REDIS"


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real Redis server."""
    pytest.importorskip("redis")
    from examples.shop.servers import redis_executable, redis_server

    if REDIS in os.environ:
        yield os.environ[REDIS]
        return
    if redis_executable() is None:
        pytest.skip(f"there is no redis-server: install one, or set {REDIS}")
    with redis_server(tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory of the test's own, that is empty at its end."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    yield place
    assert list(place.iterdir()) == []
