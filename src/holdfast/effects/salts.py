"""The salts by which effects are known: a store's own, and those that moved sessions brought.

Among them stands the mark of the key that is used instead of all of them, if there is one. A call
is only issued while the store has what it was identified by, key included: with another key every
effect would be new, and be done again.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from ..codec import Limits
from ..errors import InvalidArgument
from ..kernel.operation import Op, Query, Row, batch, one
from ..sessions.access import Place
from ..sessions.rows import BY_NUMBER
from .identity import identify
from .rows import BY_KEY, Belief, Identity, Request, Wanted

SALTS = Query("SELECT value FROM hf_meta WHERE name = 'effects_salt'", {})
LOOK = f"SELECT s.number, s.epoch, s.origin_number, s.salt FROM {BY_NUMBER}"  # noqa: S608
ANY_EFFECT = "SELECT number FROM hf_effects LIMIT 1"
# Nobody else may be about to commit the first effect while a store takes on a key.
NO_EFFECTS_MEANWHILE = "/*pg LOCK TABLE hf_effects IN SHARE ROW EXCLUSIVE MODE */"
TAKE_ON = """
UPDATE hf_meta SET value = :after
WHERE name = 'effects_salt' AND value = :before AND NOT EXISTS (SELECT 1 FROM hf_effects)
"""
MARK = "key:"

Refusal: TypeAlias = Callable[[str, str], InvalidArgument]
"""Makes the error from the mark that the store has and the one that it was to have."""


@dataclass(slots=True)
class Salts:
    """The salts of one open store; any thread may use them."""

    key: bytes | None = None
    """A key that is kept outside the store and used instead of every salt."""
    mark: str = field(init=False)
    _known: str = ""
    """What the store has, if that is for this key."""
    _is_old: bool = True
    _of_sessions: dict[int, str] = field(default_factory=dict)
    """The salts of sessions that came from other stores, by number."""

    def __post_init__(self) -> None:
        self.mark = mark_of(self.key)

    def learn(self) -> Op[bool]:
        """Read them, the first time; False: no effect is here yet, and none of this key's.

        Raises InvalidArgument if the effects that are here are known by another key.
        """
        if not self._is_old:
            return True
        found = yield from self.look()
        if not self._is_old:
            return True
        yield from require_no_effects(parts(found)[1], self.mark, _opened_otherwise)
        return False

    def learn_to_write(self) -> Op[None]:
        """Do so; a store without effects takes this key on."""
        if self._is_old:
            self._note((yield from take_on(self.mark, _opened_otherwise)))

    def look(self) -> Op[str]:
        """Read them again: another process may have imported a session."""
        found = yield from read_salts()
        self._note(found)
        return found

    def _note(self, found: str) -> None:
        is_ours = parts(found)[1] == self.mark
        if is_ours:
            self._known = found
        self._is_old = not is_ours

    def believed(self, place: Place | None) -> Belief:
        """Return what is known of a place now, which may be old."""
        own = "" if place is None else self._of_sessions.get(place.number, "")
        return Belief(self._known, own)

    def is_true(self, belief: Belief, place: Place | None, salts: Row, session: Row | None) -> bool:
        """Whether a belief is so in the store; if not, it is known better from now on."""
        own = "" if session is None else session["salt"] or ""
        if belief == Belief(salts["value"], own):
            return True
        self._note(salts["value"])
        if place is not None:
            self._of_sessions.pop(place.number, None)
            if own:
                self._of_sessions[place.number] = own
        return False

    def all(self) -> list[bytes]:
        """Return every salt that a key or digest in this store may have been made with."""
        return self._bytes(self._known.split())

    def of(self, belief: Belief, request: Request) -> list[bytes]:
        """Return the salt that a request is known by, and then the others.

        What counts in a whole store is known by the store's, whichever session asks.
        """
        if self.key is not None:
            return [self.key]
        own, *others = belief.salts.split()
        if belief.session_salt and request.policy not in {"global", "once"}:
            others = [own, *(salt for salt in others if salt != belief.session_salt)]
            own = belief.session_salt
        return self._bytes([own, *others])

    def identify(
        self, limits: Limits, place: Place | None, request: Request, belief: Belief
    ) -> Op[Identity]:
        """Return what a request is known by: with the salt that finds it already, or its own."""
        known = [identify(salt, limits, place, request) for salt in self.of(belief, request)]
        best, best_rank = known[0], tuple[bool, ...]()
        if len(known) == 1 or request.policy == "none":
            return best
        looks = (Query(BY_KEY, {"key": each.key, "limit": 1}) for each in known)
        for each, found in zip(known, (yield from batch(*looks)), strict=True):
            for row in found:
                rank = (row["request_digest"] == each.digest, row["status"] != "failed")
                if rank > best_rank:
                    best, best_rank = each, rank
        return best

    def is_of(self, limits: Limits, row: Row, wanted: Wanted) -> bool:
        """Whether a row that was found was asked for with an equal request."""
        if row["request_digest"] == wanted.identity.digest:
            return True
        # The same session may have rows from before it came and from after it.
        salts = self.of(wanted.belief, wanted.request)
        found = (identify(salt, limits, wanted.place, wanted.request) for salt in salts)
        return row["request_digest"] in (each.digest for each in found)

    def _bytes(self, salts: list[str]) -> list[bytes]:
        if self.key is not None:
            return [self.key]
        return [bytes.fromhex(salt) for salt in salts]


def mark_of(key: bytes | None) -> str:
    """Return what a store keeps of a key, to know it again; it tells nothing of the key."""
    if key is None:
        return ""
    return MARK + hmac.digest(key, b"holdfast effects key 1", "sha256").hex()


def parts(value: str) -> tuple[list[str], str]:
    """Return the salts that a store has, and the mark of the key that it has."""
    salts = [part for part in value.split() if not part.startswith(MARK)]
    return salts, next((part for part in value.split() if part.startswith(MARK)), "")


def read_salts() -> Op[str]:
    """Return what the store has."""
    found = yield from one(SALTS.sql)
    assert found is not None
    return str(found["value"])


def take_on(mark: str, refusal: Refusal) -> Op[str]:
    """Return what a store has that is used with a key, from now on if it has no effects yet."""
    while True:
        found = yield from read_salts()
        salts, known = parts(found)
        if known == mark:
            return found
        yield from require_no_effects(known, mark, refusal)
        yield Query(NO_EFFECTS_MEANWHILE, {})
        after = " ".join([*salts, mark]).rstrip()
        yield Query(TAKE_ON, {"before": found, "after": after})


def require_no_effects(known: str, mark: str, refusal: Refusal) -> Op[None]:
    """Refuse to go on with another key where there are effects already."""
    if (yield from one(ANY_EFFECT)) is not None:
        raise refusal(known, mark)


def _opened_otherwise(known: str, mark: str) -> InvalidArgument:
    has, wanted = "with another key", "with that one, redaction=holdfast.Redactor(key=…)"
    if not known:
        has, wanted = "without a key", "without one"
    elif not mark:
        has, wanted = "with a key", "with it, redaction=holdfast.Redactor(key=…)"
    return InvalidArgument(
        f"the effects of this store are known {has}, so that every call would be new and be done "
        f"again; nothing was written. Open the store {wanted}; only one that has no effects can be "
        "given another key"
    )
