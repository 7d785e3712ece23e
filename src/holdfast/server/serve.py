"""The server as a process: its socket, startup and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import resource
import signal
import socket
import stat
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import uvicorn

from .. import store as stores
from ..arguments import require_whole
from ..errors import HoldfastError, InvalidArgument, StoreUnavailable
from ..leases import uptime_seconds
from ..worker.upkeep import Upkeep
from .app import Api, Receive, Scope, Send
from .context import Context
from .options import LOOPBACK, Options
from .protocol import WebSocketProtocol, limited

# How long requests that are at work when the server stops may take.
GRACE_SECONDS = 10
# A client that reads nothing for so long while the server stops is dropped.
READ_SECONDS = 0.5
TELL_SECONDS = 60.0
NO_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
KEEP_ALIVE_SECONDS = 75
AUDIT_SECONDS = 60.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)
# How much of a request's head is parsed; beyond the limit of headers, it is refused as too large.
START_BYTES_MAX = 65_536
LOCALHOST = "localhost"
# The files that a server has open besides its connections: databases, sockets, modules.
FILES_BESIDE = 256
# How often to look for a port that is free at both loopback addresses.
PORT_ATTEMPTS = 100

log = logging.getLogger("holdfast.server")


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a server listens."""

    host: str = LOCALHOST
    """An address; `localhost` means both loopback addresses."""
    port: int = 0
    uds: str | None = None
    certfile: str | None = None
    keyfile: str | None = None
    is_insecure: bool = False

    def __post_init__(self) -> None:
        require_whole("port", self.port, 0, 65_535)
        if (self.certfile is None) != (self.keyfile is None):
            raise InvalidArgument("--certfile and --keyfile must be given together")
        is_open = self.uds is None and not is_loopback(self.host)
        if is_open and self.certfile is None and not self.is_insecure:
            raise InvalidArgument(
                f"{self.host} can be reached from other machines, and tokens would be sent in the "
                "clear: pass --certfile and --keyfile, or --insecure behind a proxy with TLS"
            )

    @property
    def scheme(self) -> str:
        """The scheme of the server's URLs."""
        return "http" if self.certfile is None else "https"


def is_loopback(host: str) -> bool:
    """Whether an address can be reached only from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == LOCALHOST


class Application:
    """Opens the store when the server starts, and closes it when the server stops."""

    def __init__(self, place: Mapping[str, Any], options: Options) -> None:
        self._place = place
        self._options = options
        self.api: Api | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or handle startup and shutdown."""
        if scope["type"] != "lifespan":
            assert self.api is not None
            await self.api(scope, receive, send)
            return
        await receive()
        mode = "read" if self._options.is_read_only else "write"
        async with stores.aopen(**{"mode": mode, **self._place}) as store:
            self.api = Api(store, self._options)
            auditing = asyncio.create_task(_audit(self.api.context))
            async with _upkeep(store, self._options):
                await send({"type": "lifespan.startup.complete"})
                await receive()
            auditing.cancel()
            await self.api.context.mcp.close()
            await self.api.context.refusals.flush()
        await send({"type": "lifespan.shutdown.complete"})

    def stop(self) -> None:
        """Report the server as not ready, and end its followers."""
        if self.api is not None:
            self.api.context.stop()


@contextlib.asynccontextmanager
async def _upkeep(store: stores.AsyncStore, options: Options) -> AsyncGenerator[None, None]:
    """Sweep and prune as a worker does; remote workers leave that to the server."""
    if options.is_read_only:
        yield
        return
    twin = await asyncio.to_thread(stores.sync_twin, store)
    upkeep = Upkeep(twin, options.sweep_interval_seconds, options.work_days, lambda: None)
    upkeep.start()
    try:
        yield
    finally:
        await asyncio.to_thread(upkeep.stop)


async def _audit(context: Context) -> None:
    """Once a minute, write refusals to the audit trail and record the age of waiting work."""
    while True:
        await asyncio.sleep(AUDIT_SECONDS)
        await context.refusals.flush()
        with contextlib.suppress(HoldfastError):
            await context.note_ages()


class Process(uvicorn.Server):
    """A server that calls back when it is ready, and ends its followers when it shuts down."""

    def __init__(
        self, config: uvicorn.Config, application: Application, ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._application = application
        self._ready = ready

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Let signals stop the server; uvicorn would raise them again after it has stopped."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        kept = {each: signal.signal(each, self.handle_exit) for each in SIGNALS}
        try:
            yield
        finally:
            for number, handler in kept.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start serving."""
        asyncio.get_running_loop().set_exception_handler(_report)
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End followers, and finish the requests in progress."""
        self._application.stop()
        dropping = asyncio.create_task(self._drop_unread())
        try:
            await super().shutdown(sockets)
        finally:
            dropping.cancel()

    async def _drop_unread(self) -> None:
        """Drop clients that do not read, so that the end waits for no one but requests at work."""
        waiting: dict[Any, int] = {}
        while True:
            await asyncio.sleep(READ_SECONDS)
            transports = [each.transport for each in self.server_state.connections]
            unread = {each: each.get_write_buffer_size() for each in transports}
            for transport, size in unread.items():
                if size and waiting.get(transport) == size:
                    transport.abort()
            waiting = unread


class Listener(socket.socket):
    """A listening socket that waits a second when no file can be opened, and logs it seldom.

    An event loop pauses for that second at every error, and would ask on at once, a thousand times.
    """

    _is_paused = False
    _tell_again_at = 0.0

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection; after an error that calls for a pause, report none once."""
        if self._is_paused:
            self._is_paused = False
            raise BlockingIOError
        try:
            return super().accept()
        except OSError as error:
            self._is_paused = error.errno in NO_RESOURCES
            if self._is_paused and uptime_seconds() >= self._tell_again_at:
                self._tell_again_at = uptime_seconds() + TELL_SECONDS
                log.error("connections wait, as none can be accepted now: %s", error.strerror)
            raise


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error of the event loop, unless a listener has."""
    error = context.get("exception")
    if not isinstance(error, OSError) or error.errno not in NO_RESOURCES:
        loop.default_exception_handler(context)


@dataclass(slots=True)
class Serving:
    """Bound sockets, and what is served on them."""

    place: Mapping[str, Any]
    address: Address
    options: Options
    sockets: list[socket.socket] = field(init=False)

    def __post_init__(self) -> None:
        self.sockets = bound(self.address)
        hosts = set(self.options.hosts) | LOOPBACK | {self.address.host}
        self.options = _reached(self.options, frozenset(hosts), self.address)

    @property
    def url(self) -> str:
        """The URL of the server."""
        if self.address.uds is not None:
            path = quote(os.path.abspath(self.address.uds), safe="")
            return f"http+unix://{path}{self.options.base_path}"
        host, port = self.sockets[0].getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        return f"{self.address.scheme}://{shown}:{port}{self.options.base_path}"

    def process(self, ready: Callable[[], None] = lambda: None) -> Process:
        """Return the server, to be run in its own event loop."""
        application = Application(self.place, self.options)
        limits = self.options.limits
        config = uvicorn.Config(
            application,
            http=limited(limits),
            ws=WebSocketProtocol,
            ws_max_size=limits.frame_bytes,
            ws_ping_interval=limits.ping_seconds,
            ws_ping_timeout=limits.ping_seconds,
            ws_per_message_deflate=False,
            h11_max_incomplete_event_size=START_BYTES_MAX,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=GRACE_SECONDS,
            ssl_certfile=self.address.certfile,
            ssl_keyfile=self.address.keyfile,
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
        )
        return Process(config, application, ready)

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serve until a signal arrives."""
        process = self.process(ready)
        allow_files(self.options.limits.connections + FILES_BESIDE)
        try:
            process.run(sockets=self.sockets)
        finally:
            self.close()
        if not process.started:
            raise StoreUnavailable("the server could not start; the store cannot be opened")

    async def serve(self, ready: Callable[[], None]) -> None:
        """Serve in this event loop until it is cancelled."""
        await self.process(ready).serve(sockets=self.sockets)

    def close(self) -> None:
        """Release the address."""
        _close(self.sockets)
        if self.address.uds is not None:
            Path(self.address.uds).unlink(missing_ok=True)


def allow_files(count: int) -> None:
    """Let this process open so many files, as far as the system allows: a connection is a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def bound(address: Address) -> list[socket.socket]:
    """Return the sockets bound to an address."""
    if address.uds is not None:
        return [_bound_unix(address.uds)]
    if address.host != LOCALHOST:
        return [_bound_tcp(address.host, address.port)]
    for _ in range(PORT_ATTEMPTS):
        first = _bound_tcp("127.0.0.1", address.port)
        try:
            return [first, *_bound_ipv6(first.getsockname()[1])]
        except InvalidArgument:
            first.close()
            if address.port:
                raise
    raise InvalidArgument("no port is free at both 127.0.0.1 and ::1; choose one with --port")


def _bound_ipv6(port: int) -> list[socket.socket]:
    """Return a socket at the loopback address of IPv6, if the machine has one.

    Another user's program that listens there would be sent the tokens of clients that connect to
    `localhost`.
    """
    try:
        _bound_tcp("::1", 0).close()
    except InvalidArgument:
        return []
    return [_bound_tcp("::1", port)]


def _bound_tcp(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio disables Nagle's delay only for a socket that is known to be TCP.
    with contextlib.ExitStack() as undoing:
        try:
            bound_socket = Listener(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            undoing.callback(bound_socket.close)
            bound_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound_socket.bind((host, port))
        except OSError as error:
            raise InvalidArgument(
                f"cannot listen at {host} port {port}: {error.strerror}; "
                "choose another port with --port, or 0 for any free one"
            ) from None
        undoing.pop_all()
    return bound_socket


def _close(sockets: list[socket.socket]) -> None:
    for each in sockets:
        each.close()


def _bound_unix(path: str) -> socket.socket:
    """Return a Unix domain socket that only its owner can use."""
    if os.path.lexists(path):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise InvalidArgument(f"{path} exists and is not a socket; nothing was changed")
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(path)
            except OSError:
                # Left behind by a server that was killed.
                os.unlink(path)
            else:
                raise InvalidArgument(f"another server is already listening at {path}")
    bound_socket = Listener(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        bound_socket.bind(path)
    except OSError as error:
        bound_socket.close()
        raise InvalidArgument(f"cannot listen at {path}: {error.strerror}") from None
    finally:
        os.umask(before)
    return bound_socket


def _reached(options: Options, hosts: frozenset[str], address: Address) -> Options:
    known = frozenset(each.lower() for each in hosts)
    return replace(options, hosts=known, is_secure=address.certfile is not None)
