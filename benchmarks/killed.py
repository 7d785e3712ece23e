"""What a kill costs: an agent that is killed right after its charge, and run again.

The payment server books the charge and kills the process that asked for it before it answers, so
every kill comes when the money has moved and nobody but the server knows. It counts the charges.
A kill at another moment is harmless for everybody who keeps state.
"""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from .killed_agents import HOST, STOPPED
from .killed_picture import CHARGES, FINISHED, KILLS, draw
from .measure import Contestant, Figures, Report, Table, Target, environment, versions

PROCESS_SECONDS_MAX = 120


@dataclass(frozen=True, slots=True)
class Plan:
    """How many trips each agent books, and how often it is killed on each."""

    trips: int
    kills: int


FULL = Plan(trips=3, kills=3)
QUICK = Plan(trips=1, kills=2)


@dataclass(frozen=True, slots=True)
class Scene:
    """A payment server, and the agents that charge cards there."""

    title: str
    honours_keys: bool
    agents: dict[str, str]
    """What each agent is called in the table, and in `killed_agents`."""


SCENES = (
    Scene(
        "The server books every request",
        honours_keys=False,
        agents={
            "no library": "plain",
            "LangGraph node": "langgraph",
            "DBOS step": "dbos",
            "Holdfast call": "holdfast",
            "Holdfast call, with verify": "holdfast-verify",
        },
    ),
    Scene(
        "The server honours idempotency keys, and every agent sends one",
        honours_keys=True,
        agents={
            "no library": "plain-key",
            "LangGraph node": "langgraph-key",
            "DBOS step": "dbos-key",
            "Holdfast call": "holdfast-key",
        },
    ),
)
PEERS = ("langgraph", "langgraph-checkpoint-sqlite", "dbos")


def run(console: Console, *, quick: bool) -> Report:
    """Kill every agent that is installed, in processes and directories of their own."""
    plan = QUICK if quick else FULL
    report = Report("killed", environment() | versions(PEERS))
    for scene in SCENES:
        table = measure(scene, plan)
        table.show(console)
        report.tables.append(table)
        for name in table.rounds:
            if name.startswith("Holdfast"):
                text = f"{scene.title}: {name}, most charges for one trip"
                most = table.worst(name, CHARGES)
                report.targets.append(Target(text, most, at_most=1, unit=""))
    report.picture = draw(report.tables)
    return report


def measure(scene: Scene, plan: Plan) -> Table:
    """Book trips with every agent of a scene; nothing is timed, so they take no turns."""
    contestants = [
        Contestant(name, functools.partial(book, agent, scene.honours_keys, plan.kills))
        for name, agent in scene.agents.items()
        if _is_installed(agent)
    ]
    note = (
        f"Medians of {plan.trips} trips. The first {plan.kills} requests of a trip to the payment "
        "server end with SIGKILL for the process that sent them. finished: 0 where a person must "
        "decide first."
    )
    rounds = {each.name: [each.round() for _ in range(plan.trips)] for each in contestants}
    return Table(scene.title, CHARGES, contestants, rounds, note)


def _is_installed(agent: str) -> bool:
    library = agent.partition("-")[0]
    return library == "plain" or importlib.util.find_spec(library) is not None


def book(agent: str, honours_keys: bool, kills: int) -> Figures:
    """Start one process after the other until the trip is booked or an agent stops."""
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name, serving() as bank:
        directory = Path(name)
        bank.honours_keys, bank.kills_left = honours_keys, kills
        processes, code = 0, -signal.SIGKILL
        while code == -signal.SIGKILL:
            processes += 1
            code = _run(agent, bank, directory)
        is_finished = (directory / "confirmed").exists()
        if code not in (0, STOPPED) or is_finished != (code == 0):
            said = (directory / "errors").read_text(errors="replace").strip()
            raise RuntimeError(f"the agent {agent} ended with {code}: {said[-2_000:]}")
        return {
            CHARGES: len(bank.charges),
            KILLS: kills - bank.kills_left,
            "processes": processes,
            FINISHED: float(is_finished),
        }


def _run(agent: str, bank: Bank, directory: Path) -> int:
    command = [sys.executable, "-m", f"{__package__}.killed_agents"]
    with (directory / "errors").open("w") as errors:
        process = subprocess.Popen(
            [*command, agent, str(bank.port), "trip-1", str(directory)],
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
        )
        bank.victim = process
        try:
            return process.wait(PROCESS_SECONDS_MAX)
        finally:
            process.kill()
            process.wait()


class Bank(http.server.ThreadingHTTPServer):
    """The payment server: it books charges, and kills whom it was told to."""

    honours_keys = False
    kills_left = 0
    victim: subprocess.Popen[bytes]

    def __init__(self) -> None:
        super().__init__((HOST, 0), _Request)
        self.port = int(self.server_address[1])
        self.charges: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def answer(self, asked: dict[str, Any]) -> Any:
        """Find charges or book one; then kill, if a kill is left, before anybody is answered."""
        with self._lock:
            key = asked.get("find", asked.get("key"))
            found = [each for each in self.charges if key is not None and each["key"] == key]
            if "find" not in asked and not (found and self.honours_keys):
                found = [{"id": len(self.charges) + 1, **asked}]
                self.charges += found
            if self.kills_left:
                self.kills_left -= 1
                self.victim.kill()
                self.victim.wait()
        return found if "find" in asked else found[0]


class _Request(http.server.BaseHTTPRequestHandler):
    server: Bank

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps(self.server.answer(asked)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...

    def handle(self) -> None:
        # Whoever was killed does not read the answer.
        with suppress(ConnectionError):
            super().handle()


@contextmanager
def serving() -> Iterator[Bank]:
    """Serve on a free port of this machine alone."""
    with Bank() as bank:
        thread = threading.Thread(target=bank.serve_forever, daemon=True)
        thread.start()
        yield bank
        bank.shutdown()
        thread.join()
