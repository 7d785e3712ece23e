"""`holdfast work top`: the queue as it is now, live in the terminal or once for a script."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import store
from ..clock import iso
from ..errors import HoldfastError, InvalidArgument, StoreError
from ..work import WORK_STATUSES
from .options import AsJson, Namespace, Url
from .output import console, print_json
from .showing import item_data, text_of

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

RUNNING_MAX = 20
SHOWN = ("id", "type", "holder", "fence", "retry_count", "lease_acquired_at", "heartbeat_at")
EVERY_SECONDS_MIN = 0.1
# What is finished is counted only when asked for; only then has it columns.
LIVE_STATUSES = ("pending", "in_progress")


def top(
    url: Url = None,
    namespace: Namespace = None,
    every_seconds: Annotated[
        float, typer.Option("--every", metavar="SECONDS", help="How often to look.")
    ] = 1,
    finished: Annotated[
        bool, typer.Option("--finished", help="Count finished items too, which reads them all.")
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="Look once, and end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what is waiting and running, and the state of leases, live. Ctrl-C ends it."""
    if every_seconds < EVERY_SECONDS_MIN:
        raise InvalidArgument(
            f"--every must be {EVERY_SECONDS_MIN:g} or more, not {every_seconds:g}"
        )
    with store.open(url, namespace=namespace, mode="read") as opened:
        if as_json:
            print_json(look(opened, finished=finished))
        elif once or not sys.stdout.isatty():
            console().print(_picture(look(opened, finished=finished)))
        else:
            _live(opened, every_seconds, finished=finished)


def look(opened: store.Store, *, finished: bool) -> dict[str, Any]:
    """Return the counts by type, the leases, and some of the items that run."""
    running = opened.work.list(status="in_progress", limit=RUNNING_MAX)
    return {
        "at": iso(opened.now_ms()),
        "statuses": WORK_STATUSES if finished else LIVE_STATUSES,
        "counts": [asdict(count) for count in opened.work.counts(finished=finished)],
        "leases": asdict(opened.work.health()),
        "running": [{name: item_data(item).get(name) for name in SHOWN} for item in running],
    }


def _live(opened: store.Store, every_seconds: float, *, finished: bool) -> None:
    from rich.live import Live
    from rich.text import Text

    shown: RenderableType = _picture(look(opened, finished=finished))
    with Live(shown, console=console(), auto_refresh=False, screen=True) as live:
        while True:
            live.update(shown, refresh=True)
            time.sleep(every_seconds)
            try:
                shown = _picture(look(opened, finished=finished))
            except StoreError as error:
                if not _passes(error):
                    raise
                shown = Text(f"{error}\n\nLooking again …", style="red")


def _passes(error: HoldfastError) -> bool:
    return error.exit_code == StoreError.exit_code


def _picture(seen: dict[str, Any]) -> Group:
    from rich.console import Group
    from rich.text import Text

    leases = seen["leases"]
    line = (
        f"{seen['at']}   {leases['active']:,} running, {leases['stale']:,} stale, "
        f"{leases['expired']:,} expired, {leases['cancelling']:,} asked to stop, "
        f"oldest heartbeat {leases['longest_heartbeat_seconds']:.1f} s ago"
    )
    return Group(Text(line, style="bold"), Text(), _counts(seen), Text(), _running(seen))


def _counts(seen: dict[str, Any]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    by_type: dict[str, dict[str, Any]] = {}
    for count in seen["counts"]:
        by_type.setdefault(count["type"], {})[count["status"]] = count
    table = Table("type", box=None, pad_edge=False, header_style="bold")
    for status in seen["statuses"]:
        table.add_column(status, justify="right")
    table.add_column("oldest pending", justify="right")
    for name, counts in sorted(by_type.items()):
        numbers = [f"{counts[s]['items']:,}" if s in counts else "-" for s in seen["statuses"]]
        age = counts.get("pending", {}).get("oldest_age_seconds")
        oldest = "-" if age is None else f"{age:,.0f} s"
        table.add_row(Text(text_of(name)), *numbers, oldest)
    return table if by_type else Text("Nothing is waiting or running.")


def _running(seen: dict[str, Any]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in SHOWN:
        table.add_column(name.replace("_", " "), no_wrap=True)
    for item in seen["running"]:
        table.add_row(*(Text(text_of(item[name])) for name in SHOWN))
    return table if seen["running"] else Text()
