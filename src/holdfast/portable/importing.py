"""Writing sessions into a store: checked whole first, then all of them in one transaction."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import Raw

from ..arguments import shown
from ..checkpoints import manifest as manifests
from ..checkpoints.lines import SHIFT, Piece, Ref
from ..checkpoints.lines import item_context as line_item_context
from ..checkpoints.writing import random_id
from ..codec import Codec
from ..effects.rows import context as effect_context
from ..effects.salts import parts, read_salts, take_on
from ..errors import InvalidArgument
from ..feed import emit
from ..kernel.operation import Lock, Op, Query, batch, fresh_id, one, operation, query, rows
from ..spend import context as spend_context
from ..spend import session_recounted, tree_recounted
from ..work.items import FINAL
from ..work.items import context as item_context
from .frames import (
    EFFECT_PARTS,
    ITEM_PARTS,
    NIL,
    AttemptFrame,
    AttestationFrame,
    CheckpointFrame,
    EffectFrame,
    EventFrame,
    Frame,
    ItemFrame,
    ItemsFrame,
    KeyFrame,
    LineFrame,
    PinFrame,
    SaltFrame,
    SessionFrame,
    Source,
    SpendFrame,
    TreeFrame,
)

QUERIES_PER_BATCH = 200
BYTES_PER_BATCH = 2**22
LINES_PER_BATCH = 200
# A driver of the session as it was before must not be taken for one of it as it is now.
FENCE_STEP = 2**32
UNFINISHED = "It was imported before it was finished, and may have begun where it came from."
COUNTED = ("checkpoints", "effects", "items", "spends")
# The number of an origin, or of who paid, that was deleted: no session's.
GONE = -1

EXISTS = "SELECT id FROM hf_sessions WHERE id = :id"
TREE = "SELECT position FROM hf_trees WHERE root_id = :root_id"
PLANT = """
INSERT INTO hf_trees (root_id, position, sequence) VALUES (:root_id, :position, :sequence)
ON CONFLICT (root_id) DO UPDATE SET sequence = CASE
    WHEN hf_trees.sequence > excluded.sequence THEN hf_trees.sequence ELSE excluded.sequence END
"""
ADD_EVENT = """
INSERT INTO hf_events (root_id, position, session_id, kind, data, created_at)
VALUES (:root_id, :position, :session_id, :kind, :data, :created_at)
"""
OPEN = "INSERT INTO hf_lines (base, pieces) VALUES (:base, CAST(:pieces AS BLOB)) RETURNING id"
ADD_ITEM = "INSERT INTO hf_items (key, count, data) VALUES (:key, :count, :data)"
USE = "INSERT INTO hf_uses (line_id, session_number) VALUES (:line_id, :number)"
ADD_SESSION = """
INSERT INTO hf_sessions (
    id, name, parent_id, root_id, agent, user_id, status, version, epoch, head, origin_number,
    origin_version, lineage, salt, metadata, fence, created_at, updated_at, last_resumed_at
) VALUES (
    :id, :name, :parent_id, :root_id, :agent, :user, :status, :version, :epoch, :head,
    :origin_number, :origin_version, :lineage, :salt, :metadata, :fence, :created_at, :updated_at,
    :last_resumed_at
) ON CONFLICT (id) DO NOTHING RETURNING number
"""
ADD_EPOCH = """
INSERT INTO hf_epochs (session_number, epoch, first_version, target_version)
VALUES (:number, :epoch, :first_version, :target_version)
"""
ADD_CHECKPOINT = """
INSERT INTO hf_checkpoints (
    key, epoch, kind, iteration, item_id, idempotency_key, state_sequence, manifest, data, metadata,
    created_at
) VALUES (
    :key, :epoch, :kind, :iteration, :item_id, :idempotency_key, :state_sequence, :manifest, :data,
    :metadata, :created_at
)
"""
ADD_PIN = "INSERT INTO hf_pins (key, reason, created_at) VALUES (:key, :reason, :created_at)"
ADD_ATTESTATION = """
INSERT INTO hf_attestations (key, evidence, created_at) VALUES (:key, :evidence, :created_at)
"""
ADD_SALT = """
UPDATE hf_meta SET value = value || ' ' || CAST(:salt AS TEXT)
WHERE name = 'effects_salt' AND replace(value, CAST(:salt AS TEXT), '') = value
"""
HERE = "SELECT session_number FROM hf_effects WHERE id = :id"
LEAST = "SELECT coalesce(min(session_number), 0) AS least FROM hf_effects"
# Effects outlive their session, so some may be here still: those stay as they are. Whoever ran one
# is not here: its lease has expired. A key goes on counting behind what it has here.
ADD_EFFECT = """
INSERT INTO hf_effects (
    id, scope, key, generation, call_id, session_number, session_id, item_id, issued_version, tool,
    effect, is_irreversible, request_digest, idempotency_key, arguments, status, reason, result,
    error, attempt, holder, fence, lease_expires_at, timeout_ms, settle_ms, ttl_ms, replay_of,
    undoes, undone_by, decided_by, note, late, issued_at, ended_at, expires_at,
    unlinked_at
) VALUES (
    :id, :scope, :key, (
        SELECT CASE WHEN max(generation) >= CAST(:generation AS INTEGER)
            THEN max(generation) + 1 ELSE CAST(:generation AS INTEGER) END
        FROM hf_effects WHERE key = :key AND generation > 0 AND CAST(:generation AS INTEGER) > 0
    ), :call_id, :session_number, :session_id, :item_id, :issued_version, :tool,
    :effect, :is_irreversible, :request_digest, :idempotency_key, :arguments, :status, :reason,
    :result, :error, :attempt, :holder, :fence,
    CASE WHEN CAST(:status AS TEXT) = 'issued' THEN :now END,
    :timeout_ms, :settle_ms, :ttl_ms, :replay_of, :undoes,
    :undone_by, :decided_by, :note, :late, :issued_at, :ended_at, :expires_at,
    CASE WHEN :is_gone = 1 THEN :now END
) ON CONFLICT DO NOTHING
"""
ADD_ITEM_OF_WORK = """
INSERT INTO hf_work (
    id, session_number, session_id, root_id, type, queue, state, priority, key, on_crash, fence,
    retry_count, max_retries, attempts, failures, rescues, releases, redriven_from, first_id, input,
    output, error, progress, available_at, created_at, started_at, completed_at, updated_at
) VALUES (
    :id, :session_number, :session_id, :root_id, :type, :queue, :state, :priority, :key, :on_crash,
    :fence, :retry_count, :max_retries, :attempts, :failures, :rescues, :releases, :redriven_from,
    :first_id, :input, CAST(:output AS BLOB), CAST(:error AS BLOB), CAST(:progress AS BLOB),
    :available_at, :created_at, :started_at, :completed_at, :updated_at
) ON CONFLICT DO NOTHING RETURNING id
"""
ADD_ATTEMPT = """
INSERT INTO hf_attempts (work_number, attempt, holder, fence, reason, error, ended_at)
SELECT number, CAST(:attempt AS INTEGER), CAST(:holder AS TEXT), CAST(:fence AS INTEGER),
    CAST(:reason AS TEXT), CAST(:error AS BLOB), CAST(:ended_at AS INTEGER)
FROM hf_work WHERE id = :item_id
"""
# Spend outlives its session, so what a deleted one paid may be here still: it is its own again. Its
# tree is not here then, because its root is in the file.
ADD_SPEND = """
INSERT INTO hf_spend (
    id, session_number, session_id, root_id, model, source, state, input_tokens, output_tokens,
    nano_usd, details, created_at, updated_at
) VALUES (
    :id, :session_number, :session_id, :root_id, :model, :source, :state, :input_tokens,
    :output_tokens, :nano_usd, CAST(:details AS BLOB), :created_at, :updated_at
) ON CONFLICT (id) DO UPDATE SET
    session_number = excluded.session_number, root_id = excluded.root_id
WHERE hf_spend.session_id = excluded.session_id AND hf_spend.root_id = excluded.root_id
RETURNING id
"""


class Importer:
    """Writes what a source yields, all of it or nothing."""

    def __init__(self, codec: Codec, mark: str = "") -> None:
        self.codec = codec
        self._mark = mark

    @query
    def existing(self, ids: Sequence[str]) -> Op[str | None]:
        """Return the first of these sessions that the store has already."""
        for start in range(0, len(ids), QUERIES_PER_BATCH):
            some = ids[start : start + QUERIES_PER_BATCH]
            answers = yield from batch(*(Query(EXISTS, {"id": id}) for id in some))
            for found in answers:
                if found:
                    return str(found[0]["id"])
        return None

    @operation
    def write(self, source: Source) -> Op[dict[str, int]]:
        """Write every frame in one transaction; the source is read again if it is re-run."""
        loader = _Loader(self.codec, self._mark)
        for frame in source.frames():
            yield from loader.take(frame)
        yield from loader.finish(source.label)
        return {"sessions": len(loader.numbers), **loader.counts}


@dataclass(slots=True)
class _Loader:
    """What is known while frames are written: which number each line and session got."""

    codec: Codec
    own_mark: str
    numbers: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))
    _salt: str = ""
    _mark: str = ""
    _sources: dict[int, int] = field(default_factory=dict)
    _found: dict[int, int] = field(default_factory=dict)
    _lines: dict[int, int] = field(default_factory=dict)
    _pieces: dict[int, list[Piece]] = field(default_factory=dict)
    _opening: list[int] = field(default_factory=list)
    _held: list[tuple[int, ItemsFrame]] = field(default_factory=list)
    _queries: list[Query] = field(default_factory=list)
    _sessions_of: dict[str, int] = field(default_factory=dict)
    _uses: set[int] = field(default_factory=set)
    _bytes: int = 0
    """How much waits to be written, about."""
    _session: SessionFrame | None = None
    _wanted: list[str] = field(default_factory=list)
    """What is wrong if a query of those that wait returns nothing; "" where nothing is."""
    _paid: set[int] = field(default_factory=set)
    """The sessions that spent something."""
    _paid_trees: set[str] = field(default_factory=set)
    _root_id: str = ""
    _has_feed: bool = False
    _line_id: int = 0
    _number: int = 0

    def take(self, frame: Frame) -> Op[None]:
        """Write one frame, now or with those that follow."""
        match frame:
            case SaltFrame() | KeyFrame():
                yield from self._add_known_by(frame)
            case TreeFrame():
                yield from self._plant(frame)
            case EventFrame():
                self._add_event(frame)
            case LineFrame():
                yield from self._open(frame)
            case ItemsFrame():
                self._held.append((self._line_id, frame))
                self._bytes += len(memoryview(frame.body))
            case SessionFrame():
                yield from self._add_session(frame)
            case CheckpointFrame():
                self._add_checkpoint(frame)
            case PinFrame() | AttestationFrame():
                self._add_said(frame)
            case ItemFrame() | AttemptFrame() | SpendFrame():
                self._add_row(frame)
            case EffectFrame():
                yield from self._add_effect(frame)
        waiting = max(len(self._held), len(self._queries))
        if waiting >= QUERIES_PER_BATCH or self._bytes >= BYTES_PER_BATCH:
            yield from self._flush()

    def finish(self, label: str) -> Op[None]:
        """Write what is left, and tell the feed of every tree."""
        self._use_lines()
        yield from self._flush()
        for number in sorted(self._paid):
            yield from batch(*session_recounted(number))
        for root_id in sorted(self._paid_trees):
            yield from batch(*tree_recounted(root_id))
        for root_id, count in sorted(self._sessions_of.items()):
            data = {"sessions": count, "source": label}
            yield from emit(self.codec, root_id, root_id, "session_imported", data)

    def _add_known_by(self, frame: SaltFrame | KeyFrame) -> Op[None]:
        if isinstance(frame, SaltFrame):
            yield from rows(ADD_SALT, salt=frame.salt)
        else:
            self._mark = frame.mark

    def _plant(self, frame: TreeFrame) -> Op[None]:
        """Make the tree; one whose sessions were deleted here goes on counting where it was."""
        self._root_id = frame.root_id
        self._has_feed = (yield from one(TREE, root_id=frame.root_id)) is not None
        position, sequence = frame.position, frame.sequence
        yield from rows(PLANT, root_id=frame.root_id, position=position, sequence=sequence)
        yield Lock(frame.root_id)

    def _add_event(self, frame: EventFrame) -> None:
        if self._has_feed:
            return
        self._later(
            ADD_EVENT,
            root_id=self._root_id,
            position=frame.position,
            session_id=frame.session_id,
            kind=frame.kind,
            data=self._seal(frame.data, ("hf_events", self._root_id)),
            created_at=frame.created_at,
        )

    def _open(self, frame: LineFrame) -> Op[None]:
        """Remember a line; those without pieces are opened many at a time."""
        if frame.pieces or len(self._opening) >= LINES_PER_BATCH:
            yield from self._open_lines()
        self._line_id = frame.line_id
        if not frame.pieces:
            self._opening.append(frame.line_id)
            return
        pieces = [
            Piece(self._lines[line_id] if line_id else 0, start, length)
            for line_id, start, length in frame.pieces
        ]
        sealed = self.codec.pack([list(piece) for piece in pieces])
        row = yield from one(OPEN, base=sum(piece.length for piece in pieces), pieces=sealed)
        assert row is not None
        self._lines[frame.line_id] = row["id"]
        self._pieces[row["id"]] = pieces

    def _open_lines(self) -> Op[None]:
        """Open the lines that wait, and let go of the items that waited for them."""
        if self._opening:
            opens = [Query(OPEN, {"base": 0, "pieces": None}) for _ in self._opening]
            answers = yield from batch(*opens)
            for line_id, found in zip(self._opening, answers, strict=True):
                self._lines[line_id] = found[0]["id"]
            self._opening = []
        for line_id, frame in self._held:
            key = self._lines[line_id] * SHIFT + frame.index
            data = self._seal(frame.body, line_item_context(key))
            self._later(ADD_ITEM, key=key, count=frame.count, data=data)
        self._held = []

    def _add_session(self, frame: SessionFrame) -> Op[None]:
        self._use_lines()
        yield from self._open_lines()
        origin = self.numbers.get(frame.origin_id) if frame.origin_id is not None else None
        if origin is None and frame.lineage:
            origin = GONE
        fields = {name: getattr(frame, name) for name in frame.__struct_fields__}
        fields["metadata"] = self._seal(frame.metadata, ("hf_sessions", frame.id))
        fields["fence"] = min(frame.fence + FENCE_STEP, 2**63 - 1)
        fields["head"] = random_id((yield from fresh_id()))
        fields["lineage"] = yield from self._lineage(frame)
        fields["salt"] = yield from self._own_salt(frame)
        del fields["epochs"], fields["origin_id"], fields["number"]
        row = yield from one(ADD_SESSION, **fields, origin_number=origin)
        if row is None:
            raise already_there(frame.id)
        self._session = frame
        self.numbers[frame.id] = self._number = self._sources[frame.number] = row["number"]
        self._sessions_of[frame.root_id] = self._sessions_of.get(frame.root_id, 0) + 1
        for epoch, first, target in frame.epochs:
            self._later(
                ADD_EPOCH,
                number=self._number,
                epoch=epoch,
                first_version=first,
                target_version=target,
            )

    def _add_checkpoint(self, frame: CheckpointFrame) -> None:
        number, version = self._number, frame.version
        manifest = {
            channel: self._moved(entry)
            for channel, entry in manifests.read(self.codec, bytes(frame.manifest)).items()
        }
        fields: dict[str, Any] = {
            name: getattr(frame, name) for name in frame.__struct_fields__ if name != "version"
        }
        context = manifests.checkpoint_context(number, version, "manifest")
        fields["manifest"] = manifests.pack(self.codec, manifest, context)
        for part in ("data", "metadata"):
            body = getattr(frame, part)
            context = manifests.checkpoint_context(number, version, part)
            fields[part] = None if body == NIL else self._seal(body, context)
        self._later(ADD_CHECKPOINT, key=number * SHIFT + version, **fields)
        self.counts["checkpoints"] += 1

    def _moved(self, entry: manifests.Entry) -> manifests.Entry:
        """Return where a channel lies in this store, and note the lines it needs."""
        match entry:
            case manifests.Inline():
                return entry
            case manifests.Stored(line_id):
                self._uses.add(self._lines[line_id])
                return manifests.Stored(self._lines[line_id])
            case Ref():
                line_id = self._lines[entry.line_id]
                self._uses.add(line_id)
                self._uses |= {piece.line_id or line_id for piece in self._pieces.get(line_id, ())}
                return Ref(line_id, entry.length, entry.base, entry.skip, entry.is_open)

    def _use_lines(self) -> None:
        """Say which lines the session before needs."""
        for line_id in sorted(self._uses):
            self._later(USE, line_id=line_id, number=self._number)
        self._uses = set()

    def _add_said(self, frame: PinFrame | AttestationFrame) -> None:
        key, created_at = self._number * SHIFT + frame.version, frame.created_at
        if isinstance(frame, PinFrame):
            reason = self.codec.pack(frame.reason, context=("hf_pins", str(key)))
            self._later(ADD_PIN, key=key, reason=reason, created_at=created_at)
        else:
            evidence = self._seal(frame.evidence, ("hf_attestations", str(key)))
            self._later(ADD_ATTESTATION, key=key, evidence=evidence, created_at=created_at)

    def _add_row(self, frame: ItemFrame | AttemptFrame | SpendFrame) -> None:
        match frame:
            case ItemFrame():
                self._add_item(frame)
            case AttemptFrame():
                self._add_attempt(frame)
            case SpendFrame():
                self._add_spend(frame)

    def _add_item(self, frame: ItemFrame) -> None:
        """Add a work item; what was not finished there waits for a person here."""
        fields = self._fields(frame, ITEM_PARTS, item_context)
        if frame.state not in FINAL:
            fields["state"] = "review"
            if fields["error"] is None:
                context = item_context(frame.id, "error")
                fields["error"] = self.codec.pack(UNFINISHED, context=context)
        fields["fence"] = min(frame.fence + FENCE_STEP, 2**63 - 1)
        self.counts["items"] += 1
        problem = f"work item {frame.id!r}, its key or what it is redriven from is here already"
        self._later(ADD_ITEM_OF_WORK, problem, **fields, **self._place())

    def _add_attempt(self, frame: AttemptFrame) -> None:
        fields = {name: getattr(frame, name) for name in frame.__struct_fields__}
        fields["error"] = self._seal(frame.error, item_context(frame.item_id, "attempt"))
        self._later(ADD_ATTEMPT, **fields)

    def _add_spend(self, frame: SpendFrame) -> None:
        fields = {name: getattr(frame, name) for name in frame.__struct_fields__}
        is_empty, context = frame.details == NIL, spend_context(frame.id)
        fields["details"] = None if is_empty else self._seal(frame.details, context)
        self.counts["spends"] += 1
        if frame.session_id is None:
            fields |= self._place()
            self._paid.add(self._number)
        else:
            fields |= {"root_id": self._root_id, "session_number": GONE}
        self._paid_trees.add(fields["root_id"])
        problem = f"spend {frame.id!r} is that of another session here"
        self._later(ADD_SPEND, problem, **fields)

    def _place(self) -> dict[str, object]:
        assert self._session is not None
        place = {"session_id": self._session.id, "root_id": self._session.root_id}
        return {**place, "session_number": self._number}

    def _fields(
        self,
        frame: ItemFrame | EffectFrame,
        names: Sequence[str],
        context: Callable[[str, str], tuple[str, ...]],
    ) -> dict[str, Any]:
        fields: dict[str, Any] = {
            name: getattr(frame, name) for name in frame.__struct_fields__ if name != "parts"
        }
        for name in names:
            body = frame.parts.get(name)
            fields[name] = None if body is None else self._seal(body, context(frame.id, name))
        return fields

    def _lineage(self, frame: SessionFrame) -> Op[str | None]:
        """Return where a fork's effects from before the fork lie in this store."""
        if frame.lineage is None:
            return None
        moved = []
        for id, number, low, high in frame.lineage:
            here = yield from self._number_of(number)
            moved.append([id, self._found.get(number, here), low, high])
        return json.dumps(moved)

    def _own_salt(self, frame: SessionFrame) -> Op[str | None]:
        """Return the salt that a session brings, unless it is this store's."""
        if not self._salt:
            found = yield from read_salts()
            self._salt = parts(found)[0][0]
        return None if frame.salt == self._salt else frame.salt

    def _number_of(self, source: int) -> Op[int]:
        """Return the number here of a session there; one that is gone gets a negative one."""
        if source not in self._sources:
            least = yield from one(LEAST)
            assert least is not None
            taken = min(0, least["least"], *self._sources.values())
            self._sources[source] = taken - 1
        return self._sources[source]

    def _add_effect(self, frame: EffectFrame) -> Op[None]:
        if not self.counts["effects"]:
            if self.own_mark not in {"", self._mark}:
                raise known_otherwise(self.own_mark, self._mark)
            yield from take_on(self._mark, known_otherwise)
        fields = self._fields(frame, EFFECT_PARTS, effect_context)
        fields["session_number"], fields["is_gone"] = yield from self._owner(frame)
        self._later(ADD_EFFECT, **fields)
        self.counts["effects"] += 1

    def _owner(self, frame: EffectFrame) -> Op[tuple[int | None, int]]:
        """Return the number of an effect's session here, and 1 if that is gone."""
        source = frame.session_number
        if source is None:
            return None, 0
        number = yield from self._number_of(source)
        if source not in self._found:
            # Forks look back to where the effects lie, and those of this session may lie here.
            here = yield from one(HERE, id=frame.id)
            lies_at = None if here is None else here["session_number"]
            self._found[source] = number if lies_at is None else int(lies_at)
        return (self._found[source], 1) if number < 0 else (number, 0)

    def _seal(self, body: Raw, context: tuple[str, ...]) -> bytes:
        return self.codec.seal(bytes(body), context=context)

    def _later(self, sql: str, problem: str = "", **parameters: object) -> None:
        """Write it with those that follow; with a problem, it must return a row."""
        self._queries.append(Query(sql, parameters))
        self._wanted.append(problem)
        sizes = (len(value) for value in parameters.values() if type(value) is bytes)
        self._bytes += sum(sizes)

    def _flush(self) -> Op[None]:
        yield from self._open_lines()
        for start in range(0, len(self._queries), QUERIES_PER_BATCH):
            answers = yield from batch(*self._queries[start : start + QUERIES_PER_BATCH])
            for problem, found in zip(self._wanted[start:], answers, strict=False):
                if problem and not found:
                    raise InvalidArgument(f"{problem}; nothing was imported")
        self._queries, self._wanted, self._bytes = [], [], 0


def known_otherwise(here: str, there: str) -> InvalidArgument:
    """Return the error for effects that nobody would know again in this store."""
    has = "without a key" if not there else "with another key" if here else "with a key"
    wanted = "the same redaction=holdfast.Redactor(key=…)" if there else "no key"
    return InvalidArgument(
        f"the effects in this file are known {has}, those of this store are not, so that its calls "
        "would be new here and be done again; nothing was imported. Import it into another store, "
        f"opened with {wanted}"
    )


def already_there(id: str) -> InvalidArgument:
    """Return the error for a session that would be written over."""
    return InvalidArgument(
        f"there is a session {shown(id)} already; nothing was imported", session_id=id
    )


def spent_by_another(label: str, id: str) -> InvalidArgument:
    """Return the error for spend that would be listed as that of a session it is not of."""
    return InvalidArgument(
        f"{label} has the spend of a deleted session {shown(id)}, and this store has another "
        "session of that id, where it would be listed; nothing was imported. If you trust where "
        "it comes from, import it with store_keys=True (--store-keys)",
        session_id=id,
    )
