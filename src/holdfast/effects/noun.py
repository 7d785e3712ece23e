"""The lifecycle of effects: they outlive their session, are recovered, and expire."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..codec import Codec
from ..feed import by_tree, emit
from ..formatting import plural
from ..kernel.flow import Flow, perform
from ..kernel.nouns import Noun, Retention
from ..kernel.operation import (
    Lock,
    Op,
    Query,
    Row,
    Runtime,
    batch,
    large_query,
    one,
    operation,
    query,
    rows,
)
from ..leases import EARLIER_BOOT
from ..records import Effect, Finding, Pruned, SessionRef
from ..sessions.rows import ALL_SESSIONS, AMONG_NUMBERS, numbers_of
from ..wire import travels
from .ledger import Ledger, settle, verify
from .portable import EffectsPortable
from .statements import (
    IS_ABANDONED,
    LOCK_EFFECT,
    RENEW_EFFECT,
    SELECT_EFFECTS,
    UNLINK_EFFECTS,
    EffectOutcome,
    Ticket,
    place_of,
    ticket_of,
)
from .tools import Tool, Unknown, Verdict

RECOVERED_PER_PAGE = 200
PRUNED_PER_PASS = 1_000

# The lease expires now. The request may still be in flight, so a takeover waits as usual.
FENCE_EFFECTS = f"""
UPDATE hf_effects SET lease_expires_at = :now, fence = fence + 1
WHERE status = 'issued' AND lease_expires_at > :now AND {EARLIER_BOOT}
RETURNING id
"""  # noqa: S608
# Each count reads one small partial index.
COUNT_EFFECTS = f"""
SELECT (SELECT count(*) FROM hf_effects WHERE status = 'unknown' AND undone_by IS NULL) AS unknown,
    (SELECT count(*) FROM hf_effects WHERE status = 'issued') AS issued,
    (SELECT count(*) FROM hf_effects
        WHERE status = 'issued' AND late IS NOT NULL AND NOT {IS_ABANDONED}) AS reported,
    (SELECT count(*) FROM hf_effects WHERE {IS_ABANDONED}) AS abandoned,
    (SELECT min(number) FROM hf_effects WHERE {IS_ABANDONED}) AS first_abandoned
"""  # noqa: S608
REMOVE_ORIGINS = f"DELETE FROM hf_effect_origins WHERE session_number {AMONG_NUMBERS}"  # noqa: S608
REMOVE_SESSION_SALTS = f"DELETE FROM hf_effect_sessions WHERE session_number {AMONG_NUMBERS}"  # noqa: S608
OPEN_EFFECTS = f"""{SELECT_EFFECTS} WHERE status = 'issued' AND number > :after
ORDER BY number LIMIT :limit"""

# An expired key is free, but its rows stay for a while: a key that starts over could produce an
# idempotency key that its receiver still remembers.
UNREACHABLE = """(
    (ttl_ms IS NOT NULL AND ended_at + ttl_ms <= :now AND ended_at <= :now - :key_ms)
    OR (ended_at <= :now - :effect_ms AND unlinked_at <= :now - :effect_ms)
)"""
# For the work package, which adds that no item of the chain is left.
OF_OLD_CHAINS = """ended_at <= :now - :effect_ms AND session_number IS NULL
    AND item_id IS NOT NULL AND ttl_ms IS NULL"""
# Effects that a fork can still look up stay, unless they have expired.
SETTLED_AND_UNNEEDED = """status IN ('completed', 'failed') AND (ttl_ms IS NOT NULL OR NOT EXISTS (
        SELECT 1 FROM hf_effect_origins o WHERE o.origin_number = hf_effects.session_number
    ))"""
# A page is a range of numbers, so that each effect is read once, in the order of the primary key.
LAST_OF_PAGE = """
SELECT max(number) AS number FROM (
    SELECT number FROM hf_effects WHERE number > :after ORDER BY number LIMIT :limit
) AS page
"""
FIND_OLD_EFFECTS = f"""
SELECT number, session_id,
    (SELECT s.root_id FROM {ALL_SESSIONS} WHERE s.number = session_number) AS root_id
FROM hf_effects
WHERE number > :after AND number <= :last AND {SETTLED_AND_UNNEEDED} AND {{which}}
ORDER BY number
"""  # noqa: S608
REMOVE_EFFECT = f"""
DELETE FROM hf_effects WHERE number = :number AND {SETTLED_AND_UNNEEDED} AND {{which}}
RETURNING number
"""  # noqa: S608


class EffectsNoun(Noun):
    """Effects: they outlive their session as long as late retries are possible."""

    portable = EffectsPortable()
    name = "effect"
    renewal = RENEW_EFFECT
    fencing = FENCE_EFFECTS
    any_record = "SELECT 1 AS found FROM hf_effects LIMIT 1"

    def remove(self, runtime: Runtime, sessions: Sequence[SessionRef], limit: int) -> Op[int]:
        """Unlink effects from their deleted sessions, keeping what a late retry needs."""
        given = {"numbers": numbers_of(sessions), "limit": limit}
        unlinked, *_ = yield from batch(
            Query(UNLINK_EFFECTS, given),
            Query(REMOVE_ORIGINS, given),
            Query(REMOVE_SESSION_SALTS, given),
        )
        return len(unlinked)

    def recover(
        self, runtime: Runtime, holder: str, tools: Mapping[str, Any]
    ) -> Flow[tuple[list[Effect], list[Effect]]]:
        """Verify or park the effects of dead owners."""
        return (yield from recover(Ledger.of(runtime), holder, tools))

    def prune(self, runtime: Runtime, retention: Retention) -> Flow[Pruned]:
        """Remove effects that no call can ask for again."""
        if retention.session is not None:
            return Pruned()
        return (yield from prune_effects(runtime.codec, retention))

    def checks(self) -> dict[str, Callable[[], Op[list[Finding]]]]:
        """Look for effects whose outcome is unknown."""
        return {"effects": check}


def check() -> Op[list[Finding]]:
    """Look for effects whose outcome is unknown."""
    [row] = yield from rows(COUNT_EFFECTS)
    found = []
    if row["unknown"]:
        message = f"{plural(row['unknown'], 'effect')} in doubt: identical calls raise Unresolved."
        advice = "`holdfast effects list` shows them; resolve or verify each."
        found.append(Finding("effects", "warning", message, advice))
    if row["abandoned"]:
        left = plural(row["abandoned"], "effect")
        message = f"{left} left by an owner whose lease ended before it reported an outcome."
        command = f"holdfast effects verify {row['first_abandoned']} --tools MODULE:TOOL"
        advice = (
            "Workers and agents that were given the tools verify them; or verify one with "
            f"`{command}`, or resolve it by hand."
        )
        found.append(Finding("effects", "warning", message, advice))
    if row["reported"]:
        message = (
            f"{plural(row['reported'], 'effect')} whose outcome was reported too late to count, "
            "after its session was cancelled or taken over."
        )
        advice = "`holdfast effects show` has the report; resolve it when its lease has expired."
        found.append(Finding("effects", "warning", message, advice))
    in_flight = plural(row["issued"], "effect")
    return found or [Finding("effects", "ok", f"None in doubt, {in_flight} in flight.")]


def recover(
    ledger: Ledger, holder: str, tools: Mapping[str, Tool[..., Any]]
) -> Flow[tuple[list[Effect], list[Effect]]]:
    """Settle the effects of dead owners; return those settled, and those whose tool is missing."""
    recovery = _Recovery(ledger)
    settled, left = [], []
    after = 0
    while page := (yield from perform(_Recovery.open_effects, recovery, after)):
        for effect, is_abandoned in page:
            after = effect.number
            tool = tools.get(effect.tool)
            if is_abandoned and tool is not None:
                done = yield from _recover_one(recovery, tool, effect, holder)
                settled += [] if done is None else [done]
            elif is_abandoned:
                left.append(effect)
    return settled, left


@travels
class _Recovery:
    """The transactions of a recovery."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.runtime = ledger.runtime

    def _to_wire(self) -> tuple[Ledger]:
        """Return the ledger."""
        return (self.ledger,)

    @classmethod
    def _from_wire(cls, runtime: Any, ledger: Ledger) -> _Recovery:
        """Return the recovery of a ledger."""
        return cls(ledger)

    @query
    def open_effects(self, after: int) -> Op[list[tuple[Effect, bool]]]:
        """Return effects in flight, and whether their owner is dead."""
        found = yield from rows(OPEN_EFFECTS, after=after, limit=RECOVERED_PER_PAGE)
        return [(self.ledger.effect(row), row["wait_ms"] <= 0) for row in found]

    @operation
    def take_over(
        self, effect: Effect, tool: Tool[..., Any], holder: str
    ) -> Op[tuple[Ticket, bool] | None]:
        """Return the right to settle an effect, and whether its arguments are unredacted.

        None if another process took it over first.
        """
        yield from self.ledger.salts.refresh()
        row = yield from one(LOCK_EFFECT, id=effect.id)
        if row is None or row["fence"] != effect.fence:
            return None
        fence = yield from self.ledger.take_over(row, holder, tool.lease_ms)
        if fence is None:
            return None
        ticket = ticket_of({**row, "fence": fence}, (yield from place_of(row)))
        return ticket, self.ledger.is_unredacted(row)

    @operation
    def finish(self, ticket: Ticket, outcome: EffectOutcome) -> Op[Effect | None]:
        """Record the outcome, and return the effect."""
        if not (yield from self.ledger.finishing([(ticket, outcome)]))[0]:
            return None
        row = yield from one(LOCK_EFFECT, id=ticket.id)
        return None if row is None else self.ledger.effect(row)


def _recover_one(
    recovery: _Recovery, tool: Tool[..., Any], effect: Effect, holder: str
) -> Flow[Effect | None]:
    """Verify one effect of a dead owner, or apply its tool's `on_unknown`."""
    taken = yield from perform(_Recovery.take_over, recovery, effect, tool, holder)
    if taken is None:
        return None
    ticket, is_unredacted = taken
    verdict: Verdict = Unknown()
    if tool.verify is not None:
        given = (effect.arguments, effect.idempotency_key)
        verdict = yield from verify(tool.verify, *given, is_unredacted=is_unredacted)
    outcome = settle(recovery.ledger.statements, tool, verdict, of=effect)
    return (yield from perform(_Recovery.finish, recovery, ticket, outcome))


def prune_effects(codec: Codec, retention: Retention, which: str = UNREACHABLE) -> Flow[Pruned]:
    """Remove old effects, a bounded number per transaction, and return how many.

    Effects in flight or in doubt stay, however old they are. So do all effects of a session that
    exists, or that an existing fork came from, unless they have expired.
    """
    pruning = Pruning(codec, retention, which)
    count = after = 0
    while True:
        page, last = yield from perform(Pruning.page, pruning, after)
        if last is None:
            return Pruned(effects=count)
        for rows_of_tree in by_tree(page):
            count += yield from perform(Pruning.remove, pruning, rows_of_tree)
        after = last


class Pruning:
    """The transactions that remove old effects."""

    def __init__(self, codec: Codec, retention: Retention, which: str) -> None:
        self._codec = codec
        self._find = FIND_OLD_EFFECTS.format(which=which)
        self._remove = REMOVE_EFFECT.format(which=which)
        self._ages = {"key_ms": retention.key_ms, "effect_ms": retention.effect_ms}

    @large_query
    def page(self, after: int) -> Op[tuple[list[Row], int | None]]:
        """Return which of the next effects may be removed, and the last number; None at the end."""
        row = yield from one(LAST_OF_PAGE, after=after, limit=PRUNED_PER_PASS)
        last: int | None = None if row is None else row["number"]
        if last is None:
            return [], None
        return (yield from rows(self._find, **self._ages, after=after, last=last)), last

    @operation
    def remove(self, page: Sequence[Row]) -> Op[int]:
        """Remove the effects of one tree, or of none, that are still removable; return how many."""
        tree: str | None = page[0]["root_id"]
        root_id = tree if tree is not None and (yield Lock(tree)) else None
        # Each statement checks the forks again: one may have been made since the page was read.
        answers = yield from batch(
            *(Query(self._remove, {**self._ages, "number": row["number"]}) for row in page)
        )
        removed = (row["session_id"] for row, found in zip(page, answers, strict=True) if found)
        counts = Counter(removed)
        if root_id is not None:
            for session_id, count in counts.items():
                data = {"count": count}
                yield from emit(self._codec, root_id, session_id, "effects_pruned", data)
        return counts.total()
