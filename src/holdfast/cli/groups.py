"""Commands that have commands of their own, and the question before one that destroys."""

from __future__ import annotations

import sys

import typer

from ..errors import InvalidArgument


def group(help: str) -> typer.Typer:
    """Return a group of commands that shows its help if none is named."""
    made = typer.Typer(help=help, rich_markup_mode=None)

    @made.callback(invoke_without_command=True)
    def _show_help(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            typer.echo(context.get_help())
            raise typer.Exit(2)

    return made


def confirm(question: str, *, yes: bool) -> None:
    """Go on only if a person says so, on stderr; where nobody can answer, --yes is needed."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidArgument(f"{question} Nobody can answer here; say --yes")
    if not typer.confirm(question, err=True):
        typer.echo("Nothing was changed.", err=True)
        raise typer.Exit(1)
