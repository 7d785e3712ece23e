"""Requests that may be sent twice: the first runs, the others get its outcome.

The record is locked before the request runs and written in its transaction. So the same request
sent at the same time waits for the first, and one that failed leaves no record.
"""

from __future__ import annotations

from typing import Any

from ..arguments import require_text, require_whole
from ..codec import Codec
from ..dataclass import dataclass
from ..errors import IdempotencyKeyReused, NotFound, RequestOutOfOrder
from ..kernel.operation import Lock, Op, Query, Row, batch, rows
from ..records import SessionRef

KEY_CHARACTERS_MAX = 255
# The key of a lane's record; idempotency keys are never empty.
LAST = ""
# The digest recorded for a request that was found not to have run; no request has this digest.
SETTLED = "settled"

LOCK_REPLY = """
INSERT INTO hf_replies (scope, key, number, digest, created_at) VALUES (:scope, :key, 0, '', :now)
ON CONFLICT (scope, key) DO UPDATE SET digest = hf_replies.digest
RETURNING number, digest, outcome
"""
WRITE_REPLY = """
UPDATE hf_replies SET number = :number, digest = :digest, outcome = :outcome,
    session_id = :session_id, created_at = :now
WHERE scope = :scope AND key = :key
"""


@dataclass(frozen=True, slots=True)
class Reply:
    """The outcome of a request, and whether it was run before."""

    outcome: Any
    is_replayed: bool


def remembered(
    codec: Codec,
    scope: str,
    key: str,
    digest: str,
    op: Op[Any],
    *,
    session: SessionRef | None = None,
) -> Op[Reply]:
    """Run `op` once for a key of a scope, and return its outcome now and on every repetition.

    The scope identifies the caller and the request; keys of two scopes never collide. `session` is
    what the request is about: the record is removed with it. Raises IdempotencyKeyReused if the
    digest differs.
    """
    place = {"scope": require_text("scope", scope), "key": require_key(key)}
    row = yield from _lock(place, digest, session)
    if row["number"]:
        op.close()
        return _replayed(codec, place, row, digest)
    return (yield from _run(codec, {**place, "number": 1, "digest": digest}, op, session))


def lane_reply(
    codec: Codec,
    lane: str,
    number: int,
    digest: str,
    op: Op[Any],
    *,
    session: SessionRef | None = None,
) -> Op[Reply]:
    """Run the next request of a lane, whose requests are numbered from 1, or repeat its last reply.

    Success uses up a number; after a failure, another request may use the same number. Raises
    IdempotencyKeyReused if the digest differs, and RequestOutOfOrder for any other number.
    """
    place = {"scope": require_text("lane", lane), "key": LAST}
    require_whole("number", number, 1)
    row = yield from _lock(place, digest, session)
    if number == row["number"]:
        op.close()
        return _replayed(codec, place, row, digest)
    if number != row["number"] + 1:
        op.close()
        raise _out_of_order(lane, number, row["number"])
    return (yield from _run(codec, {**place, "number": number, "digest": digest}, op, session))


def settle_lane(lane: str, number: int) -> Op[bool]:
    """Return whether a request of a lane was run; if it was not, it never will be."""
    place = {"scope": require_text("lane", lane), "key": LAST}
    require_whole("number", number, 1)
    row = yield from _lock(place, SETTLED, None)
    if row["number"] >= number:
        return bool(row["digest"] != SETTLED)
    settled = {**place, "number": number, "digest": SETTLED}
    yield from rows(WRITE_REPLY, **settled, outcome=None, session_id=None)
    return False


def require_key(key: object) -> str:
    """Return an idempotency key."""
    return require_text("idempotency key", key, KEY_CHARACTERS_MAX)


def _lock(place: dict[str, str], digest: str, session: SessionRef | None) -> Op[Row]:
    require_text("digest", digest)
    trees = [] if session is None else [Lock(session.root_id)]
    *_, [row] = yield from batch(*trees, Query(LOCK_REPLY, place))
    return row


def _run(
    codec: Codec, record: dict[str, Any], op: Op[Any], session: SessionRef | None
) -> Op[Reply]:
    outcome = yield from op
    body = codec.widened().pack(outcome, context=_context(record), name="outcome")
    session_id = None if session is None else session.id
    yield from rows(WRITE_REPLY, **record, outcome=body, session_id=session_id)
    return Reply(outcome, is_replayed=False)


def _replayed(codec: Codec, place: dict[str, str], row: Row, digest: str) -> Reply:
    what = f"idempotency key {place['key']!r}" if place["key"] else f"request {row['number']}"
    if row["outcome"] is None:
        raise NotFound(f"the outcome of {what} of this lane was deleted with its session")
    if row["digest"] != digest:
        raise IdempotencyKeyReused(f"{what} was another request; nothing was run", key=place["key"])
    context = _context({**place, **row})
    return Reply(codec.widened().unpack(row["outcome"], context=context), is_replayed=True)


def _context(record: Row) -> tuple[str, ...]:
    return "hf_replies", record["scope"], record["key"], str(record["number"])


def _out_of_order(lane: str, number: int, last: int) -> RequestOutOfOrder:
    if number < last:
        problem = f"request {number} is stale, {last} was answered since"
    elif last:
        problem = f"request {number} came after {last}; {last + 1} is next"
    else:
        problem = f"request {number} is the first of this lane here, which begins with 1"
    return RequestOutOfOrder(f"{problem}; nothing was run", lane=lane, number=number, last=last)
