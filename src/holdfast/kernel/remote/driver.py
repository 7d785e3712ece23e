"""The remote drivers: how each colour sends the requests of an exchange."""

from __future__ import annotations

import asyncio
import ssl
import time
from typing import Any, ClassVar, TypeVar

import httpx

from ...errors import InvalidArgument, StoreUnavailable
from ...wire import MEDIA_TYPE
from ..driver import AsyncDriver, DialectName, Settings, SyncDriver
from ..flow import drive, drive_async, finish, require_loop
from ..operation import Call
from ..url import RemoteTarget
from .exchange import (
    AnswerLost,
    Client,
    NotSent,
    Pause,
    Request,
    Response,
    Step,
    exchange,
)
from .listener import Listener

R = TypeVar("R")

CONNECTIONS_MAX = 64
# A server that does not respond is given this much longer than its own time limit.
ANSWER_SECONDS_MORE = 2.0
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


class RemoteDriver(SyncDriver):
    """Sends calls on the caller's thread."""

    dialect: ClassVar[DialectName] = "remote"

    def __init__(self, target: RemoteTarget, settings: Settings) -> None:
        limit_seconds = settings.busy_timeout_seconds + ANSWER_SECONDS_MORE
        self.certificates = _certificates(target)
        self._listener = Listener(target, limit_seconds, self.certificates)
        super().__init__(settings, self._listener.signals, "the remote store")
        self.target = target
        self.client = Client(target.url, settings, limit_seconds)
        transport = httpx.HTTPTransport(**_options(target, self.certificates))
        self._http = httpx.Client(transport=transport, **_addressing(target))

    def _execute(self, call: Call[R]) -> R:
        result: R = drive(exchange(self.client, call), self._perform)
        return result

    def _perform(self, step: Step) -> Response | None:
        if isinstance(step, Pause):
            time.sleep(step.seconds)
            return None
        try:
            return _response(self._http.send(_request(self._http, step)))
        except httpx.TransportError as error:
            raise _failure(error) from None

    def copy_to(self, path: Any, progress: Any) -> None:
        """Refuse: a backup needs the database itself."""
        raise _only_there("backup")

    def vacuum(self) -> None:
        """Refuse: freeing disk space needs the database itself."""
        raise _only_there("vacuum")

    def close(self) -> None:
        """Close the connections; in a forked child this does nothing."""
        if self.is_closed or self.is_inherited:
            return
        self.require_outside()
        self.is_closed = True
        self._listener.close()
        self._http.close()


class AsyncRemoteDriver(AsyncDriver):
    """The same in an event loop."""

    dialect: ClassVar[DialectName] = "remote"
    _twin: RemoteDriver

    def __init__(self, twin: RemoteDriver) -> None:
        super().__init__(twin)
        self._loop = asyncio.get_running_loop()
        transport = httpx.AsyncHTTPTransport(**_options(twin.target, twin.certificates))
        self._http = httpx.AsyncClient(transport=transport, **_addressing(twin.target))

    async def run(self, call: Call[R]) -> R:
        """Send a call and return its result once it is durable."""
        self._twin.require_usable()
        require_loop(self._loop)
        result: R = await drive_async(exchange(self._twin.client, call), self._perform)
        return result

    async def close(self) -> None:
        """Close the connections."""
        self._twin.close()
        await finish(self._http.aclose())

    async def _perform(self, step: Step) -> Response | None:
        if isinstance(step, Pause):
            await asyncio.sleep(step.seconds)
            return None
        try:
            return _response(await self._http.send(_request(self._http, step)))
        except httpx.TransportError as error:
            raise _failure(error) from None


def _certificates(target: RemoteTarget) -> ssl.SSLContext | None:
    """Return the authorities that the server's certificate is checked against.

    They come from $SSL_CERT_FILE, or are the public ones. Without TLS they are not loaded, because
    loading takes longer than everything else.
    """
    if not target.address.startswith("https:"):
        return None
    try:
        return httpx.create_ssl_context()
    except OSError as error:
        raise InvalidArgument(
            f"the certificates of SSL_CERT_FILE cannot be read: {error.strerror}"
        ) from None


def _options(target: RemoteTarget, certificates: ssl.SSLContext | None) -> dict[str, Any]:
    limits = httpx.Limits(
        max_connections=CONNECTIONS_MAX, max_keepalive_connections=CONNECTIONS_MAX
    )
    return {"limits": limits, "uds": target.uds, "verify": certificates or False}


def _addressing(target: RemoteTarget) -> dict[str, Any]:
    return {
        "base_url": target.address,
        "headers": {**target.headers, "Content-Type": MEDIA_TYPE},
        # Proxies of the environment are ignored, so that the token goes only to the named server.
        "trust_env": False,
    }


def _request(client: httpx.Client | httpx.AsyncClient, step: Request) -> httpx.Request:
    return client.build_request(
        "POST", step.path, content=step.body, headers=step.headers, timeout=step.seconds
    )


def _response(found: httpx.Response) -> Response:
    after = found.headers.get("Retry-After", "")
    seconds = float(after) if after.isdigit() else None
    return Response(
        found.status_code, found.headers.get("Content-Type", ""), found.content, seconds
    )


def _failure(error: httpx.TransportError) -> Exception:
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return StoreUnavailable(
            f"the server's certificate is not trusted: {error}; set SSL_CERT_FILE to a file with "
            "the certificate of its authority"
        )
    kind = NotSent if isinstance(error, _NOT_SENT) else AnswerLost
    return kind(str(error) or type(error).__name__)


def _only_there(what: str) -> InvalidArgument:
    return InvalidArgument(f"{what} needs the database itself; it cannot be done through a server")
