"""The feed: every committed change of a session tree, once, in commit order.

A tree's row is its lock and has its counters. An operation that changes a tree locks it first; its
events get the tree's next positions just before COMMIT, while the lock is held.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from itertools import groupby
from typing import TypeVar

from msgspec.structs import replace

from ..arguments import require_limit, require_text, require_whole
from ..codec import Codec
from ..errors import Compacted, InvalidArgument, NotFound, SessionNotFound
from ..kernel.append_only import through_door
from ..kernel.driver import Services
from ..kernel.operation import Decide, Deferred, Emit, Lock, Op, Query, R, Row, defer, one, rows
from ..kernel.owned_rows import OwnedRows, read_each
from ..kernel.sql import among, given
from ..records import Event

CREATE_TREE = "INSERT INTO hf_trees (root_id) VALUES (:root_id) ON CONFLICT DO NOTHING"
CREATE_NEW_TREE = "INSERT INTO hf_trees (root_id) VALUES (:root_id) RETURNING root_id"
LOCK_TREE = "SELECT root_id FROM hf_trees WHERE root_id = :root_id /*pg FOR NO KEY UPDATE */"
LOCK_TREE_AT_ONCE = """
SELECT root_id FROM hf_trees WHERE root_id = :root_id /*pg FOR NO KEY UPDATE NOWAIT */
"""
LOCK_FREE_TREES = f"""
SELECT root_id FROM hf_trees WHERE root_id {among("root_ids")}
ORDER BY root_id /*pg FOR NO KEY UPDATE SKIP LOCKED */
"""  # noqa: S608
ADVANCE_FEED = "UPDATE hf_trees SET position = position + :count WHERE root_id = :root_id"
# Without its tree the position is NULL, which the table refuses, so no event is lost silently.
APPEND_EVENTS = """
INSERT INTO hf_events (root_id, position, session_id, kind, data, created_at) VALUES {events}
"""
EVENT = """(
    :root_id, (SELECT position FROM hf_trees WHERE root_id = :root_id) - CAST(:back AS INTEGER)
        - {behind}, CAST(:session_id{n} AS TEXT), CAST(:kind{n} AS TEXT), CAST(:data{n} AS BLOB),
    :now
)"""
# PostgreSQL can do both in one statement.
ADVANCE_AND_APPEND = """
WITH moved AS (
    UPDATE hf_trees SET position = position + :count WHERE root_id = :root_id RETURNING position
)
INSERT INTO hf_events (root_id, position, session_id, kind, data, created_at)
SELECT CAST(:root_id AS TEXT), moved.position - CAST(:back AS INTEGER) - e.behind, e.session_id,
    e.kind, e.data, :now
FROM (VALUES {events}) AS e (behind, session_id, kind, data) LEFT JOIN moved ON true
"""
MOVED_EVENT = """(
    {behind}, CAST(:session_id{n} AS TEXT), CAST(:kind{n} AS TEXT), CAST(:data{n} AS BLOB)
)"""
ADVANCE_FEED_IF_DONE = """
moved AS (
    UPDATE hf_trees SET position = position + :event_count
    WHERE root_id = :event_root_id AND EXISTS (SELECT 1 FROM done) RETURNING position
)
"""
APPEND_EVENT_IF_DONE = """
told{number} AS (
    INSERT INTO hf_events (root_id, position, session_id, kind, data, created_at)
    SELECT CAST(:event_root_id AS TEXT), moved.position - {back},
        CAST(:event{number}_session_id AS TEXT), CAST(:event{number}_kind AS TEXT),
        CAST(:event{number}_data AS BLOB), :now
    FROM moved
)
"""
READ_EVENTS = """
SELECT root_id, position, session_id, kind, data, created_at FROM hf_events
WHERE root_id = :root_id AND position > :after ORDER BY position LIMIT :limit
"""
READ_FLOOR = "SELECT floor FROM hf_trees WHERE root_id = :root_id"
# The sequence of a tree's shared state: how it advances, with the position for the events that
# tell of it, and a fragment that reads it.
ADVANCE_SEQUENCE = """
UPDATE hf_trees SET sequence = sequence + :count, position = position + :count
WHERE root_id = :root_id
"""
TREE_SEQUENCE = "(SELECT t.sequence FROM hf_trees t WHERE t.root_id = {root_id})"
READ_POSITION = "SELECT position FROM hf_trees WHERE root_id = :root_id"
LIST_TREES = "SELECT root_id, position, sequence FROM hf_trees ORDER BY root_id"
EVENTS_OF_SESSIONS = OwnedRows(
    "root_id, position", "hf_events", "session_id = {owner}", {"position": 0}, owner="TEXT"
)
# One each: for several, PostgreSQL may read all events of the tree, which it expects to be few.
EMPTY_EVENT = """
UPDATE hf_events SET data = :data WHERE root_id = :root_id AND position = :position
"""
EVENTS_PER_READ_MAX = 10_000
EVENTS_PER_STATEMENT = 10

E = TypeVar("E", bound=Event)
_EVENT_FIELDS = [field.name for field in fields(Event)]


def list_trees() -> Op[list[Row]]:
    """Return every tree with its position in the feed, and the sequence of its shared state."""
    return (yield from rows(LIST_TREES))


def create_tree(root_id: str) -> Op[None]:
    """Create a tree's row, unless it exists; it is to be locked next."""
    yield from defer(CREATE_TREE, root_id=root_id)


def lock_tree(root_id: str) -> Op[None]:
    """Lock a tree until the transaction ends, as every write to it must do first."""
    if not (yield Lock(root_id)):
        raise NotFound(f"there is no session tree {root_id!r}", root_id=root_id)


def lock_statement(root_id: str, may_wait: bool) -> Query:
    """Return the statement that locks a tree, with NOWAIT unless it may wait."""
    return Query(LOCK_TREE if may_wait else LOCK_TREE_AT_ONCE, {"root_id": root_id})


def create_statement(root_id: str) -> Query:
    """Return the statement that creates a tree whose id is new; nobody else can see it yet."""
    return Query(CREATE_NEW_TREE, {"root_id": root_id})


def lock_free_statement(root_ids: Sequence[str]) -> Query:
    """Return the statement that locks those of some trees that nobody holds."""
    return Query(LOCK_FREE_TREES, {"root_ids": given(root_ids)})


def emit(codec: Codec, root_id: str, session_id: str, kind: str, data: object) -> Op[None]:
    """Add one event to the tree's feed, written just before COMMIT."""
    yield event(codec, root_id, session_id, kind, data)


def event(codec: Codec, root_id: str, session_id: str, kind: str, data: object) -> Emit:
    """Return an event to emit."""
    return Emit(root_id, session_id, kind, codec.pack(data, context=("hf_events", root_id)))


def sequence_event(
    codec: Codec, root_id: str, session_id: str, kind: str, data: dict[str, object]
) -> Emit:
    """Return an event whose position ADVANCE_SEQUENCE has counted; its data was checked before."""
    sealed = codec.seal(codec.compose(data, name=kind), context=("hf_events", root_id))
    return Emit(root_id, session_id, kind, sealed, is_counted=True)


def event_statements(emits: Sequence[Emit], *, at_once: bool = False) -> list[Query]:
    """Return the statements that append events; the kernel runs them last.

    With `at_once`, one statement may change two tables.
    """
    by_root: dict[str, list[Emit]] = {}
    for event in emits:
        by_root.setdefault(event.root_id, []).append(event)
    statements = []
    for root_id in sorted(by_root):
        events = by_root[root_id]
        count = sum(not event.is_counted for event in events)
        if count and not at_once:
            statements.append(Query(ADVANCE_FEED, {"root_id": root_id, "count": count}))
        for start in range(0, len(events), EVENTS_PER_STATEMENT):
            some = events[start : start + EVENTS_PER_STATEMENT]
            parameters: dict[str, object] = {
                "root_id": root_id,
                "back": len(events) - start - len(some),
                "count": count,
            }
            for n, event in enumerate(some):
                parameters[f"session_id{n}"] = event.session_id
                parameters[f"kind{n}"] = event.kind
                parameters[f"data{n}"] = event.data
            advances = at_once and count > 0 and start == 0
            statements.append(Query(append_events(len(some), advances=advances), parameters))
    return statements


@functools.cache
def append_events(count: int, *, advances: bool = False) -> str:
    """Return the statement that appends this many events of a tree, and may advance its feed."""
    statement, row = (ADVANCE_AND_APPEND, MOVED_EVENT) if advances else (APPEND_EVENTS, EVENT)
    events = ", ".join(row.format(n=n, behind=count - 1 - n) for n in range(count))
    return statement.format(events=events)


def events_if_done(events: Sequence[Emit]) -> Query:
    """Return the CTEs that append events of one tree if the CTE `done` has a row."""
    parameters: dict[str, object] = {
        "event_root_id": events[0].root_id,
        "event_count": len(events),
    }
    for number, event in enumerate(events):
        parameters[f"event{number}_session_id"] = event.session_id
        parameters[f"event{number}_kind"] = event.kind
        parameters[f"event{number}_data"] = event.data
    return Query(_if_done(len(events)), parameters)


@functools.cache
def _if_done(count: int) -> str:
    told = (APPEND_EVENT_IF_DONE.format(number=n, back=count - 1 - n) for n in range(count))
    return ", ".join((ADVANCE_FEED_IF_DONE, *told))


def services(new_id: Callable[[], str]) -> Services:
    """Return what the kernel needs to lock trees and append to their feeds."""
    return Services(
        lock=lock_statement,
        create=create_statement,
        lock_free=lock_free_statement,
        events=event_statements,
        events_if_done=events_if_done,
        new_id=new_id,
    )


def read_events(codec: Codec, root_id: str, after: int, limit: int) -> Op[list[Event]]:
    """Return a tree's events after a position, oldest first. Raises Compacted below the floor."""
    require_text("root_id", root_id)
    require_limit(limit, EVENTS_PER_READ_MAX)
    require_whole("after", after, 0)
    found = yield from rows(READ_EVENTS, root_id=root_id, after=after, limit=limit)
    if not found or found[0]["position"] > after + 1:
        yield from _require_kept(root_id, after)
    return [event_of(codec, row, Event) for row in found]


def _require_kept(root_id: str, after: int) -> Op[None]:
    """Raise Compacted if events after a position have been pruned."""
    for row in (yield from rows(READ_FLOOR, root_id=root_id)):
        if after < row["floor"]:
            raise Compacted(
                f"the events of {root_id} up to position {row['floor']} have been pruned; read "
                "after that position",
                oldest=row["floor"],
                oldest_position=row["floor"],
            )


def require_position(root_id: str, after: int) -> Op[None]:
    """Refuse to follow a tree that does not exist, or from a position it has not reached."""
    row = yield from one(READ_POSITION, root_id=root_id)
    if row is None:
        raise SessionNotFound(
            f"there is no tree with the root {root_id!r}; follow a session, or its root_id",
            id=root_id,
        )
    if after > row["position"]:
        raise InvalidArgument(
            f"the feed of {root_id} is at position {row['position']}, not yet at {after}"
        )


def event_of(codec: Codec, row: Row, record: type[E], **more: object) -> E:
    """Return a row of the feed as a record."""
    given = {name: row[name] for name in _EVENT_FIELDS}
    data = codec.unpack(row["data"], context=("hf_events", row["root_id"]))
    return record(**{**given, "data": data, **more})


def read_position(root_id: str) -> Op[int]:
    """Return the position of a tree's last event; 0 if there is none."""
    row = yield from one(READ_POSITION, root_id=root_id)
    return 0 if row is None else int(row["position"])


def positions_of(root_id: str, session_ids: Iterable[str]) -> Op[list[int]]:
    """Return the positions of sessions' events in a tree; sessions of other trees had their ids."""
    found: list[int] = []

    def take(row: Row) -> None:
        if row["root_id"] == root_id:
            found.append(row["position"])

    yield from read_each(EVENTS_OF_SESSIONS, session_ids, take)
    return found


def some_positions_of(root_id: str, session_ids: Iterable[str], limit: int) -> Op[list[int] | None]:
    """Return the same, or None if there are more than `limit`."""
    given_ids = given(session_ids)
    found = yield from rows(EVENTS_OF_SESSIONS.of_many, owners=given_ids, limit=limit + 1)
    if len(found) > limit:
        return None
    return [row["position"] for row in found if row["root_id"] == root_id]


def empty_events(codec: Codec, root_id: str, positions: Iterable[int]) -> Op[None]:
    """Clear the data of a tree's events; positions and kinds are kept."""
    empty = {"root_id": root_id, "data": codec.pack({}, context=("hf_events", root_id))}
    updates = (Query(EMPTY_EVENT, {**empty, "position": each}) for each in positions)
    yield from through_door(f"empty {root_id}", *updates)


def without_data(codec: Codec, root_id: str, session_ids: Iterable[str], op: Op[R]) -> Op[R]:
    """Run an operation; the events that it adds for these sessions are written without data."""
    ids = set(session_ids)
    empty = codec.pack({}, context=("hf_events", root_id))

    def emptied(event: Emit) -> Emit:
        return replace(event, data=empty) if event.session_id in ids else event

    answer = None
    while True:
        try:
            command = op.send(answer)
        except StopIteration as stop:
            result: R = stop.value
            return result
        if isinstance(command, Emit):
            command = emptied(command)
        elif isinstance(command, Decide | Deferred):
            command = replace(command, emits=[emptied(each) for each in command.emits])
        answer = yield command


def by_tree(found: Sequence[Row]) -> list[list[Row]]:
    """Group rows by tree, or none: one transaction can lock one group."""

    def tree(row: Row) -> str:
        return row["root_id"] or ""

    return [list(group) for _, group in groupby(sorted(found, key=tree), key=tree)]
