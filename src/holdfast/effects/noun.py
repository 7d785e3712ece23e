"""Effects in the life of a store: they outlive their session."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..formatting import plural
from ..kernel.flow import Flow
from ..kernel.nouns import Noun, Retention
from ..kernel.operation import Op, Query, Runtime, batch, rows
from ..leases import EARLIER_BOOT
from ..records import Effect, Finding, Pruned, SessionRef
from ..sessions.rows import GIVEN_NUMBERS, numbers_of
from .ledger import Ledger
from .portable import EffectsPortable
from .recovery import recover
from .retention import forget_effects
from .statements import IS_ABANDONED, RENEW_EFFECT, UNLINK_EFFECTS

# Its lease expires now; its request may still be under way, so a takeover waits as always.
FENCE_EFFECTS = f"""
UPDATE hf_effects SET lease_expires_at = :now, fence = fence + 1
WHERE status = 'issued' AND lease_expires_at > :now AND {EARLIER_BOOT}
RETURNING id
"""  # noqa: S608
# The partial indexes of open and unknown effects hold no others.
COUNT_EFFECTS = f"""
SELECT (SELECT count(*) FROM hf_effects WHERE status = 'unknown') AS unknown,
    (SELECT count(*) FROM hf_effects WHERE status = 'issued') AS issued,
    (SELECT count(*) FROM hf_effects WHERE {IS_ABANDONED}) AS abandoned
"""  # noqa: S608
FORGET_ORIGINS = f"DELETE FROM hf_effect_origins WHERE session_number IN {GIVEN_NUMBERS}"  # noqa: S608
FORGET_SESSION_SALTS = f"DELETE FROM hf_effect_sessions WHERE session_number IN {GIVEN_NUMBERS}"  # noqa: S608


class EffectsNoun(Noun):
    """Effects: they outlive their session as long as late retries are possible."""

    portable = EffectsPortable()
    name = "effect"
    renewal = RENEW_EFFECT
    fencing = FENCE_EFFECTS
    any_record = "SELECT 1 AS found FROM hf_effects LIMIT 1"

    def remove(self, runtime: Runtime, sessions: Sequence[SessionRef], limit: int) -> Op[int]:
        """Unlink sessions' effects; what a late retry needs stays."""
        given = {"numbers": numbers_of(sessions), "limit": limit}
        unlinked, *_ = yield from batch(
            Query(UNLINK_EFFECTS, given),
            Query(FORGET_ORIGINS, given),
            Query(FORGET_SESSION_SALTS, given),
        )
        return len(unlinked)

    def recover(
        self, runtime: Runtime, holder: str, tools: Mapping[str, Any]
    ) -> Flow[tuple[list[Effect], list[Effect]]]:
        """Verify or park the effects of dead owners."""
        return (yield from recover(Ledger.of(runtime), holder, tools))

    def prune(self, runtime: Runtime, retention: Retention) -> Flow[Pruned]:
        """Forget effects that no call can ask for again."""
        if retention.session is not None:
            return Pruned()
        return (yield from forget_effects(runtime.codec, retention))

    def checks(self) -> dict[str, Callable[[], Op[list[Finding]]]]:
        """Look for effects whose outcome is unknown."""
        return {"effects": check}


def check() -> Op[list[Finding]]:
    """Look for effects whose outcome is unknown."""
    [row] = yield from rows(COUNT_EFFECTS)
    found = []
    if row["unknown"]:
        message = f"{plural(row['unknown'], 'effect')} in doubt: equal calls raise Unresolved."
        advice = "`holdfast effects list` shows them; resolve or verify each."
        found.append(Finding("effects", "warning", message, advice))
    if row["abandoned"]:
        message = f"{plural(row['abandoned'], 'effect')} left behind by an owner that is dead."
        advice = "Start what owns the tools; it verifies them. Or resolve each by hand."
        found.append(Finding("effects", "warning", message, advice))
    under_way = plural(row["issued"], "effect")
    return found or [Finding("effects", "ok", f"None in doubt, {under_way} under way.")]
