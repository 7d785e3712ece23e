"""Sessions in the life of a store: the rows that everything else hangs on."""

from __future__ import annotations

from collections.abc import Sequence

from ..kernel.nouns import Noun
from ..kernel.operation import Op, Query, Runtime, batch, rows
from ..leases import EARLIER_BOOT
from ..records import SessionRef
from .portable import SessionsPortable
from .rows import DELETE_SESSION, LIST_DRIVEN, RENEW_SESSION, numbers_of

FENCE_SESSIONS = f"""
UPDATE hf_sessions SET holder = NULL, lease_expires_at = NULL, fence = fence + 1
WHERE holder IS NOT NULL AND {EARLIER_BOOT}
RETURNING id
"""  # noqa: S608


class SessionsNoun(Noun):
    """Sessions: a driven one is not deleted; its row goes when nothing is left that names it."""

    portable = SessionsPortable()
    name = "session"
    renewal = RENEW_SESSION
    fencing = FENCE_SESSIONS
    leased = "hf_sessions WHERE holder IS NOT NULL"
    leased_to = "driver"
    advice = "Start the agent again; it resumes them."

    def holds(self, runtime: Runtime, sessions: Sequence[SessionRef]) -> Op[dict[int, str]]:
        """Whoever drives a session keeps it."""
        found = yield from rows(LIST_DRIVEN, numbers=numbers_of(sessions))
        return {row["number"]: "is driven now" for row in found}

    def remove(self, runtime: Runtime, sessions: Sequence[SessionRef]) -> Op[None]:
        """Remove the rows."""
        yield from batch(*(Query(DELETE_SESSION, {"number": each.number}) for each in sessions))
