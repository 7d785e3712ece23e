"""Work items in export files: what was not finished waits for a person where it arrives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from ..kernel import portable
from ..kernel.operation import Op
from .items import FINAL, PRIORITY_MAX, RETRIES_MAX, STATUS_OF, OnCrash, context

UNFINISHED = "It was imported before it was finished, and may have begun where it came from."

Priority = Annotated[int, msgspec.Meta(ge=-PRIORITY_MAX, le=PRIORITY_MAX)]


class ItemRecord(portable.Record, frozen=True, kw_only=True, tag="item"):
    """A work item of a session; its holder does not travel."""

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
        """Check that it has its session, and an end if it has ended."""
        work, is_final = seen.of(_Work), self.state in FINAL
        if not seen.is_placed(self) or not seen.is_new(self):
            return f"{self.label} comes twice, or without its session"
        if self.state not in STATUS_OF or is_final != (self.completed_at is not None):
            return f"{self.label} has the wrong end"
        if self.retry_count > self.max_retries or self.max_retries > RETRIES_MAX:
            return f"{self.label} has more retries than it may"
        work.attempts[self.id] = self.attempts
        if self.first_id is not None and self.first_id not in work.attempts:
            seen.counts_beyond(f"{self.label}, first submitted as {self.first_id!r}")
        if self.key is not None and not is_final:
            if (self.queue, self.key) in work.keys:
                return f"{self.label} has a key that another has"
            work.keys.add((self.queue, self.key))
            seen.counts_beyond(f"{self.label} with the key {self.key!r}")
        return None

    def add(self, into: portable.Import) -> Op[None]:
        """Add the item; nobody holds it."""
        changes: dict[str, Any] = {"fence": into.raised(self.fence)}
        if self.state not in FINAL:
            changes["state"] = "review"
            if self.error is None:
                changes["error"] = into.codec.encode(UNFINISHED)
        changes["session_number"] = yield from into.number(self.session_number)
        problem = f"{self.label}, its key or what it is redriven from is here already"
        into.later(ADD_IMPORTED, self.row(into.codec, **changes), problem)


class AttemptRecord(portable.Record, frozen=True, tag="attempt"):
    """An attempt of a work item before it that failed or whose lease expired."""

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
        """Check that the item had this many attempts, and that this one comes once."""
        work = seen.of(_Work)
        if self.attempt > work.attempts.get(self.item_id, 0):
            return f"{self.label} is more than the item had"
        if (self.item_id, self.attempt) in work.failed:
            return f"{self.label} comes twice"
        work.failed.add((self.item_id, self.attempt))
        return None

    def add(self, into: portable.Import) -> Op[None]:
        """Add the attempt to its item."""
        into.later(ADD_ATTEMPT, self.row(into.codec))
        yield from ()


@dataclass(slots=True)
class _Work:
    attempts: dict[str, int] = field(default_factory=dict)
    """How many attempts each item had."""
    keys: set[tuple[str, str]] = field(default_factory=set)
    failed: set[tuple[str, int]] = field(default_factory=set)


EXPORT_WORK = f"""
SELECT number, {ItemRecord.selected()} FROM hf_work
WHERE session_number = :session_number AND number > :number ORDER BY number LIMIT :limit
"""  # noqa: S608
EXPORT_ATTEMPTS = """
SELECT a.work_number, w.id AS item_id, a.attempt, a.holder, a.fence, a.reason, a.ended_at, a.error
FROM hf_work w JOIN hf_attempts a ON a.work_number = w.number
WHERE w.session_number = :session_number AND (a.work_number, a.attempt) > (:work_number, :attempt)
ORDER BY a.work_number, a.attempt LIMIT :limit
"""
ADD_IMPORTED = f"""
INSERT INTO hf_work {ItemRecord.inserted()} ON CONFLICT DO NOTHING RETURNING id
"""
ADD_ATTEMPT = """
INSERT INTO hf_attempts (work_number, attempt, holder, fence, reason, error, ended_at)
SELECT number, CAST(:attempt AS INTEGER), CAST(:holder AS TEXT), CAST(:fence AS INTEGER),
    CAST(:reason AS TEXT), CAST(:error AS BLOB), CAST(:ended_at AS INTEGER)
FROM hf_work WHERE id = :item_id
"""


class WorkPortable(portable.Portable):
    """Items travel with their sessions, and what went wrong in their last attempts with them."""

    records = (ItemRecord, AttemptRecord)

    def export(self, out: portable.Export) -> Op[None]:
        """Write the items of sessions, then their attempts."""
        owners = [{"session_number": number} for number in out.sessions]
        yield from portable.read_each(EXPORT_WORK, owners, ItemRecord.to(out))
        attempts = AttemptRecord.to(out)
        yield from portable.read_each(EXPORT_ATTEMPTS, owners, attempts, ["work_number", "attempt"])
