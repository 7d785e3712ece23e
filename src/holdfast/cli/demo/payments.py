"""The demo's payment server, a separate process, and its client.

It books a charge for every request that it gets, as a bank does: only the sender can know that two
requests are the same one. It runs as `python -m holdfast.cli.demo.payments`, prints its port, and
exits when its standard input is closed.
"""

from __future__ import annotations

import http.client
import http.server
import json
import os
import sys
import threading
from typing import Any, ClassVar, cast
from urllib.parse import quote

HOST = "127.0.0.1"
REQUEST_SECONDS_MAX = 10
REQUEST_BYTES_MAX = 65_536


class Payments:
    """A client of the payment server."""

    def __init__(self, port: int) -> None:
        self._port = port

    def charge(self, trip: str, reference: str, cents: int) -> dict[str, Any]:
        """Charge the card of a trip; every call is a new charge."""
        asked = {"trip": trip, "reference": reference, "cents": cents}
        return cast("dict[str, Any]", self._send("POST", "/charges", asked))

    def charges(self, trip: str) -> list[dict[str, Any]]:
        """Return what was charged for a trip."""
        path = f"/charges/{quote(trip, safe='')}"
        return cast("list[dict[str, Any]]", self._send("GET", path))

    def _send(self, method: str, path: str, body: object = None) -> Any:
        connection = http.client.HTTPConnection(HOST, self._port, timeout=REQUEST_SECONDS_MAX)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            text = response.read()
        finally:
            connection.close()
        if response.status != http.client.OK:
            raise OSError(f"the payment server answered {response.status}")
        return json.loads(text)


class _Handler(http.server.BaseHTTPRequestHandler):
    """Handles one request; the charges are kept in the class, as long as the process runs."""

    charges: ClassVar[list[dict[str, Any]]] = []
    lock: ClassVar = threading.Lock()

    def do_POST(self) -> None:
        """Book a charge."""
        length = min(int(self.headers.get("Content-Length", 0)), REQUEST_BYTES_MAX)
        asked = json.loads(self.rfile.read(length))
        with self.lock:
            charge = {"id": f"ch_{len(self.charges) + 1:04}", **asked}
            self.charges.append(charge)
        self._answer(charge)

    def do_GET(self) -> None:
        """List the charges of a trip."""
        with self.lock:
            found = [each for each in self.charges if self.path == f"/charges/{each['trip']}"]
        self._answer(found)

    def _answer(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(http.client.OK)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def serve() -> None:
    """Serve on a free loopback port until standard input is closed."""
    server = http.server.ThreadingHTTPServer((HOST, 0), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    serve()
