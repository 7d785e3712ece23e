"""The ledger's rows: their SQL, how requests and outcomes are redacted and stored in them, and the
result or error that a call gets from them.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Generic, TypeVar

from ..arguments import require_text
from ..codec import Codec
from ..dataclass import dataclass
from ..errors import (
    EffectFailed,
    InvalidValue,
    LeaseLost,
    LimitExceeded,
    NotFound,
    Unresolved,
    quoted,
)
from ..feed import event
from ..kernel.operation import Emit, Lock, Op, Query, Row, one
from ..kernel.sql import one_of
from ..leases import Guard
from ..records import Effect, EffectStatus
from ..redaction import Redaction
from ..sessions.access import MAY_WRITE_SESSION, Place
from ..sessions.rows import ALL_SESSIONS, AMONG_NUMBERS, place_of_number
from ..wire import travels
from .requests import NEWEST_SALT, SALT_OF_SESSION, EffectRequest, derive_key

V = TypeVar("V")
ERROR_CHARACTERS_MAX = 10_000
FIRST_FENCE = 1
NUMBER_MAX = 2**62
# What `undone_by` says of an effect that went back with a world; no id is like it.
BY_WORLD = "world"
IS_IN_WORLD = f"coalesce(undone_by, '') <> '{BY_WORLD}'"
OWNER_COLUMNS = ("session_number", "session_id", "root_above", "issued_version")

# An effect that was undone is undone for its replays too.
EFFECT_COLUMNS = """number, id, scope, key, generation, call_id, session_number, session_id,
    root_above, item_id, issued_version, tool, effect, is_irreversible, is_outside, request_digest,
    idempotency_key, arguments, status, reason, result, error, attempt, holder, fence,
    lease_expires_at, timeout_ms, settle_ms, ttl_ms, replay_of, undoes, coalesce((
        SELECT o.undone_by FROM hf_effects o WHERE o.id = e.replay_of
    ), undone_by) AS undone_by, decided_by, note, late, issued_at, ended_at, expires_at,
    unlinked_at"""
TICKET_COLUMNS = "number, id, fence, tool, call_id, idempotency_key, undoes"
# The one rule on when an effect without an outcome may be taken over or verified: its owner's lease
# has expired (or it was parked), and its request can no longer be in flight.
TAKEOVER_AT = """(settle_ms + CASE WHEN status = 'unknown'
    THEN CASE WHEN lease_expires_at > ended_at THEN lease_expires_at ELSE ended_at END
    WHEN lease_expires_at > issued_at + timeout_ms THEN lease_expires_at
    ELSE issued_at + timeout_ms END)"""
IS_ABANDONED = f"(status = 'issued' AND {TAKEOVER_AT} <= :now)"
SELECT_EFFECTS = f"""
SELECT {EFFECT_COLUMNS}, CASE WHEN status = 'issued' THEN {TAKEOVER_AT} END AS takeover_at,
    {TAKEOVER_AT} - :now AS wait_ms, expires_at IS NOT NULL AND expires_at <= :now AS is_expired
FROM hf_effects e"""  # noqa: S608
EFFECT_BY_CALL = f"""{SELECT_EFFECTS}
WHERE scope = :scope AND call_id = :call_id AND call_id IS NOT NULL
ORDER BY number DESC LIMIT :limit
"""
EFFECT_BY_KEY = f"""{SELECT_EFFECTS} WHERE key = :key AND generation > 0
ORDER BY generation DESC LIMIT :limit
"""
EFFECT_BY_ID = f"{SELECT_EFFECTS} WHERE id = :id"
LOCK_EFFECT = f"{EFFECT_BY_ID} /*pg FOR NO KEY UPDATE */"
LOCK_EFFECT_STATUS = "SELECT status FROM hf_effects WHERE id = :id /*pg FOR NO KEY UPDATE */"
# The parameters of a new row by type, and the columns that the statement computes.
GIVEN_COLUMNS = {
    "TEXT": "id scope key call_id session_id root_above item_id approval tool effect"
    " request_digest idempotency_key status reason holder replay_of undoes",
    "INTEGER": "generation session_number is_irreversible is_outside attempt timeout_ms settle_ms"
    " ttl_ms",
    "BLOB": "arguments result error",
}
INSERTED = {
    **{
        name: f"CAST(:{name} AS {kind})"
        for kind, names in GIVEN_COLUMNS.items()
        for name in names.split()
    },
    "issued_version": f"""coalesce(CAST(:issued_version AS INTEGER), (
        SELECT s.version FROM {ALL_SESSIONS} WHERE s.number = CAST(:session_number AS INTEGER)
    ), 0)""",  # noqa: S608
    "lease_expires_at": "CASE WHEN CAST(:status AS TEXT) = 'issued' THEN :now + :lease_ms END",
    "issued_at": ":now",
    "ended_at": "CASE WHEN CAST(:status AS TEXT) <> 'issued' THEN :now END",
    "expires_at": """CASE WHEN CAST(:status AS TEXT) = 'completed'
        THEN coalesce(CAST(:expires_at AS INTEGER), :now + CAST(:ttl_ms AS INTEGER)) END""",
}
# An approval is for one epoch, and for one effect: all attempts of it share an idempotency key.
IS_APPROVED = f"""(CAST(:approval AS TEXT) IS NULL OR (
    EXISTS (
        SELECT 1 FROM {ALL_SESSIONS} WHERE s.number = CAST(:place_number AS INTEGER)
            AND s.epoch = CAST(:approved_epoch AS INTEGER)
    )
    AND NOT EXISTS (
        SELECT 1 FROM hf_effects e WHERE e.approval = CAST(:approval AS TEXT)
            AND e.call_id = CAST(:call_id AS TEXT)
            AND e.idempotency_key <> CAST(:idempotency_key AS TEXT)
    )
))"""  # noqa: S608
# With is_first it is sent together with the lookups, and checks itself that they find nothing.
INSERT_EFFECT = f"""
INSERT INTO hf_effects ({", ".join(INSERTED)})
SELECT {", ".join(INSERTED.values())}
WHERE {IS_APPROVED} AND (:is_first = 0 OR (
    (CAST(:follows AS TEXT) IS NULL OR EXISTS (
        SELECT 1 FROM hf_effects e WHERE e.id = CAST(:follows AS TEXT)
    ))
    AND NOT EXISTS (
        SELECT 1 FROM hf_effects e WHERE e.key = CAST(:key AS TEXT) AND e.generation > 0
    )
    AND NOT EXISTS (
        SELECT 1 FROM hf_effects e WHERE e.scope = CAST(:scope AS TEXT)
            AND e.call_id = CAST(:call_id AS TEXT) AND e.call_id IS NOT NULL
    )
    AND (CAST(:place_number AS INTEGER) IS NULL OR EXISTS (
        SELECT 1 FROM {ALL_SESSIONS} WHERE s.number = CAST(:place_number AS INTEGER)
            AND s.epoch <= 1 AND s.origin_number IS NULL
            AND {MAY_WRITE_SESSION.format(fence=":session_fence")}
        /*pg FOR NO KEY UPDATE */
    ))
    AND {NEWEST_SALT} = CAST(:salts_number AS INTEGER)
    AND {SALT_OF_SESSION} = CAST(:session_salt AS INTEGER)
))
ON CONFLICT (key, generation) WHERE generation > 0 DO NOTHING
RETURNING {TICKET_COLUMNS}, session_number
"""  # noqa: S608
TAKE_OVER_EFFECT = f"""
UPDATE hf_effects SET status = 'issued', reason = NULL, holder = :holder, fence = fence + 1,
    lease_expires_at = :now + :lease_ms, ended_at = NULL
WHERE number = :number AND fence = :fence AND (status = 'unknown' OR {IS_ABANDONED})
RETURNING fence
"""  # noqa: S608
FINISH_EFFECT = f"""
UPDATE hf_effects SET status = :status, reason = :reason, result = :result, error = :error,
    decided_by = :decided_by, note = :note, ended_at = :now, lease_expires_at = NULL,
    arguments = CASE
        WHEN unlinked_at IS NULL OR CAST(:status AS TEXT) = 'unknown' THEN arguments END,
    expires_at = CASE WHEN CAST(:status AS TEXT) = 'completed' THEN :now + ttl_ms END
WHERE number = :number AND fence = :fence AND status = :old_status
    AND (CAST(:session_fence AS INTEGER) IS NULL OR EXISTS (
        SELECT 1 FROM {ALL_SESSIONS} WHERE s.number = :session_number
            AND s.fence = :session_fence AND s.holder IS NOT NULL
        /*pg FOR NO KEY UPDATE */
    ))
RETURNING id
"""  # noqa: S608
RENEW_EFFECT = """
UPDATE hf_effects SET lease_expires_at = :now + :lease_ms
WHERE number = :number AND fence = :fence AND status = 'issued' RETURNING number
"""
# A late retry needs the key, digest, status and result. Resolving an effect in doubt needs all.
UNLINKED = ", ".join(
    f"{name} = CASE WHEN status NOT IN ('completed', 'failed') THEN {name} END"
    for name in ("arguments", "error", "note", "late", "decided_by")
)
UNLINK_EFFECTS_OF_SESSION = f"""
UPDATE hf_effects SET unlinked_at = :now, {UNLINKED} WHERE session_number = :number
"""  # noqa: S608
_LINKED = one_of(
    f"""
    SELECT number FROM hf_effects WHERE session_number {AMONG_NUMBERS} AND unlinked_at IS NULL
    LIMIT :limit
    """  # noqa: S608
)
UNLINK_EFFECTS = f"""
UPDATE hf_effects SET unlinked_at = :now, {UNLINKED} WHERE number {_LINKED} RETURNING number
"""  # noqa: S608

# Includes those of an earlier session of the same id, which calls of this one find.
OF_SESSION = (
    "session_number = :number",
    "session_id = :session_id AND unlinked_at IS NOT NULL AND session_number <> :number",
)
EFFECT_ATTEMPTS = f"{SELECT_EFFECTS} WHERE key = :key AND generation > 0 ORDER BY generation"
UNSETTLED_EFFECTS = " UNION ALL ".join(
    f"{SELECT_EFFECTS} WHERE {each} AND status <> 'completed' AND undone_by IS NULL AND {{which}}"
    for each in OF_SESSION
)
UNRESOLVED_EFFECTS = UNSETTLED_EFFECTS.format(
    which=f"status IN ('unknown', 'issued') AND (status = 'unknown' OR {IS_ABANDONED})"
)
OPEN_EFFECTS = UNSETTLED_EFFECTS.format(which="status IN ('unknown', 'issued')")
PENDING_EFFECTS = UNSETTLED_EFFECTS.format(which="status = 'issued'")
# PostgreSQL expects few effects of any session, and would read and sort all of them. Of this range
# it expects many, of which coalesce() keeps half, and reads the newest first along the index.
RECENT_CALLS = f"""{SELECT_EFFECTS}
WHERE (session_number, number) < (:number, {NUMBER_MAX}) AND session_number >= :number
    AND session_number IS NOT NULL AND call_id IS NOT NULL AND {IS_IN_WORLD}
    AND coalesce(issued_version >= :low, false) AND coalesce(issued_version <= :high, false)
ORDER BY session_number DESC, number DESC LIMIT :limit"""


@travels
@dataclass(slots=True)
class EffectOutcome:
    """The status of an attempt, and what is recorded with it."""

    status: EffectStatus
    reason: str | None = None
    result: Any = None
    error: str | None = None
    decided_by: str | None = None
    note: str | None = None
    body: bytes | None = None
    """The encoded result, if it was encoded already."""

    def _to_wire(self) -> tuple[Any, ...]:
        """Return all but the encoded result, which the store makes itself."""
        return tuple(getattr(self, each.name) for each in fields(self) if each.name != "body")

    @classmethod
    def _from_wire(
        cls,
        runtime: Any,
        status: EffectStatus,
        reason: str | None,
        result: Any,
        error: str | None,
        decided_by: str | None,
        note: str | None,
    ) -> EffectOutcome:
        """Return the outcome; only this class's own constant is an attempt that has begun."""
        if status == "issued":
            return ISSUED
        return cls(status, reason, result, error, decided_by, note)


ISSUED = EffectOutcome("issued")


@travels
@dataclass(slots=True)
class Ticket:
    """The right to record the outcome of one attempt."""

    number: int
    id: str
    fence: int
    tool: str
    call_id: str | None
    idempotency_key: str
    undoes: str | None
    place: Place | None
    guard: Guard | None
    owner_number: int | None = None
    """The number of the session that the effect belongs to, if it is not that of `place`."""

    @property
    def event_fields(self) -> tuple[str, str, str | None]:
        """The arguments of `Statements.events` that name the effect."""
        return self.id, self.tool, self.call_id

    def lost(self) -> LeaseLost:
        """Return the error of an owner whose effect was taken over."""
        return LeaseLost(
            f"{self.tool}: effect {self.id} was taken over or abandoned; the outcome reported by "
            "this owner does not count",
            effect_id=self.id,
            fence=self.fence,
        )


@travels
@dataclass(frozen=True, slots=True)
class Result(Generic[V]):
    """What a tool returned.

    `replay_of` is the effect whose stored result this is, or None if the tool ran for this call.
    """

    value: V
    effect_id: str
    replay_of: str | None = None

    @property
    def replayed(self) -> bool:
        """Whether the tool was not run for this call."""
        return self.replay_of is not None


def ticket_of(row: Row, place: Place | None, guard: Guard | None = None) -> Ticket:
    """Return the ticket for a row at its current fence."""
    columns = {name: row[name] for name in TICKET_COLUMNS.split(", ")}
    number, owner_number = None, row["session_number"]
    if place is not None:
        number, guard = place.number, place.guard
    owner_number = None if owner_number == number else owner_number
    return Ticket(**columns, place=place, guard=guard, owner_number=owner_number)


class Statements:
    """Builds statements, events and records; it does no I/O."""

    def __init__(self, codec: Codec, redactor: Redaction) -> None:
        self.codec = codec
        self.redactor = redactor

    def encoded(self, part: str, value: Any) -> bytes:
        """Return a part of an effect as bytes, redacted."""
        return self.codec.encode(self.redactor.redact(value), name=part)

    def storable(self, result: Any) -> EffectOutcome:
        """Return the outcome of a completed call, without its result if that cannot be stored."""
        try:
            body = self.codec.encode(result, name="result")
        except (InvalidValue, LimitExceeded) as error:
            return EffectOutcome("completed", "not_storable", None, str(error))
        return EffectOutcome("completed", None, result, body=body)

    def issue(
        self,
        id: str,
        request: EffectRequest,
        outcome: EffectOutcome = ISSUED,
        newest: Row | None = None,
        before: Row | None = None,
        owner: Row | None = None,
        *,
        is_first: bool = False,
        follows: str | None = None,
        keeps_key: bool = False,
    ) -> Query:
        """Return the statement that inserts the next attempt of an effect.

        `owner` is a row with the session and version it belongs to, if not the request's own. A
        first attempt that `follows` another effect is inserted only if that one was.
        """
        identity = request.identity
        generation = 1 if newest is None else newest["generation"] + 1
        # A caller's own key expires, and then starts a new effect. Any other key must lead to the
        # same idempotency key after a backup is restored: the receiver may know it already.
        material = id if request.policy == "once" else identity.key
        idempotency_key = derive_key(identity.salt, material, generation)
        attempt = 1
        if request.idempotency_key is not None:
            idempotency_key = request.idempotency_key
        if before is not None and before["status"] == "failed" and not before["is_expired"]:
            attempt = before["attempt"] + 1
            idempotency_key = before["idempotency_key"] if keeps_key else idempotency_key
        tool, approval = request.tool, request.approval
        return self._insert(
            id,
            request,
            outcome,
            key=identity.key,
            generation=generation,
            tool=tool.name,
            effect=tool.effect,
            is_irreversible=int(tool.is_irreversible),
            is_outside=int(tool.outside),
            approval=None if approval is None else approval.name,
            approved_epoch=None if approval is None else approval.epoch,
            idempotency_key=idempotency_key,
            attempt=attempt,
            timeout_ms=tool.timeout_ms,
            settle_ms=tool.settle_ms,
            ttl_ms=request.ttl_ms,
            is_first=int(is_first),
            follows=follows,
            **({} if owner is None else {name: owner[name] for name in OWNER_COLUMNS}),
        )

    def replay(self, id: str, request: EffectRequest, row: Row, newest: Row | None) -> Query:
        """Return the statement that inserts the row of a replayed call.

        With `newest`, for a replay from another session, it has the next generation of its own key.
        """
        effect = self.effect(row)
        copied = (
            "tool", "effect", "is_irreversible", "is_outside", "idempotency_key", "attempt",
            "timeout_ms", "settle_ms", "ttl_ms", "expires_at",
        )  # fmt: skip
        return self._insert(
            id,
            request,
            EffectOutcome(effect.status, effect.reason, effect.result, effect.error),
            key=row["key"] if newest is None else request.identity.key,
            generation=0 if newest is None else newest["generation"] + 1,
            replay_of=effect.replay_of or effect.id,
            **{name: row[name] for name in copied},
        )

    def _insert(
        self, id: str, request: EffectRequest, outcome: EffectOutcome, **given: Any
    ) -> Query:
        place, identity = request.place, request.identity
        number = None if place is None else place.number
        is_root = place is None or place.root_id == place.session_id
        row = {
            "id": id,
            "scope": identity.scope,
            "call_id": request.call_id,
            "session_number": number,
            "session_id": None if place is None else place.session_id,
            "root_above": None if place is None or is_root else place.root_id,
            "item_id": request.item_id,
            "approval": None,
            "approved_epoch": None,
            "issued_version": None,
            "request_digest": identity.digest,
            "arguments": self.codec.seal(request.body, context=context(id, "arguments")),
            "holder": request.holder,
            "lease_ms": request.tool.lease_ms,
            "replay_of": None,
            "undoes": request.undoes,
            "expires_at": None,
            "is_first": 0,
            "follows": None,
            "place_number": number,
            "session_fence": None if place is None else place.fence,
            "salts_number": identity.salts_number,
            "session_salt": identity.session_salt,
            **self._sealed(id, outcome),
            **given,
        }
        del row["note"]
        return Query(INSERT_EFFECT, row)

    def finish(self, ticket: Ticket, outcome: EffectOutcome, old_status: str) -> Query:
        """Return the statement that records an outcome if the ticket is still valid."""
        place = ticket.place
        return Query(
            FINISH_EFFECT,
            {
                "number": ticket.number,
                "fence": ticket.fence,
                "old_status": old_status,
                "session_number": None if place is None else place.number,
                "session_fence": None if place is None else place.fence,
                "decided_by": outcome.decided_by,
                **self._sealed(ticket.id, outcome),
            },
        )

    def late(self, id: str, outcome: EffectOutcome, holder: str) -> bytes:
        """Return the sealed report of an owner that lost the effect."""
        report = {"status": outcome.status, "holder": holder}
        try:
            result = self.redactor.redact(outcome.result)
            self.codec.encode(result, name="result")
        except (InvalidValue, LimitExceeded) as problem:
            result = f"(not storable: {problem})"
        error = None if outcome.error is None else self.storable_text(outcome.error)
        body = self.codec.encode({**report, "result": result, "error": error}, name="late")
        return self.codec.seal(body, context=context(id, "late"))

    def events(
        self,
        place: Place | None,
        id: str,
        tool: str,
        call_id: str | None,
        outcome: EffectOutcome,
        replay_of: str | None = None,
    ) -> list[Emit]:
        """Return the event of an effect's new status; none without a session or its tree."""
        if place is None or not place.root_id:
            return []
        data: dict[str, Any] = {"effect_id": id, "tool": tool, "call_id": call_id}
        data |= {"status": outcome.status, "reason": outcome.reason}
        kind = f"effect_{outcome.status}"
        if outcome.decided_by is not None:
            data["decided_by"], kind = outcome.decided_by, "effect_resolved"
        if replay_of is not None:
            data["replay_of"], kind = replay_of, "effect_replayed"
        return [event(self.codec, place.root_id, place.session_id, kind, data)]

    def effect(self, row: Row) -> Effect:
        """Return the record of a row."""
        fields = {name: row[name] for name in Effect.__dataclass_fields__}
        for part in ("arguments", "result", "error", "note", "late"):
            if row[part] is not None:
                fields[part] = self.codec.unpack(row[part], context=context(row["id"], part))
        if row["unlinked_at"] is not None:
            fields["session_id"] = None
        for flag in ("is_irreversible", "is_outside"):
            fields[flag] = bool(row[flag])
        return Effect(**fields)

    def storable_text(self, text: str) -> str:
        """Return a text redacted, then cut to size, and valid as UTF-8."""
        text = self.redactor.redact(text)[:ERROR_CHARACTERS_MAX]
        return text.encode("utf-8", "replace").decode()

    def _sealed(self, id: str, outcome: EffectOutcome) -> dict[str, Any]:
        """Return an outcome as columns, redacted and sealed."""
        parts: dict[str, bytes | None] = {"result": None, "error": None, "note": None}
        if outcome.status == "completed" and outcome.reason != "not_storable":
            redacted, body = self.redactor.redact(outcome.result), outcome.body
            if body is None or redacted is not outcome.result:
                body = self.codec.encode(redacted, name="result")
            parts["result"] = body
        for part, text in (("error", outcome.error), ("note", outcome.note)):
            if text is not None:
                parts[part] = self.encoded(part, self.storable_text(text))
        return {
            "status": outcome.status,
            "reason": outcome.reason,
            **{
                part: None if body is None else self.codec.seal(body, context=context(id, part))
                for part, body in parts.items()
            },
        }


def context(id: str, part: str) -> tuple[str, ...]:
    """Return the context that an encrypted part of an effect is bound to."""
    return "hf_effects", id, part


def locks(place: Place | None) -> list[Lock]:
    """Return the lock of an effect's tree, if it has one."""
    # A tree is never removed, so it is there if the session ever was.
    return [Lock(place.root_id, is_asked=False)] if place is not None and place.root_id else []


def topic(id: str) -> str:
    """Return the signal topic on which the end of an effect is announced."""
    return f"effect:{id}"


def read_effect(id: object, sql: str = EFFECT_BY_ID) -> Op[Row]:
    """Return the row of an effect, or raise NotFound."""
    row = yield from one(sql, id=require_text("id", id))
    if row is None:
        raise NotFound(f"there is no effect {id!r}", id=id)
    return row


def place_of(row: Row) -> Op[Place | None]:
    """Return an effect's session, if it still exists."""
    session = yield from place_of_number(row["session_number"])
    if session is None:
        return None
    return Place(session["id"], session["number"], session["root_id"], None)


def owner_of(ticket: Ticket) -> Op[Place | None]:
    """Return the session whose feed tells of an effect; if it is not the caller's, lock its tree.

    To be called before the effect is locked. Of an effect of a deleted session, the caller's tells.
    """
    if ticket.owner_number is None:
        return ticket.place
    owner = yield from place_of({"session_number": ticket.owner_number})
    if owner is None:
        return ticket.place
    yield Lock(owner.root_id)
    return owner


def known_result(effect: Effect) -> Result[Any]:
    """Return the result of a settled effect, or raise its error."""
    match effect.status:
        case "completed" if effect.reason == "not_storable":
            raise failed_before(effect.tool, effect.id, f"it happened, but {effect.error}")
        case "completed":
            return Result(effect.result, effect.id, effect.replay_of or effect.id)
        case "failed":
            raise failed_before(effect.tool, effect.id, effect.error)
    raise unresolved(effect.tool, effect.id, effect.error)


def failed_before(tool: str, id: str, error: str | None) -> EffectFailed:
    """Return the error of a call whose effect failed permanently."""
    why = quoted(error or "no reason was recorded")
    return EffectFailed(f"{tool} failed before (effect {id}): {why}", effect_id=id)


def unresolved(tool: str, id: str, error: str | None) -> Unresolved:
    """Return the error of a call whose effect is in doubt."""
    why = f" ({quoted(error)})" if error else ""
    return Unresolved(
        f"the outcome of {tool} is unknown{why}; effect {id} is parked and blocks identical calls. "
        "Resolve it with store.resolve(effect_id, Landed(…) or NotLanded(), by=…) or "
        f"`holdfast effects resolve {id}`",
        effect_id=id,
    )


def is_settled(effect_id: str | None) -> Op[bool]:
    """Whether an effect has an outcome or is gone; False for None."""
    if effect_id is None:
        return False
    found = yield from one(LOCK_EFFECT_STATUS, id=effect_id)
    return found is None or found["status"] not in {"issued", "unknown"}
