"""`holdfast peers`: look at calls to other agents, answer them by hand, or cancel them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from ..errors import InvalidArgument
from ..peers import Answer as PeerAnswer
from ..peers import Pause, PeerCall
from ..peers.records import ASK_STATES, PAUSE_REASONS, PAUSE_STATES
from ..store import Store
from . import output
from .command import (
    OFFERED_MAX,
    After,
    Answer,
    Commands,
    Limit,
    OfTree,
    numbered,
    option,
    page,
    read_json,
    root_of,
)

RECEIPTS = {
    "counted": "The answer was stored and counted.",
    "duplicate": "The call already had its answer; nothing was changed.",
    "late": "The call is over; the answer was kept with it and changes nothing.",
}
EFFECTS: output.Columns = {
    "number": "number",
    "tool": "tool",
    "status": "status",
    "reason": "reason",
    "issued": "issued_at",
    "reported later": lambda each: None if each.late is None else each.late["status"],
}
PAUSES_SHOWN = (*PAUSE_STATES, "any")
app = Commands("Show calls to other agents, answer them by hand, or cancel them.")

Ask = Annotated[
    str,
    numbered(
        "ASK",
        "The call's id, its number in the list, or the beginning of its id.",
        lambda store: store.asks(limit=OFFERED_MAX),
        "agent",
        "state",
    ),
]


@app.command("list", mode="read")
def list_calls(
    store: Store,
    agent: Annotated[str | None, option("NAME", "Only calls to this agent.")] = None,
    root: OfTree = None,
    state: Annotated[
        str | None,
        option("STATE", "open, ok, error, timeout or cancelled.", offers=ASK_STATES),
    ] = None,
    after: After = 0,
    limit: Limit = 100,
) -> Answer:
    """List calls in the order in which they were made."""
    chosen: dict[str, Any] = {"agent": agent, "state": state, "root": root_of(store, root)}
    found = store.asks(**chosen, after=after, limit=limit)
    columns: output.Columns = {
        "number": "number",
        "id": "id",
        "agent": "agent",
        "asked by": lambda each: each.session_id or "a caller",
        "state": "state",
        "asked": "created_at",
        "deadline": "deadline_at",
        "progress": "progress",
    }
    dropped = ("progress", "id", "asked by")
    return page("calls", found, call_data, columns, limit=limit, drop=dropped, empty="No calls.")


@app.command(mode="read")
def pauses(
    store: Store,
    state: Annotated[
        str,
        option("STATE", "waiting, ready, resumed, closed, cancelled or any.", offers=PAUSES_SHOWN),
    ] = "waiting",
    reason: Annotated[
        str | None, option("REASON", "peers, approval or time.", offers=PAUSE_REASONS)
    ] = None,
    agent: Annotated[str | None, option("NAME", "Only sessions of this agent.")] = None,
    root: OfTree = None,
    after: After = 0,
    limit: Limit = 100,
) -> Answer:
    """List what sessions wait for, those that wait longest first."""
    wanted: Any = {"state": None if state == "any" else state, "reason": reason, "agent": agent}
    wanted["root"] = root_of(store, root)
    found = store.pauses(**wanted, after=after, limit=limit)
    columns: output.Columns = {
        "number": "number",
        "id": "id",
        "session": "session_id",
        "agent": "agent",
        "state": "state",
        "waits for": "reason",
        "since": "created_at",
    }
    dropped = ("id", "agent", "waits for")
    empty = "No session waits." if wanted["state"] == "waiting" else "No pauses."
    return page("pauses", found, _pause, columns, limit=limit, drop=dropped, empty=empty)


def _pause(pause: Pause) -> dict[str, Any]:
    decision = None if pause.decision is None else output.data(pause.decision)
    return {**output.data(pause), "decision": decision}


@app.command(mode="read")
def show(store: Store, ask_id: Ask) -> Answer:
    """Show a call: its input, its progress and its answer."""
    call = store.find_ask(ask_id)

    def shown() -> Iterator[Any]:
        known = {
            "call": f"{call.id} (number {call.number})",
            "agent": call.agent,
            "asked_by": call.session_id or "a caller that is not a session",
            "root": call.root_id,
            "state": call.state,
            "asked_at": output.when(call.created_at),
            "deadline": output.when(call.deadline_at),
        }
        yield output.fields({name: each for name, each in known.items() if each is not None})
        parts = {"Asked for": call.input, "Correlation": call.correlation}
        parts |= {"Progress": call.progress}
        for title, value in parts.items():
            if value is not None or title == "Asked for":
                yield output.heading(title)
                yield output.json_lines(value)
        for title, answer in (("Answer", call.answer), ("Late answer", call.late)):
            if answer is not None:
                yield output.heading(f"{title}: {answer.status}, {output.when(answer.answered_at)}")
                yield output.json_lines(answer.result)
        if call.open_effects:
            yield output.heading("The peer may have acted: effects without a known outcome")
            yield output.table(call.open_effects, EFFECTS)
            yield "\n`holdfast effects show NUMBER` says what is known and what you can do."

    return Answer(call_data(call), shown)


@app.command(mode="write")
def answer(
    store: Store,
    ask_id: Ask,
    result: Annotated[str | None, option("JSON", "The answer.")] = None,
    error: Annotated[str | None, option("TEXT", "Answer with this error instead.")] = None,
) -> Answer:
    """Answer a call on behalf of the peer; a session that waited for it resumes."""
    if result is not None and error is not None:
        raise InvalidArgument("an answer is a --result or an --error, not both")
    call = store.find_ask(ask_id)
    if error is not None:
        receipt = store.answer(call.id, error, status="error")
    elif result is not None:
        receipt = store.answer(call.id, read_json(result, "--result"))
    else:
        # There is one answer: who forgot it shall not have given it.
        raise InvalidArgument("pass --result JSON (null says nothing) or --error TEXT")
    return Answer({"id": call.id, "receipt": receipt}, RECEIPTS[receipt])


@app.command(mode="write")
def cancel(store: Store, ask_id: Ask) -> Answer:
    """Cancel a call with its peer; a session that waited for it resumes."""
    call = store.find_ask(ask_id)
    is_cancelled = store.cancel_ask(call.id)
    told = "was cancelled" if is_cancelled else "already had its answer; nothing was changed"
    return Answer({"id": call.id, "is_cancelled": is_cancelled}, f"Call {call.id} {told}.")


def call_data(call: PeerCall) -> dict[str, Any]:
    """Return a call as plain data."""
    answers = {"answer": call.answer, "late": call.late}
    effects = call.open_effects
    return {
        **output.data(call),
        **{name: _plain(each) for name, each in answers.items()},
        "open_effects": None if effects is None else list(map(output.data, effects)),
    }


def _plain(answer: PeerAnswer | None) -> dict[str, Any] | None:
    if answer is None:
        return None
    return {**output.data(answer), "artifacts": list(map(output.data, answer.artifacts))}
