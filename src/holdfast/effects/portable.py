"""Effects in export files, and the salts and ancestors that calls find them by."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import Annotated

import msgspec

from ..errors import InvalidArgument
from ..kernel import portable
from ..kernel.operation import Op, Row, one, rows
from ..kernel.portable import Export, Import, Portable, Record, Sealed, Seen, read_each
from ..records import EffectKind, EffectReason, EffectStatus
from ..sessions.portable import FIND_SESSION_NUMBER
from .history import ADD_ORIGIN, origin_of, origin_row
from .ledger import Ledger
from .requests import ITEM, UNDO, scope_of
from .salts import adopt_key, read_salts
from .statements import context

SALTS_MAX = 64
SEALED_COLUMNS = dict.fromkeys(("arguments", "result", "error", "note", "late"), portable.ANY)

Salt = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
OriginField = tuple[portable.Name, portable.Number, portable.Small, portable.Small]
KeyMark = Annotated[str, msgspec.Meta(pattern="^key:[0-9a-f]{64}$")]


class KnownByRecord(Record, frozen=True, tag="known by"):
    """What identifies effects: the store's salt, those that sessions brought to it, or a key."""

    salts: list[Salt]
    mark: KeyMark | None = None
    """The mark of the key that is used instead of salts, if there is one."""

    def problem(self, seen: Seen) -> str | None:
        """Check that there are not too many."""
        salts = seen.of(_SeenEffects).salts
        salts.update(self.salts)
        return "it brings too many salts" if len(salts) > SALTS_MAX else None

    def add(self, into: Import) -> Op[None]:
        """Add the salts that the store does not have; its key must be the same."""
        into.of(_ArrivedEffects).mark = self.mark or ""
        for salt in self.salts:
            yield from rows(ADD_SALT, salt=salt)


class EffectRecord(Record, frozen=True, kw_only=True, tag="effect"):
    """One attempt of an effect: of the session of that number, which may be gone by now."""

    sealed = Sealed(lambda row, name: context(row["id"], name), **SEALED_COLUMNS)
    counted = "effects"

    session_number: portable.Number | None
    session_id: portable.Name | None
    id: portable.Name
    scope: portable.Text
    key: portable.Text
    generation: portable.Small
    call_id: portable.Name | None = None
    item_id: portable.Name | None = None
    issued_version: portable.Small
    tool: portable.Name
    effect: EffectKind
    is_irreversible: portable.Flag
    request_digest: portable.Text
    idempotency_key: portable.Text
    status: EffectStatus
    reason: EffectReason | None
    attempt: portable.Version
    holder: portable.Text | None = None
    fence: portable.Fence
    timeout_ms: portable.Count = 0
    settle_ms: portable.Count = 0
    ttl_ms: portable.Count | None = None
    replay_of: portable.Name | None = None
    undoes: portable.Name | None = None
    undone_by: portable.Name | None = None
    decided_by: portable.Text | None = None
    issued_at: portable.Time
    ended_at: portable.Time | None
    expires_at: portable.Time | None = None
    arguments: bytes | None = None
    result: bytes | None = None
    error: bytes | None = None
    note: bytes | None = None
    late: bytes | None = None

    def problem(self, seen: Seen) -> str | None:
        """Check that it is of one session, and note where it reaches beyond the file."""
        effects = seen.of(_SeenEffects)
        if not seen.is_new(self):
            return f"effect {self.id!r} comes twice"
        if (self.status == "issued") != (self.ended_at is None):
            return f"effect {self.id!r} has the wrong end"
        if self._owner_id(seen) != self.session_id:
            return f"effect {self.id!r} is of two sessions"
        is_undo = self.undoes is not None
        if is_undo != (self.replay_of is None and self.key.startswith(UNDO)) or (
            is_undo and self.key != f"{UNDO}{self.undoes}"
        ):
            return f"effect {self.id!r} undoes another than it says"
        if self.generation == 0 and self.replay_of is None:
            return f"effect {self.id!r} is of no generation"
        effects.named |= {id for id in (self.undoes, self.undone_by) if id is not None}
        what = f"effect {self.id!r} with the key {self.key!r}"
        if self.session_id is not None:
            effects.owners.setdefault(("session", self.session_id), what)
        if self.scope.startswith(ITEM):
            effects.owners.setdefault(("item", self.scope.removeprefix(ITEM)), what)
        if not self._is_own():
            seen.counts_beyond(what)
        return None

    def _owner_id(self, seen: Seen) -> str | None:
        number = self.session_number
        if number is None:
            return None
        if number in seen.sessions:
            return seen.sessions[number].id
        return seen.of(_SeenEffects).gone.setdefault(number, self.session_id)

    def _is_own(self) -> bool:
        """Whether it counts in its own session or item, and nowhere else."""
        is_of_item = self.scope.startswith(ITEM)
        if not is_of_item and self.scope != scope_of(str(self.session_id)):
            return False
        within = self.key.removeprefix(f"{self.scope}:")
        is_within = within != self.key and (":" not in within or is_of_item)
        # A replay of generation 0 has the key of the attempt that it names, and is not found by it.
        return self.generation == 0 or is_within or self.key.startswith(UNDO)

    def add(self, into: Import) -> Op[None]:
        """Add the effect, unless it is here still: then it stays as it is."""
        arrived, source = into.of(_ArrivedEffects), self.session_number
        yield from arrived.require_same_key(into)
        number, is_gone = None, False
        if source is not None:
            number = yield from arrived.number(into, source)
            is_gone = number < 0
            if source not in arrived.lie_at:
                here = yield from one(SESSION_OF_EFFECT, id=self.id)
                lies_at = None if here is None else here["session_number"]
                arrived.lie_at[source] = number if lies_at is None else int(lies_at)
            number = arrived.lie_at[source] if is_gone else number
        row = self.row(into.codec, session_number=number, is_gone=int(is_gone))
        into.later(ADD_EFFECT, row)


class AncestryRecord(Record, frozen=True, tag="ancestry"):
    """The salt of a session, and where the effects lie that a fork has from before the fork."""

    session_number: portable.Positive
    salt: Salt
    lineage: list[OriginField] | None = None

    def problem(self, seen: Seen) -> str | None:
        """Check that the salt came before, and that only a fork has a lineage."""
        session = seen.sessions.get(self.session_number)
        if session is None:
            return f"session {self.session_number} has ancestors and does not exist"
        if self.salt not in seen.of(_SeenEffects).salts:
            return f"session {session.id!r} has a salt that is not before it"
        is_fork = self.lineage is None or session.origin_version is not None
        if not is_fork or not all(low <= high for _, _, low, high in self.lineage or []):
            return f"session {session.id!r} has an origin that is not before it"
        return None

    def add(self, into: Import) -> Op[None]:
        """Let the session find its effects here; most need nothing."""
        arrived = into.of(_ArrivedEffects)
        number = yield from into.number(self.session_number)
        for position, (id, source, low, high) in enumerate(self.lineage or (), 1):
            here = yield from arrived.number(into, source)
            origin = (id, arrived.lie_at.get(source, here), low, high)
            into.later(ADD_ORIGIN, origin_row(number, position, origin))
        into.later(SET_SESSION_SALT, {"number": number, "salt": self.salt})


@dataclass(slots=True)
class _SeenEffects:
    """What was seen of the effects of a file."""

    salts: set[str] = field(default_factory=set)
    gone: dict[int, str | None] = field(default_factory=dict)
    """The ids of sessions that are not in the file, by number."""
    named: set[str] = field(default_factory=set)
    """Effects that others say they undo, or were undone by."""
    owners: dict[tuple[str, str], str] = field(default_factory=dict)
    """The sessions and items that effects are of, each with one of its effects."""


@dataclass(slots=True)
class _ArrivedEffects:
    """What an import remembers of effects while it writes."""

    mark: str = ""
    lie_at: dict[int, int] = field(default_factory=dict)
    """Where the effects of a session lie; forks look there, and they may have been here before."""
    _gone: dict[int, int] = field(default_factory=dict)
    _least: int = 0
    _is_same_key: bool = False

    def require_same_key(self, into: Import) -> Op[None]:
        """Refuse effects that this store could not recognize."""
        if not self._is_same_key:
            own = Ledger.of(into.runtime).salts.mark
            if own not in {"", self.mark}:
                raise _known_otherwise(own, self.mark)
            yield from adopt_key(self.mark, _known_otherwise)
            self._is_same_key = True

    def number(self, into: Import, source: int) -> Op[int]:
        """Return the number here of a session there; one that is gone gets a negative one."""
        if source not in self._gone and source not in into.sessions:
            yield from into.flush()
            if source not in into.sessions:
                row = yield from one(LEAST_SESSION_NUMBER)
                assert row is not None
                self._least = self._gone[source] = min(self._least, row["least"]) - 1
        return self._gone.get(source) or into.sessions[source]


EFFECTS_OF_SESSION = f"""
SELECT number, {EffectRecord.selected()} FROM hf_effects
WHERE session_number = :session_number AND number > :number ORDER BY number LIMIT :limit
"""  # noqa: S608
UNLINKED_SESSIONS = """
SELECT DISTINCT session_number FROM hf_effects
WHERE session_id = :session_id AND unlinked_at IS NOT NULL AND session_number > :session_number
ORDER BY session_number LIMIT :limit
"""
ORIGINS_OF_SESSION = """
SELECT session_number, position, origin_id, origin_number, first_version, last_version
FROM hf_effect_origins
WHERE session_number = :session_number AND position > :position ORDER BY position LIMIT :limit
"""
SESSION_SALTS = """
SELECT session_number AS number, salt
FROM hf_effect_sessions JOIN hf_effect_salts ON hf_effect_salts.number = salt_number
WHERE session_number = :session_number AND session_number > :number LIMIT :limit
"""
ADD_SALT = """
INSERT INTO hf_effect_salts (kind, salt) VALUES ('imported', :salt) ON CONFLICT (salt) DO NOTHING
"""
# A session that has this store's own salt needs none of its own.
SET_SESSION_SALT = """
INSERT INTO hf_effect_sessions (session_number, salt_number)
SELECT CAST(:number AS INTEGER), number FROM hf_effect_salts
WHERE salt = :salt AND kind = 'imported'
"""
SESSION_OF_EFFECT = "SELECT session_number FROM hf_effects WHERE id = :id"
LEAST_SESSION_NUMBER = "SELECT coalesce(min(session_number), 0) AS least FROM hf_effects"
# A key goes on counting behind what it has here.
NEXT_GENERATION = """(
    SELECT CASE WHEN max(generation) >= CAST(:generation AS INTEGER)
        THEN max(generation) + 1 ELSE CAST(:generation AS INTEGER) END
    FROM hf_effects WHERE key = :key AND generation > 0 AND CAST(:generation AS INTEGER) > 0
)"""
# Its owner is in another store: its lease has expired.
EXPIRED_LEASE = "CASE WHEN CAST(:status AS TEXT) = 'issued' THEN :now END"
UNLINKED_AT = "CASE WHEN :is_gone = 1 THEN :now END"
COMPUTED_COLUMNS = {
    "generation": NEXT_GENERATION, "lease_expires_at": EXPIRED_LEASE, "unlinked_at": UNLINKED_AT,
}  # fmt: skip
ADD_EFFECT = f"""
INSERT INTO hf_effects {EffectRecord.inserted(**COMPUTED_COLUMNS)}
ON CONFLICT DO NOTHING
"""


class EffectsPortable(Portable):
    """Effects travel with their sessions; those of deleted ones, where a session looks back."""

    records = (KnownByRecord, EffectRecord, AncestryRecord)

    def export(self, out: Export) -> Op[None]:
        """Write what identifies effects, the effects, and where sessions look for them."""
        known = yield from read_salts()
        salts = list(known.salts.values())
        out.write(KnownByRecord(salts, known.mark or None))
        sessions = [{"session_number": number} for number in out.sessions]
        origins: dict[int, list[Row]] = {}
        salt_of: dict[int, str] = {}

        def add_origin(row: Row) -> None:
            origins.setdefault(row["session_number"], []).append(row)

        yield from read_each(ORIGINS_OF_SESSION, sessions, add_origin, ["position"])
        yield from read_each(
            SESSION_SALTS, sessions, lambda row: salt_of.setdefault(row["number"], row["salt"])
        )
        gone = yield from _gone(out, {row["origin_number"] for row in chain(*origins.values())})
        owners = ({"session_number": number} for number in [*sorted(gone), *out.sessions])
        yield from read_each(EFFECTS_OF_SESSION, owners, EffectRecord.to(out))
        for number in out.sessions:
            lineage = [origin_of(row) for row in origins.get(number, ())] or None
            out.write(AncestryRecord(number, salt_of.get(number, salts[0]), lineage))

    def problem_at_end(self, seen: Seen) -> str | None:
        """Check that effects which are named exist, and note whose are not in the file."""
        effects = seen.of(_SeenEffects)
        if missing := effects.named - seen.ids.get("effect", set()):
            return f"effect {min(missing)!r} is named and does not exist"
        for owner, what in effects.owners.items():
            if not seen.has(*owner):
                seen.counts_beyond(what)
        return None


def _gone(out: Export, origins: set[int]) -> Op[set[int]]:
    """Return the numbers of deleted sessions whose effects those to be written look back to.

    A fork does, and so does a late retry through a new session of the same id.
    """
    gone = set(origins)
    numbers = ({"number": number} for number in origins)
    yield from read_each(FIND_SESSION_NUMBER, numbers, lambda row: gone.discard(row["number"]))
    ids = ({"session_id": id, "session_number": -(2**62)} for id in out.sessions.values())
    by = "session_number"
    yield from read_each(UNLINKED_SESSIONS, ids, lambda row: gone.add(row[by]), [by])
    return gone - out.sessions.keys()


def _known_otherwise(here: str, there: str) -> InvalidArgument:
    has = "without a key" if not there else "with another key" if here else "with a key"
    wanted = "the same redaction=holdfast.Redactor(key=…)" if there else "no key"
    return InvalidArgument(
        f"the effects in this file were identified {has}, those of this store were not, so its "
        "calls would be new here and be done again; nothing was imported. Import it into another "
        f"store, opened with {wanted}"
    )
