"""The public API of work: `store.work`, and the handles of items."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, TypeAlias

from .access import record
from .arguments import require_limit, require_text, require_whole
from .checkpoints.read import Growth, growth
from .errors import InvalidArgument
from .kernel.flow import Flow, served
from .kernel.nouns import SWEPT_PER_PASS, find_row
from .kernel.operation import (
    AfterCommit,
    C,
    Handle,
    Op,
    Row,
    Tx,
    deciding,
    listed,
    one,
    operation,
    query,
    rows,
    whole_query,
)
from .peers import PeerRequest, Resumption
from .peers.asks import RESUME
from .peers.pauses import receive, receiving, resume, resuming
from .records import Swept
from .session import Session
from .state import State
from .wire import travels
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
    error_text,
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
REASON_MAX = 1_000
GROWTH_MAX = 1_000


@travels
class WorkItem(ItemOps[C]):
    """A work item. A handle returned by a claim may write under its lease."""

    @property
    def session(self) -> Session[C] | None:
        """The item's session, if it has one. Its writes require the lease of a held item."""
        if self.session_number is None:
            return None
        return self._session(self.driving_fence if self.is_held else None)

    @property
    def state(self) -> State[C]:
        """The shared state of the session's tree.

        A retried attempt does not apply the same mutations again: increment, append, add and batch
        get an idempotency key from the item, the mutation, and its count within the attempt.
        """
        if self.session is None:
            raise InvalidArgument(f"work item {self.id} has no session, so it has no shared state")
        return self.session.state

    def _take_answer(self, result: Any, row: Any) -> None:
        """Remember the row; a session that the call returned is driven for this item."""
        super()._take_answer(result, row)
        if isinstance(result, PeerRequest | Resumption):
            result = result.session
        if isinstance(result, Session):
            result.item = self

    @operation
    def drive(self) -> Op[Session[C]]:
        """Lease the session for this attempt, and return it.

        The item's heartbeat renews the lease, and the end of the attempt releases it. Raises
        SessionBusy while another holder drives the session.
        """
        require_held([self])
        fence = yield from claims.drive(self)
        yield AfterCommit(lambda: self._take({"driving_fence": fence}))
        return self._session(fence)

    @operation
    def receive(self) -> Op[PeerRequest[C]]:
        """Lease the session that serves a request, and return the request.

        The output of the item is the answer; if it fails permanently, the answer is an error.
        """
        require_held([self])
        looks = receiving(self.session_id, self.root_id)
        driven, looked = yield from claims.drive_with(self, *looks)
        request = receive(self._session(driven.fence), self.type, driven.row, looked)
        yield AfterCommit(lambda: self._take({"driving_fence": driven.fence}))
        return request

    @operation
    def resume(self) -> Op[Resumption[C]]:
        """Lease the session that this item resumes, and return its context and the answers.

        Another attempt gets the same, until a turn is saved or the session pauses again.
        """
        require_held([self])
        pause_id = self.input["pause"] if self.type == RESUME else ""
        looks = resuming(self.session_number or 0, pause_id)
        driven, looked = yield from claims.drive_with(self, *looks)
        session = self._session(driven.fence)
        resumption = yield from resume(session, driven.row, pause_id, looked)
        yield AfterCommit(lambda: self._take({"driving_fence": driven.fence}))
        return resumption

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


@travels
class Work(Handle[C]):
    """The work items of a store."""

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
        """Submit an item, or return the unfinished one with the same key in the queue.

        An `id` of your own returns its item if it exists, or raises RequestMismatch if the request
        differs. The queue defaults to the type. `max_retries=3` means at most 4 executions.
        `on_crash` decides what happens after a worker died: `retry`, `fail`, or `review`.
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
        """Submit items in one commit, in this order, all or none."""
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
        """Lease up to `limit` ready items, highest priority first, then in order of submission."""
        found = yield from claims.claim(holder, limit, queues, lease_seconds)
        return [WorkItem(self.runtime, row, lease_seconds=lease_seconds) for row in found]

    @operation
    def heartbeat(
        self, items: Sequence[Item[Any]], *, lease_seconds: float | None = None
    ) -> Op[Beats]:
        """Renew the leases of items; return for each whether it is lost or should stop."""
        require_held(items)
        seconds = lease_seconds
        if seconds is None:
            seconds = max((item.lease_seconds for item in items), default=LEASE_SECONDS)
        found = yield from claims.heartbeat({i.number: i.fence for i in items}, seconds)
        return [claims.beat(item, found.get(item.number)) for item in items]

    @operation
    def complete_many(self, outputs: Sequence[tuple[Item[Any], Any]]) -> Op[Flags]:
        """Complete items in one commit; False for each whose lease was lost, which is unchanged."""
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

    @served
    def sweep(self, *, limit: int = SWEPT_PER_PASS) -> Flow[Swept]:
        """Requeue or end up to `limit` items whose lease expired, and promote due ones.

        Any number of processes may sweep at once.
        """
        require_limit(limit, SWEPT_MAX)
        return (yield from WorkNoun().sweep(self.runtime, limit))

    @operation
    def promote(self, *, limit: int = PROMOTED_PER_PASS) -> Op[int]:
        """Make delayed items ready that are due; return how many."""
        require_limit(limit, PROMOTED_PER_PASS)
        return (yield from promote(self.runtime, limit))[0]

    @operation
    def cancel(self, id: str) -> Op[WorkStatus]:
        """Cancel an item, or ask its worker to stop; return its status.

        The worker is told at its next heartbeat; if it dies, the item is cancelled instead of
        retried. A finished item is unchanged.
        """
        return (yield from transitions.cancel((yield from self._found(id))))

    @operation
    def release(self, id: str, *, reason: str) -> Op[WorkItem[C]]:
        """Take a running item away from its holder, who can no longer write; it is ready again.

        It uses up no retry. The reason is kept with the attempt; if it was to be cancelled, it is.
        """
        text = error_text(require_text("reason", reason, REASON_MAX), self.runtime.redactor.redact)
        item = yield from self._found(id)
        given: dict[str, Any] = {"fences": 1, "releases": 1, "is_kept": True}
        change = Transition("pending", "taken away", error=text, **given)
        [row] = yield from transitions.finish([(item, change)], transitions.FINISH_HELD)
        if row is None:
            now = yield from self._found(id)
            raise InvalidArgument(
                f"work item {id} is {now.status}, held with fence {now.fence}; only a running one "
                "can be released"
            )
        yield from record(self.runtime.actor, "work_released", item.id)
        return WorkItem(self.runtime, (yield from self._found_row(id)))

    @operation
    def retry(self, id: str) -> Op[WorkItem[C]]:
        """Make an item ready at once that is delayed or parked for review."""
        item = yield from self._found(id)
        change = Transition("pending", "retried by hand")
        [row] = yield from transitions.finish([(item, change)], transitions.FINISH_IDLE)
        if row is None:
            now = yield from self._found(id)
            raise InvalidArgument(
                f"work item {id} is {now.status}; only a pending one can be retried; redrive a "
                "failed one"
            )
        return WorkItem(self.runtime, (yield from self._found_row(id)))

    @operation
    def redrive(self, id: str) -> Op[WorkItem[C]]:
        """Submit a failed or cancelled item again, once, as a new item that refers to it.

        Raises Refused while another item has its key.
        """
        dead = yield from self._found(id)
        if dead.stored_state not in {"failed", "cancelled"}:
            raise InvalidArgument(
                f"work item {id} is {dead.status}; only a failed or cancelled one can be redriven"
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
        """Return an item, or raise NotFound. With the fence of its lease, the handle may write."""
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
        root: object = None,
        status: WorkStatus | Sequence[WorkStatus] | None = None,
        holder: str | None = None,
        type: str | None = None,
        queue: str | None = None,
        before: int | None = None,
        limit: int = 100,
    ) -> Op[Items[C]]:
        """Return items, newest first; `before` is the `number` of the last one seen.

        `root` is a session tree, by its root's id or any of its sessions.
        """
        statuses = () if status is None else reports.statuses_of(status)
        require_limit(limit, ITEMS_PER_PAGE_MAX)
        session_id = getattr(session, "id", session)
        wanted = {"session_id": session_id, "root_id": getattr(root, "root_id", root)}
        wanted |= {"holder": holder, "type": type, "queue": queue}
        given = {name: value for name, value in wanted.items() if value is not None}
        for name, value in given.items():
            require_text(name.removesuffix("_id"), value)
        page = reports.page_of(given, statuses)
        bounds = {"before": reports.before_of(before), "limit": limit}
        found = yield from listed(page, **given, **bounds)
        return [WorkItem(self.runtime, row) for row in found]

    @query
    def dead(self, *, before: int | None = None, limit: int = 100) -> Op[Items[C]]:
        """Return failed items that were not redriven, newest first."""
        require_limit(limit, ITEMS_PER_PAGE_MAX)
        found = yield from rows(reports.LIST_DEAD, before=reports.before_of(before), limit=limit)
        return [WorkItem(self.runtime, row) for row in found]

    @whole_query
    def counts(self, *, finished: bool = True, at_most: int | None = None) -> Op[Counts]:
        """Count items by type and status, with their ages. Reads every item.

        With `at_most`, counting stops there for each type and status, so the cost is bounded.
        """
        return (yield from reports.counts(finished=finished, at_most=at_most))

    @query
    def health(
        self, *, stale_seconds: float = reports.STALE_SECONDS, at_most: int = reports.COUNTED_MAX
    ) -> Op[LeaseHealth]:
        """Count the leases of running items; one is stale without a heartbeat for this long.

        Only the `at_most` leases that expire first are read, so the cost is bounded.
        """
        return (yield from reports.health(stale_seconds, at_most))

    @whole_query
    def growth(self, *, limit: int = 10) -> Op[Grown]:
        """Return the sessions with the most checkpoints."""
        require_limit(limit, GROWTH_MAX)
        return (yield from growth(limit))

    @query
    def find(self, id: str) -> Op[WorkItem[C]]:
        """Return an item by its id, its number or a unique prefix of its id, or raise NotFound.

        A prefix has 8 characters or more.
        """
        row = yield from find_row("work item", SELECT_ITEMS, require_text("id", id))
        if row is None:
            raise transitions.not_found(id)
        return WorkItem(self.runtime, row)

    @query
    def errors(self, id: str) -> Op[Failures]:
        """Return the last failed attempts of an item, newest first; the last 20 are kept."""
        row = yield from self._found_row(id)
        return (yield from reports.errors(self.runtime.codec, row))

    @query
    def why(self, id: str) -> Op[str]:
        """Return a sentence that says why an item runs or does not."""
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
