"""A real Redis server, started once for each process of the tests that needs it."""

from __future__ import annotations

import os
from collections.abc import Iterator

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
