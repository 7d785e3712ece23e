"""What people and scripts see: text and tables in colour, or JSON."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from rich.console import Console

# Output that goes to a file or a pipe is not wrapped, so that it can be searched line by line.
WIDTH_UNWRAPPED = 10_000
# Controls beyond ASCII, which JSON does not escape, and what turns the direction of text.
_COMMANDING = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")
# A command in backticks is one word: a suggestion that is wrapped cannot be copied.
SUGGESTED = re.compile(r"(?:`|^  )holdfast [a-z][^`\n]*", re.MULTILINE)
WORDS = re.compile(r"`[^`]*`\S*|\S+")


def console(*, stderr: bool = False) -> Console:
    """Return a console for stdout or stderr; it is plain where there is no terminal."""
    from rich.console import Console

    is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    width = None if is_terminal else WIDTH_UNWRAPPED
    return Console(stderr=stderr, width=width, highlight=False, soft_wrap=not is_terminal)


def print_json(value: object) -> None:
    """Print a value as JSON on stdout."""
    print(_json(value, indent=2))


def _json(value: object, indent: int | None = None) -> str:
    """Return JSON that a terminal can show: control and direction characters stand escaped."""
    text = json.dumps(value, indent=indent, ensure_ascii=False, default=str)
    return _COMMANDING.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def fail(error: Mapping[str, object], *, as_json: bool) -> None:
    """Print an error on stderr: its sentence, or all of it as one line of JSON."""
    if as_json:
        print(_json(error), file=sys.stderr)
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
    if url is not None and (urlsplit(url).password or "password=" in url):
        url = "URL"
    given = {"url": url, "namespace": namespace}
    options = "".join(f" --{name} {shlex.quote(each)}" for name, each in given.items() if each)
    return SUGGESTED.sub(lambda found: found[0] + options, text)


def wrapped(text: str, width: int, indent: int = 0) -> str:
    """Return text in lines of this width, the later ones indented; commands stay whole.

    Lines that begin with a space are kept as they are.
    """
    lines: list[str] = []
    for line in text.split("\n"):
        if line.startswith(" "):
            lines.append(line)
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
