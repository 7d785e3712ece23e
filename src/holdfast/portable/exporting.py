"""Reading sessions out of a store, from one snapshot, frame by frame."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import Raw

from ..checkpoints import manifest as manifests
from ..checkpoints.collecting import Needs, read_needs
from ..checkpoints.lines import (
    RANGE,
    RUN_ITEMS,
    SHIFT,
    Piece,
)
from ..checkpoints.lines import item_context as line_item_context
from ..codec import Codec
from ..effects.rows import context as effect_context
from ..effects.salts import parts, read_salts
from ..errors import CorruptRecord, SessionNotFound
from ..kernel.operation import Op, Query, Row, batch, large_query, one, rows
from ..kernel.schema import read_store_id
from ..spend import context as spend_context
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
    ExportWriter,
    Frame,
    ItemFrame,
    ItemsFrame,
    KeyFrame,
    LineFrame,
    PinFrame,
    SaltFrame,
    SessionFrame,
    SpendFrame,
    TreeFrame,
)

ROWS_PER_PAGE = 500
ITEMS_PER_READ = 100 * RUN_ITEMS

ROOT = "SELECT root_id FROM hf_sessions WHERE id = :id"
ROOTS = "SELECT DISTINCT root_id FROM hf_sessions"
ORIGIN_ROOTS = """
SELECT DISTINCT o.root_id FROM hf_sessions s JOIN hf_sessions o ON o.number = s.origin_number
WHERE s.root_id = :root_id
"""
MEMBERS = "SELECT number FROM hf_sessions WHERE root_id = :root_id"
TREE = "SELECT position, sequence FROM hf_trees WHERE root_id = :root_id"
EVENTS = """
SELECT position, session_id, kind, data, created_at FROM hf_events
WHERE root_id = :root_id AND position > :after ORDER BY position LIMIT :limit
"""
SESSION = """
SELECT s.number, s.lineage, s.salt, s.id, s.name, s.parent_id, s.root_id, s.agent, s.user_id,
    s.status, s.version, s.epoch, s.fence, o.id AS origin_id, s.origin_version, s.metadata,
    s.created_at, s.updated_at, s.last_resumed_at
FROM hf_sessions s LEFT JOIN hf_sessions o ON o.number = s.origin_number WHERE s.number = :number
"""
EPOCHS = """
SELECT epoch, first_version, target_version FROM hf_epochs
WHERE session_number = :number ORDER BY epoch
"""
CHECKPOINTS = """
SELECT key, epoch, kind, iteration, item_id, idempotency_key, state_sequence, manifest, data,
    metadata, created_at
FROM hf_checkpoints WHERE key > :after AND key < :high ORDER BY key LIMIT :limit
"""
PINS = "SELECT key, reason, created_at FROM hf_pins WHERE key >= :low AND key < :high ORDER BY key"
ATTESTATIONS = """
SELECT key, evidence, created_at FROM hf_attestations
WHERE key >= :low AND key < :high ORDER BY number
"""
LOOKS_BACK = "SELECT id, lineage FROM hf_sessions WHERE number = :number"
# Effects outlive their session: these were made by sessions that are gone.
ORPHANED = """
SELECT DISTINCT session_number, session_id FROM hf_effects
WHERE session_number IS NOT NULL
    AND NOT EXISTS (SELECT 1 FROM hf_sessions s WHERE s.number = session_number)
ORDER BY session_number
"""
EFFECTS = """
SELECT number, session_number, session_id, id, scope, key, generation, call_id, item_id,
    issued_version, tool, effect, is_irreversible, request_digest, idempotency_key, status, reason,
    attempt, holder, fence, timeout_ms, settle_ms, ttl_ms, replay_of, undoes, undone_by, decided_by,
    issued_at, ended_at, expires_at, arguments, result, error, note, late
FROM hf_effects WHERE session_number = :session_number AND number > :after
ORDER BY number LIMIT :limit
"""
ITEMS = """
SELECT number, id, type, queue, state, priority, key, on_crash, fence, retry_count, max_retries,
    attempts, failures, rescues, releases, redriven_from, first_id, available_at, created_at,
    started_at, completed_at, updated_at, input, output, error, progress
FROM hf_work WHERE session_number = :session_number AND number > :after
ORDER BY number LIMIT :limit
"""
ATTEMPTS = """
SELECT a.work_number, w.id AS item_id, a.attempt, a.holder, a.fence, a.reason, a.ended_at, a.error
FROM hf_work w JOIN hf_attempts a ON a.work_number = w.number
WHERE w.session_number = :session_number AND (a.work_number, a.attempt) > (:number, :attempt)
ORDER BY a.work_number, a.attempt LIMIT :limit
"""
SPENDS = """
SELECT number, id, model, source, state, input_tokens, output_tokens, nano_usd, created_at,
    updated_at, details
FROM hf_spend WHERE session_number = :session_number AND number > :after
ORDER BY number LIMIT :limit
"""
# Money outlives its session: these were paid by sessions of a tree that are gone.
SPENDS_OF_GONE = """
SELECT number, id, session_id, model, source, state, input_tokens, output_tokens, nano_usd,
    created_at, updated_at, details
FROM hf_spend WHERE root_id = :root_id AND number > :after
    AND NOT EXISTS (SELECT 1 FROM hf_sessions s WHERE s.number = session_number)
ORDER BY number LIMIT :limit
"""


@dataclass(frozen=True, slots=True)
class Written:
    """How much an export has, and the position that each tree was at."""

    counts: dict[str, int]
    positions: dict[str, int]


class Exporter:
    """Writes the frames of sessions to a file."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec

    @large_query
    def write(self, writer: ExportWriter, ids: Sequence[str] | None) -> Op[Written]:
        """Write the trees of these sessions, or of all, and the trees they were forked from."""
        writer.begin((yield from read_store_id()))
        salts = yield from self._write_salts(writer)
        roots = yield from self._roots(ids)
        numbers: list[int] = []
        positions: dict[str, int] = {}
        checkpoints = items = spends = 0
        for root_id in roots:
            positions[root_id] = yield from self._write_tree(writer, root_id)
            spends += yield from self._write_spends(writer, SPENDS_OF_GONE, root_id=root_id)
            members = yield from rows(MEMBERS, root_id=root_id)
            numbers += [row["number"] for row in members]
        # In the order of their creation parents and origins come first.
        numbers.sort()
        needs = yield from read_needs(self.codec, numbers)
        yield from self._write_lines(writer, needs)
        effects = yield from self._write_orphaned(writer, numbers)
        for number in numbers:
            checkpoints += yield from self._write_session(writer, number, salts[0])
            items += yield from self._write_items(writer, number)
            yield from self._write_attempts(writer, number)
            spends += yield from self._write_spends(writer, SPENDS, session_number=number)
            effects += yield from self._write_effects(writer, number)
        counts = {"sessions": len(numbers), "checkpoints": checkpoints, "effects": effects}
        return Written({**counts, "items": items, "spends": spends}, positions)

    def _roots(self, ids: Sequence[str] | None) -> Op[list[str]]:
        if ids is None:
            return sorted(row["root_id"] for row in (yield from rows(ROOTS)))
        found: set[str] = set()
        waiting: list[str] = []
        for id in ids:
            row = yield from one(ROOT, id=id)
            if row is None:
                raise SessionNotFound(f"there is no session {id!r}", id=id)
            waiting.append(row["root_id"])
        while waiting:
            root_id = waiting.pop()
            if root_id not in found:
                found.add(root_id)
                origins = yield from rows(ORIGIN_ROOTS, root_id=root_id)
                waiting += [row["root_id"] for row in origins]
        return sorted(found)

    def _write_salts(self, writer: ExportWriter) -> Op[list[str]]:
        """Write what effects are known by, the store's own salt first."""
        found = yield from read_salts()
        salts, mark = parts(found)
        for salt in salts:
            writer.write(SaltFrame(salt))
        if mark:
            writer.write(KeyFrame(mark))
        return salts

    def _write_tree(self, writer: ExportWriter, root_id: str) -> Op[int]:
        tree = yield from one(TREE, root_id=root_id)
        assert tree is not None
        writer.write(TreeFrame(root_id, tree["position"], tree["sequence"]))
        after = 0
        while page := (yield from rows(EVENTS, root_id=root_id, after=after, limit=ROWS_PER_PAGE)):
            for row in page:
                data = Raw(self.codec.unseal(row["data"], context=("hf_events", root_id)))
                frame = EventFrame(
                    row["position"], row["session_id"], row["kind"], row["created_at"], data
                )
                writer.write(frame)
            after = page[-1]["position"]
        return int(tree["position"])

    def _write_lines(self, writer: ExportWriter, needs: Needs) -> Op[None]:
        for reads in _reads(needs.ends):
            answers = yield from batch(
                *(
                    Query(RANGE, {"low": line_id * SHIFT + low, "high": line_id * SHIFT + high})
                    for line_id, low, high in reads
                )
            )
            for (line_id, low, high), found in zip(reads, answers, strict=True):
                if low == 0:
                    pieces = needs.pieces.get(line_id, [])
                    writer.write(LineFrame(line_id, [_plain(line_id, piece) for piece in pieces]))
                for frame in self._items(line_id, low, high, found):
                    writer.write(frame)

    def _items(
        self, line_id: int, low: int, high: int, found: Sequence[Row]
    ) -> Iterator[ItemsFrame]:
        """Yield a line's items up to the last that is needed; of a packed run perhaps a part."""
        expected = low
        for row in found:
            index, count = row["key"] % SHIFT, row["count"]
            if index != expected:
                break
            body = self.codec.unseal(row["data"], context=line_item_context(row["key"]))
            if count > 1 and index + count > high:
                bodies = self.codec.split(body)[: high - index]
                for place, part in enumerate(bodies, index):
                    yield ItemsFrame(place, 1, Raw(part))
                count = len(bodies)
            else:
                yield ItemsFrame(index, count, Raw(body))
            expected = index + count
        if expected < high:
            raise CorruptRecord(
                f"line {line_id} lacks items between {expected} and {high}", line_id=line_id
            )

    def _write_session(self, writer: ExportWriter, number: int, salt: str) -> Op[int]:
        row = yield from one(SESSION, number=number)
        assert row is not None
        epochs = yield from rows(EPOCHS, number=number)
        fields: dict[str, Any] = dict(row)
        fields["user"] = fields.pop("user_id")
        fields["salt"] = row["salt"] or salt
        metadata = self.codec.unseal(row["metadata"], context=("hf_sessions", row["id"]))
        fields["metadata"] = Raw(metadata)
        fields["epochs"] = [tuple(epoch.values()) for epoch in epochs]
        if row["lineage"] is not None:
            fields["lineage"] = [tuple(entry) for entry in json.loads(row["lineage"])]
        writer.write(SessionFrame(**fields))
        count = yield from self._write_checkpoints(writer, number)
        bounds = {"low": number * SHIFT, "high": (number + 1) * SHIFT}
        for pin in (yield from rows(PINS, **bounds)):
            reason = self.codec.unpack(pin["reason"], context=("hf_pins", str(pin["key"])))
            writer.write(PinFrame(pin["key"] % SHIFT, reason, pin["created_at"]))
        for said in (yield from rows(ATTESTATIONS, **bounds)):
            context = ("hf_attestations", str(said["key"]))
            evidence = Raw(self.codec.unseal(said["evidence"], context=context))
            writer.write(AttestationFrame(said["key"] % SHIFT, said["created_at"], evidence))
        return count

    def _write_checkpoints(self, writer: ExportWriter, number: int) -> Op[int]:
        count, after, high = 0, number * SHIFT, (number + 1) * SHIFT
        while page := (yield from rows(CHECKPOINTS, after=after, high=high, limit=ROWS_PER_PAGE)):
            for row in page:
                fields: dict[str, Any] = dict(row)
                version = fields["version"] = fields.pop("key") % SHIFT
                for part in ("manifest", "data", "metadata"):
                    if row[part] is None:
                        fields[part] = NIL
                    else:
                        context = manifests.checkpoint_context(number, version, part)
                        fields[part] = Raw(self.codec.unseal(row[part], context=context))
                writer.write(CheckpointFrame(**fields))
            count += len(page)
            after = page[-1]["key"]
        return count

    def _write_orphaned(self, writer: ExportWriter, numbers: Sequence[int]) -> Op[int]:
        """Write effects of sessions that are gone, which those to be written look back to.

        A fork does, and so does a late retry through a new session of the same id.
        """
        count = 0
        gone = yield from rows(ORPHANED)
        if not gone:
            return count
        ids: set[str] = set()
        origins: set[int] = set()
        for number in numbers:
            row = yield from one(LOOKS_BACK, number=number)
            assert row is not None
            ids.add(row["id"])
            origins |= {origin for _, origin, _, _ in json.loads(row["lineage"] or "[]")}
        for row in gone:
            if row["session_number"] in origins or row["session_id"] in ids:
                count += yield from self._write_effects(writer, row["session_number"])
        return count

    def _write_items(self, writer: ExportWriter, number: int) -> Op[int]:
        owner = {"session_number": number}
        return (
            yield from self._write_rows(writer, ItemFrame, ITEMS, owner, ITEM_PARTS, item_context)
        )

    def _write_attempts(self, writer: ExportWriter, session_number: int) -> Op[None]:
        """Write what went wrong in the last attempts of a session's items."""
        after = {"number": 0, "attempt": 0}
        asked = {"session_number": session_number, "limit": ROWS_PER_PAGE}
        while page := (yield from rows(ATTEMPTS, **asked, **after)):
            for row in page:
                fields: dict[str, Any] = dict(row)
                after = {"number": fields.pop("work_number"), "attempt": row["attempt"]}
                context = item_context(row["item_id"], "attempt")
                fields["error"] = Raw(self.codec.unseal(row["error"], context=context))
                writer.write(AttemptFrame(**fields))

    def _write_spends(self, writer: ExportWriter, sql: str, **owner: int | str) -> Op[int]:
        def frame(parts: dict[str, Raw], **fields: Any) -> SpendFrame:
            return SpendFrame(**fields, details=parts.get("details", NIL))

        return (
            yield from self._write_rows(
                writer, frame, sql, owner, ("details",), lambda id, part: spend_context(id)
            )
        )

    def _write_effects(self, writer: ExportWriter, number: int) -> Op[int]:
        owner = {"session_number": number}
        return (
            yield from self._write_rows(
                writer, EffectFrame, EFFECTS, owner, EFFECT_PARTS, effect_context
            )
        )

    def _write_rows(
        self,
        writer: ExportWriter,
        frame: Callable[..., Frame],
        sql: str,
        owner: Mapping[str, int | str],
        names: Sequence[str],
        context: Callable[[str, str], tuple[str, ...]],
    ) -> Op[int]:
        """Write the rows that one owner has in a table, each with its sealed parts opened."""
        count = after = 0
        while page := (yield from rows(sql, **owner, limit=ROWS_PER_PAGE, after=after)):
            for row in page:
                fields: dict[str, Any] = dict(row)
                after = fields.pop("number")
                sealed = {name: fields.pop(name) for name in names}
                fields["parts"] = {
                    name: Raw(self.codec.unseal(body, context=context(row["id"], name)))
                    for name, body in sealed.items()
                    if body is not None
                }
                writer.write(frame(**fields))
            count += len(page)
        return count


def _plain(line_id: int, piece: Piece) -> tuple[int, int, int]:
    """Return a piece as the file has it: 0 names the line that it is a piece of."""
    return 0 if piece.line_id == line_id else piece.line_id, piece.start, piece.length


def _reads(ends: dict[int, int]) -> Iterator[list[tuple[int, int, int]]]:
    """Yield what to read of which line, so much at a time; a long line is read in parts."""
    reads: list[tuple[int, int, int]] = []
    items = 0
    for line_id in sorted(ends):
        # A line without own items still has its pieces.
        for low in range(0, max(ends[line_id], 1), ITEMS_PER_READ):
            high = min(low + ITEMS_PER_READ, ends[line_id])
            reads.append((line_id, low, high))
            items += high - low
            if items >= ITEMS_PER_READ or len(reads) >= RUN_ITEMS:
                yield reads
                reads, items = [], 0
    if reads:
        yield reads
