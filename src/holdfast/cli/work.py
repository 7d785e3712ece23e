"""`holdfast work`: look at work items, submit and steer them, and run workers."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated, Any, cast

import typer

from .. import store
from ..codec import from_json
from ..errors import InvalidArgument, Refused
from ..items import WorkItem
from ..records import Swept
from ..work import WORK_STATUSES, OnCrash, WorkStatus
from . import worker, worktop
from .completion import item_ids, one_of
from .groups import confirm, group
from .options import AsJson, Limit, Namespace, OfSession, Url, Yes
from .output import print_json
from .showing import item_data, say, show_fields, show_table, text_of, when, with_iso_times

app = group("Look at work items, submit and steer them, and run workers.")
app.command("run")(worker.run)
app.command("top")(worktop.top)

REDRIVEN_PER_PAGE = 100

ItemId = Annotated[
    str,
    typer.Argument(
        metavar="ITEM",
        help="The item's id, its number in the list, or the beginning of its id.",
        autocompletion=item_ids,
    ),
]


@app.command("list")
def list_items(
    url: Url = None,
    namespace: Namespace = None,
    status: Annotated[
        list[str] | None,
        typer.Option(
            "--status",
            metavar="STATUS",
            help="Only those of a status; repeatable.",
            autocompletion=one_of(WORK_STATUSES),
        ),
    ] = None,
    type_: Annotated[
        str | None, typer.Option("--type", metavar="TYPE", help="Only those of a type.")
    ] = None,
    queue: Annotated[
        str | None, typer.Option("--queue", metavar="QUEUE", help="Only those of a queue.")
    ] = None,
    session: OfSession = None,
    holder: Annotated[
        str | None, typer.Option("--holder", metavar="NAME", help="Only those a worker runs.")
    ] = None,
    dead: Annotated[
        bool, typer.Option("--dead", help="Only failed ones that nobody has redriven.")
    ] = False,
    before: Annotated[
        int | None, typer.Option("--before", metavar="NUMBER", help="Go on below this number.")
    ] = None,
    limit: Limit = 100,
    as_json: AsJson = False,
) -> None:
    """List work items, the newest first."""
    narrowed = (status or None, type_, queue, session, holder)
    if dead and any(each is not None for each in narrowed):
        raise InvalidArgument("--dead lists all dead items and takes no other condition")
    with store.open(url, namespace=namespace, mode="read") as opened:
        if dead:
            found = opened.work.dead(before=before, limit=limit)
        else:
            found = opened.work.list(
                status=cast("list[WorkStatus] | None", status or None),
                type=type_,
                queue=queue,
                session=session,
                holder=holder,
                before=before,
                limit=limit,
            )
    next_before = found[-1].number if len(found) == limit else None
    if as_json:
        print_json({"items": list(map(item_data, found)), "next_before": next_before})
        return
    headings = (
        "number", "id", "type", "queue", "status", "retries", "holder", "updated", "error",
    )  # fmt: skip
    dropped = ("id", "holder", "queue", "retries")
    show_table(headings, map(_line, found), drop=dropped, empty="No work items.")
    if next_before is not None:
        say(f"\nThere may be more: --before {next_before}")


def _line(item: WorkItem[Any]) -> tuple[object, ...]:
    waits = f" ({item.waits_for})" if item.waits_for else ""
    retries = f"{item.retry_count}/{item.max_retries}"
    return (
        item.number, item.id, item.type, item.queue, item.status + waits, retries, item.holder,
        when(item.updated_at), item.error,
    )  # fmt: skip


@app.command()
def show(
    item: ItemId, url: Url = None, namespace: Namespace = None, as_json: AsJson = False
) -> None:
    """Show one work item, with its input, its output and its errors."""
    with store.open(url, namespace=namespace, mode="read") as opened:
        found = opened.work.find(item)
        errors = opened.work.errors(found.id)
    if as_json:
        told = [with_iso_times(asdict(each)) for each in errors]
        print_json({**item_data(found), "errors": told})
        return
    show_fields(item_data(found))
    if errors:
        say("\nThe last attempts that failed:\n")
        show_table(
            ("attempt", "ended", "by", "reason", "error"),
            ((e.attempt, when(e.ended_at), e.holder, e.reason, e.error) for e in errors),
            drop=("reason", "by"),
        )


@app.command()
def why(
    item: ItemId, url: Url = None, namespace: Namespace = None, as_json: AsJson = False
) -> None:
    """Say in a sentence why a work item runs or does not."""
    with store.open(url, namespace=namespace, mode="read") as opened:
        found = opened.work.find(item)
        reason = opened.work.why(found.id)
    if as_json:
        print_json({"id": found.id, "why": reason})
    else:
        say(text_of(reason))


@app.command()
def submit(
    type_: Annotated[str, typer.Argument(metavar="TYPE", help="Which handler shall do it.")],
    input_: Annotated[
        str,
        typer.Argument(metavar="[INPUT]", help="What it is given, as JSON; - reads stdin."),
    ] = "null",
    url: Url = None,
    namespace: Namespace = None,
    session: Annotated[
        str | None, typer.Option("--session", metavar="SESSION", help="The session it belongs to.")
    ] = None,
    queue: Annotated[
        str | None, typer.Option("--queue", metavar="QUEUE", help="Where it waits.")
    ] = None,
    priority: Annotated[
        int, typer.Option("--priority", metavar="N", help="The highest goes first.")
    ] = 0,
    max_retries: Annotated[
        int, typer.Option("--max-retries", metavar="N", help="Executions after the first.")
    ] = 3,
    delay_seconds: Annotated[
        float | None, typer.Option("--delay", metavar="SECONDS", help="Wait so many seconds first.")
    ] = None,
    key: Annotated[
        str | None,
        typer.Option("--key", metavar="KEY", help="While an item of this key lives, no second."),
    ] = None,
    on_crash: Annotated[
        str, typer.Option("--on-crash", metavar="RULE", help="retry, fail or review.")
    ] = "retry",
    as_json: AsJson = False,
) -> None:
    """Submit a work item."""
    text = sys.stdin.read() if input_ == "-" else input_
    with store.open(url, namespace=namespace, migrate=False) as opened:
        made = opened.work.submit(
            type_,
            from_json(text, name="input"),
            session=session,
            queue=queue,
            priority=priority,
            max_retries=max_retries,
            delay_seconds=delay_seconds,
            key=key,
            on_crash=cast("OnCrash", on_crash),
        )
    if as_json:
        print_json(item_data(made))
    else:
        say(made.id)


@app.command()
def retry(
    item: ItemId, url: Url = None, namespace: Namespace = None, as_json: AsJson = False
) -> None:
    """Make a pending work item ready now that waits for its time or for review."""
    with store.open(url, namespace=namespace, migrate=False) as opened:
        ready = opened.work.retry(opened.work.find(item).id)
    if as_json:
        print_json(item_data(ready))
    else:
        say(f"Work item {ready.id} is ready.")


@app.command()
def cancel(
    item: ItemId,
    url: Url = None,
    namespace: Namespace = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Cancel a work item. Whoever runs it is asked to stop."""
    with store.open(url, namespace=namespace, migrate=False) as opened:
        found = opened.work.find(item)
        confirm(f"Cancel work item {found.id} ({found.type})?", yes=yes)
        status = opened.work.cancel(found.id)
    if as_json:
        print_json({"id": found.id, "status": status})
    elif status == "in_progress":
        say(f"Work item {found.id} is running; its worker was asked to stop.")
    else:
        say(f"Work item {found.id} is {status}.")


@app.command()
def redrive(
    items: Annotated[
        list[str] | None, typer.Argument(metavar="[ITEM]...", help="Dead items, as in show.")
    ] = None,
    url: Url = None,
    namespace: Namespace = None,
    all_dead: Annotated[bool, typer.Option("--all", help="All that are dead.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Submit dead work items again, each as a new one that names it."""
    if all_dead == bool(items):
        raise InvalidArgument("name the items to redrive, or say --all")
    made, refused = [], []
    with store.open(url, namespace=namespace, migrate=False) as opened:
        if all_dead:
            confirm("Redrive all dead work items?", yes=yes)
            before: int | None = None
            while found := opened.work.dead(before=before, limit=REDRIVEN_PER_PAGE):
                for dead in found:
                    try:
                        made.append(opened.work.redrive(dead.id))
                    except Refused as why_not:
                        refused.append(why_not)
                before = found[-1].number
        else:
            wanted = [opened.work.find(item).id for item in items or ()]
            made = [opened.work.redrive(id) for id in wanted]
    if as_json:
        left = [error.to_dict() for error in refused]
        print_json({"items": list(map(item_data, made)), "refused": left})
        return
    for item in made:
        say(f"Work item {item.redriven_from} is submitted again as {item.id}.")
    for error in refused:
        say(f"Not submitted: {error}.")
    if not made and not refused:
        say("No work item is dead.")


@app.command()
def sweep(url: Url = None, namespace: Namespace = None, as_json: AsJson = False) -> None:
    """Requeue or end items whose lease ran out, and promote what is due; for cron.

    Every worker does this by itself.
    """
    totals = dict.fromkeys(("requeued", "failed", "cancelled", "parked", "promoted"), 0)
    with store.open(url, namespace=namespace, migrate=False) as opened:
        swept = Swept(has_more=True)
        while swept.has_more:
            swept = opened.work.sweep()
            for name in totals:
                totals[name] += getattr(swept, name)
            if not any(asdict(swept)[name] for name in totals):
                break
    if as_json:
        print_json(totals)
    else:
        say(", ".join(f"{count:,} {name}" for name, count in totals.items()) + ".")
