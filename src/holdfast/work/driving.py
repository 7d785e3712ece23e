"""Items that drive: an attempt holds its session's lease, and both live and end together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ..checkpoints.write import record_status
from ..errors import InvalidArgument
from ..kernel.operation import Op, Query, Row, batch, one, rows
from ..sessions.access import Place, lock_and_look, require_open, require_writable
from ..sessions.rows import GIVE_BACK_DRIVEN, LEASE_TO_ITEM, RENEW
from .items import Item

DRIVING = "SELECT driving_fence FROM hf_work WHERE number = :number"
TAKE = LEASE_TO_ITEM.format(
    expires_at="SELECT w.lease_expires_at FROM hf_work w WHERE w.number = :item_number"
)
NOTE = "UPDATE hf_work SET driving_fence = :fence WHERE number = :number"


def drive(item: Item[Any]) -> Op[int]:
    """Lease the item's session to its attempt, and return the lease's fence.

    A waiting session turns active. Raises SessionBusy while somebody else drives it.
    """
    if item.session_number is None or item.session_id is None or item.root_id is None:
        raise InvalidArgument(f"work item {item.id} has no session to drive")
    place = Place(item.session_id, item.session_number, item.root_id, None, item._guard())
    found = yield from lock_and_look(item.runtime, place)
    session = require_open(place, found)
    held = yield from one(DRIVING, number=item.number)
    if held is not None and held["driving_fence"] == session["fence"] and session["holder"]:
        return int(session["fence"])
    require_writable(item.runtime, place, found)
    holder = f"work item {item.id}, fence {item.fence}"
    taken = yield from one(TAKE, number=place.number, item_number=item.number, holder=holder)
    assert taken is not None
    fence = int(taken["fence"])
    yield from rows(NOTE, number=item.number, fence=fence)
    if session["status"] == "waiting":
        yield from record_status(item.runtime, replace(place, fence=fence), "waiting", "active")
    return fence


def renew_driven(items: Iterable[Row], lease_ms: int) -> Op[None]:
    """Prolong the sessions' leases that go with the leases of these items."""
    yield from _each(RENEW, items, lease_ms=lease_ms)


def give_back_driven(items: Iterable[Row]) -> Op[None]:
    """Give back the sessions that ended attempts drove; what they still write is refused."""
    yield from _each(GIVE_BACK_DRIVEN, items)


def _each(statement: str, items: Iterable[Row], **given: int) -> Op[None]:
    """Run a statement for every session that is driven, in the order of their numbers."""
    driven = {(row["session_number"], row["driving_fence"]) for row in items}
    queries = [
        Query(statement, {"number": number, "fence": fence, **given})
        for number, fence in sorted(pair for pair in driven if None not in pair)
    ]
    if queries:
        yield from batch(*queries)
