"""Replies in the life of a store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from ..formatting import plural
from ..kernel.flow import Flow, perform
from ..kernel.nouns import Noun, Retention
from ..kernel.operation import Op, Query, Runtime, batch, one, operation, query, rows
from ..kernel.sql import among, given
from ..records import Finding, Pruned, SessionRef, Swept

KEPT_MS = 24 * 3600 * 1000
REMOVED_PER_PASS = 500

OF_SESSIONS = f"session_id {among('session_ids')}"
REMOVE_REPLIES = f"""
DELETE FROM hf_replies WHERE (scope, key) IN (
    SELECT r.scope, r.key FROM hf_replies r WHERE r.key <> '' AND r.{OF_SESSIONS} LIMIT :limit
) RETURNING key
"""  # noqa: S608
# A lane keeps its number; only the outcome of its last request is removed.
EMPTY_LANES = f"""
UPDATE hf_replies SET outcome = NULL, digest = '', session_id = NULL
WHERE key = '' AND {OF_SESSIONS}
"""  # noqa: S608
IS_OLD = "created_at <= :now - :age_ms"
FIND_OLD_REPLY = f"SELECT 1 AS found FROM hf_replies WHERE {IS_OLD} LIMIT 1"  # noqa: S608
FORGET_REPLIES = f"""
DELETE FROM hf_replies WHERE (scope, key) IN (
    SELECT scope, key FROM hf_replies WHERE {IS_OLD}
    ORDER BY created_at LIMIT :limit /*pg FOR UPDATE SKIP LOCKED */
) AND {IS_OLD} RETURNING key
"""  # noqa: S608
COUNT_REPLIES = f"""
SELECT count(*) AS outcomes, count(CASE WHEN {IS_OLD} THEN 1 END) AS old FROM hf_replies
"""  # noqa: S608


class RepliesNoun(Noun):
    """Replies: kept for a day, and removed with the session that a request was about."""

    any_record = "SELECT 1 AS found FROM hf_replies WHERE outcome IS NOT NULL LIMIT 1"

    def remove(self, runtime: Runtime, sessions: Sequence[SessionRef], limit: int) -> Op[int]:
        """Remove the outcomes of requests about sessions."""
        ids = given(each.id for each in sessions)
        gone = {"session_ids": ids, "limit": limit}
        _, removed = yield from batch(Query(EMPTY_LANES, gone), Query(REMOVE_REPLIES, gone))
        return len(removed)

    def sweep(self, runtime: Runtime, limit: int) -> Flow[Swept]:
        """Remove some replies that are older than a day."""
        removed = 0
        if (yield from perform(has_old, runtime)):
            removed = yield from perform(forget, runtime, limit)
        return Swept(has_more=removed == limit)

    def prune(self, runtime: Runtime, retention: Retention) -> Flow[Pruned]:
        """Remove all replies older than a day, for stores that nothing sweeps."""
        if retention.session is not None:
            return Pruned()
        count, removed = 0, REMOVED_PER_PASS
        while removed == REMOVED_PER_PASS:
            removed = yield from perform(forget, runtime, REMOVED_PER_PASS)
            count += removed
        return Pruned(others=Counter({"remembered outcome": count} if count else {}))

    def checks(self) -> dict[str, Callable[[], Op[list[Finding]]]]:
        """Check that old replies are removed."""
        return {"replies": check_replies}


@query
def has_old(_: Runtime) -> Op[bool]:
    """Whether there is a reply to remove; checking takes no lock."""
    return (yield from one(FIND_OLD_REPLY, age_ms=KEPT_MS)) is not None


@operation
def forget(_: Runtime, limit: int) -> Op[int]:
    """Remove some old replies and return how many."""
    return len((yield from rows(FORGET_REPLIES, age_ms=KEPT_MS, limit=limit)))


def check_replies() -> Op[list[Finding]]:
    """Check whether anything sweeps the store."""
    [row] = yield from rows(COUNT_REPLIES, age_ms=2 * KEPT_MS)
    kept = f"{plural(row['outcomes'], 'outcome')} kept for repeated requests"
    advice = "Nothing sweeps this store: run a worker or a server, or `holdfast prune`."
    if row["old"]:
        return [Finding.of("replies", f"{kept}, {row['old']:,} for too long.", warning=advice)]
    return [Finding.of("replies", f"{kept}.")]
