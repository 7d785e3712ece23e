"""`holdfast sessions`: look at sessions, and end, cancel or delete them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, cast

from ..records import STATUSES, SessionInfo, Status
from ..store import Store
from . import output
from .command import (
    After,
    Answer,
    Commands,
    Limit,
    OfTree,
    SessionId,
    Yes,
    confirm,
    flag,
    option,
    page,
    root_of,
)
from .spend import cost

if TYPE_CHECKING:
    from rich.tree import Tree

app = Commands("Show sessions, and end, cancel or delete them.")
LISTED_MAX = 100
# So that a look at a long session takes no longer than one at a short session.
COUNTED_MAX = 10_000
ENDS = ("completed", "failed", "cancelled")


def _data(info: SessionInfo) -> dict[str, Any]:
    return output.data(info) | {"activity": info.activity}


@app.command("list", mode="read")
def list_sessions(
    store: Store,
    status: Annotated[
        str | None,
        option(
            "STATUS",
            "active (shown as running or idle), waiting, completed, failed or cancelled.",
            offers=STATUSES,
        ),
    ] = None,
    agent: Annotated[str | None, option("NAME", "Only those of this agent.")] = None,
    root: OfTree = None,
    after: After = 0,
    limit: Limit = 100,
) -> Answer:
    """List sessions in the order of their creation, without reading their channels."""
    chosen: dict[str, Any] = {"status": status, "agent": agent, "root": root_of(store, root)}
    found = store.sessions(**chosen, after=after, limit=limit)
    columns = {
        "number": "number",
        "id": "id",
        "name": "name",
        "agent": "agent",
        "status": "activity",
        "version": "version",
        "updated": "updated_at",
    }
    dropped = ("version", "agent")
    return page(
        "sessions", found, _data, columns, limit=limit,
        drop=dropped, shorten="id", empty="No sessions.",
    )  # fmt: skip


@app.command(mode="read")
def show(store: Store, session: SessionId) -> Answer:
    """Show one session, its counts, its resume point and what it cost."""
    found = store.find_session(session)
    point = found.resume_point()
    counts = found.counts(at_most=COUNTED_MAX)
    is_more = sum(counts.values()) >= COUNTED_MAX
    data = _data(found.info()) | {
        "checkpoints": counts,
        **({"checkpoints_of_newest": COUNTED_MAX} if is_more else {}),
        "resume_iteration": point.iteration,
        "resume_version": point.checkpoint.version if point.checkpoint else None,
        **cost(found.spent()),
        "children": [child.id for child in found.children()],
    }
    return Answer(data, lambda: [output.known(data, "number", "id", "name", "activity", "agent")])


@app.command(mode="read")
def tree(store: Store, session: SessionId) -> Answer:
    """Show a session and everything below it."""
    members = store.find_session(session).tree()
    return Answer(list(map(_data, members)), lambda: [_tree(members)])


def _tree(members: list[SessionInfo]) -> Tree:
    from rich.text import Text
    from rich.tree import Tree

    branches: dict[str | None, Tree] = {}
    for member in members:
        name = f" {member.name}" if member.name else ""
        agent = f"{member.agent}: " if member.agent else ""
        label = Text(f"{member.id}{name}  {agent}{member.activity}, version {member.version}")
        above = branches.get(member.parent_id)
        branches[member.id] = Tree(label) if above is None else above.add(label)
    return branches[members[0].id]


@app.command(mode="write")
def end(
    store: Store,
    session: SessionId,
    status: Annotated[
        str, option("STATUS", "completed, failed or cancelled.", offers=ENDS)
    ] = "completed",
) -> Answer:
    """End a session. Its lease must be free; `holdfast sessions reopen` makes it active again."""
    found = store.find_session(session)
    found.end(cast("Status", status))
    return _is_now(found.id, status)


@app.command(mode="write")
def reopen(store: Store, session: SessionId) -> Answer:
    """Make a session that has ended active again."""
    found = store.session(store.find_session(session).id, reopen=True)
    return _is_now(found.id, found.info().status)


def _is_now(id: str, status: str) -> Answer:
    return Answer({"session_id": id, "status": status}, f"Session {id} is {status}.")


@app.command(mode="write")
def cancel(store: Store, session: SessionId, yes: Yes = False) -> Answer:
    """Cancel a session and everything below it. Their drivers can no longer write."""
    found = store.find_session(session)
    confirm(f"Cancel session {found.id} and everything below it?", yes=yes)
    with output.progress("Cancelling") as progress:
        return _listed("cancelled", found.cancel(progress=progress))


@app.command(mode="write")
def delete(
    store: Store,
    session: SessionId,
    force: Annotated[
        bool, flag("--force", "Delete it even if it is driven or has active descendants.")
    ] = False,
    yes: Yes = False,
) -> Answer:
    """Delete a session and everything below it."""
    found = store.find_session(session)
    confirm(f"Delete session {found.id} and everything below it, with all checkpoints?", yes=yes)
    with output.progress("Deleting") as progress:
        return _listed("deleted", found.delete(force=force, progress=progress))


def _listed(what: str, ids: list[str]) -> Answer:
    text = "\n".join(f"{what} {id}" for id in ids[:LISTED_MAX])
    if len(ids) > LISTED_MAX:
        text += f"\n{what} {len(ids) - LISTED_MAX:,} more"
    return Answer({what: ids}, text or f"Nothing was {what}: the sessions had ended.")
