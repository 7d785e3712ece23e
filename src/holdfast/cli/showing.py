"""Sessions and checkpoints as JSON with ISO times, and as lines of a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from ..checkpoints.diffing import brief, printable
from ..clock import iso
from ..codec import to_json
from ..errors import CorruptRecord
from ..records import Checkpoint, Effect, SessionInfo
from ..work import WorkItem
from .output import console


def session_data(info: SessionInfo) -> dict[str, Any]:
    """Return a session as JSON data."""
    return with_iso_times(asdict(info))


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


def show_table(headings: Sequence[str], lines: Iterable[Sequence[object]]) -> None:
    """Print a table; what is stored can neither style it nor command the terminal."""
    from rich.table import Table
    from rich.text import Text

    table = Table(*headings, box=None, pad_edge=False, header_style="bold")
    for line in lines:
        table.add_row(*(Text(text_of(value)) for value in line))
    console().print(table)


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
    """Print a sentence as it is."""
    console().print(text, markup=False)
