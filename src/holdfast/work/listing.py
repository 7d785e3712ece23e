"""Lists of items, each along an index of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..arguments import require_one_of, require_whole
from ..sessions.rows import ANY
from .items import COLUMNS, STATES, WORK_STATUSES, WorkStatus

SELECT = f"SELECT {COLUMNS} FROM hf_work"  # noqa: S608
LIST = f"{SELECT} WHERE number < :before"
DEAD = f"""
SELECT {COLUMNS} FROM hf_work d WHERE state = 'failed' AND number < :before
    AND NOT EXISTS (SELECT 1 FROM hf_work n WHERE n.redriven_from = d.id)
ORDER BY number DESC LIMIT :limit
"""  # noqa: S608


def statuses_of(status: WorkStatus | Sequence[WorkStatus]) -> tuple[WorkStatus, ...]:
    """Return the statuses that were asked for, one or several."""
    given: tuple[Any, ...] = tuple(status) if isinstance(status, list | tuple) else (status,)
    for each in given or (None,):
        require_one_of("status", each, WORK_STATUSES)
    return given


def page_of(given: Mapping[str, Any], statuses: Sequence[WorkStatus]) -> str:
    """Return the query of a listing; only what is given stands in it, so each has its index."""
    conditions = "".join(f" AND {name} = :{name}" for name in given)
    if "session_id" in given:
        # The index is by number, and a session's id is never given twice.
        found = f"(SELECT s.number FROM {ANY} WHERE s.id = :session_id)"  # noqa: S608
        conditions += f" AND session_number = {found}"
    states = [state for status in dict.fromkeys(statuses) for state in STATES[status]]
    if "holder" in given and not states:
        states = ["in_progress"]
    if not states:
        return f"{LIST}{conditions} ORDER BY number DESC LIMIT :limit"
    # One branch per state, so that each is read along its own index.
    branches = " UNION ALL ".join(
        f"SELECT * FROM ({LIST}{conditions} AND state = '{state}' "  # noqa: S608
        f"ORDER BY number DESC LIMIT :limit) AS {state}_items"
        for state in states
    )
    return f"SELECT * FROM ({branches}) AS found ORDER BY number DESC LIMIT :limit"  # noqa: S608


def before_of(before: int | None) -> int:
    """Return the number below which a list begins; None is the newest."""
    return 2**62 if before is None else require_whole("before", before, 0, 2**62)
