"""Messages that arrive through a transport: each is applied once, in one transaction.

A request becomes a session and a work item that is claimed at once. If it came from this store,
its session is a child of the asking one; otherwise the ask is written here as that of a caller
without a session, and its answer is sent back. A repeated message is recognised by its id.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..arguments import require_text, require_text_or_none
from ..errors import InvalidArgument
from ..kernel.operation import Lock, Op, Row, Runtime, one, operation, rows
from ..kernel.schema import read_store_id
from ..sessions.rows import READ_PLACE_BY_ID
from ..work.claims import Claim, claim_item
from .answers import answer, cancel_call
from .asks import (
    AGENT_CHARACTERS_MAX,
    READ_ASK,
    Ask,
    Origin,
    add_ask,
    delivery_id,
    drafted,
    insert_delivery,
    lock_new_tree,
    read_ask,
    report_progress,
    set_progress,
)
from .outbox import REMOVE_MESSAGE, REMOVE_OF_ASK, post_answer, route_of, store_address
from .records import Artifact
from .settlement import BY_ASKER

UNKNOWN = "unknown"
HEAR = "UPDATE hf_asks SET heard = :number WHERE id = :id AND heard < :number RETURNING id"


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """A message as it arrived through a transport; `store_id` is the store that sent it."""

    transport: str
    store_id: str
    ask_id: str
    number: int
    token: str | None
    """Identifies the asker of a call: the digest of a key that only the asker has."""
    body: Mapping[str, Any]

    @property
    def local_id(self) -> str:
        """The id in this store of an ask from another store.

        It includes the token, so a cancel with a wrong key names a call that does not exist.
        """
        name = f"{self.store_id} {self.ask_id} {self.token}"
        return str(uuid.UUID(bytes=hashlib.sha256(name.encode()).digest()[:16], version=5))


@operation
def take_request(runtime: Runtime, incoming: Incoming, agent: str, claim: Claim) -> Op[Row | None]:
    """Create the session and the claimed item of a request; None if it is known or cancelled."""
    if incoming.store_id == (yield from read_store_id()):
        ask_id = incoming.ask_id
        is_new = yield from _take_own(runtime, incoming)
    else:
        ask_id = incoming.local_id
        is_new = yield from _take_foreign(runtime, incoming, agent)
    return (yield from claim_item(delivery_id(ask_id), claim)) if is_new else None


def _take_own(runtime: Runtime, incoming: Incoming) -> Op[bool]:
    ask = yield from one(READ_ASK, id=incoming.ask_id)
    if ask is not None:
        yield Lock(ask["root_id"])
        ask = yield from one(READ_ASK, id=incoming.ask_id)
    yield from rows(REMOVE_MESSAGE, number=incoming.number, ask_id=incoming.ask_id)
    if ask is None or ask["state"] != "open" or ask["route"] is None:
        return False
    if (yield from one(READ_PLACE_BY_ID, id=ask["id"])) is not None:
        return False
    yield from insert_delivery(runtime, ask)
    return True


def _take_foreign(runtime: Runtime, incoming: Incoming, agent: str) -> Op[bool]:
    id, user = incoming.local_id, incoming.body.get("user")
    require_text_or_none("user", user)
    asked = Ask(agent, incoming.body.get("input"), "never", id=id)
    draft = yield from drafted(runtime, asked)
    if (yield from lock_new_tree(draft)):
        return False
    given: dict[str, Any] = {"root_id": id, "origin": _origin(incoming, agent)}
    yield from add_ask(runtime, None, draft, (), user=user, **given)
    return True


def _origin(incoming: Incoming, agent: str) -> Origin:
    require_text("ask", incoming.ask_id)
    require_text("store", incoming.store_id)
    return Origin(incoming.store_id, incoming.ask_id, route_of(incoming.transport, agent))


@operation
def take_cancel(runtime: Runtime, incoming: Incoming, agent: str | None) -> Op[None]:
    """Cancel the call of another store; if its request has not arrived yet, it is not served.

    `agent` is the agent whose instance received the message; None if the store received it.
    """
    if incoming.store_id == (yield from read_store_id()):
        # In the asking store, the call itself records that it is over.
        yield from rows(REMOVE_MESSAGE, number=incoming.number, ask_id=incoming.ask_id)
        return
    id = incoming.local_id
    draft = yield from drafted(runtime, Ask(agent or UNKNOWN, None, "never", id=id))
    if not (yield from lock_new_tree(draft)):
        if agent is None:
            return
        given: dict[str, Any] = {"root_id": id, "origin": _origin(incoming, agent)}
        yield from add_ask(runtime, None, draft, (), **given)
    if (yield from cancel_call(runtime, id, BY_ASKER)):
        # The caller that cancelled it needs no answer.
        address = store_address(incoming.store_id)
        yield from rows(REMOVE_OF_ASK, ask_id=incoming.ask_id, kind="answer", address=address)


@operation
def take_answer(runtime: Runtime, incoming: Incoming) -> Op[None]:
    """Record the answer of a peer at another store; one to an unknown call is dropped."""
    if (yield from _is_carried(incoming.ask_id)):
        body = incoming.body
        artifacts = _artifacts(body.get("artifacts", []))
        given = (incoming.ask_id, body.get("result"), str(body.get("status")), artifacts)
        yield from answer(runtime, *given, tells_peer=False)


@operation
def take_progress(runtime: Runtime, incoming: Incoming) -> Op[None]:
    """Record the progress of a peer at another store, unless a later one is known."""
    if not (yield from _is_carried(incoming.ask_id)):
        return
    ask = yield from read_ask(incoming.ask_id, locks=True)
    note, agent = incoming.body.get("note"), incoming.body.get("agent")
    if (yield from one(HEAR, id=incoming.ask_id, number=incoming.number)) is None:
        return
    if agent is None:
        yield from set_progress(runtime, incoming.ask_id, note)
    elif ask["state"] == "open":
        # Of a peer of the peer: it has a deadline of its own.
        require_text("agent", agent, AGENT_CHARACTERS_MAX)
        yield from report_progress(runtime, ask, runtime.redactor.redact(note), agent)


@operation
def reject(
    runtime: Runtime, incoming: Incoming, kind: str, agent: str | None, reason: str
) -> Op[None]:
    """Answer a call with an error if its request or answer is unusable, so that nobody waits."""
    if kind == "answer" or incoming.store_id == (yield from read_store_id()):
        if (yield from _is_carried(incoming.ask_id)):
            yield from answer(runtime, incoming.ask_id, reason, "error", (), tells_peer=False)
    elif kind == "request" and agent is not None:
        origin = _origin(incoming, agent)
        ask = {"remote_store": origin.store_id, "origin_id": origin.ask_id, "route": origin.route}
        yield from post_answer(runtime, ask, "error", reason, ())


def _is_carried(ask_id: str) -> Op[bool]:
    """Whether the store has this call and its answer may arrive through a transport."""
    ask = yield from one(READ_ASK, id=require_text("ask", ask_id))
    return ask is not None and ask["route"] is not None and ask["origin_id"] is None


def _artifacts(given: Any) -> list[Artifact]:
    try:
        return [Artifact(**each) for each in given]
    except TypeError:
        raise InvalidArgument("the artifacts of the answer cannot be read") from None
