"""The options that the commands share."""

from __future__ import annotations

from typing import Annotated

import typer

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
        metavar="SESSION", help="The session's id; 8 characters or more of it if no other has them."
    ),
]
Version = Annotated[int, typer.Argument(metavar="VERSION", help="The number of a checkpoint.")]
Limit = Annotated[int, typer.Option("--limit", metavar="N", help="Show at most so many.")]
