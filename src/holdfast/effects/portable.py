"""Effects in export files, and the salts and ancestors that calls find them by."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from ..errors import InvalidArgument
from ..kernel.operation import Op, Row, one, rows
from ..kernel.portable import (
    ANY,
    Count,
    Export,
    Fence,
    Flag,
    Import,
    Name,
    Number,
    Portable,
    Positive,
    Record,
    Sealed,
    Seen,
    Small,
    Text,
    Time,
    Version,
    read_each,
)
from ..records import EffectKind, EffectReason, EffectStatus
from ..sessions.portable import EXISTING_NUMBER
from ..sessions.rows import ANCESTRY, SET_ANCESTRY
from .identity import ITEM, UNDO, scope_of
from .ledger import Ledger
from .rows import context
from .salts import parts, read_salts, take_on

SALTS_MAX = 64
VALUES = ("arguments", "result", "error", "note", "late")

Salt = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
KeyMark = Annotated[str, msgspec.Meta(pattern="^key:[0-9a-f]{64}$")]


class KnownByRecord(Record, frozen=True, tag="known by"):
    """What effects are known by: the store's salt, those that sessions brought to it, or a key."""

    salts: list[Salt]
    mark: KeyMark | None = None
    """The mark of the key that is used instead of salts, if there is one."""

    def problem(self, seen: Seen) -> str | None:
        """Check that there are not too many."""
        salts = seen.of(_Effects).salts
        salts.update(self.salts)
        return "it brings too many salts" if len(salts) > SALTS_MAX else None

    def add(self, into: Import) -> Op[None]:
        """Add the salts that the store does not have; its key must be the same."""
        into.of(_Arrived).mark = self.mark or ""
        for salt in self.salts:
            yield from rows(ADD_SALT, salt=salt)


class EffectRecord(Record, frozen=True, kw_only=True, tag="effect"):
    """One attempt of an effect: of the session of that number, which may be gone by now."""

    sealed = Sealed(lambda row, name: context(row["id"], name), **dict.fromkeys(VALUES, ANY))
    counted = "effects"

    session_number: Number | None
    session_id: Name | None
    id: Name
    scope: Text
    key: Text
    generation: Small
    call_id: Name | None = None
    item_id: Name | None = None
    issued_version: Small
    tool: Name
    effect: EffectKind
    is_irreversible: Flag
    request_digest: Text
    idempotency_key: Text
    status: EffectStatus
    reason: EffectReason | None
    attempt: Version
    holder: Text | None = None
    fence: Fence
    timeout_ms: Count = 0
    settle_ms: Count = 0
    ttl_ms: Count | None = None
    replay_of: Name | None = None
    undoes: Name | None = None
    undone_by: Name | None = None
    decided_by: Text | None = None
    issued_at: Time
    ended_at: Time | None
    expires_at: Time | None = None
    arguments: bytes | None = None
    result: bytes | None = None
    error: bytes | None = None
    note: bytes | None = None
    late: bytes | None = None

    def problem(self, seen: Seen) -> str | None:
        """Check that it is of one session, and note where it reaches beyond the file."""
        effects = seen.of(_Effects)
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
        return seen.of(_Effects).gone.setdefault(number, self.session_id)

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
        arrived, source = into.of(_Arrived), self.session_number
        yield from arrived.require_same_key(into)
        number, is_gone = None, False
        if source is not None:
            number = yield from arrived.number(into, source)
            is_gone = number < 0
            if source not in arrived.lie_at:
                here = yield from one(HERE, id=self.id)
                lies_at = None if here is None else here["session_number"]
                arrived.lie_at[source] = number if lies_at is None else int(lies_at)
            number = arrived.lie_at[source] if is_gone else number
        row = self.row(into.codec, session_number=number, is_gone=int(is_gone))
        into.later(ADD, row)


class AncestryRecord(Record, frozen=True, tag="ancestry"):
    """The salt of a session, and where the effects lie that a fork has from before the fork."""

    session_number: Positive
    salt: Salt
    lineage: list[tuple[Name, Number, Small, Small]] | None = None

    def problem(self, seen: Seen) -> str | None:
        """Check that the salt came before, and that only a fork has a lineage."""
        session = seen.sessions.get(self.session_number)
        if session is None:
            return f"session {self.session_number} has ancestors and does not exist"
        if self.salt not in seen.of(_Effects).salts:
            return f"session {session.id!r} has a salt that is not before it"
        is_fork = self.lineage is None or session.origin_version is not None
        if not is_fork or not all(low <= high for _, _, low, high in self.lineage or []):
            return f"session {session.id!r} has an origin that is not before it"
        return None

    def add(self, into: Import) -> Op[None]:
        """Let the session find its effects here; most need nothing."""
        arrived = into.of(_Arrived)
        if not arrived.own_salt:
            arrived.own_salt = parts((yield from read_salts()))[0][0]
        lineage = []
        for id, source, low, high in self.lineage or ():
            here = yield from arrived.number(into, source)
            lineage.append([id, arrived.lie_at.get(source, here), low, high])
        row = {
            "number": (yield from into.number(self.session_number)),
            "lineage": None if self.lineage is None else json.dumps(lineage),
            "salt": None if self.salt == arrived.own_salt else self.salt,
        }
        if row["lineage"] is not None or row["salt"] is not None:
            into.later(SET_ANCESTRY, row)


@dataclass(slots=True)
class _Effects:
    """What was seen of the effects of a file."""

    salts: set[str] = field(default_factory=set)
    gone: dict[int, str | None] = field(default_factory=dict)
    """The ids of sessions that are not in the file, by number."""
    named: set[str] = field(default_factory=set)
    """Effects that others say they undo, or were undone by."""
    owners: dict[tuple[str, str], str] = field(default_factory=dict)
    """The sessions and items that effects are of, each with one of its effects."""


@dataclass(slots=True)
class _Arrived:
    """What is known while effects are written."""

    mark: str = ""
    own_salt: str = ""
    lie_at: dict[int, int] = field(default_factory=dict)
    """Where the effects of a session lie; forks look there, and they may have been here before."""
    _gone: dict[int, int] = field(default_factory=dict)
    _least: int = 0
    _is_same_key: bool = False

    def require_same_key(self, into: Import) -> Op[None]:
        """Refuse effects that nobody would know again in this store."""
        if not self._is_same_key:
            own = Ledger.of(into.runtime).salts.mark
            if own not in {"", self.mark}:
                raise _known_otherwise(own, self.mark)
            yield from take_on(self.mark, _known_otherwise)
            self._is_same_key = True

    def number(self, into: Import, source: int) -> Op[int]:
        """Return the number here of a session there; one that is gone gets a negative one."""
        if source not in self._gone and source not in into.sessions:
            yield from into.flush()
            if source not in into.sessions:
                row = yield from one(LEAST)
                assert row is not None
                self._least = self._gone[source] = min(self._least, row["least"]) - 1
        return self._gone.get(source) or into.sessions[source]


EFFECTS = f"""
SELECT number, {EffectRecord.selected()} FROM hf_effects
WHERE session_number = :session_number AND number > :number ORDER BY number LIMIT :limit
"""  # noqa: S608
UNLINKED = """
SELECT DISTINCT session_number FROM hf_effects
WHERE session_id = :session_id AND unlinked_at IS NOT NULL AND session_number > :session_number
ORDER BY session_number LIMIT :limit
"""
ADD_SALT = """
UPDATE hf_meta SET value = value || ' ' || CAST(:salt AS TEXT)
WHERE name = 'effects_salt' AND replace(value, CAST(:salt AS TEXT), '') = value
"""
HERE = "SELECT session_number FROM hf_effects WHERE id = :id"
LEAST = "SELECT coalesce(min(session_number), 0) AS least FROM hf_effects"
# A key goes on counting behind what it has here.
NEXT_GENERATION = """(
    SELECT CASE WHEN max(generation) >= CAST(:generation AS INTEGER)
        THEN max(generation) + 1 ELSE CAST(:generation AS INTEGER) END
    FROM hf_effects WHERE key = :key AND generation > 0 AND CAST(:generation AS INTEGER) > 0
)"""
# Whoever ran it is not here: its lease has expired.
EXPIRED = "CASE WHEN CAST(:status AS TEXT) = 'issued' THEN :now END"
IF_GONE = "CASE WHEN :is_gone = 1 THEN :now END"
SPECIAL = {
    "generation": NEXT_GENERATION, "lease_expires_at": EXPIRED, "unlinked_at": IF_GONE,
}  # fmt: skip
ADD = f"""
INSERT INTO hf_effects {EffectRecord.inserted(**SPECIAL)}
ON CONFLICT DO NOTHING
"""


class EffectsPortable(Portable):
    """Effects travel with their sessions; those of deleted ones, where a session looks back."""

    records = (KnownByRecord, EffectRecord, AncestryRecord)

    def export(self, out: Export) -> Op[None]:
        """Write what effects are known by, the effects, and where sessions look for them."""
        salts, mark = parts((yield from read_salts()))
        out.write(KnownByRecord(salts, mark or None))
        sessions = [{"number": number} for number in out.sessions]
        origins: set[int] = set()
        yield from read_each(ANCESTRY, sessions, lambda row: origins.update(_origins(row)))
        gone = yield from _gone(out, origins)
        owners = ({"session_number": number} for number in [*sorted(gone), *out.sessions])
        yield from read_each(EFFECTS, owners, EffectRecord.to(out))

        def write(row: Row) -> None:
            lineage = None if row["lineage"] is None else [tuple(each) for each in _lineage(row)]
            out.write(AncestryRecord(row["number"], row["salt"] or salts[0], lineage))

        yield from read_each(ANCESTRY, sessions, write)

    def problem_at_end(self, seen: Seen) -> str | None:
        """Check that effects which are named exist, and note whose are not in the file."""
        effects = seen.of(_Effects)
        if missing := effects.named - seen.ids.get("effect", set()):
            return f"effect {min(missing)!r} is named and does not exist"
        for owner, what in effects.owners.items():
            if not seen.has(*owner):
                seen.counts_beyond(what)
        return None


def _lineage(row: Row) -> list[Any]:
    found: list[Any] = json.loads(row["lineage"] or "[]")
    return found


def _origins(row: Row) -> set[int]:
    return {number for _, number, _, _ in _lineage(row)}


def _gone(out: Export, origins: set[int]) -> Op[set[int]]:
    """Return the numbers of deleted sessions whose effects those to be written look back to.

    A fork does, and so does a late retry through a new session of the same id.
    """
    gone = set(origins)
    numbers = ({"number": number} for number in origins)
    yield from read_each(EXISTING_NUMBER, numbers, lambda row: gone.discard(row["number"]))
    ids = ({"session_id": id, "session_number": -(2**62)} for id in out.sessions.values())
    by = "session_number"
    yield from read_each(UNLINKED, ids, lambda row: gone.add(row[by]), [by])
    return gone - out.sessions.keys()


def _known_otherwise(here: str, there: str) -> InvalidArgument:
    """Return the error for effects that nobody would know again in this store."""
    has = "without a key" if not there else "with another key" if here else "with a key"
    wanted = "the same redaction=holdfast.Redactor(key=…)" if there else "no key"
    return InvalidArgument(
        f"the effects in this file are known {has}, those of this store are not, so that its calls "
        "would be new here and be done again; nothing was imported. Import it into another store, "
        f"opened with {wanted}"
    )
