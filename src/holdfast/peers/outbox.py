"""The outbox: messages for a transport, written in the commit of the change that they report.

Instances of the agent that a route names take rows that are due, oldest first, and send them. A
taken row is due again after a while, so that another instance sends what a dead sender left. It
stays until the other end has confirmed the message; so nothing is lost even with the broker, and
a receiver must expect a message more than once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Literal

from ..kernel.operation import AfterCommit, Op, Row, Runtime, defer, one
from ..sessions.rows import READ_PLACE_BY_ID
from .records import Artifact, plain_artifact

Kind = Literal["request", "answer", "progress", "cancel"]

ADD_MESSAGE = """
INSERT INTO hf_outbox (kind, ask_id, route, address, body, due_at, created_at)
VALUES (:kind, :ask_id, :route, :address, CAST(:body AS BLOB), :now, :now)
"""
REMOVE_MESSAGE = """
DELETE FROM hf_outbox WHERE number = :number AND ask_id = :ask_id RETURNING kind
"""
REMOVE_OF_ASK = """
DELETE FROM hf_outbox WHERE ask_id = :ask_id AND kind = :kind AND address = :address
RETURNING attempts
"""
READ_ASKER = """
SELECT cancel_key, agent, user_id, session_id, root_id FROM hf_asks WHERE id = :id
"""


def agent_address(agent: str) -> str:
    """Return the address that the instances of an agent share."""
    return f"agent:{agent}"


def store_address(store_id: str) -> str:
    """Return the address of a store: any process that uses the store may receive from it."""
    return f"store:{store_id}"


def route_of(transport: str, agent: str | None) -> str:
    """Return the route of a message: instances of this agent send it, or a mesh if it is None."""
    return f"{transport}/{agent or ''}"


def topic_of(route: str) -> str:
    """Return the signal topic on which new messages of a route are announced."""
    return f"outbox:{route}"


def post(
    runtime: Runtime, kind: Kind, ask_id: str, route: str, address: str, body: Any = None
) -> Op[None]:
    """Write a message, and wake its senders once it is durable."""
    sealed = None
    if body is not None:
        sealed = runtime.codec.pack(body, context=message_context(ask_id), name=kind)
    given = {"kind": kind, "ask_id": ask_id, "route": route, "address": address}
    yield from defer(ADD_MESSAGE, **given, body=sealed)
    yield AfterCommit(lambda: runtime.signals.ring(topic_of(route)))


def post_answer(
    runtime: Runtime, ask: Row, status: str, result: Any, artifacts: Sequence[Artifact]
) -> Op[None]:
    """Write the answer to an ask that came from another store."""
    body = {
        "status": status,
        "result": result,
        "artifacts": [plain_artifact(each) for each in artifacts],
    }
    address = store_address(ask["remote_store"])
    yield from post(runtime, "answer", ask["origin_id"], ask["route"], address, body)


def withdraw_request(runtime: Runtime, ask: Row, *, tells_peer: bool) -> Op[None]:
    """Stop sending the request of a call; if it may have reached another store, cancel it there.

    The cancel has with it what it needs of the call, which may be deleted before it is sent.
    """
    address = agent_address(ask["agent"])
    waiting = yield from one(REMOVE_OF_ASK, ask_id=ask["id"], kind="request", address=address)
    is_unsent = waiting is not None and waiting["attempts"] == 0
    if not tells_peer or is_unsent or (yield from one(READ_PLACE_BY_ID, id=ask["id"])) is not None:
        return
    if ask["remote_store"] is not None:
        address = store_address(ask["remote_store"])
    asker = yield from one(READ_ASKER, id=ask["id"])
    yield from post(runtime, "cancel", ask["id"], ask["route"], address, asker)


def cancel_token(key: str) -> str:
    """Return the digest, sent with the request, of the key with which the call can be cancelled."""
    return hashlib.sha256(key.encode()).hexdigest()


def message_context(ask_id: str) -> tuple[str, ...]:
    """Return the context that the body of a message is bound to."""
    return "hf_outbox", ask_id
