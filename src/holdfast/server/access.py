"""Access checks: host names of the server, origins of pages, tokens and the trees they reach."""

from __future__ import annotations

import hashlib
import re
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable

from ..access import PERMISSIONS, Permission, Token, Tokens
from ..answers.problems import Refusal
from ..arguments import NAME_CHARACTERS_MAX
from ..errors import Forbidden, SessionNotFound
from ..feed.events import read_position
from ..kernel.operation import Async, Handle, Op, Row, Runtime, one, query
from ..records import Kind
from ..session import Session
from ..sessions.rows import READ_SESSION, read_place
from .endpoints import Endpoint
from .messages import Call, Headers
from .options import Options

Find = Callable[[str], Awaitable[Token | None]]

_HOST = re.compile(r"(?P<name>\[[0-9a-fA-F:.]+\]|[^\s:@/\\?#\[\],]+)(?::\d{1,5})?")
_BEARER = re.compile(r"(?i:bearer) +(?P<secret>[\x21-\x7e]{1,512})")
RANKS: dict[Permission, int] = {each: rank for rank, each in enumerate(PERMISSIONS)}
APPROVAL: Kind = "approval_point"
# How long a token that was revoked elsewhere may still be accepted.
REMEMBERED_SECONDS = 2.0
REMEMBERED_MAX = 10_000
BRAKE_SECONDS = 60.0


class Access:
    """Admits requests, or refuses them."""

    def __init__(self, options: Options, tokens: Tokens[Async]) -> None:
        self._options = options
        self._tokens = tokens
        self._known: OrderedDict[bytes, tuple[float, Token]] = OrderedDict()
        self._wrong: OrderedDict[str, deque[float]] = OrderedDict()

    def require_small(self, pairs: Iterable[tuple[bytes, bytes]]) -> None:
        """Refuse headers that exceed their limit."""
        most = self._options.limits.header_bytes
        if sum(len(name) + len(value) for name, value in pairs) > most:
            raise Refusal("headers_too_large", f"the headers have more than {most:,} bytes")

    def require_host(self, headers: Headers, scheme: str) -> None:
        """Refuse requests for another host name, and those from pages of another origin."""
        host = headers.get("host") or ""
        found = _HOST.fullmatch(host)
        if found is None or found["name"].lower() not in self._options.hosts:
            raise Refusal(
                "foreign_host",
                "the Host header names another server; allow the name with --allow-host NAME",
            )
        origin = headers.get("origin")
        own = f"{'https' if scheme in {'https', 'wss'} else 'http'}://{host}"
        if origin is not None and origin != own and origin not in self._options.origins:
            raise Refusal(
                "foreign_origin",
                "pages of this origin may not use the server; allow it with --allow-origin",
            )

    async def token(self, headers: Headers, peer: str, *, is_page: bool = False) -> Token:
        """Return the token of a request; a request for a page may send a cookie instead."""
        given = headers.get("authorization")
        if given is None and is_page:
            return await self._signed_in(headers.get("cookie"), headers.get("sec-fetch-site"))
        found = None if given is None else _BEARER.fullmatch(given)
        if found is None:
            why = "a token is required" if given is None else "the token must be sent as Bearer"
            raise _unauthorized(f"{why}: Authorization: Bearer <token>")
        digest = hashlib.sha256(found["secret"].encode()).digest()
        token = await self._remembered(digest, self._tokens.find, found["secret"])
        if token is None:
            self._brake(peer, time.monotonic())
            raise _unauthorized("the token is unknown, revoked or expired")
        return token

    async def _signed_in(self, cookies: str | None, site: str | None) -> Token:
        """Return the token with which a browser has signed in."""
        id = self._options.sign_in.token_id(cookies)
        # The cookie is not accepted for requests that another site causes, not even for reads.
        token = None
        if id is not None and site in {None, "same-origin", "none"}:
            token = await self._remembered(id.encode(), self._tokens.find_by_id, id)
        if token is None:
            raise _unauthorized("sign in first, or send a token: Authorization: Bearer <token>")
        return token

    async def _remembered(self, name: bytes, find: Find, given: str) -> Token | None:
        """Return a token; one that was looked up a moment ago comes from the cache."""
        now = time.monotonic()
        known = self._known.get(name)
        if known is not None and known[0] > now:
            return known[1]
        token = await find(given)
        if token is None:
            self._known.pop(name, None)
            return None
        self._known[name] = (now + REMEMBERED_SECONDS, token)
        if len(self._known) > REMEMBERED_MAX:
            self._known.popitem(last=False)
        return token

    def _brake(self, peer: str, now: float) -> None:
        """Count a wrong token from a peer, and refuse the peer after too many."""
        times = self._wrong.setdefault(peer, deque())
        self._wrong.move_to_end(peer)
        if len(self._wrong) > REMEMBERED_MAX:
            self._wrong.popitem(last=False)
        while times and times[0] <= now - BRAKE_SECONDS:
            times.popleft()
        if len(times) >= self._options.limits.wrong_tokens_per_minute:
            wait = max(1, round(times[0] + BRAKE_SECONDS - now))
            raise Refusal(
                "rate_limited", "too many wrong tokens", headers={"retry-after": str(wait)}
            )
        times.append(now)

    def require_permission(self, token: Token, endpoint: Endpoint) -> None:
        """Refuse a route that the token or the server does not allow."""
        assert endpoint.permission is not None
        self.require_allowed(token, endpoint.permission)
        if endpoint.is_store_wide and token.root_id is not None:
            raise Refusal(
                "forbidden", f"{token.name!r} is limited to one tree, and this concerns all trees"
            )

    def require_allowed(self, token: Token, permission: Permission) -> None:
        """Refuse a request that the token or the server does not allow."""
        if RANKS[token.permission] < RANKS[permission]:
            raise Refusal(
                "forbidden",
                f"this needs a token for {permission}; {token.name!r} is for {token.permission}",
            )
        if self._options.is_read_only and permission != "read":
            raise Refusal("read_only", "the server was started with --read-only")


async def require_named_session(call: Call, id: str | None) -> Session[Async] | None:
    """Return the session that a request names, if any; with a limited token it must name one."""
    if id is not None:
        return await call.context.sessions.find(id, call.token)
    if call.token.root_id is not None:
        raise Refusal("forbidden", "the token is limited to one tree: name a session of it")
    return None


async def tree_of(call: Call, session_id: str | None) -> str | None:
    """Return the tree to which a list is restricted; the session that it names must be in it."""
    if session_id is not None:
        await call.context.sessions.find(session_id, call.token)
    return call.token.root_id


def root_of(call: Call, root: str | None) -> str | None:
    """Return the tree to which a list is restricted; for a limited token, always its own."""
    if call.token.root_id is not None and root not in {None, call.token.root_id}:
        raise Refusal("forbidden", "the token is limited to another tree")
    return call.token.root_id or root


def require_decider(token: Token, kind: object, data: object) -> None:
    """Refuse a record of a person's decision if the token may not approve.

    An agent would act on such a record as if `approve` had been called. Only the store itself
    records what a pause has asked: another question would turn its decision into one on that.
    """
    told = {"decision", "pause"}
    is_decision = kind == APPROVAL and isinstance(data, dict) and not told.isdisjoint(data)
    may_approve = RANKS[token.permission] >= RANKS["approve"] and token.root_id is None
    if is_decision and not may_approve:
        raise Forbidden("a decision needs a token for approve, for all trees; nothing was done")


def _unauthorized(detail: str) -> Refusal:
    return Refusal("unauthorized", detail, headers={"www-authenticate": "Bearer"})


class SessionFinder(Handle[Async]):
    """Finds sessions by their ids, within the reach of a token."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self._known: OrderedDict[str, Row] = OrderedDict()

    @query
    def _place(self, id: str) -> Op[Row]:
        return (yield from read_place(id))

    async def find(self, id: str, token: Token) -> Session[Async]:
        """Return a session; one outside the token's tree is reported as not found."""
        unknown = SessionNotFound(f"there is no session {id!r}", id=id)
        if not 0 < len(id) <= NAME_CHARACTERS_MAX or not id.isprintable():
            raise unknown
        self._known.pop(id, None)
        row = self._known[id] = await self._place(id)
        if len(self._known) > REMEMBERED_MAX:
            self._known.popitem(last=False)
        if token.root_id not in {None, row["root_id"]}:
            raise unknown
        return self._session(row)

    def remembered(self, id: str, token: Token) -> Session[Async] | None:
        """Return a session from the cache; it may have been deleted since.

        A session's number and its root never change. A write looks the session up by its number in
        its own transaction and fails if it is gone; an id that is used again gets another number.
        """
        row = self._known.get(id)
        is_reached = row is not None and token.root_id in {None, row["root_id"]}
        return self._session(row) if row is not None and is_reached else None

    def _session(self, row: Row) -> Session[Async]:
        return Session(self.runtime, row["id"], row["number"], row["root_id"], row["name"])

    @query
    def created_at(self, id: str) -> Op[int]:
        """Return when a session was created."""
        row = yield from one(READ_SESSION, id=id)
        if row is None:
            raise SessionNotFound(f"there is no session {id!r}", id=id)
        return int(row["created_at"])

    @query
    def position(self, root_id: str) -> Op[int]:
        """Return the last position of a tree's feed."""
        return (yield from read_position(root_id))
