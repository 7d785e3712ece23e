"""The commands put together, and how every one of them ends."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import traceback
from collections.abc import Sequence
from functools import cache
from pkgutil import resolve_name
from typing import Annotated, Any, TypeGuard

import typer

from .. import __version__
from ..errors import HoldfastError
from . import INTERRUPTED, bench, demo, discard_output, explore, mcp, output, serve, store, transfer
from .command import Commands, DatabaseUrl, Group, show_help

WIDTH_OF_CLICK_MIN = 50
KINDS_OF_PYTHON = {"int": "a whole number", "float": "a number"}
# How writing to the standard output fails. A file of our own that cannot be written is named.
UNWRITABLE = {errno.EBADF, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC}

# The modules of each group's commands; the first of them holds the group.
GROUPS = {
    "sessions": ["sessions"],
    "checkpoints": ["checkpoints"],
    "effects": ["effects"],
    "state": ["state"],
    "feed": ["feed"],
    "spend": ["spend"],
    "work": ["work", "worker", "worktop"],
    "peers": ["peers"],
    "agent": ["agent"],
    "approvals": ["approvals"],
    "tokens": ["tokens"],
    "audit": ["audit"],
    "explorations": ["explorations"],
}


class Root(Group):
    """Imports and builds a group when it is named, which is most of what a short command costs."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands: dict[str, Any] = {**self.commands, **dict.fromkeys(GROUPS)}

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command or the group of a name, if there is one."""
        return _group(cmd_name) if cmd_name in GROUPS else self.commands.get(cmd_name)


@cache
def _group(name: str) -> Any:
    modules = [resolve_name(f"{__package__}.{module}") for module in GROUPS[name]]
    group = typer.main.get_group(modules[0].app)
    group.name = name
    return group


app = Commands(
    "Durable state for AI agents: manage a store on SQLite or PostgreSQL.",
    name="holdfast",
    cls=Root,
)
for function in (
    store.migrate, store.doctor, demo.demo, serve.serve, mcp.mcp, explore.explore,
):  # fmt: skip
    app.command()(function)
app.command(mode="read", url=DatabaseUrl)(store.backup)
app.command(mode="write")(store.prune)
app.command("export")(transfer.export_file)
app.command("import")(transfer.import_file)
app.command()(bench.bench)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"holdfast {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _holdfast(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Show the traceback of an error, as HOLDFAST_DEBUG=1 does."),
    ] = False,
) -> None:
    show_help(context)


def _narrow_width() -> int | None:
    """Return the width of help in a terminal for which click's least width is too much."""
    columns = shutil.get_terminal_size().columns
    return columns - 2 if columns < WIDTH_OF_CLICK_MIN + 2 else None


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; an error is one sentence on stderr."""
    try:
        code = typer.main.get_command(app).main(
            list(arguments),
            prog_name="holdfast",
            standalone_mode=False,
            terminal_width=_narrow_width(),
        )
        sys.stdout.flush()
        return int(code or 0)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        raise
    except Exception as error:
        if "--debug" in arguments or os.environ.get("HOLDFAST_DEBUG", "0") != "0":
            traceback.print_exc()
        # Where nobody can be told, the exit code still tells.
        with contextlib.suppress(OSError):
            output.fail(described(error), as_json="--json" in arguments)
        if _is_of_output(error):
            discard_output()
        return int(getattr(error, "exit_code", 1))


def _is_of_output(error: Exception) -> TypeGuard[OSError]:
    is_unnamed = isinstance(error, OSError) and error.filename is None
    return is_unnamed and error.errno in UNWRITABLE  # type: ignore[attr-defined]


def described(error: Exception) -> dict[str, object]:
    """Return an error as plain data with its sentence: ours, wrong use, or one nobody foresaw."""
    if isinstance(error, HoldfastError):
        return error.to_dict()
    name, message = type(error).__name__, str(error)
    if _is_of_output(error):
        message = f"cannot write the output: {error.strerror}"
    elif wrong_use := getattr(error, "format_message", None):
        command = getattr(getattr(error, "ctx", None), "command_path", "holdfast")
        told = str(wrong_use()).rstrip(".")
        for python, kind in KINDS_OF_PYTHON.items():
            told = told.replace(f"is not a valid {python}", f"is not {kind}")
        told += " See" if told.endswith("?") else "; see"
        message = f"{told} `{command} --help`"
    else:
        message = f"{name}: {message}; this is a bug, and HOLDFAST_DEBUG=1 shows the traceback"
    return {"error": name, "message": message}
