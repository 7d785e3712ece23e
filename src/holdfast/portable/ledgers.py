"""Ledgers of older formats: what was done, as effects that calls of today find again."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

from msgspec import Raw

from ..effects.identity import identify
from ..effects.pen import Pen
from ..effects.rows import Identity, Request
from ..effects.salts import mark_of
from ..records import EffectReason
from ..sessions.access import Place
from .frames import EffectFrame, Frame, KeyFrame, SaltFrame, SessionFrame

REASONS: dict[str, EffectReason | None] = {
    "completed": None,
    "failed": "raised",
    "unknown": "owner_died",
}


class LegacyLedger:
    """Turns the rows of an older ledger into effects; it invents the salt they are known by."""

    def __init__(self, pen: Pen, key: bytes | None) -> None:
        self._pen = pen
        self._key = key
        self.salt = os.urandom(32).hex()
        self._generations: Counter[str] = Counter()

    def frames(self) -> Iterator[Frame]:
        """Start over, and yield what effects are known by."""
        self._generations.clear()
        yield SaltFrame(self.salt)
        if self._key is not None:
            yield KeyFrame(mark_of(self._key))

    def call(self, session: SessionFrame, arguments: Any, **fields: Any) -> EffectFrame:
        """Return a tool call of a session: an equal call of that session finds it."""
        identity = self._identify(session.id, fields["tool"], "session", arguments, arguments)
        return self._frame(identity, session, arguments, **fields)

    def once(
        self, session: SessionFrame | None, key: str, arguments: Any, **fields: Any
    ) -> EffectFrame:
        """Return a key of the whole store: `once` with it, and without a request, finds it."""
        session_id = None if session is None else session.id
        identity = self._identify(session_id, fields["tool"], "once", None, key)
        return self._frame(identity, session, arguments, **fields)

    def _identify(
        self, session_id: str | None, tool: str, policy: str, arguments: Any, distinct: Any
    ) -> Identity:
        place = None if session_id is None else Place(session_id, 0, session_id, None)
        request = Request(
            tool=tool,
            effect="mutate",
            arguments=arguments,
            policy=policy,
            distinct=distinct,
            doubt="park",
            holder="",
            lease_ms=0,
        )
        salt = self._key or bytes.fromhex(self.salt)
        return identify(salt, self._pen.codec.limits, place, request)

    def _frame(
        self,
        identity: Identity,
        session: SessionFrame | None,
        arguments: Any,
        *,
        id: str,
        tool: str,
        status: str,
        idempotency_key: str,
        result: Any,
        issued_at: int,
        ended_at: int,
        call_id: str | None = None,
        item_id: str | None = None,
        issued_version: int = 0,
        expires_at: int | None = None,
    ) -> EffectFrame:
        self._generations[identity.key] += 1
        known = status if status in {"completed", "failed"} else "unknown"
        parts = {"arguments": Raw(self._pen.encoded("arguments", arguments))}
        if known != "unknown":
            part = "result" if known == "completed" else "error"
            parts[part] = Raw(self._pen.encoded(part, result if part == "result" else str(result)))
        return EffectFrame(
            session_number=None if session is None else session.number,
            session_id=None if session is None else session.id,
            id=id,
            scope=identity.scope,
            key=identity.key,
            generation=self._generations[identity.key],
            call_id=call_id,
            item_id=item_id,
            issued_version=issued_version,
            tool=tool,
            effect="mutate",
            is_irreversible=1,
            request_digest=identity.digest,
            idempotency_key=idempotency_key,
            status=known,  # type: ignore[arg-type]
            reason=REASONS[known],
            attempt=1,
            holder=None,
            fence=1,
            timeout_ms=0,
            settle_ms=0,
            ttl_ms=None if expires_at is None else max(0, expires_at - ended_at),
            replay_of=None,
            undoes=None,
            undone_by=None,
            decided_by=None,
            issued_at=issued_at,
            ended_at=ended_at,
            expires_at=expires_at if known == "completed" else None,
            parts=parts,
        )
