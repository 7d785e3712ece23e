"""Ledgers of older formats: what was done, as effects that calls of today find again."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

from ..effects.portable import AncestryRecord, EffectRecord, SaltsRecord
from ..effects.requests import GLOBAL, RequestIdentity, identify, mark_of, scope_of
from ..effects.statements import Statements
from ..kernel.portable import Record
from ..records import EffectReason
from ..sessions.portable import SessionRecord

REASONS: dict[str, EffectReason | None] = {
    "completed": None,
    "failed": "raised",
    "unknown": "owner_died",
}


class LegacyLedger:
    """Turns the rows of an older ledger into effects, under a new salt."""

    def __init__(self, statements: Statements, key: bytes | None) -> None:
        self._statements = statements
        self._key = key
        self.salt = os.urandom(32).hex()
        self._generations: Counter[str] = Counter()

    def records(self) -> Iterator[Record]:
        """Start over, and yield what effects are known by."""
        self._generations.clear()
        yield SaltsRecord([self.salt], mark_of(self._key) or None)

    def ancestry(self, number: int) -> AncestryRecord:
        """Return what the effects of a session are found by."""
        return AncestryRecord(number, self.salt, None)

    def call(self, session: SessionRecord, arguments: Any, **fields: Any) -> EffectRecord:
        """Return a tool call of a session: an identical call of that session finds it."""
        identity = self._identify(session, fields["tool"], "session", arguments, arguments)
        return self._record(identity, session, arguments, **fields)

    def once(
        self, session: SessionRecord | None, key: str, arguments: Any, **fields: Any
    ) -> EffectRecord:
        """Return a key of the whole store: `once` with it, and without a request, finds it."""
        identity = self._identify(session, fields["tool"], "once", None, key)
        return self._record(identity, session, arguments, **fields)

    def _identify(
        self,
        session: SessionRecord | None,
        tool: str,
        policy: str,
        arguments: Any,
        distinct: Any,
    ) -> RequestIdentity:
        salt = self._key or bytes.fromhex(self.salt)
        scope = GLOBAL if session is None else scope_of(session.id)
        limits = self._statements.codec.limits
        return identify(salt, limits, scope, tool, policy, arguments, distinct)

    def _record(
        self,
        identity: RequestIdentity,
        session: SessionRecord | None,
        arguments: Any,
        *,
        status: str,
        result: Any,
        ended_at: int,
        expires_at: int | None = None,
        **fields: Any,
    ) -> EffectRecord:
        self._generations[identity.key] += 1
        known = status if status in {"completed", "failed"} else "unknown"
        fields["arguments"] = self._statements.encoded("arguments", arguments)
        if known == "completed":
            fields["result"] = self._statements.encoded("result", result)
            fields["expires_at"] = expires_at
        elif known == "failed":
            fields["error"] = self._statements.encoded("error", str(result))
        return EffectRecord(
            session_number=None if session is None else session.number,
            session_id=None if session is None else session.id,
            scope=identity.scope,
            key=identity.key,
            generation=self._generations[identity.key],
            effect="mutate",
            is_irreversible=1,
            request_digest=identity.digest,
            status=known,  # type: ignore[arg-type]
            reason=REASONS[known],
            attempt=1,
            fence=1,
            ttl_ms=None if expires_at is None else max(0, expires_at - ended_at),
            ended_at=ended_at,
            **fields,
        )
