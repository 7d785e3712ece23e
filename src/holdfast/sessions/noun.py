"""What the noun does in the life of a store."""

from __future__ import annotations

from ..kernel.nouns import Noun
from ..kernel.operation import Op, rows
from ..leases import EARLIER_BOOT

FENCE = f"""
UPDATE hf_sessions SET holder = NULL, lease_expires_at = NULL, fence = fence + 1
WHERE holder IS NOT NULL AND {EARLIER_BOOT}
RETURNING id
"""  # noqa: S608


class SessionsNoun(Noun):
    """Sessions: the rows that everything else hangs on."""

    def fence(self, holder: str, boots: str) -> Op[int]:
        """Take sessions away from earlier boots that drive them."""
        return len((yield from rows(FENCE, holder=holder, boots=boots)))
