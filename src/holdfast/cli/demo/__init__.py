"""`holdfast demo`: an agent is killed around the moment it charges a card, and charges it once."""

from __future__ import annotations

import shlex
import shutil
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

from ...errors import InvalidArgument
from ..command import Answer, AsJson, flag, option
from ..serve import PORT, require_server
from ..serve import serve as serve_store

if TYPE_CHECKING:
    from ...store import Store
    from .running import Trip
    from .timeline import Timeline

FILE = "demo.db"
TRIPS_MAX = 20


def demo(
    directory: Annotated[
        Path | None,
        option(
            "PATH", f"Leave {FILE} here; created if missing.", show_default="the working directory"
        ),
    ] = None,
    trips: Annotated[int, option("N", "How many to plan.", min=1, max=TRIPS_MAX)] = 1,
    serve: Annotated[
        bool, flag("--serve", "Then show the dashboard, with a newsroom of agents at work.")
    ] = False,
    port: Annotated[int, option("PORT", "The dashboard's port; 0 picks a free one.")] = PORT,
    as_json: AsJson = False,
) -> Answer:
    """Kill an agent five times while it pays for a trip, and show that it pays once.

    It needs no network and no model, and leaves its store for you to look at.
    """
    from .timeline import Timeline

    if serve:
        require_server()
    if directory is not None:
        _make(directory)
    path = FILE if directory is None else str(directory.resolve() / FILE)
    url = f"sqlite:///{quote(path)}"
    timeline = Timeline(is_silent=as_json)
    pairs, commands = _play(url, trips, timeline)
    problems = [problem for _, durable in pairs for problem in durable.problems()]
    data = {
        "url": url,
        "trips": [asdict(durable) for _, durable in pairs],
        "plain": [asdict(plain) for plain, _ in pairs],
        "problems": problems,
        "try_next": [command for _, command in commands],
    }
    timeline.conclude(pairs, problems)
    timeline.suggest(path, commands)
    if serve:
        timeline.invite()
        _show(url, port, as_json=as_json)
    return Answer(data, lambda: (), exit_code=1 if problems else 0)


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument(f"cannot create {directory}: {error.strerror}") from None


def _play(
    url: str, trips: int, timeline: Timeline
) -> tuple[list[tuple[Trip, Trip]], list[tuple[str, str]]]:
    """Plan trips with both loops; return them, and commands to look at the last."""
    from ...store import open
    from .running import Runner, started

    with ExitStack() as stack:
        store = stack.enter_context(open(url))
        timeline.introduce()
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-demo-")))
        command = [sys.executable, "-m", f"{__name__}.payments"]
        server = stack.enter_context(started(command, place / "server-errors"))
        assert server.stdout is not None
        runner = Runner(store, int(server.stdout.readline()), place, timeline.show)
        first = runner.next_number()
        pairs = []
        for number in range(first, first + trips):
            with timeline.section(number, "plain"):
                plain = runner.plan(number, "plain")
            with timeline.section(number, "durable"):
                pairs.append((plain, runner.plan(number, "durable")))
        trip = store.find_session(pairs[-1][1].id)
        _, paid, unpaid, *_ = (each.version for each in trip.history(kind="turn"))
        fork = trip.fork(unpaid, name=f"{trip.id}, before it paid")
        timeline.compare(fork.id, unpaid, trip.diff(unpaid, paid).lines())
        return pairs, _commands(store, url, trip.id, unpaid, paid)


def _show(url: str, port: int, *, as_json: bool) -> None:
    """Serve the store, in which agents keep working, until a signal arrives."""
    from ...store import open
    from . import scene

    with open(url) as store:
        scene.furnish(store)
    with scene.lively(url):
        serve_store(url=url, port=port, tools=[scene.__name__], as_json=as_json)


def _commands(store: Store, url: str, id: str, before: int, after: int) -> list[tuple[str, str]]:
    """Return commands that show the result of a trip, each with a description."""
    charge = store.effects(session=id)[-1]
    wanted = {
        "What its tools did": f"effects list --session {id}",
        "The charge, tried twice and made once": f"effects show {charge.number}",
        "Every version of its state": f"checkpoints list {id}",
        "What paying changed": f"checkpoints diff {id} {before} {after}",
        "Try something else from before it paid": f"checkpoints fork {id} {before}",
        "The session and its fork": "sessions list",
    }
    end = f"--url {shlex.quote(url)}"
    return [(what, f"{_program()} {command} {end}") for what, command in wanted.items()]


def _program() -> str:
    """Return the program by which this command line can be run again."""
    if shutil.which("holdfast"):
        return "holdfast"
    called = Path(sys.argv[0])
    if called.name == "holdfast" and called.is_file():
        return shlex.quote(sys.argv[0])
    return f"{shlex.quote(sys.executable)} -m holdfast"
