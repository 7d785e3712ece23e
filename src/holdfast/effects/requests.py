"""Requests: the key and digest that identify identical calls, and the salts they are hashed with.

A store has a salt of its own, and those of imported sessions. A key that is kept outside the store
replaces all of them; the store keeps its mark. A call is issued only while the store has the salts
and the key that it was identified with: under another key every call would be new, and run again.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, replace
from typing import Any, TypeAlias

from ..arguments import require_text
from ..codec import Limits, canonical, check, with_first
from ..dataclass import dataclass
from ..errors import InvalidArgument
from ..kernel.operation import Op, Query, Row, batch, one, rows
from ..leases import Guard
from ..records import EffectKind
from ..sessions.access import Place
from ..wire import travels
from .tools import TTL_SECONDS_MAX, OnUnknown, Tool, Verify, require_duration

ONCE_SECONDS = 24 * 3600.0
ONCE_KEY_CHARACTERS_MAX = 200
GLOBAL = "global"
SESSION, ITEM, ONCE, UNDO = "session:", "item:", "once:", "undo:"

NEWEST_SALT = "(SELECT max(number) FROM hf_effect_salts)"
SALT_OF_SESSION = """coalesce((
    SELECT salt_number FROM hf_effect_sessions WHERE session_number = CAST(:place_number AS INTEGER)
), 0)"""
READ_SALTS = "SELECT number, kind, salt FROM hf_effect_salts ORDER BY number"
SALTS_NOW = f"SELECT {NEWEST_SALT} AS salts_number, {SALT_OF_SESSION} AS session_salt"
KNOWN_UNDER_KEY = """
SELECT request_digest, status FROM hf_effects WHERE key = :key AND generation > 0
ORDER BY generation DESC LIMIT 1
"""
ANY_EFFECT = "SELECT number FROM hf_effects LIMIT 1"
# No other transaction may commit a first effect while the store adopts a key.
NO_EFFECTS_MEANWHILE = "/*pg LOCK TABLE hf_effects IN SHARE ROW EXCLUSIVE MODE */"
DROP_KEY = """
DELETE FROM hf_effect_salts WHERE kind = 'key' AND NOT EXISTS (SELECT 1 FROM hf_effects)
"""
ADOPT_KEY = """
INSERT INTO hf_effect_salts (kind, salt)
SELECT 'key', CAST(:mark AS TEXT) WHERE NOT EXISTS (SELECT 1 FROM hf_effects)
ON CONFLICT (salt) DO NOTHING
"""

KeyMismatch: TypeAlias = Callable[[str, str], InvalidArgument]
"""Returns the error, given the store's mark and the wanted one."""


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """The key and digest that identify a request, the salt used, and the salts it relies on."""

    salt: bytes
    scope: str
    key: str
    digest: str
    salts_number: int = 0
    """The number of the store's newest salt at the time."""
    session_salt: int = 0
    """The number of the salt that the session was imported with, or 0."""


@travels
@dataclass(frozen=True, slots=True)
class Approval:
    """A person's decision to allow one call: the record of it, and the epoch it counts in."""

    session_id: str
    version: int
    epoch: int

    @property
    def name(self) -> str:
        """What an effect says that was issued under it."""
        return f"{self.session_id} {self.version}"


class ApprovalUsed(Exception):
    """The approval for a call no longer counts, so nothing was run: a person has to decide."""


@travels
@dataclass(slots=True, kw_only=True)
class EffectRequest:
    """A call to be looked up or issued."""

    tool: Tool[..., Any]
    arguments: Any
    """Stored, and compared with other requests under the same key."""
    policy: str
    distinct: Any
    """Calls under one policy with equal values are the same effect."""
    holder: str
    place: Place | None
    guard: Guard | None
    """The work item's lease that every write requires."""
    call_id: str | None = None
    item_id: str | None = None
    chain_id: str | None = None
    """The first item of the redrive chain that the call belongs to."""
    ttl_ms: int | None = None
    undoes: str | None = None
    idempotency_key: str | None = None
    approval: Approval | None = None
    """Consumed by the attempt that is issued under it; None if the call needs none."""
    identity: RequestIdentity = field(init=False, repr=False)
    body: bytes = field(init=False, repr=False)
    """The encoded arguments, not sealed yet."""

    @property
    def scope(self) -> str:
        """Where identical calls are recognized: in a redrive chain, a session or the store."""
        if self.chain_id is not None:
            return f"{ITEM}{self.chain_id}"
        return GLOBAL if self.place is None else f"{SESSION}{self.place.session_id}"

    def identify(self, salt: bytes, limits: Limits) -> RequestIdentity:
        """Return the key and digest of this request under a salt."""
        asked = (self.tool.name, self.policy, self.arguments, self.distinct)
        return identify(salt, limits, self.scope, *asked)


def policy_of(
    tool: Tool[..., Any], arguments: dict[str, Any], call_id: str | None
) -> tuple[str, Any]:
    """Return the policy of a call, and the value by which calls under it are compared."""
    if callable(tool.dedupe):
        return "session", ["chosen", tool.dedupe(dict(arguments))]
    if tool.dedupe == "call" and call_id is None:
        if tool.effect == "read":
            return "none", secrets.token_hex(16)
        raise InvalidArgument(f'{tool.name} has dedupe="call", so each call needs a call_id')
    if tool.dedupe == "call":
        return "call", ["call", call_id]
    return tool.dedupe, arguments


def once_rules(key: str, request: Any, ttl_seconds: float | None) -> dict[str, Any]:
    """Return the request fields of a call that is identified by the caller's own key."""
    require_text("key", key, ONCE_KEY_CHARACTERS_MAX)
    require_duration("ttl_seconds", ttl_seconds, TTL_SECONDS_MAX, may_be_zero=False)
    ttl_ms = None if ttl_seconds is None else round(ttl_seconds * 1000)
    return {"policy": "once", "distinct": key, "arguments": request, "ttl_ms": ttl_ms}


def once_tool(
    function: Callable[..., Any],
    request: Any,
    effect: EffectKind,
    verify: Verify | None,
    on_unknown: OnUnknown,
    cache_failures: bool,
) -> tuple[Tool[..., Any], Mapping[str, Any]]:
    """Return the tool that `once` runs, and its arguments. A Tool keeps its own rules."""
    if isinstance(function, Tool):
        return function, {} if request is None else request
    if not callable(function):
        raise InvalidArgument(f"once takes a function, not {type(function).__name__}")
    made = Tool(
        function=function,
        name=getattr(function, "__name__", type(function).__name__),
        effect=effect,
        verify=verify,
        on_unknown=on_unknown,
        cache_failures=cache_failures,
        dedupe="global",
    )
    return made, {}


def scope_of(session_id: str) -> str:
    """Return the scope of a session's calls."""
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
    """Return the key and digest of a request; raise if an argument cannot be stored.

    Both are salted hashes of the unredacted arguments: secrets cannot be guessed without the salt,
    and redaction rules can change without changing any call's identity. A key starts with its scope
    in plain text, so that an import can tell which effects count outside its sessions.
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
    """Return an error whose path is that of the caller's argument, not of the hashed value."""
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


def is_unredacted(salts: Iterable[bytes], limits: Limits, row: Row, arguments: Any) -> bool:
    """Whether a row's stored arguments hash to the digest of its request."""
    is_once = row["key"].removeprefix(f"{row['scope']}:").startswith(ONCE)
    request = arguments if is_once else [row["tool"], arguments]
    return row["request_digest"] in (_hash(salt, limits, request, "request") for salt in salts)


def digest_of(salt: bytes, limits: Limits, tool: str, arguments: Any) -> str:
    """Return the digest of a request that is not under a caller's own key."""
    return _hash(salt, limits, [tool, arguments], "request")


def derive_key(salt: bytes, key: str, generation: int) -> str:
    """Return the idempotency key for a receiver, unique across stores."""
    material = b"\0".join((b"holdfast effect 1", salt, key.encode(), str(generation).encode()))
    return f"hf_{hashlib.sha256(material).hexdigest()[:40]}"


def _hash(salt: bytes, limits: Limits, value: Any, name: str) -> str:
    return _hmac(salt, canonical(value, limits, name=name))


def _hmac(salt: bytes, form: bytes) -> str:
    return hmac.digest(salt, form, "sha256").hex()


@dataclass(frozen=True, slots=True)
class StoreSalts:
    """The rows of a store's table of salts."""

    salts: dict[int, str]
    """By number; the store's own comes first."""
    mark: str
    """The mark of the key that replaces them, or ''."""
    newest: int


class Salts:
    """The salts of one open store, cached. Thread-safe."""

    def __init__(self, key: bytes | None, limits: Limits) -> None:
        self.key = key
        self.mark = mark_of(key)
        self.limits = limits
        # Replaced whole: a thread that sees a number also sees the salts up to it.
        self._known: tuple[StoreSalts, list[bytes]] = StoreSalts({}, "", 0), []
        self._is_old = True
        self._of_sessions: dict[int, int] = {}

    def load(self) -> Op[bool]:
        """Read them once; False if the store has another key but no effects yet.

        Raises InvalidArgument if it has effects that were identified with another key.
        """
        if not self._is_old:
            return True
        found = yield from self.refresh()
        if self._is_old:
            yield from _require_no_effects(found.mark, self.mark, _opened_with_another_key)
        return not self._is_old

    def load_for_write(self) -> Op[None]:
        """Read them once. A store without effects adopts this key."""
        if self._is_old:
            self._note((yield from adopt_key(self.mark, _opened_with_another_key)))

    def refresh(self) -> Op[StoreSalts]:
        """Read them again: another process may have imported a session."""
        found = yield from read_salts()
        self._note(found)
        return found

    def _note(self, found: StoreSalts) -> None:
        if found.mark == self.mark:
            self._known = found, [bytes.fromhex(salt) for salt in found.salts.values()]
        # Last: from here on, other threads use what is known.
        self._is_old = found.mark != self.mark

    def now(self, place: Place | None) -> Query:
        """Return the statement whose row `confirm` takes."""
        return Query(SALTS_NOW, {"place_number": None if place is None else place.number})

    def confirm(self, request: EffectRequest, now: Row) -> Op[bool]:
        """Whether a request was identified with the current salts; if not, refresh them."""
        believed = (request.identity.salts_number, request.identity.session_salt)
        if believed == (now["salts_number"], now["session_salt"]):
            return True
        yield from self.refresh()
        if request.place is not None:
            if now["session_salt"]:
                self._of_sessions[request.place.number] = now["session_salt"]
            else:
                self._of_sessions.pop(request.place.number, None)
        return False

    def all(self) -> list[bytes]:
        """Return every salt that identities in this store may have been made with."""
        return [self.key] if self.key is not None else self._known[1]

    def of(self, request: EffectRequest) -> list[bytes]:
        """Return the salts to identify a request with, the preferred one first.

        Store-wide requests prefer the store's own, whichever session asks.
        """
        place, (store, known) = request.place, self._known
        if self.key is not None:
            return [self.key]
        if place is None or len(known) == 1 or request.policy in {"global", "once"}:
            return known
        own = store.salts.get(self._of_sessions.get(place.number, 0))
        first = [] if own is None else [bytes.fromhex(own)]
        return first + [salt for salt in known if salt not in first]

    def identify(self, request: EffectRequest) -> Op[RequestIdentity]:
        """Return a request's identity, under the salt that finds an earlier call, if one does."""
        number = -1 if request.place is None else request.place.number
        # Read before the salts: whoever believes too little reads again, in `confirm`.
        believed = (self._known[0].newest, self._of_sessions.get(number, 0))
        known = [request.identify(salt, self.limits) for salt in self.of(request)]
        best, best_rank = known[0], tuple[bool, ...]()
        if len(known) > 1 and request.policy != "none":
            looks = (Query(KNOWN_UNDER_KEY, {"key": each.key}) for each in known)
            for each, found in zip(known, (yield from batch(*looks)), strict=True):
                for row in found:
                    rank = (row["request_digest"] == each.digest, row["status"] != "failed")
                    if rank > best_rank:
                        best, best_rank = each, rank
        return replace(best, salts_number=believed[0], session_salt=believed[1])

    def matches(self, row: Row, request: EffectRequest) -> bool:
        """Whether a row belongs to an equal request."""
        if row["request_digest"] == request.identity.digest:
            return True
        # A session may have rows from before its import and from after it.
        found = (request.identify(salt, self.limits) for salt in self.of(request))
        return row["request_digest"] in (each.digest for each in found)


def mark_of(key: bytes | None) -> str:
    """Return the mark by which a store recognizes a key, without revealing it."""
    if key is None:
        return ""
    return "key:" + hmac.digest(key, b"holdfast effects key 1", "sha256").hex()


def read_salts() -> Op[StoreSalts]:
    """Return the salts and the key mark of the store."""
    found = yield from rows(READ_SALTS)
    salts = {row["number"]: row["salt"] for row in found if row["kind"] != "key"}
    mark = next((row["salt"] for row in found if row["kind"] == "key"), "")
    return StoreSalts(salts, mark, found[-1]["number"])


def adopt_key(mark: str, refusal: KeyMismatch) -> Op[StoreSalts]:
    """Return the salts of a store with this key mark, which a store without effects adopts.

    Raises `refusal` if the store has effects under another key.
    """
    while True:
        found = yield from read_salts()
        if found.mark == mark:
            return found
        yield from _require_no_effects(found.mark, mark, refusal)
        for text in (NO_EFFECTS_MEANWHILE, DROP_KEY, ADOPT_KEY):
            yield Query(text, {"mark": mark} if text is ADOPT_KEY else {})


def _require_no_effects(known: str, mark: str, refusal: KeyMismatch) -> Op[None]:
    if (yield from one(ANY_EFFECT)) is not None:
        raise refusal(known, mark)


def _opened_with_another_key(known: str, mark: str) -> InvalidArgument:
    has, wanted = "with another key", "with that one, redaction=holdfast.Redactor(key=…)"
    if not known:
        has, wanted = "without a key", "without one"
    elif not mark:
        has, wanted = "with a key", "with it, redaction=holdfast.Redactor(key=…)"
    return InvalidArgument(
        f"the effects of this store were identified {has}, so identical calls would be run again; "
        f"nothing was written. Open the store {wanted}; only a store without effects can adopt "
        "another key"
    )
