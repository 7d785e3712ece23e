"""What the commands share: options, opening the store, showing the answer, errors, questions."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import pkgutil
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from .. import store
from ..codec import from_json, to_json
from ..effects import Tool
from ..errors import HoldfastError, InvalidArgument, InvalidValue, SessionEnded, SessionNotFound
from ..kernel.flow import is_async
from .output import Columns, print_json, show, table, with_place

if TYPE_CHECKING:
    from rich.console import RenderableType

F = TypeVar("F", bound=Callable[..., Any])
Mode = Literal["read", "write"]
Offers = Iterable[tuple[str, str]]

OFFERED_MAX = 1_000
# Longer than any first sentence.
SENTENCE_CHARACTERS_MAX = 400
OPEN: dict[Mode, dict[str, Any]] = {
    "read": {"mode": "read"},
    "write": {"migrate": False},
}


def option(metavar: str, help: str, *names: str, offers: Any = None, **more: Any) -> Any:
    """Return an option that takes a value; the shell completes it from `offers`."""
    complete = (lambda: list(offers)) if isinstance(offers, Sequence) else offers
    return typer.Option(*names, metavar=metavar, help=help, autocompletion=complete, **more)


def argument(metavar: str, help: str, offers: Any = None, **more: Any) -> Any:
    """Return an argument of a command."""
    return typer.Argument(metavar=metavar, help=help, autocompletion=offers, **more)


def require_file(path: Path | None) -> Path | None:
    """Refuse `-`, which elsewhere stands for a standard stream, as the name of a file."""
    if str(path) == "-":
        raise InvalidArgument("- is no file here: this command cannot use a standard stream")
    return path


def flag(name: str, help: str, *short: str) -> Any:
    """Return an option that takes no value."""
    return typer.Option(name, *short, help=help)


def read_json(text: str, name: str) -> Any:
    """Return the value of a JSON text; `-` reads it from stdin."""
    try:
        return from_json(sys.stdin.read() if text == "-" else text, name=name)
    except InvalidValue as error:
        if not text[:1].isalpha():
            raise
        quoted = shlex.quote(to_json(text))
        raise InvalidValue(f"{error} A string needs its quotes: {quoted}", path=name) from None


def _completion(read: Callable[[store.Store], Offers]) -> Callable[[typer.Context], Offers]:
    """Return a completion from the store that the line names; nothing where it cannot be read."""

    def complete(ctx: typer.Context) -> Offers:
        url, namespace = ctx.params.get("url"), ctx.params.get("namespace")
        try:
            with store.open(url, namespace=namespace, mode="read") as opened:
                return list(read(opened))
        except HoldfastError:
            return []

    return complete


def numbered(
    metavar: str, help: str, read: Callable[[store.Store], Iterable[Any]], *about: str
) -> Any:
    """Return the argument for one of a list: it offers numbers, and ids once one has been begun.

    `about` are the fields that describe each.
    """

    def offered(opened: store.Store) -> Offers:
        for each in read(opened):
            described = ", ".join(str(getattr(each, name)) for name in about)
            yield f"{each.number} {each.id}", described

    def complete(ctx: typer.Context, incomplete: str) -> Offers:
        for both, described in _completion(offered)(ctx):
            number, _, id = both.partition(" ")
            yield number, described
            if incomplete:
                yield id, described

    return argument(metavar, help, complete)


session_ids = _completion(
    lambda opened: [
        (each.id, each.name or each.status) for each in opened.sessions(limit=OFFERED_MAX)
    ]
)

Url = Annotated[
    str | None,
    option(
        "URL",
        "sqlite:///file.db, postgresql://user@host/database, or https://… of a server, whose "
        "token is in $HOLDFAST_TOKEN.",
        show_default="$HOLDFAST_URL, else sqlite:///holdfast.db",
    ),
]
DatabaseUrl = Annotated[
    str | None,
    option(
        "URL",
        "sqlite:///file.db or postgresql://user@host/database.",
        show_default="$HOLDFAST_URL, else sqlite:///holdfast.db",
    ),
]
Namespace = Annotated[str | None, option("NAME", "PostgreSQL schema, or prefix of the file.")]
AsJson = Annotated[bool, flag("--json", "Print JSON, for scripts; errors too, on stderr.")]
Yes = Annotated[bool, flag("--yes", "Do not ask for confirmation.", "-y")]
SessionId = Annotated[
    str,
    argument(
        "SESSION",
        "The session's id, or the first 8 or more characters of it, if unique.",
        session_ids,
    ),
]
OfSession = Annotated[
    str | None, option("SESSION", "Only those of this session.", offers=session_ids)
]
OfTree = Annotated[
    str | None, option("SESSION", "Only those of this session's tree.", offers=session_ids)
]
Version = Annotated[int, argument("VERSION", "The number of a checkpoint.")]
After = Annotated[int, option("NUMBER", "Continue after this number.")]
Limit = Annotated[int, option("N", "Show at most this many.")]
Tools = Annotated[
    list[str] | None,
    option(
        "MODULE:NAME",
        "A tool, a list of tools, or a module of tools to import.",
        show_default=False,
    ),
]
SHARED: dict[str, tuple[Any, object]] = {
    "namespace": (Namespace, None),
    "as_json": (AsJson, False),
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command returns: data for --json, and text or what is to be printed for people."""

    data: object
    shown: str | Callable[[], Iterable[str | RenderableType]]
    exit_code: int = 0


def id_of(store: store.Store, session: str | None) -> str | None:
    """Return the id of the session that an option names, if it is given."""
    return None if session is None else store.find_session(session).id


def root_of(store: store.Store, session: str | None) -> str | None:
    """Return the id of the root of the session that an option names, if it is given."""
    return None if session is None else store.find_session(session).root_id


def known_id(store: store.Store, session: str | None, *, of_root: bool = False) -> str | None:
    """Return the id of a session, or of its root; one that is gone is known by its whole id."""
    try:
        return root_of(store, session) if of_root else id_of(store, session)
    except SessionNotFound:
        return session


def page(
    name: str,
    found: Sequence[Any],
    to_data: Callable[[Any], dict[str, Any]],
    columns: Columns,
    *,
    limit: int,
    more: str = "after",
    position: str = "number",
    **options: Any,
) -> Answer:
    """Return a page of a list; a full one says where the next begins."""
    last = getattr(found[-1], position) if len(found) == limit else None

    def shown() -> Iterator[str | RenderableType]:
        yield table(found, columns, **options)
        if last is not None:
            yield f"\nThere may be more: --{more} {shlex.quote(str(last))}"

    return Answer({name: list(map(to_data, found)), f"next_{more}": last}, shown)


class Command(TyperCommand):
    """Shows a command's answer; its messages name options and repeat the store that was given."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the usage line's parts, arguments as plain as `SESSION` or `[SESSION]...`."""
        parameters: list[Any] = list(self.params)
        arguments = [each for each in parameters if each.param_type_name == "argument"]
        return ["[OPTIONS]", *(each.metavar or each.human_readable_name for each in arguments)]

    def invoke(self, ctx: Any) -> None:
        """Run the command and show its answer."""
        place = ctx.params.get("url"), ctx.params.get("namespace")
        try:
            answer = super().invoke(ctx)
        except HoldfastError as error:
            error.args = (with_place(in_options(error, self.params), *place),)
            raise
        if ctx.params["as_json"]:
            # What was printed line by line has no end of its own.
            if answer.data is not None:
                print_json(answer.data)
        else:
            parts = [answer.shown] if isinstance(answer.shown, str) else answer.shown()
            for part in parts:
                show(with_place(part, *place) if isinstance(part, str) else part)
        if answer.exit_code:
            raise typer.Exit(answer.exit_code)


def in_options(error: HoldfastError, parameters: Sequence[Any]) -> str:
    """Return the message of an error with options where it names arguments of Python."""
    text = str(error)
    for parameter in parameters:
        name, shown = parameter.name.rstrip("_"), max(parameter.opts, key=len)
        if not shown.startswith("-"):
            shown = (parameter.metavar or name.upper()).strip("[].")
        if isinstance(error, InvalidArgument):
            text = re.sub(rf"^{name}(?=( '[^']*')? must\b)", shown, text)
        text = re.sub(rf"\b{name}=True\b( \({shown}\))?", shown, text)
    if isinstance(error, SessionEnded):
        command = f"`holdfast sessions reopen {error.fields['session_id']}` makes it active again"
        text = text.replace("open it with reopen=True to continue", command)
    return text


class Group(TyperGroup):
    """A group whose help tells each command's whole first sentence, in several lines if needed."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands with what each does."""
        found = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        told = {name: each for name, each in found.items() if each and not each.hidden}
        with formatter.section("Commands"):
            sentences = [
                (name, each.get_short_help_str(SENTENCE_CHARACTERS_MAX))
                for name, each in told.items()
            ]
            formatter.write_dl(sentences)


class Commands(typer.Typer):
    """A set of commands that shows its help if none is named."""

    def __init__(self, help: str, *, cls: type[Group] = Group, **options: Any) -> None:
        super().__init__(help=help, rich_markup_mode=None, cls=cls, **options)
        if not options:
            self.callback(invoke_without_command=True)(show_help)

    def command(
        self,
        name: str | None = None,
        *,
        mode: Mode | None = None,
        url: Any = Url,
        **options: Any,
    ) -> Callable[[F], F]:
        """Return a decorator that adds a command.

        With a mode, the function gets the open store first. The shared options are added to its
        own; it gets those that it declares. `url` is DatabaseUrl if a server cannot do it.
        """

        def add(function: F) -> F:
            add_command = super(Commands, self).command(name, cls=Command, **options)
            add_command(_with_shared_options(function, mode, url))
            return function

        return add


def _with_shared_options(
    function: Callable[..., Any], mode: Mode | None, url: Any
) -> Callable[..., Any]:
    hints = get_type_hints(function, include_extras=True)
    declared = list(inspect.signature(function).parameters.values())[1 if mode else 0 :]
    own = {each.name: each.replace(annotation=hints[each.name]) for each in declared}
    shared = {
        name: inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
        )
        for name, (annotation, default) in {**SHARED, "url": (url, None)}.items()
        if (mode or name == "as_json") and name not in own
    }

    @functools.wraps(function)
    def command(**given: Any) -> Any:
        arguments = {name: given[name] for name in own}
        if mode is None:
            return function(**arguments)
        with store.open(given["url"], namespace=given["namespace"], **OPEN[mode]) as opened:
            return function(opened, **arguments)

    parameters = [
        each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (own | shared).values()
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def show_help(context: typer.Context) -> None:
    """Show the help of a group that was called without a command."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


def confirm(question: str, *, yes: bool) -> None:
    """Go on only if a person says so, on stderr; without a terminal --yes is needed."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidArgument(f"{question} This is not a terminal; pass --yes")
    if not typer.confirm(question, err=True):
        typer.echo("Nothing was changed.", err=True)
        raise typer.Exit(1)


def named_tools(names: list[str] | None) -> list[Tool[..., Any]]:
    """Import the tools that --tools names."""
    return [tool for name in names or [] for tool in _tools_of(name)]


def run_hooks(
    opened: store.Store,
    url: str | None,
    namespace: str | None,
    hooks: Iterable[Callable[..., Any] | None],
    run: Callable[[Any], Any],
) -> Any:
    """Return what `run` returns for the store; if a hook is async, for an async store."""
    if not any(hook is not None and is_async(hook) for hook in hooks):
        return run(opened)

    async def run_async() -> Any:
        async with store.aopen(url, namespace=namespace, **OPEN["write"]) as other:
            return await run(other)

    return asyncio.run(run_async())


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
        raise InvalidArgument(f"--tools {name}: no tool found; @holdfast.tool makes one")
    return tools


def imported(name: str) -> Any:
    """Import what the command line names, from the working directory too; it may raise anything."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return pkgutil.resolve_name(name)


def takes_nothing(function: Callable[..., Any]) -> bool:
    """Whether a function can be called without arguments."""
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        return False
    return True


def cause(error: BaseException) -> str:
    """Return the type and message of an error in user code."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
