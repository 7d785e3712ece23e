"""Tool calls of a model: checked, permitted, and run through the ledger; each gets a result."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from ..arguments import shown
from ..checkpoints.diff import same
from ..effects.calls import FATAL_ERRORS, PreparedCall
from ..effects.handles import SessionEffects
from ..effects.requests import Approval
from ..effects.statements import Result
from ..effects.tools import Tool, plain_arguments
from ..effects.turns import CallAnswer
from ..errors import (
    ApprovalNeeded,
    HoldfastError,
    InProgress,
    InvalidArgument,
    InvalidValue,
    LimitExceeded,
    Unresolved,
    described,
)
from ..kernel.flow import Flow, invoke, perform
from ..peers import Answer
from ..records import Checkpoint, Kind, SessionInfo
from ..session import Session
from .commits import Executed
from .models import ToolSpec
from .peers import Peer, result_of
from .plan import STEP_STATUSES, Plan, read_plan
from .rules import CONTENT_BYTES_MAX, Permission, Rules
from .transcript import Message, ToolCall, ToolResult

APPROVALS_READ_MAX = 10_000
APPROVAL: Kind = "approval_point"
# As a hook or a person records them, and as `store.approve` and `store.reject` do.
DECISIONS: dict[Any, Permission] = {
    "allow": "allow",
    "deny": "deny",
    "approve": "allow",
    "reject": "deny",
}
TEXT = {"type": "string"}
POSTCONDITION = {
    "type": "object",
    "properties": {"text": TEXT, "evidence": {}},
    "required": ["text"],
}
STEP = {
    "type": "object",
    "properties": {
        "id": TEXT,
        "title": TEXT,
        "status": {"enum": list(STEP_STATUSES)},
        "postconditions": {"type": "array", "items": POSTCONDITION},
        "evidence": {},
    },
    "required": ["id", "title"],
}
PLAN_TOOL = ToolSpec(
    name="update_plan",
    description="Replace the plan. Give every step; mark what is done, with its evidence.",
    parameters={
        "type": "object",
        "properties": {"goal": TEXT, "steps": {"type": "array", "items": STEP}},
        "required": ["steps"],
    },
)


class Refusal(Exception):
    """A call is not run; its message goes to the model."""


@dataclass(frozen=True, slots=True)
class CheckedCall:
    """A checked call: prepared to run, or with its result if nothing has to be run."""

    call: ToolCall
    repeats: int
    """How many identical calls directly preceded it."""
    prepared: PreparedCall | None = None
    content: Any = None
    is_error: bool = False
    plan: Plan | None = None
    peer: Peer | None = None
    """Whom it asks; the content is what is asked."""


class ToolCalls:
    """The tool calls of one session, under an agent's rules."""

    def __init__(self, rules: Rules, session: Any) -> None:
        self._rules = rules
        self._session = session
        self._used: set[Approval] = set()
        """Approvals that the ledger refused."""

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        """The descriptions of the tools for the model."""
        specs = [
            ToolSpec(name=tool.name, description=tool.description, parameters=tool.parameters)
            for tool in self._rules.tools.values()
        ]
        specs += [peer.spec for peer in self._rules.peers.values()]
        return (*specs, PLAN_TOOL) if self._rules.planning else tuple(specs)

    def check(self, call: ToolCall, messages: Sequence[Message]) -> Flow[CheckedCall]:
        """Check a call and its permission; errors become a result for the model.

        Raises ApprovalNeeded if a person has to decide.
        """
        stored = _equal_calls_before(messages, call)
        repeats = max(stored, (yield from self._equal_calls_in_ledger(call)))
        limit = self._rules.repeats_max
        try:
            if limit is not None and repeats >= limit:
                raise Refusal(
                    f"{call.name} was called {repeats} times in a row with the same arguments; it "
                    "was not called again. Do something else, or say what is missing."
                )
            if self._rules.planning and call.name == PLAN_TOOL.name:
                plan = _plan_of(call)
                return CheckedCall(call, repeats, content="The plan is stored.", plan=plan)
            if (peer := self._rules.peers.get(call.name)) is not None:
                given = _parsed(call)
                if not isinstance(given, dict):
                    raise Refusal(
                        "invalid arguments; the agent was not asked. They must be an object."
                    )
                # The id of the ask, of this call and epoch, makes sure that it is asked once.
                yield from self._require_permission(call, peer, given)
                return CheckedCall(call, repeats, content=given, peer=peer)
            tool, arguments = self._bound(call)
            approval = yield from self._require_permission(call, tool, arguments)
            prepared = self._prepare(call, tool, arguments)
            # A read issues nothing.
            prepared.request.approval = None if tool.effect == "read" else approval
            return CheckedCall(call, repeats, prepared)
        except Refusal as refusal:
            return CheckedCall(call, repeats, content=str(refusal), is_error=True)

    def _bound(self, call: ToolCall) -> tuple[Tool[..., Any], dict[str, Any]]:
        tool = self._rules.tools.get(call.name)
        if tool is None:
            names = ", ".join(spec.name for spec in self.specs) or "none"
            raise Refusal(f"there is no tool named {call.name!r}; the tools are: {names}")
        try:
            return tool, plain_arguments(tool.function, _parsed(call))
        except InvalidValue as error:
            raise Refusal(f"invalid arguments, nothing was run. {error}") from None

    def _prepare(
        self, call: ToolCall, tool: Tool[..., Any], arguments: dict[str, Any]
    ) -> PreparedCall:
        try:
            return SessionEffects._prepare(self._session, tool, arguments, call.id)
        except FATAL_ERRORS:
            raise
        except Exception as error:
            raise Refusal(f"{call.name} raised {described(error)}") from error

    def executed(self, checked: CheckedCall, answer: CallAnswer | None) -> Executed:
        """Return the result of a call; an exception of its tool becomes a result for the model.

        A call in doubt raises, unless `on_unresolved` is "tell"; a lost session or store always
        raises.
        """
        call, content, is_error = checked.call, checked.content, checked.is_error
        effect_id = replay_of = None
        if isinstance(answer, Result):
            content, effect_id, replay_of = answer.value, answer.effect_id, answer.replay_of
        elif isinstance(answer, FATAL_ERRORS):
            raise answer
        elif isinstance(answer, Unresolved | InProgress):
            if self._rules.on_unresolved == "stop":
                raise answer
            content, is_error = _in_doubt(call, answer), True
        elif answer is not None:
            content, is_error = f"{call.name} raised {described(answer)}", True
        result = ToolResult(
            call_id=call.call_id,
            content=self._fitting(content),
            is_error=is_error,
            replay_of=replay_of,
        )
        evidence = {
            "tool": call.name,
            "call_id": call.call_id,
            "block_id": call.id,
            "effect_id": effect_id,
            "replay_of": replay_of,
            "is_error": is_error,
        }
        return Executed(call=call, result=result, evidence=evidence)

    def _equal_calls_in_ledger(self, call: ToolCall) -> Flow[int]:
        """Return how many identical calls directly precede this one in the ledger of effects.

        The ledger has them even if the transcript was compacted.
        """
        limit = self._rules.repeats_max
        if limit is None or call.name not in self._rules.tools:
            return 0
        try:
            _, arguments = self._bound(call)
        except Refusal:
            return 0
        wanted = self._session.runtime.redactor.redact(arguments)
        found = yield from perform(SessionEffects.recent_calls, self._session, limit + 2)
        equal: set[str] = set()
        for effect in found:
            if effect.call_id == call.id or effect.call_id is None:
                continue
            if effect.tool != call.name or not same(effect.arguments, wanted):
                break
            equal.add(effect.call_id)
        return len(equal)

    def answered(self, checked: CheckedCall, answer: Answer) -> Executed:
        """Return the answer of a peer as the result of the call that asked for it."""
        call = checked.call
        content, is_error = result_of(answer)
        result = ToolResult(call_id=call.call_id, content=self._fitting(content), is_error=is_error)
        evidence = {
            "tool": call.name,
            "call_id": call.call_id,
            "block_id": call.id,
            "ask_id": answer.ask_id,
            "agent": answer.agent,
            "status": answer.status,
            "is_error": is_error,
        }
        return Executed(call=call, result=result, evidence=evidence)

    def forget_approval(self, checked: CheckedCall) -> None:
        """Ask a person again about a call whose approval was used before, or in another epoch."""
        assert checked.prepared is not None
        assert checked.prepared.request.approval is not None
        self._used.add(checked.prepared.request.approval)

    def _require_permission(
        self, call: ToolCall, tool: Tool[..., Any] | Peer, arguments: dict[str, Any]
    ) -> Flow[Approval | None]:
        """Raise Refusal if a call is not permitted; return a person's approval if it needs one."""
        if self._rules.permit is None:
            return None
        decision = yield from invoke(self._rules.permit, call, tool)
        permission, reason = decision if isinstance(decision, tuple) else (decision, "")
        approval = None
        if permission == "ask":
            permission, approval = yield from self._ask_person(call, tool, arguments, reason)
        if permission == "deny":
            raise Refusal(f"{call.name} was not permitted, nothing was run. {reason}".strip())
        if permission != "allow":
            raise InvalidArgument(
                f"permit returned {shown(decision)}; it must return 'allow', 'deny' or 'ask', "
                "alone or with a reason"
            )
        return approval

    def _ask_person(
        self,
        call: ToolCall,
        tool: Tool[..., Any] | Peer,
        arguments: dict[str, Any],
        reason: str,
    ) -> Flow[tuple[Permission, Approval]]:
        """Return a person's decision on a request, which is asked for and recorded once.

        Raises ApprovalNeeded if there is none yet; a session that can pause then waits for it.
        """
        info = yield from perform(Session.info, self._session)
        digests = yield from self._digests(call, arguments)
        found = yield from self._newest_record(call, digests, info)
        decided = None if found is None else _decision_in(found)
        if decided is not None and decided[1] not in self._used:
            return decided
        is_asked = found is not None and decided is None
        # Listings show the beginning: first what a person decides on.
        question = {
            "tool": call.name,
            "arguments": call.arguments,
            "reason": reason,
            "block_id": call.id,
            "request": digests[0],
        }
        can_pause = info.agent is not None and self._rules.approve is None
        if not is_asked and not can_pause:
            yield from perform(Session.record, self._session, APPROVAL, question)
        if self._rules.approve is None:
            raise _approval_needed(question, can_pause=can_pause, is_asked=is_asked)
        is_allowed = bool((yield from invoke(self._rules.approve, call, tool)))
        decision = {**question, "decision": "allow" if is_allowed else "deny"}
        made = yield from perform(Session.record, self._session, APPROVAL, decision)
        decided = _decision_in(made)
        assert decided is not None
        return decided

    def _digests(self, call: ToolCall, arguments: dict[str, Any]) -> Flow[list[str]]:
        """Return the digests by which a decision on a request is recognized."""
        try:
            given = (call.name, arguments)
            return (yield from perform(SessionEffects._digests, self._session, *given))
        except (InvalidArgument, LimitExceeded) as error:
            raise Refusal(f"invalid arguments, nothing was run. {error}") from None

    def _newest_record(
        self, call: ToolCall, digests: Sequence[str], info: SessionInfo
    ) -> Flow[Checkpoint | None]:
        """Return the newest question or decision of this epoch on exactly this request."""
        records = yield from perform(
            Session.history, self._session, kind=APPROVAL, limit=APPROVALS_READ_MAX
        )
        found = [
            record
            for record in records
            if isinstance(record.data, dict)
            and record.epoch == info.epoch
            and record.version > (info.origin_version or 0)
        ]
        asked = {each.data["pause"]: each.data["question"] for each in found if _is_question(each)}
        for record in found:
            about = asked.get(record.data["pause"]) if "pause" in record.data else record.data
            about = about if isinstance(about, dict) else {}
            if about.get("block_id") == call.id and about.get("request") in digests:
                return record
        return None

    def _fitting(self, content: Any) -> Any:
        """Return a result for the model: redacted, and cut to the size limit."""
        redacted = self._session.runtime.redactor.redact(content)
        try:
            size_bytes = len(self._session.runtime.codec.encode(redacted, name="result"))
        except HoldfastError:
            size_bytes = CONTENT_BYTES_MAX + 1
        if size_bytes <= CONTENT_BYTES_MAX:
            return redacted
        text = redacted if isinstance(redacted, str) else msgspec.json.encode(redacted).decode()
        cut = text.encode()[:CONTENT_BYTES_MAX].decode(errors="ignore")
        return (
            f"{cut}\n[cut: {len(text.encode())} bytes in all; the ledger of effects has the rest]"
        )


def _is_question(record: Checkpoint) -> bool:
    """Whether a record tells what a pause asked a person."""
    return "pause" in record.data and "question" in record.data


def _decision_in(record: Checkpoint) -> tuple[Permission, Approval] | None:
    """Return what a record decides, and the approval that it is if it allows the call."""
    permission = DECISIONS.get(record.data.get("decision"))
    if permission is None:
        return None
    return permission, Approval(record.session_id, record.version, record.epoch)


def _approval_needed(
    question: dict[str, Any], *, can_pause: bool, is_asked: bool
) -> ApprovalNeeded:
    tool, id, request = question["tool"], question["block_id"], question["request"]
    how = "decide with `holdfast approvals` or store.approve, and the session resumes"
    if not can_pause:
        how = (
            f'record it as an approval_point with {{"block_id": "{id}", "request": "{request}", '
            '"decision": "allow"} or "deny", then run the agent again'
        )
    return ApprovalNeeded(
        f"{tool} waits for a decision ({question['reason'] or 'the agent must ask'}); {how}",
        block_id=id,
        tool=tool,
        request=request,
        question=question if can_pause and not is_asked else None,
    )


def _equal_calls_before(messages: Sequence[Message], call: ToolCall) -> int:
    """Return how many identical calls directly precede this one in the stored transcript.

    The transcript also has refused calls, which the ledger of effects does not have.
    """
    calls = [each for message in messages for each in message.calls]
    places = [number for number, each in enumerate(calls) if each.call_id == call.call_id]
    count = 0
    for earlier in reversed(calls[: places[-1]] if places else calls):
        if earlier.name != call.name or not same(earlier.arguments, call.arguments):
            break
        count += 1
    return count


def _plan_of(call: ToolCall) -> Plan:
    try:
        plan = read_plan(_parsed(call))
    except HoldfastError as error:
        raise Refusal(f"the plan was not stored: {error}") from None
    assert plan is not None
    # Without keys, the plan is stored with its format, which the model did not write.
    return replace(plan, keys=None)


def _parsed(call: ToolCall) -> Any:
    """Return arguments as data; some models send them as JSON text."""
    if not isinstance(call.arguments, str):
        return {} if call.arguments is None else call.arguments
    try:
        return json.loads(call.arguments or "{}")
    except ValueError as error:
        raise Refusal(f"the arguments of {call.name} are not valid JSON: {error}") from None


def _in_doubt(call: ToolCall, error: HoldfastError) -> str:
    return (
        f"The outcome of {call.name} is unknown, so it is not run again. A person must resolve "
        f"effect {error.fields.get('effect_id')}. ({error})"
    )
