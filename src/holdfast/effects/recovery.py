"""Recovery: a process that knows the tools verifies or parks the effects of dead owners."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..kernel.flow import Flow, perform
from ..kernel.operation import Op, one, operation, query, rows
from ..records import Effect
from .ledger import Ledger
from .statements import LOCK_EFFECT, SELECT_EFFECTS, EffectOutcome, Ticket, place_of, ticket_of
from .tools import Tool, Unknown, Verdict
from .verification import settle, verify

EFFECTS_PER_PAGE = 200
OPEN_EFFECTS = f"""{SELECT_EFFECTS} WHERE status = 'issued' AND number > :after
ORDER BY number LIMIT :limit"""


def recover(
    ledger: Ledger, holder: str, tools: Mapping[str, Tool[..., Any]]
) -> Flow[tuple[list[Effect], list[Effect]]]:
    """Settle the effects of dead owners; return what is settled, and what lacks its tool."""
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


class _Recovery:
    """The transactions of a recovery."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    @query
    def open_effects(self, after: int) -> Op[list[tuple[Effect, bool]]]:
        """Return effects under way, and whether their owner is dead."""
        found = yield from rows(OPEN_EFFECTS, after=after, limit=EFFECTS_PER_PAGE)
        return [(self.ledger.effect(row), row["wait_ms"] <= 0) for row in found]

    @operation
    def take_over(
        self, effect: Effect, tool: Tool[..., Any], holder: str
    ) -> Op[tuple[Ticket, bool] | None]:
        """Become the owner of an effect, unless another did; also: are its arguments whole."""
        yield from self.ledger.salts.look()
        row = yield from one(LOCK_EFFECT, id=effect.id)
        if row is None or row["fence"] != effect.fence:
            return None
        fence = yield from self.ledger.take_over(row, holder, tool.lease_ms)
        if fence is None:
            return None
        ticket = ticket_of({**row, "fence": fence}, (yield from place_of(row)))
        return ticket, self.ledger.is_whole(row)

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
    """Verify one effect of a dead owner, or do what its tool says of the unknown."""
    taken = yield from perform(_Recovery.take_over, recovery, effect, tool, holder)
    if taken is None:
        return None
    ticket, is_whole = taken
    verdict: Verdict = Unknown()
    if tool.verify is not None:
        given = (effect.arguments, effect.idempotency_key)
        verdict = yield from verify(tool.verify, *given, is_whole=is_whole)
    outcome = settle(recovery.ledger.statements, tool, verdict, of=effect)
    return (yield from perform(_Recovery.finish, recovery, ticket, outcome))
