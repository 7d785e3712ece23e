"""Small steps that many tests of work begin with."""

from __future__ import annotations

from typing import Any

from holdfast import VirtualClock
from holdfast.testing.subject import Subject, done
from tests.checkpoints.colours import sql


async def opened(subject: Subject) -> tuple[Any, VirtualClock]:
    clock = VirtualClock()
    return await subject.open(clock=clock, durability="normal"), clock


async def claimed(store: Any, **arguments: Any) -> Any:
    """Submit an item and claim it."""
    await done(store.work.submit(**{"type": "mail", **arguments}))
    [item] = await done(store.work.claim("worker", lease_seconds=30))
    return item


async def kinds(store: Any, root_id: str) -> list[str]:
    return [event.kind for event in await done(store.events(root_id))]


async def claim_all(store: Any, queue: str) -> Any:
    return await done(store.work.claim("w", queues=queue, limit=100))


async def dumped(store: Any) -> list[Any]:
    found = []
    for table in ("hf_work", "hf_checkpoints", "hf_sessions", "hf_events", "hf_pins"):
        found.append(await done(sql(store, f"SELECT * FROM {table}")))
    return found
