"""The salts by which effects are known: a store's own, and those that moved sessions brought."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..checkpoints.writing import Place
from ..codec import Limits
from ..kernel.operation import Op, Query, Row, batch, one
from .identity import identify
from .rows import BY_KEY, Belief, Identity, Request, Wanted

SALTS = Query("SELECT value FROM hf_meta WHERE name = 'effects_salt'", {})
SALT_OF = "SELECT salt FROM hf_sessions WHERE number = :number"


@dataclass(slots=True)
class Salts:
    """The salts of one open store; any thread may use them."""

    key: bytes | None = None
    """A key that is kept outside the store and used instead of every salt."""
    _known: str = ""
    _of_sessions: dict[int, str] = field(default_factory=dict)
    """The salts of sessions that came from other stores, by number."""

    def learn(self) -> Op[None]:
        """Read them, the first time."""
        if not self._known:
            yield from self.look()

    def look(self) -> Op[None]:
        """Read them again: another process may have imported a session."""
        found = yield from one(SALTS.sql)
        assert found is not None
        self._known = found["value"]

    def believed(self, place: Place | None) -> Belief:
        """Return what is known of a place now, which may be old."""
        own = "" if place is None else self._of_sessions.get(place.number, "")
        return Belief(self._known, own)

    def is_true(self, belief: Belief, place: Place | None, salts: Row, session: Row | None) -> bool:
        """Whether a belief is so in the store; if not, it is known better from now on."""
        own = "" if session is None else session["salt"] or ""
        if belief == Belief(salts["value"], own):
            return True
        self._known = salts["value"]
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
        own, *others = belief.salts.split()
        is_wide = request.policy in {"global", "once"} or request.item_id is not None
        if belief.session_salt and not is_wide:
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
