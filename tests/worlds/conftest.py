"""What several tests of worlds need: a real Redis server, a temporary directory to look into."""

from __future__ import annotations

import os
import subprocess
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
    executable = redis_executable()
    if executable is None:
        pytest.skip(f"there is no redis-server: make programs, or set {REDIS}")
    # Redis 6 allows DEBUG, and does not know the option that Redis 7 needs for it.
    version = subprocess.run([executable, "--version"], stdout=subprocess.PIPE, check=True).stdout
    options = [] if b" v=6." in version else ["--enable-debug-command", "local"]
    with redis_server(tmp_path_factory.mktemp("redis"), *options) as url:
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
