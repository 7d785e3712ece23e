"""Work as users hold it: `store.work`, and the handles of its items."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, TypeAlias

from .arguments import require_limit, require_text, require_whole
from .checkpoints.read import Growth, growth
from .errors import InvalidArgument
from .kernel.flow import Flow, flow
from .kernel.nouns import SWEPT_PER_PASS, find_row
from .kernel.operation import (
    AfterCommit,
    C,
    Handle,
    Op,
    Row,
    Tx,
    deciding,
    large_query,
    listed,
    one,
    operation,
    query,
    rows,
)
from .records import Swept
from .session import Session
from .state import State
from .work import WorkNoun, claims, reports, transitions
from .work.claims import Beat
from .work.handle import ItemOps, require_held, require_list
from .work.items import (
    LEASE_SECONDS,
    READ_ITEM,
    SELECT_ITEMS,
    Item,
    OnCrash,
    Submission,
    WorkStatus,
)
from .work.noun import PROMOTED_PER_PASS, SWEPT_MAX, promote
from .work.reports import FailedAttempt, LeaseHealth, WorkCount
from .work.submission import submit_all
from .work.transitions import Transition

# Inside Work, `list` is a method.
Counts: TypeAlias = list[WorkCount]
Grown: TypeAlias = list[Growth]
Beats: TypeAlias = list[Beat]
Flags: TypeAlias = list[bool]
Failures: TypeAlias = list[FailedAttempt]

ITEMS_PER_PAGE_MAX = 1_000
GROWTH_MAX = 1_000


class WorkItem(ItemOps[C]):
    """A work item; the handle that a claim gave may write under its lease."""

    @property
    def session(self) -> Session[C] | None:
        """The item's session, None if it has none; while the item is held, what is written
        through this handle is written only as long as the item's lease lives.
        """
        if self.session_number is None:
            return None
        return self._session(self.driving_fence if self.is_held else None)

    @property
    def state(self) -> State[C]:
        """The shared state of the session's tree.

        What an attempt that died has added already is not added again: increment, append, add and
        batch get an idempotency key of the item, the mutation, and how often the attempt made it.
        """
        if self.session is None:
            raise InvalidArgument(f"work item {self.id} has no session, and so no shared state")
        return self.session.state

    @operation
    def drive(self) -> Op[Session[C]]:
        """Take the session's lease in this attempt's name, and return the session to advance.

        The item's heartbeat renews it, and whatever ends the attempt gives it back. Raises
        SessionBusy while somebody else drives the session.
        """
        require_held([self])
        fence = yield from claims.drive(self)
        yield AfterCommit(lambda: self._take({"driving_fence": fence}))
        return self._session(fence)

    def _session(self, fence: int | None) -> Session[C]:
        place = self._place()
        assert place is not None
        where = (place.session_id, place.number, place.root_id)
        if not self.is_held:
            return Session(self.runtime, *where)
        return Session(
            self.runtime, *where, fence=fence, guard=self._guard(), holder=self.holder, item=self
        )


Items: TypeAlias = list[WorkItem[C]]


class Work(Handle[C]):
    """Work items that survive their workers."""

    @deciding
    def submit(
        self,
        type: str,
        input: Any = None,
        *,
        session: Any = None,
        queue: str | None = None,
        priority: int = 0,
        max_retries: int = 3,
        available_at: datetime | int | None = None,
        delay_seconds: float | None = None,
        key: str | None = None,
        on_crash: OnCrash = "retry",
        id: str | None = None,
    ) -> Op[WorkItem[C]]:
        """Submit an item; while one with the same key lives in the queue, that one is returned.

        An `id` of your own finds its item for ever, or raises RequestMismatch if that is another.
        The queue is the type unless given. `max_retries=3` means at most 4 executions. `on_crash`
        says what a dead worker leads to: `retry`, `fail`, or `review` by a person.
        """
        given = Submission(
            type=type,
            input=input,
            session=session,
            queue=queue,
            priority=priority,
            max_retries=max_retries,
            available_at=available_at,
            delay_seconds=delay_seconds,
            key=key,
            on_crash=on_crash,
            id=id,
        )
        [row] = yield from submit_all(self.runtime, [given])
        return WorkItem(self.runtime, row)

    @operation
    def submit_many(self, submissions: Sequence[Submission]) -> Op[Items[C]]:
        """Submit items in one commit, in this order; all of them or none."""
        require_list("submissions", submissions)
        found = yield from submit_all(self.runtime, submissions)
        return [WorkItem(self.runtime, row) for row in found]

    @deciding
    def claim(
        self,
        holder: str,
        *,
        limit: int = 1,
        queues: Sequence[str] | str | None = None,
        lease_seconds: float = LEASE_SECONDS,
    ) -> Op[Items[C]]:
        """Lease up to `limit` ready items: highest priority first, then in order of submission."""
        found = yield from claims.claim(holder, limit, queues, lease_seconds)
        return [WorkItem(self.runtime, row, lease_seconds=lease_seconds) for row in found]

    @operation
    def heartbeat(
        self, items: Sequence[Item[Any]], *, lease_seconds: float | None = None
    ) -> Op[Beats]:
        """Prolong the leases of items, and return for each whether it is lost or asked to stop."""
        require_held(items)
        seconds = lease_seconds
        if seconds is None:
            seconds = max((item.lease_seconds for item in items), default=LEASE_SECONDS)
        found = yield from claims.heartbeat({i.number: i.fence for i in items}, seconds)
        return [claims.beat(item, found.get(item.number)) for item in items]

    @operation
    def complete_many(self, outputs: Sequence[tuple[Item[Any], Any]]) -> Op[Flags]:
        """Complete items in one commit; False for each whose lease was lost, of which nothing is
        written.
        """
        require_list("outputs", outputs)
        if not all(isinstance(each, tuple | list) and len(each) == 2 for each in outputs):
            raise InvalidArgument("outputs must be pairs of a claimed work item and its output")
        require_held([item for item, _ in outputs])
        encode = self.runtime.codec.encode
        ended = [
            (item, Transition("completed", "completed", encode(output, name="output")))
            for item, output in outputs
        ]
        found = yield from transitions.finish(ended)
        return [row is not None for row in found]

    @flow
    def sweep(self, *, limit: int = SWEPT_PER_PASS) -> Flow[Swept]:
        """Requeue or end up to `limit` items whose lease expired, and promote due ones.

        Any number of processes may sweep at once.
        """
        require_limit(limit, SWEPT_MAX)
        return (yield from WorkNoun().sweep(self.runtime, limit))

    @operation
    def promote(self, *, limit: int = PROMOTED_PER_PASS) -> Op[int]:
        """Make items ready whose time has come; return how many."""
        require_limit(limit, PROMOTED_PER_PASS)
        return (yield from promote(self.runtime, limit))[0]

    @operation
    def cancel(self, id: str) -> Op[WorkStatus]:
        """Cancel an item, or ask its worker to stop, and return its status now.

        A worker that runs it learns of it with its next heartbeat; if it dies, the item is
        cancelled rather than run again. A finished item stays as it is.
        """
        return (yield from transitions.cancel((yield from self._found(id))))

    @operation
    def retry(self, id: str) -> Op[WorkItem[C]]:
        """Make a pending item ready now that waits for its time or for review."""
        item = yield from self._found(id)
        change = Transition("pending", "retried by hand")
        [row] = yield from transitions.finish([(item, change)], transitions.FINISH_IDLE)
        if row is None:
            now = yield from self._found(id)
            raise InvalidArgument(
                f"work item {id} is {now.status}; only a pending one can be made ready, and a "
                "failed one redriven"
            )
        return WorkItem(self.runtime, (yield from self._found_row(id)))

    @operation
    def redrive(self, id: str) -> Op[WorkItem[C]]:
        """Submit a failed or cancelled item again, as a new one that names it; only once.

        Refused while another item has its key.
        """
        dead = yield from self._found(id)
        if dead.stored_state not in {"failed", "cancelled"}:
            raise InvalidArgument(
                f"work item {id} is {dead.status}; only a failed or cancelled one is redriven"
            )
        again = Submission(
            type=dead.type,
            input=dead.input,
            session=dead.session_id,
            queue=dead.queue,
            priority=dead.priority,
            max_retries=dead.max_retries,
            key=dead.key,
            on_crash=dead.on_crash,
        )
        [row] = yield from submit_all(self.runtime, [again], redriven=dead)
        return WorkItem(self.runtime, row)

    @query
    def get(self, id: str, *, fence: int | None = None) -> Op[WorkItem[C]]:
        """Return an item, or NotFound. With the fence of its lease the handle may write."""
        row = yield from self._found_row(id)
        if fence is None:
            return WorkItem(self.runtime, row)
        require_whole("fence", fence, 1, 2**63 - 1)
        item: WorkItem[C] = WorkItem(self.runtime, row, LEASE_SECONDS)
        if item.fence != fence or item.stored_state != "in_progress":
            item.fence = fence
            raise (yield from transitions.lost(item))
        return item

    @query
    def list(
        self,
        *,
        session: Any = None,
        status: WorkStatus | Sequence[WorkStatus] | None = None,
        holder: str | None = None,
        type: str | None = None,
        queue: str | None = None,
        before: int | None = None,
        limit: int = 100,
    ) -> Op[Items[C]]:
        """Return items, the newest first; `before` is the `number` of the last one seen."""
        statuses = () if status is None else reports.statuses_of(status)
        require_limit(limit, ITEMS_PER_PAGE_MAX)
        session_id = getattr(session, "id", session)
        wanted = {"session_id": session_id, "holder": holder, "type": type, "queue": queue}
        given = {name: value for name, value in wanted.items() if value is not None}
        for name, value in given.items():
            require_text(name.removesuffix("_id"), value)
        page = reports.page_of(given, statuses)
        bounds = {"before": reports.before_of(before), "limit": limit}
        found = yield from listed(page, **given, **bounds)
        return [WorkItem(self.runtime, row) for row in found]

    @query
    def dead(self, *, before: int | None = None, limit: int = 100) -> Op[Items[C]]:
        """Return failed items that were not redriven, the newest first."""
        require_limit(limit, ITEMS_PER_PAGE_MAX)
        found = yield from rows(reports.LIST_DEAD, before=reports.before_of(before), limit=limit)
        return [WorkItem(self.runtime, row) for row in found]

    @large_query
    def counts(self, *, finished: bool = True, at_most: int | None = None) -> Op[Counts]:
        """Count items by type and status, with their ages; it reads every item.

        With `at_most` no more than so many of each, the oldest, which costs the same in any store.
        """
        return (yield from reports.counts(finished=finished, at_most=at_most))

    @query
    def health(self, *, stale_seconds: float = reports.STALE_SECONDS) -> Op[LeaseHealth]:
        """Count the leases of running items; one without a heartbeat for that long is stale."""
        return (yield from reports.health(stale_seconds))

    @large_query
    def growth(self, *, limit: int = 10) -> Op[Grown]:
        """Return the sessions with the most checkpoints."""
        require_limit(limit, GROWTH_MAX)
        return (yield from growth(limit))

    @query
    def find(self, id: str) -> Op[WorkItem[C]]:
        """Return an item by its id, its number, or the beginning of its id; or NotFound.

        8 characters or more are enough if no other id begins with them.
        """
        row = yield from find_row("work item", SELECT_ITEMS, require_text("id", id))
        if row is None:
            raise transitions.not_found(id)
        return WorkItem(self.runtime, row)

    @query
    def errors(self, id: str) -> Op[Failures]:
        """Return the last attempts of an item that failed, the newest first; at least 10."""
        row = yield from self._found_row(id)
        return (yield from reports.errors(self.runtime.codec, row))

    @query
    def why(self, id: str) -> Op[str]:
        """Say in a sentence why an item runs or does not."""
        row = yield from one(reports.READ_ITEM_NOW, id=require_text("id", id))
        if row is None:
            raise transitions.not_found(id)
        return (yield from reports.why(WorkItem(self.runtime, row), row["now"]))

    def _found_row(self, id: str) -> Op[Row]:
        row = yield from one(READ_ITEM, id=require_text("id", id))
        if row is None:
            raise transitions.not_found(id)
        return row

    def _found(self, id: str) -> Op[WorkItem[C]]:
        return WorkItem(self.runtime, (yield from self._found_row(id)))

    def within(self: Work[Tx], item: Item[Any]) -> WorkItem[Tx]:
        """Return an item's handle for this transaction, with the item's lease."""
        inside: WorkItem[Tx] = WorkItem(self.runtime, {})
        inside._adopt(item)
        return inside
