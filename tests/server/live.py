"""A server on a socket of this machine, in a thread of its own."""

from __future__ import annotations

import asyncio
import ssl
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from socket import create_connection
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, connect

import holdfast
from holdfast.server.options import Options
from holdfast.server.serve import Address, Serving


class Live:
    """A running server and a client with a token for everything."""

    def __init__(self, serving: Serving, secret: str) -> None:
        self.serving = serving
        self.url = serving.url
        self.secret = secret
        self.bearer = {"authorization": f"Bearer {secret}"}
        certificate, uds = serving.address.certfile, serving.address.uds
        verify = ssl.create_default_context(cafile=certificate) if certificate else False
        transport = httpx.HTTPTransport(verify=verify, uds=uds)
        base = f"http://localhost{serving.options.base_path}" if uds else self.url
        self.client = httpx.Client(
            base_url=base, headers=self.bearer, transport=transport, timeout=30
        )

    def socket(self, path: str, **headers: str) -> ClientConnection:
        """Open a WebSocket."""
        given = self.bearer | headers
        return connect(
            self.url.replace("http", "ws", 1) + path,
            additional_headers=given,
            compression=None,
            open_timeout=30,
            # What is left unread is not waited for.
            close_timeout=0.5,
            ping_interval=None,
            max_queue=1,
            proxy=None,
        )

    def raw(self) -> Any:
        """Open a connection without speaking."""
        host, port = self.url.removeprefix("http://").split(":")
        return create_connection((host, int(port)), timeout=30)

    def put(self, session: str, key: str, value: Any) -> httpx.Response:
        path = f"/sessions/{session}/state/keys/{key}"
        return self.client.put(path, json={"value": value}, headers={"if-match": "*"})


@contextmanager
def live(
    options: Options | None = None, address: Address | None = None, **place: Any
) -> Iterator[Live]:
    """Serve a store on loopback until the end of the block."""

    with holdfast.open(**place) as store:
        secret = store.tokens.create(f"test {uuid.uuid4()}", permission="admin").secret
    serving = Serving(place, address or Address(), options or Options())
    ready, failed = threading.Event(), []
    process = serving.process(ready.set)

    def run() -> None:
        try:
            asyncio.run(process.serve(sockets=serving.sockets))
        except BaseException as error:
            failed.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    server = Live(serving, secret)
    try:
        assert ready.wait(60)
        assert not failed, failed
        yield server
    finally:
        server.client.close()
        process.should_exit = True
        thread.join(60)
        serving.close()
        assert not thread.is_alive()
