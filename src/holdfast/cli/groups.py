"""What all commands have in common: groups, errors in their own words, and asking first."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand

from ..errors import HoldfastError, InvalidArgument, SessionEnded
from .output import with_place

F = TypeVar("F", bound=Callable[..., Any])


class Command(TyperCommand):
    """A command whose errors name its options and repeat the store that it was given."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the usage line's parts, arguments as plain as `SESSION` or `[SESSION]...`."""
        parameters: list[Any] = list(self.params)
        arguments = [each for each in parameters if each.param_type_name == "argument"]
        return ["[OPTIONS]", *(each.metavar or each.human_readable_name for each in arguments)]

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except HoldfastError as error:
            text = in_options(error, self.params)
            error.args = (with_place(text, ctx.params.get("url"), ctx.params.get("namespace")),)
            raise


def in_options(error: HoldfastError, parameters: Sequence[Any]) -> str:
    """Return the message of an error with options where it names arguments of Python."""
    text = str(error)
    for parameter in parameters:
        name, option = parameter.name.rstrip("_"), max(parameter.opts, key=len)
        shown = (
            option if option.startswith("-") else (parameter.metavar or name.upper()).strip("[].")
        )
        if isinstance(error, InvalidArgument):
            text = re.sub(rf"^{name}(?=( '[^']*')? must\b)", shown, text)
        text = re.sub(rf"\b{name}=True\b", shown, text)
    if isinstance(error, SessionEnded):
        command = f"`holdfast sessions reopen {error.fields['session_id']}` makes it active again"
        text = text.replace("open it with reopen=True to go on", command)
    return text


class Commands(typer.Typer):
    """A set of commands."""

    def command(self, name: str | None = None, **options: Any) -> Callable[[F], F]:
        """Return a decorator that adds a command."""
        return super().command(name, cls=Command, **options)


def group(help: str) -> Commands:
    """Return a group of commands that shows its help if none is named."""
    made = Commands(help=help, rich_markup_mode=None)

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
        raise InvalidArgument(f"{question} This is not a terminal; pass --yes")
    if not typer.confirm(question, err=True):
        typer.echo("Nothing was changed.", err=True)
        raise typer.Exit(1)
