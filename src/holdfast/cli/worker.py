"""`holdfast work run`: a worker process for handlers that are named on the command line."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from .. import store as stores
from ..arguments import shown
from ..errors import InvalidArgument
from ..kernel.flow import is_async
from ..worker import Handler, Worker
from . import INTERRUPTED
from .command import (
    Answer,
    Namespace,
    Tools,
    Url,
    argument,
    cause,
    flag,
    imported,
    named_tools,
    option,
)
from .work import app


@app.command()
def run(
    handlers: Annotated[
        str, argument("MODULE:HANDLERS", "A dict of type to function, or a function returning it.")
    ],
    url: Url = None,
    namespace: Namespace = None,
    concurrency: Annotated[int, option("N", "How many items run at once.")] = 4,
    queues: Annotated[
        list[str] | None,
        option("QUEUE,...", "Which queues to serve.", show_default="those of the handlers' types"),
    ] = None,
    lease_seconds: Annotated[
        float,
        option(
            "SECONDS",
            "Lease length: how long until the items of a worker that died are retried. A tool call "
            "in progress has a lease of its own, set in its @tool.",
            "--lease",
        ),
    ] = 30,
    poll_seconds: Annotated[
        float, option("SECONDS", "How often to poll without a notification.", "--poll")
    ] = 1,
    sweep_seconds: Annotated[float, option("SECONDS", "How often to sweep.", "--sweep")] = 10,
    prefetch: Annotated[int, option("N", "How many extra items to claim in advance.")] = 0,
    drain_seconds: Annotated[
        float, option("SECONDS", "How long running items have to finish after SIGTERM.", "--drain")
    ] = 30,
    instance: Annotated[
        str | None, option("NAME", "A name that only one process uses at a time.")
    ] = None,
    tools: Tools = None,
    until_empty: Annotated[
        bool, flag("--until-empty", "Exit when nothing is ready or running.")
    ] = False,
) -> Answer:
    """Run the handlers of a module until a signal arrives.

    On SIGTERM or Ctrl-C it stops claiming and lets running items finish; a second signal releases
    everything at once. Neither uses up a retry. --tools verify effects that a dead process left.
    """
    found = load(handlers)
    log_to_stderr()
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
    place = {"url": url, "namespace": namespace, "migrate": False}
    hooks = [tool.verify for tool in options["tools"] if tool.verify is not None]
    runs_async = any(map(is_async, [*found.values(), *hooks]))
    what = ", ".join(sorted(found))
    return serve(
        place, lambda store: Worker(store, found, **options), what, until_empty, runs_async
    )


def serve(
    place: Any, make: Callable[[Any], Any], what: str, until_empty: bool, runs_async: bool
) -> Answer:
    """Run a worker on a store, sync or async, until it has ended, and tell what it did."""

    def announced(store: Any) -> Any:
        worker = make(store)
        logging.getLogger("holdfast.worker").info("%s serves %s", worker.holder, what)
        return worker

    async def serve_async() -> Any:
        async with stores.aopen(**place) as store:
            worker = announced(store)
            await worker.run(until_empty=until_empty)
        return worker

    if runs_async:
        worker = asyncio.run(serve_async())
    else:
        with stores.open(**place) as store:
            worker = announced(store)
            worker.run(until_empty=until_empty)
    ended = {outcome: worker.counts[outcome] for outcome in sorted(worker.counts)}
    counted = ", ".join(f"{count:,} {outcome}" for outcome, count in ended.items())
    return Answer(
        {"holder": worker.holder, "ended": ended},
        f"Stopped: {counted or 'nothing was run'}.",
        INTERRUPTED if worker.is_stopped_at_once else 0,
    )


def log_to_stderr() -> None:
    """Log what a worker does, without the single requests to a server."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)


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
                f"{shown(name)} was called to get the handlers, and failed: {cause(error)}"
            ) from error
    if not isinstance(found, Mapping) or not found:
        raise InvalidArgument(
            f"{shown(name)} must be a dict of type to function, not {type(found).__name__}"
        )
    return found


def _names(queues: list[str]) -> list[str]:
    return [name.strip() for each in queues for name in each.split(",") if name.strip()]
