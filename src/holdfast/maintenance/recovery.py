"""Recovery: what everything that starts does first, always in the same order.

Opening the store has migrated it. Then: fence what an earlier boot of this instance still holds,
settle effects whose owner is dead, expire what is due, sweep leases. Claiming comes after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..arguments import require_text, require_text_or_none
from ..effects import Landed, Ledger, Unknown
from ..effects.doubt import ask_about, doubt_of, landed, unknown_outcome
from ..effects.ops import ROOT
from ..effects.rows import BY_ID, SELECT, TAKE_OVER, Outcome, Ticket, ticket_of, unless_spent
from ..effects.tools import Tool, by_name
from ..kernel.flow import Flow, flow, perform
from ..kernel.handle import C, Handle
from ..kernel.operation import Op, Query, batch, one, operation, query, rows
from ..leases import default_holder
from ..records import Effect
from ..session import BOOT_MARK
from ..sessions.access import Place
from ..work.sweeping import SWEPT_PER_PASS, Swept, Watchdog, sweep

EFFECTS_PER_PAGE = 200
FENCE_SESSIONS = """
UPDATE hf_sessions SET holder = NULL, lease_expires_at = NULL, fence = fence + 1
WHERE holder IS NOT NULL AND holder <> :holder
    AND substr(holder, 1, length(CAST(:boots AS TEXT))) = :boots
RETURNING id
"""
# Its time is over now; what its receiver may still be doing is waited for as always.
FENCE_EFFECTS = """
UPDATE hf_effects SET lease_expires_at = :now, fence = fence + 1
WHERE status = 'issued' AND lease_expires_at > :now AND holder <> :holder
    AND substr(holder, 1, length(CAST(:boots AS TEXT))) = :boots
RETURNING id
"""
FENCE_WORK = """
UPDATE hf_work SET lease_expires_at = :now, fence = fence + 1
WHERE state = 'in_progress' AND lease_expires_at > :now AND holder <> :holder
    AND substr(holder, 1, length(CAST(:boots AS TEXT))) = :boots
RETURNING id
"""
OPEN = f"""{SELECT} WHERE status = 'issued' AND number > :after
ORDER BY number LIMIT :limit"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What recovery did.

    `fenced` counts leases of earlier boots of this instance. `settled` are effects of dead
    owners whose outcome is known now, or that are parked; `left` are those whose tool was not
    given, for a process that knows it.
    """

    fenced: int
    settled: tuple[Effect, ...]
    left: tuple[Effect, ...]
    swept: Swept


class RecoveryOps(Handle[C]):
    """What a store does when a process starts."""

    @flow
    def recover(
        self, holder: str | None = None, *, instance: str | None = None, tools: object = None
    ) -> Flow[Recovered]:
        """Bring the store in order after a crash, as everything that starts does first.

        With `instance`, a name that one process at a time has, what an earlier boot of it holds
        is fenced at once; without it leases run out by themselves. Effects whose owner is dead
        are verified with the hooks of `tools`, or parked.
        """
        known = by_name(tools)
        require_text_or_none("instance", instance)
        if holder is not None:
            require_text("holder", holder)
        recovery = _Recovery(Ledger.of(self.runtime))
        name = default_holder() if holder is None else holder
        fenced = 0
        if instance is not None:
            fenced = yield from perform(_Recovery.fence, recovery, name, instance)
        settled, left = [], []
        after = 0
        while page := (yield from perform(_Recovery.abandoned, recovery, after)):
            for effect, is_abandoned in page:
                after = effect.number
                if is_abandoned and effect.tool in known:
                    done = yield from _settle(recovery, known[effect.tool], effect, name)
                    settled += [] if done is None else [done]
                elif is_abandoned:
                    left.append(effect)
        swept = yield from sweep(Watchdog(self.runtime), SWEPT_PER_PASS)
        return Recovered(fenced=fenced, settled=tuple(settled), left=tuple(left), swept=swept)


class _Recovery:
    """The transactions of a recovery."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    @operation
    def fence(self, holder: str, instance: str) -> Op[int]:
        """Take away every lease that an earlier boot of this instance holds."""
        boots = f"{instance}{BOOT_MARK}"
        own = {"holder": f"{boots}{holder}", "boots": boots}
        found = yield from batch(
            *(Query(fence, own) for fence in (FENCE_SESSIONS, FENCE_EFFECTS, FENCE_WORK))
        )
        return sum(map(len, found))

    @query
    def abandoned(self, after: int) -> Op[list[tuple[Effect, bool]]]:
        """Return effects under way, and whether their owner is dead."""
        found = yield from rows(OPEN, after=after, limit=EFFECTS_PER_PAGE)
        return [(self.ledger.effect(row), bool(row["is_abandoned"])) for row in found]

    @operation
    def take_over(
        self, effect: Effect, tool: Tool[..., Any], holder: str
    ) -> Op[tuple[Ticket, bool] | None]:
        """Become the owner of an effect whose owner is dead; None if another did first.

        The flag says whether its stored arguments are whole.
        """
        yield from self.ledger.salts.look()
        given = {"number": effect.number, "fence": effect.fence}
        taken = yield from one(TAKE_OVER, **given, holder=holder, lease_ms=tool.lease_ms)
        row = yield from one(BY_ID, id=effect.id)
        if taken is None or row is None:
            return None
        session = None
        if row["session_number"] is not None:
            session = yield from one(ROOT, number=row["session_number"])
        place = None
        if session is not None:
            place = Place(session["id"], session["number"], session["root_id"], None)
        return ticket_of(row, place), self.ledger.is_whole(row)

    @operation
    def finish(self, ticket: Ticket, outcome: Outcome) -> Op[Effect | None]:
        """Record what became of an effect, and return it."""
        if not (yield from self.ledger.finishing(ticket, outcome)):
            return None
        row = yield from one(BY_ID, id=ticket.id)
        return None if row is None else self.ledger.effect(row)


def _settle(
    recovery: _Recovery, tool: Tool[..., Any], effect: Effect, holder: str
) -> Flow[Effect | None]:
    """Verify one effect of a dead owner, or do what its tool says of the unknown."""
    taken = yield from perform(_Recovery.take_over, recovery, effect, tool, holder)
    if taken is None:
        return None
    ticket, is_whole = taken
    outcome = unknown_outcome("retry" if doubt_of(tool) == "retry" else tool.on_unknown, None, "")
    if tool.verify is not None:
        verdict = yield from ask_about(tool, effect, is_whole=is_whole)
        if isinstance(verdict, Landed):
            outcome = landed(recovery.ledger, verdict.result)
        elif isinstance(verdict, Unknown):
            outcome = unknown_outcome(tool.on_unknown, None, verdict.why)
        else:
            outcome = Outcome("failed", "not_landed")
    outcome = unless_spent(outcome, effect.attempt, tool.max_attempts)
    return (yield from perform(_Recovery.finish, recovery, ticket, outcome))
