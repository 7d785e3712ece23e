"""Effects whose owner is dead: verified or parked when a process that knows the tool starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..kernel.flow import Flow, perform
from ..kernel.operation import Op, one, operation, query, rows
from ..records import Effect
from ..sessions.access import Place
from ..sessions.rows import place_of_number
from .doubt import ask_about, doubt_of, landed, unknown_outcome
from .ledger import Ledger
from .rows import BY_ID, SELECT, TAKE_OVER, Outcome, Ticket, ticket_of, unless_spent
from .tools import Landed, Tool, Unknown

EFFECTS_PER_PAGE = 200
OPEN = f"""{SELECT} WHERE status = 'issued' AND number > :after
ORDER BY number LIMIT :limit"""


def recover(
    ledger: Ledger, holder: str, tools: Mapping[str, Tool[..., Any]]
) -> Flow[tuple[list[Effect], list[Effect]]]:
    """Settle the effects of dead owners; return what is settled, and what lacks its tool."""
    recovery = _Recovery(ledger)
    settled, left = [], []
    after = 0
    while page := (yield from perform(_Recovery.abandoned, recovery, after)):
        for effect, is_abandoned in page:
            after = effect.number
            if is_abandoned and effect.tool in tools:
                done = yield from _settle(recovery, tools[effect.tool], effect, holder)
                settled += [] if done is None else [done]
            elif is_abandoned:
                left.append(effect)
    return settled, left


class _Recovery:
    """The transactions of a recovery."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

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
        session = yield from place_of_number(row["session_number"])
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
