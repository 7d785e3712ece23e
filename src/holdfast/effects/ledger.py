"""The ledger: who may run an effect, and what became of it. Each method is one transaction."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..checkpoints.writing import Place
from ..codec import Codec
from ..errors import InvalidValue, LimitExceeded
from ..feed import emit
from ..kernel.operation import (
    AfterCommit,
    Call,
    Lock,
    Op,
    Query,
    Row,
    batch,
    fresh_id,
    one,
    operation,
    query,
    rows,
)
from ..kernel.signals import Signals
from ..leases import Keeper, Kept
from ..records import Effect
from ..redaction import Redaction
from .identity import Past, counting, derive_key, is_whole, key_within, read_past
from .rows import (
    BY_CALL,
    BY_ID,
    BY_KEY,
    FINISH,
    ISSUE,
    KEEP_LATE,
    NEWEST_CHANGE,
    NEWEST_CHANGE_IN_SCOPE,
    PAST_ROWS_MAX,
    RENEW,
    TAKE_OVER,
    UNDONE,
    Busy,
    Identity,
    InDoubt,
    Known,
    Outcome,
    Request,
    Run,
    Taken,
    Ticket,
    Wanted,
    context,
    effect_of,
    look_at,
    look_without_session,
    mismatch,
    settled_at,
    takeover_at,
    ticket_of,
    tidy,
    topic,
)
from .salts import SALT_OF, SALTS, Salts
from .tools import Tool

log = logging.getLogger("holdfast.effects")

PENDING = Outcome("issued")


@dataclass(slots=True)
class Ledger:
    """The ledger of one open store, and what this process does in it."""

    codec: Codec
    redactor: Redaction
    signals: Signals
    holder: str
    run: Callable[[Call[Any]], Any]
    """Runs a call on a thread of our own."""
    is_joined: bool = False
    keeper: Keeper = field(init=False)
    salts: Salts = field(init=False)
    tools: dict[str, Tool[..., Any]] = field(default_factory=dict)
    """The tools that were called in this process, by name."""

    def __post_init__(self) -> None:
        self.salts = Salts(getattr(self.redactor, "key", None))
        self.keeper = Keeper(lambda kept: self.run(Call(Ledger.renew, self, (kept,))))

    @operation
    def take(self, place: Place | None, request: Request) -> Op[Taken]:
        """Decide whether a call is to be run, was run, or is being run by somebody."""
        taken = None
        while taken is None:
            wanted = yield from self._want(place, request)
            taken = yield from self._take(wanted)
        return taken

    def _take(self, wanted: Wanted) -> Op[Taken | None]:
        """Do so for a request that was identified; None if that was done with the wrong salt."""
        place, request, identity = wanted.place, wanted.request, wanted.identity
        first = yield from self._issuing(wanted, None, None, PENDING)
        asked = [SALTS, Query(BY_KEY, {"key": identity.key, "limit": 1}), first]
        if request.call_id is not None:
            call = {"scope": identity.scope, "call_id": request.call_id, "limit": 1}
            asked.insert(1, Query(BY_CALL, call))
        session, (salts, *answers, issued) = yield from self._look(wanted, asked)
        if not self.salts.is_true(wanted.belief, place, salts[0], session):
            return None
        past = None
        if session is not None and (session["epoch"] > 1 or session["origin_number"] is not None):
            past = yield from read_past(session["number"])
        if issued:
            return (yield from self._run(wanted, issued[0]))
        newest = next(iter(answers[-1]), None)
        row = counting([found for answer in answers for found in answer])
        if past is not None:
            row = yield from self._in_the_past(past, wanted, newest)
        elif row is not None and row["undone_by"] is not None:
            row = None
        if row is not None and not row["is_expired"]:
            if not self.salts.is_of(self.codec.limits, row, wanted):
                raise mismatch(row, request)
            taken = yield from self._decide(place, request, row)
            if taken is not None:
                return taken
        return (yield from self._issue(wanted, newest, row))

    @operation
    def log(
        self, place: Place | None, request: Request, outcome: Outcome
    ) -> Op[tuple[Effect, bool]]:
        """Write a read that has been done, and say whether it counts: of two the first does."""
        while True:
            wanted = yield from self._want(place, request)
            first = yield from self._issuing(wanted, None, None, outcome)
            by_key = Query(BY_KEY, {"key": wanted.identity.key, "limit": 1})
            session, answers = yield from self._look(wanted, [SALTS, by_key, first])
            salts, found, logged = answers
            if self.salts.is_true(wanted.belief, place, salts[0], session):
                break
        newest = next(iter(found), None)
        if newest is not None and newest["status"] == "completed" and not newest["is_expired"]:
            return self.effect(newest), False
        if logged:
            yield from self._tell_issued(wanted, logged[0]["id"], outcome)
            return self.effect(logged[0]), True
        row, is_ours = yield from self._insert(wanted, newest, None, outcome)
        return self.effect(row), is_ours or row["status"] != "completed"

    @query
    def find_read(self, place: Place | None, request: Request) -> Op[Effect | None]:
        """Return the completed read of the same call id, if there is one."""
        yield from self.salts.learn()
        while True:
            belief = self.salts.believed(place)
            identity = yield from self.salts.identify(self.codec.limits, place, request, belief)
            number = None if place is None else place.number
            by_key = Query(BY_KEY, {"key": identity.key, "limit": 1})
            answers = yield from batch(SALTS, Query(SALT_OF, {"number": number}), by_key)
            (salts,), session, found = answers
            if self.salts.is_true(belief, place, salts, next(iter(session), None)):
                break
        newest = next(iter(found), None)
        if newest is None or newest["status"] != "completed" or newest["is_expired"]:
            return None
        if place is not None and newest["session_number"] == place.number:
            past = yield from read_past(place.number)
            if not past.holds(newest):
                return None
        if newest["request_digest"] != identity.digest:
            raise mismatch(newest, request)
        return self.effect(newest)

    @operation
    def finish(self, ticket: Ticket, outcome: Outcome) -> Op[bool]:
        """Record what became of an attempt; False when it is no longer the ticket's to say."""
        return (yield from self.finishing(ticket, outcome))

    def finishing(self, ticket: Ticket, outcome: Outcome, old_status: str = "issued") -> Op[bool]:
        """Record an outcome inside another transaction."""
        place, guards = ticket.place, ticket.guards()
        if guards and not all((yield from batch(*guards))):
            return False
        parameters = {
            "number": ticket.number,
            "fence": ticket.fence,
            "old_status": old_status,
            "session_number": None if place is None else place.number,
            "session_fence": None if place is None else place.fence,
            "decided_by": outcome.decided_by,
            **self._sealed(ticket.id, outcome),
        }
        asked: list[Query | Lock] = [Query(FINISH, parameters)]
        if place is not None:
            asked.insert(0, Lock(place.root_id))
        answers = yield from batch(*asked)
        if not answers[-1]:
            return False
        if ticket.undoes is not None and outcome.status == "completed":
            yield from rows(UNDONE, id=ticket.id, undoes=ticket.undoes)
        # The tree of a session that was deleted meanwhile may be gone; its effect is recorded.
        if place is not None and answers[0]:
            yield from self._tell(place, ticket.id, ticket.tool, ticket.call_id, outcome)
        yield AfterCommit(lambda: self.signals.ring(topic(ticket.id)))
        return True

    @operation
    def run_again(self, ticket: Ticket, request: Request, outcome: Outcome) -> Op[Ticket | None]:
        """Close an attempt that is known not to have happened, and issue the next of it."""
        if not (yield from self.finishing(ticket, outcome)):
            return None
        row = yield from one(BY_ID, id=ticket.id)
        assert row is not None
        arguments = self.codec.unseal(row["arguments"], context=context(row["id"], "arguments"))
        owner = None
        if row["session_number"] is not None:
            # An effect of the session that this one was forked from stays that one's: both, and
            # other forks, find it there.
            owner = (row["session_number"], row["session_id"])
        belief = self.salts.believed(ticket.place)
        salt = self.salts.of(belief, request)[0]
        identity = Identity(salt, row["scope"], row["key"], row["request_digest"])
        version = row["issued_version"]
        wanted = Wanted(ticket.place, request, identity, arguments, belief, owner, version)
        issued = yield from self._issue(wanted, row, row)
        return issued.ticket if isinstance(issued, Run) else None

    @operation
    def renew(self, kept: Sequence[Kept]) -> Op[list[Kept]]:
        """Prolong the ownership of running effects; return those that are still owned."""
        in_order = sorted(kept, key=lambda kept: kept.number)
        statements = []
        for each in in_order:
            lease_ms = round(each.lease_seconds * 1000)
            given = {"number": each.number, "fence": each.fence, "lease_ms": lease_ms}
            statements.append(Query(RENEW, given))
        answers = yield from batch(*statements)
        return [each for each, found in zip(in_order, answers, strict=True) if found]

    @operation
    def keep_late(self, ticket: Ticket, outcome: Outcome) -> Op[None]:
        """Keep what an owner reports after it has lost the effect; it changes nothing."""
        error = None if outcome.error is None else self._tidy(outcome.error)
        said = {"status": outcome.status, "error": error, "holder": self.holder}
        result = self._plain(outcome.result)
        body = self.codec.encode({**said, "result": result}, name="late")
        sealed = self.codec.seal(body, context=context(ticket.id, "late"))
        yield from rows(KEEP_LATE, number=ticket.number, late=sealed)

    def is_whole(self, row: Row) -> bool:
        """Whether an effect's stored arguments are those it was asked with, secrets and all."""
        return is_whole(self.salts.all(), self.codec.limits, row, self.effect(row).arguments)

    def effect(self, row: Row) -> Effect:
        """Return a row as a record."""
        return effect_of(self.codec, row)

    def _plain(self, value: Any) -> Any:
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
            self.codec.encode(result, name="result")
        except (InvalidValue, LimitExceeded) as error:
            return Outcome("completed", "not_storable", None, str(error))
        return Outcome("completed", None, result)

    def _want(self, place: Place | None, request: Request) -> Op[Wanted]:
        """Say what a request is known by, and encode it, before any lock is held."""
        yield from self.salts.learn()
        belief = self.salts.believed(place)
        identity = yield from self.salts.identify(self.codec.limits, place, request, belief)
        arguments = self.codec.encode(self.redactor.redact(request.arguments), name="arguments")
        owner = None if place is None else (place.number, place.session_id)
        return Wanted(place, request, identity, arguments, belief, owner)

    def _look(
        self, wanted: Wanted, asked: Sequence[Query]
    ) -> Op[tuple[Row | None, list[list[Row]]]]:
        """Lock what a request belongs to; return the session's row, if any, and the answers."""
        if wanted.place is None:
            return None, (yield from look_without_session(wanted.request.guard, *asked))
        return (yield from look_at(wanted.place, *asked))

    def _in_the_past(self, past: Past, wanted: Wanted, newest: Row | None) -> Op[Row | None]:
        """Return the row that counts in the history of a session that was rewound or forked."""
        request = wanted.request
        is_of_session = request.policy in {"session", "latest", "call"} and not request.item_id
        key = None if newest is None else newest["key"]
        places = [(wanted.identity.scope, key, past.holds)]
        for origin in past.origins if is_of_session else ():
            holds = functools.partial(past.holds_of_origin, origin)
            for salt in self.salts.of(wanted.belief, request):
                there = key_within(salt, self.codec.limits, origin[0], request)
                places.append((origin[0], there, holds))
        candidates: list[Row] = []
        for scope, key, is_held in places:
            if request.call_id is not None:
                call = {"scope": scope, "call_id": request.call_id, "limit": PAST_ROWS_MAX}
                found = yield from rows(BY_CALL, **call)
                candidates += filter(is_held, found)
            if key is not None:
                found = yield from rows(BY_KEY, key=key, limit=PAST_ROWS_MAX)
                candidates += filter(is_held, found)
        return counting([row for row in candidates if row["undone_by"] is None])

    def _decide(self, place: Place | None, request: Request, row: Row) -> Op[Taken | None]:
        """Say what a row that was found means for a request; None: it is to be run."""
        is_same_call = request.call_id is not None and row["call_id"] == request.call_id
        match row["status"]:
            case "completed":
                if request.policy == "latest" and not is_same_call:
                    newest = yield from self._newest_change(place, request)
                    if newest != row["number"]:
                        return None
                return Known(self.effect(row))
            case "unknown" if request.doubt == "park":
                return Known(self.effect(row))
            case "unknown":
                wait_ms = settled_at(row) - row["now_ms"]
                if wait_ms > 0:
                    return Busy(self.effect(row), wait_ms)
            case "failed":
                is_cached = request.cache_failures and row["reason"] == "raised"
                return Known(self.effect(row)) if is_cached or row["reason"] == "given_up" else None
            case _ if not row["is_abandoned"]:
                free_at = takeover_at(row)
                assert free_at is not None
                return Busy(self.effect(row), max(1, free_at - row["now_ms"]))
        return (yield from self._step_in(place, request, row))

    def _newest_change(self, place: Place | None, request: Request) -> Op[int | None]:
        if place is not None:
            found = yield from one(NEWEST_CHANGE, session_number=place.number)
        else:
            found = yield from one(NEWEST_CHANGE_IN_SCOPE, item_id=request.item_id)
        return None if found is None else found["number"]

    def _step_in(self, place: Place | None, request: Request, row: Row) -> Op[Taken | None]:
        """Take a dead owner's attempt over: to verify it, to give it up, or to run it again."""
        given = {"number": row["number"], "fence": row["fence"]}
        taken = yield from one(TAKE_OVER, **given, holder=request.holder, lease_ms=request.lease_ms)
        if taken is None:
            return Busy(self.effect(row), 1)
        ticket = ticket_of({**row, "fence": taken["fence"]}, place, request.guard)
        if request.doubt == "verify":
            return InDoubt(ticket, self.effect(row))
        outcome = {
            "retry": Outcome("failed", "abandoned"),
            "fail": Outcome("failed", "given_up", error="its owner died"),
            "park": Outcome("unknown", "owner_died"),
        }[request.doubt]
        yield from self.finishing(ticket, outcome)
        if request.doubt == "retry":
            row.update(status="failed", reason="abandoned")
            return None
        ended = yield from one(BY_ID, id=row["id"])
        assert ended is not None
        return Known(self.effect(ended))

    def _issue(self, wanted: Wanted, newest: Row | None, before: Row | None) -> Op[Taken]:
        """Insert the next generation; whose insert it is owns the effect."""
        row, is_ours = yield from self._insert(wanted, newest, before, PENDING)
        if is_ours:
            return Run(ticket_of(row, wanted.place, wanted.request.guard))
        return Busy(self.effect(row), 1)

    def _run(self, wanted: Wanted, row: Row) -> Op[Run]:
        yield from self._tell_issued(wanted, row["id"], PENDING)
        return Run(ticket_of(row, wanted.place, wanted.request.guard))

    def _insert(
        self, wanted: Wanted, newest: Row | None, before: Row | None, outcome: Outcome
    ) -> Op[tuple[Row, bool]]:
        """Return the row of the next generation, and whether it is this request's."""
        statement = yield from self._issuing(wanted, newest, before, outcome, is_first=False)
        inserted = yield statement
        if inserted:
            yield from self._tell_issued(wanted, inserted[0]["id"], outcome)
            return inserted[0], True
        found = yield from one(BY_KEY, key=wanted.identity.key, limit=1)
        assert found is not None
        return found, False

    def _issuing(
        self,
        wanted: Wanted,
        newest: Row | None,
        before: Row | None,
        outcome: Outcome,
        *,
        is_first: bool = True,
    ) -> Op[Query]:
        """Return the statement that writes an attempt, after another of the same effect."""
        request, identity = wanted.request, wanted.identity
        id = yield from fresh_id()
        generation = 1 if newest is None else newest["generation"] + 1
        # An attempt that may have reached its receiver goes out again under the same key. After
        # one that is known to have failed, the receiver must not answer with that failure.
        is_retry = before is not None and before["status"] == "failed" and not before["is_expired"]
        # A key of the caller's is forgotten some time and then means something new. Any other is
        # the same again after a backup was restored: its receiver may know it already.
        material = id if request.policy == "once" else identity.key
        idempotency_key = derive_key(identity.salt, material, generation)
        if is_retry and before is not None and before["reason"] != "raised":
            idempotency_key = before["idempotency_key"]
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
            "salts": wanted.belief.salts,
            "session_salt": wanted.belief.session_salt,
            **self._sealed(id, outcome),
        }
        del row["note"]
        return Query(ISSUE, row)

    def _tell_issued(self, wanted: Wanted, id: str, outcome: Outcome) -> Op[None]:
        if wanted.place is not None:
            request = wanted.request
            yield from self._tell(wanted.place, id, request.tool, request.call_id, outcome)

    def _tell(
        self, place: Place, id: str, tool: str, call_id: str | None, outcome: Outcome
    ) -> Op[None]:
        data: dict[str, Any] = {"effect_id": id, "tool": tool, "call_id": call_id}
        data |= {"status": outcome.status, "reason": outcome.reason}
        kind = f"effect_{outcome.status}"
        if outcome.decided_by is not None:
            data["decided_by"], kind = outcome.decided_by, "effect_resolved"
        yield from emit(self.codec, place.root_id, place.session_id, kind, data)

    def _sealed(self, id: str, outcome: Outcome) -> dict[str, Any]:
        """Return an outcome as columns, without its secrets."""

        def sealed(part: str, value: Any) -> bytes:
            body = self.codec.encode(self.redactor.redact(value), name=part)
            return self.codec.seal(body, context=context(id, part))

        has_result = outcome.status == "completed" and outcome.reason != "not_storable"
        error = None if outcome.error is None else self._tidy(outcome.error)
        return {
            "status": outcome.status,
            "reason": outcome.reason,
            "result": sealed("result", outcome.result) if has_result else None,
            "error": None if error is None else sealed("error", error),
            "note": None if outcome.note is None else sealed("note", self._tidy(outcome.note)),
        }

    def _tidy(self, text: str) -> str:
        """Return a text that can be stored; it is cut only after its secrets are out."""
        return tidy(self.redactor.redact(text))
