"""The methods of sessions and stores for peers."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Literal

from ..arguments import (
    milliseconds_of,
    require_limit,
    require_one_of,
    require_seconds,
    require_text,
    require_text_or_none,
    require_whole,
)
from ..effects import Ledger
from ..effects.statements import OPEN_EFFECTS
from ..errors import Compacted, InvalidArgument, NotFound
from ..feed import read_events
from ..feed.events import EVENTS_PER_READ_MAX
from ..kernel.flow import Flow, flow, perform, wait
from ..kernel.nouns import find_row
from ..kernel.operation import (
    C,
    Handle,
    Op,
    Row,
    deciding,
    listed,
    one,
    operation,
    query,
    rows,
    together,
)
from ..kernel.signals import TREE_TOPIC
from ..kernel.sql import along, is_also, merged, pair
from ..leases import uptime_seconds
from ..records import Event
from ..sessions.access import lock_and_read_with, require_writable
from ..sessions.handle import SessionHandle
from ..sessions.rows import READ_PLACE_BY_ID
from ..work.items import Item
from .answers import answer, cancel_call, decide, expire_locked
from .artifacts import add_artifact, artifacts_of
from .asks import (
    ASK_SECONDS,
    READ_ASK,
    SELECT_ASKS,
    Ask,
    Timeout,
    add_ask,
    asking,
    asks_of,
    derives_ids,
    drafted,
    drafted_all,
    known_look,
    lock_new_tree,
    pausing,
    read_ask,
    request_at_once,
    require_active,
    set_progress,
    unknown_call,
    with_ids,
)
from .pauses import (
    COUNT_UNCOLLECTED,
    READ_PAUSE,
    SELECT_PAUSES,
    Wish,
    begin_pause,
    is_met,
    require_need,
    take_over,
)
from .records import (
    ASK_STATES,
    PAUSE_REASONS,
    PAUSE_STATES,
    Answered,
    Artifact,
    AskState,
    Parked,
    Pause,
    PauseReason,
    PauseState,
    PeerCall,
    Receipt,
    Resumption,
    call_of,
    pause_of,
)
from .settlement import by_hand

ROWS_PER_PAGE_MAX = 1_000
GRACE_SECONDS_MAX = 3_600.0
POLL_SECONDS = 0.5
NUMBER_MAX = 2**62
AFTER = "number > :after"
LIST_ASKS = f"{SELECT_ASKS} WHERE true"
LIST_PAUSES = f"{SELECT_PAUSES} WHERE true"
# What indexes have behind the root and the agent, with all values.
CHOICES: dict[str, dict[str, Sequence[str]]] = {
    LIST_ASKS: {"state": ASK_STATES},
    LIST_PAUSES: {"reason": PAUSE_REASONS, "state": PAUSE_STATES},
}
OWN_ASKS = f"""
{SELECT_ASKS} WHERE session_number = :number AND number < :before ORDER BY number
"""
OWN_PAUSES = f"""
{SELECT_PAUSES} WHERE session_number = :number AND generation < :before ORDER BY generation
"""
NEWEST_ASKS, NEWEST_PAUSES = (f"{own} DESC LIMIT :last" for own in (OWN_ASKS, OWN_PAUSES))


class SessionPeers(SessionHandle[C]):
    """Asking peers, pausing, and what a session has produced."""

    def _take_answer(self, result: Any, row: Any) -> None:
        """Note that a server that parked the session has completed its work item too."""
        if isinstance(result, Parked) and isinstance(self.item, Item):
            self.item._take({"state": "completed"})

    @asking
    def ask(
        self,
        agent: str,
        input: Any = None,
        *,
        timeout_seconds: Timeout = ASK_SECONDS,
        correlation: Any = None,
        id: str | None = None,
    ) -> Op[PeerCall]:
        """Ask another agent; the call is durable before anything is sent.

        The deadline counts from the commit; 0 expires at once, "never" never. The peer's
        work is a child session with the call's id. An ask that is repeated with its `id` is the
        same call, and its answer belongs to the next pause again; inside a work item the id is
        derived from the item and the request.
        """
        asked = Ask(agent, input, timeout_seconds, correlation, id)
        [call] = yield from SessionPeers._ask_all(self, [asked])
        return call

    @operation
    def _ask_all(self, asks: Sequence[Ask]) -> Op[list[PeerCall]]:
        """Make several calls in one commit, in this order, all or none."""
        runtime, place = self.runtime, self._place
        drafts = yield from drafted_all(runtime, asks)
        found, *looked = yield from lock_and_read_with(runtime, place, *known_look(drafts))
        row = require_writable(runtime, place, found)
        require_active(row, self.id)
        known = looked[0] if looked else []
        made = yield from together(asks_of(self, row, drafts, known))
        return [call_of(runtime.codec, row) for row in made]

    @query
    def asks(self, *, last: int | None = None, before: int | None = None) -> Op[list[PeerCall]]:
        """Return this session's calls in the order of dispatch, until retention removes them.

        With `last`, only that many of the newest; `before` is the number of the oldest one seen.
        """
        found = yield from self._own(OWN_ASKS, NEWEST_ASKS, last, before)
        return [call_of(self.runtime.codec, row) for row in found]

    def _own(
        self, all_of_them: str, newest: str, last: int | None, before: int | None
    ) -> Op[list[Row]]:
        """Return this session's rows before one of them, or the newest of those, oldest first."""
        below = NUMBER_MAX if before is None else require_whole("before", before, 1, NUMBER_MAX)
        given = {"number": self.number, "before": below}
        if last is None:
            return (yield from rows(all_of_them, **given))
        found = yield from rows(newest, **given, last=require_limit(last, ROWS_PER_PAGE_MAX))
        return found[::-1]

    @query
    def _asked(self, ids: Sequence[str]) -> Op[list[PeerCall]]:
        """Return the calls of this session that have one of these ids, in the given order."""
        found = []
        for id in ids:
            row = yield from one(READ_ASK, id=id)
            if row is not None and row["session_number"] == self.number:
                found.append(call_of(self.runtime.codec, row))
        return found

    @query
    def pauses(self, *, last: int | None = None, before: int | None = None) -> Op[list[Pause]]:
        """Return this session's pauses, oldest first, until retention removes them.

        With `last`, only that many of the newest; `before` is the generation of the oldest seen.
        """
        found = yield from self._own(OWN_PAUSES, NEWEST_PAUSES, last, before)
        return [pause_of(self.runtime.codec, row) for row in found]

    @pausing
    def pause(
        self,
        context: Any = None,
        *,
        need: int | Literal["all", "any"] = "all",
        rest: Literal["cancel", "keep"] = "cancel",
        asks: Sequence[Ask] = (),
    ) -> Op[Parked | Answered]:
        """Wait for answers without holding anything, or return them if they have arrived.

        The `asks` are made before, in the same commit. `need` is how many must be `ok`: "any" is
        one, "all" waits for an answer of any status to every ask. Once it is met, or can no longer
        be met, the `rest` is cancelled, or kept for the next pause. If the session is parked, its
        lease is released, and the work item that drives it is completed in the same commit; any
        instance of its agent resumes it.
        """
        needed = require_need(need)
        require_one_of("rest", rest, ("cancel", "keep"))
        body = self.runtime.codec.encode(context, name="context")
        wish = Wish(reason="peers", context=body, need=needed, keeps_rest=rest == "keep")
        drafts = yield from drafted_all(self.runtime, asks)
        return (yield from begin_pause(self, wish, expire_locked, drafts))

    @operation
    def resumption(self) -> Op[Resumption[C] | None]:
        """Resume after the last pause, without its work item, and return its context and answers.

        The item is cancelled, and whoever has claimed it loses it. For code that drives the session
        itself, or got `Answered` at once. None while the session waits and if it has not paused;
        `is_consumed` once that pause is closed.
        """
        return (yield from take_over(self))

    @operation
    def sleep(self, until: datetime | int, *, context: Any = None) -> Op[Parked]:
        """Pause until a point in time: a datetime with a time zone, or milliseconds."""
        wakes_at = milliseconds_of("until", until)
        body = self.runtime.codec.encode(context, name="context")
        parked = yield from begin_pause(self, Wish(reason="time", context=body, wakes_at=wakes_at))
        assert isinstance(parked, Parked)
        return parked

    @operation
    def wait_for_approval(self, question: Any, *, context: Any = None) -> Op[Parked]:
        """Pause until a person approves or rejects; request and decision are approval points."""
        if question is None:
            raise InvalidArgument("an approval needs a question")
        body = self.runtime.codec.encode(context, name="context")
        asked = self.runtime.codec.encode(self.runtime.redactor.redact(question), name="question")
        wish = Wish(reason="approval", context=body, question=asked)
        parked = yield from begin_pause(self, wish)
        assert isinstance(parked, Parked)
        return parked

    @flow
    def answers(
        self,
        context: Any = None,
        *,
        grace_seconds: float,
        need: int | Literal["all", "any"] = "all",
        rest: Literal["cancel", "keep"] = "cancel",
        asks: Sequence[Ask] = (),
    ) -> Flow[Parked | Answered]:
        """Wait in memory for quick peers, and pause for slow ones after `grace_seconds`.

        The `asks` are made before that, in one commit.
        """
        require_seconds("grace_seconds", grace_seconds, GRACE_SECONDS_MAX)
        needed = require_need(need)
        if asks:
            named = with_ids(self, asks) if derives_ids(self) else asks
            yield from perform(SessionPeers._ask_all, self, named)
        signals, topic = self.runtime.signals, f"{TREE_TOPIC}{self.root_id}"
        ends_at = uptime_seconds() + grace_seconds
        while (left := ends_at - uptime_seconds()) > 0:
            seen = signals.count(topic)
            if (yield from perform(SessionPeers._is_met, self, needed)):
                break
            yield from wait(min(left, POLL_SECONDS), topic, seen)
        given: dict[str, Any] = {"need": need, "rest": rest}
        return (yield from perform(SessionPeers.pause, self, context, **given))

    @query
    def _is_met(self, need: int | None) -> Op[bool]:
        [counts] = yield from rows(COUNT_UNCOLLECTED, session_number=self.number)
        return is_met(need, int(counts["open_asks"]), int(counts["ok_asks"]))

    @operation
    def add_artifact(
        self,
        name: str,
        media_type: str = "application/json",
        *,
        data: Any = None,
        uri: str | None = None,
        returned: bool = True,
    ) -> Op[Artifact]:
        """Add the next version of a named output; `returned` sends it with the session's answer.

        An output equal to its newest version is not added again.
        """
        return (yield from add_artifact(self, name, media_type, data, uri, returned=returned))

    @query
    def artifacts(self) -> Op[list[Artifact]]:
        """Return this session's artifacts, oldest first."""
        return (yield from artifacts_of(self.runtime.codec, self.number))


class StorePeers(Handle[C]):
    """The peer calls and pauses of a store."""

    @deciding
    def request(
        self,
        agent: str,
        input: Any = None,
        *,
        request_id: str | None = None,
        user: str | None = None,
        timeout_seconds: Timeout = "never",
    ) -> Op[PeerCall]:
        """Ask an agent for a caller that is not a session; the agent's session is a new root.

        The same `request_id` is the same request. `holdfast.mesh.Mesh` also waits for the answer.
        """
        require_text_or_none("user", user)
        asked = Ask(agent, input, timeout_seconds, id=request_id)
        draft = yield from drafted(self.runtime, asked, "request_id")
        is_carried = self.runtime.transport is not None
        if request_id is None and draft.timeout_ms is None and not is_carried:
            row = yield from request_at_once(self.runtime, draft, user)
        else:
            known = yield from lock_new_tree(draft)
            row = yield from add_ask(self.runtime, None, draft, known, user=user, root_id=draft.id)
        return (yield from self._call(row))

    @operation
    def answer(
        self,
        ask_id: str,
        result: Any = None,
        *,
        status: Literal["ok", "error", "cancelled"] = "ok",
        artifacts: Sequence[Artifact] = (),
    ) -> Op[Receipt]:
        """Answer a call, and make the asking session ready if it was the last one needed.

        Returns "counted", "duplicate" if the call had its answer, or "late" after a timeout or a
        cancellation: a late answer is kept and changes nothing. Raises AskNotFound. What the peer's
        session has added as artifacts goes with the answer.
        """
        return (yield from answer(self.runtime, ask_id, result, status, artifacts))

    @operation
    def progress(self, ask_id: str, note: Any) -> Op[bool]:
        """Report a peer's progress, and restart its timeout; False if the call is over."""
        return (yield from set_progress(self.runtime, ask_id, note))

    @operation
    def cancel_ask(self, ask_id: str) -> Op[bool]:
        """Cancel a call with its peer's session; False if it had its answer."""
        return (yield from cancel_call(self.runtime, ask_id, by_hand(self.runtime)))

    @query
    def peer_call(self, ask_id: str) -> Op[PeerCall]:
        """Return a call with its answer, or raise AskNotFound.

        Of a call that was cancelled or has timed out, also the peer's effects without an outcome.
        """
        return (yield from self._call((yield from read_ask(ask_id))))

    @query
    def _followed(self, ask_id: str, after: int) -> Op[tuple[PeerCall, list[Event]]]:
        """Return a call, and what happened in its tree after a position of the feed."""
        require_whole("after", after, 0)
        call = yield from self._call((yield from read_ask(ask_id)))
        given = self.runtime.codec, call.root_id
        try:
            found = yield from read_events(*given, after, EVENTS_PER_READ_MAX)
        except Compacted as error:
            # The answer may be kept longer than the notes of progress before it.
            oldest = int(str(error.fields["oldest_position"]))
            found = yield from read_events(*given, oldest, EVENTS_PER_READ_MAX)
        return call, found

    @query
    def find_ask(self, ask_id: str) -> Op[PeerCall]:
        """Return a call by its id, its number or a unique prefix of its id, or raise AskNotFound.

        A prefix has 8 characters or more.
        """
        row = yield from find_row("ask", SELECT_ASKS, require_text("ask_id", ask_id))
        if row is None:
            raise unknown_call(ask_id)
        return (yield from self._call(row))

    def _call(self, row: Row) -> Op[PeerCall]:
        call = call_of(self.runtime.codec, row)
        if call.open_effects is not None:
            return call
        # The peer's session has the id of the call; effects outlive a session that was deleted.
        place = yield from one(READ_PLACE_BY_ID, id=call.id)
        number = 0 if place is None else place["number"]
        found = yield from rows(OPEN_EFFECTS, number=number, session_id=call.id)
        effect = Ledger.of(self.runtime).effect
        return replace(call, open_effects=tuple(map(effect, found)))

    @query
    def asks(
        self,
        *,
        root: object = None,
        state: AskState | None = None,
        agent: str | None = None,
        after: int = 0,
        limit: int = 100,
    ) -> Op[list[PeerCall]]:
        """Return calls in the order of dispatch; `after` is the `number` of the last one seen.

        `root` is a session tree, by its root's id or any of its sessions.
        """
        if state is not None:
            require_one_of("state", state, ASK_STATES)
        given = {"root_id": getattr(root, "root_id", root), "agent": agent, "state": state}
        found = yield from _page(LIST_ASKS, given, after, limit)
        return [call_of(self.runtime.codec, row) for row in found]

    @query
    def pauses(
        self,
        *,
        root: object = None,
        agent: str | None = None,
        reason: PauseReason | None = None,
        state: PauseState | None = None,
        after: int = 0,
        limit: int = 100,
    ) -> Op[list[Pause]]:
        """Return pauses, oldest first; `after` is the `number` of the last one seen.

        `root` is a session tree, by its root's id or any of its sessions.
        """
        if reason is not None:
            require_one_of("reason", reason, PAUSE_REASONS)
        if state is not None:
            require_one_of("state", state, PAUSE_STATES)
        given = {
            "root_id": getattr(root, "root_id", root),
            "agent": agent,
            "reason": reason,
            "state": state,
        }
        found = yield from _page(LIST_PAUSES, given, after, limit)
        return [pause_of(self.runtime.codec, row) for row in found]

    @query
    def get_pause(self, pause_id: str) -> Op[Pause]:
        """Return a pause by its id, or raise NotFound."""
        row = yield from one(READ_PAUSE, id=require_text("pause_id", pause_id))
        return self._known_pause(row, pause_id)

    def _known_pause(self, row: Row | None, pause_id: str) -> Pause:
        if row is None:
            raise NotFound(f"there is no pause {pause_id!r}", id=pause_id)
        return pause_of(self.runtime.codec, row)

    @query
    def find_pause(self, pause_id: str) -> Op[Pause]:
        """Return a pause by its id, its number or a unique prefix of its id, or raise NotFound."""
        row = yield from find_row("pause", SELECT_PAUSES, require_text("pause_id", pause_id))
        return self._known_pause(row, pause_id)

    @operation
    def approve(self, pause_id: str, *, by: str, note: str | None = None) -> Op[None]:
        """Approve what a session waits for, which then resumes; who and why are recorded."""
        yield from decide(self.runtime, pause_id, is_approved=True, by=by, note=note)

    @operation
    def reject(self, pause_id: str, *, by: str, note: str | None = None) -> Op[None]:
        """Reject what a session waits for, which then resumes; who and why are recorded."""
        yield from decide(self.runtime, pause_id, is_approved=False, by=by, note=note)


def _page(statement: str, wanted: Mapping[str, Any], after: int, limit: int) -> Op[list[Row]]:
    """Return a page of a listing, along an index that begins with the given columns."""
    require_whole("after", after, 0)
    require_limit(limit, ROWS_PER_PAGE_MAX)
    given = {name: value for name, value in wanted.items() if value is not None}
    for name, value in given.items():
        require_text(name.removesuffix("_id"), value)
    page = page_of(statement, tuple(given))
    return (yield from listed(page, **given, after=after, limit=limit))


@functools.cache
def page_of(statement: str, columns: Sequence[str]) -> str:
    """Return the query of a listing: a part for each value of an index's columns not given."""
    if not columns:
        return merged([f"{statement} AND {AFTER}"])
    whose = [each for each in ("root_id", "agent", "reason") if each in columns]
    first = {f"{each}": f":{each}" for each in whose[:1]}
    base = statement
    if len(whose) > 1:
        first = pair(*whose[:2])
        base = f"{statement} AND {is_also(whose[1])}"
    choices = dict(CHOICES[statement])
    if whose[:2] != ["root_id", "agent"]:
        choices.pop("reason", None)
    values = [
        [f":{name}"] if name in columns else [f"'{each}'" for each in some]
        for name, some in choices.items()
    ]
    rest = [dict(zip(choices, each, strict=True)) for each in itertools.product(*values)]
    branches = [f"{base} AND {along({**first, **each}, AFTER)}" for each in rest]
    return merged(branches, leading=[*first, *choices])
