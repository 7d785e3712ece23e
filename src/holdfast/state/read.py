"""Reading shared state: current, as of a sequence, and its mutations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from ..checkpoints.diff import same
from ..codec import Codec, to_json
from ..errors import (
    Compacted,
    CorruptRecord,
    InvalidValue,
    SequenceInFuture,
    SessionNotFound,
    TypeConflict,
)
from ..feed.events import TREE_SEQUENCE
from ..kernel.operation import Op, Query, Row, batch, one, rows
from ..records import SessionRef
from ..sessions.rows import ONE_SESSION, require_root
from .records import (
    Entry,
    KeyDiff,
    StateChange,
    StateDiff,
    StateEvent,
    StateSnapshot,
    StateSummary,
)
from .values import MISSING, Mutation, applied
from .write import ENTRY_COLUMNS, READ_ALL_ENTRIES, entry_context, event_context

EVENT_COLUMNS = """h.sequence, h.key, h.operation, h.version, h.argument, h.value, h.base,
    h.is_deleted, h.session_id, h.item_id, h.idempotency_key, h.created_at"""
DOCUMENT_OPERATIONS = "('init', 'full_replace', 'patch', 'restore')"
HEAD = f"""
SELECT {TREE_SEQUENCE.format(root_id=":root_id")} AS sequence, s.keys, s.floor
FROM (SELECT 1) AS one LEFT JOIN hf_state s ON s.root_id = :root_id
"""  # noqa: S608
READ_ENTRY = f"""
SELECT {ENTRY_COLUMNS} FROM hf_state_entries WHERE root_id = :root_id AND key = :key
"""  # noqa: S608
# One row if the session exists, whether or not the key does.
READ_ENTRY_OF_SESSION = f"""
SELECT e.key, e.version, e.value, e.sequence, e.updated_by, e.updated_at
FROM (SELECT s.number FROM {ONE_SESSION}) AS found
LEFT JOIN hf_state_entries e ON e.root_id = :root_id AND e.key = :key
"""  # noqa: S608
PAGE_OF_KEYS = """
SELECT key, version, {value}, sequence, updated_by, updated_at FROM hf_state_entries
WHERE root_id = :root_id AND value IS NOT NULL AND key > :after AND key >= :prefix AND key < :end
    AND sequence > :since AND (CAST(:updated_by AS TEXT) IS NULL OR updated_by = :updated_by)
ORDER BY key LIMIT :limit
"""
# The last event of a key at a sequence.
LAST = """(SELECT max(m.sequence) FROM hf_state_events m
    WHERE m.root_id = :root_id AND m.key = {key} AND m.sequence <= :at)"""
# As of a sequence: those changed since with the sequence of their last change before it.
PAGE_OF_PAST_KEYS = f"""
SELECT e.key, e.version, {{value}}, e.sequence, e.updated_by, e.updated_at,
    CASE WHEN e.sequence > :at THEN {LAST.format(key="e.key")} END AS past
FROM hf_state_entries e
WHERE e.root_id = :root_id AND e.key > :after AND e.key >= :prefix AND e.key < :end
    AND (e.value IS NOT NULL OR e.sequence > :at)
ORDER BY e.key LIMIT :limit
"""  # noqa: S608
LIST_KEYS = """
SELECT key FROM hf_state_entries WHERE root_id = :root_id AND value IS NOT NULL
    AND (CAST(:updated_by AS TEXT) IS NULL OR updated_by = :updated_by)
ORDER BY key
"""
NEWEST_KEYS = """
SELECT key, length(value) AS bytes FROM hf_state_entries
WHERE root_id = :root_id AND value IS NOT NULL ORDER BY sequence DESC LIMIT :limit
"""
# The events that the value of a key at a sequence is computed from.
# SQLite keeps the order of a CROSS JOIN, and PostgreSQL evaluates a subquery with OFFSET 0 first;
# otherwise both would scan the whole history.
CHAIN = """CROSS JOIN hf_state_events step CROSS JOIN hf_state_events h
WHERE step.root_id = last.root_id AND step.key = last.key
    AND step.sequence BETWEEN last.base AND last.sequence
    AND h.root_id = step.root_id AND h.sequence = step.sequence AND h.key = step.key"""
READ_KEY_AT = f"""
SELECT {EVENT_COLUMNS} FROM hf_state_events last {CHAIN}
    AND last.root_id = :root_id AND last.key = :key AND last.sequence = {LAST.format(key=":key")}
ORDER BY h.sequence
"""  # noqa: S608
# Keys that have not changed since are read from the entries.
READ_CHANGED_SINCE = f"""
SELECT {EVENT_COLUMNS} FROM (
    SELECT at_last.root_id, at_last.key, at_last.sequence, at_last.base FROM (
        SELECT e.root_id, e.key, {LAST.format(key="e.key")} AS sequence FROM hf_state_entries e
        WHERE e.root_id = :root_id AND e.sequence > :at /*pg OFFSET 0 */
    ) AS reached CROSS JOIN hf_state_events at_last
    WHERE at_last.root_id = reached.root_id AND at_last.key = reached.key
        AND at_last.sequence = reached.sequence /*pg OFFSET 0 */
) AS last {CHAIN}
ORDER BY h.key, h.sequence
"""  # noqa: S608
READ_HISTORY = f"""
SELECT {EVENT_COLUMNS} FROM hf_state_events h
WHERE h.root_id = :root_id AND h.key = :key AND h.sequence < :before AND h.sequence > :after
    AND h.sequence >= coalesce({LAST.format(key=":key")}, 0)
ORDER BY h.sequence DESC LIMIT :limit
"""  # noqa: S608
# One statement, with the head in every row: followers ask for it after each commit.
READ_STATE_EVENTS = f"""
SELECT head.newest, head.keys, head.floor, h.*
FROM (
    SELECT {TREE_SEQUENCE.format(root_id=":root_id")} AS newest, s.keys, s.floor
    FROM (SELECT 1) AS one LEFT JOIN hf_state s ON s.root_id = :root_id
) AS head LEFT JOIN (
    SELECT {EVENT_COLUMNS} FROM hf_state_events h
    WHERE h.root_id = :root_id AND h.sequence > :after
        AND (h.key = '' OR h.operation NOT IN {DOCUMENT_OPERATIONS})
    ORDER BY h.sequence LIMIT :limit
) AS h ON true
ORDER BY h.sequence
"""  # noqa: S608
READ_CHANGED_KEYS = f"""
SELECT {EVENT_COLUMNS} FROM hf_state_events h
WHERE h.root_id = :root_id AND h.sequence BETWEEN :first AND :last AND h.key <> ''
ORDER BY h.sequence, h.key
"""  # noqa: S608
READ_PARTS = f"""
SELECT {EVENT_COLUMNS} FROM hf_state_events h
WHERE h.root_id = :root_id AND h.sequence BETWEEN :first AND :last
    AND h.key <> '' AND h.operation IN {DOCUMENT_OPERATIONS}
ORDER BY h.sequence, h.key
"""  # noqa: S608
LAST_CHARACTER = chr(0x10FFFF)
SUMMARY_KEYS_READ_MAX = 1_000
# The most that sealing adds to a value; a larger one cannot fit.
SEALED_BYTES_MORE = 1_024


def _event_value(codec: Codec, root_id: str, row: Row, column: str) -> Any:
    context = event_context(root_id, row["sequence"], row["key"], column)
    return codec.unpack(row[column], context=context)


def entry_of(codec: Codec, root_id: str, row: Row) -> Entry:
    """Return the record of an entry's row."""
    value = None
    if row["value"] is not None:
        value = codec.unpack(row["value"], context=entry_context(root_id, row["key"]))
    return Entry(
        key=row["key"],
        value=value,
        version=row["version"],
        sequence=row["sequence"],
        updated_by=row["updated_by"],
        updated_at=row["updated_at"],
        is_deleted=row["value"] is None,
    )


def list_entries(
    codec: Codec,
    root_id: str,
    *,
    prefix: str,
    after: str,
    updated_by: str | None,
    since: int,
    limit: int,
    values: bool,
) -> Op[list[Entry]]:
    """Return keys that begin with a prefix, in order; without `values` none is read."""
    statement = PAGE_OF_KEYS.format(value="value" if values else "NULL AS value")
    # No character comes after the last one, and no key ends with it.
    span = {"prefix": prefix, "after": after, "end": prefix + LAST_CHARACTER}
    wanted = {"updated_by": updated_by, "since": since, "limit": limit}
    found = yield from rows(statement, root_id=root_id, **span, **wanted)
    if not found:
        yield from require_root(root_id)
    return [replace(entry_of(codec, root_id, row), is_deleted=False) for row in found]


def list_past_entries(
    codec: Codec,
    root_id: str,
    at: int,
    *,
    prefix: str,
    after: str,
    updated_by: str | None,
    since: int,
    limit: int,
    values: bool,
) -> Op[list[Entry]]:
    """Return the same as of a sequence; Compacted below the floor."""
    yield from require_readable(root_id, at)
    statement = PAGE_OF_PAST_KEYS.format(value="e.value" if values else "NULL AS value")
    span = {"prefix": prefix, "end": prefix + LAST_CHARACTER, "at": at, "limit": limit}
    page: list[Entry] = []
    while len(page) < limit:
        found = yield from rows(statement, root_id=root_id, after=after, **span)
        for entry in (yield from _as_of(codec, root_id, at, found)):
            if entry.sequence > since and updated_by in {None, entry.updated_by}:
                page.append(entry if values else replace(entry, value=None))
        if len(found) < limit:
            break
        # Some of these keys did not exist then.
        after = found[-1]["key"]
    return page[:limit]


def _as_of(codec: Codec, root_id: str, at: int, found: list[Row]) -> Op[list[Entry]]:
    """Return those keys of a page that existed at a sequence."""
    changed = [row["key"] for row in found if row["past"] is not None]
    asked = [Query(READ_KEY_AT, {"root_id": root_id, "key": key, "at": at}) for key in changed]
    chains = dict(zip(changed, (yield from batch(*asked)) if asked else [], strict=True))
    entries = []
    for row in found:
        if row["sequence"] <= at:
            entries.append(replace(entry_of(codec, root_id, row), is_deleted=False))
        elif row["past"] is not None:
            then = list(replayed(codec, root_id, chains[row["key"]]))[-1]
            entries += [] if then.is_deleted else [then]
    return entries


def read_entry(codec: Codec, root_id: str, key: str) -> Op[Entry | None]:
    """Return a key, or None if it does not exist."""
    row = yield from one(READ_ENTRY, root_id=root_id, key=key)
    if row is None or row["value"] is None:
        yield from require_root(root_id)
        return None
    return entry_of(codec, root_id, row)


def read_entry_of_session(codec: Codec, session: SessionRef, key: str) -> Op[Entry | None]:
    """Return the same; raise SessionNotFound if this session of the tree was deleted."""
    root_id = session.root_id
    row = yield from one(READ_ENTRY_OF_SESSION, number=session.number, root_id=root_id, key=key)
    if row is None:
        raise SessionNotFound(f"there is no session {session.id!r}", id=session.id)
    return None if row["value"] is None else entry_of(codec, root_id, row)


def replayed(codec: Codec, root_id: str, found: Iterable[Row]) -> Iterator[Entry]:
    """Yield the entry after each event of a key, oldest first; the first has the full value."""
    value: Any = MISSING
    for row in found:
        if row["is_deleted"]:
            value = MISSING
        elif row["value"] is not None:
            value = _event_value(codec, root_id, row, "value")
        else:
            argument = _event_value(codec, root_id, row, "argument")
            mutation = Mutation(operation=row["operation"], key=row["key"], argument=argument)
            try:
                value = applied(mutation, value)
            except (TypeConflict, InvalidValue) as error:
                raise CorruptRecord(
                    f"the history of {row['key']!r} in the state of {root_id} is damaged at "
                    f"sequence {row['sequence']}: {error}"
                ) from error
        yield Entry(
            key=row["key"],
            value=None if value is MISSING else value,
            version=row["version"],
            sequence=row["sequence"],
            updated_by=row["session_id"],
            updated_at=row["created_at"],
            is_deleted=value is MISSING,
            operation=row["operation"],
            idempotency_key=row["idempotency_key"],
        )


def past_entry(codec: Codec, root_id: str, key: str, at: int) -> Op[Entry | None]:
    """Return a key that existed at a sequence; Compacted below the floor."""
    yield from require_readable(root_id, at)
    entry = yield from entry_at(codec, root_id, key, at)
    return None if entry is None or entry.is_deleted else entry


def entry_at(codec: Codec, root_id: str, key: str, at: int) -> Op[Entry | None]:
    """Return a key as of a sequence, even if it was deleted."""
    found = yield from rows(READ_KEY_AT, root_id=root_id, key=key, at=at)
    entries = list(replayed(codec, root_id, found))
    return entries[-1] if entries else None


def entries_from(
    codec: Codec, root_id: str, mutations: Iterable[Mutation], sequence: int
) -> Op[list[Entry]]:
    """Return what each of some mutations left, the first of which has this sequence."""
    entries = []
    for at, mutation in enumerate(mutations, sequence):
        entry = yield from entry_at(codec, root_id, mutation.key, at)
        assert entry is not None
        entries.append(entry)
    return entries


def read_head(root_id: str) -> Op[tuple[int, int]]:
    """Return the newest and the oldest sequence of a tree's state that can be read."""
    head = yield from _head(root_id)
    return head["sequence"] or 0, head["floor"] or 0


def _head(root_id: str) -> Op[Row]:
    head = yield from one(HEAD, root_id=root_id)
    assert head is not None
    if not head["keys"]:
        yield from require_root(root_id)
    return head


def require_readable(root_id: str, at: int) -> Op[None]:
    """Raise Compacted below the floor, and InvalidArgument for a future sequence."""
    newest, floor = yield from read_head(root_id)
    _require_between(root_id, floor, at, newest)


def require_reached(root_id: str, at: int) -> Op[None]:
    """Raise InvalidArgument for a future sequence."""
    newest, _ = yield from read_head(root_id)
    _require_between(root_id, 0, at, newest)


def _require_between(root_id: str, floor: int, at: int, newest: int) -> None:
    if at < floor:
        raise Compacted(
            f"the state of {root_id} at sequence {at} was removed; the oldest is at {floor}",
            oldest=floor,
            oldest_sequence=floor,
        )
    if at > newest:
        raise SequenceInFuture(
            f"the state of {root_id} is at sequence {newest}, not yet at {at}",
            head_sequence=newest,
        )


def snapshot(codec: Codec, root_id: str, at: int | None) -> Op[StateSnapshot]:
    """Return all keys, now or as of a sequence. Raises Compacted below the floor."""
    newest, floor = yield from read_head(root_id)
    if at is not None:
        _require_between(root_id, floor, at, newest)
    found = yield from rows(READ_ALL_ENTRIES, root_id=root_id)
    unchanged = (row for row in found if at is None or row["sequence"] <= at)
    entries = {row["key"]: entry_of(codec, root_id, row) for row in unchanged}
    if at is not None:
        changed = yield from rows(READ_CHANGED_SINCE, root_id=root_id, at=at)
        by_key: dict[str, list[Row]] = {}
        for row in changed:
            by_key.setdefault(row["key"], []).append(row)
        for key, chain in by_key.items():
            entries[key] = list(replayed(codec, root_id, chain))[-1]
    live = sorted((key, each) for key, each in entries.items() if not each.is_deleted)
    return StateSnapshot(
        root_id=root_id,
        version=newest if at is None else at,
        document={key: each.value for key, each in live},
        versions={key: each.version for key, each in live},
        writers={key: each.updated_by for key, each in live},
        times={key: each.updated_at for key, each in live},
    )


def history(
    codec: Codec, root_id: str, key: str, after: int, before: int, limit: int
) -> Op[list[Entry]]:
    """Return the entry after each change of a key between two sequences, newest first."""
    _, floor = yield from read_head(root_id)
    asked = {"root_id": root_id, "key": key}
    ends = {"after": after, "before": before, "at": floor}
    page = yield from rows(READ_HISTORY, **asked, **ends, limit=limit)
    if not page:
        return []
    oldest = page[-1]["sequence"]
    chain = yield from rows(READ_KEY_AT, **asked, at=oldest)
    entries = list(replayed(codec, root_id, [*chain[:-1], *reversed(page)]))
    return [each for each in reversed(entries) if each.sequence >= oldest]


def events(codec: Codec, root_id: str, after: int, limit: int) -> Op[list[StateEvent]]:
    """Return mutations after a sequence, oldest first."""
    found = yield from rows(READ_STATE_EVENTS, root_id=root_id, after=after, limit=limit)
    head = found[0]
    if not head["keys"]:
        yield from require_root(root_id)
    _require_between(root_id, head["floor"] or 0, after, head["newest"] or 0)
    found = [row for row in found if row["sequence"] is not None]
    documents = [row["sequence"] for row in found if not row["key"]]
    parts: dict[int, list[Row]] = {sequence: [] for sequence in documents}
    if documents:
        ends = {"first": documents[0], "last": documents[-1]}
        for row in (yield from rows(READ_PARTS, root_id=root_id, **ends)):
            parts[row["sequence"]].append(row)
    return [_event(codec, root_id, row, parts.get(row["sequence"], [])) for row in found]


def changes(codec: Codec, root_id: str, after: int, limit: int) -> Op[list[StateChange]]:
    """Return mutations after a sequence with what they left, oldest first."""
    found = yield from events(codec, root_id, after, limit)
    if not found:
        return []
    ends = {"first": found[0].sequence, "last": found[-1].sequence}
    entries: dict[int, list[Entry]] = {event.sequence: [] for event in found}
    for row in (yield from rows(READ_CHANGED_KEYS, root_id=root_id, **ends)):
        left: Entry | None
        if row["is_deleted"] or row["value"] is not None:
            [left] = replayed(codec, root_id, [row])
        else:
            left = yield from entry_at(codec, root_id, row["key"], row["sequence"])
            assert left is not None
        entries[row["sequence"]].append(left)
    return [StateChange(event=each, entries=tuple(entries[each.sequence])) for each in found]


def _event(codec: Codec, root_id: str, row: Row, parts: list[Row]) -> StateEvent:
    value: Any = None
    if row["argument"] is not None:
        value = _event_value(codec, root_id, row, "argument")
    elif not row["key"]:
        live = [part for part in parts if not part["is_deleted"]]
        value = {part["key"]: _event_value(codec, root_id, part, "value") for part in live}
    elif row["value"] is not None:
        value = _event_value(codec, root_id, row, "value")
    return StateEvent(
        sequence=row["sequence"],
        operation=row["operation"],
        key=row["key"] or None,
        version=row["version"] or None,
        value=value,
        deleted=tuple(part["key"] for part in parts if part["is_deleted"]),
        updated_by=row["session_id"],
        item_id=row["item_id"],
        idempotency_key=row["idempotency_key"],
        created_at=row["created_at"],
    )


def diff(codec: Codec, root_id: str, before: int, after: int) -> Op[StateDiff]:
    """Compare the state at two sequences."""
    old = yield from snapshot(codec, root_id, before)
    new = yield from snapshot(codec, root_id, after)
    changes = tuple(
        KeyDiff(
            key=key,
            before=old.document.get(key),
            after=new.document.get(key),
            version_before=old.versions.get(key, 0),
            version_after=new.versions.get(key, 0),
        )
        for key in sorted(old.versions.keys() | new.versions.keys())
        if not same(old.document.get(key, MISSING), new.document.get(key, MISSING))
    )
    return StateDiff(before=before, after=after, changes=changes)


def summary(codec: Codec, root_id: str, max_keys: int, max_bytes: int) -> Op[StateSummary]:
    """Return the most recently written keys that fit; a value that is too large is skipped."""
    count = (yield from _head(root_id))["keys"] or 0
    newest = yield from rows(NEWEST_KEYS, root_id=root_id, limit=SUMMARY_KEYS_READ_MAX)
    document: dict[str, Any] = {}
    size, left_out = len("{}"), []
    for row in newest:
        key, entry = row["key"], None
        if row["bytes"] <= max_bytes + SEALED_BYTES_MORE and len(document) < max_keys:
            entry = yield from read_entry(codec, root_id, key)
        cost = 0 if entry is None else len(to_json({key: entry.value}))
        if entry is None or size + cost > max_bytes:
            left_out.append(key)
        else:
            document[key] = entry.value
            size += cost
    return StateSummary(document=document, key_count=count, left_out=tuple(left_out[:max_keys]))
