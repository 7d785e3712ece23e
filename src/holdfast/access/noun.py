"""Tokens and the audit trail in the life of a store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from ..formatting import plural
from ..kernel.flow import Flow, perform
from ..kernel.nouns import Noun, Retention
from ..kernel.operation import Op, Runtime, operation, rows
from ..records import Finding, Pruned, SessionRef
from ..sessions.rows import ALL_SESSIONS
from .audit import verify_chain
from .tokens import ALIVE

DEAD_KEPT_MS = 30 * 86_400_000
REMOVED_PER_PASS = 500

REMOVE_TOKENS = "DELETE FROM hf_tokens WHERE root_id = :root_id"
FORGET_TOKENS = """
DELETE FROM hf_tokens WHERE number IN (
    SELECT number FROM hf_tokens
    WHERE revoked_at <= :now - :age_ms OR expires_at <= :now - :age_ms
    ORDER BY number LIMIT :limit
) RETURNING number
"""
LOST_TOKENS = f"""
SELECT t.name FROM hf_tokens t WHERE t.root_id IS NOT NULL AND t.revoked_at IS NULL
    AND NOT EXISTS (SELECT 1 FROM {ALL_SESSIONS} WHERE s.id = t.root_id)
ORDER BY t.number LIMIT 10
"""  # noqa: S608
COUNT_TOKENS = f"SELECT count(*) AS alive FROM hf_tokens WHERE {ALIVE}"  # noqa: S608


class AccessNoun(Noun):
    """Tokens, which are removed with the tree of their limit, and the audit trail, which stays."""

    def remove(self, runtime: Runtime, sessions: Sequence[SessionRef], limit: int) -> Op[int]:
        """Remove the tokens of a tree whose root is deleted."""
        root_id = sessions[0].root_id
        if any(each.id == root_id for each in sessions):
            yield from rows(REMOVE_TOKENS, root_id=root_id)
        return 0

    def prune(self, runtime: Runtime, retention: Retention) -> Flow[Pruned]:
        """Remove tokens that were revoked or expired a month ago."""
        count = 0
        if retention.session is None:
            while removed := (yield from perform(forget_tokens, runtime)):
                count += removed
        return Pruned(others=Counter({"dead token": count} if count else {}))

    def checks(self) -> dict[str, Callable[[], Op[list[Finding]]]]:
        """Verify the audit trail, and look for tokens whose tree is gone."""
        return {"tokens": check_tokens, "audit": check_audit}


@operation
def forget_tokens(_: Runtime) -> Op[int]:
    """Remove some tokens that were revoked or expired long ago, and return how many."""
    bounds = {"age_ms": DEAD_KEPT_MS, "limit": REMOVED_PER_PASS}
    return len((yield from rows(FORGET_TOKENS, **bounds)))


def check_tokens() -> Op[list[Finding]]:
    """Look for tokens that are limited to a tree that does not exist."""
    if lost := [row["name"] for row in (yield from rows(LOST_TOKENS))]:
        message = f"The trees of these tokens do not exist: {', '.join(lost)}."
        advice = "Rows were changed by hand: revoke these tokens."
        return [Finding("tokens", "problem", message, advice)]
    [row] = yield from rows(COUNT_TOKENS)
    return [Finding("tokens", "ok", f"{plural(row['alive'], 'token')} can be used.")]


def check_audit() -> Op[list[Finding]]:
    """Recompute the chain of the audit trail."""
    found = yield from verify_chain()
    advice = "Rows were changed by hand: restore a backup, and find out who did it."
    if found.problems:
        message = f"The audit trail was changed: {'; '.join(found.problems)}."
        return [Finding("audit", "problem", message, advice)]
    return [Finding("audit", "ok", f"{plural(found.records, 'record')}, chained without a break.")]
