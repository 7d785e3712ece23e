"""Which calls are one effect: keys, digests, and the rows that a session's history holds."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterable, Sequence
from typing import Any

from ..checkpoints.read import LIST_EPOCHS, path
from ..codec import Limits, canonical, check, with_first
from ..errors import InvalidArgument
from ..kernel.operation import Op, Row, one, rows
from ..sessions.access import Place
from ..sessions.rows import BY_NUMBER
from .rows import Identity, Request

GLOBAL = "global"
SESSION, ITEM, ONCE, UNDO = "session:", "item:", "once:", "undo:"
LINEAGE = f"SELECT s.version, s.origin_version, s.lineage FROM {BY_NUMBER}"  # noqa: S608


def scope_of(session_id: str) -> str:
    """Return where the calls of a session count; no other scope begins like it."""
    return f"{SESSION}{session_id}"


def identify(salt: bytes, limits: Limits, place: Place | None, request: Request) -> Identity:
    """Return what a request is known by, or raise naming the argument that cannot be stored."""
    try:
        return _identify(salt, limits, place, request)
    except InvalidArgument as error:
        raise _as_passed(error, request) from None


def _as_passed(error: InvalidArgument, request: Request) -> InvalidArgument:
    """Return an error that names what the caller passed, not where it stands in what is hashed."""
    path = str(error.fields.get("path", ""))
    chosen = "what dedupe returned"
    for inside, outside in (("request[1]", ""), ("arguments[2][1]", chosen), ("arguments[2]", "")):
        if path.startswith(inside) and request.policy != "once":
            passed = f"{outside}{path.removeprefix(inside)}".removeprefix(".") or "arguments"
            message = str(error).replace(path, passed, 1)
            return type(error)(message, **{**error.fields, "path": passed})
    return error


def _identify(salt: bytes, limits: Limits, place: Place | None, request: Request) -> Identity:
    """Return what a request is known by, in the place where it is made.

    Hashes with a salt of the whole arguments: who has no salt cannot try secrets, and what counts
    as a secret can change without any call becoming another. A key begins with where it counts, in
    clear: what comes with an imported session can be told from what counts in the whole store.
    """
    scope = GLOBAL if place is None else scope_of(place.session_id)
    if request.chain_id is not None:
        scope = f"{ITEM}{request.chain_id}"
    if request.policy == "once":
        key = f"{ONCE}{request.distinct}"
        if request.chain_id is not None:
            key = f"{scope}:{key}"
        return Identity(salt, scope, key, _hash(salt, limits, request.arguments, "request"))
    if request.policy == "undo":
        digest = _hash(salt, limits, [request.tool, request.distinct], "request")
        return Identity(salt, scope, f"{UNDO}{request.distinct}", digest)
    within = GLOBAL if request.policy == "global" else scope
    form = canonical([request.tool, request.arguments], limits, name="request")
    digest = _hash_form(salt, form)
    if request.distinct is not request.arguments:
        return Identity(salt, scope, key_within(salt, limits, within, request), digest)
    check([within, request.tool, request.distinct], limits, name="arguments")
    key = _key(within, _hash_form(salt, with_first(within, form)))
    return Identity(salt, scope, key, digest)


def key_within(salt: bytes, limits: Limits, scope: str, request: Request) -> str:
    """Return the key of a request in a scope; `distinct` is what makes two calls one effect."""
    return _key(scope, _hash(salt, limits, [scope, request.tool, request.distinct], "arguments"))


def _key(scope: str, hashed: str) -> str:
    return f"{scope}:{hashed[:32]}"


def is_whole(salts: Iterable[bytes], limits: Limits, row: Row, arguments: Any) -> bool:
    """Whether these are the arguments that a row was asked with, and none was taken out."""
    is_once = row["key"].removeprefix(f"{row['scope']}:").startswith(ONCE)
    request = arguments if is_once else [row["tool"], arguments]
    found = (_hash(salt, limits, request, "request") for salt in salts)
    return row["request_digest"] in found


def derive_key(salt: bytes, key: str, generation: int) -> str:
    """Return the idempotency key that a receiver is given: no other store makes the same."""
    material = b"\0".join((b"holdfast effect 1", salt, key.encode(), str(generation).encode()))
    return f"hf_{hashlib.sha256(material).hexdigest()[:40]}"


def _hash(salt: bytes, limits: Limits, value: Any, name: str) -> str:
    return _hash_form(salt, canonical(value, limits, name=name))


def _hash_form(salt: bytes, form: bytes) -> str:
    """Return the HMAC-SHA-256 of a canonical form."""
    return hmac.digest(salt, form, "sha256").hex()


class Past:
    """The effects that a session's history holds, itself and the sessions it was forked from."""

    def __init__(
        self,
        number: int,
        own: Sequence[tuple[int, int]],
        lineage: Sequence[Any],
        ends: dict[int, int],
    ) -> None:
        self._number = number
        self._own = own
        self._parts: dict[tuple[str, int], list[tuple[int, int]]] = {}
        for id, origin, low, high in lineage:
            self._parts.setdefault((id, origin), []).append((low, high))
        self.ends = ends
        """The version of each origin where this session left it; a rewind changes nothing of it."""

    @property
    def origins(self) -> list[tuple[str, int]]:
        """The id and number of each session that this one was forked from, the nearest first."""
        return list(self._parts)

    def holds(self, row: Row) -> bool:
        """Whether a row of this session's is part of its history.

        What must not be repeated and was not undone stays a part of it when the history itself
        was left behind. A row of an earlier session of the same id counts: its retries come late.
        """
        if row["session_number"] != self._number:
            return True
        return _stands(row) or self.is_on_path(row)

    def is_on_path(self, row: Row) -> bool:
        """Whether a row of this session's was issued in the history that it has now."""
        return any(low <= row["issued_version"] <= high for low, high in self._own)

    def holds_of_origin(self, origin: tuple[str, int], row: Row) -> bool:
        """Whether a row of an origin came before this session was forked from it.

        What stands of a history that either has left behind counts as it does in one session.
        """
        version, parts = row["issued_version"], self._parts[origin]
        if row["session_number"] != origin[1] or version >= max(high for _, high in parts):
            return False
        return _stands(row) or any(low <= version < high for low, high in parts)


def _stands(row: Row) -> bool:
    """Whether a row is of an effect that must not be repeated, may have happened, and was not
    undone. One that was abandoned runs again, under the key that its receiver may know.
    """
    may_have_happened = row["status"] != "failed" or row["reason"] in {"abandoned", "given_up"}
    return bool(row["effect"] == "mutate" and may_have_happened and row["undone_by"] is None)


def counting(own: Sequence[Row], equal: Sequence[Row]) -> list[Row]:
    """Return the first row, and the one that came after it if that attempt failed."""
    found = [*own, *equal][:1]
    if found and found[0]["status"] == "failed":
        # In a fork it may have another key: that of the session where it was issued.
        later = (row for row in equal if row["number"] > found[0]["number"])
        found += sorted(later, key=lambda row: row["number"])[-1:]
    return found


def lineage_at(number: int, id: str, version: int) -> Op[str]:
    """Return the lineage of a fork made from a version: where the effects before it lie."""
    session = yield from one(LINEAGE, number=number)
    assert session is not None
    epochs = yield from rows(LIST_EPOCHS, number=number)
    ranges, below = path(epochs, session["origin_version"] or 0, version)
    own = [[id, number, low, high] for low, high in ranges]
    return json.dumps([*own, *_lineage(session, below)])


def read_past(number: int) -> Op[Past]:
    """Return what a session's history holds; all that it ever did, unless rewound or forked."""
    session = yield from one(LINEAGE, number=number)
    return Past(number, [], [], {}) if session is None else (yield from _past(number, session))


def _past(number: int, session: Row) -> Op[Past]:
    epochs = yield from rows(LIST_EPOCHS, number=number)
    ranges, below = path(epochs, session["origin_version"] or 0, session["version"])
    # An effect belongs to the version that was current when it was issued. What was issued at
    # the target of a rewind came after it.
    own = [ranges[0], *((low, high - 1) for low, high in ranges[1:])] if ranges else []
    ends: dict[int, int] = {}
    for _, origin, _, high in _lineage(session, None):
        ends[origin] = max(high, ends.get(origin, 0))
    return Past(number, own, _lineage(session, below), ends)


def inherited_past(number: int) -> Op[Past | None]:
    """Return what a fork's history holds; None for a session that was not forked."""
    session = yield from one(LINEAGE, number=number)
    if session is None or session["lineage"] is None:
        return None
    return (yield from _past(number, session))


def _lineage(session: Row, below: int | None) -> list[list[Any]]:
    """Return a session's lineage, cut where a rewind went below its fork point.

    Where it left each origin stays known, as a part without versions: what stands there counts.
    """
    lineage = json.loads(session["lineage"]) if session["lineage"] else []
    if below is None:
        return lineage
    cut = [[id, number, low, min(high, below)] for id, number, low, high in lineage if low < below]
    return cut + [[id, number, high, high] for id, number, _, high in lineage if high > below]
