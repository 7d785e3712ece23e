"""The ledger: who may run an effect, and how it ended. Each method is one transaction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

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
from ..sessions.access import LOCK_SESSION, Place, require_writable
from ..sessions.rows import ONE_SESSION
from .history import Found, effects_after, find, is_superseded, lookups
from .requests import EffectRequest, RequestIdentity, is_whole
from .salts import Salts
from .statements import (
    EFFECT_BY_ID,
    EFFECT_BY_KEY,
    FIRST_FENCE,
    ISSUED,
    LOCK_EFFECT,
    TAKE_OVER_EFFECT,
    UNLINK_EFFECTS_OF_SESSION,
    EffectOutcome,
    Statements,
    Ticket,
    context,
    locks,
    ticket_of,
    topic,
)
from .tools import Tool, Unknown
from .verification import settle

KNOWN_SESSIONS_MAX = 10_000
NOT_CALLED = "its caller was interrupted before the tool was called"
SESSION_BRANCH = f"SELECT s.epoch, s.origin_number FROM {ONE_SESSION}"  # noqa: S608
ABANDONED_UNDER_KEY = """
SELECT number FROM hf_effects
WHERE key = :key AND idempotency_key = :idempotency_key AND reason = 'abandoned' LIMIT 1
"""
MARK_UNDONE = "UPDATE hf_effects SET undone_by = :id WHERE id = :undoes"
KEEP_LATE = "UPDATE hf_effects SET late = :late WHERE number = :number"

Match = Literal["match", "conflict", "none"]


@dataclass(frozen=True, slots=True)
class Owned:
    """The effect is this caller's to run."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Known:
    """The effect is settled: completed, failed for good, or in doubt."""

    effect: Effect


@dataclass(frozen=True, slots=True)
class Busy:
    """Another is running it; a takeover is possible after some time."""

    effect: Effect
    wait_ms: int


@dataclass(frozen=True, slots=True)
class InDoubt:
    """Its owner is dead, and it is this caller's to verify."""

    ticket: Ticket
    effect: Effect


Taken: TypeAlias = Owned | Known | Busy | InDoubt


class Ledger(PerStore):
    """The ledger of one open store, and what this process does in it."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.codec = runtime.codec
        self.signals = runtime.signals
        self.holder = default_holder()
        self.statements = Statements(runtime.codec, runtime.redactor)
        self.effect = self.statements.effect
        self.salts = Salts(getattr(runtime.redactor, "key", None), runtime.codec.limits)
        self.keeper = Keeper.of(runtime)
        self.tools: dict[str, Tool[..., Any]] = {}
        """The tools that were called in this process, by name."""
        self._known_sessions: set[int] = set()
        """The sessions whose last call was found in the ledger: it is looked for first."""

    @query
    def require_key(self) -> Op[None]:
        """Refuse a store whose effects were identified with another key than ours."""
        yield from self.salts.learn()

    @deciding
    def take(self, request: EffectRequest, outcome: EffectOutcome = ISSUED) -> Op[Taken]:
        """Decide whether a call is to be run, was run, or is being run by another.

        A read comes with its outcome: it is written, unless an earlier one counts.
        """
        place = request.place
        yield from self._identify(request)
        if place is None or place.number not in self._known_sessions:
            row = yield from self._issue_first(request, outcome)
            if row is not None:
                is_same = row.get("status", outcome.status) == outcome.status
                if is_same and row["fence"] == FIRST_FENCE:
                    return Owned(ticket_of(row, request.place, request.guard))
                # The answer was lost for so long that another has taken it over.
                return Busy(self.effect(row), 1)
        while True:
            first = self.statements.issue((yield from fresh_id()), request, outcome, is_first=True)
            asked = (self.salts.now(place), *lookups(request), first)
            session, (salts, *answers, issued) = yield from self._look(request, asked)
            if (yield from self.salts.confirm(request, salts[0])):
                break
            yield from self._identify(request)
        taken: Taken | None = None
        if issued:
            taken = yield from self._own(request, issued[0], outcome)
        else:
            found = yield from find(self.salts, request, session, answers)
            if outcome is ISSUED or (found.row is not None and found.row["status"] == "completed"):
                taken = yield from self._judge(request, found)
            if taken is None:
                taken = yield from self._issue(request, outcome, found.newest, found.row)
        if outcome is ISSUED and place is not None:
            # After a replay the next call is probably one too: a resumed or forked session's are.
            if isinstance(taken, Owned):
                self._known_sessions.discard(place.number)
            elif len(self._known_sessions) < KNOWN_SESSIONS_MAX:
                self._known_sessions.add(place.number)
        return taken

    @operation
    def take_all(self, requests: Sequence[EffectRequest]) -> Op[list[Ticket | None]]:
        """Issue calls of one session in one commit; None for each that is not new.

        The statements go out together: one round trip on PostgreSQL.
        """
        place, guard = requests[0].place, requests[0].guard
        self.keeper.require_known(guard)
        issues = []
        for request in requests:
            yield from self._identify(request)
            id = yield from fresh_id()
            issues.append(self.statements.issue(id, request, is_first=True))
        looks = self.keeper.looks(guard)
        answers = yield from batch(*locks(place), *looks, *issues)
        self.keeper.require(guard, answers[len(locks(place)) :])
        tickets: list[Ticket | None] = []
        for request, found in zip(requests, answers[-len(issues) :], strict=True):
            owned = (yield from self._own(request, found[0], ISSUED)) if found else None
            tickets.append(None if owned is None else owned.ticket)
        return tickets

    @query
    def find_read(self, request: EffectRequest) -> Op[tuple[Effect, bool] | None]:
        """Return the completed read that answers a call, and whether it needs a row of its own."""
        if not (yield from self.salts.learn()):
            return None
        while True:
            request.identity = yield from self.salts.identify(request)
            number = None if request.place is None else request.place.number
            branch = Query(SESSION_BRANCH, {"number": number})
            looks = (self.salts.now(request.place), branch, *lookups(request))
            (salts,), session, *answers = yield from batch(*looks)
            if (yield from self.salts.confirm(request, salts)):
                break
            if not (yield from self.salts.learn()):
                return None
        found = yield from find(self.salts, request, next(iter(session), None), answers)
        if found.row is None or found.row["status"] != "completed":
            return None
        if (yield from is_superseded(request, found)):
            return None
        return self.effect(found.row), found.needs_row(request)

    @query
    def compare(self, request: EffectRequest) -> Op[Match]:
        """Tell whether a key of the whole store belongs to an equal request, another, or none."""
        if not (yield from self.salts.learn()):
            return "none"
        yield from self.salts.look()
        request.identity = yield from self.salts.identify(request)
        row = yield from one(EFFECT_BY_KEY, key=request.identity.key, limit=1)
        if row is None or row["is_expired"]:
            return "none"
        return "match" if self.salts.is_of(row, request) else "conflict"

    @deciding
    def finish(self, ticket: Ticket, outcome: EffectOutcome) -> Op[bool]:
        """Record how an attempt ended; False if it is no longer the ticket's to record."""
        if ticket.undoes is None and ticket.fence == FIRST_FENCE:
            answers = yield from decide(
                *locks(ticket.place),
                *self.keeper.looks(ticket.guard),
                self.statements.finish(ticket, outcome, "issued"),
                emits=self.statements.events(*ticket.told, outcome),
            )
            if answers[-1]:
                yield AfterCommit(partial(self.signals.ring, topic(ticket.id)))
                return True
        return (yield from self.finishing([(ticket, outcome)]))[0]

    @operation
    def finish_all(self, ended: Sequence[tuple[Ticket, EffectOutcome]]) -> Op[list[bool]]:
        """Record how calls of one session ended in one commit; False for each that was lost."""
        return (yield from self.finishing(ended))

    def finishing(
        self, ended: Sequence[tuple[Ticket, EffectOutcome]], old_status: str = "issued"
    ) -> Op[list[bool]]:
        """Record outcomes of one place inside another transaction, in one round trip."""
        place, looks = ended[0][0].place, self.keeper.looks(ended[0][0].guard)
        if looks and not all((yield from batch(*locks(place), *looks))):
            return [False] * len(ended)
        finishes = (self.statements.finish(*each, old_status) for each in ended)
        answers = yield from batch(*locks(place), *finishes)
        # The tree of a session that was deleted meanwhile may be gone; its effect is recorded.
        has_tree = place is not None and bool(answers[0])
        recorded = [bool(found) for found in answers[len(locks(place)) :]]
        for (ticket, outcome), is_recorded in zip(ended, recorded, strict=True):
            if not is_recorded:
                continue
            if ticket.undoes is not None and outcome.status == "completed":
                yield from rows(MARK_UNDONE, id=ticket.id, undoes=ticket.undoes)
            if has_tree:
                yield from self.statements.events(*ticket.told, outcome)
            # One that was taken over may have been in doubt, and items may wait for it.
            was_in_doubt = old_status == "unknown" or ticket.fence > FIRST_FENCE
            if was_in_doubt and outcome.status != "unknown":
                for noun in self.runtime.nouns:
                    yield from noun.settled(self.runtime, ticket.id)
            yield AfterCommit(partial(self.signals.ring, topic(ticket.id)))
        return recorded

    @operation
    def run_again(
        self, ticket: Ticket, request: EffectRequest, outcome: EffectOutcome
    ) -> Op[Ticket | None]:
        """Close an attempt that is known not to have happened, and issue the next one."""
        before = yield from one(LOCK_EFFECT, id=ticket.id)
        if not (yield from self.finishing([(ticket, outcome)]))[0]:
            return None
        if ticket.place is not None:
            try:
                yield from self._look(request, ())
            except SessionNotFound:
                # Deleted meanwhile. The attempt is closed; the next call raises this.
                return None
        row = yield from one(LOCK_EFFECT, id=ticket.id)
        assert before is not None
        assert row is not None
        # Once it is closed, an effect of a deleted session has no arguments any more.
        sealed = context(row["id"], "arguments")
        request.body = self.codec.unseal(before["arguments"], context=sealed)
        salt = self.salts.of(request)[0]
        request.identity = RequestIdentity(salt, row["scope"], row["key"], row["request_digest"])
        # An effect of the session that this one was forked from stays that one's: both, and other
        # forks, find it there.
        issued = yield from self._issue(request, ISSUED, row, row, owner=row)
        if row["session_number"] is not None and row["unlinked_at"] is not None:
            yield from rows(UNLINK_EFFECTS_OF_SESSION, number=row["session_number"])
        return issued.ticket if isinstance(issued, Owned) else None

    @operation
    def withdraw(self, place: Place | None, guard: Guard | None, ids: Sequence[str]) -> Op[None]:
        """Close what was issued for a caller that was interrupted before it ran anything."""
        yield from batch(*locks(place))
        for id in ids:
            row = yield from one(LOCK_EFFECT, id=id)
            # Its first fence is the issuer's: nobody has taken it over.
            if row is not None and (row["status"], row["fence"]) == ("issued", FIRST_FENCE):
                outcome = EffectOutcome("failed", "not_landed", error=NOT_CALLED)
                yield from self.finishing([(ticket_of(row, place, guard), outcome)])

    @operation
    def keep_late(self, ticket: Ticket, outcome: EffectOutcome) -> Op[None]:
        """Keep what an owner reports after it has lost the effect; it changes nothing."""
        late = self.statements.late(ticket.id, outcome, self.holder)
        yield from rows(KEEP_LATE, number=ticket.number, late=late)

    @query
    def standing(self, number: int, version: int) -> Op[list[tuple[Effect, bool]]]:
        """Return what a session did since a version that stands or may stand, newest first.

        Each with whether all its arguments were stored.
        """
        yield from self.salts.look()
        found = yield from effects_after(number, version)
        return [(self.effect(row), self.is_whole(row)) for row in found]

    def is_whole(self, row: Row) -> bool:
        """Whether an effect's stored arguments are those of its request, with nothing redacted."""
        return is_whole(self.salts.all(), self.codec.limits, row, self.effect(row).arguments)

    def take_over(self, row: Row, holder: str, lease_ms: int) -> Op[int | None]:
        """Become the owner of a dead owner's attempt; return its new fence, None if too late."""
        given = {"number": row["number"], "fence": row["fence"]}
        taken = yield from one(TAKE_OVER_EFFECT, **given, holder=holder, lease_ms=lease_ms)
        return None if taken is None else int(taken["fence"])

    def _identify(self, request: EffectRequest) -> Op[None]:
        """Identify a request and encode its arguments, before any lock is held."""
        yield from self.salts.learn_to_write()
        request.identity = yield from self.salts.identify(request)
        request.body = self.statements.encoded("arguments", request.arguments)

    def _issue_first(self, request: EffectRequest, outcome: EffectOutcome) -> Op[Row | None]:
        """Write the first attempt of a new effect, which most are.

        The statement checks everything itself, and writes nothing if the effect is not new.
        """
        self.keeper.require_known(request.guard)
        id = yield from fresh_id()
        answers = yield from decide(
            *locks(request.place),
            *self.keeper.looks(request.guard),
            self.statements.issue(id, request, outcome, is_first=True),
            emits=self.statements.events(
                request.place, id, request.tool.name, request.call_id, outcome
            ),
            again=Query(EFFECT_BY_ID, {"id": id}),
        )
        return next(iter(answers[-1]), None)

    def _look(
        self, request: EffectRequest, asked: Sequence[Query]
    ) -> Op[tuple[Row | None, list[list[Row]]]]:
        """Lock what a request belongs to; return the session's row, if any, and the answers."""
        place, guard = request.place, request.guard
        looks = [*self.keeper.looks(guard), *asked]
        if place is None:
            answers = (yield from batch(*looks)) if looks else []
            return None, self.keeper.require(guard, answers)
        session = Query(LOCK_SESSION, {"number": place.number})
        looks.insert(len(looks) - len(asked), session)
        _, *answers = yield from batch(*locks(place), *looks)
        found, *answers = self.keeper.require(guard, answers)
        return require_writable(self.runtime, place, found), answers

    def _judge(self, request: EffectRequest, found: Found) -> Op[Taken | None]:
        """Decide what the row that was found means for a request; None: it is to be run."""
        row = found.row
        if row is None:
            return None
        match row["status"]:
            case "completed":
                if (yield from is_superseded(request, found)):
                    return None
                return Known((yield from self._answer(request, found, row)))
            case "failed":
                is_cached = request.tool.cache_failures and row["reason"] == "raised"
                if not is_cached and row["reason"] != "given_up":
                    return None
                return Known((yield from self._answer(request, found, row)))
            case "unknown" if request.tool.verify is None and request.tool.if_unknown == "park":
                return Known(self.effect(row))
        if row["wait_ms"] > 0:
            return Busy(self.effect(row), row["wait_ms"])
        return (yield from self._step_in(request, row))

    def _answer(self, request: EffectRequest, found: Found, row: Row) -> Op[Effect]:
        """Return the effect that answers a call, which has a row of its own from then on."""
        effect = self.effect(row)
        if not found.needs_row(request):
            return effect
        id = yield from fresh_id()
        newest = (found.newest or {"generation": 0}) if found.is_inherited else None
        [inserted] = yield self.statements.replay(id, request, row, newest)
        replay_of = effect.replay_of or effect.id
        outcome = EffectOutcome(effect.status, effect.reason)
        told = (request.place, id, effect.tool, request.call_id, outcome, replay_of)
        yield from self.statements.events(*told)
        return replace(effect, id=id, number=inserted["number"], replay_of=replay_of)

    def _step_in(self, request: EffectRequest, row: Row) -> Op[Taken | None]:
        """Take a dead owner's attempt over: to verify it, to give it up, or to run it again."""
        fence = yield from self.take_over(row, request.holder, request.tool.lease_ms)
        if fence is None:
            return Busy(self.effect(row), 1)
        ticket = ticket_of({**row, "fence": fence}, request.place, request.guard)
        effect = self.effect(row)
        if request.tool.verify is not None:
            return InDoubt(ticket, effect)
        outcome = settle(self.statements, request.tool, Unknown(), of=effect)
        yield from self.finishing([(ticket, outcome)])
        if outcome.reason == "abandoned":
            row.update(status="failed", reason="abandoned")
            return None
        ended = yield from one(LOCK_EFFECT, id=row["id"])
        assert ended is not None
        return Known(self.effect(ended))

    def _issue(
        self,
        request: EffectRequest,
        outcome: EffectOutcome,
        newest: Row | None,
        before: Row | None,
        owner: Row | None = None,
    ) -> Op[Owned | Known | Busy]:
        """Insert the next generation; whoever inserts it owns the effect."""
        id = yield from fresh_id()
        before = before if outcome is ISSUED else None
        keeps_key = before is not None and (yield from _keeps_key(before))
        given = (id, request, outcome, newest, before, owner)
        inserted = yield self.statements.issue(*given, keeps_key=keeps_key)
        if inserted:
            return (yield from self._own(request, inserted[0], outcome))
        row = yield from one(EFFECT_BY_KEY, key=request.identity.key, limit=1)
        assert row is not None
        if outcome is ISSUED:
            return Busy(self.effect(row), 1)
        if row["status"] == "completed":
            return Known(self.effect(row))
        return Owned(ticket_of(row, request.place, request.guard))

    def _own(self, request: EffectRequest, row: Row, outcome: EffectOutcome) -> Op[Owned]:
        told = (request.place, row["id"], request.tool.name, request.call_id)
        yield from self.statements.events(*told, outcome)
        return Owned(ticket_of(row, request.place, request.guard))


def _keeps_key(before: Row) -> Op[bool]:
    """Whether the attempt after this one goes out under the same idempotency key.

    It does if one under that key may have reached its receiver. After one that is known to have
    failed, the receiver must not answer with that failure; it tells nothing of those before it.
    """
    if before["reason"] != "raised":
        return True
    given = {"key": before["key"], "idempotency_key": before["idempotency_key"]}
    return before["attempt"] > 1 and (yield from one(ABANDONED_UNDER_KEY, **given)) is not None
