"""Claiming items as a service does: with the sessions that they drive."""

from __future__ import annotations

import holdfast
from holdfast.kernel.operation import Call
from holdfast.peers.uptake import TakenUp, serve_turn
from holdfast.work.claims import Claim


def taken_up(
    store: holdfast.Store, agent: str, limit: int = 10, lease_seconds: int = 30
) -> dict[str, TakenUp | None]:
    """Claim the items of an agent as its service does; return what was taken up, by item."""
    claim = Claim("instance", limit, [f"agent:{agent}"], lease_seconds * 1_000, drives=True)
    call = Call(serve_turn, store.runtime, ((), claim))
    _, (rows, given) = store.runtime.driver.run(call)
    return {row["id"]: given.get(row["number"]) for row in rows}


def held(store: holdfast.Store, id: str) -> holdfast.WorkItem:
    return store.work.get(id, fence=store.work.get(id).fence)
