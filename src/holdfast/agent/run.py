"""One run of an agent: load, finish the interrupted turn, then loop until the answer."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ..checkpoints.diff import printable
from ..effects.calls import FATAL_ERRORS
from ..effects.requests import ApprovalUsed
from ..effects.turns import CallAnswer, call_all
from ..errors import (
    ApprovalNeeded,
    HoldfastError,
    InvalidArgument,
    InvalidValue,
    LimitExceeded,
    LoopDetected,
    SessionWaiting,
)
from ..formatting import plural
from ..kernel.flow import Flow, invoke, perform
from ..leases import uptime_seconds
from ..peers import Parked
from ..redaction import log_origin
from ..session import Session
from ..spend import Spend, Spent
from ..store_sessions import StoreSessions
from ..work.items import error_text
from .commits import CommitOps, Executed, ModelAttempt
from .model_calls import WHAT_HELPS, ModelCall
from .models import Request, name_of
from .peers import Peer, ask_id
from .plan import PLAN_CHANNEL, Plan, read_plan, write_plan
from .progress import Answered, Called, Calling, Resumed, Saved, Stopped
from .rules import Rules
from .tool_calls import CheckedCall, ToolCalls
from .transcript import (
    TRANSCRIPT_CHANNEL,
    Message,
    ToolCall,
    dangling,
    legal,
    read_transcript,
    user_message,
)

log = logging.getLogger("holdfast.agent")
SCRATCHPAD = "scratchpad"
# In the data of an error boundary: under which conditions an answer could not be stored.
UNSTORABLE = "answer_not_stored"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a run: the answer, and the total spend of the session.

    `is_old` is true if the message had been answered before and the model was not called.
    """

    session_id: str
    message: Message
    spent: Spent
    iteration: int
    is_old: bool = False

    @property
    def text(self) -> str:
        """The answer's text."""
        return self.message.text


class AgentRun:
    """The state of one run; all of it can be restored from the store."""

    def __init__(
        self, rules: Rules, session: Any, plan: Any = msgspec.UNSET, *, ends: bool = False
    ) -> None:
        self._rules = rules
        self._session = session
        self._commits = CommitOps(session)
        self._tools = ToolCalls(rules, session)
        self._messages: list[Message] = []
        self._executed: list[Executed] = []
        self._unstored: list[Message] = []
        self._iteration = 0
        self._epoch = 0
        self._turns = 0
        self._turns_unsaved = 0
        self._saved_at = uptime_seconds()
        self._given_plan = plan
        self._ends = ends
        self._stored_plan: Any = msgspec.UNSET
        self._unstorable: Any = None
        """Under which conditions the last answer of the model could not be stored."""
        self.plan: Plan | None = None
        self.scratchpad: Path | None = None

    def run(self, text: str | None, message_id: str | None) -> Flow[Outcome]:
        """Finish the interrupted turn, add the message, and continue until the answer."""
        yield from self._open()
        if text is None and not self._messages:
            raise InvalidArgument("the session has no messages yet; pass one to run")
        try:
            yield from self._finish_turn()
            old = self._answer_to(message_id)
            if old is not None:
                return (yield from self._outcome(old, is_old=True))
            self._add_message(text, message_id)
            return (yield from self._loop())
        except SessionWaiting as error:
            # Everything is stored, and nobody drives the session any more.
            yield from self._report_stop(error)
            raise
        except HoldfastError as error:
            yield from self._stop(error)
            if isinstance(error, ApprovalNeeded) and error.question is not None:
                yield from self._wait_for_approval(error)
            raise

    def stored_answer(self, text: str | None, message_id: str | None) -> Flow[Outcome | None]:
        """Return the session's stored answer, unless there is a new message."""
        yield from self._load()
        last = self._messages[-1] if self._messages else None
        if text is not None:
            last = self._answer_to(message_id)
        if last is None or last.role != "assistant" or last.calls:
            return None
        return (yield from self._outcome(last, is_old=True))

    def _open(self) -> Flow[None]:
        """Load the session, and count attempts that a dead process left open as spent."""
        info = yield from perform(Session.info, self._session)
        if self._rules.peers and info.agent is None:
            raise InvalidArgument(
                f"session {info.id} has no agent, so it cannot wait for peers; start it with "
                "store.session(…, agent=…)"
            )
        self._epoch = info.epoch
        yield from self._open_scratchpad(info.metadata)
        if info.status == "waiting":
            yield from perform(Session.resumption, self._session)
        left_open = yield from perform(Session.close_spend, self._session)
        yield from self._load()
        yield from self._report(
            Resumed(
                messages=len(self._messages),
                dangling_calls=len(dangling(self._messages)),
                uncertain_attempts=len(left_open),
            )
        )

    def _load(self) -> Flow[None]:
        session = self._session
        latest = yield from perform(Session.latest, session)
        point = yield from perform(Session.resume_point, session)
        channels = {} if latest is None else latest.channels
        self._stored_plan = channels.get(PLAN_CHANNEL, msgspec.UNSET)
        data = latest.data if latest is not None and latest.kind == "error_boundary" else None
        self._unstorable = data.get(UNSTORABLE) if isinstance(data, dict) else None
        try:
            self._messages = read_transcript(channels.get(TRANSCRIPT_CHANNEL))
            self.plan = None if self._stored_plan is msgspec.UNSET else read_plan(self._stored_plan)
        except InvalidValue as error:
            raise InvalidValue(
                f"{error}; an agent keeps its own messages and plan in the channels "
                f"{TRANSCRIPT_CHANNEL} and {PLAN_CHANNEL}: give it a session where nobody else "
                "writes these",
                path=error.path,
            ) from error
        if self._stored_plan is msgspec.UNSET and self._given_plan is not msgspec.UNSET:
            self.plan = self._given_plan
        self._iteration = point.iteration - 1
        is_inside = point.checkpoint is not None and point.checkpoint.kind == "iteration_start"
        if is_inside and self._messages and self._messages[-1].role != "user":
            self._iteration = point.iteration

    def _open_scratchpad(self, metadata: dict[str, Any]) -> Flow[None]:
        """Reopen the session's recorded directory, or record the given one."""
        recorded, given = metadata.get(SCRATCHPAD), self._rules.scratchpad
        if recorded is not None and given is not None and Path(recorded) != given:
            raise InvalidArgument(
                f"session {self._session.id} has its scratchpad in {recorded}, not in {given}"
            )
        if recorded is None and given is None:
            return
        self.scratchpad = Path(recorded) if recorded is not None else given
        assert self.scratchpad is not None
        yield from invoke(self.scratchpad.mkdir, parents=True, exist_ok=True)
        if recorded is None:
            named = {**metadata, SCRATCHPAD: str(self.scratchpad)}
            store: StoreSessions[Any] = StoreSessions(self._session.runtime)
            yield from perform(StoreSessions.session, store, self._session.id, metadata=named)

    def _finish_turn(self) -> Flow[None]:
        """Run the calls of the last answer that have no result yet, and end its turn."""
        spoken = [each for each in self._messages if each.role in {"user", "assistant"}]
        if not spoken or spoken[-1].role == "user":
            return
        calls = [call for message, call in dangling(self._messages) if message is spoken[-1]]
        point = yield from perform(Session.resume_point, self._session)
        is_open = point.checkpoint is not None and point.checkpoint.kind == "iteration_start"
        if calls or is_open:
            self._iteration = max(1, self._iteration)
            yield from self._call_tools(calls)
            yield from self._end_turn(is_due=True)

    def _answer_to(self, message_id: str | None) -> Message | None:
        """Return the stored answer to a message in the transcript, if it has one."""
        places = [
            number
            for number, message in enumerate(self._messages)
            if message_id is not None and message.id == message_id
        ]
        for message in self._messages[places[0] :] if places else ():
            if message.role == "assistant" and not message.calls:
                return message
        return None

    def _add_message(self, text: str | None, message_id: str | None) -> None:
        is_stored = message_id is not None and any(
            message.id == message_id for message in self._messages
        )
        if text is not None and not is_stored:
            self._unstored.append(user_message(text, message_id or ""))

    def _loop(self) -> Flow[Outcome]:
        while True:
            last = self._messages[-1] if self._messages else None
            is_answered = last is not None and last.role == "assistant" and not last.calls
            if last is not None and is_answered and not self._unstored:
                return (yield from self._outcome(last, is_old=self._turns == 0))
            if self._turns >= self._rules.turns_max:
                raise LimitExceeded(
                    f"no answer after {plural(self._turns, 'turn')} (turns_max); run again to "
                    "continue",
                    limit=self._rules.turns_max,
                    actual=self._turns + 1,
                )
            if self._unstorable == self._conditions() and not self._unstored:
                raise LimitExceeded(
                    "the model was not asked again, because its last answer exceeded a limit of "
                    f"the store and nothing has changed since. To go on, {WHAT_HELPS}",
                    limit=self._session.runtime.codec.limits.value_bytes,
                )
            self._unstorable = None
            self._iteration += 1
            self._turns += 1
            message = yield from self._ask()
            yield from self._call_tools(message.calls)
            yield from self._end_turn(is_due=not message.calls)

    def _ask(self) -> Flow[Message]:
        answers = [message for message in self._messages if message.role == "assistant"]
        call = ModelCall(
            rules=self._rules,
            session=self._session,
            commits=self._commits,
            iteration=self._iteration,
            after=answers[-1].id if answers else None,
            taken={call.call_id for message in self._messages for call in message.calls},
            report=self._report,
        )
        try:
            message, usage = yield from call.ask(self._request, self._begin)
        finally:
            self._unstorable = self._conditions() if call.is_unstorable else None
        self._messages.append(message)
        yield from self._report(Answered(iteration=self._iteration, message=message, usage=usage))
        return message

    def _conditions(self) -> str:
        """Return a digest of what decides how large an answer is, and may be."""
        rules, limits = self._rules, self._session.runtime.codec.limits
        decisive = repr((limits, name_of(rules.model), rules.system, rules.settings))
        return hashlib.sha256(decisive.encode("utf-8", "replace")).hexdigest()[:32]

    def _request(self) -> Request:
        unsaved = [each.message for each in self._executed]
        return Request(
            messages=tuple(legal([*self._messages, *unsaved, *self._unstored])),
            system=self._rules.system,
            tools=self._tools.specs,
            settings=self._rules.settings,
            session_id=self._session.id,
            iteration=self._iteration,
        )

    def _begin(self, attempt: ModelAttempt) -> Flow[Spend]:
        """Record the attempt that is about to be made, with everything not stored yet."""
        spend = yield from self._flush(
            messages=self._unstored, attempt=attempt, budget=self._rules.budget
        )
        self._unstored = []
        assert spend is not None
        return spend

    def _flush(self, **more: Any) -> Flow[Spend | None]:
        """Store results and channels that are not stored yet."""
        pending = (self._executed, self._changed_channels(), max(1, self._iteration))
        stored, spend = yield from perform(CommitOps.flush, self._commits, *pending, **more)
        self._stored(stored)
        return spend

    def _call_tools(self, calls: Sequence[ToolCall]) -> Flow[None]:
        """Run the calls of a turn in order, grouping their commits where possible.

        An error that stops one of them stops those after it; those before it have run. Peers are
        asked in order too, and are waited for once everything else has run.
        """
        group: list[CheckedCall] = []
        asked: dict[str, CheckedCall] = {}
        try:
            for call in calls:
                checked = yield from self._tools.check(call, self._messages)
                if checked.peer is not None:
                    yield from self._report(Calling(iteration=self._iteration, call=call))
                    asked[(yield from self._ask_peer(checked, checked.peer))] = checked
                    continue
                if checked.prepared is None or self._rules.cadence.each_call:
                    before, group = group, []
                    yield from self._run_together(before)
                if checked.prepared is not None:
                    group.append(checked)
                    continue
                yield from self._report(Calling(iteration=self._iteration, call=call))
                yield from self._add_result(checked, None)
        except Exception:
            yield from self._run_together(group)
            raise
        yield from self._run_together(group)
        if asked:
            yield from self._wait_for_peers(asked)

    def _ask_peer(self, checked: CheckedCall, peer: Peer) -> Flow[str]:
        """Ask a peer, unless an earlier attempt did; return the id of the ask."""
        call = checked.call
        id = ask_id(self._session.id, self._epoch, call.id)
        if not (yield from perform(Session._asked, self._session, [id])):
            yield from perform(
                Session.ask,
                self._session,
                peer.agent,
                checked.content,
                timeout_seconds=peer.timeout_seconds,
                correlation={"tool_call": call.call_id, "block_id": call.id},
                id=id,
            )
        return id

    def _wait_for_peers(self, asked: Mapping[str, CheckedCall]) -> Flow[None]:
        """Add the answers of peers as results, or pause until they are there."""
        found = yield from perform(Session._asked, self._session, list(asked))
        answers = [each.answer for each in found if each.answer is not None]
        if len(answers) < len(asked):
            # What the other calls of this turn gave is stored before the session is let go.
            yield from self._flush()
            paused = yield from perform(
                Session.pause, self._session, {"iteration": self._iteration}
            )
            if isinstance(paused, Parked):
                waits = plural(len(asked), "peer")
                raise SessionWaiting(
                    f"session {self._session.id} waits for {waits}; an instance of its agent "
                    "resumes when they have answered, or `run` does",
                    session_id=self._session.id,
                    pause_id=paused.pause_id,
                )
            found = yield from perform(Session._asked, self._session, list(asked))
            answers = [each.answer for each in found if each.answer is not None]
        for answer in answers:
            checked = asked[answer.ask_id]
            yield from self._add(checked, self._tools.answered(checked, answer))

    def _run_together(self, group: Sequence[CheckedCall]) -> Flow[None]:
        """Run prepared calls, and add the result of each."""

        def announce(index: int) -> Flow[None]:
            if index < len(group):
                yield from self._report(Calling(iteration=self._iteration, call=group[index].call))

        def on_answer(index: int, answer: CallAnswer) -> Flow[None]:
            if isinstance(answer, ApprovalUsed):
                yield from self._ask_again(group[index])
            else:
                yield from self._add_result(group[index], answer)
            yield from announce(index + 1)

        yield from announce(0)
        calls = [checked.prepared for checked in group if checked.prepared is not None]
        # A call is reported to on_progress only once its outcome is durable.
        yield from call_all(calls, on_answer, gathers=self._rules.on_progress is None)

    def _ask_again(self, checked: CheckedCall) -> Flow[None]:
        """Ask a person anew about a call whose approval no longer counts, and run it if allowed."""
        self._tools.forget_approval(checked)
        again = yield from self._tools.check(checked.call, self._messages)
        if again.prepared is None:
            yield from self._add_result(again, None)
        else:
            yield from self._run_together([again])

    def _add_result(self, checked: CheckedCall, answer: CallAnswer | None) -> Flow[None]:
        yield from self._add(checked, self._tools.executed(checked, answer))

    def _add(self, checked: CheckedCall, done: Executed) -> Flow[None]:
        call, repeats, limit = checked.call, checked.repeats, self._rules.repeats_max
        self._executed.append(done)
        self.plan = self.plan if checked.plan is None else checked.plan
        if self._rules.cadence.each_call:
            yield from self._flush()
        yield from self._report(Called(iteration=self._iteration, call=call, result=done.result))
        if limit is not None and repeats > limit:
            raise LoopDetected(
                f"the model called {call.name} {repeats + 1} times in a row with the same "
                "arguments, even after a warning; run again with a message that helps it",
                tool=call.name,
                repeats=repeats + 1,
            )

    def _end_turn(self, *, is_due: bool) -> Flow[None]:
        """Save the turn if the cadence says so; otherwise the next commit stores its results."""
        cadence = self._rules.cadence
        self._turns_unsaved += 1
        is_due = is_due or (cadence.turns is not None and self._turns_unsaved >= cadence.turns)
        if cadence.seconds is not None:
            is_due = is_due or uptime_seconds() - self._saved_at >= cadence.seconds
        if not is_due:
            return
        stored, checkpoint = yield from perform(
            CommitOps.end_turn,
            self._commits,
            self._executed,
            self._changed_channels(),
            self._iteration,
            self._rules.budget,
        )
        self._stored(stored)
        self._turns_unsaved = 0
        self._saved_at = uptime_seconds()
        yield from self._report(Saved(iteration=self._iteration, version=checkpoint.version))

    def _stored(self, stored: Sequence[Message]) -> None:
        self._messages += stored
        self._executed = []
        if self._changed_channels():
            self._stored_plan = write_plan(self.plan)

    def _changed_channels(self) -> dict[str, Any]:
        """Return the plan if it differs from the stored one."""
        plan = write_plan(self.plan)
        is_missing = self._stored_plan is msgspec.UNSET and plan is None
        return {} if is_missing or plan == self._stored_plan else {PLAN_CHANNEL: plan}

    def _stop(self, error: HoldfastError) -> Flow[None]:
        """Store the results so far and why the run stops; not possible if the session is lost."""
        text = self._session.runtime.redactor.redact(str(error))
        data = {"iteration": self._iteration, "error": type(error).__name__, "message": text}
        data |= {} if self._unstorable is None else {UNSTORABLE: self._unstorable}
        if not isinstance(error, FATAL_ERRORS):
            try:
                yield from self._flush(messages=self._unstored, error=data)
                self._unstored = []
            except HoldfastError as again:
                self._log("the end of a run could not be recorded", again)
        yield from self._report_stop(error)

    def _report_stop(self, error: HoldfastError) -> Flow[None]:
        yield from self._report(
            Stopped(iteration=self._iteration, error=type(error).__name__, fields=error.fields)
        )

    def _wait_for_approval(self, error: ApprovalNeeded) -> Flow[None]:
        """Pause until a person has decided; what was done so far is stored."""
        parked = yield from perform(Session.wait_for_approval, self._session, error.question)
        error.fields["pause_id"] = parked.pause_id

    def _outcome(self, message: Message, *, is_old: bool) -> Flow[Outcome]:
        if self._ends:
            yield from perform(Session.end, self._session)
        spent = yield from perform(Session.spent, self._session, tree=self._rules.budget.tree)
        return Outcome(
            session_id=self._session.id,
            message=message,
            spent=spent,
            iteration=self._iteration,
            is_old=is_old,
        )

    def _report(self, progress: Any) -> Flow[None]:
        if self._rules.on_progress is None:
            return
        try:
            yield from invoke(self._rules.on_progress, progress)
        except Exception as error:
            # A callback must not break the run.
            self._log("on_progress failed", error)

    def _log(self, what: str, error: Exception) -> None:
        """Log an error in one line, redacted and printable."""
        redactor = self._session.runtime.redactor
        log.warning("%s: %s", what, printable(error_text(error, redactor.redact)))
        log_origin(log, redactor, error)
