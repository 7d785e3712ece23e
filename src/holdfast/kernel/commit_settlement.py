"""Marks: how the outcome of a COMMIT without an answer is determined, on both databases.

Every writing connection has one row with a batch number, incremented in each write transaction: a
transaction was committed if its number is there. On PostgreSQL the row's lock makes the question
wait for a transaction that has marked its batch; one that has not can never do so, because the
question closes the row. Transaction ids would not do: a server may reuse one after a crash.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..arguments import shown
from ..errors import InvalidArgument
from ..wire import travels
from .flow import Flow, perform
from .operation import Op, Query, one, operation, rows, whole_query
from .sql import among, given

# A closed row has a negative number. Marking a batch there fails on the column's NOT NULL.
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
# overwrites what a failed COMMIT may have left in the WAL for a later recovery to find. It must
# change the row even within one millisecond: SQLite does not write unchanged pages.
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
LIST_OLD_WRITERS = """
SELECT id FROM hf_writers WHERE id > :after AND updated_at < :now - :age_ms
ORDER BY id LIMIT :limit
"""
FORGET_WRITERS = f"""
DELETE FROM hf_writers WHERE id {among("ids")} AND updated_at < :now - :age_ms
RETURNING id
"""  # noqa: S608
# Ids sort by the time their connection was opened, so the oldest writers come first.
FORGET_OLDEST_WRITERS = """
DELETE FROM hf_writers WHERE updated_at < :now - :age_ms
    AND id IN (SELECT id FROM hf_writers ORDER BY id LIMIT :limit)
"""
FORGET_WRITER = "DELETE FROM hf_writers WHERE id = :writer_id AND batch >= 0"
WRITER_KEPT_MS = 7 * 24 * 3600 * 1000
WRITERS_LOOKED_AT = 100
WRITERS_PER_PASS = 1_000
_COMMIT_ID = re.compile(r"([\w-]{1,64}):([0-9]{1,18})", re.ASCII)


def forget_oldest() -> Query:
    """Return the statement with which a new writer removes old ones, idle for a week."""
    return Query(FORGET_OLDEST_WRITERS, {"age_ms": WRITER_KEPT_MS, "limit": WRITERS_LOOKED_AT})


def commit_id(writer_id: str, batch: int) -> str:
    """Return the id with which `store.settle` can be asked about a commit."""
    return f"{writer_id}:{batch}"


def is_there(batch: int, found: int) -> bool:
    """Whether a batch was committed, given the number in its writer's row, open or closed."""
    return (found if found >= 0 else -1 - found) >= batch


def parse_commit_id(id: str) -> tuple[str, int]:
    """Return the writer and the batch of a commit id."""
    parts = _COMMIT_ID.fullmatch(id) if isinstance(id, str) else None
    if parts is None:
        raise InvalidArgument(f"{shown(id)} is not a commit id; take it from CommitUnknown.id")
    return parts[1], int(parts[2])


@travels
class MarkOps:
    """Settles commits."""

    def _to_wire(self) -> tuple[()]:
        """Return nothing."""
        return ()

    @classmethod
    def _from_wire(cls, runtime: object) -> MarkOps:
        """Return those of the other end."""
        return cls()

    @operation
    def is_committed(self, writer_id: str, batch: int) -> Op[bool]:
        """Whether a batch was committed; the answer is final. Waits while it is in flight."""
        row = yield from one(SETTLE_BATCH, writer_id=writer_id, batch=batch)
        return row is not None and is_there(batch, row["batch"])


def forget_writers() -> Flow[int]:
    """Forget writers that have not written for a week, some at a time; return how many."""
    count, after = 0, ""
    while ids := (yield from perform(_list_old, None, after)):
        count += yield from perform(_forget, None, ids)
        after = ids[-1]
    return count


@whole_query
def _list_old(_: object, after: str) -> Op[list[str]]:
    wanted = {"after": after, "age_ms": WRITER_KEPT_MS, "limit": WRITERS_PER_PASS}
    return [row["id"] for row in (yield from rows(LIST_OLD_WRITERS, **wanted))]


@operation
def _forget(_: object, ids: Sequence[str]) -> Op[int]:
    return len((yield from rows(FORGET_WRITERS, ids=given(ids), age_ms=WRITER_KEPT_MS)))
