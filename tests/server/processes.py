"""Servers as processes of their own, which can be killed."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

import holdfast


def free_port() -> int:
    """Return a port that nobody listens at, and that no connection is given while nobody does."""
    while True:
        port = random.Random().randrange(15_000, 30_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@contextmanager
def server_process(*options: str, **place: Any) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """Run `holdfast serve` until the end of the block; yield it and what it told."""
    arguments = [sys.executable, "-m", "holdfast", "serve", "--json", *options]
    arguments += [f"--{name}={value}" for name, value in place.items()]
    environment = {**os.environ, "HOLDFAST_URL": ""}
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        yield process, json.loads(line) if line else None
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(60)
        if process.stdout is not None:
            process.stdout.close()


class KilledServer:
    """`holdfast serve` at one port, killed and started again as often as a test likes."""

    def __init__(self, database: dict[str, Any], stack: ExitStack) -> None:
        self._database = database
        self._stack = stack
        self._port = free_port()
        secret = made_token(database)
        self._start()
        url = f"http://127.0.0.1:{self._port}"
        # On a busy machine it takes long to start again.
        self.place: dict[str, Any] = {"url": url, "token": secret, "busy_timeout_seconds": 120}

    def _start(self) -> None:
        serving = server_process(f"--port={self._port}", **self._database)
        self._process, told = self._stack.enter_context(serving)
        assert told is not None

    def restart(self) -> None:
        """Kill it with SIGKILL, and start another."""
        self._process.kill()
        self._process.wait(60)
        self._start()


def client_of(told: Any, secret: str) -> httpx.Client:
    """Return a client of a server process."""
    bearer = {"authorization": f"Bearer {secret}"}
    return httpx.Client(base_url=told["url"], headers=bearer, timeout=60)


def made_token(place: dict[str, Any]) -> str:
    """Make a token for everything, and the session `one`."""
    with holdfast.open(**place) as store:
        store.session("one")
        return store.tokens.create("test", permission="admin").secret


def token_file(place: dict[str, Any]) -> Path:
    """Return where the first start writes its token."""
    return Path(f"{place['url'].removeprefix('sqlite:///')}.token")
