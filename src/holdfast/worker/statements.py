"""The worker's own transactions."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..kernel.operation import Op, Query, Row, batch, deciding, fresh_id, one, operation, query
from ..work.claiming import Claim, heartbeat, in_order
from ..work.finishing import COMPLETE_UNREAD, Ending, Endings
from ..work.items import Item

READY = "EXISTS (SELECT 1 FROM hf_work WHERE state = 'pending' AND queue = :queue{index})"
LOOK = """
SELECT {ready} AS is_ready, :now AS now,
    (SELECT min(available_at) FROM hf_work WHERE state = 'scheduled') AS due_at
"""


UNDONE = """
SELECT number FROM hf_work
WHERE number = :number AND state IN ('scheduled', 'pending', 'in_progress')
"""


@dataclass(frozen=True, slots=True)
class Statements:
    """What a worker asks of its store."""

    endings: Endings

    @query
    def look(self, queues: Sequence[str]) -> Op[tuple[bool, float | None]]:
        """Return whether something is ready, and in how many seconds something is due."""
        named = {f"queue{index}": name for index, name in enumerate(queues)}
        found = yield from one(_look_at(len(queues)), **named)
        assert found is not None
        due_at = found["due_at"]
        return bool(found["is_ready"]), None if due_at is None else (due_at - found["now"]) / 1000

    @query
    def undone(self, numbers: Iterable[int]) -> Op[set[int]]:
        """Return those of some items that have not ended and wait for no person."""
        found = yield from batch(*(Query(UNDONE, {"number": number}) for number in numbers))
        return {row["number"] for answer in found for row in answer}

    @operation
    def renew(self, held: Mapping[int, int], lease_seconds: float) -> Op[dict[int, Row]]:
        """Prolong all leases in one statement; those missing from the answer are lost."""
        return (yield from heartbeat(held, lease_seconds))

    @deciding
    def turn(
        self, ended: Sequence[tuple[Item, Ending]], claim: Claim | None
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


@functools.cache
def _look_at(count: int) -> str:
    return LOOK.format(ready=" OR ".join(READY.format(index=index) for index in range(count)))
