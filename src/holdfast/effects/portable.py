"""Effects in export files, with the salts and origins that calls need to find them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import field
from itertools import chain
from typing import Annotated

import msgspec

from ..dataclass import dataclass
from ..errors import InvalidArgument
from ..kernel import portable
from ..kernel.inserts import Insert
from ..kernel.kept import Kept, KeptSet, kept, kept_set
from ..kernel.operation import Op, Row, one, rows
from ..kernel.owned_rows import ROWS_PER_PAGE, OwnedRows, read_each
from ..kernel.portable import Export, Import, Portable, Record, Sealed, Seen
from ..records import EffectKind, EffectReason, EffectStatus
from ..sessions.portable import SESSION_NUMBERS, SESSIONS_BY_ID, read_roots
from ..sessions.rows import ROOT_ABOVE
from .history import Origin, origin_of
from .ledger import Ledger
from .requests import ITEM, ONCE, UNDO, adopt_key, read_salts, scope_of
from .statements import BY_WORLD, context

SALTS_MAX = 64
SEALED_COLUMNS = dict.fromkeys(("arguments", "result", "error", "note", "late"), portable.ANY)

Salt = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
OriginField = tuple[portable.Name, portable.Number, portable.Small, portable.Small]
KeyMark = Annotated[str, msgspec.Meta(pattern="^key:[0-9a-f]{64}$")]


class SaltsRecord(Record, frozen=True, tag="effect salts"):
    """The salts that effects are identified with: the store's own, and those of imported sessions.

    `mark` is the mark of the key that is used instead of salts, if there is one.
    """

    salts: list[Salt]
    mark: KeyMark | None = None

    def problem(self, seen: Seen) -> str | None:
        """Check the number of salts."""
        salts = seen.whole.of(_SeenEffects).salts
        salts.update(self.salts)
        return "it has too many salts" if len(salts) > SALTS_MAX else None

    def add(self, into: Import) -> Op[None]:
        """Add the salts that the store does not have yet."""
        into.of(_ImportedEffects).mark = self.mark or ""
        for salt in self.salts:
            yield from rows(ADD_SALT, salt=salt)


class EffectRecord(Record, frozen=True, kw_only=True, tag="effect"):
    """One attempt of an effect. The session of that number may be deleted."""

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
    approval: portable.Text | None = None
    issued_version: portable.Small
    tool: portable.Name
    effect: EffectKind
    is_irreversible: portable.Flag
    is_outside: portable.Flag = 0
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
        """Check it, and note whether it counts outside the sessions in the file."""
        effects = seen.of(_SeenEffects)
        if not seen.is_new(self):
            return f"effect {self.id!r} comes twice"
        if (self.status == "issued") != (self.ended_at is None):
            return f"effect {self.id!r} has an end that does not fit its status"
        if self._owner_id(seen) != self.session_id:
            return f"effect {self.id!r} belongs to two sessions"
        is_undo = self.undoes is not None
        if is_undo != (self.replay_of is None and self.key.startswith(UNDO)) or (
            is_undo and self.key != f"{UNDO}{self.undoes}"
        ):
            return f"effect {self.id!r} does not undo the effect that its key names"
        if self.generation == 0 and self.replay_of is None:
            return f"effect {self.id!r} has no generation"
        for other in (self.undoes, self.undone_by):
            if other is not None and other != BY_WORLD:
                effects.named.add(other)
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
        """Whether it counts only in its own session or item."""
        is_of_item = self.scope.startswith(ITEM)
        if not is_of_item and self.scope != scope_of(str(self.session_id)):
            return False
        within = self.key.removeprefix(f"{self.scope}:")
        is_within = within != self.key and (":" not in within or is_of_item)
        # A replay of generation 0 has the key of its original, but is not found by that key.
        return self.generation == 0 or is_within or self.key.startswith(UNDO)

    def add(self, into: Import) -> Op[None]:
        """Add the effect, unless the store has it already."""
        imported, source = into.of(_ImportedEffects), self.session_number
        yield from imported.require_same_key(into)
        number, is_gone = None, False
        if source is not None:
            number = yield from imported.number(into, source)
            is_gone = number < 0
            if source not in imported.lie_at:
                here = yield from one(SESSION_OF_EFFECT, id=self.id)
                lies_at = None if here is None else here["session_number"]
                imported.lie_at[source] = number if lies_at is None else int(lies_at)
            number = imported.lie_at[source] if is_gone else number
        row = self.row(into.codec, session_number=number, is_gone=int(is_gone))
        into.later(ADD_EFFECT, row)


class AncestryRecord(Record, frozen=True, tag="ancestry"):
    """The salt of a session and, for a fork, where its effects from before the fork are stored."""

    session_number: portable.Positive
    salt: Salt
    lineage: list[OriginField] | None = None

    def problem(self, seen: Seen) -> str | None:
        """Check that it comes once, its salt is known, and only a fork has a lineage."""
        session, known = seen.sessions.get(self.session_number), seen.of(_SeenEffects).ancestries
        if session is None:
            return f"session {self.session_number} has origins but is not in the file"
        if self.session_number in known:
            return f"the origins of session {session.id!r} come twice"
        known.add(self.session_number)
        if self.salt not in seen.whole.of(_SeenEffects).salts:
            return f"session {session.id!r} has a salt that does not precede it"
        is_fork = self.lineage is None or session.origin_version is not None
        if not is_fork or not all(low <= high for _, _, low, high in self.lineage or []):
            return f"session {session.id!r} has an origin that does not precede it"
        return None

    def add(self, into: Import) -> Op[None]:
        """Add the session's origins, and its salt unless that is this store's own."""
        imported = into.of(_ImportedEffects)
        number = yield from into.number(self.session_number)
        for position, (id, source, low, high) in enumerate(self.lineage or (), 1):
            here = yield from imported.number(into, source)
            lies_at = imported.lie_at.get(source, here)
            row = (number, position, id, lies_at, low, high)
            into.insert(ADD_ORIGIN, dict(zip(ADD_ORIGIN.columns, row, strict=True)))
        # A session with this store's own salt needs no row.
        salt_number = yield from imported.salt_number(self.salt)
        if salt_number is not None:
            into.insert(ADD_SESSION_SALT, {"session_number": number, "salt_number": salt_number})


@dataclass(slots=True)
class _SeenEffects:
    """The effects of a file read so far."""

    salts: set[str] = field(default_factory=set)
    gone: Kept[int, str | None] = kept(str | None)
    """The ids of sessions that are not in the file, by number."""
    named: KeptSet[str] = kept_set()
    """Effects that others undo, or were undone by."""
    owners: Kept[tuple[str, str], str] = kept(str)
    """The sessions and items that effects belong to, each with one of its effects."""
    ancestries: KeptSet[int] = kept_set()
    """The numbers of sessions whose origins have come."""


@dataclass(slots=True)
class _ImportedEffects:
    """What an import remembers about effects while it writes."""

    mark: str = ""
    lie_at: Kept[int, int] = kept(int)
    """The session number under which a source session's effects are stored here, for its forks."""
    _gone: Kept[int, int] = kept(int)
    _least: int = 0
    _is_same_key: bool = False
    _salts: dict[str, int | None] = field(default_factory=dict)

    def salt_number(self, salt: str) -> Op[int | None]:
        """Return the number of an imported salt; None for the store's own."""
        if salt not in self._salts:
            row = yield from one(IMPORTED_SALT, salt=salt)
            self._salts[salt] = None if row is None else int(row["number"])
        return self._salts[salt]

    def require_same_key(self, into: Import) -> Op[None]:
        """Raise InvalidArgument if this store could not recognize the effects."""
        if not self._is_same_key:
            own = Ledger.of(into.runtime).salts.mark
            if own not in {"", self.mark}:
                raise _identified_with_another_key(own, self.mark)
            yield from adopt_key(self.mark, _identified_with_another_key)
            self._is_same_key = True

    def number(self, into: Import, source: int) -> Op[int]:
        """Return the local number of a source session; a deleted one gets a negative number."""
        if source not in self._gone and source not in into.sessions:
            yield from into.flush()
            if source not in into.sessions:
                row = yield from one(LEAST_SESSION_NUMBER)
                assert row is not None
                self._least = self._gone[source] = min(self._least, row["least"]) - 1
        return self._gone.get(source) or into.sessions[source]


EFFECTS = OwnedRows(
    f"number, {EffectRecord.selected()}",
    "hf_effects",
    "session_number = {owner}",
    {"number": 0},
)
UNLINKED = OwnedRows(
    "number, session_number",
    "hf_effects",
    "session_id = {owner} AND unlinked_at IS NOT NULL",
    {"number": 0},
    owner="TEXT",
)
ORIGINS = OwnedRows(
    "session_number, position, origin_id, origin_number, first_version, last_version",
    "hf_effect_origins",
    "session_number = {owner}",
    {"position": 0},
)
LIST_ORIGINS = """
SELECT session_number, position, origin_id, origin_number FROM hf_effect_origins
WHERE (session_number, position) > (:session_number, :position)
ORDER BY session_number, position LIMIT :limit
"""
SESSION_SALTS = OwnedRows(
    "session_number, salt",
    "hf_effect_sessions JOIN hf_effect_salts ON hf_effect_salts.number = salt_number",
    "session_number = {owner}",
    {"session_number": 0},
)
ADD_SALT = """
INSERT INTO hf_effect_salts (kind, salt) VALUES ('imported', :salt) ON CONFLICT (salt) DO NOTHING
"""
IMPORTED_SALT = "SELECT number FROM hf_effect_salts WHERE salt = :salt AND kind = 'imported'"
ADD_SESSION_SALT = Insert("hf_effect_sessions", ("session_number", "salt_number"))
ADD_ORIGIN = Insert(
    "hf_effect_origins",
    (
        "session_number", "position", "origin_id", "origin_number", "first_version",
        "last_version",
    ),
)  # fmt: skip
SESSION_OF_EFFECT = "SELECT session_number FROM hf_effects WHERE id = :id"
LEAST_SESSION_NUMBER = "SELECT coalesce(min(session_number), 0) AS least FROM hf_effects"
# Generations continue after those that the key has here.
NEXT_GENERATION = """(
    SELECT CASE WHEN max(generation) >= CAST(:generation AS INTEGER)
        THEN max(generation) + 1 ELSE CAST(:generation AS INTEGER) END
    FROM hf_effects WHERE key = :key AND generation > 0 AND CAST(:generation AS INTEGER) > 0
)"""
# The owner is in another store, so the lease counts as expired.
EXPIRED_LEASE = "CASE WHEN CAST(:status AS TEXT) = 'issued' THEN :now END"
UNLINKED_AT = "CASE WHEN :is_gone = 1 THEN :now END"
COMPUTED_COLUMNS = {
    "generation": NEXT_GENERATION, "lease_expires_at": EXPIRED_LEASE, "unlinked_at": UNLINKED_AT,
    "root_above": ROOT_ABOVE.format(number="CAST(:session_number AS INTEGER)"),
}  # fmt: skip
EFFECT_VALUES = {name: f":{name}" for name in EffectRecord.columns()} | COMPUTED_COLUMNS
# One statement per effect: the next generation of a key depends on those before it.
ADD_EFFECT = f"""
INSERT INTO hf_effects ({", ".join(EFFECT_VALUES)}) VALUES ({", ".join(EFFECT_VALUES.values())})
ON CONFLICT DO NOTHING
"""  # noqa: S608

# The keys are a range of an index; that of an item begins with its scope, and stays with it.
COUNT_OF_NO_SESSION = f"""
SELECT count(*) AS keys FROM (
    SELECT DISTINCT key FROM hf_effects
    WHERE key >= '{ONCE}' AND key < '{ONCE[:-1]};' AND generation > 0 AND session_number IS NULL
    LIMIT :limit
) AS found
"""  # noqa: S608 - an own prefix


class EffectsPortable(Portable):
    """Effects are exported with their sessions, and with sessions that look them up."""

    records = (SaltsRecord, EffectRecord, AncestryRecord)

    def links(self, link: Callable[[str, Hashable], None]) -> Op[None]:
        """Link the trees of forks with their origins, deleted ones included."""
        behind = {"session_number": 0, "position": 0}
        while page := (yield from rows(LIST_ORIGINS, **behind, limit=ROWS_PER_PAGE)):
            forks = yield from read_roots(SESSION_NUMBERS, (row["session_number"] for row in page))
            # A new session of the same id looks up the effects of the earlier one too.
            origins = yield from read_roots(SESSIONS_BY_ID, (row["origin_id"] for row in page))
            for row in page:
                for root_id in (forks.get(row["session_number"]), origins.get(row["origin_id"])):
                    if root_id is not None:
                        link(root_id, row["origin_number"])
            behind = {name: page[-1][name] for name in behind}

    def export(self, out: Export) -> Op[None]:
        """Write the salts, the effects, and the origins of sessions."""
        known = yield from read_salts()
        salts = list(known.salts.values())
        out.write(SaltsRecord(salts, known.mark or None))
        lineages: Kept[int, list[Origin]] = Kept(list[Origin])
        origins: KeptSet[int] = KeptSet()
        salt_of: Kept[int, str] = Kept(str)

        def add_origin(row: Row) -> None:
            number = row["session_number"]
            lineages[number] = [*lineages.get(number, ()), origin_of(row)]
            origins.add(row["origin_number"])

        def add_salt(row: Row) -> None:
            salt_of[row["session_number"]] = row["salt"]

        yield from read_each(ORIGINS, out.sessions, add_origin)
        yield from read_each(SESSION_SALTS, out.sessions, add_salt)
        gone = yield from _gone(out, origins)
        yield from read_each(EFFECTS, chain(gone, out.sessions), EffectRecord.to(out))
        for number in out.sessions:
            salt = salt_of.get(number, salts[0])
            out.write(AncestryRecord(number, salt, lineages.get(number)))

    def left_behind(self) -> Op[dict[str, int]]:
        """Count the keys of `once` without a session."""
        row = yield from one(COUNT_OF_NO_SESSION, limit=portable.LEFT_MAX)
        assert row is not None
        return {"once_keys": row["keys"]}

    def problem_at_end(self, seen: Seen) -> str | None:
        """Check references between effects, and note owners that are not in the file."""
        effects = seen.of(_SeenEffects)
        for id in effects.named:
            if not seen.has("effect", id):
                return f"effect {id!r} is referred to but is not in the file"
        for owner, what in effects.owners.items():
            if not seen.has(*owner):
                seen.counts_beyond(what)
        return None


def _gone(out: Export, origins: KeptSet[int]) -> Op[KeptSet[int]]:
    """Return the numbers of deleted sessions whose effects the exported sessions can look up.

    A fork can, and so can a new session of the same id, for a late retry.
    """
    gone: KeptSet[int] = KeptSet(origins)
    yield from read_each(SESSION_NUMBERS, origins, lambda row: gone.pop(row["number"], None))
    yield from read_each(
        UNLINKED, out.sessions.values(), lambda row: gone.add(row["session_number"])
    )
    return KeptSet(number for number in gone if number not in out.sessions)


def _identified_with_another_key(here: str, there: str) -> InvalidArgument:
    has = "without a key" if not there else "with another key" if here else "with a key"
    wanted = "the same redaction=holdfast.Redactor(key=…)" if there else "no key"
    return InvalidArgument(
        f"the effects in this file were identified {has}, unlike those of this store, so equal "
        "calls would be run again here; nothing was imported. Import it into another store, opened "
        f"with {wanted}"
    )
