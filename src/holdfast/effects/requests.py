"""Requests: what a call asks for, and the key and digest by which equal ones are recognized."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..codec import Limits, canonical, check, with_first
from ..errors import InvalidArgument
from ..kernel.operation import Row
from ..leases import Guard
from ..sessions.access import Place
from .tools import Tool

GLOBAL = "global"
SESSION, ITEM, ONCE, UNDO = "session:", "item:", "once:", "undo:"


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """The key and digest that identify a request, the salt used, and the salts it relies on."""

    salt: bytes
    scope: str
    key: str
    digest: str
    salts_number: int = 0
    """The newest salt of the store when it was identified."""
    session_salt: int = 0
    """The salt that its session brought with it, by number; 0 for none."""


@dataclass(slots=True, kw_only=True)
class EffectRequest:
    """A call on its way through the ledger: which tool, with what, for whom."""

    tool: Tool[..., Any]
    arguments: Any
    """What is stored, and compared with other requests under the same key."""
    policy: str
    distinct: Any
    """What makes two calls under one policy the same effect."""
    holder: str
    place: Place | None
    guard: Guard | None
    """The lease of a work item, without which nothing is written."""
    call_id: str | None = None
    item_id: str | None = None
    chain_id: str | None = None
    """The first item of the redrive chain that the call belongs to."""
    ttl_ms: int | None = None
    undoes: str | None = None
    idempotency_key: str | None = None
    identity: RequestIdentity = field(init=False)
    body: bytes = field(init=False)
    """The arguments as they are stored, before they are sealed."""

    @property
    def scope(self) -> str:
        """Where the call counts: in its redrive chain, its session, or the whole store."""
        if self.chain_id is not None:
            return f"{ITEM}{self.chain_id}"
        return GLOBAL if self.place is None else f"{SESSION}{self.place.session_id}"

    def identify(self, salt: bytes, limits: Limits) -> RequestIdentity:
        """Return the key and digest of this request under a salt."""
        asked = (self.tool.name, self.policy, self.arguments, self.distinct)
        return identify(salt, limits, self.scope, *asked)


def scope_of(session_id: str) -> str:
    """Return where the calls of a session count; no other scope begins like it."""
    return f"{SESSION}{session_id}"


def identify(
    salt: bytes,
    limits: Limits,
    scope: str,
    tool: str,
    policy: str,
    arguments: Any,
    distinct: Any,
) -> RequestIdentity:
    """Return the key and digest of a request, or raise naming what cannot be stored.

    Both are salted hashes of the whole arguments: without the salt nobody can guess secrets, and
    what counts as a secret can change without any call becoming another. A key begins with its
    scope, in clear, so that an import can tell what counts beyond its sessions.
    """
    try:
        if policy == "once":
            key = f"{ONCE}{distinct}"
            key = f"{scope}:{key}" if scope.startswith(ITEM) else key
            return RequestIdentity(salt, scope, key, _hash(salt, limits, arguments, "request"))
        if policy == "undo":
            digest = _hash(salt, limits, [tool, distinct], "request")
            return RequestIdentity(salt, scope, f"{UNDO}{distinct}", digest)
        within = GLOBAL if policy == "global" else scope
        form = canonical([tool, arguments], limits, name="request")
        digest = _hmac(salt, form)
        if distinct is arguments:
            check([within, tool, distinct], limits, name="arguments")
            key = f"{within}:{_hmac(salt, with_first(within, form))[:32]}"
        else:
            key = key_within(salt, limits, within, tool, distinct)
        return RequestIdentity(salt, scope, key, digest)
    except InvalidArgument as error:
        raise (error if policy == "once" else _as_passed(error)) from None


def _as_passed(error: InvalidArgument) -> InvalidArgument:
    """Return an error that names what the caller passed, not its place in what is hashed."""
    path = str(error.fields.get("path", ""))
    chosen = "what dedupe returned"
    for inside, outside in (("request[1]", ""), ("arguments[2][1]", chosen), ("arguments[2]", "")):
        if path.startswith(inside):
            passed = f"{outside}{path.removeprefix(inside)}".removeprefix(".") or "arguments"
            message = str(error).replace(path, passed, 1)
            return type(error)(message, **{**error.fields, "path": passed})
    return error


def key_within(salt: bytes, limits: Limits, scope: str, tool: str, distinct: Any) -> str:
    """Return the key of a request in a scope."""
    return f"{scope}:{_hash(salt, limits, [scope, tool, distinct], 'arguments')[:32]}"


def is_whole(salts: Iterable[bytes], limits: Limits, row: Row, arguments: Any) -> bool:
    """Whether a row's stored arguments are those of the request, with nothing redacted."""
    is_once = row["key"].removeprefix(f"{row['scope']}:").startswith(ONCE)
    request = arguments if is_once else [row["tool"], arguments]
    return row["request_digest"] in (_hash(salt, limits, request, "request") for salt in salts)


def derive_key(salt: bytes, key: str, generation: int) -> str:
    """Return the idempotency key that a receiver is given: no other store makes the same."""
    material = b"\0".join((b"holdfast effect 1", salt, key.encode(), str(generation).encode()))
    return f"hf_{hashlib.sha256(material).hexdigest()[:40]}"


def _hash(salt: bytes, limits: Limits, value: Any, name: str) -> str:
    return _hmac(salt, canonical(value, limits, name=name))


def _hmac(salt: bytes, form: bytes) -> str:
    return hmac.digest(salt, form, "sha256").hex()
