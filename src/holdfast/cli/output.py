"""What people and scripts see: text and tables in colour, or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

# Output that goes to a file or a pipe is not wrapped, so that it can be searched line by line.
WIDTH_UNWRAPPED = 10_000


def console(*, stderr: bool = False) -> Console:
    """Return a console for stdout or stderr; it is plain where there is no terminal."""
    from rich.console import Console

    is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    width = None if is_terminal else WIDTH_UNWRAPPED
    return Console(stderr=stderr, width=width, highlight=False, soft_wrap=not is_terminal)


def print_json(value: object) -> None:
    """Print a value as JSON on stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def fail(error: Mapping[str, object], *, as_json: bool) -> None:
    """Print an error on stderr: its sentence, or all of it as one line of JSON."""
    if as_json:
        print(json.dumps(error, ensure_ascii=False, default=str), file=sys.stderr)
        return
    from rich.text import Text

    text = Text("Error: ", style="bold red") + Text(str(error["message"]), style="default")
    console(stderr=True).print(text)
