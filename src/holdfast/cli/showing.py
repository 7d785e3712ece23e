"""Sessions and checkpoints as JSON with ISO times, and as lines of a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..checkpoints.diff import brief, printable
from ..clock import SystemClock, iso
from ..codec import to_json
from ..errors import CorruptRecord
from ..items import WorkItem
from ..records import Checkpoint, Effect, SessionInfo
from ..words import ago
from .output import console, wrapped

if TYPE_CHECKING:
    from rich.table import Table

# Between two columns.
GAP = 2
WIDTH_MIN = 8
# The time of a sortable id: what comes later in the same millisecond is told apart by more.
SHORT_ID_MIN = 13


def session_data(info: SessionInfo) -> dict[str, Any]:
    """Return a session as JSON data."""
    return with_iso_times({**asdict(info), "activity": info.activity})


def checkpoint_data(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return a checkpoint as JSON data."""
    return with_iso_times(asdict(checkpoint))


def effect_data(effect: Effect) -> dict[str, Any]:
    """Return an effect as JSON data."""
    return with_iso_times(asdict(effect))


def item_data(item: WorkItem[Any]) -> dict[str, Any]:
    """Return a work item as JSON data; if a part of it is damaged, its row and the damage."""
    try:
        return with_iso_times(item.to_dict())
    except CorruptRecord as error:
        names = ("id", "number", "type", "queue", "status", "holder", "fence", "updated_at")
        fields = {name: getattr(item, name) for name in names}
        return with_iso_times({**fields, "damaged": str(error)})


def with_iso_times(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields with their times as text."""
    return {
        name: iso(value) if name.endswith("_at") and value is not None else value
        for name, value in fields.items()
    }


def show_table(
    headings: Sequence[str],
    lines: Iterable[Sequence[object]],
    *,
    drop: Sequence[str] = (),
    shorten: str = "",
    empty: str = "",
) -> None:
    """Print a table, or what to say if it has no lines.

    Where it is too wide, the columns in `drop` are left out, in this order, and then the ids in
    the column `shorten` are cut to what tells them apart.
    """
    out = console()
    found = list(lines)
    if empty and not found:
        say(empty)
    else:
        out.print(table_of(headings, found, drop=drop, width=out.width, shorten=shorten))


def table_of(
    headings: Sequence[str],
    lines: Iterable[Sequence[object]],
    *,
    drop: Sequence[str],
    width: int,
    shorten: str = "",
) -> Table:
    """Return a table of this width, a line for each row; the widest column is cut if need be.

    What is stored can neither style it nor command the terminal.
    """
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    cells = [list(headings), *([text_of(value) for value in line] for line in lines)]
    widths = {name: max(map(cell_len, column)) for name, *column in _columns(cells)}
    spare = width - sum(widths.values()) - GAP * (len(widths) - 1)
    for name in drop:
        if spare < 0:
            spare += widths.pop(name) + GAP
    if spare < 0 and shorten in widths:
        column = headings.index(shorten)
        short = _short_ids([line[column] for line in cells[1:]])
        for line, id in zip(cells[1:], short, strict=True):
            line[column] = id
        spare += widths[shorten]
        widths[shorten] = max(map(cell_len, (shorten, *short)))
        spare -= widths[shorten]
    if spare < 0:
        widest = max(widths, key=widths.__getitem__)
        widths[widest] = max(WIDTH_MIN, widths[widest] + spare)
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for name, most in widths.items():
        table.add_column(name, no_wrap=True, overflow="ellipsis", max_width=most)
    shown = [index for index, name in enumerate(headings) if name in widths]
    for line in cells[1:]:
        table.add_row(*(Text(line[index]) for index in shown))
    return table


def _short_ids(ids: Sequence[str]) -> list[str]:
    """Return as much of each id as tells it from the others, and as commands take it."""
    length = SHORT_ID_MIN
    while len({id[:length] for id in ids}) < len(set(ids)):
        length += 1
    return [id[:length] for id in ids]


def _columns(cells: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Return the columns of a table, each behind its name."""
    return [(column[0], *column) for column in zip(*cells, strict=True)]


def when(at_ms: int | None) -> str | None:
    """Return a time for a table: "12 s ago" for people, ISO for files and pipes."""
    if at_ms is None:
        return None
    return ago(at_ms, SystemClock().now_ms()) if console().is_terminal else iso(at_ms)


def show_fields(fields: dict[str, Any]) -> None:
    """Print names with their values, one a line."""
    from rich.table import Column, Table
    from rich.text import Text

    table = Table.grid(Column(style="bold"), Column(overflow="fold"), padding=(0, 2))
    for name, value in fields.items():
        table.add_row(name.replace("_", " "), Text(text_of(value)))
    console().print(table)


def text_of(value: object) -> str:
    """Return a value as it is shown in a table."""
    if value is None:
        return "-"
    return printable(value) if isinstance(value, str) else brief(value)


def show_json(value: object) -> None:
    """Print a value as JSON to read, which cannot command the terminal either."""
    lines = to_json(value, indent=2).splitlines()
    console().print("\n".join(map(printable, lines)), markup=False)


def say(text: str) -> None:
    """Print sentences, wrapped at words; commands stay whole."""
    out = console()
    out.print(wrapped(text, out.width), markup=False, soft_wrap=True)
