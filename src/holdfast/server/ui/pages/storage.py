"""The size of the store, what retention keeps, and when it was pruned."""

from __future__ import annotations

from dataclasses import asdict

from ....kernel.health import dialect_of
from ....maintenance import retention
from ...messages import Call
from ..templates import Commands
from ..views import Pages, View

routes = Pages()
RECORDS = 1_000
PRUNES = 10


@routes.page("/storage", is_store_wide=True)
async def storage_page(call: Call) -> View:
    """Show the size of the store, and what is kept for how long."""
    store = call.store
    size = await store.size()
    number = int((await store.audit.head()).partition(":")[0])
    records = await store.audit.list(after=max(number - RECORDS, 0), limit=RECORDS)
    prunes = [each for each in reversed(records) if each.action == "store_pruned"][:PRUNES]
    kept = {
        "checkpoints": retention.KEEP,
        "work_days": call.context.options.work_days,
        "key_days": retention.KEY_DAYS,
        "effect_days": retention.EFFECT_DAYS,
        "history_days": retention.HISTORY_DAYS,
    }
    id, dialect = await store.store_id(), dialect_of(store.runtime.target)
    return View(
        template="storage.html",
        title="Storage",
        data={
            "store_id": id,
            "dialect": dialect,
            "size": asdict(size),
            "kept": kept,
            "prunes": [asdict(each) for each in prunes],
        },
        commands=Commands("/ui/storage?format=json", "doctor"),
        given={"id": id, "dialect": dialect, "size": size, "kept": kept, "prunes": prunes},
        live=("live",),
    )
