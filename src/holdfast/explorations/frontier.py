"""The frontier of an exploration with several workers.

What is to be tried is a row; a work item names the rows of a batch, and whoever holds the item
tries them. Each worker also holds an item that says that it takes part. A step and the removal of
its row are one commit, so what a worker leaves undone is what the next holder of the item finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..dataclass import dataclass
from ..kernel.operation import C, FreshId, Op, Query, batch, one, operation, query, rows
from ..kernel.sql import among, given
from ..leases import lease_milliseconds
from ..sessions.rows import ALL_SESSIONS
from ..work import Submission
from ..work.claims import Claim, claim_item
from ..work.handle import ItemOps
from ..work.items import RETRIES_MAX
from ..work.noun import remove_queue
from ..work.submission import submit_all
from ..work.transitions import Transition, finish, lost
from .rows import (
    LIST_STATES,
    READ_WORLD,
    WRITE_SETTINGS,
    Journal,
    KeptState,
    KeptStep,
    Totals,
    queues_of,
)

BATCH = "holdfast.worlds.batch"
MEMBER = "holdfast.worlds.member"
REMOVED_PER_PASS = 1_000

ADD_ENTRY = """
INSERT INTO hf_world_frontier (session_number, from_id, candidate)
VALUES (:session, :from_id, :candidate) RETURNING number
"""
GIVEN_ENTRIES = f"""
SELECT number, from_id, candidate, deaths FROM hf_world_frontier
WHERE number {among("numbers", "INTEGER")} AND session_number = :session ORDER BY number
"""  # noqa: S608
COUNT_DEATH = "UPDATE hf_world_frontier SET deaths = deaths + 1 WHERE number = :number"
REMOVE_ENTRY = """
DELETE FROM hf_world_frontier
WHERE session_number = :session AND from_id = :from_id AND candidate = :candidate
"""
REMOVE_ENTRIES = """
DELETE FROM hf_world_frontier WHERE number IN (
    SELECT number FROM hf_world_frontier WHERE session_number = :session LIMIT :limit
) RETURNING number
"""
IS_RUNNING = f"""
SELECT 1 AS found FROM {ALL_SESSIONS} WHERE s.number = :number
    AND s.status = 'active' AND s.holder IS NOT NULL AND s.lease_expires_at > :now
"""  # noqa: S608


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Something to try, and how many processes died trying it."""

    number: int
    from_id: str
    candidate: int
    deaths: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Entries that are leased together; `is_again` if an earlier holder died."""

    item: ItemOps[Any]
    entries: list[Entry]
    is_again: bool


@dataclass(frozen=True, slots=True)
class Begun:
    """What an exploration began with: its settings, and the id of its initial state."""

    settings: bytes
    initial_id: str


class Frontier(Journal[C]):
    """The frontier of an exploration, and its journal.

    One process publishes batches, under the lease of the session. Workers write what they found
    under the lease of the item that they hold; LeaseLost means that another one has it now.
    """

    @property
    def queue(self) -> str:
        """The queue of the batches."""
        return queues_of(self.number)[0]

    @property
    def workers_queue(self) -> str:
        """The queue of the items that workers hold as long as they take part."""
        return queues_of(self.number)[1]

    def under(self, item: ItemOps[Any]) -> Frontier[C]:
        """Return the same for a worker, with the lease of an item."""
        return Frontier(self.runtime, self.id, self.number, self.root_id, guard=item._guard())

    @operation
    def publish(self, batches: Sequence[Sequence[tuple[str, int]]], totals: Totals) -> Op[None]:
        """Add entries, given as a state and a candidate, and a work item for each batch of them."""
        yield from self._lock()
        entries = [entry for each in batches for entry in each]
        added = yield from batch(
            *self._additions((), (), totals),
            *(
                Query(ADD_ENTRY, {"session": self.number, "from_id": id, "candidate": candidate})
                for id, candidate in entries
            ),
        )
        numbers = iter([row["number"] for found in added[1:] for row in found])
        wanted = [
            Submission(
                type=BATCH,
                queue=self.queue,
                input={"entries": [next(numbers) for _ in each]},
                max_retries=RETRIES_MAX,
            )
            for each in batches
        ]
        yield from submit_all(self.runtime, wanted)

    @operation
    def join(self, holder: str, lease_seconds: float) -> Op[ItemOps[C]]:
        """Take part as a worker; return the item to hold until it has left."""
        yield from self._lock()
        id = yield FreshId()
        item = Submission(
            type=MEMBER, queue=self.workers_queue, id=id, max_retries=0, on_crash="fail"
        )
        yield from submit_all(self.runtime, [item])
        claim = Claim(holder, 1, [self.workers_queue], lease_milliseconds(lease_seconds))
        row = yield from claim_item(id, claim)
        assert row is not None
        return ItemOps(self.runtime, row, lease_seconds)

    @operation
    def begin(self, settings: bytes, initial: KeptState) -> Op[Begun]:
        """Write how the exploration begins, unless it has begun; return how it did."""
        yield from self._lock()
        world = yield from one(READ_WORLD, number=self.number)
        if world is None or world["settings"] is None:
            sealed = self._sealed("settings", settings)
            yield from rows(WRITE_SETTINGS, number=self.number, settings=sealed)
            yield from batch(*self._additions([initial], ()))
            return Begun(settings, initial.id)
        [first] = yield from rows(LIST_STATES, session=self.number, after=0, limit=1)
        return Begun(self._body("settings", world["settings"]), first["id"])

    @operation
    def claim(self, holder: str, lease_seconds: float) -> Op[Batch | None]:
        """Lease the next batch; None if none is ready."""
        return (yield from self._claim(holder, lease_seconds))

    @operation
    def record(self, states: Sequence[KeptState], steps: Sequence[KeptStep]) -> Op[None]:
        """Add what was found, and remove the entries that were tried."""
        yield from self._record(states, steps)

    @operation
    def turn(
        self, done: Batch, states: Sequence[KeptState], steps: Sequence[KeptStep], holder: str
    ) -> Op[Batch | None]:
        """Add the last that a batch found, complete its item, and lease the next, in one commit."""
        item = done.item
        yield from self._record(states, steps)
        output = self.runtime.codec.encode(None, name="output")
        [row] = yield from finish([(item, Transition("completed", "completed", output))])
        if row is None:
            raise (yield from lost(item))
        return (yield from self._claim(holder, item.lease_seconds))

    @operation
    def discard(self, *, with_workers: bool) -> Op[bool]:
        """Remove entries and items, whose holders are fenced; return whether more are left."""
        yield from self._lock()
        limit, counts = REMOVED_PER_PASS, []
        for queue in queues_of(self.number)[: 2 if with_workers else 1]:
            counts.append((yield from remove_queue(queue, limit)))
        removed = yield from rows(REMOVE_ENTRIES, session=self.number, limit=limit)
        return limit in (*counts, len(removed))

    @query
    def is_running(self) -> Op[bool]:
        """Whether a process drives the exploration."""
        return (yield from one(IS_RUNNING, number=self.number)) is not None

    def _claim(self, holder: str, lease_seconds: float) -> Op[Batch | None]:
        claim = Claim(holder, 1, [self.queue], lease_milliseconds(lease_seconds))
        taken = yield from claim.take()
        if not taken:
            return None
        item: ItemOps[C] = ItemOps(self.runtime, taken[0], lease_seconds)
        numbers = given(item.input["entries"])
        found = yield from rows(GIVEN_ENTRIES, session=self.number, numbers=numbers)
        entries = [Entry(**row) for row in found]
        is_again = bool(item.failures + item.rescues)
        if is_again and entries:
            entries[0] = replace(entries[0], deaths=entries[0].deaths + 1)
            yield from rows(COUNT_DEATH, number=entries[0].number)
        return Batch(item, entries, is_again)

    def _record(self, states: Sequence[KeptState], steps: Sequence[KeptStep]) -> Op[None]:
        yield from self._lock()
        removals = (
            Query(
                REMOVE_ENTRY,
                {"session": self.number, "from_id": step.from_id, "candidate": step.candidate},
            )
            for step in steps
        )
        yield from batch(*self._additions(states, steps), *removals)
