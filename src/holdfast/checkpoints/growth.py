"""Which sessions grow: how many checkpoints each has, and since when."""

from __future__ import annotations

from dataclasses import dataclass

from ..kernel.operation import Op, rows
from ..sessions.rows import ANY

GROWTH = f"""
SELECT s.id AS session_id, grown.checkpoints, grown.newest, grown.first_at, grown.last_at
FROM (
    SELECT key / 4294967296 AS number, count(*) AS checkpoints, max(key % 4294967296) AS newest,
        min(created_at) AS first_at, max(created_at) AS last_at
    FROM hf_checkpoints GROUP BY key / 4294967296
    ORDER BY checkpoints DESC, number LIMIT :limit
) AS grown
JOIN {ANY} ON s.number = grown.number
ORDER BY grown.checkpoints DESC, s.number
"""  # noqa: S608


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """How many checkpoints a session has, and since when."""

    session_id: str
    checkpoints: int
    newest: int
    first_at: int
    last_at: int


def growth(limit: int) -> Op[list[Growth]]:
    """Return the sessions with the most checkpoints."""
    return [Growth(**row) for row in (yield from rows(GROWTH, limit=limit))]
