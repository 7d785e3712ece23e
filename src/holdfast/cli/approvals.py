"""`holdfast approvals`: what sessions wait for people to decide."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from ..errors import InvalidArgument
from ..peers import Pause
from ..store import Store
from . import output
from .command import (
    OFFERED_MAX,
    After,
    Answer,
    Commands,
    Limit,
    OfTree,
    flag,
    numbered,
    option,
    page,
    root_of,
)

app = Commands("Show what is waiting for a person's decision, and decide it.")

Approval = Annotated[
    str,
    numbered(
        "APPROVAL",
        "Its id, its number in the list, or the beginning of its id.",
        lambda store: store.pauses(reason="approval", state="waiting", limit=OFFERED_MAX),
        "agent",
        "session_id",
    ),
]
By = Annotated[str | None, option("NAME", "Who decides; required, and recorded.")]
Note = Annotated[str | None, option("TEXT", "Why (recorded).")]


@app.command("list", mode="read")
def list_approvals(
    store: Store,
    decided: Annotated[bool, flag("--all", "Include those that were decided.")] = False,
    root: OfTree = None,
    after: After = 0,
    limit: Limit = 100,
) -> Answer:
    """List what waits for a decision, oldest first."""
    wanted: dict[str, Any] = {"state": None if decided else "waiting", "root": root_of(store, root)}
    found = store.pauses(reason="approval", **wanted, after=after, limit=limit)
    columns: output.Columns = {
        "number": "number",
        "id": "id",
        "agent": "agent",
        "session": "session_id",
        "decision": _decided,
        "asked": "created_at",
        "question": "question",
    }
    # In a list of what waits, the decision says nothing.
    dropped = ("id", "agent") if decided else ("id", "decision", "agent")
    return page(
        "approvals", found, _data, columns, limit=limit,
        drop=dropped, shorten="session", empty="Nothing waits for a decision.",
    )  # fmt: skip


@app.command(mode="read")
def show(store: Store, pause_id: Approval) -> Answer:
    """Show the question, the session that waits, and the decision if there is one."""
    found = _found(store, pause_id)

    def shown() -> Iterator[Any]:
        known = {
            "approval": f"{found.id} (number {found.number})",
            "session": found.session_id,
            "agent": found.agent,
            "asked_at": output.when(found.created_at),
            "decision": _decided(found),
        }
        if (decision := found.decision) is not None:
            known |= {"by": decision.by, "note": decision.note or "-"}
        yield output.fields(known)
        yield output.heading("Question")
        yield output.json_lines(found.question)
        if found.context is not None:
            yield output.heading("Context")
            yield output.json_lines(found.context)
        if found.state == "waiting":
            yield (
                f"\nDecide with `holdfast approvals approve {found.number} --by NAME` or "
                f"`holdfast approvals reject {found.number} --by NAME`; the session goes on by "
                "itself."
            )

    return Answer(_data(found), shown)


@app.command(mode="write")
def approve(store: Store, pause_id: Approval, by: By = None, note: Note = None) -> Answer:
    """Approve; the session resumes by itself."""
    return _decide(store, pause_id, by, note, is_approved=True)


@app.command(mode="write")
def reject(store: Store, pause_id: Approval, by: By = None, note: Note = None) -> Answer:
    """Reject; the session resumes by itself, with the decision."""
    return _decide(store, pause_id, by, note, is_approved=False)


def _decide(
    store: Store, pause_id: str, by: str | None, note: str | None, *, is_approved: bool
) -> Answer:
    if by is None:
        raise InvalidArgument("--by NAME is required: who decides")
    found = _found(store, pause_id)
    decide = store.approve if is_approved else store.reject
    decide(found.id, by=by, note=note)
    decided = _found(store, found.id)
    told = f"{_decided(decided)}; session {found.session_id} resumes."
    if found.decision is not None:
        told = f"It was already {_decided(found)} by {found.decision.by}; nothing was changed."
    return Answer(_data(decided), output.text_of(told))


def _found(store: Store, pause_id: str) -> Pause:
    found = store.find_pause(pause_id)
    if found.reason != "approval":
        raise InvalidArgument(f"pause {found.id} waits for {found.reason}, not for an approval")
    return found


def _decided(pause: Pause) -> str:
    if pause.decision is not None:
        return "approved" if pause.decision.is_approved else "rejected"
    return "waits" if pause.state == "waiting" else pause.state


def _data(pause: Pause) -> dict[str, Any]:
    decision = None if pause.decision is None else output.data(pause.decision)
    return {**output.data(pause), "decision": decision}
