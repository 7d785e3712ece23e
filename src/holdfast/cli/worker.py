"""`holdfast work run`: a worker process for handlers that are named on the command line."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from .. import store
from ..arguments import shown
from ..errors import InvalidArgument
from ..kernel.flow import is_async
from ..worker import Handler, Worker
from . import INTERRUPTED
from .options import AsJson, Namespace, Url, cause, imported, named_tools
from .output import print_json
from .showing import say


def run(
    handlers: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:HANDLERS", help="A dict of type to function, or a function giving it."
        ),
    ],
    url: Url = None,
    namespace: Namespace = None,
    concurrency: Annotated[
        int, typer.Option("--concurrency", metavar="N", help="How many items run at once.")
    ] = 4,
    queues: Annotated[
        list[str] | None,
        typer.Option(
            "--queues",
            metavar="QUEUE,...",
            help="Which queues to serve.",
            show_default="those of the handlers' types",
        ),
    ] = None,
    lease_seconds: Annotated[
        float,
        typer.Option(
            "--lease", metavar="SECONDS", help="When a dead worker's items are taken over."
        ),
    ] = 30,
    poll_seconds: Annotated[
        float, typer.Option("--poll", metavar="SECONDS", help="How often to look, unless told.")
    ] = 1,
    sweep_seconds: Annotated[
        float, typer.Option("--sweep", metavar="SECONDS", help="How often to sweep.")
    ] = 10,
    prefetch: Annotated[
        int, typer.Option("--prefetch", metavar="N", help="How many more to take in advance.")
    ] = 0,
    drain_seconds: Annotated[
        float, typer.Option("--drain", metavar="SECONDS", help="How long to finish at SIGTERM.")
    ] = 30,
    instance: Annotated[
        str | None,
        typer.Option("--instance", metavar="NAME", help="A name that only this process has."),
    ] = None,
    tools: Annotated[
        list[str] | None,
        typer.Option(
            "--tools", metavar="MODULE:NAME", help="Tools to verify what a dead process left."
        ),
    ] = None,
    until_empty: Annotated[
        bool, typer.Option("--until-empty", help="End when nothing is ready and nothing runs.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run the handlers of a module until a signal comes.

    SIGTERM or Ctrl-C takes nothing more and lets what runs finish; a second one gives everything
    back at once. No retry is spent by either.
    """
    found = load(handlers)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    options: dict[str, Any] = {
        "concurrency": concurrency,
        "queues": None if queues is None else _names(queues),
        "lease_seconds": lease_seconds,
        "poll_seconds": poll_seconds,
        "sweep_interval_seconds": sweep_seconds,
        "prefetch": prefetch,
        "drain_seconds": drain_seconds,
        "instance": instance,
        "tools": named_tools(tools),
    }
    if any(map(is_async, found.values())):
        worker = asyncio.run(_run_async(found, url, namespace, until_empty, options))
    else:
        worker = _run(found, url, namespace, until_empty, options)
    _tell(worker, as_json)
    if worker.is_stopped_at_once:
        raise typer.Exit(INTERRUPTED)


def _tell(worker: Worker[Any], as_json: bool) -> None:
    ended = {outcome: worker.counts[outcome] for outcome in sorted(worker.counts)}
    if as_json:
        print_json({"holder": worker.holder, "ended": ended})
    else:
        counted = ", ".join(f"{count:,} {outcome}" for outcome, count in ended.items())
        say(f"Stopped: {counted or 'nothing was run'}.")


def _run(
    handlers: Mapping[str, Handler],
    url: str | None,
    namespace: str | None,
    until_empty: bool,
    options: dict[str, Any],
) -> Worker[Any]:
    with store.open(url, namespace=namespace, migrate=False) as opened:
        worker = Worker(opened, handlers, **options)
        _announce(worker, handlers)
        worker.run(until_empty=until_empty)
    return worker


async def _run_async(
    handlers: Mapping[str, Handler],
    url: str | None,
    namespace: str | None,
    until_empty: bool,
    options: dict[str, Any],
) -> Worker[Any]:
    async with await store.aopen(url, namespace=namespace, migrate=False) as opened:
        worker = Worker(opened, handlers, **options)
        _announce(worker, handlers)
        await worker.run(until_empty=until_empty)
    return worker


def _announce(worker: Worker[Any], handlers: Mapping[str, Handler]) -> None:
    logging.getLogger("holdfast.worker").info(
        "%s serves %s", worker.holder, ", ".join(sorted(handlers))
    )


def load(name: str) -> Mapping[str, Handler]:
    """Return the handlers that a name like `module:handlers` stands for."""
    if ":" not in name:
        raise InvalidArgument(f"{shown(name)} must be MODULE:HANDLERS, like mails.work:handlers")
    try:
        found = imported(name)
    except Exception as error:
        raise InvalidArgument(f"{shown(name)} cannot be loaded: {cause(error)}") from error
    if not isinstance(found, Mapping) and callable(found):
        try:
            found = found()
        except Exception as error:
            raise InvalidArgument(
                f"{shown(name)} was called to give the handlers, and failed: {cause(error)}"
            ) from error
    if not isinstance(found, Mapping) or not found:
        raise InvalidArgument(
            f"{shown(name)} must be a dict of type to function, not {type(found).__name__}"
        )
    return found


def _names(queues: list[str]) -> list[str]:
    return [name.strip() for each in queues for name in each.split(",") if name.strip()]
