"""The salts that identify effects: a store's own, and those that imported sessions brought.

A key that is kept outside the store is used instead of all of them; the store has its mark. A call
is only issued while the store has the salts and the key it was identified with: with another key
every effect would be new, and be done again.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from ..codec import Limits
from ..errors import InvalidArgument
from ..kernel.operation import Op, Query, Row, batch, one, rows
from ..sessions.access import Place
from .requests import EffectRequest, RequestIdentity
from .statements import EFFECT_BY_KEY, NEWEST_SALT, SALT_OF_SESSION

READ_SALTS = "SELECT number, kind, salt FROM hf_effect_salts ORDER BY number"
SALTS_NOW = f"SELECT {NEWEST_SALT} AS salts_number, {SALT_OF_SESSION} AS session_salt"
ANY_EFFECT = "SELECT number FROM hf_effects LIMIT 1"
# No other transaction may commit the first effect while a store adopts a key.
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
"""Makes the error from the mark that the store has and the one that it was to have."""


@dataclass(frozen=True, slots=True)
class StoreSalts:
    """What a store's table of salts holds."""

    salts: dict[int, str]
    """By number; the store's own comes first."""
    mark: str
    """The mark of the key that is used instead, or ''."""
    newest: int


class Salts:
    """The salts as one open store knows them; any thread may use them."""

    def __init__(self, key: bytes | None, limits: Limits) -> None:
        self.key = key
        self.mark = mark_of(key)
        self.limits = limits
        self._known = StoreSalts({}, "", 0)
        self._salts: list[bytes] = []
        self._is_old = True
        self._of_sessions: dict[int, int] = {}

    def learn(self) -> Op[bool]:
        """Read them once; False if the store has no effects yet and not this key either.

        Raises InvalidArgument if the store has effects that were identified with another key.
        """
        if not self._is_old:
            return True
        found = yield from self.look()
        if self._is_old:
            yield from _require_no_effects(found.mark, self.mark, _opened_otherwise)
        return not self._is_old

    def learn_to_write(self) -> Op[None]:
        """Read them once; a store without effects adopts this key."""
        if self._is_old:
            self._note((yield from adopt_key(self.mark, _opened_otherwise)))

    def look(self) -> Op[StoreSalts]:
        """Read them again: another process may have imported a session."""
        found = yield from read_salts()
        self._note(found)
        return found

    def _note(self, found: StoreSalts) -> None:
        self._is_old = found.mark != self.mark
        if not self._is_old:
            self._known = found
            self._salts = [bytes.fromhex(salt) for salt in found.salts.values()]

    def now(self, place: Place | None) -> Query:
        """Return the statement whose row `confirm` is given."""
        return Query(SALTS_NOW, {"place_number": None if place is None else place.number})

    def confirm(self, request: EffectRequest, now: Row) -> Op[bool]:
        """Whether a request was identified with what the store has now; if not, learn that."""
        believed = (request.identity.salts_number, request.identity.session_salt)
        if believed == (now["salts_number"], now["session_salt"]):
            return True
        yield from self.look()
        if request.place is not None:
            self._of_sessions.pop(request.place.number, None)
            if now["session_salt"]:
                self._of_sessions[request.place.number] = now["session_salt"]
        return False

    def all(self) -> list[bytes]:
        """Return every salt that a key or digest in this store may have been made with."""
        return [self.key] if self.key is not None else self._salts

    def of(self, request: EffectRequest) -> list[bytes]:
        """Return the salt that a request is identified with first, and then the others.

        What counts in the whole store uses the store's own, whichever session asks.
        """
        place, known = request.place, self.all()
        if place is None or len(known) == 1 or request.policy in {"global", "once"}:
            return known
        own = self._known.salts.get(self._of_sessions.get(place.number, 0))
        first = [] if own is None else [bytes.fromhex(own)]
        return first + [salt for salt in known if salt not in first]

    def identify(self, request: EffectRequest) -> Op[RequestIdentity]:
        """Return the identity of a request: under the salt that finds it already, or its own."""
        number = -1 if request.place is None else request.place.number
        believed = (self._known.newest, self._of_sessions.get(number, 0))
        known = [request.identify(salt, self.limits) for salt in self.of(request)]
        best, best_rank = known[0], tuple[bool, ...]()
        if len(known) > 1 and request.policy != "none":
            looks = (Query(EFFECT_BY_KEY, {"key": each.key, "limit": 1}) for each in known)
            for each, found in zip(known, (yield from batch(*looks)), strict=True):
                for row in found:
                    rank = (row["request_digest"] == each.digest, row["status"] != "failed")
                    if rank > best_rank:
                        best, best_rank = each, rank
        return replace(best, salts_number=believed[0], session_salt=believed[1])

    def is_of(self, row: Row, request: EffectRequest) -> bool:
        """Whether a row that was found is that of an equal request."""
        if row["request_digest"] == request.identity.digest:
            return True
        # The same session may have rows from before its import and from after it.
        found = (request.identify(salt, self.limits) for salt in self.of(request))
        return row["request_digest"] in (each.digest for each in found)


def mark_of(key: bytes | None) -> str:
    """Return what a store keeps to recognize a key; it tells nothing of the key."""
    if key is None:
        return ""
    return "key:" + hmac.digest(key, b"holdfast effects key 1", "sha256").hex()


def read_salts() -> Op[StoreSalts]:
    """Return what the store has."""
    found = yield from rows(READ_SALTS)
    salts = {row["number"]: row["salt"] for row in found if row["kind"] != "key"}
    mark = next((row["salt"] for row in found if row["kind"] == "key"), "")
    return StoreSalts(salts, mark, found[-1]["number"])


def adopt_key(mark: str, refusal: KeyMismatch) -> Op[StoreSalts]:
    """Return the salts of a store that is used with a key, adopted now if it has no effects."""
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


def _opened_otherwise(known: str, mark: str) -> InvalidArgument:
    has, wanted = "with another key", "with that one, redaction=holdfast.Redactor(key=…)"
    if not known:
        has, wanted = "without a key", "without one"
    elif not mark:
        has, wanted = "with a key", "with it, redaction=holdfast.Redactor(key=…)"
    return InvalidArgument(
        f"the effects of this store were identified {has}, so every call would be new and be done "
        f"again; nothing was written. Open the store {wanted}; only a store without effects can "
        "adopt another key"
    )
