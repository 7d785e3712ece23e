"""Two small nouns that use everything the kernel offers: a counter with events, a leased queue.

The conformance suite drives them on every driver and in every colour. They are also the shortest
complete examples of how a noun is written.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable

from ..arguments import shown
from ..errors import InvalidArgument, LeaseLost
from ..feed import create_tree, emit, event, lock_tree
from ..kernel.flow import Flow, perform
from ..kernel.inserts import Insert
from ..kernel.nouns import Noun, Retention
from ..kernel.operation import (
    AfterCommit,
    C,
    Handle,
    Lock,
    Op,
    Query,
    Runtime,
    decide,
    deciding,
    fresh_id,
    large_query,
    one,
    operation,
    query,
    rows,
)
from ..kernel.owned_rows import OwnedRows, read_each
from ..kernel.portable import Export, Import, Name, Number, Portable, Record, Seen
from ..kernel.schema import Migration
from ..leases import EARLIER_BOOT, LeasedTable
from ..records import Finding, Lease, Pruned, Swept
from ..store import StoreHandle

COUNTERS_SCHEMA = """
-- hf_test_counters  one number per session tree

--[both]
CREATE TABLE IF NOT EXISTS hf_test_counters (id TEXT PRIMARY KEY, value INTEGER NOT NULL);
"""
ITEMS_SCHEMA = """
-- hf_test_items  the work of a session tree; one worker at a time has the lease of an item

--[both]
CREATE TABLE IF NOT EXISTS hf_test_items (
    number INTEGER PRIMARY KEY /*pg GENERATED ALWAYS AS IDENTITY */,
    id TEXT NOT NULL UNIQUE,
    root_id TEXT NOT NULL,
    payload TEXT NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('pending', 'done')),
    holder TEXT,
    fence INTEGER NOT NULL DEFAULT 0,
    lease_expires_at INTEGER,
    ended_at INTEGER
);
"""
ADD = """
INSERT INTO hf_test_counters (id, value) VALUES (:id, :amount)
ON CONFLICT (id) DO UPDATE SET value = hf_test_counters.value + excluded.value RETURNING value
"""
ADD_WITHIN = """
INSERT INTO hf_test_counters (id, value)
SELECT CAST(:id AS TEXT), CAST(:amount AS INTEGER)
WHERE :amount <= :limit AND NOT EXISTS (
    SELECT 1 FROM hf_test_counters c
    WHERE c.id = CAST(:id AS TEXT) AND c.value + :amount > :limit
)
ON CONFLICT (id) DO UPDATE SET value = hf_test_counters.value + excluded.value RETURNING value
"""
HOLD = "SELECT id FROM hf_test_counters WHERE id = :id /*pg FOR NO KEY UPDATE */"
VALUE = "SELECT value FROM hf_test_counters WHERE id = :id"
VALUES = "SELECT id, value FROM hf_test_counters ORDER BY id"
OF_TREES = OwnedRows("id, value", "hf_test_counters", "id = {owner}", {"id": ""}, owner="TEXT")
ADD_WHOLE = Insert(
    "hf_test_counters", ("id", "value"), "ON CONFLICT DO NOTHING RETURNING id", key="id"
)

SUBMIT = """
INSERT INTO hf_test_items (id, root_id, payload, status)
VALUES (:id, :root_id, :payload, 'pending') RETURNING number
"""
NEXT = """
SELECT id FROM hf_test_items
WHERE root_id = :root_id AND status = 'pending' AND (holder IS NULL OR lease_expires_at <= :now)
ORDER BY number LIMIT 1 /*pg FOR NO KEY UPDATE SKIP LOCKED */
"""
FINISH = """
UPDATE hf_test_items
SET status = 'done', holder = NULL, lease_expires_at = NULL, ended_at = :now
WHERE id = :id AND fence = :fence AND status = 'pending' AND holder IS NOT NULL RETURNING id
"""
COUNTS = """
SELECT status, count(*) AS items FROM hf_test_items WHERE root_id = :root_id GROUP BY status
"""
FENCE = f"""
UPDATE hf_test_items SET lease_expires_at = :now, fence = fence + 1
WHERE holder IS NOT NULL AND lease_expires_at > :now AND {EARLIER_BOOT} RETURNING id
"""  # noqa: S608
TAKE_BACK = """
UPDATE hf_test_items SET holder = NULL, lease_expires_at = NULL, fence = fence + 1
WHERE number IN (
    SELECT number FROM hf_test_items WHERE lease_expires_at <= :now ORDER BY number LIMIT :limit
) RETURNING id
"""
FORGET = "DELETE FROM hf_test_items WHERE ended_at <= :now - :work_ms RETURNING id"
BELOW_ZERO = "SELECT id FROM hf_test_counters WHERE value < 0"

ITEMS = LeasedTable("hf_test_items", "item")


class CounterRecord(Record, frozen=True, tag="counter"):
    """A counter in an export file, by the id of its tree."""

    counted = "counters"

    id: Name
    value: Number

    def problem(self, seen: Seen) -> str | None:
        """Check that its tree precedes it in the file."""
        is_placed = self.id in seen.trees and seen.is_new(self)
        return None if is_placed else f"{self.label} comes twice, or without its tree"

    def add(self, into: Import) -> Op[None]:
        """Add the counter, with the rows that follow."""
        into.insert(ADD_WHOLE, self.row(into.codec), f"{self.label} is here already")
        yield from ()


class CountersPortable(Portable):
    """A counter is exported with its tree."""

    records = (CounterRecord,)

    def export(self, out: Export) -> Op[None]:
        """Write the counters of the trees."""
        yield from read_each(OF_TREES, out.root_ids, CounterRecord.to(out))


class CountersNoun(Noun):
    """Counters in the life-cycle of a store."""

    portable = CountersPortable()

    def schema(self) -> str:
        """Return the table of counters."""
        return COUNTERS_SCHEMA

    def checks(self) -> dict[str, Callable[[], Op[list[Finding]]]]:
        """Look for counters below zero."""
        return {"counters": check_counters}


def check_counters() -> Op[list[Finding]]:
    """Look for counters below zero."""
    found = [
        Finding("counters", "problem", f"The counter of {row['id']!r} is below zero.")
        for row in (yield from rows(BELOW_ZERO))
    ]
    return found or [Finding("counters", "ok", "None is below zero.")]


class ItemsNoun(Noun):
    """Items in the life-cycle of a store."""

    name = "example item"
    fencing = FENCE
    leased = "hf_test_items WHERE holder IS NOT NULL"
    leased_to = "holder"
    advice = "Sweep."

    def schema(self) -> str:
        """Return the table of items."""
        return ITEMS_SCHEMA

    def sweep(self, runtime: Runtime, limit: int) -> Flow[Swept]:
        """Take back items whose lease has expired."""
        return Swept(requeued=(yield from perform(ItemsNoun.take_back, self, limit)))

    def prune(self, runtime: Runtime, retention: Retention) -> Flow[Pruned]:
        """Remove items that were done long ago."""
        if retention.session is not None:
            return Pruned()
        count = yield from perform(ItemsNoun.forget, self, retention.work_ms)
        return Pruned(others=Counts({"example item": count}))

    @operation
    def take_back(self, limit: int) -> Op[int]:
        """Free items whose lease has expired, and return how many."""
        return len((yield from rows(TAKE_BACK, limit=limit)))

    @operation
    def forget(self, work_ms: int) -> Op[int]:
        """Remove items that were done longer ago, and return how many."""
        return len((yield from rows(FORGET, work_ms=work_ms)))


NOUNS = (CountersNoun(), ItemsNoun())


class _Noun(Handle[C]):
    def __init__(self, store: StoreHandle[C], root_id: str = "root") -> None:
        super().__init__(store.runtime)
        self.root_id = root_id


class Setup(_Noun[C]):
    """Creates the tables of the two nouns."""

    @operation
    def install(self) -> Op[None]:
        """Create the tables, if they are missing."""
        for noun in NOUNS:
            for table in Migration(0, "examples", noun.schema()).statements("sqlite"):
                yield from rows(table)


class Counter(_Noun[C]):
    """A number per session tree; every change is an event of the tree."""

    @operation
    def plant(self) -> Op[None]:
        """Create the tree that the counter belongs to."""
        yield from create_tree(self.root_id)

    @operation
    def add(self, amount: int = 1, *, note: str = "") -> Op[int]:
        """Add to the counter, creating it if missing, and return its new value."""
        if not isinstance(amount, int) or isinstance(amount, bool):
            raise InvalidArgument(f"amount must be a whole number, not {shown(amount)}")
        yield from lock_tree(self.root_id)
        row = yield from one(ADD, id=self.root_id, amount=amount)
        assert row is not None
        data = {"amount": amount, "value": row["value"], "note": note}
        yield from emit(self.runtime.codec, self.root_id, self.root_id, "counter_added", data)
        return int(row["value"])

    @operation
    def add_below(self, limit: int, amount: int = 1) -> Op[int]:
        """Add, then refuse if the limit is passed; the addition is undone with the error."""
        value = yield from Counter.add(self, amount)
        if value > limit:
            raise InvalidArgument(f"{value} is above the limit {limit}")
        return value

    @deciding
    def add_at_once(
        self, amount: int = 1, *, note: str = "", limit: int = 2**62, only_existing: bool = False
    ) -> Op[int]:
        """Add in one round trip; refuse if the limit would be passed, or there is no counter."""
        told = event(
            self.runtime.codec, self.root_id, self.root_id, "counter_added", {"note": note}
        )
        answers = yield from decide(
            Lock(self.root_id),
            *([Query(HOLD, {"id": self.root_id}, must_find=True)] if only_existing else []),
            Query(ADD_WITHIN, {"id": self.root_id, "amount": amount, "limit": limit}),
            emits=[told],
            again=Query(VALUE, {"id": self.root_id}),
        )
        if answers[-1]:
            return int(answers[-1][0]["value"])
        row = yield from one(VALUE, id=self.root_id)
        raise InvalidArgument(f"the counter has {row and row['value']}, the limit is {limit}")

    @operation
    def add_and_tell(self, tell: Callable[[], None]) -> Op[int]:
        """Add one and call a function once that is durable."""
        yield AfterCommit(tell)
        return (yield from Counter.add(self))

    @operation
    def name_twice(self) -> Op[tuple[str, str]]:
        """Return two fresh ids, after a statement that a driver may have to repeat."""
        first = yield from fresh_id()
        yield from Counter.add(self)
        return first, (yield from fresh_id())

    @query
    def value(self) -> Op[int]:
        """Return the counter; 0 before the first addition."""
        row = yield from one(VALUE, id=self.root_id)
        return 0 if row is None else int(row["value"])

    @query
    def value_twice(self) -> Op[tuple[int, int]]:
        """Read the counter with two statements, which see the same moment."""
        first = yield from one(VALUE, id=self.root_id)
        second = yield from one(VALUE, id=self.root_id)
        return (first or {"value": 0})["value"], (second or {"value": 0})["value"]

    @large_query
    def all_values(self) -> Op[dict[str, int]]:
        """Return every counter of the store."""
        return {row["id"]: row["value"] for row in (yield from rows(VALUES))}


class Queue(_Noun[C]):
    """Items that are leased to one worker at a time; finishing one is an event of its tree."""

    @operation
    def submit(self, payload: str) -> Op[str]:
        """Add an item and return its id."""
        yield from lock_tree(self.root_id)
        item_id = yield from fresh_id()
        yield from rows(SUBMIT, id=item_id, root_id=self.root_id, payload=payload)
        data = {"item": item_id, "payload": payload}
        yield from emit(self.runtime.codec, self.root_id, self.root_id, "item_submitted", data)
        return item_id

    @operation
    def claim(self, holder: str, *, lease_seconds: float = 30) -> Op[Lease | None]:
        """Lease the oldest free item, or return None."""
        row = yield from one(NEXT, root_id=self.root_id)
        if row is None:
            return None
        return (yield from ITEMS.acquire(row["id"], holder, lease_seconds))

    @operation
    def acquire(self, item_id: str, holder: str, *, lease_seconds: float = 30) -> Op[Lease]:
        """Lease one item. Raises LeaseHeld while another's lease is alive."""
        return (yield from ITEMS.acquire(item_id, holder, lease_seconds))

    @operation
    def heartbeat(self, lease: Lease, *, lease_seconds: float = 30) -> Op[Lease]:
        """Renew the lease, or raise LeaseLost."""
        return (yield from ITEMS.renew(lease, lease_seconds))

    @operation
    def release(self, lease: Lease) -> Op[None]:
        """Give the item back, or raise LeaseLost."""
        yield from ITEMS.release(lease)

    @operation
    def complete(self, lease: Lease) -> Op[None]:
        """Finish the item, or raise LeaseLost and write nothing."""
        yield from lock_tree(self.root_id)
        yield from ITEMS.check(lease)
        if (yield from one(FINISH, id=lease.id, fence=lease.fence)) is None:
            raise LeaseLost(f"item {lease.id} is done already", id=lease.id, fence=lease.fence)
        data = {"item": lease.id, "fence": lease.fence}
        yield from emit(self.runtime.codec, self.root_id, self.root_id, "item_completed", data)

    @query
    def counts(self) -> Op[dict[str, int]]:
        """Return how many items are pending and done."""
        found = yield from rows(COUNTS, root_id=self.root_id)
        return {row["status"]: int(row["items"]) for row in found}
