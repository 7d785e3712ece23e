"""The server as an ASGI application: each request is admitted, parsed and answered."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from typing import Any

from ..access import Token
from ..answers.problems import Refusal
from ..errors import SessionNotFound
from ..store import AsyncStore
from . import bodies, problems
from .access import Access
from .calls import LARGE_BYTES
from .context import Context
from .endpoints import PAGES, Endpoint, Router
from .frames import PACKED
from .mcp import Relayed
from .messages import Answer, Call, Headers
from .options import Options
from .replay import HEADER as IDEMPOTENCY_KEY
from .rings import Ringing
from .routes import ENDPOINTS
from .stream import Following, refuse_websocket, send_events, send_frames, start_events
from .ui.views import for_people

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Reply = Answer | Following | Relayed | Ringing

NOBODY = Token(
    number=0,
    id="",
    name="",
    permission="read",
    root_id=None,
    created_by=None,
    created_at=0,
    expires_at=None,
    revoked_at=None,
)
OPEN = frozenset(each.path.encode() for each in ENDPOINTS if each.permission is None)
UNKNOWN_ROUTE = "unknown"


class Api:
    """Serves one open store."""

    def __init__(self, store: AsyncStore, options: Options | None = None) -> None:
        options = options or Options()
        self.context = Context(store, options, Access(options, store.tokens))
        self._router = Router(ENDPOINTS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        started = time.perf_counter()
        is_websocket = scope["type"] == "websocket"
        method, route = "GET" if is_websocket else scope["method"], UNKNOWN_ROUTE
        instance = scope["raw_path"].decode("latin-1")
        try:
            with self.context.metrics.request():
                call = await self._let_in(scope, method, instance)
                route = call.endpoint.path
                answer = await self._answer(call, scope, receive)
            if isinstance(answer, Following | Ringing):
                self._count(method, route, 200, started)
                # An OSError means that the client disconnected.
                with contextlib.suppress(OSError):
                    await self._follow(call, answer, scope, send, receive)
                return
            if isinstance(answer, Relayed):
                await self._relay(call, answer, scope, send, receive)
                return
        except Exception as error:
            most = self.context.options.limits.conflict_bytes
            answer = problems.answer_of(error, instance, most)
            self.context.refusals.note(answer.body["error"])
            answer = await for_people(answer, self.context, scope)
        self._count(method, route, answer.status, started)
        if is_websocket:
            await refuse_websocket(answer, scope, send)
        else:
            await _send(answer, send, has_content=method != "HEAD")

    async def _let_in(self, scope: Scope, method: str, instance: str) -> Call:
        """Return the request as a call, or refuse it."""
        context, access = self.context, self.context.access
        access.require_small(scope["headers"])
        headers = Headers(scope["headers"])
        access.require_host(headers, scope["scheme"])
        bodies.require_one_length(headers)
        path, token = self._path(scope["raw_path"]), NOBODY
        if path not in OPEN:
            is_page = path.startswith(PAGES.encode())
            token = await access.token(headers, _peer(scope), is_page=is_page)
            context.usage.count_request(token)
        endpoint, names = self._router.find(method, path)
        if endpoint.permission is not None:
            access.require_permission(token, endpoint)
        is_websocket = scope["type"] == "websocket"
        if is_websocket and not endpoint.is_followed:
            raise Refusal("not_found", "this route cannot be followed")
        given: dict[str, Any] = {"is_websocket": is_websocket, "peer": _peer(scope)}
        return Call(context, endpoint, token, headers, instance, names, **given)

    async def _answer(self, call: Call, scope: Scope, receive: Receive) -> Reply:
        """Find the session, read the request, and call the handler of its route."""
        endpoint = call.endpoint
        sessions, is_remembered = self.context.sessions, False
        if endpoint.names_session:
            if endpoint.is_session_checked:
                call.found = sessions.remembered(call.path["id"], call.token)
                is_remembered = call.found is not None
            if not is_remembered:
                call.found = await sessions.find(call.path["id"], call.token)
        call.query = bodies.parse_query(scope["query_string"], endpoint.query)
        takes_key = IDEMPOTENCY_KEY in endpoint.takes
        if not takes_key and call.headers.get(IDEMPOTENCY_KEY) is not None:
            raise Refusal("invalid_request", "this route does not accept an Idempotency-Key")
        if endpoint.body is not None:
            wanted = bodies.body_type(endpoint, call.headers)
            shape = self.context.options.limits
            call.raw_body = await bodies.read_body(receive, call.headers, shape.body_bytes)
            if endpoint.body is not bytes:
                limits = self.context.store.runtime.codec.limits
                parse = partial(bodies.parse_body, call.raw_body, wanted, limits, shape)
                is_large = len(call.raw_body) > LARGE_BYTES
                call.body = await asyncio.to_thread(parse) if is_large else parse()
        answer: Reply
        try:
            answer = await endpoint.handler(call)
        except SessionNotFound:
            if not is_remembered:
                raise
            call.found = await sessions.find(call.path["id"], call.token)
            answer = await endpoint.handler(call)
        if not isinstance(answer, Answer):
            answer.check = lambda: self._check(call.headers, _peer(scope), endpoint)
        return answer

    async def _follow(
        self,
        call: Call,
        following: Following | Ringing,
        scope: Scope,
        send: Send,
        receive: Receive,
    ) -> None:
        if isinstance(following, Ringing):
            with self.context.usage.following(call.token):
                await following.serve(send, receive)
            return
        try:
            with self.context.usage.following(call.token):
                if scope.get("method") == "HEAD":
                    await start_events(send, is_over=True)
                elif call.is_websocket:
                    packed = scope.get("extensions", {}).get(PACKED, {})
                    packed["place"], write_now = lambda: following.last, packed.get("write")
                    await send_frames(following, send, receive, write_now=write_now)
                else:
                    await send_events(following, send, receive)
        finally:
            await following.follower.close()

    async def _relay(
        self, call: Call, relayed: Relayed, scope: Scope, send: Send, receive: Receive
    ) -> None:
        """Let another application respond; a response that continues is counted as a follower."""
        started = time.perf_counter()

        async def counted(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self._count(call.endpoint.method, call.endpoint.path, message["status"], started)
            await send(message)

        usage, metrics = self.context.usage, self.context.metrics
        with usage.following(call.token) if relayed.is_followed else metrics.request():
            await relayed.send(scope, receive, counted)

    async def _check(self, headers: Headers, peer: str, endpoint: Endpoint) -> None:
        """Check again whether a follower is still allowed to follow."""
        token = await self.context.access.token(headers, peer, is_page=endpoint.is_page)
        self.context.access.require_permission(token, endpoint)
        if self.context.is_stopping:
            raise Refusal("unavailable", "the server is stopping")

    def _path(self, raw_path: bytes) -> bytes:
        base = self.context.options.base_path.encode()
        if not raw_path.startswith(base + b"/"):
            raise Refusal("not_found", "there is no such address")
        return raw_path[len(base) :]

    def _count(self, method: str, route: str, status: int, started: float) -> None:
        seconds = time.perf_counter() - started
        self.context.metrics.count(method if route != UNKNOWN_ROUTE else "", route, status, seconds)


def _peer(scope: Scope) -> str:
    client = scope.get("client")
    return client[0] if client else "socket"


async def _send(answer: Answer, send: Send, *, has_content: bool) -> None:
    content = answer.content()
    headers = [(b"content-length", str(len(content)).encode())]
    if answer.status in {204, 304}:
        headers, content = [], b""
    elif content:
        headers.append((b"content-type", answer.content_type.encode()))
    headers += [(n.encode("latin-1"), v.encode("latin-1")) for n, v in answer.headers.items()]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": content if has_content else b""})
