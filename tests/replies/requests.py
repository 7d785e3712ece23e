"""Requests that add to the counter of a tree, under a key or in a lane, in either colour."""

from __future__ import annotations

from typing import Any

import holdfast
from holdfast.records import SessionRef
from holdfast.replies import Reply, lane_reply, remembered
from holdfast.testing.subject import done


def ref(session: Any) -> SessionRef:
    return SessionRef(session.id, session.number, session.root_id)


def adding(tx: holdfast.Transaction, session: Any, amount: int, outcome: Any) -> holdfast.Op[Any]:
    entry = yield from tx.within(session).state.increment("count", amount)
    return {"count": entry.value} if outcome is ... else outcome


def keyed(
    tx: holdfast.Transaction,
    session: Any,
    key: Any,
    amount: int = 1,
    *,
    scope: Any = "alice PUT",
    digest: Any = None,
    outcome: Any = ...,
) -> holdfast.Op[Reply]:
    """Add once for a key; the outcome is the new count unless another is given."""
    op = adding(tx, session, amount, outcome)
    digest = str(amount) if digest is None else digest
    codec = tx.runtime.codec
    return (yield from remembered(codec, scope, key, digest, op, session=ref(session)))


def numbered(
    tx: holdfast.Transaction,
    session: Any,
    number: Any,
    amount: int = 1,
    *,
    lane: Any = "lane 1",
    outcome: Any = ...,
) -> holdfast.Op[Reply]:
    """Add as a numbered request of a lane."""
    op = adding(tx, session, amount, outcome)
    codec = tx.runtime.codec
    return (yield from lane_reply(codec, lane, number, str(amount), op, session=ref(session)))


async def count(session: Any) -> int:
    found: int = await done(session.state.get("count", 0))
    return found
