"""Writes to shared state that were refused because another writer was first."""

from __future__ import annotations

from dataclasses import asdict

from ...messages import Call
from ..templates import Commands
from ..views import ListQuery, Pages, View, page_size
from .events import place_in_all

routes = Pages()
HOURS = 24
# A refused write is not an event.
POLL_MS = 1_000


@routes.page("/conflicts", ListQuery, is_store_wide=True)
async def conflicts_page(call: Call) -> View:
    """Show refused writes, newest first, and how many there were by hour."""
    limit = page_size(call)
    found = await call.store.conflicts(before=place_in_all(call), limit=limit)
    hours = await call.store.conflicts_per_hour(hours=HOURS)
    cursor = f"{found[-1].number} {found[-1].root_id}" if len(found) == limit else None
    return View(
        template="conflicts.html",
        title="Conflicts",
        data={
            "conflicts": [asdict(each) for each in found],
            "per_hour": hours,
            "next_cursor": cursor,
        },
        commands=Commands("/ui/conflicts?format=json"),
        given={"conflicts": found, "hours": hours},
        next_cursor=cursor,
        poll_ms=POLL_MS,
    )
