"""Peer calls and pauses in the life-cycle of a store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from ..checkpoints.write import record_status
from ..errors import StoreBusy
from ..feed import by_tree, emit
from ..formatting import plural
from ..kernel.flow import Flow, perform
from ..kernel.nouns import Noun, Retention
from ..kernel.operation import (
    Deferred,
    Lock,
    Op,
    Query,
    Row,
    Runtime,
    batch,
    one,
    operation,
    query,
    rows,
)
from ..kernel.sql import among, given
from ..records import EndedItem, Finding, Pruned, SessionRef, Swept
from ..sessions.access import LOCK_SESSION, Place
from ..sessions.rows import AMONG_NUMBERS, numbers_of, released
from .answers import (
    CLOSE_ANSWERED,
    NEXT_DUE,
    UNANSWERED,
    answer_served,
    expire,
    find_due,
    follow_item,
    following,
    leave_asks,
)
from .artifacts import abandon
from .asks import REQUEST, RESUME, SELECT_ASKS, SERVED
from .pauses import OPEN_PAUSE, close, resumption_id
from .portable import PeersPortable
from .settlement import WITH_ASKER, WITH_PEER, settle

REMOVED_PER_PASS = 500
OVERDUE_MS = 60_000

AMONG_IDS = among("ids")
OPEN_OF_SESSIONS = f"""
{SELECT_ASKS} WHERE session_number {AMONG_NUMBERS} AND coalesce(state, '') = 'open'
ORDER BY number LIMIT :limit
"""
SERVED_BY = f"{SELECT_ASKS} WHERE id {AMONG_IDS} AND coalesce(state, '') = 'open'"
UNCLOSED_OF_SESSION = f"""
{SELECT_ASKS} WHERE session_number = :number AND closed_at IS NULL ORDER BY number
"""
READ_OPEN = f"""
SELECT EXISTS (
        SELECT 1 FROM hf_asks WHERE session_number = :number AND closed_at IS NULL
    ) AS has_asks, EXISTS (
        SELECT 1 FROM hf_pauses WHERE session_number = :number
            AND state IN ('waiting', 'ready', 'resumed')
    ) AS has_pause, EXISTS (
        SELECT 1 FROM hf_asks WHERE {SERVED} AND coalesce(state, '') = 'open'
    ) AS is_serving
"""  # noqa: S608
# With the bare column, SQLite would scan all waiting pauses.
CANCEL_PAUSES = f"""
UPDATE hf_pauses SET closed_at = :now,
    state = CASE WHEN state = 'waiting' THEN 'cancelled' ELSE 'closed' END
WHERE session_number {AMONG_NUMBERS}
    AND coalesce(state, '') IN ('waiting', 'ready', 'resumed')
"""  # noqa: S608
REMOVALS = (
    f"""
    DELETE FROM hf_asks WHERE number IN (
        SELECT number FROM hf_asks WHERE session_number {AMONG_NUMBERS} LIMIT :limit
    ) RETURNING number
    """,  # noqa: S608
    f"""
    DELETE FROM hf_asks WHERE session_number IS NULL AND id {AMONG_IDS} RETURNING number
    """,  # noqa: S608
    f"""
    DELETE FROM hf_pauses WHERE number IN (
        SELECT number FROM hf_pauses WHERE session_number {AMONG_NUMBERS} LIMIT :limit
    ) RETURNING number
    """,  # noqa: S608
    f"""
    DELETE FROM hf_artifacts WHERE number IN (
        SELECT number FROM hf_artifacts WHERE session_number {AMONG_NUMBERS} LIMIT :limit
    ) RETURNING number
    """,  # noqa: S608
)
FIND_OLD = """
SELECT number, root_id, {session_id} AS session_id FROM {table}
WHERE closed_at IS NOT NULL AND closed_at < :now - :age_ms ORDER BY closed_at, number LIMIT :limit
"""
REMOVE_OLD = """
DELETE FROM {table} WHERE number = :number AND closed_at < :now - :age_ms RETURNING number
"""
COUNT_OPEN = """
SELECT (SELECT count(*) FROM hf_asks WHERE state = 'open') AS asks,
    (SELECT count(*) FROM hf_pauses WHERE state = 'waiting') AS pauses,
    (SELECT count(*) FROM hf_asks WHERE state = 'open' AND deadline_at IS NOT NULL
        AND deadline_at <= :now - :late_ms) AS overdue,
    (SELECT count(*) FROM hf_outbox WHERE due_at <= :now - :late_ms) AS unsent
"""
# A request is removed with its call; other messages expire if they are never confirmed.
REMOVE_OLD_MESSAGES = """
DELETE FROM hf_outbox WHERE number IN (
    SELECT number FROM hf_outbox WHERE created_at < :now - :age_ms AND kind <> 'request'
    ORDER BY created_at LIMIT :limit
) RETURNING number
"""
TABLES = {"asks": ("hf_asks", "coalesce(session_id, id)"), "pauses": ("hf_pauses", "session_id")}


class PeersNoun(Noun):
    """Peer calls and pauses: they are cancelled, ended, rewound and deleted with their session."""

    portable = PeersPortable()
    any_record = "SELECT 1 AS found FROM hf_asks LIMIT 1"
    due = NEXT_DUE
    item_types = frozenset({REQUEST, RESUME})

    def cancel(self, runtime: Runtime, sessions: Sequence[SessionRef], limit: int) -> Op[int]:
        """Cancel the calls and pauses of sessions, and answer the calls that they serve."""
        here = {"numbers": numbers_of(sessions)}
        found = yield from rows(OPEN_OF_SESSIONS, **here, limit=limit)
        for ask in found:
            yield from settle(runtime, ask, "cancelled", WITH_ASKER)
        if len(found) < limit:
            yield Deferred([Query(CANCEL_PAUSES, here), Query(CLOSE_ANSWERED, here)])
            yield from _answer_cancelled(runtime, sessions)
        return len(found)

    def ended(self, runtime: Runtime, session: SessionRef, status: str) -> Op[None]:
        """Cancel what the session still waited for, and answer the call that it served."""
        found = yield from _abandon(runtime, session)
        if found["is_serving"]:
            answered = "cancelled" if status == "cancelled" else "error"
            yield from answer_served(runtime, session, answered, UNANSWERED)

    def turn_saved(self, runtime: Runtime, session: SessionRef) -> Op[None]:
        """Close the pause from which the session was resumed; the item that resumed it goes on."""
        for pause in (yield from rows(OPEN_PAUSE, session_number=session.number)):
            if pause["state"] == "resumed":
                yield from close(runtime, pause, item_id=resumption_id(pause))

    def rewind(
        self, runtime: Runtime, session: SessionRef, version: int, keeping: str | None
    ) -> Op[None]:
        """Cancel the calls and the pause of the abandoned epoch; a waiting session is active."""
        yield from abandon(session.number, version)
        found = yield from _abandon(runtime, session, item_id=keeping, fences=True)
        if not found["has_pause"]:
            return
        row = yield from one(LOCK_SESSION, number=session.number)
        if row is not None and row["status"] == "waiting":
            place = Place(session.id, session.number, session.root_id, None)
            change = released("active", raises_fence=True)
            told = {"reason": "rewound"}
            yield from record_status(runtime, place, "waiting", "active", row, change, **told)

    def remove(self, runtime: Runtime, sessions: Sequence[SessionRef], limit: int) -> Op[int]:
        """Remove the calls, pauses and artifacts of sessions."""
        ids = given(each.id for each in sessions)
        here = {"numbers": numbers_of(sessions), "ids": ids, "limit": limit}
        removed = yield from batch(*(Query(statement, here) for statement in REMOVALS))
        return max(map(len, removed))

    def item_looks(self, item: EndedItem) -> list[Query]:
        """Return the queries for the session, its pause and the call that it serves."""
        return following(item)

    def item_ended(
        self,
        runtime: Runtime,
        item: EndedItem,
        looked: Sequence[list[Row]],
        driving_fence: int | None,
    ) -> Op[bool]:
        """Answer the call that the item's session serves, and end the session."""
        return (yield from follow_item(runtime, self, item, looked, driving_fence))

    def sweep(self, runtime: Runtime, limit: int) -> Flow[Swept]:
        """Time out calls whose deadline has passed, oldest first, one tree at a time."""
        found, due_ms = yield from perform(find_due, runtime, limit)
        count = 0
        for rows_of_tree in by_tree(found):
            try:
                count += yield from perform(expire, runtime, rows_of_tree)
            except StoreBusy:
                # The tree has been locked for long; the other trees should not wait for it.
                continue
        if found:
            _, due_ms = yield from perform(find_due, runtime, 1)
        return Swept(timed_out=count, has_more=len(found) == limit, next_due_ms=due_ms)

    def prune(self, runtime: Runtime, retention: Retention) -> Flow[Pruned]:
        """Remove closed calls and pauses that are old."""
        if retention.session is not None:
            return Pruned()
        counts: Counter[str] = Counter()
        for name in TABLES:
            while found := (yield from perform(find_old, runtime, name, retention.key_ms)):
                removed = 0
                for some in by_tree(found):
                    removed += yield from perform(remove_old, runtime, name, some, retention.key_ms)
                if not removed:
                    break
                counts[name] += removed
        while removed := (yield from perform(remove_old_messages, runtime, retention.key_ms)):
            counts["messages"] += removed
        return Pruned(others=counts)

    def checks(self) -> dict[str, Callable[[], Op[list[Finding]]]]:
        """Check for calls past their deadline and for messages that nobody sends."""
        return {"peers": check}


def _abandon(
    runtime: Runtime, session: SessionRef, *, item_id: str | None = None, fences: bool = False
) -> Op[Row]:
    """Cancel a session's open calls and their peers, and close its pause; return its row."""
    here = {"number": session.number, "id": session.id, "root_id": session.root_id}
    [found] = yield from rows(READ_OPEN, **here)
    if found["has_pause"]:
        for pause in (yield from rows(OPEN_PAUSE, session_number=session.number)):
            yield from close(runtime, pause, item_id=item_id, fences=fences)
    if found["has_asks"]:
        asks = yield from rows(UNCLOSED_OF_SESSION, number=session.number)
        yield from leave_asks(runtime, session, asks)
    return found


def _answer_cancelled(runtime: Runtime, sessions: Sequence[SessionRef]) -> Op[None]:
    """Answer the calls that sessions serve, in the order of dispatch."""
    found = yield from rows(SERVED_BY, ids=given(each.id for each in sessions))
    refs = {each.id: each for each in sessions}
    for ask in sorted(found, key=lambda row: int(row["number"])):
        yield from answer_served(runtime, refs[ask["id"]], "cancelled", WITH_PEER)


@query
def find_old(_: Runtime, name: str, age_ms: int) -> Op[list[Row]]:
    """Return closed rows that retention may remove, oldest first."""
    table, session_id = TABLES[name]
    statement = FIND_OLD.format(table=table, session_id=session_id)
    return (yield from rows(statement, age_ms=age_ms, limit=REMOVED_PER_PASS))


@operation
def remove_old(runtime: Runtime, name: str, found: Sequence[Row], age_ms: int) -> Op[int]:
    """Remove closed rows of one tree, and record that in its feed."""
    root_id, session_id = found[0]["root_id"], found[0]["session_id"]
    has_tree = yield Lock(root_id)
    statement = REMOVE_OLD.format(table=TABLES[name][0])
    removals = (Query(statement, {"number": row["number"], "age_ms": age_ms}) for row in found)
    count = sum(map(len, (yield from batch(*removals))))
    if count and has_tree:
        data = {"what": name, "count": count}
        yield from emit(runtime.codec, root_id, session_id, "peers_pruned", data)
    return count


@operation
def remove_old_messages(_: Runtime, age_ms: int) -> Op[int]:
    """Remove messages that the other end has not confirmed for a long time."""
    return len((yield from rows(REMOVE_OLD_MESSAGES, age_ms=age_ms, limit=REMOVED_PER_PASS)))


def check() -> Op[list[Finding]]:
    """Check for calls whose deadline passed a while ago, and for messages overdue as long."""
    [row] = yield from rows(COUNT_OPEN, late_ms=OVERDUE_MS)
    if row["overdue"]:
        message = f"{plural(row['overdue'], 'peer call')} past the deadline: no worker sweeps."
        advice = "Start a worker of the asking agent; it times them out."
        return [Finding("peers", "warning", message, advice)]
    if row["unsent"]:
        message = (
            f"{plural(row['unsent'], 'message')} to peers due for a minute: no process sends them."
        )
        advice = "Start an instance of the asking agent, or a mesh, with its transport."
        return [Finding("peers", "warning", message, advice)]
    calls, pauses = plural(row["asks"], "open peer call"), plural(row["pauses"], "waiting pause")
    return [Finding("peers", "ok", f"{calls}, {pauses}.")]
