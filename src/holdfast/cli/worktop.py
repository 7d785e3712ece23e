"""`holdfast work top`: the queue as it is now, live in the terminal or once for a script."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from ..clock import iso
from ..errors import InvalidArgument, StoreError
from ..items import WorkItem
from ..store import Store
from ..work import WORK_STATUSES
from .command import Answer, AsJson, flag, option
from .output import console, table, text_of
from .work import app, item_data

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

RUNNING_MAX = 20
SHOWN = ("id", "type", "holder", "fence", "retry_count", "lease_acquired_at", "heartbeat_at")
RUNNING = {
    "id": "id",
    "type": "type",
    "holder": "holder",
    "fence": "fence",
    "retries": "retry_count",
    "claimed": "lease_acquired_at",
    "heartbeat": "heartbeat_at",
}
EVERY_SECONDS_MIN = 0.1
# So that a look each second costs little, however long the queues are.
COUNTED_MAX = 10_000
# What is finished is counted only when asked for; only then has it columns.
LIVE_STATUSES = ("pending", "in_progress")


@app.command(mode="read")
def top(
    store: Store,
    every_seconds: Annotated[float, option("SECONDS", "How often to refresh.", "--every")] = 1,
    finished: Annotated[bool, flag("--finished", "Count finished items too.")] = False,
    once: Annotated[bool, flag("--once", "Print once and exit.")] = False,
    as_json: AsJson = False,
) -> Answer:
    """Show what is waiting and running, and the state of leases, live. Ctrl-C ends it."""
    if every_seconds < EVERY_SECONDS_MIN:
        raise InvalidArgument(
            f"--every must be {EVERY_SECONDS_MIN:g} or more, not {every_seconds:g}"
        )
    if not as_json and not once and sys.stdout.isatty():
        _live(store, every_seconds, finished=finished)
    seen = look(store, finished=finished)
    return Answer({**seen, "running": _data(seen["running"])}, lambda: [_picture(seen)])


def look(store: Store, *, finished: bool) -> dict[str, Any]:
    """Return the counts by type, the leases, and some of the items that run."""
    running = store.work.list(status="in_progress", limit=RUNNING_MAX)
    counted = store.work.counts(finished=finished, at_most=COUNTED_MAX)
    return {
        "at": iso(store.now_ms()),
        "statuses": WORK_STATUSES if finished else LIVE_STATUSES,
        "counts": [asdict(count) for count in counted],
        "leases": asdict(store.work.health()),
        "running": running,
    }


def _data(running: list[WorkItem[Any]]) -> list[dict[str, Any]]:
    return [{name: item_data(item).get(name) for name in SHOWN} for item in running]


def _live(store: Store, every_seconds: float, *, finished: bool) -> NoReturn:
    from rich.live import Live
    from rich.text import Text

    shown: RenderableType = _picture(look(store, finished=finished))
    with Live(shown, console=console(), auto_refresh=False, screen=True) as live:
        while True:
            live.update(shown, refresh=True)
            time.sleep(every_seconds)
            try:
                shown = _picture(look(store, finished=finished))
            except StoreError as error:
                if error.exit_code != StoreError.exit_code:
                    raise
                shown = Text(f"{error}\n\nRetrying …", style="red")


def _picture(seen: dict[str, Any]) -> Group:
    from rich.console import Group
    from rich.text import Text

    running = table(seen["running"], RUNNING, drop=("fence", "retries", "claimed"), shorten="id")
    leases = seen["leases"]
    more = "+" if leases["is_more"] else ""
    line = (
        f"{seen['at']}   {leases['active']:,}{more} running, {leases['stale']:,} stale, "
        f"{leases['expired']:,} expired, {leases['cancelling']:,} asked to stop"
    )
    if seen["running"]:
        line += f", oldest heartbeat {leases['longest_heartbeat_seconds']:.1f} s ago"
    parts = [Text(line, style="bold"), Text(), _counts(seen)]
    return Group(*parts, *([Text(), running] if seen["running"] else []))


def _counts(seen: dict[str, Any]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    by_type: dict[str, dict[str, Any]] = {}
    for count in seen["counts"]:
        by_type.setdefault(count["type"], {})[count["status"]] = count
    made = Table("type", box=None, pad_edge=False, header_style="bold")
    for status in seen["statuses"]:
        made.add_column(status, justify="right")
    made.add_column("oldest pending", justify="right")
    for name, counts in sorted(by_type.items()):
        numbers = [_number(counts.get(status)) for status in seen["statuses"]]
        age = counts.get("pending", {}).get("oldest_age_seconds")
        oldest = "-" if age is None else f"{age:,.0f} s"
        made.add_row(Text(text_of(name)), *numbers, oldest)
    return made if by_type else Text("Nothing is waiting or running.")


def _number(count: dict[str, Any] | None) -> str:
    if count is None:
        return "-"
    return f"{count['items']:,}{'+' if count['is_more'] else ''}"
