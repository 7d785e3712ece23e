"""The ledger: who may run an effect, and what became of it. Each method is one transaction."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..errors import SessionNotFound
from ..kernel.operation import (
    AfterCommit,
    Op,
    PerStore,
    Query,
    Row,
    Runtime,
    batch,
    decide,
    deciding,
    fresh_id,
    one,
    operation,
    query,
    rows,
)
from ..leases import Guard, Keeper, default_holder
from ..records import Effect
from ..sessions.access import Place
from .finding import Found, find, is_latest, looks_for
from .identity import is_whole
from .pen import Pen
from .rows import (
    ABANDONED_UNDER,
    BY_ID,
    BY_KEY,
    FIRST_FENCE,
    ISSUED,
    KEEP_LATE,
    TAKE_OVER,
    UNDONE,
    Busy,
    Identity,
    InDoubt,
    Known,
    Match,
    Outcome,
    Request,
    Run,
    Taken,
    Ticket,
    Wanted,
    context,
    effect_of,
    locks,
    look_at,
    look_without_session,
    settled_at,
    takeover_at,
    ticket_of,
    topic,
    unless_spent,
    unlink,
)
from .salts import LOOK, SALTS, Salts
from .tools import Tool

log = logging.getLogger("holdfast.effects")

PENDING = Outcome("issued")
KNOWN_SESSIONS_MAX = 10_000
NOT_CALLED = "its caller was interrupted before the tool was called"


class Ledger(PerStore):
    """The ledger of one open store, and what this process does in it."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.codec = runtime.codec
        self.redactor = runtime.redactor
        self.signals = runtime.signals
        self.holder = default_holder()
        self.pen = Pen(self.codec, self.redactor)
        self.salts = Salts(getattr(self.redactor, "key", None))
        self.keeper = Keeper.of(runtime)
        self.tools: dict[str, Tool[..., Any]] = {}
        """The tools that were called in this process, by name."""
        self._known_sessions: set[int] = set()
        """The sessions whose last call was found in the ledger: it is looked for first."""

    @query
    def require_key(self) -> Op[None]:
        """Refuse a store whose effects are known by another key than ours."""
        yield from self.salts.learn()

    @deciding
    def take(self, place: Place | None, request: Request) -> Op[Taken]:
        """Decide whether a call is to be run, was run, or is being run by somebody."""
        wanted = yield from self._want(place, request)
        issued = None
        if place is None or place.number not in self._known_sessions:
            issued = yield from self._issue_first(wanted, PENDING)
        if issued is not None:
            if issued["fence"] != FIRST_FENCE or issued.get("status", "issued") != "issued":
                # The answer was lost for so long that another has stepped in.
                return Busy(self.effect(issued), 1)
            return Run(ticket_of(issued, place, request.guard))
        taken = None
        while taken is None:
            taken = yield from self._take(wanted)
            if taken is None:
                wanted = yield from self._want(place, request)
        self._remember(place, is_known=not isinstance(taken, Run))
        return taken

    def _take(self, wanted: Wanted) -> Op[Taken | None]:
        """Do so for a request that was identified; None if that was done with the wrong salt."""
        first = yield from self._issuing(wanted, None, None, PENDING)
        looked = yield from self._look(wanted, [SALTS, *looks_for(wanted), first])
        session, (salts, *answers, issued) = looked
        if not self.salts.is_true(wanted.belief, wanted.place, salts[0], session):
            return None
        if issued:
            return (yield from self._run(wanted, issued[0]))
        found = yield from find(self.salts, self.codec.limits, wanted, session, answers)
        if found.row is not None:
            taken = yield from self._decide(wanted, found, found.row)
            if taken is not None:
                return taken
        return (yield from self._issue(wanted, found.newest, found.row))

    @deciding
    def log(
        self, place: Place | None, request: Request, outcome: Outcome
    ) -> Op[tuple[str, Effect | None]]:
        """Write a read that has been done; return its id, and the earlier one if that counts."""
        wanted = yield from self._want(place, request)
        issued = None
        if place is None or place.number not in self._known_sessions:
            issued = yield from self._issue_first(wanted, outcome)
        if issued is not None:
            return issued["id"], None
        while True:
            first = yield from self._issuing(wanted, None, None, outcome)
            looked = yield from self._look(wanted, [SALTS, *looks_for(wanted), first])
            session, (salts, *answers, logged) = looked
            if self.salts.is_true(wanted.belief, place, salts[0], session):
                break
            wanted = yield from self._want(place, request)
        if logged:
            yield from self.pen.events(wanted, logged[0]["id"], outcome)
            return logged[0]["id"], None
        found = yield from find(self.salts, self.codec.limits, wanted, session, answers)
        if found.row is not None and found.row["status"] == "completed":
            taken = yield from self._decide(wanted, found, found.row)
            if isinstance(taken, Known):
                return taken.effect.id, taken.effect
        row, is_ours = yield from self._insert(wanted, found.newest, None, outcome)
        counts = not is_ours and row["status"] == "completed"
        return row["id"], self.effect(row) if counts else None

    @query
    def find_read(self, place: Place | None, request: Request) -> Op[tuple[Effect, bool] | None]:
        """Return the completed read that answers a call, and whether it is the call's own."""
        while True:
            if not (yield from self.salts.learn()):
                return None
            belief = self.salts.believed(place)
            identity = yield from self.salts.identify(self.codec.limits, place, request, belief)
            wanted = Wanted(place, request, identity, b"", belief)
            look = Query(LOOK, {"number": None if place is None else place.number})
            (salts,), seen, *answers = yield from batch(SALTS, look, *looks_for(wanted))
            session = next(iter(seen), None)
            if self.salts.is_true(belief, place, salts, session):
                break
        found = yield from find(self.salts, self.codec.limits, wanted, session, answers)
        if found.row is None or found.row["status"] != "completed":
            return None
        is_other = request.policy == "latest" and not found.is_same_call
        if is_other and not (yield from is_latest(wanted, found)):
            return None
        has_row = found.is_own or (request.call_id is None and not found.is_inherited)
        return self.effect(found.row), has_row

    @query
    def compare(self, request: Request) -> Op[Match]:
        """Tell whether a key of the whole store belongs to an equal request, another, or none."""
        if not (yield from self.salts.learn()):
            return "none"
        yield from self.salts.look()
        belief = self.salts.believed(None)
        identity = yield from self.salts.identify(self.codec.limits, None, request, belief)
        row = yield from one(BY_KEY, key=identity.key, limit=1)
        if row is None or row["is_expired"]:
            return "none"
        wanted = Wanted(None, request, identity, b"", belief)
        return "match" if self.salts.is_of(self.codec.limits, row, wanted) else "conflict"

    @deciding
    def finish(self, ticket: Ticket, outcome: Outcome) -> Op[bool]:
        """Record what became of an attempt; False when it is no longer the ticket's to say."""
        place = ticket.place
        if ticket.undoes is None and ticket.fence == FIRST_FENCE:
            emits = []
            if place is not None:
                emits = [self.pen.event(place, ticket.id, ticket.tool, ticket.call_id, outcome)]
            finished = self.pen.finishing(ticket, outcome, "issued")
            looks = self.keeper.looks(ticket.lease)
            answers = yield from decide(*locks(place), *looks, finished, emits=emits)
            if answers[-1]:
                yield AfterCommit(lambda: self.signals.ring(topic(ticket.id)))
                return True
        return (yield from self.finishing(ticket, outcome))

    def finishing(self, ticket: Ticket, outcome: Outcome, old_status: str = "issued") -> Op[bool]:
        """Record an outcome inside another transaction."""
        place, looks = ticket.place, self.keeper.looks(ticket.lease)
        if looks and not all((yield from batch(*locks(place), *looks))):
            return False
        answers = yield from batch(*locks(place), self.pen.finishing(ticket, outcome, old_status))
        if not answers[-1]:
            return False
        if ticket.undoes is not None and outcome.status == "completed":
            yield from rows(UNDONE, id=ticket.id, undoes=ticket.undoes)
        # The tree of a session that was deleted meanwhile may be gone; its effect is recorded.
        if place is not None and answers[0]:
            yield self.pen.event(place, ticket.id, ticket.tool, ticket.call_id, outcome)
        # One that was taken over may have been in doubt, and items may wait for it.
        was_in_doubt = old_status == "unknown" or ticket.fence > FIRST_FENCE
        if was_in_doubt and outcome.status != "unknown":
            for noun in self.runtime.nouns:
                yield from noun.settled(self.runtime, ticket.id)
        yield AfterCommit(lambda: self.signals.ring(topic(ticket.id)))
        return True

    @operation
    def take_all(self, place: Place | None, requests: Sequence[Request]) -> Op[list[Ticket | None]]:
        """Issue several calls in one commit; None for each that there is more to say about."""
        tickets: list[Ticket | None] = []
        for request in requests:
            wanted = yield from self._want(place, request)
            row = yield from self._issue_first(wanted, PENDING)
            tickets.append(None if row is None else ticket_of(row, place, request.guard))
        return tickets

    @operation
    def finish_all(self, ended: Sequence[tuple[Ticket, Outcome]]) -> Op[list[bool]]:
        """Record what became of several attempts in one commit; False for each that was lost."""
        recorded = []
        for ticket, outcome in ended:
            recorded.append((yield from self.finishing(ticket, outcome)))
        return recorded

    @operation
    def run_again(self, ticket: Ticket, request: Request, outcome: Outcome) -> Op[Ticket | None]:
        """Close an attempt that is known not to have happened, and issue the next of it."""
        before = yield from one(BY_ID, id=ticket.id)
        if not (yield from self.finishing(ticket, outcome)):
            return None
        if ticket.place is not None:
            try:
                yield from look_at(self.runtime, ticket.place)
            except SessionNotFound:
                # Deleted meanwhile. It is closed, and whoever asks once more is told so.
                return None
        row = yield from one(BY_ID, id=ticket.id)
        assert before is not None
        assert row is not None
        # An effect whose session was deleted has none any more once it is closed.
        arguments = self.codec.unseal(before["arguments"], context=context(row["id"], "arguments"))
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
        if owner is not None and row["unlinked_at"] is not None:
            yield from unlink(owner[0])
        return issued.ticket if isinstance(issued, Run) else None

    @operation
    def let_go(self, place: Place | None, guard: Guard | None, ids: Sequence[str]) -> Op[None]:
        """Close what was issued for a caller that was interrupted before it ran anything."""
        yield from batch(*locks(place))
        for id in ids:
            row = yield from one(BY_ID, id=id)
            # Its first fence is the issuer's: nobody has stepped in.
            if row is not None and (row["status"], row["fence"]) == ("issued", 1):
                ticket = ticket_of(row, place, guard)
                yield from self.finishing(ticket, Outcome("failed", "not_landed", error=NOT_CALLED))

    @operation
    def keep_late(self, ticket: Ticket, outcome: Outcome) -> Op[None]:
        """Keep what an owner reports after it has lost the effect; it changes nothing."""
        sealed = self.pen.late(ticket.id, outcome, self.holder)
        yield from rows(KEEP_LATE, number=ticket.number, late=sealed)

    def is_whole(self, row: Row) -> bool:
        """Whether an effect's stored arguments are those it was asked with, secrets and all."""
        return is_whole(self.salts.all(), self.codec.limits, row, self.effect(row).arguments)

    def effect(self, row: Row) -> Effect:
        """Return a row as a record."""
        return effect_of(self.codec, row)

    def storable(self, result: Any) -> Outcome:
        """Return a completed call's outcome; a result that cannot be stored is left out of it."""
        return self.pen.storable(result)

    def _want(self, place: Place | None, request: Request) -> Op[Wanted]:
        """Say what a request is known by, and encode it, before any lock is held."""
        yield from self.salts.learn_to_write()
        belief = self.salts.believed(place)
        identity = yield from self.salts.identify(self.codec.limits, place, request, belief)
        arguments = self.pen.encoded("arguments", request.arguments)
        owner = None if place is None else (place.number, place.session_id)
        return Wanted(place, request, identity, arguments, belief, owner)

    def _issue_first(self, wanted: Wanted, outcome: Outcome) -> Op[Row | None]:
        """Write the first attempt of an effect that nobody has asked for, which most are.

        The statement itself makes sure of everything; it does nothing where there is more to it.
        """
        place = wanted.place
        guard = wanted.request.guard if place is None else place.guard
        self.keeper.require_known(guard)
        first = yield from self._issuing(wanted, None, None, outcome)
        id = str(first.parameters["id"])
        answers = yield from decide(
            *locks(place),
            *self.keeper.looks(guard),
            first,
            emits=self.pen.events(wanted, id, outcome),
            again=Query(ISSUED, {"id": id}),
        )
        return next(iter(answers[-1]), None)

    def _remember(self, place: Place | None, *, is_known: bool) -> None:
        """Remember whether a session's calls are known already: a resumed or forked one's are."""
        if place is None:
            return
        if is_known and len(self._known_sessions) < KNOWN_SESSIONS_MAX:
            self._known_sessions.add(place.number)
        elif not is_known:
            self._known_sessions.discard(place.number)

    def _look(
        self, wanted: Wanted, asked: Sequence[Query]
    ) -> Op[tuple[Row | None, list[list[Row]]]]:
        """Lock what a request belongs to; return the session's row, if any, and the answers."""
        if wanted.place is None:
            guard = wanted.request.guard
            return None, (yield from look_without_session(self.runtime, guard, *asked))
        return (yield from look_at(self.runtime, wanted.place, *asked))

    def _decide(self, wanted: Wanted, found: Found, row: Row) -> Op[Taken | None]:
        """Say what a row that was found means for a request; None: it is to be run."""
        request = wanted.request
        match row["status"]:
            case "completed":
                is_other = request.policy == "latest" and not found.is_same_call
                if is_other and not (yield from is_latest(wanted, found)):
                    return None
                return Known((yield from self._answer(wanted, found, row)))
            case "unknown" if request.doubt == "park":
                return Known(self.effect(row))
            case "unknown":
                wait_ms = settled_at(row) - row["now_ms"]
                if wait_ms > 0:
                    return Busy(self.effect(row), wait_ms)
            case "failed":
                is_cached = request.cache_failures and row["reason"] == "raised"
                if not is_cached and row["reason"] != "given_up":
                    return None
                return Known((yield from self._answer(wanted, found, row)))
            case _ if not row["is_abandoned"]:
                free_at = takeover_at(row)
                assert free_at is not None
                return Busy(self.effect(row), max(1, free_at - row["now_ms"]))
        return (yield from self._step_in(wanted.place, request, row))

    def _answer(self, wanted: Wanted, found: Found, row: Row) -> Op[Effect]:
        """Return the effect that answers a call, which has a row of its own from then on."""
        effect = self.effect(row)
        if found.is_own or (wanted.request.call_id is None and not found.is_inherited):
            return effect
        key, generation = row["key"], 0
        if found.is_inherited:
            key = wanted.identity.key
            generation = 1 if found.newest is None else found.newest["generation"] + 1
        replay = self.pen.replaying((yield from fresh_id()), wanted, effect, key, generation)
        [inserted] = yield replay
        id, call_id = str(replay.parameters["id"]), wanted.request.call_id
        replay_of = effect.replay_of or effect.id
        if wanted.place is not None:
            outcome = Outcome(effect.status, effect.reason)
            told = (wanted.place, id, effect.tool, call_id, outcome)
            yield self.pen.event(*told, replay_of=replay_of)
        return replace(effect, id=id, number=inserted["number"], replay_of=replay_of)

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
        outcome = unless_spent(outcome, row["attempt"], request.max_attempts, row["reason"])
        yield from self.finishing(ticket, outcome)
        if outcome.reason == "abandoned":
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
        yield from self.pen.events(wanted, row["id"], PENDING)
        return Run(ticket_of(row, wanted.place, wanted.request.guard))

    def _insert(
        self, wanted: Wanted, newest: Row | None, before: Row | None, outcome: Outcome
    ) -> Op[tuple[Row, bool]]:
        """Return the row of the next generation, and whether it is this request's."""
        statement = yield from self._issuing(wanted, newest, before, outcome, is_first=False)
        inserted = yield statement
        if inserted:
            yield from self.pen.events(wanted, inserted[0]["id"], outcome)
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
        id = yield from fresh_id()
        keeps_key = before is not None and (yield from _keeps_key(before))
        given = (id, wanted, newest, before, outcome)
        return self.pen.issuing(*given, is_first=is_first, keeps_key=keeps_key)


def _keeps_key(before: Row) -> Op[bool]:
    """Whether the attempt after this one goes out under the same idempotency key.

    It does if one under that key may have reached its receiver. After one that is known to have
    failed, the receiver must not answer with that failure; it tells nothing of those before it.
    """
    if before["reason"] != "raised":
        return True
    given = {"key": before["key"], "idempotency_key": before["idempotency_key"]}
    return before["attempt"] > 1 and (yield from one(ABANDONED_UNDER, **given)) is not None
