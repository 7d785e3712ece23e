"""`holdfast prune`: remove old checkpoints, except those that are needed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from .. import store
from ..errors import CorruptRecord
from ..maintenance import Pruned
from ..words import plural
from .groups import confirm
from .options import AsJson, Namespace, Url, Yes
from .output import console, print_json
from .showing import say


def prune(
    url: Url = None,
    namespace: Namespace = None,
    session: Annotated[
        str | None, typer.Option("--session", metavar="SESSION", help="Only one session's.")
    ] = None,
    keep: Annotated[
        int, typer.Option("--keep", metavar="N", help="How many of each session to keep.")
    ] = 100,
    work_days: Annotated[
        float, typer.Option("--work-days", metavar="N", help="Remove work finished before.")
    ] = 30,
    archive: Annotated[
        Path | None,
        typer.Option("--archive", metavar="FILE", help="Keep what is removed here, as JSON lines."),
    ] = None,
    vacuum: Annotated[
        bool, typer.Option("--vacuum", help="Give the space back; on SQLite writers wait.")
    ] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Remove old checkpoints, except those that are needed.

    The newest of each session, the resume point, pinned and attested versions, fork points and
    approval points stay. A prune that is interrupted has lost nothing; run it again.
    """
    from rich.progress import Progress, SpinnerColumn, TextColumn

    errors = console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"))
    with store.open(url, namespace=namespace, migrate=False) as opened:
        gone = "They are archived." if archive is not None else "They cannot be brought back."
        only = None if session is None else opened.find_session(session).id
        whose = "each session" if only is None else f"session {only}"
        confirm(f"Remove all but {plural(keep, 'checkpoint')} of {whose}? {gone}", yes=yes)
        is_quiet = not errors.is_terminal
        with Progress(*columns, console=errors, transient=True, disable=is_quiet) as shown:
            task = shown.add_task("Pruning", total=None)

            def progress(count: int) -> None:
                shown.update(task, description=f"Pruning: {plural(count, 'checkpoint')} removed")

            pruned = opened.prune(
                session=only,
                keep=keep,
                work_days=work_days,
                archive=archive,
                vacuum=vacuum,
                progress=progress,
            )
    if as_json:
        counts = asdict(pruned)
        others = counts.pop("others")
        print_json({**counts, **others})
    else:
        _tell(pruned, archive)
    if pruned.damaged:
        raise typer.Exit(CorruptRecord.exit_code)


def _tell(pruned: Pruned, archive: Path | None) -> None:
    for id in pruned.damaged:
        say(f"Session {id} was left alone: a record of it is damaged.")
    removed = plural(pruned.checkpoints, "checkpoint")
    say(f"Removed {removed} of {plural(pruned.sessions, 'session')}.")
    if archive is not None:
        say(f"Archived {pruned.archived:,} in {archive.resolve()}.")
    if pruned.lines:
        say(f"Removed {pruned.lines:,} lists and values that nothing used.")
    if pruned.items:
        say(f"Removed {plural(pruned.items, 'finished work item')}.")
    if pruned.effects:
        say(f"Forgot {plural(pruned.effects, 'effect')} that nobody can ask for again.")
    for name, count in pruned.others.items():
        say(f"Removed {plural(count, name)}.")
    if pruned.is_vacuumed:
        say("Gave the free space back.")
