"""The first page: what is running, what is waiting, and what needs a decision."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ....answers.shapes import EFFECT, PAUSE, SESSION
from ...messages import Answer, Call
from ..templates import Commands
from ..views import Pages, View, see_other
from .sessions import session_rows

routes = Pages()
SHOWN = 8
COUNTED = 100


@routes.page("/")
async def overview_page(call: Call) -> View | Answer:
    """Show what is running, what is waiting, and what needs a decision."""
    store, base = call.store, call.context.options.base_path
    if call.token.root_id is not None:
        return see_other(f"{base}/ui/sessions")
    newest = await store.sessions(limit=SHOWN, newest_first=True)
    counts = {
        status: len(await store.sessions(status=status, limit=COUNTED + 1))
        for status in ("active", "waiting", "failed")
    }
    doubtful = await store.effects(status="unknown", limit=COUNTED + 1)
    asked = await store.pauses(reason="approval", state="waiting", limit=COUNTED + 1)
    oldest = await store.pauses(state="waiting", limit=1)
    size = await store.size()
    work = await store.work.counts(finished=False, at_most=COUNTED)
    leases = await store.work.health()
    checkpoints = await store.checkpoints(limit=SHOWN)
    refused = await store.conflicts_per_hour()
    told: dict[str, Any] = {
        "sessions": counts,
        "in_doubt": len(doubtful),
        "approvals": len(asked),
        "oldest_pause": PAUSE(oldest[0]) if oldest else None,
        "size": asdict(size),
        "conflicts_per_hour": refused,
        "counted_up_to": COUNTED,
        "work": [asdict(each) for each in work],
        "leases": asdict(leases),
        "newest_sessions": list(map(SESSION, newest)),
        "oldest_in_doubt": list(map(EFFECT, doubtful[:SHOWN])),
    }
    items = {
        status: sum(each.items for each in work if each.status == status)
        for status in ("pending", "in_progress")
    }
    return View(
        template="overview.html",
        title="Overview",
        data=told,
        commands=Commands("/sessions", "sessions list"),
        given={
            **await session_rows(call, newest, has_children=False),
            "counts": counts,
            "doubtful": doubtful,
            "approvals": len(asked),
            "oldest": oldest[0] if oldest else None,
            "size": size,
            "refused": refused,
            "items": items,
            "leases": leases,
            "checkpoints": checkpoints,
            "counted": COUNTED,
            "shown": SHOWN,
        },
        live=("live",),
    )
