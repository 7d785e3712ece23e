"""Effects in the API of sessions and stores: call, begin, once; list, resolve and verify.

`begin` is for effects whose tools the caller runs itself; it then completes or fails them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from ..access import record
from ..arguments import require_limit, require_one_of, require_text, require_whole, shown
from ..checkpoints.read import require_version, spans
from ..dataclass import dataclass
from ..errors import InProgress, InvalidArgument, NotFound, Refused, described
from ..kernel.flow import INTERRUPTS, Flow, flow, perform, require_colour
from ..kernel.nouns import find_row
from ..kernel.operation import (
    AfterCommit,
    C,
    Handle,
    Lock,
    Op,
    Row,
    Runtime,
    one,
    operation,
    query,
    rows,
    whole_query,
)
from ..leases import Kept
from ..records import EFFECT_STATUSES, Effect, EffectKind, EffectStatus
from ..sessions.access import Place
from ..sessions.handle import SessionHandle
from ..wire import travels
from .calls import PreparedCall, prepare
from .history import effects_after, find_call, read_history
from .ledger import Ledger, finish, settle, verify
from .listings import list_rows
from .requests import ONCE_KEY_CHARACTERS_MAX, ONCE_SECONDS, digest_of, once_rules, once_tool
from .statements import (
    EFFECT_ATTEMPTS,
    EFFECT_BY_ID,
    EFFECT_BY_KEY,
    LOCK_EFFECT,
    PENDING_EFFECTS,
    RECENT_CALLS,
    SELECT_EFFECTS,
    UNRESOLVED_EFFECTS,
    EffectOutcome,
    Result,
    Ticket,
    known_result,
    place_of,
    read_effect,
    ticket_of,
)
from .tools import (
    Landed,
    NotLanded,
    OnUnknown,
    Tool,
    Unknown,
    Verify,
    by_name,
    named_tool,
    require_tool,
)
from .turns import ToolUse, call_all
from .undo import Compensation, undo_after

EFFECTS_PER_PAGE_MAX = 1_000
# An effect's own key is prefixed with its scope.
LEDGER_KEY_CHARACTERS_MAX = 1_000

Match: TypeAlias = Literal["match", "conflict", "none"]


@dataclass(frozen=True, slots=True)
class Replay:
    """The stored result of an effect that was run before."""

    result: Result[Any]


@travels
class Issued(Handle[C]):
    """An effect that the caller has to run, and then to complete or fail. Its intent is durable."""

    def __init__(
        self,
        runtime: Runtime,
        ticket: Ticket,
        kept: Kept | None,
        call: PreparedCall | None = None,
    ) -> None:
        super().__init__(runtime)
        self.ticket = ticket
        self._call = call
        self._drop: Callable[[], None] = lambda: None
        if kept is not None:
            # If this handle is collected, the lease must expire, which leaves the effect in doubt.
            kept.owner = weakref.ref(self)
            self._drop = functools.partial(Ledger.of(runtime).keeper.drop, kept)

    def _to_wire(self) -> tuple[Ticket]:
        """Return the right to record the outcome."""
        return (self.ticket,)

    @classmethod
    def _from_wire(cls, runtime: Runtime, ticket: Ticket) -> Issued[Any]:
        """Return it with that right; its lease is kept by the client."""
        return cls(runtime, ticket, None)

    @property
    def effect_id(self) -> str:
        """The id of the effect."""
        return self.ticket.id

    @property
    def idempotency_key(self) -> str:
        """The key to pass to the receiver; the same when the attempt is retried."""
        return self.ticket.idempotency_key

    @flow
    def complete(self, value: Any = None) -> Flow[Result[Any]]:
        """Record that it happened, with its result. Raises LeaseLost after a takeover."""
        yield from self._finish(self._completed(value))
        if self._call is not None:
            yield from self._call.keep_answer()
        return Result(value, self.ticket.id)

    def completing(self, value: Any = None) -> Op[Result[Any]]:
        """Record it within the current transaction: `yield from issued.completing(value)`."""
        ended = [(self.ticket, self._completed(value))]
        if not all((yield from Ledger.of(self.runtime).finishing(ended))):
            raise self.ticket.lost()
        if self._call is not None:
            yield from self._call.keeping_answer()
        yield AfterCommit(self._drop)
        return Result(value, self.ticket.id)

    @flow
    def fail(self, error: BaseException | str, *, happened: bool | None = None) -> Flow[None]:
        """Record that it failed; `happened=False` if it certainly had no effect.

        Otherwise it is in doubt, and parked until it is resolved.
        """
        if happened is True:
            raise InvalidArgument("record an effect that happened with complete(result)")
        text = error if isinstance(error, str) else described(error)
        status: EffectStatus = "failed" if happened is False else "unknown"
        yield from self._finish(EffectOutcome(status, "raised", error=text))

    def _completed(self, value: Any) -> EffectOutcome:
        self.runtime.codec.encode(value, name="result")
        return EffectOutcome("completed", None, value)

    def _finish(self, outcome: EffectOutcome) -> Flow[None]:
        yield from finish(Ledger.of(self.runtime), self.ticket, outcome)
        self._drop()


def begin(call: PreparedCall, handle: Handle[C]) -> Flow[Replay | Issued[C]]:
    """Return the stored outcome of a call, or the right to run it."""
    try:
        taken = yield from call.take()
        if isinstance(taken, Result):
            return Replay(taken)
        kept = call.keep(*taken)
        if kept.is_lost:
            yield from call.ensure_owned(kept, taken[0])
        return Issued(handle.runtime, taken[0], kept, call if call.needs_row else None)
    except INTERRUPTS:
        yield from call.withdraw()
        raise


class SessionEffects(SessionHandle[C]):
    """The effects of a session."""

    @property
    def ledger(self) -> Ledger:
        """The effects of this store."""
        return Ledger.of(self.runtime)

    @flow
    def call(
        self,
        tool: Tool[..., Any],
        /,
        *,
        call_id: str | None = None,
        wait_seconds: float | None = None,
        **arguments: Any,
    ) -> Flow[Result[Any]]:
        """Run a tool once: its intent is durable before it runs, its outcome afterwards.

        An identical call gets the stored result, waits while another caller runs it, or, if the
        outcome is in doubt, is verified or raises Unresolved. `item=` links the call to a work
        item, unless the tool has a parameter of that name; use `call_with` then.
        """
        item = None if require_tool(tool).takes_item else arguments.pop("item", None)
        return (yield from self._prepare(tool, arguments, call_id, item, wait_seconds).run())

    @flow
    def call_with(
        self,
        tool: Tool[..., Any],
        arguments: Mapping[str, Any],
        *,
        call_id: str | None = None,
        wait_seconds: float | None = None,
        item: object = None,
    ) -> Flow[Result[Any]]:
        """Do what `call` does, with the tool's arguments in a dict."""
        return (yield from self._prepare(tool, arguments, call_id, item, wait_seconds).run())

    @flow
    def call_all(
        self,
        uses: Sequence[ToolUse],
        *,
        wait_seconds: float | None = None,
        item: object = None,
    ) -> Flow[list[Result[Any] | Exception]]:
        """Run the calls of one turn, in order; return the result or the exception of each.

        Each happens once, as with `call`. Their intents cost one commit together, and the outcomes
        of those that return quickly cost another. When interrupted, calls that have not started are
        closed as not called.
        """
        for use in uses:
            if not isinstance(use, ToolUse):
                raise InvalidArgument(f"call_all takes ToolUse, not {type(use).__name__}")
        calls = [
            self._prepare(use.tool, use.arguments, use.call_id, item, wait_seconds) for use in uses
        ]
        return (yield from call_all(calls))

    @flow
    def begin(
        self,
        tool: Tool[..., Any] | str,
        arguments: Mapping[str, Any],
        call_id: str | None = None,
        *,
        effect: EffectKind = "mutate",
        wait_seconds: float | None = None,
        item: object = None,
        idempotency_key: str | None = None,
    ) -> Flow[Replay | Issued[C]]:
        """Make the intent of an effect durable, for a loop that runs its tools itself.

        Returns a Replay of an earlier outcome, or an Issued to complete or fail. A given
        `idempotency_key` is used for every attempt.
        """
        known = named_tool(tool, effect) if isinstance(tool, str) else tool
        if idempotency_key is not None:
            require_text("key", idempotency_key, ONCE_KEY_CHARACTERS_MAX)
        call = self._prepare(known, arguments, call_id, item, wait_seconds)
        call.request.idempotency_key = idempotency_key
        return (yield from begin(call, self))

    @flow
    def begun(self, call_id: str) -> Flow[Replay | Issued[C]]:
        """Return a call that any process began under this id, to record its outcome from here.

        Get it before the tool runs: after a takeover, recording an outcome raises LeaseLost.
        Returns a Replay if the call is completed. Raises NotFound if the session's history has no
        such call: none was begun, it was undone, or it was rewound and an equal one may run again.
        """
        require_text("call_id", call_id)
        effect, ticket = yield from perform(SessionEffects._call, self, call_id)
        if effect.status != "issued":
            return Replay(known_result(effect))
        return Issued(self.runtime, ticket, None)

    @query
    def _call(self, call_id: str) -> Op[tuple[Effect, Ticket]]:
        found = yield from find_call(self.number, self.id, call_id)
        if found is None:
            raise NotFound(f"session {self.id} has no call {call_id!r}", id=call_id)
        return self.ledger.effect(found), ticket_of(found, self._place)

    @flow
    def compensate(self, *, to: int, tools: object = None) -> Flow[Compensation]:
        """Undo the effects since a version, newest first; each undo is an effect of its own.

        `tools` adds to those that this process has called. Effects without an undo, or whose undo
        fails, are reported.
        """
        require_version(to)
        known = {**self.ledger.tools, **by_name(tools)}
        place = self._place
        return (yield from undo_after(self.ledger, place, to, known, self.holder))

    @whole_query
    def standing(self, version: int) -> Op[list[Effect]]:
        """Return the effects since a version that may have happened and were not undone.

        Newest first.
        """
        require_version(version)
        found = yield from effects_after(self.number, version)
        return [self.ledger.effect(row) for row in found]

    @query
    def pending(self) -> Op[list[Effect]]:
        """Return the calls without a recorded outcome, oldest first.

        Their owners may be running or dead; a takeover is possible from `takeover_at`. A fork
        includes those from before the fork.
        """
        return (yield from self._listed(PENDING_EFFECTS, on_path=True))

    @query
    def unresolved(self) -> Op[list[Effect]]:
        """Return the effects whose outcome is unknown, oldest first.

        A fork includes those from before the fork, which block its identical calls too.
        """
        return (yield from self._listed(UNRESOLVED_EFFECTS))

    def _listed(self, sql: str, *, on_path: bool = False) -> Op[list[Effect]]:
        history = yield from read_history(self.number)
        found = yield from rows(sql, number=self.number, session_id=self.id)
        found = [row for row in found if not on_path or history.holds(row)]
        found += yield from history.inherited(sql)
        return [self.ledger.effect(row) for row in sorted(found, key=lambda row: row["number"])]

    @query
    def recent_calls(self, limit: int = 10) -> Op[list[Effect]]:
        """Return the latest calls with a call id in the session's history, newest first."""
        require_limit(limit, EFFECTS_PER_PAGE_MAX)
        found: list[Row] = []
        for owner, low, high in (yield from spans(self.number, on_path=True)):
            # Before its first checkpoint a session's calls are issued at version 0.
            span = {"number": owner, "low": 0 if low == 1 else low, "high": high}
            if len(found) < limit:
                found += yield from rows(RECENT_CALLS, **span, limit=limit - len(found))
        return [self.ledger.effect(row) for row in found]

    @operation
    def _digests(self, tool: str, arguments: Any) -> Op[list[str]]:
        """Return the digest of a request under each salt of the store, its own one first."""
        salts = self.ledger.salts
        yield from salts.load_for_write()
        yield from salts.refresh()
        return [digest_of(salt, salts.limits, tool, arguments) for salt in salts.all()]

    def _prepare(
        self,
        tool: Tool[..., Any],
        arguments: Mapping[str, Any],
        call_id: str | None = None,
        item: object = None,
        wait_seconds: float | None = None,
    ) -> PreparedCall:
        return prepare(
            self.ledger,
            require_tool(tool),
            arguments,
            place=self._place,
            holder=self.holder,
            call_id=call_id,
            item=item,
            wait_seconds=wait_seconds,
        )


class StoreEffects(Handle[C]):
    """The ledger of a store."""

    @property
    def ledger(self) -> Ledger:
        """The effects of this store."""
        return Ledger.of(self.runtime)

    @flow
    def once(
        self,
        key: str,
        function: Callable[..., Any],
        *,
        request: Any = None,
        ttl_seconds: float | None = ONCE_SECONDS,
        session: Any = None,
        item: object = None,
        effect: EffectKind = "mutate",
        verify: Verify | None = None,
        on_unknown: OnUnknown = "park",
        cache_failures: bool = False,
        wait_seconds: float | None = None,
    ) -> Flow[Result[Any]]:
        """Run a function once per key in the whole store; later callers get its result.

        The function takes no arguments, except `idempotency_key` if it accepts that. A tool keeps
        its own rules and gets `request` as its arguments. A different request under the same key
        raises RequestMismatch. The key is free again `ttl_seconds` after completion.
        """
        tool, arguments = once_tool(function, request, effect, verify, on_unknown, cache_failures)
        given: dict[str, Any] = {"item": item, "wait_seconds": wait_seconds}
        given |= {"place": _place_of(session), **once_rules(key, request, ttl_seconds)}
        return (yield from prepare(self.ledger, tool, arguments, **given).run())

    @flow
    def begin(
        self,
        key: str,
        request: Any = None,
        *,
        ttl_seconds: float | None = ONCE_SECONDS,
        session: Any = None,
        item: object = None,
        effect: EffectKind = "mutate",
        wait_seconds: float | None = None,
    ) -> Flow[Replay | Issued[C]]:
        """Do what `once` does, for a request that the caller serves itself.

        Returns a Replay of the key's outcome, or an Issued to complete or fail.
        """
        given: dict[str, Any] = {"item": item, "wait_seconds": wait_seconds}
        given |= {"place": _place_of(session), **once_rules(key, request, ttl_seconds)}
        call = prepare(self.ledger, named_tool("begin", effect), {}, **given)
        return (yield from begin(call, self))

    @query
    def compare(self, key: str, request: Any = None) -> Op[Match]:
        """Return how a request compares with the one stored under its key. Nothing is written.

        "match" if they are equal, "conflict" if they differ, "none" if the key is free.
        """
        tool = named_tool("begin", "mutate")
        asked = prepare(self.ledger, tool, {}, **once_rules(key, request, None)).request
        salts = self.ledger.salts
        if not (yield from salts.load()):
            return "none"
        yield from salts.refresh()
        asked.identity = yield from salts.identify(asked)
        row = yield from one(EFFECT_BY_KEY, key=asked.identity.key, limit=1)
        if row is None or row["is_expired"]:
            return "none"
        return "match" if salts.matches(row, asked) else "conflict"

    @query
    def effects(
        self,
        *,
        session: Any = None,
        root: object = None,
        item: object = None,
        key: str | None = None,
        tool: str | None = None,
        status: EffectStatus | None = None,
        after: int = 0,
        limit: int = 100,
    ) -> Op[list[Effect]]:
        """Return rows of the ledger, oldest first; `after` is the number of the last one seen.

        `root` is a session tree, by its root's id or any of its sessions. `key` is a key passed to
        `once`, an effect's own key, or its idempotency key.
        """
        if status is not None:
            require_one_of("status", status, EFFECT_STATUSES)
        require_limit(limit, EFFECTS_PER_PAGE_MAX)
        require_whole("after", after, 0)
        wanted = {
            "session_id": getattr(session, "id", session),
            "root_id": getattr(root, "root_id", root),
            "item_id": getattr(item, "id", item),
            "key": key,
            "tool": tool,
            "status": status,
        }
        given = {name: value for name, value in wanted.items() if value is not None}
        for name, value in given.items():
            require_text(name.removesuffix("_id"), value, LEDGER_KEY_CHARACTERS_MAX)
        found = yield from list_rows(given, after, limit)
        return [self.ledger.effect(row) for row in found]

    @query
    def effect(self, id: str) -> Op[Effect]:
        """Return one row of the ledger, or raise NotFound."""
        return self.ledger.effect((yield from read_effect(id)))

    @query
    def find_effect(self, id: str) -> Op[Effect]:
        """Return an effect by its id, its number or a unique prefix of its id, or raise NotFound.

        A prefix has 8 characters or more.
        """
        row = yield from find_row("effect", SELECT_EFFECTS, require_text("id", id))
        if row is None:
            raise NotFound(f"there is no effect {id!r}", id=id)
        return self.ledger.effect(row)

    @query
    def attempts(self, id: str) -> Op[list[Effect]]:
        """Return all attempts of an effect, oldest first."""
        row = yield from read_effect(id)
        if row["replay_of"] is not None:
            # The original may have been pruned.
            for original in (yield from rows(EFFECT_BY_ID, id=row["replay_of"])):
                row = original
        found = yield from rows(EFFECT_ATTEMPTS, key=row["key"])
        return [self.ledger.effect(each) for each in found]

    @operation
    def resolve(
        self, id: str, verdict: Landed | NotLanded, *, by: str, note: str | None = None
    ) -> Op[Effect]:
        """Resolve an effect in doubt by hand; `by` records who decided.

        After Landed, identical calls get the result. After NotLanded, the next one runs it.
        """
        if isinstance(verdict, type) and issubclass(verdict, Landed | NotLanded):
            verdict = verdict()
        if not isinstance(verdict, Landed | NotLanded):
            raise InvalidArgument(
                f"an effect is resolved as Landed(result) or NotLanded(), not {shown(verdict)}"
            )
        require_text("by", by)
        if note is not None and not isinstance(note, str):
            raise InvalidArgument(f"note must be text, not {type(note).__name__}")
        outcome = EffectOutcome("failed", "not_landed", decided_by=by, note=note)
        if isinstance(verdict, Landed):
            self.runtime.codec.encode(verdict.result, name="result")
            outcome.status, outcome.reason, outcome.result = "completed", "resolved", verdict.result
        effect = yield from StoreEffects._settle(self, id, outcome)
        yield from record(self.runtime.actor, "effect_resolved", effect.id, effect.reason)
        return effect

    @operation
    def _settle(self, id: str, outcome: EffectOutcome) -> Op[Effect]:
        """Record the outcome of an effect in doubt; raise if it is running or settled."""
        place = yield from place_of((yield from read_effect(id)))
        if place is not None:
            yield Lock(place.root_id)
        row = yield from read_effect(id, LOCK_EFFECT)
        if row["status"] == "issued" and row["wait_ms"] > 0:
            raise InProgress(
                f"effect {id} is run by {row['holder']!r}; it can be resolved once its owner has "
                "ended or died",
                effect_id=id,
            )
        if row["status"] not in {"issued", "unknown"}:
            raise Refused(f"effect {id} is {row['status']} already; nothing was changed", id=id)
        yield from self.ledger.finishing([(ticket_of(row, place), outcome)], row["status"])
        return self.ledger.effect((yield from read_effect(id)))

    @flow
    def verify(self, id: str, tools: object) -> Flow[Effect]:
        """Call the tool's verify hook for an effect in doubt, and record the verdict."""
        known = by_name(tools)
        effect, is_unredacted, wait_ms = yield from perform(StoreEffects._doubtful, self, id)
        tool = known.get(effect.tool)
        if tool is None or tool.verify is None:
            what = "has no verify hook" if tool else "is not among the given tools"
            raise InvalidArgument(f"{effect.tool} {what}; resolve the effect by hand")
        require_colour(self.runtime, tool.verify)
        if wait_ms > 0:
            raise InProgress(
                f"the request of effect {id} may be in flight for another {wait_ms / 1000:.1f} s; "
                "verify it then",
                effect_id=id,
                wait_seconds=wait_ms / 1000,
            )
        given = (effect.arguments, effect.idempotency_key)
        verdict = yield from verify(tool.verify, *given, is_unredacted=is_unredacted)
        if isinstance(verdict, Unknown):
            return effect
        outcome = settle(self.ledger.statements, tool, verdict)
        return (yield from perform(StoreEffects._settle, self, id, outcome))

    @query
    def _doubtful(self, id: str) -> Op[tuple[Effect, bool, int]]:
        """Return an effect, whether its arguments are unredacted, and when it may be verified."""
        row = yield from read_effect(id)
        yield from self.ledger.salts.refresh()
        wait_ms = row["wait_ms"] if row["status"] == "unknown" else 0
        return self.ledger.effect(row), self.ledger.is_unredacted(row), wait_ms


def _place_of(session: Any) -> Place | None:
    if session is None:
        return None
    if not isinstance(session, SessionEffects):
        raise InvalidArgument(f"session must be a session, not {type(session).__name__}")
    return session._place
