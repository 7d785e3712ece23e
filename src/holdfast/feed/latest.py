"""The newest events of all trees, for people who look back from now."""

from __future__ import annotations

from ..arguments import require_limit, require_text, require_whole
from ..errors import InvalidArgument
from ..kernel.operation import C, Handle, Op, query, rows
from ..kernel.url import PostgresTarget
from ..records import Event
from .events import event_of
from .follow_all import AllTreesReader

EVENTS_MAX = 1_000
LATEST = """
SELECT root_id, position, session_id, kind, data, created_at FROM hf_events {where}
ORDER BY {order} LIMIT :limit
"""
BEFORE = """
WHERE ({columns}) < (
    SELECT {columns} FROM hf_events WHERE root_id = :root_id AND position = :position
)
"""


def _statements(*columns: str) -> tuple[str, str]:
    """Return what reads the newest events, and what reads those before one."""
    order = ", ".join(f"{each} DESC" for each in columns)
    before = BEFORE.format(columns=", ".join(columns))
    return LATEST.format(where="", order=order), LATEST.format(where=before, order=order)


# SQLite numbers events in commit order; PostgreSQL has their transactions, whose order is close.
ON_SQLITE = _statements("number")
ON_POSTGRES = _statements("transaction_id", "root_id", "position")


class StoreEvents(Handle[C]):
    """The events of all trees, looked at from now."""

    @query
    def latest_events(
        self, *, before: tuple[str, int] | None = None, limit: int = 100
    ) -> Op[list[Event]]:
        """Return events of all trees, newest first, in about the order of their commits.

        `before` is the `root_id` and the `position` of the last one seen.
        """
        require_limit(limit, EVENTS_MAX)
        is_postgres = isinstance(self.runtime.target, PostgresTarget)
        newest, older = ON_POSTGRES if is_postgres else ON_SQLITE
        if before is None:
            found = yield from rows(newest, limit=limit)
        else:
            found = yield from rows(older, **place_of(before), limit=limit)
        return [event_of(self.runtime.codec, row, Event) for row in found]

    @query
    def last_cursor(self) -> Op[str]:
        """Return a cursor for `follow_all` that leaves out what is committed already.

        On PostgreSQL it may begin some events earlier, with the oldest transaction under way.
        """
        return (yield from AllTreesReader.end(AllTreesReader(self.runtime)))


def place_of(before: object) -> dict[str, object]:
    """Return the tree and the position that a listing of all trees goes on before."""
    if not isinstance(before, tuple | list) or len(before) != 2:
        raise InvalidArgument("before must be the root_id and the number of the last one seen")
    root_id, position = before
    return {
        "root_id": require_text("root_id", root_id),
        "position": require_whole("position", position, 1),
    }
