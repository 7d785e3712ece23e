"""Commands for a whole store: `migrate`, `doctor`, `backup` and `prune`."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any

from .. import store as stores
from ..arguments import require_whole
from ..clock import iso
from ..errors import CorruptRecord, NotFound
from ..formatting import plural, size
from ..maintenance import Pruned
from ..maintenance.retention import KEEP_MAX
from ..records import StoreInfo
from ..store import Store
from . import output
from .command import (
    Answer,
    AsJson,
    DatabaseUrl,
    Namespace,
    Yes,
    argument,
    confirm,
    flag,
    option,
    require_file,
)

LEVEL_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def migrate(
    url: DatabaseUrl = None,
    namespace: Namespace = None,
    status: Annotated[bool, flag("--status", "Show the migrations and change nothing.")] = False,
) -> Answer:
    """Create a store, or upgrade it to the newest format."""
    before = set[int]()
    if not status:
        with contextlib.suppress(NotFound):
            before = _applied(stores.inspect(url, namespace=namespace))
        stores.open(url, namespace=namespace).close()
    info = stores.inspect(url, namespace=namespace)
    done = set[int]() if status else _applied(info) - before
    data = {
        "store": info.where,
        "store_id": info.store_id,
        "dialect": info.dialect,
        "format": info.format,
        "newest": info.newest,
        "applied_now": sorted(done),
        "migrations": [output.data(migration) for migration in info.migrations],
    }
    return Answer(data, lambda: _status(info) if status else _migrated(info, done))


def _applied(info: StoreInfo) -> set[int]:
    return {each.version for each in info.migrations if each.applied_at is not None}


def _migrated(info: StoreInfo, done: set[int]) -> Iterator[str]:
    for migration in info.migrations:
        if migration.version in done:
            yield f"applied {migration.version:04} {migration.name}"
    state = "now has" if done else "already has"
    yield f"{info.where} {state} format {info.format}, the newest."


def _status(info: StoreInfo) -> Iterator[Any]:
    def applied(migration: Any) -> str:
        if migration.applied_at is None:
            return "pending"
        newer = " by a newer Holdfast" if migration.version > info.newest else ""
        return iso(migration.applied_at) + newer

    yield info.where
    columns: output.Columns = {
        "version": lambda each: f"{each.version:04}",
        "name": "name",
        "applied at": applied,
    }
    yield output.table(info.migrations, columns)


def doctor(
    url: DatabaseUrl = None,
    namespace: Namespace = None,
    full: Annotated[
        bool, flag("--full", "SQLite: also compare every index with its table.")
    ] = False,
    as_json: AsJson = False,
) -> Answer:
    """Check a store. The exit code is 1 if there is a problem; nothing is changed.

    It reads every row once. A terminal shows an estimate of how long that takes, and then a
    progress bar.
    """
    from rich.progress import Progress

    errors = output.console(stderr=True)
    is_shown = errors.is_terminal and not as_json
    if is_shown:
        foreseen = stores.extent(url, namespace=namespace)
        about = "less than a second" if foreseen.seconds < 1 else f"about {foreseen.seconds:,.0f} s"
        errors.print(f"Examining {size(foreseen.bytes)} takes {about} on an idle machine.")
    with Progress(console=errors, transient=True, disable=not is_shown) as shown_progress:
        task = shown_progress.add_task("Examining", total=None)

        def progress(name: str, done: int, count: int) -> None:
            text = f"Examining: {name}"
            shown_progress.update(task, description=text, completed=done, total=count)

        findings = stores.check(url, namespace=namespace, full=full, progress=progress)

    def shown() -> Iterator[Any]:
        from rich.text import Text

        level_width, check_width = (
            max(len(getattr(finding, name)) for finding in findings) + 2
            for name in ("level", "check")
        )
        width, indent = output.console().width, level_width + check_width
        for finding in findings:
            advice = output.with_place(finding.advice or "", url, namespace)
            message = output.wrapped(f"{finding.message} {advice}", width, indent)
            line = Text(finding.level.ljust(level_width), style=LEVEL_STYLES[finding.level])
            yield line.append(finding.check.ljust(check_width) + message, style="default")
        if counts["problem"] or counts["warning"]:
            problems, warnings = (plural(counts[level], level) for level in ("problem", "warning"))
            yield f"\n{problems}, {warnings}."
        else:
            yield Text("\nNo problems found.", style="green")

    counts = Counter[str](finding.level for finding in findings)
    return Answer(list(map(asdict, findings)), shown, exit_code=1 if counts["problem"] else 0)


def backup(
    store: Store,
    path: Annotated[
        Path, argument("PATH", "The new SQLite file; it must not exist yet.", callback=require_file)
    ],
) -> Answer:
    """Copy a live store. The copy is a consistent snapshot, and a store of its own.

    The snapshot is held until the end. On PostgreSQL dead rows cannot be removed meanwhile: back up
    at a quiet hour, or from a standby. On SQLite the write-ahead log grows with what is written.
    """
    from rich.filesize import decimal

    with output.progress("Copying") as progress:
        store.backup(path, progress)
    target = path.resolve()
    count = target.stat().st_size
    return Answer(
        {"path": str(target), "bytes": count}, f"Backed up to {target} ({decimal(count)})."
    )


def prune(
    store: Store,
    session: Annotated[str | None, option("SESSION", "Only those of this session.")] = None,
    keep: Annotated[int, option("N", "How many checkpoints of each session to keep.")] = 100,
    work_days: Annotated[float, option("N", "Remove work items finished this long ago.")] = 30,
    history_days: Annotated[
        float, option("N", "Remove events and state history older than this from ended trees.")
    ] = 30,
    archive: Annotated[
        Path | None,
        option(
            "FILE",
            "Write what is removed to this file first, as JSON lines.",
            callback=require_file,
        ),
    ] = None,
    vacuum: Annotated[
        bool, flag("--vacuum", "Return free space to the system; on SQLite, writers wait.")
    ] = False,
    yes: Yes = False,
) -> Answer:
    """Remove old checkpoints, except those still needed.

    The newest of each session, the resume point, pinned and attested versions, fork points and
    approval points stay. An interrupted prune loses nothing; run it again.
    """
    from rich.progress import Progress, SpinnerColumn, TextColumn

    errors = output.console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"))
    gone = "They are archived." if archive is not None else "They cannot be restored."
    only = None if session is None else store.find_session(session).id
    whose = "each session" if only is None else f"session {only}"
    require_whole("keep", keep, 1, KEEP_MAX)  # Nobody is to be asked about less.
    confirm(f"Remove all but {plural(keep, 'checkpoint')} of {whose}? {gone}", yes=yes)
    is_quiet = not errors.is_terminal
    with Progress(*columns, console=errors, transient=True, disable=is_quiet) as shown:
        task = shown.add_task("Pruning", total=None)

        def progress(count: int) -> None:
            shown.update(task, description=f"Pruning: {plural(count, 'checkpoint')} removed")

        pruned = store.prune(
            session=only,
            keep=keep,
            work_days=work_days,
            history_days=history_days,
            archive=archive,
            vacuum=vacuum,
            progress=progress,
        )
    counts = {each.name: getattr(pruned, each.name) for each in fields(pruned)}
    others = counts.pop("others")
    code = CorruptRecord.exit_code if pruned.damaged else 0
    return Answer({**counts, **others}, "\n".join(_pruned(pruned, archive)), code)


def _pruned(pruned: Pruned, archive: Path | None) -> Iterator[str]:
    for id in pruned.damaged:
        yield f"Session {id} was skipped: one of its records is damaged."
    removed = plural(pruned.checkpoints, "checkpoint")
    yield f"Removed {removed} of {plural(pruned.sessions, 'session')}."
    if archive is not None:
        yield f"Archived {pruned.archived:,} in {archive.resolve()}."
    if pruned.lines:
        yield f"Removed {pruned.lines:,} unused lists and values."
    if pruned.items:
        yield f"Removed {plural(pruned.items, 'finished work item')}."
    if pruned.effects:
        yield f"Removed {plural(pruned.effects, 'effect')} that no call can refer to any more."
    if pruned.events or pruned.state_changes:
        changes = plural(pruned.state_changes, "change")
        yield f"Removed {plural(pruned.events, 'event')} and {changes} of state of ended trees."
    for name, count in pruned.others.items():
        yield f"Removed {plural(count, name)}."
    if pruned.is_vacuumed:
        yield "Returned the free space."
