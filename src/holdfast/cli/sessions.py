"""`holdfast sessions`: look at sessions, and end, cancel or delete them."""

from __future__ import annotations

from typing import Annotated, Any, cast

import typer

from .. import store
from ..records import STATUSES, SessionInfo, Status
from .completion import one_of, session_ids
from .groups import confirm, group
from .options import AsJson, Limit, Namespace, SessionId, Url, Yes
from .output import console, print_json
from .showing import say, session_data, show_fields, show_table, when
from .spend import cost

app = group("Look at sessions, and end, cancel or delete them.")


@app.command("list")
def list_sessions(
    url: Url = None,
    namespace: Namespace = None,
    status: Annotated[
        str | None,
        typer.Option(
            "--status",
            metavar="STATUS",
            help="Only those of a status.",
            autocompletion=one_of(STATUSES),
        ),
    ] = None,
    agent: Annotated[
        str | None, typer.Option("--agent", metavar="NAME", help="Only those of an agent.")
    ] = None,
    root: Annotated[
        str | None,
        typer.Option(
            "--root",
            metavar="SESSION",
            help="Only those of a tree.",
            autocompletion=session_ids,
        ),
    ] = None,
    after: Annotated[
        int, typer.Option("--after", metavar="NUMBER", help="Continue after this number.")
    ] = 0,
    limit: Limit = 100,
    as_json: AsJson = False,
) -> None:
    """List sessions in the order of their creation. It reads no channel."""
    with store.open(url, namespace=namespace, mode="read") as opened:
        root_id = None if root is None else opened.find_session(root).root_id
        wanted = cast("Status | None", status)
        found = opened.sessions(status=wanted, agent=agent, root=root_id, after=after, limit=limit)
    next_after = found[-1].number if len(found) == limit else None
    if as_json:
        print_json({"sessions": list(map(session_data, found)), "next_after": next_after})
        return
    headings = ("number", "id", "name", "agent", "status", "version", "updated")
    dropped = ("version", "agent")
    show_table(headings, map(_line, found), drop=dropped, shorten="id", empty="No sessions.")
    if next_after is not None:
        say(f"\nThere may be more: --after {next_after}")


def _line(info: SessionInfo) -> tuple[object, ...]:
    updated = when(info.updated_at)
    return (info.number, info.id, info.name, info.agent, info.activity, info.version, updated)


@app.command()
def show(
    session: SessionId, url: Url = None, namespace: Namespace = None, as_json: AsJson = False
) -> None:
    """Show one session, its counts, its resume point and what it cost."""
    with store.open(url, namespace=namespace, mode="read") as opened:
        found = opened.find_session(session)
        fields: dict[str, Any] = session_data(found.info())
        point = found.resume_point()
        fields["checkpoints"] = found.counts()
        fields["resume_iteration"] = point.iteration
        fields["resume_version"] = point.checkpoint.version if point.checkpoint else None
        fields |= cost(found.spent())
        fields["children"] = [child.id for child in found.children()]
    if as_json:
        print_json(fields)
    else:
        show_fields(fields)


@app.command()
def tree(
    session: SessionId, url: Url = None, namespace: Namespace = None, as_json: AsJson = False
) -> None:
    """Show a session and everything below it."""
    with store.open(url, namespace=namespace, mode="read") as opened:
        members = opened.find_session(session).tree()
    if as_json:
        print_json(list(map(session_data, members)))
        return
    from rich.text import Text
    from rich.tree import Tree

    branches: dict[str | None, Tree] = {}
    for member in members:
        name = f" {member.name}" if member.name else ""
        label = Text(f"{member.id}{name}  {member.activity}, version {member.version}")
        above = branches.get(member.parent_id)
        branches[member.id] = Tree(label) if above is None else above.add(label)
    console().print(branches[members[0].id])


@app.command()
def end(
    session: SessionId,
    url: Url = None,
    namespace: Namespace = None,
    status: Annotated[
        str,
        typer.Option(
            "--status",
            metavar="STATUS",
            help="completed, failed or cancelled.",
            autocompletion=one_of(("completed", "failed", "cancelled")),
        ),
    ] = "completed",
    as_json: AsJson = False,
) -> None:
    """End a session. Its lease must be free; `holdfast sessions reopen` makes it active again."""
    with store.open(url, namespace=namespace, migrate=False) as opened:
        found = opened.find_session(session)
        found.end(cast("Status", status))
    if as_json:
        print_json({"session_id": found.id, "status": status})
    else:
        say(f"Session {found.id} is {status}.")


@app.command()
def reopen(
    session: SessionId, url: Url = None, namespace: Namespace = None, as_json: AsJson = False
) -> None:
    """Make a session that has ended active again."""
    with store.open(url, namespace=namespace, migrate=False) as opened:
        found = opened.session(opened.find_session(session).id, reopen=True)
        status = found.info().status
    if as_json:
        print_json({"session_id": found.id, "status": status})
    else:
        say(f"Session {found.id} is {status}.")


@app.command()
def cancel(
    session: SessionId,
    url: Url = None,
    namespace: Namespace = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Cancel a session and everything below it. Whoever drives one of them can write no more."""
    with store.open(url, namespace=namespace, migrate=False) as opened:
        found = opened.find_session(session)
        confirm(f"Cancel session {found.id} and everything below it?", yes=yes)
        cancelled = found.cancel()
    _tell("cancelled", cancelled, as_json=as_json)


@app.command()
def delete(
    session: SessionId,
    url: Url = None,
    namespace: Namespace = None,
    force: Annotated[
        bool, typer.Option("--force", help="Also if it is driven, or active below.")
    ] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Delete a session and everything below it."""
    with store.open(url, namespace=namespace, migrate=False) as opened:
        found = opened.find_session(session)
        count = len(found.tree())
        below = f" and {count - 1} below it" if count > 1 else ""
        confirm(f"Delete session {found.id}{below}, with all checkpoints?", yes=yes)
        deleted = found.delete(force=force)
    _tell("deleted", deleted, as_json=as_json)


def _tell(what: str, ids: list[str], *, as_json: bool) -> None:
    if as_json:
        print_json({what: ids})
        return
    for id in ids:
        say(f"{what} {id}")
    if not ids:
        say(f"Nothing was {what}: the sessions had ended.")
