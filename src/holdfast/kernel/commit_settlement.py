"""Marks: how a COMMIT without an answer is settled, on both databases.

Every connection that writes has one row with a batch number, raised in each write transaction.
Whether a batch is there decides whether its transaction was committed. On PostgreSQL the row's
lock makes the question wait for a transaction that has marked its batch; one that has not done so
yet never can, because the question closes the row. A transaction id would not do: a server that
crashes may hand the same id out again.
"""

from __future__ import annotations

import re

from ..arguments import shown
from ..errors import InvalidArgument
from .operation import Op, Query, one, operation, rows

# A closed row has a negative number. To mark a batch there fails: the column takes no NULL.
_MARK = """
INSERT INTO hf_writers (id, batch, updated_at)
SELECT CAST(:writer_id AS TEXT), CAST(:batch AS INTEGER), :now WHERE {condition}
ON CONFLICT (id) DO UPDATE SET
    batch = CASE WHEN hf_writers.batch >= 0 THEN excluded.batch END,
    updated_at = excluded.updated_at
"""
MARK_BATCH = _MARK.format(condition="true")
MARK_BATCH_IF_DONE = _MARK.format(condition="EXISTS (SELECT 1 FROM done)")
# The answer is made final by a write: on PostgreSQL it waits for the row's lock, on SQLite it
# takes the place of what a failed COMMIT may have left in the WAL for a later recovery to find.
# It must change the row also within one millisecond: SQLite writes no page that stays the same.
SETTLE_BATCH = """
INSERT INTO hf_writers (id, batch, updated_at) VALUES (:writer_id, -1, :now)
ON CONFLICT (id) DO UPDATE SET
    batch = CASE WHEN hf_writers.batch BETWEEN 0 AND :batch - 1
        THEN -1 - hf_writers.batch ELSE hf_writers.batch END,
    updated_at = CASE
        WHEN hf_writers.updated_at < :now THEN :now ELSE hf_writers.updated_at + 1 END
RETURNING batch
"""
COUNT_WRITERS = """
SELECT count(*) AS writers,
    coalesce(sum(CASE WHEN updated_at < :now - :age_ms THEN 1 ELSE 0 END), 0) AS abandoned
FROM hf_writers
"""
READ_WRITER = "SELECT batch FROM hf_writers WHERE id = :writer_id"
FORGET_WRITERS = "DELETE FROM hf_writers WHERE updated_at < :now - :age_ms RETURNING id"
# Ids sort by the time at which their connection was made: what has to go is among the first.
FORGET_OLDEST_WRITERS = """
DELETE FROM hf_writers WHERE updated_at < :now - :age_ms
    AND id IN (SELECT id FROM hf_writers ORDER BY id LIMIT :limit)
"""
FORGET_WRITER = "DELETE FROM hf_writers WHERE id = :writer_id AND batch >= 0"
WRITER_KEPT_MS = 7 * 24 * 3600 * 1000
WRITERS_LOOKED_AT = 100
_COMMIT_ID = re.compile(r"([\w-]{1,64}):([0-9]{1,18})", re.ASCII)


def forget_oldest() -> Query:
    """Return what a new writer does: it removes the oldest that have not written for a week."""
    return Query(FORGET_OLDEST_WRITERS, {"age_ms": WRITER_KEPT_MS, "limit": WRITERS_LOOKED_AT})


def commit_id(writer_id: str, batch: int) -> str:
    """Return the id by which a commit can be asked for later."""
    return f"{writer_id}:{batch}"


def is_there(batch: int, found: int) -> bool:
    """Tell from a writer's row, open or closed, whether a batch was committed."""
    return (found if found >= 0 else -1 - found) >= batch


def parse_commit_id(id: str) -> tuple[str, int]:
    """Return the writer and the batch that an id names."""
    parts = _COMMIT_ID.fullmatch(id) if isinstance(id, str) else None
    if parts is None:
        raise InvalidArgument(
            f"{shown(id)} is not the id of a commit; take it from CommitUnknown.id"
        )
    return parts[1], int(parts[2])


class MarkOps:
    """Asks for commits, and forgets those that nobody will ask for."""

    @operation
    def is_committed(self, writer_id: str, batch: int) -> Op[bool]:
        """Tell whether a batch was committed, for good; waits while it is still in flight."""
        row = yield from one(SETTLE_BATCH, writer_id=writer_id, batch=batch)
        return row is not None and is_there(batch, row["batch"])

    @operation
    def forget(self) -> Op[int]:
        """Forget writers that have not written for a week, and return how many."""
        return len((yield from rows(FORGET_WRITERS, age_ms=WRITER_KEPT_MS)))
