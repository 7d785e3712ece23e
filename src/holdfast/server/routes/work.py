"""Work items: submit, claim and finish them from any language."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from ...answers.problems import Refusal
from ...answers.records import struct
from ...answers.shapes import ITEM
from ...clock import iso
from ...errors import NotFound
from ...items import WorkItem
from ...kernel.operation import Op
from ...work.items import WorkStatus
from .. import pages
from ..access import require_named_session, root_of
from ..endpoints import Endpoints
from ..messages import Answer, Call
from ..replay import HEADER, key_of, transact

routes = Endpoints()

Json = Any
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=31_536_000)]
Fence = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
ITEM_PATH = "/work-items/{id}"
HELD = ("not_found", "lease_lost", "idempotency_key_reused")


class ItemsQuery(pages.PageQuery):
    """Which items to list."""

    session: Name | None = None
    root: Name | None = None
    status: WorkStatus | None = None
    type: Name | None = None
    queue: Name | None = None
    holder: Name | None = None


class SubmitBody(msgspec.Struct, forbid_unknown_fields=True):
    """A work item to submit."""

    type: Name
    input: Json = None
    session: Name | None = None
    queue: Name | None = None
    priority: Annotated[int, msgspec.Meta(ge=-1_000_000, le=1_000_000)] = 0
    max_retries: Annotated[int, msgspec.Meta(ge=0, le=1_000)] = 3
    delay_seconds: Seconds | None = None
    key: Name | None = None
    on_crash: Literal["retry", "fail", "review"] = "retry"
    id: Name | None = None


class ClaimBody(msgspec.Struct, forbid_unknown_fields=True):
    """How many items to claim, and for which holder."""

    holder: Name
    limit: Annotated[int, msgspec.Meta(ge=1, le=1_000)] = 1
    queues: list[Name] | None = None
    lease_seconds: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 30


class HeldBody(msgspec.Struct, forbid_unknown_fields=True):
    """The fence of the lease, from the claim."""

    fence: Fence


class HeartbeatBody(HeldBody):
    """A lease to renew."""

    lease_seconds: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 30


class CompleteBody(HeldBody):
    """The output of an item."""

    output: Json = None


class FailBody(HeldBody):
    """Why an attempt failed."""

    error: Annotated[str, msgspec.Meta(min_length=1)]
    retry: bool = True
    delay_seconds: Seconds | None = None


ItemsShape = struct(
    "ItemsShape",
    "A page of items, newest first.",
    items=ITEM.many,
    next_cursor=str | None,
)


ClaimedShape = struct(
    "ClaimedShape",
    "The leased items; each has the fence with which its holder writes.",
    items=ITEM.many,
)


class BeatShape(msgspec.Struct):
    """When the lease expires, and whether the holder should stop."""

    lease_expires_at: str | None
    cancel_requested: bool


class StatusShape(msgspec.Struct):
    """The item's current status."""

    id: str
    status: WorkStatus


@routes.add("GET", "/work-items", "read", query=ItemsQuery, answers={200: ItemsShape},
            problems=("session_not_found",))  # fmt: skip
async def list_items(call: Call) -> Answer:
    """List work items, newest first."""
    query, limit = call.query, pages.limit_of(call)
    if query.session is not None:
        await call.context.sessions.find(query.session, call.token)
    found = await call.store.work.list(
        session=query.session,
        root=root_of(call, query.root),
        status=query.status,
        type=query.type,
        queue=query.queue,
        holder=query.holder,
        before=pages.place_of(call),
        limit=limit,
    )
    return pages.page(call, found, limit, "number", ItemsShape, ITEM)


@routes.add(
    "POST",
    "/work-items",
    "write",
    body=SubmitBody,
    takes=(HEADER,),
    answers={201: ITEM.type},
    problems=("session_not_found", "session_closed", "request_mismatch", "idempotency_key_reused"),
    example={"type": "summarize", "input": {"url": "https://example.org"}},
)
async def submit_item(call: Call) -> Answer:
    """Submit a work item; with the key or id of one that exists, that one is returned."""
    given = msgspec.structs.asdict(call.body)
    await require_named_session(call, call.body.session)
    root_id = call.token.root_id
    if root_id is None and key_of(call) is None:
        return Answer(201, ITEM(await call.store.work.submit(**given)))

    def submit(tx: Any) -> Op[WorkItem[Any]]:
        item: WorkItem[Any] = yield from tx.work.submit(**given)
        if root_id not in {None, item.root_id}:
            raise Refusal("forbidden", "an item in another tree has this key")
        return item

    return await transact(call, submit, lambda item: Answer(201, ITEM(item)))


@routes.add(
    "POST",
    "/work-items/claim",
    "write",
    body=ClaimBody,
    takes=(HEADER,),
    answers={200: ClaimedShape},
    problems=("idempotency_key_reused",),
    example={"holder": "worker-1", "limit": 1, "queues": ["summarize"]},
    is_store_wide=True,
)
async def claim_items(call: Call) -> Answer:
    """Lease ready items, highest priority first."""
    given = msgspec.structs.asdict(call.body)

    def shape(items: list[WorkItem[Any]]) -> Answer:
        return Answer(200, ClaimedShape(list(map(ITEM, items))))

    if key_of(call) is None:
        return shape(await call.store.work.claim(**given))

    def claim(tx: Any) -> Op[list[WorkItem[Any]]]:
        items: list[WorkItem[Any]] = yield from tx.work.claim(**given)
        return items

    return await transact(call, claim, shape)


@routes.add("GET", ITEM_PATH, "read", answers={200: ITEM.type}, problems=("not_found",))
async def get_item(call: Call) -> Answer:
    """Read one work item."""
    return Answer(200, ITEM(reached_item(call, await call.store.work.get(call.path["id"]))))


@routes.add(
    "POST", f"{ITEM_PATH}/heartbeat", "write", body=HeartbeatBody, answers={200: BeatShape},
    problems=HELD, example={"fence": 7},
)  # fmt: skip
async def heartbeat_item(call: Call) -> Answer:
    """Renew the lease of an item."""
    lease = call.body.lease_seconds

    def shape(beat: Any) -> Answer:
        expires = beat.lease_expires_at
        told = BeatShape(None if expires is None else iso(expires), beat.cancel_requested)
        return Answer(200, told)

    return await _held(call, lambda item: item.heartbeat(lease_seconds=lease), shape)


@routes.add(
    "POST", f"{ITEM_PATH}/complete", "write", body=CompleteBody, takes=(HEADER,),
    answers={200: StatusShape}, problems=HELD, example={"fence": 7, "output": {"pages": 3}},
)  # fmt: skip
async def complete_item(call: Call) -> Answer:
    """Complete an item with its output."""
    output = call.body.output
    return await _held(
        call, lambda item: item.complete(output), lambda _: _status(call, "completed")
    )


@routes.add(
    "POST", f"{ITEM_PATH}/fail", "write", body=FailBody, takes=(HEADER,),
    answers={200: StatusShape}, problems=HELD, example={"fence": 7, "error": "HTTP 503"},
)  # fmt: skip
async def fail_item(call: Call) -> Answer:
    """End an attempt with an error; the item is retried while retries are left."""
    body: FailBody = call.body
    given = {"retry": body.retry, "delay_seconds": body.delay_seconds}
    return await _held(
        call, lambda item: item.fail(body.error, **given), lambda status: _status(call, status)
    )


@routes.add(
    "POST", f"{ITEM_PATH}/release", "write", body=HeldBody, takes=(HEADER,),
    answers={200: StatusShape}, problems=HELD, example={"fence": 7},
)  # fmt: skip
async def release_item(call: Call) -> Answer:
    """Return an item to its queue; no retry is used up."""
    return await _held(call, lambda item: item.release(), lambda _: _status(call, "pending"))


@routes.add(
    "POST", f"{ITEM_PATH}/cancel", "write", answers={200: StatusShape}, problems=("not_found",)
)  # fmt: skip
async def cancel_item(call: Call) -> Answer:
    """Cancel an item, or ask its holder to stop."""
    reached_item(call, await call.store.work.get(call.path["id"]))
    return _status(call, await call.store.work.cancel(call.path["id"]))


@routes.add(
    "POST", f"{ITEM_PATH}/retry", "write", answers={200: ITEM.type}, problems=("not_found",)
)  # fmt: skip
async def retry_item(call: Call) -> Answer:
    """Make an item ready at once that is scheduled for later or waits for review."""
    reached_item(call, await call.store.work.get(call.path["id"]))
    return Answer(200, ITEM(await call.store.work.retry(call.path["id"])))


@routes.add(
    "POST", f"{ITEM_PATH}/redrive", "write", answers={201: ITEM.type},
    problems=("not_found", "session_closed", "refused"),
)  # fmt: skip
async def redrive_item(call: Call) -> Answer:
    """Submit a failed or cancelled item again, as a new one."""
    reached_item(call, await call.store.work.get(call.path["id"]))
    return Answer(201, ITEM(await call.store.work.redrive(call.path["id"])))


async def _held(call: Call, change: Any, shape: Any) -> Answer:
    """Apply a change under the lease to which the request's fence belongs."""
    id, fence = call.path["id"], call.body.fence
    if key_of(call) is None:
        # The fence is checked in the change's own transaction.
        if call.token.root_id is not None:
            reached_item(call, await call.store.work.get(id))
        answer: Answer = shape(await change(await call.store.work.get(id, fence=fence)))
        return answer

    def run(tx: Any) -> Op[Any]:
        if call.token.root_id is not None:
            # A wrong fence would be reported first.
            reached_item(call, (yield from tx.work.get(id)))
        item = yield from tx.work.get(id, fence=fence)
        return (yield from change(item))

    return await transact(call, run, shape)


def reached_item(call: Call, item: Any) -> Any:
    """Return an item that the token reaches."""
    if call.token.root_id not in {None, item.root_id}:
        raise NotFound(f"there is no work item {call.path['id']!r}")
    return item


def _status(call: Call, status: WorkStatus) -> Answer:
    return Answer(200, StatusShape(call.path["id"], status))
