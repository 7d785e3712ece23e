"""The options that the commands share."""

from __future__ import annotations

import os
import pkgutil
import sys
from typing import Annotated, Any

import typer

from ..effects import Tool
from ..errors import InvalidArgument
from .completion import session_ids

Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="sqlite:///file.db or postgresql://user@host/database.",
        show_default="$HOLDFAST_URL, else sqlite:///holdfast.db",
    ),
]
Namespace = Annotated[
    str | None,
    typer.Option("--namespace", metavar="NAME", help="PostgreSQL schema, or prefix of the file."),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print JSON, for scripts; errors too, on stderr.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask first.")]
SessionId = Annotated[
    str,
    typer.Argument(
        metavar="SESSION",
        help="The session's id; 8 characters or more of it if no other has them.",
        autocompletion=session_ids,
    ),
]
OfSession = Annotated[
    str | None,
    typer.Option(
        "--session",
        metavar="SESSION",
        help="Only those of a session.",
        autocompletion=session_ids,
    ),
]
Version = Annotated[int, typer.Argument(metavar="VERSION", help="The number of a checkpoint.")]
Limit = Annotated[int, typer.Option("--limit", metavar="N", help="Show at most so many.")]
Tools = Annotated[
    list[str] | None,
    typer.Option(
        "--tools",
        metavar="MODULE:NAME",
        help="Where the tool is: a tool, a list of tools, or a module of them. It is imported.",
        show_default=False,
    ),
]


def named_tools(names: list[str] | None) -> list[Tool[..., Any]]:
    """Import the tools that --tools names."""
    return [tool for name in names or [] for tool in _tools_of(name)]


def _tools_of(name: str) -> list[Tool[..., Any]]:
    try:
        found = imported(name)
    except Exception as error:
        raise InvalidArgument(
            f"--tools {name}: {cause(error)}; name a tool as MODULE:NAME, importable from here"
        ) from error
    values = found if isinstance(found, list | tuple) else [found]
    if isinstance(found, type(sys)):
        values = list(vars(found).values())
    tools = [value for value in values if isinstance(value, Tool)]
    if not tools:
        raise InvalidArgument(f"--tools {name}: there is no tool; @holdfast.tool makes one")
    return tools


def imported(name: str) -> Any:
    """Import what the command line names, from the working directory too; it may fail anyhow."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return pkgutil.resolve_name(name)


def cause(error: Exception) -> str:
    """Say what went wrong in somebody's own code."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
