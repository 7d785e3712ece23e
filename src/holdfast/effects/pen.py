"""What is written about an effect: rows, outcomes and events, without their secrets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..codec import Codec
from ..errors import InvalidValue, LimitExceeded
from ..feed import event
from ..kernel.operation import Emit, Query, Row
from ..records import Effect
from ..redaction import Redaction
from ..sessions.access import Place
from .identity import derive_key
from .rows import FINISH, ISSUE, REPLAY, Outcome, Ticket, Wanted, context, tidy


@dataclass(frozen=True, slots=True)
class Pen:
    """Makes statements and events of what is known; it asks the store nothing."""

    codec: Codec
    redactor: Redaction

    def encoded(self, part: str, value: Any) -> bytes:
        """Return a part of an effect as a body, without its secrets."""
        return self.codec.encode(self.redactor.redact(value), name=part)

    def plain(self, value: Any) -> Any:
        """Return a value without its secrets, or a word on why it cannot be stored."""
        try:
            value = self.redactor.redact(value)
            self.codec.encode(value, name="result")
        except (InvalidValue, LimitExceeded) as error:
            return f"(not storable: {error})"
        return value

    def storable(self, result: Any) -> Outcome:
        """Return a completed call's outcome; a result that cannot be stored is left out of it."""
        try:
            body = self.codec.encode(result, name="result")
        except (InvalidValue, LimitExceeded) as error:
            return Outcome("completed", "not_storable", None, str(error))
        return Outcome("completed", None, result, body=body)

    def issuing(
        self,
        id: str,
        wanted: Wanted,
        newest: Row | None,
        before: Row | None,
        outcome: Outcome,
        *,
        is_first: bool = True,
        keeps_key: bool = False,
    ) -> Query:
        """Return the statement that writes an attempt, after another of the same effect."""
        request, identity = wanted.request, wanted.identity
        generation = 1 if newest is None else newest["generation"] + 1
        is_retry = before is not None and before["status"] == "failed" and not before["is_expired"]
        # A key of the caller's is forgotten some time and then means something new. Any other is
        # the same again after a backup was restored: its receiver may know it already.
        material = id if request.policy == "once" else identity.key
        idempotency_key = derive_key(identity.salt, material, generation)
        if is_retry and before is not None and keeps_key:
            idempotency_key = before["idempotency_key"]
        elif request.idempotency_key is not None:
            idempotency_key = request.idempotency_key
        session_number, session_id = wanted.owner or (None, None)
        row = {
            "id": id,
            "scope": identity.scope,
            "key": identity.key,
            "generation": generation,
            "call_id": request.call_id,
            "session_number": session_number,
            "session_id": session_id,
            "item_id": request.item_id,
            "issued_version": wanted.issued_version,
            "tool": request.tool,
            "effect": request.effect,
            "is_irreversible": int(request.is_irreversible),
            "request_digest": identity.digest,
            "idempotency_key": idempotency_key,
            "arguments": self.codec.seal(wanted.arguments, context=context(id, "arguments")),
            "attempt": before["attempt"] + 1 if is_retry and before is not None else 1,
            "holder": request.holder,
            "lease_ms": request.lease_ms,
            "timeout_ms": request.timeout_ms,
            "settle_ms": request.settle_ms,
            "ttl_ms": request.ttl_ms,
            "undoes": request.undoes,
            "is_first": int(is_first),
            "place_number": None if wanted.place is None else wanted.place.number,
            "session_fence": None if wanted.place is None else wanted.place.fence,
            "salts": wanted.belief.salts,
            "session_salt": wanted.belief.session_salt,
            **self._sealed(id, outcome),
        }
        del row["note"]
        return Query(ISSUE, row)

    def replaying(
        self, id: str, wanted: Wanted, effect: Effect, key: str, generation: int
    ) -> Query:
        """Return the statement that writes a call which another's effect answers."""
        session_number, session_id = wanted.owner or (None, None)
        outcome = Outcome(effect.status, effect.reason, effect.result, effect.error)
        row = {
            "id": id,
            "scope": wanted.identity.scope,
            "key": key,
            "generation": generation,
            "call_id": wanted.request.call_id,
            "session_number": session_number,
            "session_id": session_id,
            "item_id": wanted.request.item_id,
            "request_digest": wanted.identity.digest,
            "arguments": self.codec.seal(wanted.arguments, context=context(id, "arguments")),
            "holder": wanted.request.holder,
            "number": effect.number,
            **self._sealed(id, outcome),
        }
        for column in ("status", "reason", "note"):
            del row[column]
        return Query(REPLAY, row)

    def finishing(self, ticket: Ticket, outcome: Outcome, old_status: str) -> Query:
        """Return the statement that writes an outcome."""
        place = ticket.place
        parameters = {
            "number": ticket.number,
            "fence": ticket.fence,
            "old_status": old_status,
            "session_number": None if place is None else place.number,
            "session_fence": None if place is None else place.fence,
            "decided_by": outcome.decided_by,
            **self._sealed(ticket.id, outcome),
        }
        return Query(FINISH, parameters)

    def late(self, id: str, outcome: Outcome, holder: str) -> bytes:
        """Return an outcome that came too late, as it is kept beside the effect."""
        error = None if outcome.error is None else self.tidied(outcome.error)
        said = {"status": outcome.status, "error": error, "holder": holder}
        body = self.codec.encode({**said, "result": self.plain(outcome.result)}, name="late")
        return self.codec.seal(body, context=context(id, "late"))

    def events(self, wanted: Wanted, id: str, outcome: Outcome) -> list[Emit]:
        """Return what the feed is told of an attempt; nothing outside a session."""
        place, request = wanted.place, wanted.request
        if place is None:
            return []
        return [self.event(place, id, request.tool, request.call_id, outcome)]

    def event(
        self,
        place: Place,
        id: str,
        tool: str,
        call_id: str | None,
        outcome: Outcome,
        *,
        replay_of: str | None = None,
    ) -> Emit:
        """Return what the feed is told of an effect's new status."""
        data: dict[str, Any] = {"effect_id": id, "tool": tool, "call_id": call_id}
        data |= {"status": outcome.status, "reason": outcome.reason}
        kind = f"effect_{outcome.status}"
        if outcome.decided_by is not None:
            data["decided_by"], kind = outcome.decided_by, "effect_resolved"
        if replay_of is not None:
            data["replay_of"], kind = replay_of, "effect_replayed"
        return event(self.codec, place.root_id, place.session_id, kind, data)

    def _sealed(self, id: str, outcome: Outcome) -> dict[str, Any]:
        """Return an outcome as columns, without its secrets."""

        def sealed(part: str, value: Any) -> bytes:
            return self.codec.seal(self.encoded(part, value), context=context(id, part))

        def result() -> bytes:
            redacted = self.redactor.redact(outcome.result)
            body = outcome.body
            if body is None or redacted is not outcome.result:
                body = self.codec.encode(redacted, name="result")
            return self.codec.seal(body, context=context(id, "result"))

        has_result = outcome.status == "completed" and outcome.reason != "not_storable"
        error = None if outcome.error is None else self.tidied(outcome.error)
        return {
            "status": outcome.status,
            "reason": outcome.reason,
            "result": result() if has_result else None,
            "error": None if error is None else sealed("error", error),
            "note": None if outcome.note is None else sealed("note", self.tidied(outcome.note)),
        }

    def tidied(self, text: str) -> str:
        """Return a text that can be stored; it is cut only after its secrets are out."""
        return tidy(self.redactor.redact(text))
