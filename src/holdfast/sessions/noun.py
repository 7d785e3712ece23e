"""Sessions in the life-cycle of a store."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..feed.retention import forget_feeds
from ..kernel.flow import Flow
from ..kernel.nouns import Noun, Retention
from ..kernel.operation import Op, Runtime, rows
from ..leases import EARLIER_BOOT
from ..records import Finding, Pruned, SessionRef
from .portable import SessionsPortable
from .retention import OPEN_TREE
from .rows import LIST_DRIVEN, RENEW_SESSION, numbers_of
from .subtree import check_unfinished

FENCE_SESSIONS = f"""
UPDATE hf_sessions SET holder = NULL, lease_expires_at = NULL, fence = fence + 1
WHERE holder IS NOT NULL AND {EARLIER_BOOT}
RETURNING id
"""  # noqa: S608


class SessionsNoun(Noun):
    """Sessions: a driven one is not deleted; `trees` removes its row, after all else of it."""

    portable = SessionsPortable()
    name = "session"
    renewal = RENEW_SESSION
    fencing = FENCE_SESSIONS
    leased = "hf_sessions WHERE holder IS NOT NULL"
    leased_to = "driver"
    advice = "Start the agent again; it resumes them."

    def holds(self, runtime: Runtime, sessions: Sequence[SessionRef]) -> Op[dict[int, str]]:
        """Refuse to delete sessions that are driven."""
        found = yield from rows(LIST_DRIVEN, numbers=numbers_of(sessions))
        return {row["number"]: "is driven now" for row in found}

    def prune(self, runtime: Runtime, retention: Retention) -> Flow[Pruned]:
        """Remove old events of trees whose sessions have all ended; only sessions know that."""
        return (yield from forget_feeds(runtime, retention, OPEN_TREE))

    def checks(self) -> dict[str, Callable[[], Op[list[Finding]]]]:
        """Look for unfinished cancellations and deletions of large trees."""
        return {"sessions": check_unfinished}
