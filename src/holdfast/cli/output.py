"""What people and scripts see: sentences, tables and values on a terminal, or JSON."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..checkpoints.diff import brief, printable
from ..clock import SystemClock, iso
from ..codec import to_json
from ..errors import COMMANDING
from ..formatting import ago
from ..kernel.url import redact

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

# What the columns of a table show: an attribute, or what a function returns.
Columns = Mapping[str, str | Callable[[Any], object]]

# Between two columns.
GAP = 2
WIDTH_MIN = 8
# The time of a sortable id: what comes later in the same millisecond is told apart by more.
SHORT_ID_MIN = 13

# Output that goes to a file or a pipe is not wrapped, so that it can be searched line by line.
WIDTH_UNWRAPPED = 10_000
# A command in backticks is one word: a suggestion that is wrapped cannot be copied.
SUGGESTED = re.compile(r"(?:`|^  )holdfast [a-z][^`\n]*", re.MULTILINE)
WORDS = re.compile(r"`[^`]*`\S*|\S+")


def console(*, stderr: bool = False) -> Console:
    """Return a console for stdout or stderr; it is plain where there is no terminal."""
    from rich.console import Console

    is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    width = None if is_terminal else WIDTH_UNWRAPPED
    return Console(stderr=stderr, width=width, highlight=False, soft_wrap=not is_terminal)


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on stderr, if that is a terminal, and yield what moves it."""
    from rich.progress import Progress

    errors = console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as shown:
        task = shown.add_task(what, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)


def print_json(value: object) -> None:
    """Print a value as JSON on stdout."""
    print(json_line(value, indent=2))


def json_line(value: object, indent: int | None = None) -> str:
    """Return JSON that a terminal can show: control and direction characters stand escaped."""
    text = json.dumps(value, indent=indent, ensure_ascii=False, default=str)
    return COMMANDING.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def fail(error: Mapping[str, object], *, as_json: bool) -> None:
    """Print an error on stderr: its sentence, or all of it as one line of JSON."""
    if as_json:
        print(json_line(error), file=sys.stderr)
        return
    from rich.text import Text

    out = console(stderr=True)
    text = Text(wrapped(f"Error: {error['message']}", out.width))
    text.stylize("bold red", 0, len("Error:"))
    out.print(text, soft_wrap=True)


def with_place(text: str, url: str | None, namespace: str | None) -> str:
    """Return text whose suggested commands name the store that this one was given.

    A URL with a password is not repeated.
    """
    if url is not None and redact(url).replace("***", "") != url:
        url = "URL"
    given = {"url": url, "namespace": namespace}
    options = "".join(f" --{name} {shlex.quote(each)}" for name, each in given.items() if each)
    return SUGGESTED.sub(lambda found: found[0] + options, text)


def wrapped(text: str, width: int, indent: int = 0) -> str:
    """Return text in lines of this width, the later ones indented; commands stay whole.

    A line that begins with spaces is kept as it is, unless it is too long.
    """
    lines: list[str] = []
    for line in text.split("\n"):
        if line.startswith(" "):
            own = len(line) - len(line.lstrip())
            is_kept = len(line) <= width or SUGGESTED.match(line)
            lines.append(line if is_kept else " " * own + wrapped(line[own:], width, own))
            continue
        filled = ""
        for word in WORDS.findall(line):
            if filled and len(filled) + 1 + len(word) > width - indent:
                lines.append(filled)
                filled = word
            else:
                filled = f"{filled} {word}" if filled else word
        lines.append(filled)
    return f"\n{' ' * indent}".join(lines)


def show(part: str | RenderableType) -> None:
    """Print a part of an answer: sentences wrapped at words with commands whole, or the rest."""
    from rich.text import Text

    out = console()
    if isinstance(part, str):
        part = Text(wrapped(part, out.width))
    out.print(part, soft_wrap=isinstance(part, Text))


def data(record: Any) -> dict[str, Any]:
    """Return a record as JSON data with ISO times."""
    return with_iso_times(asdict(record))


def with_iso_times(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields with their times as text."""
    return {
        name: iso(value) if name.endswith("_at") and value is not None else value
        for name, value in fields.items()
    }


def when(at_ms: int | None) -> str | None:
    """Return a time for a table: "12 s ago" for people, ISO for files and pipes."""
    if at_ms is None:
        return None
    return ago(at_ms, SystemClock().now_ms()) if console().is_terminal else iso(at_ms)


def text_of(value: object) -> str:
    """Return a value as it is shown in a table."""
    if value is None:
        return "-"
    return printable(value) if isinstance(value, str) else brief(value)


def table(
    rows: Iterable[Any],
    columns: Columns,
    *,
    drop: Sequence[str] = (),
    shorten: str = "",
    empty: str = "",
) -> str | RenderableType:
    """Return records as a table, a line each, or `empty` if there are none.

    In a narrow terminal the columns in `drop` are left out, in this order; then the ids in the
    column `shorten` are cut to what tells them apart; then the widest columns are cut, to one
    width. Stored text can neither style the table nor command the terminal.
    """
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    found = list(rows)
    if empty and not found:
        return empty
    cells = {
        name: [text_of(_cell(row, source)) for row in found] for name, source in columns.items()
    }
    widths = {name: max(map(cell_len, (name, *column))) for name, column in cells.items()}
    spare = console().width - sum(widths.values()) - GAP * (len(widths) - 1)
    for name in drop:
        if spare < 0:
            spare += widths.pop(name) + GAP
    if spare < 0 and shorten in widths:
        cells[shorten] = _short_ids(cells[shorten])
        spare += widths[shorten]
        widths[shorten] = max(map(cell_len, (shorten, *cells[shorten])))
        spare -= widths[shorten]
    # Ids come last: what is cut from them does not tell them apart any more.
    spare = _cut(widths, [name for name in widths if name != shorten] or [shorten], spare)
    _cut(widths, list(widths), spare)
    made = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for name, most in widths.items():
        made.add_column(name, no_wrap=True, overflow="ellipsis", max_width=most)
    for line in zip(*(cells[name] for name in widths), strict=True):
        made.add_row(*map(Text, line))
    return made


def _cut(widths: dict[str, int], names: Sequence[str], spare: int) -> int:
    """Make the widest of these columns narrower until all fit; return what room is left."""
    while spare < 0 and widths[widest := max(names, key=widths.__getitem__)] > WIDTH_MIN:
        widths[widest] -= 1
        spare += 1
    return spare


def _cell(row: Any, source: str | Callable[[Any], object]) -> object:
    if callable(source):
        return source(row)
    value = getattr(row, source)
    return when(value) if source.endswith("_at") else value


def _short_ids(ids: Sequence[str]) -> list[str]:
    """Return as much of each id as tells it from the others, and as commands take it."""
    length = SHORT_ID_MIN
    while len({id[:length] for id in ids}) < len(set(ids)):
        length += 1
    return [id[:length] for id in ids]


def fields(values: Mapping[str, object]) -> RenderableType:
    """Return names with their values, one a line."""
    from rich.table import Column, Table
    from rich.text import Text

    made = Table.grid(Column(style="bold"), Column(overflow="fold"), padding=(0, 2))
    for name, value in values.items():
        told = text_of(value) if value is None or isinstance(value, str) else to_json(value)
        made.add_row(name.replace("_", " "), Text(printable(told)))
    return made


def known(values: Mapping[str, object], *first: str) -> RenderableType:
    """Return a record for people: these fields first, and none that says nothing."""
    ordered = {name: values[name] for name in (*first, *values) if name in values}
    return fields({name: value for name, value in ordered.items() if value not in (None, [], {})})


def heading(text: str) -> RenderableType:
    """Return a line above what follows."""
    from rich.text import Text

    return Text(f"\n{text}:", style="bold")


def json_lines(value: object) -> RenderableType:
    """Return a value as JSON to read, which cannot command the terminal either."""
    return text_lines(to_json(value, indent=2))


def text_lines(text: str) -> RenderableType:
    """Return foreign text with its lines, which cannot command the terminal either."""
    from rich.text import Text

    return Text("\n".join(map(printable, text.split("\n"))))
