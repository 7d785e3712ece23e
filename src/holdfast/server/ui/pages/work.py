"""The work board: what is waiting, running or failed; retry, cancel and redrive."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal
from urllib.parse import quote

import msgspec

from ....answers.problems import Refusal
from ....answers.shapes import ITEM
from ....work.items import WorkStatus
from ...messages import Answer, Call
from ...pages import next_cursor, place_of
from ...routes.work import ItemsShape, reached_item
from ..forms import Around, Form
from ..templates import Commands, api_path
from ..views import ListQuery, PageQuery, Pages, View, page_size, see_other

routes = Pages()
REASON_CHARACTERS_MAX = 1_000
COUNTED = 1_000
# Claims and heartbeats are not events.
POLL_MS = 1_000


class WorkQuery(ListQuery):
    """Which items to list."""

    status: WorkStatus | Literal[""] = ""
    type: str = ""
    queue: str = ""


class ReleaseForm(Form):
    """The reason, and the fence of the holder that the reader has seen."""

    reason: Annotated[str, msgspec.Meta(min_length=1, max_length=REASON_CHARACTERS_MAX)]
    fence: int


@routes.page("/work", WorkQuery, is_store_wide=True)
async def work_page(call: Call) -> View:
    """Show work items, newest first, and how many there are of each type."""
    query, limit = call.query, page_size(call)
    asked: dict[str, Any] = {
        name: getattr(query, name) or None for name in ("status", "type", "queue")
    }
    found = await call.store.work.list(**asked, before=place_of(call), limit=limit)
    counts = await call.store.work.counts(finished=False, at_most=COUNTED)
    leases = await call.store.work.health()
    now_ms, ages = await call.store.now_ms(), call.context.ages
    ages.note(now_ms, counts)
    cursor = next_cursor(found, limit, "number")
    return View(
        template="work.html",
        title="Work",
        data={
            "items": ItemsShape(list(map(ITEM, found)), cursor),
            "counts": [asdict(each) for each in counts],
            "leases": asdict(leases),
            "oldest_seconds_by_minute": ages.seconds(now_ms),
        },
        commands=Commands.of(api_path("/work-items", **asked), "work", "list", **asked),
        given={
            "items": found,
            "counts": counts,
            "leases": leases,
            "query": query,
            "ages": ages.seconds(now_ms),
        },
        next_cursor=cursor,
        poll_ms=POLL_MS,
    )


@routes.page("/work/{id}")
async def item_page(call: Call) -> View:
    """Show a work item with its attempts, and say why it runs or does not."""
    item = await _found(call)
    errors = await call.store.work.errors(item.id)
    why = await call.store.work.why(item.id)
    return View(
        template="item.html",
        title=f"{item.type} - work item {item.number}",
        data={"item": ITEM(item), "errors": [asdict(each) for each in errors], "why": why},
        commands=Commands.of(f"/work-items/{quote(item.id, safe='')}", "work", "show", item.id),
        given={"item": item, "errors": errors, "why": why},
        poll_ms=POLL_MS,
    )


ITEM_PAGE = Around(item_page, lambda _: PageQuery())


@routes.form("/work/{id}/retry", Form, on=ITEM_PAGE)
async def retry_form(call: Call) -> Answer:
    """Make an item ready at once that is scheduled for later or waits for review."""
    item = await call.store.work.retry((await _found(call)).id)
    return _page(call, item.id)


@routes.form("/work/{id}/cancel", Form, on=ITEM_PAGE)
async def cancel_form(call: Call) -> Answer:
    """Cancel an item, or ask its holder to stop."""
    item = await _found(call)
    await call.store.work.cancel(item.id)
    return _page(call, item.id)


@routes.form("/work/{id}/release", ReleaseForm, on=ITEM_PAGE)
async def release_form(call: Call) -> Answer:
    """Take a running item away from its holder."""
    item, reason = await _found(call), call.body.reason
    if item.fence != call.body.fence:
        message = f"the item is held with fence {item.fence}, not {call.body.fence}; look again"
        raise Refusal("version_conflict", message)
    await call.acting_store.work.release(item.id, reason=reason)
    return _page(call, item.id)


@routes.form("/work/{id}/redrive", Form, on=ITEM_PAGE)
async def redrive_form(call: Call) -> Answer:
    """Submit a failed or cancelled item again, as a new one."""
    item = await call.store.work.redrive((await _found(call)).id)
    return _page(call, item.id)


async def _found(call: Call) -> Any:
    return reached_item(call, await call.store.work.get(call.path["id"]))


def _page(call: Call, id: str) -> Answer:
    return see_other(f"{call.context.options.base_path}/ui/work/{quote(id, safe='')}")
