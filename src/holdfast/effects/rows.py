"""The rows of the ledger: their statements, and what is asked and said about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from ..codec import Codec
from ..errors import LeaseLost, NotFound, RequestMismatch
from ..kernel.operation import Lock, Op, Query, Row, Runtime, batch, one
from ..leases import Guard, Keeper
from ..records import Effect, EffectKind, EffectStatus
from ..sessions.access import LOOK, MAY_WRITE, Place, require_writable
from ..sessions.rows import ANY

ERROR_CHARACTERS_MAX = 10_000
PAST_ROWS_MAX = 1_000

# What was undone is undone for those it was replayed to as well.
COLUMNS = """number, id, scope, key, generation, call_id, session_number, session_id, item_id,
    issued_version, tool, effect, is_irreversible, request_digest, idempotency_key, arguments,
    status, reason, result, error, attempt, holder, fence, lease_expires_at, timeout_ms,
    settle_ms, replay_of, undoes, coalesce((
        SELECT o.undone_by FROM hf_effects o WHERE o.id = e.replay_of
    ), undone_by) AS undone_by, decided_by, note, late, issued_at, ended_at, expires_at,
    unlinked_at"""
TICKET = "number, id, fence, tool, call_id, idempotency_key, undoes"
# Its owner has stopped renewing its lease, and whatever it asked for has ended by now.
ABANDONED = """(status = 'issued' AND lease_expires_at + settle_ms <= :now
    AND issued_at + timeout_ms + settle_ms <= :now)"""
SELECT = f"""
SELECT {COLUMNS}, :now AS now_ms, {ABANDONED} AS is_abandoned,
    expires_at IS NOT NULL AND expires_at <= :now AS is_expired
FROM hf_effects e"""  # noqa: S608
BY_CALL = f"""{SELECT}
WHERE scope = :scope AND call_id = :call_id AND call_id IS NOT NULL
ORDER BY number DESC LIMIT :limit
"""
BY_KEY = f"""{SELECT} WHERE key = :key AND generation > 0
ORDER BY generation DESC LIMIT :limit
"""
BY_ID = f"{SELECT} WHERE id = :id /*pg FOR NO KEY UPDATE */"
ABANDONED_UNDER = """
SELECT number FROM hf_effects
WHERE key = :key AND idempotency_key = :idempotency_key AND reason = 'abandoned' LIMIT 1
"""
NEWEST_CHANGE = """
SELECT max(number) AS number FROM hf_effects
WHERE session_number = :session_number AND issued_version < :before
    AND effect IN ('write', 'mutate') AND replay_of IS NULL
"""
NEWEST_CHANGE_IN_CHAIN = """
SELECT max(number) AS number FROM hf_effects
WHERE scope = :scope AND session_number IS NULL AND item_id IS NOT NULL
    AND effect IN ('write', 'mutate') AND replay_of IS NULL
"""
ORIGINAL = "SELECT number FROM hf_effects WHERE id = :id"
# The first time it goes out with the looks, in the hope that there is nothing to be found; what
# is found then stands against it here as well.
ISSUE = f"""
INSERT INTO hf_effects (
    id, scope, key, generation, call_id, session_number, session_id, item_id, issued_version, tool,
    effect, is_irreversible, request_digest, idempotency_key, arguments, status, reason, result,
    error, attempt, holder, lease_expires_at, timeout_ms, settle_ms, ttl_ms, undoes, issued_at,
    ended_at, expires_at
)
SELECT CAST(:id AS TEXT), CAST(:scope AS TEXT), CAST(:key AS TEXT), CAST(:generation AS INTEGER),
    CAST(:call_id AS TEXT), CAST(:session_number AS INTEGER), CAST(:session_id AS TEXT),
    CAST(:item_id AS TEXT), coalesce(CAST(:issued_version AS INTEGER), (
        SELECT s.version FROM {ANY} WHERE s.number = CAST(:session_number AS INTEGER)
    ), 0), CAST(:tool AS TEXT), CAST(:effect AS TEXT), CAST(:is_irreversible AS INTEGER),
    CAST(:request_digest AS TEXT), CAST(:idempotency_key AS TEXT), CAST(:arguments AS BLOB),
    CAST(:status AS TEXT), CAST(:reason AS TEXT), CAST(:result AS BLOB), CAST(:error AS BLOB),
    CAST(:attempt AS INTEGER), CAST(:holder AS TEXT),
    CASE WHEN CAST(:status AS TEXT) = 'issued' THEN :now + :lease_ms END,
    CAST(:timeout_ms AS INTEGER), CAST(:settle_ms AS INTEGER), CAST(:ttl_ms AS INTEGER),
    CAST(:undoes AS TEXT), :now,
    CASE WHEN CAST(:status AS TEXT) <> 'issued' THEN :now END,
    CASE WHEN CAST(:status AS TEXT) = 'completed' THEN :now + CAST(:ttl_ms AS INTEGER) END
WHERE :is_first = 0 OR (
    NOT EXISTS (
        SELECT 1 FROM hf_effects e WHERE e.key = CAST(:key AS TEXT) AND e.generation > 0
    )
    AND NOT EXISTS (
        SELECT 1 FROM hf_effects e WHERE e.scope = CAST(:scope AS TEXT)
            AND e.call_id = CAST(:call_id AS TEXT) AND e.call_id IS NOT NULL
    )
    AND (CAST(:place_number AS INTEGER) IS NULL OR EXISTS (
        SELECT 1 FROM {ANY} WHERE s.number = CAST(:place_number AS INTEGER)
            AND s.epoch <= 1 AND s.origin_number IS NULL
            AND coalesce(s.salt, '') = CAST(:session_salt AS TEXT)
            AND {MAY_WRITE.format(fence=":session_fence")}
        /*pg FOR NO KEY UPDATE */
    ))
    AND (SELECT value FROM hf_meta WHERE name = 'effects_salt') = CAST(:salts AS TEXT)
)
ON CONFLICT (key, generation) WHERE generation > 0 DO NOTHING
RETURNING {TICKET}
"""  # noqa: S608
# A call that another's row answers; its result and error are sealed anew, as its own.
REPLAY = f"""
INSERT INTO hf_effects (
    id, scope, key, generation, call_id, session_number, session_id, item_id, issued_version, tool,
    effect, is_irreversible, request_digest, idempotency_key, arguments, status, reason, result,
    error, attempt, holder, timeout_ms, settle_ms, ttl_ms, replay_of, issued_at, ended_at,
    expires_at
)
SELECT CAST(:id AS TEXT), CAST(:scope AS TEXT), CAST(:key AS TEXT), CAST(:generation AS INTEGER),
    CAST(:call_id AS TEXT), CAST(:session_number AS INTEGER), CAST(:session_id AS TEXT),
    CAST(:item_id AS TEXT), coalesce((
        SELECT s.version FROM {ANY} WHERE s.number = CAST(:session_number AS INTEGER)
    ), 0), tool, effect, is_irreversible, CAST(:request_digest AS TEXT), idempotency_key,
    CAST(:arguments AS BLOB), status, reason, CAST(:result AS BLOB), CAST(:error AS BLOB), attempt,
    CAST(:holder AS TEXT), timeout_ms, settle_ms, ttl_ms, coalesce(replay_of, id), :now, :now,
    expires_at
FROM hf_effects WHERE number = :number
RETURNING number
"""  # noqa: S608
ISSUED = f"{SELECT} WHERE id = :id"
FIRST_FENCE = 1
TAKE_OVER = f"""
UPDATE hf_effects SET status = 'issued', reason = NULL, holder = :holder, fence = fence + 1,
    lease_expires_at = :now + :lease_ms, ended_at = NULL
WHERE number = :number AND fence = :fence AND (status = 'unknown' OR {ABANDONED})
RETURNING fence
"""  # noqa: S608
FINISH = f"""
UPDATE hf_effects SET status = :status, reason = :reason, result = :result, error = :error,
    decided_by = :decided_by, note = :note, ended_at = :now, lease_expires_at = NULL,
    arguments = CASE
        WHEN unlinked_at IS NULL OR CAST(:status AS TEXT) = 'unknown' THEN arguments END,
    expires_at = CASE WHEN CAST(:status AS TEXT) = 'completed' THEN :now + ttl_ms END
WHERE number = :number AND fence = :fence AND status = :old_status
    AND (CAST(:session_fence AS INTEGER) IS NULL OR EXISTS (
        SELECT 1 FROM {ANY} WHERE s.number = :session_number
            AND s.fence = :session_fence AND s.holder IS NOT NULL
        /*pg FOR NO KEY UPDATE */
    ))
RETURNING id
"""  # noqa: S608
UNDONE = "UPDATE hf_effects SET undone_by = :id WHERE id = :undoes"
RENEW = """
UPDATE hf_effects SET lease_expires_at = :now + :lease_ms
WHERE number = :number AND fence = :fence AND status = 'issued' RETURNING number
"""
UNLINK = "UPDATE hf_effects SET unlinked_at = :now WHERE session_number = :number"
# A late retry needs the key, the digest, the status and the result; a person in doubt needs all.
EMPTY = """
UPDATE hf_effects SET arguments = NULL, error = NULL, note = NULL, late = NULL, decided_by = NULL
WHERE session_number = :number AND status IN ('completed', 'failed')
"""
# Those of an earlier session of the same id too, which its calls find.
OF_SESSION = """(session_number = :session_number
    OR (session_id = :session_id AND unlinked_at IS NOT NULL))"""
HOLD_STATUS = "SELECT status FROM hf_effects WHERE id = :id /*pg FOR NO KEY UPDATE */"
KEEP_LATE = "UPDATE hf_effects SET late = :late WHERE number = :number"

Doubt = Literal["verify", "retry", "park", "fail"]
Match = Literal["match", "conflict", "none"]


@dataclass(slots=True, kw_only=True)
class Request:
    """A call, before it is known whether it is to be run."""

    tool: str
    effect: EffectKind
    arguments: Any
    policy: str
    distinct: Any
    doubt: Doubt
    call_id: str | None = None
    item_id: str | None = None
    chain_id: str | None = None
    """The first item of the redrive chain whose own call it is."""
    is_irreversible: bool = False
    cache_failures: bool = False
    holder: str
    lease_ms: int
    timeout_ms: int = 0
    settle_ms: int = 0
    ttl_ms: int | None = None
    undoes: str | None = None
    max_attempts: int | None = None
    idempotency_key: str | None = None
    guard: Guard | None = None
    """The lease of a work item without a session; a session's place has its own."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a request is known by, and the salt that made it so."""

    salt: bytes
    scope: str
    key: str
    digest: str


@dataclass(frozen=True, slots=True)
class Belief:
    """The salts as they were when a request was identified: the store's, the session's own."""

    salts: str
    session_salt: str


@dataclass(slots=True)
class Wanted:
    """A request with what it is known by, ready to be written."""

    place: Place | None
    request: Request
    identity: Identity
    arguments: bytes
    belief: Belief
    owner: tuple[int, str] | None = None
    """The number and id of the session whose effect it is."""
    issued_version: int | None = None
    """The version it belongs to, if that is not the session's present one."""


@dataclass(slots=True)
class Ticket:
    """The right to say what became of one attempt."""

    number: int
    id: str
    fence: int
    tool: str
    call_id: str | None
    idempotency_key: str
    place: Place | None
    undoes: str | None = None
    guard: Guard | None = None

    @property
    def lease(self) -> Guard | None:
        """The lease of a work item without which the outcome does not count."""
        return self.guard if self.place is None else self.place.guard

    def lost(self) -> LeaseLost:
        """Return the error of an owner whose effect is no longer its own."""
        return LeaseLost(
            f"{self.tool}: effect {self.id} was taken over or abandoned meanwhile; what this "
            "owner says of it changes nothing",
            effect_id=self.id,
            fence=self.fence,
        )


@dataclass(frozen=True, slots=True)
class Run:
    """The effect is this caller's to run."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Known:
    """The effect is settled: completed, failed for good, or in doubt."""

    effect: Effect


@dataclass(frozen=True, slots=True)
class Busy:
    """Somebody is running it, and may be stepped in for after some time."""

    effect: Effect
    wait_ms: int


@dataclass(frozen=True, slots=True)
class InDoubt:
    """Its owner is dead and it is this caller's to verify."""

    ticket: Ticket
    effect: Effect


Taken: TypeAlias = Run | Known | Busy | InDoubt


@dataclass(slots=True)
class Outcome:
    """What became of an attempt."""

    status: EffectStatus
    reason: str | None = None
    result: Any = None
    error: str | None = None
    decided_by: str | None = None
    note: str | None = None
    body: bytes | None = None
    """The result as it was encoded to see whether it can be stored."""


def unless_spent(
    outcome: Outcome, attempt: int, max_attempts: int | None, reason: str | None = None
) -> Outcome:
    """Return what becomes of a dead owner's attempt; parked, if there were enough of them."""
    is_to_be_run = outcome.status == "failed" and outcome.reason in {"not_landed", "abandoned"}
    if max_attempts is None or attempt < max_attempts or not is_to_be_run:
        return outcome
    said = f"it was not run again after attempt {attempt}, as max_attempts is {max_attempts}"
    error = "; ".join(filter(None, (outcome.error, said)))
    return Outcome("unknown", reason or "owner_died", error=error)


def locks(place: Place | None) -> list[Lock]:
    """Return the lock of the tree that an effect belongs to, if it belongs to one."""
    return [] if place is None else [Lock(place.root_id)]


def look_at(runtime: Runtime, place: Place, *asked: Query) -> Op[tuple[Row, list[list[Row]]]]:
    """Lock the tree and return the session's row and the answers, if it may be written."""
    keeper = Keeper.of(runtime)
    looks = (*keeper.looks(place.guard), Query(LOOK, {"number": place.number}))
    _, *answers = yield from batch(Lock(place.root_id), *looks, *asked)
    answers = keeper.require(place.guard, answers)
    return require_writable(runtime, place, answers[0]), answers[1:]


def look_without_session(
    runtime: Runtime, guard: Guard | None, *asked: Query
) -> Op[list[list[Row]]]:
    """Return the answers, if the work item that asks still has its lease."""
    keeper = Keeper.of(runtime)
    looks = keeper.looks(guard)
    if not looks and not asked:
        return []
    return keeper.require(guard, (yield from batch(*looks, *asked)))


def effect_of(codec: Codec, row: Row) -> Effect:
    """Return a row as a record."""

    def opened(part: str) -> Any:
        if row[part] is None:
            return None
        return codec.unpack(row[part], context=context(row["id"], part))

    fields = {name: row[name] for name in Effect.__dataclass_fields__ if name in row}
    for part in ("arguments", "result", "error", "note", "late"):
        fields[part] = opened(part)
    if row["unlinked_at"] is not None:
        fields["session_id"] = None
    fields["is_irreversible"] = bool(row["is_irreversible"])
    fields["takeover_at"] = takeover_at(row)
    return Effect(**fields)


def unlink(session_number: int) -> Op[None]:
    """Note that the session of effects is gone, and forget what no late retry needs of them."""
    yield from batch(*(Query(text, {"number": session_number}) for text in (UNLINK, EMPTY)))


def topic(id: str) -> str:
    """Return what is rung when an effect is settled."""
    return f"effect:{id}"


def ticket_of(row: Row, place: Place | None, guard: Guard | None = None) -> Ticket:
    """Return the right to settle a row as it stands."""
    return Ticket(
        row["number"],
        row["id"],
        row["fence"],
        row["tool"],
        row["call_id"],
        row["idempotency_key"],
        place,
        row["undoes"],
        guard,
    )


def found_effect(row: Row | None, id: object) -> Row:
    """Return the row, or raise NotFound."""
    if row is None:
        raise NotFound(f"there is no effect {id!r}", id=id)
    return row


def takeover_at(row: Row) -> int | None:
    """Return when another may take over from an effect's owner; None if it has none."""
    if row["status"] != "issued":
        return None
    ends = (row["lease_expires_at"], row["issued_at"] + row["timeout_ms"])
    return int(max(ends) + row["settle_ms"])


def settled_at(row: Row) -> int:
    """Return from when on a parked effect may be verified: its request may be under way still."""
    return int(max(row["ended_at"], row["lease_expires_at"] or 0) + row["settle_ms"])


def context(id: str, part: str) -> tuple[str, ...]:
    """Return the place that a part of an effect is bound to."""
    return "hf_effects", id, part


def tidy(text: str) -> str:
    """Return a text that can be stored: short enough, and nothing but characters."""
    return text[:ERROR_CHARACTERS_MAX].encode("utf-8", "replace").decode()


def mismatch(row: Row, request: Request) -> RequestMismatch:
    """Return the error of a key or call id that another request has."""
    what = f"key {row['key']!r}"
    if request.call_id is not None and row["call_id"] == request.call_id:
        what = f"call id {request.call_id!r}"
    return RequestMismatch(
        f"{what} belongs to another request of {row['tool']} (effect {row['id']}, "
        f"{row['status']}); nothing was run. Use a new one for a new request",
        effect_id=row["id"],
        status=row["status"],
    )


def is_resolved(effect_id: str | None) -> Op[bool]:
    """Tell whether an effect that something is to wait for was resolved meanwhile."""
    if effect_id is None:
        return False
    found = yield from one(HOLD_STATUS, id=effect_id)
    return found is None or found["status"] not in {"issued", "unknown"}
