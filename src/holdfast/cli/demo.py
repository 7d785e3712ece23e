"""`holdfast demo`: kill a conversation again and again, look for what was lost, and fork it."""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from .. import store
from ..errors import HoldfastError, InvalidArgument
from .demo_writer import SESSION_ID, message
from .options import AsJson
from .output import console, print_json

ROUNDS_MAX = 100
KILL_SECONDS_MIN, KILL_SECONDS_MAX = 0.2, 0.8
EVENTS_PER_READ = 10_000
FORK_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What one killed process had been told, and what the store has."""

    round: int
    process_id: int
    began_with: int
    acknowledged: int
    found: int
    lost: int
    is_whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """What two sessions share up to a version, and how each goes on."""

    version: int
    shared: list[str]
    original: str
    fork: str


def demo(
    directory: Annotated[
        Path | None,
        typer.Option(
            "--directory",
            metavar="PATH",
            help="Keep the database here.",
            show_default="a temporary directory",
        ),
    ] = None,
    rounds: Annotated[
        int, typer.Option("--rounds", metavar="N", min=1, max=ROUNDS_MAX, help="How often to kill.")
    ] = 5,
    as_json: AsJson = False,
) -> None:
    """Kill a talking agent and show that nothing is lost, then fork it. It needs no server."""
    if directory is not None and not directory.is_dir():
        raise InvalidArgument(f"there is no directory {directory}; create it first")
    with nullcontext(directory) if directory else tempfile.TemporaryDirectory() as place:
        url = f"sqlite:///{Path(place).resolve() / 'holdfast-demo.db'}"
        if as_json:
            results = [_play(url, number) for number in range(1, rounds + 1)]
            played = [asdict(result) for result in results]
            print_json({"url": url, "rounds": played, "fork": asdict(_fork(url))})
        else:
            results = _narrate(url, rounds)
    if any(result.lost or not result.is_whole for result in results):
        raise typer.Exit(1)


def _narrate(url: str, rounds: int) -> list[Round]:
    from rich.table import Table

    out = console()
    out.print(
        "An agent talks, and each message is a durable version in an SQLite file. It is killed\n"
        f"with SIGKILL at a random moment; another process resumes the session.\n{url}\n",
        markup=False,
    )
    results = []
    for number in range(1, rounds + 1):
        with out.status(f"Round {number} of {rounds}"):
            results.append(_play(url, number))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("round", "killed", "began with", "acknowledged", "found", "lost"):
        table.add_column(heading, justify="right")
    table.add_column("transcript")
    for result in results:
        table.add_row(
            str(result.round),
            str(result.process_id),
            f"{result.began_with:,}",
            f"{result.acknowledged:,}",
            f"{result.found:,}",
            f"[red]{result.lost:,}[/]" if result.lost else "[green]0[/]",
            "[green]whole[/]" if result.is_whole else "[red]has holes[/]",
        )
    out.print(table)
    lost = sum(result.lost for result in results)
    out.print(f"\n{lost:,} of {results[-1].acknowledged:,} acknowledged versions were lost.")
    if any(result.found > result.acknowledged for result in results):
        out.print("One more found than acknowledged: killed after the commit, before it could say.")
    fork = _fork(url)
    out.print(f"\nForked at version {fork.version}, to try another answer:", markup=False)
    for text in fork.shared:
        out.print(f"    both      {text}", markup=False)
    out.print(f"  - original  {fork.original}", markup=False)
    out.print(f"  + fork      {fork.fork}", markup=False)
    return results


def _play(url: str, number: int) -> Round:
    """Let a process write, kill it at a random moment, and compare."""
    before, _ = _look(url)
    command = [sys.executable, "-m", "holdfast.cli.demo_writer", url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        try:
            first = process.stdout.readline()
            time.sleep(random.uniform(KILL_SECONDS_MIN, KILL_SECONDS_MAX))
        finally:
            process.kill()
        numbers = [int(line) for line in (first, *process.stdout) if line]
    if not numbers:
        raise HoldfastError("the process that writes ended by itself")
    found, is_whole = _look(url)
    return Round(
        round=number,
        process_id=process.pid,
        began_with=numbers[0],
        acknowledged=numbers[-1],
        found=found,
        # A process that does not go on where the store was has lost what lies between.
        lost=max(0, numbers[-1] - found) + abs(before + 1 - numbers[0]),
        is_whole=is_whole,
    )


def _look(url: str) -> tuple[int, bool]:
    """Open the store and return its newest version, and whether everything up to it is there."""
    with store.open(url) as opened:
        if not opened.sessions(limit=1):
            return 0, True
        session = opened.session(SESSION_ID)
        latest, position = session.latest(), 0
        while events := opened.events(SESSION_ID, after=position, limit=EVENTS_PER_READ):
            expected = range(position + 1, position + 1 + len(events))
            if [event.position for event in events] != list(expected):
                return 0, False
            position = events[-1].position
    if latest is None:
        return 0, True
    said = [message(version) for version in range(1, latest.version + 1)]
    return latest.version, latest["transcript"] == said


def _fork(url: str) -> Fork:
    """Go on from an old version in another direction, and compare."""
    with store.open(url) as opened:
        session = opened.session(SESSION_ID)
        fork = session.fork(FORK_VERSION, name="another answer")
        fork.append("transcript", [{"role": "user", "content": "And by bicycle?"}])
        ends = [session.at(FORK_VERSION + 1), fork.at(FORK_VERSION + 1)]
        return Fork(
            version=FORK_VERSION,
            shared=[said["content"] for said in ends[0]["transcript"][:-1]],
            original=ends[0]["transcript"][-1]["content"],
            fork=ends[1]["transcript"][-1]["content"],
        )
