"""Work items in export files. Imported items that are not finished are parked for review."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from ..dataclass import dataclass
from ..kernel import portable
from ..kernel.inserts import Insert
from ..kernel.kept import Kept, KeptSet, kept, kept_set
from ..kernel.operation import Op, one
from ..kernel.owned_rows import OwnedRows, read_each
from .items import FINAL, PRIORITY_MAX, RETRIES_MAX, STATUS_OF, OnCrash, context

UNFINISHED = "It was imported unfinished, and may have been started in the store it came from."

Priority = Annotated[int, msgspec.Meta(ge=-PRIORITY_MAX, le=PRIORITY_MAX)]


class ItemRecord(portable.Record, frozen=True, kw_only=True, tag="item"):
    """A work item of a session, without its holder."""

    sealed = portable.Sealed(
        lambda row, name: context(row["id"], name),
        input=portable.ANY,
        output=portable.ANY,
        error=portable.ERROR,
        progress=portable.ANY,
    )
    counted = "items"

    session_number: portable.Positive
    session_id: portable.Name
    root_id: portable.Name
    id: portable.Name
    type: portable.Name
    queue: portable.Name
    state: portable.Name
    priority: Priority
    key: portable.Name | None = None
    on_crash: OnCrash
    fence: portable.Fence = 0
    retry_count: portable.Small
    max_retries: portable.Small
    attempts: portable.Small
    failures: portable.Small = 0
    rescues: portable.Small = 0
    releases: portable.Small = 0
    redriven_from: portable.Name | None = None
    first_id: portable.Name | None = None
    available_at: portable.Time
    created_at: portable.Time
    started_at: portable.Time | None
    completed_at: portable.Time | None
    updated_at: portable.Time
    input: bytes
    output: bytes | None = None
    error: bytes | None = None
    progress: bytes | None = None

    @property
    def label(self) -> str:
        """Name the item."""
        return f"work item {self.id!r}"

    def problem(self, seen: portable.Seen) -> str | None:
        """Check its session, status, retries and key."""
        work, is_final = seen.of(_Work), self.state in FINAL
        if not seen.is_placed(self) or not seen.is_new(self):
            return f"{self.label} comes twice, or without its session"
        if self.state not in STATUS_OF or is_final != (self.completed_at is not None):
            return f"{self.label} has an end that does not fit its status"
        if self.retry_count > self.max_retries or self.max_retries > RETRIES_MAX:
            return f"{self.label} has more retries than allowed"
        work.attempts[self.id] = self.attempts
        if self.first_id is not None and self.first_id not in work.attempts:
            seen.counts_beyond(f"{self.label}, first submitted as {self.first_id!r}")
        if self.key is not None and not is_final:
            if not work.keys.add((self.queue, self.key)):
                return f"{self.label} has the same key as another"
            seen.counts_beyond(f"{self.label} with the key {self.key!r}")
        return None

    def add(self, into: portable.Import) -> Op[None]:
        """Add the item, without a holder."""
        changes: dict[str, Any] = {"fence": into.raised(self.fence)}
        if self.state not in FINAL:
            changes["state"] = "review"
            if self.error is None:
                changes["error"] = into.codec.encode(UNFINISHED)
        changes["session_number"] = yield from into.number(self.session_number)
        problem = f"{self.label}, its key or the item it is redriven from is here already"
        into.insert(ADD_ITEM, self.row(into.codec, **changes), problem)


class AttemptRecord(portable.Record, frozen=True, tag="attempt"):
    """A failed or expired attempt of a work item, which precedes it in the file."""

    sealed = portable.Sealed(
        lambda row, name: context(row["item_id"], "attempt"), error=portable.ERROR
    )

    item_id: portable.Name
    attempt: portable.Version
    holder: portable.Text | None
    fence: portable.Fence
    reason: portable.Name
    ended_at: portable.Time
    error: bytes

    @property
    def label(self) -> str:
        """Name the attempt."""
        return f"attempt {self.attempt} of work item {self.item_id!r}"

    def problem(self, seen: portable.Seen) -> str | None:
        """Check that the item had this attempt, and that it comes once."""
        work = seen.of(_Work)
        if self.attempt > work.attempts.get(self.item_id, 0):
            return f"{self.label} is one more than the item had"
        is_new = work.failed.add((self.item_id, self.attempt))
        return None if is_new else f"{self.label} comes twice"

    def add(self, into: portable.Import) -> Op[None]:
        """Add the attempt to its item."""
        into.later(ADD_ATTEMPT, self.row(into.codec))
        yield from ()


@dataclass(slots=True)
class _Work:
    attempts: Kept[str, int] = kept(int)
    """How many attempts each item had."""
    keys: KeptSet[tuple[str, str]] = kept_set()
    failed: KeptSet[tuple[str, int]] = kept_set()


ITEMS = OwnedRows(
    f"number, {ItemRecord.selected()}",
    "hf_work",
    "session_number = {owner} AND session_number IS NOT NULL",
    {"number": 0},
    parts=[f"state = '{state}'" for state in STATUS_OF],
)
ATTEMPTS = OwnedRows(
    "a.work_number, w.id AS item_id, a.attempt, a.holder, a.fence, a.reason, a.ended_at, a.error",
    "hf_work w JOIN hf_attempts a ON a.work_number = w.number",
    "w.session_number = {owner}",
    {"a.work_number": 0, "a.attempt": 0},
)
ADD_ITEM = Insert("hf_work", ItemRecord.columns(), "ON CONFLICT DO NOTHING RETURNING id", key="id")
ADD_ATTEMPT = """
INSERT INTO hf_attempts (work_number, attempt, holder, fence, reason, error, ended_at)
SELECT number, CAST(:attempt AS INTEGER), CAST(:holder AS TEXT), CAST(:fence AS INTEGER),
    CAST(:reason AS TEXT), CAST(:error AS BLOB), CAST(:ended_at AS INTEGER)
FROM hf_work WHERE id = :item_id
"""


# No index lists them. Of the rows that are read before there are enough, all others are exported.
COUNT_OF_NO_SESSION = """
SELECT count(*) AS items FROM (
    SELECT 1 FROM hf_work WHERE session_number IS NULL LIMIT :limit
) AS found
"""


class WorkPortable(portable.Portable):
    """Items are exported with their sessions, and with the errors of their last attempts."""

    records = (ItemRecord, AttemptRecord)

    def export(self, out: portable.Export) -> Op[None]:
        """Write the items of sessions, then their attempts."""
        yield from read_each(ITEMS, out.sessions, ItemRecord.to(out))
        yield from read_each(ATTEMPTS, out.sessions, AttemptRecord.to(out))

    def left_behind(self) -> Op[dict[str, int]]:
        """Count the items without a session."""
        row = yield from one(COUNT_OF_NO_SESSION, limit=portable.LEFT_MAX)
        assert row is not None
        return {"work_items": row["items"]}
