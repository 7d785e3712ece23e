"""`holdfast work`: look at work items, submit and steer them, and run workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any, cast

from ..errors import CorruptRecord, InvalidArgument, Refused, SessionEnded
from ..items import WorkItem
from ..records import Swept
from ..store import Store
from ..work import WORK_STATUSES, OnCrash, WorkStatus
from . import output
from .command import (
    OFFERED_MAX,
    Answer,
    Commands,
    Limit,
    OfSession,
    OfTree,
    Yes,
    argument,
    confirm,
    flag,
    id_of,
    in_options,
    numbered,
    option,
    page,
    read_json,
    root_of,
)

REDRIVEN_PER_PAGE = 100

app = Commands("Show, submit and control work items, and run workers.")

ItemId = Annotated[
    str,
    numbered(
        "ITEM",
        "The item's id, its number in the list, or the beginning of its id.",
        lambda store: store.work.list(limit=OFFERED_MAX),
        "type",
        "status",
    ),
]


def item_data(item: WorkItem[Any]) -> dict[str, Any]:
    """Return a work item as JSON data; if a part of it is damaged, its row and the damage."""
    try:
        return output.with_iso_times(item.to_dict())
    except CorruptRecord as error:
        names = ("id", "number", "type", "queue", "status", "holder", "fence", "updated_at")
        fields = {name: getattr(item, name) for name in names}
        return output.with_iso_times({**fields, "damaged": str(error)})


@app.command("list", mode="read")
def list_items(
    store: Store,
    status: Annotated[
        list[str] | None,
        option("STATUS", "Only those of this status; repeatable.", offers=WORK_STATUSES),
    ] = None,
    type_: Annotated[str | None, option("TYPE", "Only those of this type.", "--type")] = None,
    queue: Annotated[str | None, option("QUEUE", "Only those of this queue.")] = None,
    session: OfSession = None,
    root: OfTree = None,
    holder: Annotated[str | None, option("NAME", "Only those that this worker runs.")] = None,
    dead: Annotated[bool, flag("--dead", "Only failed items that have not been redriven.")] = False,
    before: Annotated[int | None, option("NUMBER", "Continue below this number.")] = None,
    limit: Limit = 100,
) -> Answer:
    """List work items, newest first."""
    wanted: dict[str, Any] = {
        "status": cast("list[WorkStatus] | None", status or None),
        "type": type_,
        "queue": queue,
        "session": id_of(store, session),
        "root": root_of(store, root),
        "holder": holder,
    }
    if dead and any(each is not None for each in wanted.values()):
        raise InvalidArgument(
            "--dead lists all dead items and cannot be combined with other filters"
        )
    if dead:
        found = store.work.dead(before=before, limit=limit)
    else:
        found = store.work.list(**wanted, before=before, limit=limit)
    columns: output.Columns = {
        "number": "number",
        "id": "id",
        "type": "type",
        "queue": "queue",
        "status": lambda item: item.status + (f" ({item.waits_for})" if item.waits_for else ""),
        "retries": lambda item: f"{item.retry_count}/{item.max_retries}",
        "holder": "holder",
        "updated": "updated_at",
        "error": "error",
    }
    return page(
        "items", found, item_data, columns, limit=limit, more="before",
        drop=("id", "holder", "queue", "retries"), empty="No work items.",
    )  # fmt: skip


@app.command(mode="read")
def show(store: Store, item: ItemId) -> Answer:
    """Show one work item, with its input, its output and its errors."""
    found = store.work.find(item)
    errors = store.work.errors(found.id)
    data = item_data(found)

    def shown() -> Iterator[Any]:
        yield output.known(data, "number", "id", "type", "status", "waits_for", "error", "damaged")
        if errors:
            yield "\nLast failed attempts:\n"
            columns = {"attempt": "attempt", "ended": "ended_at", "by": "holder"}
            columns |= {"reason": "reason", "error": "error"}
            yield output.table(errors, columns, drop=("reason", "by"))

    return Answer({**data, "errors": list(map(output.data, errors))}, shown)


@app.command(mode="read")
def why(store: Store, item: ItemId) -> Answer:
    """Explain in a sentence why a work item runs or does not."""
    found = store.work.find(item)
    reason = store.work.why(found.id)
    return Answer({"id": found.id, "why": reason}, output.text_of(reason))


@app.command(mode="write")
def submit(
    store: Store,
    type_: Annotated[str, argument("TYPE", "The type, which chooses the handler.")],
    input_: Annotated[str, argument("[INPUT]", "Its input, as JSON; - reads stdin.")] = "null",
    session: Annotated[
        str | None, option("SESSION", "The session it belongs to, which must exist.")
    ] = None,
    queue: Annotated[str | None, option("QUEUE", "The queue it waits in.")] = None,
    priority: Annotated[int, option("N", "Higher goes first.")] = 0,
    max_retries: Annotated[int, option("N", "How often to retry after the first attempt.")] = 3,
    delay_seconds: Annotated[
        float | None, option("SECONDS", "Wait this long first.", "--delay")
    ] = None,
    key: Annotated[
        str | None, option("KEY", "At most one unfinished item may have this key.")
    ] = None,
    on_crash: Annotated[str, option("RULE", "retry, fail or review.")] = "retry",
) -> Answer:
    """Submit a work item."""
    made = store.work.submit(
        type_,
        read_json(input_, "INPUT"),
        session=id_of(store, session),
        queue=queue,
        priority=priority,
        max_retries=max_retries,
        delay_seconds=delay_seconds,
        key=key,
        on_crash=cast("OnCrash", on_crash),
    )
    return Answer(item_data(made), made.id)


@app.command(mode="write")
def retry(store: Store, item: ItemId) -> Answer:
    """Make a work item ready now that waits for its time or for review."""
    ready = store.work.retry(store.work.find(item).id)
    return Answer(item_data(ready), f"Work item {ready.id} is ready.")


@app.command(mode="write")
def cancel(store: Store, item: ItemId, yes: Yes = False) -> Answer:
    """Cancel a work item. If it is running, its worker is asked to stop."""
    found = store.work.find(item)
    confirm(f"Cancel work item {found.id} ({found.type})?", yes=yes)
    status = store.work.cancel(found.id)
    text = f"Work item {found.id} is {status}."
    if status == "in_progress":
        text = f"Work item {found.id} is running; its worker was asked to stop."
    return Answer({"id": found.id, "status": status}, text)


@app.command(mode="write")
def release(
    store: Store,
    item: ItemId,
    reason: Annotated[str, option("TEXT", "Why (kept with the attempt).")],
    yes: Yes = False,
) -> Answer:
    """Take a running work item away from its worker, whose writes are refused from then on."""
    found = store.work.find(item)
    confirm(f"Take work item {found.id} ({found.type}) away from {found.holder}?", yes=yes)
    done = store.work.release(found.id, reason=reason)
    data = {"id": done.id, "status": done.status, "fence": done.fence}
    return Answer(data, f"Work item {done.id} is {done.status}, and its fence is {done.fence}.")


@app.command(mode="write")
def redrive(
    store: Store,
    items: Annotated[list[str] | None, argument("[ITEM]...", "Dead items: ids or numbers.")] = None,
    all_dead: Annotated[bool, flag("--all", "All dead items.")] = False,
    yes: Yes = False,
) -> Answer:
    """Submit dead work items again, each as a new item that refers to it."""
    if all_dead == bool(items):
        raise InvalidArgument("name the items to redrive, or pass --all")
    made, refused = [], []
    if all_dead:
        confirm("Redrive all dead work items?", yes=yes)
        before: int | None = None
        while found := store.work.dead(before=before, limit=REDRIVEN_PER_PAGE):
            for dead in found:
                try:
                    made.append(store.work.redrive(dead.id))
                except (Refused, SessionEnded) as why_not:
                    refused.append(why_not)
            before = found[-1].number
    else:
        wanted = [store.work.find(item).id for item in items or ()]
        made = [store.work.redrive(id) for id in wanted]
    lines = [f"Work item {item.redriven_from} is submitted again as {item.id}." for item in made]
    lines += [f"Not submitted: {in_options(error, ())}." for error in refused]
    left = [error.to_dict() for error in refused]
    return Answer(
        {"items": list(map(item_data, made)), "refused": left},
        "\n".join(lines) or "There are no dead work items.",
    )


@app.command(mode="write")
def sweep(store: Store) -> Answer:
    """Requeue or end items whose lease has expired, and make due items ready; for cron.

    Every worker does this by itself.
    """
    totals = dict.fromkeys(("requeued", "failed", "cancelled", "parked", "promoted"), 0)
    swept = Swept(has_more=True)
    while swept.has_more:
        swept = store.work.sweep()
        for name in totals:
            totals[name] += getattr(swept, name)
        if not any(asdict(swept)[name] for name in totals):
            break
    return Answer(totals, ", ".join(f"{count:,} {name}" for name, count in totals.items()) + ".")
