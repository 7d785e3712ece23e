"""The worker's own transactions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..kernel.operation import Op, Row, deciding, fresh_id, query
from ..work.claims import Claim, in_order, look_for_work, not_ended
from ..work.items import Item
from ..work.transitions import COMPLETE_UNREAD, Ending, Endings


@dataclass(frozen=True, slots=True)
class Statements:
    """What a worker asks of its store."""

    endings: Endings

    @query
    def look(self, queues: Sequence[str]) -> Op[tuple[bool, float | None]]:
        """Return whether something is ready, and in how many seconds something is due."""
        return (yield from look_for_work(queues))

    @query
    def undone(self, numbers: Iterable[int]) -> Op[set[int]]:
        """Return those of some items that have not ended and wait for no person."""
        return (yield from not_ended(numbers))

    @deciding
    def turn(
        self, ended: Sequence[tuple[Item[Any], Ending]], claim: Claim | None
    ) -> Op[tuple[list[Row | None], list[Row]]]:
        """Complete items and claim the next, in one commit."""
        if claim is None and len(ended) == 1:
            return [(yield from self.endings.complete(*ended[0]))], []
        if claim is None:
            return (yield from self.endings.finish(ended, COMPLETE_UNREAD)), []
        if not ended:
            return [], (yield from claim.take())
        query = claim.query((yield from fresh_id()))
        done = self.endings.finish_and(ended, query, statement=COMPLETE_UNREAD)
        found, [taken] = yield from done
        return found, in_order(taken)
