"""The Model Context Protocol on the server: with its access checks, and without MCP sessions."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..answers.problems import Refusal
from ..extras import required
from ..kernel.operation import Async
from ..mcp.caller import Claim, Permission
from ..session import Session
from ..store import AsyncStore
from .bodies import require_few_nodes, require_shape
from .calls import LARGE_BYTES
from .channels import TICK_SECONDS
from .messages import Call
from .options import ServerLimits

if TYPE_CHECKING:
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

    from ..mcp.service import Service
    from .context import Context

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

log = logging.getLogger("holdfast.server")

CALL = "holdfast.call"
LISTEN = "subscriptions/listen"


@dataclass(frozen=True, slots=True)
class TokenReach:
    """The reach of a request: what its token permits."""

    call: Call
    is_bound: bool = False

    @property
    def store(self) -> AsyncStore:
        """The store that is served."""
        return self.call.store

    @property
    def default(self) -> Claim | None:
        """The root of the tree that the token is limited to."""
        root_id = self.call.token.root_id
        return None if root_id is None else Claim("token", root_id)

    @property
    def conflict_bytes(self) -> int:
        """How many bytes of current values the response to a conflict includes."""
        return self.call.context.options.limits.conflict_bytes

    def require(self, permission: Permission) -> None:
        """Raise if the token or the server does not allow it."""
        self.call.context.access.require_allowed(self.call.token, permission)

    async def find(self, id: str) -> Session[Async]:
        """Return a session within the reach of the token."""
        return await self.call.context.sessions.find(id, self.call.token)

    def note_refusal(self, code: str) -> None:
        """Count a refusal like any other refusal by the server."""
        self.call.context.refusals.note(code)


@dataclass(slots=True)
class Relayed:
    """A response that another ASGI application sends."""

    serve: Callable[[Message, Receive, Send], Awaitable[None]]
    body: bytes
    is_followed: bool
    """Whether the response continues until the client disconnects."""
    check: Callable[[], Awaitable[None]] | None = None
    """Raises when the token no longer permits the response to continue."""
    _is_open: bool = False

    async def send(self, scope: Message, receive: Receive, send: Send) -> None:
        """Send the response; an error is raised if nothing was sent yet, and otherwise ends it."""

        async def sending(message: Message) -> None:
            is_start = message["type"] == "http.response.start"
            self._is_open = is_start or message.get("more_body", False)
            await send(message)

        serving = asyncio.ensure_future(self.serve(scope, self._again(receive), sending))
        try:
            await self._watch(serving)
        except Exception as error:
            if not self._is_open:
                raise
            if not isinstance(error, Refusal):
                log.exception("a response of %s was cut short", scope["path"])
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
        if self._is_open:
            await send({"type": "http.response.body", "body": b""})

    async def _watch(self, serving: asyncio.Future[None]) -> None:
        """Wait until everything is sent, and check at intervals whether it may continue."""
        while not (await asyncio.wait({serving}, timeout=TICK_SECONDS))[0]:
            if self.check is not None:
                await self.check()
        serving.result()

    def _again(self, receive: Receive) -> Receive:
        """Return a `receive` that yields the body again, which was already read."""
        parts = [{"type": "http.request", "body": self.body, "more_body": False}]

        async def receiving() -> Message:
            return parts.pop() if parts else await receive()

        return receiving


class McpMount:
    """Starts MCP at its first request, because the SDK takes seconds to import."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._starting: asyncio.Task[StreamableHTTPSessionManager] | None = None
        self._service: Service | None = None
        self._running: asyncio.Task[None] | None = None

    async def relayed(self, call: Call) -> Relayed:
        """Return the response to a request."""
        read = partial(_method, call.raw_body, self._context.options.limits)
        is_large = len(call.raw_body) > LARGE_BYTES
        method = await asyncio.to_thread(read) if is_large else read()
        manager = await self._manager()

        async def serve(scope: Message, receive: Receive, send: Send) -> None:
            await manager.handle_request({**scope, CALL: call}, receive, send)

        return Relayed(serve, call.raw_body, method == LISTEN)

    def stop(self) -> None:
        """End all `subscriptions/listen` requests."""
        if self._service is not None:
            self._service.stop()

    async def close(self) -> None:
        """Stop serving MCP; called before the store closes."""
        if self._running is not None:
            self._running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._running

    async def _manager(self) -> StreamableHTTPSessionManager:
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        try:
            return await asyncio.shield(self._starting)
        except ImportError as error:
            self._starting = None
            log.warning("MCP cannot be served: %s", error)
            raise

    async def _start(self) -> StreamableHTTPSessionManager:
        service, manager = await asyncio.to_thread(_load, self._context.options.limits.body_bytes)
        self._service = service
        ready = asyncio.Event()
        self._running = asyncio.create_task(_run(manager, ready))
        await ready.wait()
        return manager


async def _run(manager: StreamableHTTPSessionManager, ready: asyncio.Event) -> None:
    async with manager.run():
        ready.set()
        await asyncio.Event().wait()


def _load(body_bytes: int) -> tuple[Service, StreamableHTTPSessionManager]:
    with required("MCP", "mcp"):
        from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
        from mcp.server.transport_security import TransportSecuritySettings

        from ..mcp.service import Service

    service = Service(_reach_of)
    manager = StreamableHTTPSessionManager(
        service.server(),
        json_response=True,
        stateless=True,
        max_request_body_size=body_bytes,
        # The server has already checked the host name and the origin, as for every route.
        security_settings=TransportSecuritySettings(enable_dns_rebinding_protection=False),
    )
    return service, manager


async def _reach_of(request: Any) -> TokenReach:
    return TokenReach(request.request.scope[CALL])


def _method(body: bytes, limits: ServerLimits) -> str:
    """Return the method of a JSON-RPC request, or "" for a body that the SDK will reject."""
    require_few_nodes(body, limits)
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    require_shape(request, len(body), limits)
    return str(request.get("method")) if isinstance(request, dict) else ""
