"""Writes by requests: applied once per Idempotency-Key, with conflicts recorded."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from typing import Any

import msgspec

from ..answers.problems import Refusal
from ..errors import HoldfastError, VersionConflict
from ..kernel.operation import Op
from ..records import SessionRef
from ..replies import remembered
from ..session import Session
from ..state.conflicts import ConflictLog
from .messages import NOTHING, Answer, Call

HEADER = "idempotency-key"
KEY_CHARACTERS_MAX = 255


async def write(
    call: Call,
    change: Callable[[Any], Any],
    shape: Callable[[Any], Answer],
    *,
    is_composed: bool = False,
) -> Answer:
    """Apply a change to the request's session and return its outcome, converted by `shape`.

    `change` takes the session in the colour that is needed and returns what its method returns. One
    that makes several calls (`is_composed`) always runs in one transaction.
    """
    key = key_of(call)
    if key is None and not is_composed:
        return shape(await change(call.session))
    try:
        return await transact(call, lambda tx: change(tx.within(call.session)), shape)
    except VersionConflict as conflict:
        # Inside a caller's transaction, state does not record conflicts itself.
        with contextlib.suppress(HoldfastError):
            await ConflictLog(call.session).add(conflict.fields, 1, False)
        raise


async def transact(
    call: Call, change: Callable[[Any], Op[Any]], shape: Callable[[Any], Answer]
) -> Answer:
    """Run operations in one transaction and return their outcome, converted by `shape`."""
    key = key_of(call)
    if key is None:
        return shape(await call.store.run(change))
    return await _once(call, key, change, shape)


async def _once(
    call: Call, key: str, change: Callable[[Any], Op[Any]], shape: Callable[[Any], Answer]
) -> Answer:
    asked = f"{call.endpoint.method} {call.instance}"
    scope = hashlib.sha256(f"{call.token.id} {asked}".encode()).hexdigest()
    digest = hashlib.sha256(asked.encode() + b"\0" + call.raw_body).hexdigest()

    def outcome(tx: Any) -> Op[Any]:
        answer = shape((yield from change(tx)))
        return {
            "status": answer.status,
            "headers": answer.headers,
            "body": None if answer.body is NOTHING else msgspec.to_builtins(answer.body),
            "has_body": answer.body is not NOTHING,
        }

    def run(tx: Any) -> Op[Any]:
        session = _ref(call.found)
        op = outcome(tx)
        return (
            yield from remembered(call.store.runtime.codec, scope, key, digest, op, session=session)
        )

    reply = await call.store.run(run)
    kept = reply.outcome
    answer = Answer(kept["status"], kept["body"] if kept["has_body"] else NOTHING, kept["headers"])
    if reply.is_replayed:
        answer.headers["idempotency-replayed"] = "true"
    return answer


def _ref(session: Session[Any] | None) -> SessionRef | None:
    return None if session is None else SessionRef(session.id, session.number, session.root_id)


def key_of(call: Call) -> str | None:
    """Return the idempotency key of a request, quoted or not."""
    given = call.headers.get(HEADER)
    if given is None:
        return None
    if given[:1] == '"' and given[-1:] == '"' and len(given) > 1:
        given = given[1:-1].replace('\\"', '"').replace("\\\\", "\\")
    if not 0 < len(given) <= KEY_CHARACTERS_MAX or not given.isprintable():
        raise Refusal(
            "invalid_request",
            f"Idempotency-Key must have 1 to {KEY_CHARACTERS_MAX} printable characters",
            pointer=HEADER,
        )
    return given
