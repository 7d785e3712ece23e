"""Tool calls of a model: checked, permitted, run through the ledger, and always answered."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from ..arguments import shown
from ..checkpoints.diff import same
from ..codec import Codec
from ..effects.call_all import Answer
from ..effects.calls import Calling, Result
from ..effects.ops import SessionEffects
from ..effects.schema import plain_arguments
from ..effects.tools import Tool
from ..errors import (
    ApprovalNeeded,
    HoldfastError,
    InProgress,
    InvalidArgument,
    InvalidValue,
    LeaseLost,
    SessionBusy,
    SessionEnded,
    StoreError,
    Unresolved,
)
from ..kernel.flow import Flow, invoke, perform
from ..session import Session
from .commits import Executed
from .models import ToolSpec
from .plan import Plan, read_plan
from .rules import Rules, Verdict
from .transcript import Message, ToolCall, ToolResult

# What these say is no answer to a model: the run cannot go on.
FATAL = (LeaseLost, SessionBusy, SessionEnded, StoreError)
APPROVALS_READ_MAX = 10_000
PLAN_TOOL = ToolSpec(
    name="update_plan",
    description="Replace the plan. Give every step; say what is done, with its evidence.",
    parameters={
        "type": "object",
        "properties": {
            "goal": {"type": "string"},
            "steps": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        "id": {"type": "string"},
                        "title": {"type": "string"},
                        "status": {"enum": ["pending", "active", "done", "failed", "skipped"]},
                        "postconditions": {
                            "type": "array",
                            "items": {
                                "type": "object",
                                "properties": {"text": {"type": "string"}, "evidence": {}},
                                "required": ["text"],
                            },
                        },
                        "evidence": {},
                    },
                    "required": ["id", "title"],
                },
            },
        },
        "required": ["steps"],
    },
)


class Told(Exception):
    """A call is not run; the model is told why."""


def specs_of(rules: Rules) -> tuple[ToolSpec, ...]:
    """Return the tools as the model is shown them."""
    specs = [
        ToolSpec(name=tool.name, description=tool.description, parameters=tool.parameters)
        for tool in rules.tools.values()
    ]
    return (*specs, PLAN_TOOL) if rules.planning else tuple(specs)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call on its way: what is to be run, or what is known without running anything."""

    call: ToolCall
    calling: Calling | None = None
    content: Any = None
    is_error: bool = False
    plan: Plan | None = None


def prepare(rules: Rules, session: Any, call: ToolCall, repeats: int) -> Flow[Prepared]:
    """Check a call and ask whether it is permitted; what is wrong with it is told to the model.

    One that waits for a person stops the run.
    """
    try:
        _refuse_repeats(rules, call, repeats)
        if rules.planning and call.name == PLAN_TOOL.name:
            return Prepared(call, content="The plan is stored.", plan=_plan_of(call))
        tool, arguments = _checked(rules, call)
        yield from _permitted(rules, session, call, tool)
        return Prepared(call, _calling(session, call, tool, arguments))
    except Told as refusal:
        return Prepared(call, content=str(refusal), is_error=True)


def _calling(
    session: Any, call: ToolCall, tool: Tool[..., Any], arguments: dict[str, Any]
) -> Calling:
    try:
        return SessionEffects._calling(session, tool, arguments, call.id, None, None)
    except FATAL:
        raise
    except Exception as error:
        raise Told(f"{call.name} raised {type(error).__name__}: {error}") from error


def executed(rules: Rules, session: Any, prepared: Prepared, answer: Answer | None) -> Executed:
    """Return what a call came to; what its tool raised is for the model to know.

    A call in doubt stops the run, unless the rules say otherwise; a lost session or store always.
    """
    call, done = prepared.call, answer if isinstance(answer, Result) else None
    result = ToolResult(call_id=call.call_id, content=prepared.content, is_error=prepared.is_error)
    if done is not None:
        result = replace(result, content=done.value, replay_of=done.replay_of)
    elif isinstance(answer, FATAL):
        raise answer
    elif isinstance(answer, Unresolved | InProgress):
        if rules.on_unresolved == "stop":
            raise answer
        result = replace(result, content=_in_doubt(call, answer), is_error=True)
    elif answer is not None:
        said = f"{call.name} raised {type(answer).__name__}: {answer}"
        result = replace(result, content=said, is_error=True)
    content = _fitting(rules, session.runtime.codec, session, result.content)
    result = replace(result, content=content)
    return Executed(call=call, result=result, evidence=_evidence(call, result, done))


def _evidence(call: ToolCall, result: ToolResult, done: Result[Any] | None) -> dict[str, Any]:
    return {
        "tool": call.name,
        "call_id": call.call_id,
        "block_id": call.id,
        "effect_id": None if done is None else done.effect_id,
        "replay_of": result.replay_of,
        "is_error": result.is_error,
    }


def equal_calls_before(messages: Sequence[Message], call: ToolCall, codec: Codec) -> int:
    """Return how many equal calls stand directly before this one in the stored transcript.

    It holds also calls that were refused, of which the ledger of effects knows nothing.
    """
    wanted = _identity(codec, call)
    count = 0
    calls = [each for message in messages for each in message.calls]
    places = [number for number, each in enumerate(calls) if each.call_id == call.call_id]
    before = calls[: places[-1]] if places else calls
    for earlier in reversed(before):
        if _identity(codec, earlier) != wanted:
            break
        count += 1
    return count


def equal_calls_in_ledger(rules: Rules, session: Any, call: ToolCall) -> Flow[int]:
    """Return how many calls directly before this one in the ledger of effects are equal to it.

    The ledger remembers them also when the transcript was compacted.
    """
    if rules.repeats_max is None or call.name not in rules.tools:
        return 0
    try:
        _, arguments = _checked(rules, call)
    except Told:
        return 0
    wanted = session.runtime.redactor.redact(arguments)
    found = yield from perform(SessionEffects.recent_calls, session, rules.repeats_max + 2)
    equal: set[str] = set()
    for effect in found:
        if effect.call_id == call.id or effect.call_id is None:
            continue
        if effect.tool != call.name or not same(effect.arguments, wanted):
            break
        equal.add(effect.call_id)
    return len(equal)


def _identity(codec: Codec, call: ToolCall) -> tuple[str, bytes]:
    return call.name, codec.encode(_sorted(call.arguments))


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _sorted(value[name]) for name in sorted(value)}
    return [_sorted(each) for each in value] if isinstance(value, list) else value


def _refuse_repeats(rules: Rules, call: ToolCall, repeats: int) -> None:
    if rules.repeats_max is not None and repeats >= rules.repeats_max:
        raise Told(
            f"{call.name} was called {repeats} times in a row with the same arguments; it was not "
            "called again. Do something else, or say what is missing."
        )


def _plan_of(call: ToolCall) -> Plan:
    try:
        plan = read_plan(_parsed(call))
    except HoldfastError as error:
        raise Told(f"the plan was not stored: {error}") from None
    assert plan is not None
    # A stored plan has a format; what a model wrote has none.
    return replace(plan, keys=None)


def _parsed(call: ToolCall) -> Any:
    """Return arguments as data; some models write them as text."""
    if not isinstance(call.arguments, str):
        return {} if call.arguments is None else call.arguments
    try:
        return json.loads(call.arguments or "{}")
    except ValueError as error:
        raise Told(f"the arguments of {call.name} are no valid JSON: {error}") from None


def _checked(rules: Rules, call: ToolCall) -> tuple[Tool[..., Any], dict[str, Any]]:
    tool = rules.tools.get(call.name)
    if tool is None:
        names = ", ".join(spec.name for spec in specs_of(rules)) or "none"
        raise Told(f"there is no tool named {call.name!r}; the tools are: {names}")
    try:
        return tool, plain_arguments(tool.function, _parsed(call))
    except InvalidValue as error:
        raise Told(f"the arguments do not fit, nothing was run. {error}") from None


def _permitted(rules: Rules, session: Any, call: ToolCall, tool: Tool[..., Any]) -> Flow[None]:
    if rules.permit is None:
        return
    decision = yield from invoke(rules.permit, call, tool)
    verdict, reason = decision if isinstance(decision, tuple) else (decision, "")
    if verdict == "ask":
        verdict = yield from _asked(rules, session, call, tool, reason)
    if verdict == "deny":
        raise Told(f"{call.name} was not permitted, nothing was run. {reason}".strip())
    if verdict != "allow":
        raise InvalidArgument(
            f"permit returned {shown(decision)}; it returns 'allow', 'deny' or 'ask', alone or "
            "with a reason"
        )


def _asked(
    rules: Rules, session: Any, call: ToolCall, tool: Tool[..., Any], reason: str
) -> Flow[Verdict]:
    """Return a person's decision on a call; it is recorded and asked for once."""
    records = yield from perform(
        Session.history, session, kind="approval_point", limit=APPROVALS_READ_MAX
    )
    ours = [
        record.data
        for record in records
        if isinstance(record.data, dict) and record.data.get("block_id") == call.id
    ]
    for data in ours:
        if data.get("decision") in {"allow", "deny"}:
            return "allow" if data["decision"] == "allow" else "deny"
    question = {
        "block_id": call.id,
        "tool": call.name,
        "arguments": call.arguments,
        "reason": reason,
    }
    if not ours:
        yield from perform(Session.record, session, "approval_point", question)
    if rules.approve is None:
        raise ApprovalNeeded(
            f"{call.name} waits for a decision ({reason or 'the agent must ask'}); record it as "
            f'an approval_point with {{"block_id": "{call.id}", "decision": "allow"}} or "deny", '
            "then run the agent again",
            block_id=call.id,
            tool=call.name,
        )
    is_allowed = bool((yield from invoke(rules.approve, call, tool)))
    verdict: Verdict = "allow" if is_allowed else "deny"
    decided = {**question, "decision": verdict}
    yield from perform(Session.record, session, "approval_point", decided)
    return verdict


def _in_doubt(call: ToolCall, error: HoldfastError) -> str:
    return (
        f"The outcome of {call.name} is not known, so it is not run again. A person must look at "
        f"effect {error.fields.get('effect_id')}. ({error})"
    )


def _fitting(rules: Rules, codec: Codec, session: Any, content: Any) -> Any:
    """Return what a model is shown of a result: without secrets, and not larger than it may be."""
    redacted = session.runtime.redactor.redact(content)
    try:
        size_bytes = len(codec.encode(redacted, name="result"))
    except HoldfastError:
        size_bytes = rules.content_bytes_max + 1
    if size_bytes <= rules.content_bytes_max:
        return redacted
    text = redacted if isinstance(redacted, str) else msgspec.json.encode(redacted).decode()
    shown = text.encode()[: rules.content_bytes_max].decode(errors="ignore")
    return f"{shown}\n[cut: {len(text.encode())} bytes in all; the ledger of effects has the rest]"
