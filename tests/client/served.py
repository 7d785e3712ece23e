"""Stores behind real servers, for suites that were written for embedded ones."""

from __future__ import annotations

import asyncio
import socket
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

import holdfast
from holdfast.server.app import Api

_embedded: dict[str, holdfast.Store] = {}


def embedded(store: Any) -> Any:
    """Return the database itself behind a client's store; any other store is its own."""
    return _embedded[store.url] if store.runtime.is_remote else store


class Serving:
    """Serves stores in threads of this process, so that they can share a test's clock."""

    def __init__(self, place: dict[str, Any]) -> None:
        self._place = place
        self._servers: dict[str, tuple[uvicorn.Server, threading.Thread]] = {}

    def __call__(self, **arguments: Any) -> dict[str, Any]:
        """Serve the store, opened with these arguments; return what opens a client of it."""
        given = {**self._place, **arguments}
        ready = _Ready()
        thread = threading.Thread(target=lambda: asyncio.run(_serve(given, ready)), daemon=True)
        thread.start()
        assert ready.flag.wait(60)
        if ready.error is not None:
            raise ready.error
        url = f"http://127.0.0.1:{ready.port}"
        _embedded[url] = holdfast.open(**given)
        self._servers[url] = ready.server, thread
        return {"url": url, "token": ready.token}

    def close(self) -> None:
        """Stop every server."""
        for server, _ in self._servers.values():
            server.should_exit = True
        for url, (_, thread) in self._servers.items():
            thread.join(60)
            _embedded.pop(url).close()


class _Ready:
    """What a server's thread tells the test."""

    def __init__(self) -> None:
        self.flag = threading.Event()
        self.token = ""
        self.port = 0
        self.error: Exception | None = None
        self.server: uvicorn.Server


async def _serve(given: dict[str, Any], ready: _Ready) -> None:
    try:
        async with holdfast.aopen(**given) as store:
            ready.token = (await store.tokens.create(str(uuid.uuid4()), permission="admin")).secret
            api = Api(store)
            config = uvicorn.Config(api, log_level="error", lifespan="off", ws="websockets-sansio")
            ready.server = uvicorn.Server(config)
            # With its protocol named, asyncio sends small answers at once.
            listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            listening.bind(("127.0.0.1", 0))
            listening.listen()
            ready.port = listening.getsockname()[1]
            # The kernel takes connections from here on; the server answers them when it runs.
            ready.flag.set()
            await ready.server.serve(sockets=[listening])
    except Exception as error:
        ready.error = error
    finally:
        ready.flag.set()


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """Serve an application of a test's own."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", ws="none"))
    thread = threading.Thread(target=lambda: server.run(sockets=[listening]), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)
