"""Sending the outbox: rows that are due are taken, sent, and removed once confirmed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..kernel.operation import Lock, Op, Row, Runtime, one, operation, query, rows
from .answers import answer
from .asks import READ_ASK
from .outbox import REMOVE_MESSAGE, Kind, cancel_token, message_context, post
from .records import ask_context, opened

TAKE_DUE = """
UPDATE hf_outbox SET attempts = attempts + 1, due_at = :now + :lease_ms
WHERE number IN (
    /*pg SELECT unnest(ARRAY( */
    SELECT number FROM hf_outbox WHERE route = :route AND due_at <= :now
    ORDER BY due_at, number LIMIT :limit /*pg FOR NO KEY UPDATE SKIP LOCKED */
    /*pg )) */
)
RETURNING number, kind, ask_id, route, address, body, attempts
"""
NEXT_DUE = """
SELECT min(due_at) AS due_at, :now AS now FROM hf_outbox WHERE route = :route
"""
POSTPONE = """
UPDATE hf_outbox SET due_at = :now + :delay_ms WHERE number = :number AND attempts = :attempts
"""
SET_REMOTE = """
UPDATE hf_asks SET remote_store = :store_id WHERE id = :id AND state = 'open'
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A message to be sent, with what a credentials hook may need to know about it."""

    number: int
    attempts: int
    kind: Kind
    ask_id: str
    route: str
    address: str
    agent: str | None
    user: str | None
    session_id: str | None
    root_id: str | None
    token: str | None
    body: bytes


@operation
def take_due(runtime: Runtime, route: str, limit: int, lease_ms: int) -> Op[list[Outgoing]]:
    """Take messages of a route that are due, oldest first, so that no other sender sends them."""
    found = yield from rows(TAKE_DUE, route=route, limit=limit, lease_ms=lease_ms)
    taken = []
    for row in sorted(found, key=lambda row: int(row["number"])):
        outgoing = yield from _outgoing(runtime, row)
        if outgoing is not None:
            taken.append(outgoing)
    return taken


def _outgoing(runtime: Runtime, row: Row) -> Op[Outgoing | None]:
    """Return a message; a request whose call was removed is removed too."""
    codec, id, kind = runtime.codec, row["ask_id"], row["kind"]
    told: Mapping[str, Any] = {}
    body = opened(codec, row["body"], message_context(id))
    if kind == "request":
        ask = yield from one(READ_ASK, id=id)
        if ask is None:
            yield from rows(REMOVE_MESSAGE, number=row["number"], ask_id=id)
            return None
        # Encoded alone, so that an input of the maximum size can be sent.
        told, body = ask, opened(codec, ask["input"], ask_context(id, "input"))
    elif kind == "cancel":
        told, body = body or {}, None
    return Outgoing(
        number=row["number"],
        attempts=row["attempts"],
        kind=kind,
        ask_id=id,
        route=row["route"],
        address=row["address"],
        agent=told.get("agent"),
        user=told.get("user_id"),
        session_id=told.get("session_id"),
        root_id=told.get("root_id"),
        token=_token(kind, told.get("cancel_key")),
        body=codec.encode(body),
    )


def _token(kind: Kind, key: str | None) -> str | None:
    """Return the token of a message: of a request, a digest; of its cancel, the key itself."""
    if key is None or kind == "cancel":
        return key
    return cancel_token(key) if kind == "request" else None


@query
def next_due(_: Runtime, route: str) -> Op[float | None]:
    """Return in how many seconds a message of a route is due; None if there is none."""
    [row] = yield from rows(NEXT_DUE, route=route)
    return None if row["due_at"] is None else max(0.0, (row["due_at"] - row["now"]) / 1000)


@operation
def postpone(_: Runtime, number: int, attempts: int, delay_ms: int) -> Op[None]:
    """Send a message again later, unless it is confirmed; no-op if another sender has taken it."""
    yield from rows(POSTPONE, number=number, attempts=attempts, delay_ms=delay_ms)


@operation
def confirm(_: Runtime, number: int, ask_id: str, store_id: str) -> Op[None]:
    """Remove a confirmed message; a later cancel of a request goes to the confirming store."""
    removed = yield from _removed(number, ask_id)
    if removed is not None and removed["kind"] == "request":
        yield from rows(SET_REMOTE, id=ask_id, store_id=store_id)


def _removed(number: int, ask_id: str) -> Op[Row | None]:
    """Remove a message, after locking the tree of its call."""
    ask = yield from one(READ_ASK, id=ask_id)
    if ask is not None:
        yield Lock(ask["root_id"])
    return (yield from one(REMOVE_MESSAGE, number=number, ask_id=ask_id))


@operation
def refuse(runtime: Runtime, outgoing: Outgoing, reason: str) -> Op[None]:
    """Give up on a message that no transport can carry: a request, or the result of an answer."""
    if (yield from _removed(outgoing.number, outgoing.ask_id)) is None:
        return
    if outgoing.kind == "request":
        yield from answer(runtime, outgoing.ask_id, reason, "error", (), tells_peer=False)
    elif outgoing.kind == "answer":
        body = {"status": "error", "result": reason, "artifacts": []}
        given = (outgoing.ask_id, outgoing.route, outgoing.address)
        yield from post(runtime, "answer", *given, body)
