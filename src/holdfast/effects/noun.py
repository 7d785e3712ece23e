"""Effects in the life of a store: they outlive their session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..kernel.flow import Flow
from ..kernel.handle import Runtime
from ..kernel.nouns import Noun
from ..kernel.operation import Op, rows
from ..leases import EARLIER_BOOT
from ..records import Effect, SessionRef
from .ledger import Ledger
from .recovery import recover
from .rows import unlink

# Its time is over now; what its receiver may still be doing is waited for as always.
FENCE = f"""
UPDATE hf_effects SET lease_expires_at = :now, fence = fence + 1
WHERE status = 'issued' AND lease_expires_at > :now AND {EARLIER_BOOT}
RETURNING id
"""  # noqa: S608


class EffectsNoun(Noun):
    """Effects: they outlive their session for as long as retries of them may come."""

    def remove(self, runtime: Runtime, sessions: Sequence[SessionRef]) -> Op[None]:
        """Take sessions' effects apart from them; what a late retry needs stays."""
        for session in sessions:
            yield from unlink(session.number)

    def fence(self, holder: str, boots: str) -> Op[int]:
        """End the time of attempts that earlier boots run."""
        return len((yield from rows(FENCE, holder=holder, boots=boots)))

    def recover(
        self, runtime: Runtime, holder: str, tools: Mapping[str, Any]
    ) -> Flow[tuple[list[Effect], list[Effect]]]:
        """Verify or park the effects of dead owners."""
        return (yield from recover(Ledger.of(runtime), holder, tools))
