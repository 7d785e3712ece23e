"""The ledger: decides who may run an effect, and records outcomes, one transaction each.

The outcome of an effect in doubt is decided here too: `verify` asks the tool, `settle` decides.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from ..arguments import shown
from ..dataclass import dataclass
from ..errors import (
    CommitUnknown,
    HoldfastError,
    SessionNotFound,
    StoreBusy,
    StoreFull,
    StoreUnavailable,
    described,
)
from ..kernel.commit_settlement import MarkOps, parse_commit_id
from ..kernel.flow import INTERRUPTS, Flow, invoke, perform, perform_to_the_end, wait
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
from ..sessions.access import LOCK_SESSION, MAY_WRITE_SESSION, Place, require_writable
from ..sessions.rows import ALL_SESSIONS, ONE_SESSION
from ..wire import travels
from .history import Found, effects_after, find, is_superseded, keeps_key, lookups
from .requests import EffectRequest, RequestIdentity, Salts, is_unredacted
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
    owner_of,
    ticket_of,
    topic,
)
from .tools import Landed, NotLanded, Tool, Unknown, Verdict

KNOWN_SESSIONS_MAX = 10_000
FINISH_PAUSES_SECONDS = (0.0, 0.1, 1.0, 5.0)
# The status, reason and fence of an attempt that nobody has taken over; a rewind may doubt it.
UNTOUCHED = {("issued", None, FIRST_FENCE), ("unknown", "rewound", FIRST_FENCE + 1)}
NOT_CALLED = "its caller was interrupted before the tool was called"
SESSION_BRANCH = f"SELECT s.epoch, s.origin_number FROM {ONE_SESSION}"  # noqa: S608
# An effect that its owner has not begun, in a session that may still be written to.
MAY_BEGIN = f"""
SELECT e.number FROM hf_effects e
WHERE e.number = :number AND e.fence = :fence AND e.status = 'issued' AND (
    CAST(:place_number AS INTEGER) IS NULL OR EXISTS (
        SELECT 1 FROM {ALL_SESSIONS} WHERE s.number = CAST(:place_number AS INTEGER)
            AND {MAY_WRITE_SESSION.format(fence=":session_fence")}
    )
)
"""  # noqa: S608
MARK_UNDONE = "UPDATE hf_effects SET undone_by = :id WHERE id = :undoes"
KEEP_LATE = "UPDATE hf_effects SET late = :late WHERE number = :number"


@travels
@dataclass(frozen=True, slots=True)
class Owned:
    """The caller may run the effect."""

    ticket: Ticket


@travels
@dataclass(frozen=True, slots=True)
class Known:
    """The effect is completed, failed permanently, or parked in doubt."""

    effect: Effect


@travels
@dataclass(frozen=True, slots=True)
class Busy:
    """Another owner runs the effect; a takeover is possible after `wait_ms`."""

    effect: Effect
    wait_ms: int


@travels
@dataclass(frozen=True, slots=True)
class InDoubt:
    """The effect's owner is dead, and the caller is to verify it."""

    ticket: Ticket
    effect: Effect
    needs_row: bool
    """Whether the call needs a row of its own for what it is answered."""


@travels
@dataclass(frozen=True, slots=True)
class Unapproved:
    """The approval for the call was consumed by an earlier effect, or is of another epoch."""


Taken: TypeAlias = Owned | Known | Busy | InDoubt | Unapproved


@travels
class Ledger(PerStore):
    """The ledger of one open store."""

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
        """The tools that this process has called, by name."""
        self._known_sessions: set[int] = set()
        """Sessions whose last call was a replay; for their next call, lookups come first."""

    @query
    def require_key(self) -> Op[None]:
        """Raise InvalidArgument if the store's effects were identified with another key."""
        yield from self.salts.load()

    @deciding
    def take(self, request: EffectRequest, outcome: EffectOutcome = ISSUED) -> Op[Taken]:
        """Decide whether a call is to be run, was run, or is run by another owner.

        A read passes its outcome, which is written unless an earlier one answers the call.
        """
        place = request.place
        yield from self._identify(request)
        if place is None or place.number not in self._known_sessions:
            row = yield from self._issue_first(request, outcome)
            if row is not None:
                is_same = row.get("status", outcome.status) == outcome.status
                if is_same and row["fence"] == FIRST_FENCE:
                    return Owned(ticket_of(row, request.place, request.guard))
                # The connection was lost for so long that another owner has taken over.
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
            # After a replay the next call is probably one too, as in a resumed or forked session.
            if isinstance(taken, Owned):
                self._known_sessions.discard(place.number)
            elif len(self._known_sessions) < KNOWN_SESSIONS_MAX:
                self._known_sessions.add(place.number)
        return taken

    @operation
    def take_all(self, requests: Sequence[EffectRequest]) -> Op[list[Ticket | None]]:
        """Issue calls of one session in one commit, up to the first that is not new.

        None for that one and all after it: effects are numbered in the order in which they run, and
        whether it runs is not decided yet. One round trip on PostgreSQL.
        """
        place, guard = requests[0].place, requests[0].guard
        self.keeper.require_known(guard)
        issues: list[Query] = []
        id = None
        for request in requests:
            yield from self._identify(request)
            before, id = id, (yield from fresh_id())
            issues.append(self.statements.issue(id, request, is_first=True, follows=before))
        looks = self.keeper.looks(guard)
        answers = yield from batch(*locks(place), *looks, *issues)
        self.keeper.require(guard, answers[len(locks(place)) :])
        tickets: list[Ticket | None] = []
        for request, found in zip(requests, answers[-len(issues) :], strict=True):
            owned = (yield from self._own(request, found[0], ISSUED)) if found else None
            tickets.append(None if owned is None else owned.ticket)
        return tickets

    @query
    def may_begin(self, ticket: Ticket) -> Op[bool]:
        """Whether a call that was issued a while ago would be issued now."""
        self.keeper.require_known(ticket.guard)
        place = ticket.place
        found = yield from one(
            MAY_BEGIN,
            number=ticket.number,
            fence=ticket.fence,
            place_number=None if place is None else place.number,
            session_fence=None if place is None else place.fence,
        )
        return found is not None

    @query
    def find_completed(self, request: EffectRequest) -> Op[tuple[Effect, bool] | None]:
        """Return the completed effect that answers a call, and whether it needs its own row."""
        if not (yield from self.salts.load()):
            return None
        while True:
            request.identity = yield from self.salts.identify(request)
            number = None if request.place is None else request.place.number
            branch = Query(SESSION_BRANCH, {"number": number})
            looks = (self.salts.now(request.place), branch, *lookups(request))
            (salts,), session, *answers = yield from batch(*looks)
            if (yield from self.salts.confirm(request, salts)):
                break
            if not (yield from self.salts.load()):
                return None
        found = yield from find(self.salts, request, next(iter(session), None), answers)
        if found.row is None or found.row["status"] != "completed":
            return None
        if (yield from is_superseded(request, found)):
            return None
        return self.effect(found.row), found.needs_row(request)

    @deciding
    def finish(self, ticket: Ticket, outcome: EffectOutcome) -> Op[bool]:
        """Record an outcome; False if the ticket is no longer valid."""
        if ticket.undoes is None and ticket.fence == FIRST_FENCE and not ticket.owner_number:
            answers = yield from decide(
                *locks(ticket.place),
                *self.keeper.looks(ticket.guard),
                self.statements.finish(ticket, outcome, "issued"),
                emits=self.statements.events(ticket.place, *ticket.event_fields, outcome),
            )
            if answers[-1]:
                yield AfterCommit(partial(self.signals.ring, topic(ticket.id)))
                return True
        return (yield from self.finishing([(ticket, outcome)]))[0]

    @operation
    def finish_all(self, ended: Sequence[tuple[Ticket, EffectOutcome]]) -> Op[list[bool]]:
        """Record the outcomes of one session's calls in one commit; False for each lost ticket."""
        return (yield from self.finishing(ended))

    def finishing(
        self, ended: Sequence[tuple[Ticket, EffectOutcome]], old_status: str = "issued"
    ) -> Op[list[bool]]:
        """Record outcomes of one session within the current transaction, in one round trip."""
        place, looks = ended[0][0].place, self.keeper.looks(ended[0][0].guard)
        if looks and not all((yield from batch(*locks(place), *looks))):
            return [False] * len(ended)
        owners = []
        for ticket, _ in ended:
            owners.append((yield from owner_of(ticket)))
        finishes = (self.statements.finish(*each, old_status) for each in ended)
        answers = yield from batch(*locks(place), *finishes)
        recorded = [bool(found) for found in answers[len(locks(place)) :]]
        for (ticket, outcome), owner, is_recorded in zip(ended, owners, recorded, strict=True):
            if not is_recorded:
                continue
            if ticket.undoes is not None and outcome.status == "completed":
                yield from rows(MARK_UNDONE, id=ticket.id, undoes=ticket.undoes)
            yield from self.statements.events(owner, *ticket.event_fields, outcome)
            # After a takeover the effect may have been in doubt, and items may wait for it.
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
        """Close an attempt that may be retried, and issue the next one."""
        before = yield from one(EFFECT_BY_ID, id=ticket.id)
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
        # Closing an effect of a deleted session removes its arguments.
        sealed = context(row["id"], "arguments")
        request.body = self.codec.unseal(before["arguments"], context=sealed)
        salt = self.salts.of(request)[0]
        request.identity = RequestIdentity(salt, row["scope"], row["key"], row["request_digest"])
        # An effect of the origin stays there: the origin and its other forks find it too.
        issued = yield from self._issue(request, ISSUED, row, row, owner=row)
        if row["session_number"] is not None and row["unlinked_at"] is not None:
            yield from rows(UNLINK_EFFECTS_OF_SESSION, number=row["session_number"])
        return issued.ticket if isinstance(issued, Owned) else None

    @operation
    def withdraw(self, place: Place | None, guard: Guard | None, ids: Sequence[str]) -> Op[None]:
        """Close the attempts of a caller that was interrupted before it called the tools."""
        yield from batch(*locks(place))
        for id in ids:
            if (row := (yield from one(EFFECT_BY_ID, id=id))) is not None:
                yield from owner_of(ticket_of(row, place, guard))
                row = yield from one(LOCK_EFFECT, id=id)
            if row is not None and (row["status"], row["reason"], row["fence"]) in UNTOUCHED:
                outcome = EffectOutcome("failed", "not_landed", error=NOT_CALLED)
                ended = [(ticket_of(row, place, guard), outcome)]
                yield from self.finishing(ended, row["status"])

    @operation
    def keep_late(self, ticket: Ticket, outcome: EffectOutcome) -> Op[None]:
        """Store what an owner reports after it lost the effect, for information only."""
        late = self.statements.late(ticket.id, outcome, self.holder)
        yield from rows(KEEP_LATE, number=ticket.number, late=late)

    @query
    def standing(self, place: Place, version: int) -> Op[list[tuple[Effect, bool]]]:
        """Return the effects since a version that were not undone, newest first.

        Each with whether its stored arguments are unredacted.
        """
        yield from self.salts.refresh()
        found = yield from effects_after(place.number, version)
        return [(self.effect(row), self.is_unredacted(row)) for row in found]

    def is_unredacted(self, row: Row) -> bool:
        """Whether an effect's stored arguments are those of its request, with nothing redacted."""
        return is_unredacted(self.salts.all(), self.codec.limits, row, self.effect(row).arguments)

    def take_over(self, row: Row, holder: str, lease_ms: int) -> Op[int | None]:
        """Take over a dead owner's attempt; return its new fence, or None if it is not possible."""
        given = {"number": row["number"], "fence": row["fence"]}
        taken = yield from one(TAKE_OVER_EFFECT, **given, holder=holder, lease_ms=lease_ms)
        return None if taken is None else int(taken["fence"])

    def _identify(self, request: EffectRequest) -> Op[None]:
        """Compute a request's identity and encode its arguments, before any lock is taken."""
        yield from self.salts.load_for_write()
        request.identity = yield from self.salts.identify(request)
        request.body = self.statements.encoded("arguments", request.arguments)

    def _issue_first(self, request: EffectRequest, outcome: EffectOutcome) -> Op[Row | None]:
        """Insert the first attempt of a new effect, the common case.

        The statement makes all checks itself, and inserts nothing if the effect is not new.
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
        """Lock and check a request's session; return its row, if any, and the answers."""
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
        """Decide what a found row means for a request; None if it is to be run."""
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
        return (yield from self._take_over_abandoned(request, found, row))

    def _answer(self, request: EffectRequest, found: Found, row: Row) -> Op[Effect]:
        """Return the effect that answers a call, and insert a row for the call if it needs one."""
        effect = self.effect(row)
        if not found.needs_row(request):
            return effect
        id = yield from fresh_id()
        newest = (found.newest or {"generation": 0}) if found.is_inherited else None
        [inserted] = yield self.statements.replay(id, request, row, newest)
        replay_of = effect.replay_of or effect.id
        outcome = EffectOutcome(effect.status, effect.reason)
        yield from self.statements.events(
            request.place, id, effect.tool, request.call_id, outcome, replay_of
        )
        return replace(effect, id=id, number=inserted["number"], replay_of=replay_of)

    def _take_over_abandoned(
        self, request: EffectRequest, found: Found, row: Row
    ) -> Op[Taken | None]:
        """Take over a dead owner's attempt to verify it, give it up, or retry it (None)."""
        if request.tool.verify is None:
            yield from owner_of(ticket_of(row, request.place, request.guard))
        fence = yield from self.take_over(row, request.holder, request.tool.lease_ms)
        if fence is None:
            return Busy(self.effect(row), 1)
        ticket = ticket_of({**row, "fence": fence}, request.place, request.guard)
        effect = self.effect(row)
        if request.tool.verify is not None:
            return InDoubt(ticket, effect, found.needs_row(request))
        outcome = settle(self.statements, request.tool, Unknown(), of=effect)
        yield from self.finishing([(ticket, outcome)])
        if outcome.reason == "abandoned":
            row.update(status="failed", reason="abandoned")
            return None
        ended = yield from one(LOCK_EFFECT, id=row["id"])
        assert ended is not None
        if ended["status"] == "failed":
            return Known((yield from self._answer(request, found, ended)))
        return Known(self.effect(ended))

    def _issue(
        self,
        request: EffectRequest,
        outcome: EffectOutcome,
        newest: Row | None,
        before: Row | None,
        owner: Row | None = None,
    ) -> Op[Owned | Known | Busy | Unapproved]:
        """Insert the next generation; the caller that inserts it owns the effect."""
        id = yield from fresh_id()
        before = before if outcome is ISSUED else None
        is_kept = before is not None and (yield from keeps_key(before))
        given = (id, request, outcome, newest, before, owner)
        inserted = yield self.statements.issue(*given, keeps_key=is_kept)
        if inserted:
            return (yield from self._own(request, inserted[0], outcome))
        row = yield from one(EFFECT_BY_KEY, key=request.identity.key, limit=1)
        is_inserted = row is not None and (newest is None or row["number"] != newest["number"])
        if request.approval is not None and not is_inserted:
            return Unapproved()
        assert row is not None
        if outcome is ISSUED:
            return Busy(self.effect(row), 1)
        if row["status"] == "completed":
            return Known(self.effect(row))
        return Owned(ticket_of(row, request.place, request.guard))

    def _own(self, request: EffectRequest, row: Row, outcome: EffectOutcome) -> Op[Owned]:
        ticket = ticket_of(row, request.place, request.guard)
        owner = yield from owner_of(ticket)
        yield from self.statements.events(owner, *ticket.event_fields, outcome)
        return Owned(ticket)


def finish(
    ledger: Ledger, ticket: Ticket, outcome: EffectOutcome, unknown: CommitUnknown | None = None
) -> Flow[None]:
    """Record an outcome; after a takeover, store it as late and raise LeaseLost.

    Only this process knows it, so a busy store is retried. An `unknown` commit may have stored it.
    """
    for pause in FINISH_PAUSES_SECONDS:
        try:
            if pause:
                yield from wait(pause)
            if unknown is not None:
                mark = parse_commit_id(unknown.id)
                if (yield from perform(MarkOps.is_committed, MarkOps(), *mark)):
                    ledger.signals.ring(topic(ticket.id))
                    return
            if (yield from perform(Ledger.finish, ledger, ticket, outcome)):
                return
            break
        except INTERRUPTS:  # Writing the same outcome again changes nothing.
            with contextlib.suppress(HoldfastError):
                yield from perform_to_the_end(Ledger.finish, ledger, ticket, outcome)
            raise
        except (StoreBusy, StoreUnavailable, StoreFull, CommitUnknown) as error:
            if pause == FINISH_PAUSES_SECONDS[-1]:
                raise
            unknown = error if isinstance(error, CommitUnknown) else unknown
    yield from perform(Ledger.keep_late, ledger, ticket, outcome)
    raise ticket.lost()


def verify(
    hook: Callable[..., Any],
    arguments: dict[str, Any],
    idempotency_key: str,
    *,
    is_unredacted: bool = True,
) -> Flow[Verdict]:
    """Call a tool's verify hook; Unknown if it raises or returns anything but a verdict.

    NotLanded is not trusted if the arguments are redacted: the hook looked for the wrong thing.
    """
    try:
        verdict = yield from invoke(hook, arguments, idempotency_key)
    except Exception as error:
        return Unknown(f"verify raised {described(error)}")
    if isinstance(verdict, type) and issubclass(verdict, NotLanded | Unknown):
        verdict = verdict()
    if isinstance(verdict, NotLanded) and not is_unredacted:
        return Unknown(
            "its stored arguments are redacted, or the store was opened without its key, so "
            "NotLanded proves nothing"
        )
    if isinstance(verdict, Landed | NotLanded | Unknown):
        return verdict
    return Unknown(f"verify must return Landed(…), NotLanded() or Unknown(), not {shown(verdict)}")


def settle(
    statements: Statements,
    tool: Tool[..., Any],
    verdict: Verdict,
    *,
    of: Effect | None = None,
    reason: str | None = None,
    error: str | None = None,
) -> EffectOutcome:
    """Return the outcome of an effect in doubt. The one place where it is decided.

    `of` is the attempt of a dead owner, to which `max_attempts` applies: park, do not retry.
    """
    reason = reason or (None if of is None else of.reason) or "owner_died"
    if isinstance(verdict, Landed):
        outcome = statements.storable(verdict.result)
        outcome.reason = outcome.reason or "verified"
        return outcome
    outcome = EffectOutcome("failed", "not_landed", error=error)
    if isinstance(verdict, Unknown):
        outcome = EffectOutcome("unknown", reason, error=_joined(error, verdict.why))
        if tool.if_unknown == "retry":
            outcome.status, outcome.reason = "failed", "abandoned"
        elif tool.if_unknown == "fail":
            outcome.status, outcome.reason = "failed", "given_up"
            outcome.error = outcome.error or "its outcome is unknown"
    most = tool.max_attempts
    is_retried = outcome.reason in {"not_landed", "abandoned"}
    if is_retried and of is not None and most is not None and of.attempt >= most:
        limit = f"it was not run again after attempt {of.attempt}, as max_attempts is {most}"
        return EffectOutcome("unknown", reason, error=_joined(outcome.error, limit))
    return outcome


def _joined(*texts: str | None) -> str | None:
    return "; ".join(filter(None, texts)) or None
