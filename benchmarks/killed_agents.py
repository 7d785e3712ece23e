"""The same agent in every library: it looks up a price, charges a card and confirms.

It runs as `python -m benchmarks.killed_agents AGENT PORT TRIP DIRECTORY`. Started again in the same
directory, it goes on as its library's documentation says. It exits with 0 when the trip is
confirmed and with `STOPPED` when a person must decide first.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import sqlite3
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import holdfast

HOST = "127.0.0.1"
CENTS = 14_900
STOPPED = 3
REQUEST_SECONDS_MAX = 60


@dataclass(frozen=True, slots=True)
class Job:
    """One trip, and what its agent does to the world."""

    port: int
    trip: str
    directory: Path

    @property
    def path(self) -> Path:
        """Return the database that the killed process leaves to the next one."""
        return self.directory / "agent.db"

    def charge(self, cents: int, key: str | None) -> dict[str, Any]:
        """Ask the payment server for a charge."""
        return dict(self._send({"trip": self.trip, "cents": cents, "key": key}))

    def find(self, key: str) -> list[dict[str, Any]]:
        """Ask the payment server for the charges under a key."""
        return list(self._send({"trip": self.trip, "find": key}))

    def confirm(self) -> str:
        """Tell the traveller; the last step."""
        (self.directory / "confirmed").touch()
        return "booked"

    def _send(self, body: dict[str, Any]) -> Any:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=REQUEST_SECONDS_MAX)
        with contextlib.closing(connection):
            connection.request("POST", "/", json.dumps(body))
            return json.loads(connection.getresponse().read())


def plain(job: Job, *, has_key: bool) -> None:
    """Keep nothing: a loop that starts from the beginning."""
    job.charge(CENTS, f"{job.trip}-charge" if has_key else None)
    job.confirm()


class State(TypedDict, total=False):
    """What LangGraph's nodes hand on."""

    trip: str
    cents: int
    receipt: dict[str, Any]
    answer: str


def langgraph(job: Job, *, has_key: bool) -> None:
    """Run a node for each step, with every checkpoint written before the next node starts."""
    from langgraph.checkpoint.sqlite import SqliteSaver  # type: ignore[import-not-found]
    from langgraph.graph import START, StateGraph  # type: ignore[import-not-found]

    def look(_: State) -> State:
        return {"cents": CENTS}

    def charge(state: State) -> State:
        key = f"{state['trip']}-charge" if has_key else None
        return {"receipt": job.charge(state["cents"], key)}

    def confirm(_: State) -> State:
        return {"answer": job.confirm()}

    graph = StateGraph(State)
    graph.add_sequence([look, charge, confirm])
    graph.add_edge(START, "look")
    connection = sqlite3.connect(job.path, check_same_thread=False)
    with contextlib.closing(connection):
        agent = graph.compile(checkpointer=SqliteSaver(connection))
        config = {"configurable": {"thread_id": job.trip}}
        is_begun = bool(agent.get_state(config).next)
        agent.invoke(None if is_begun else {"trip": job.trip}, config, durability="sync")


def dbos(job: Job, *, has_key: bool) -> None:
    """Run a workflow of steps; a launch recovers the workflows that were interrupted."""
    from dbos import DBOS, SetWorkflowID  # type: ignore[import-not-found]

    @DBOS.step()  # type: ignore[untyped-decorator]
    def look() -> int:
        return CENTS

    @DBOS.step()  # type: ignore[untyped-decorator]
    def charge(cents: int) -> dict[str, Any]:
        return job.charge(cents, f"{DBOS.workflow_id}-{DBOS.step_id}" if has_key else None)

    @DBOS.step()  # type: ignore[untyped-decorator]
    def confirm() -> str:
        return job.confirm()

    @DBOS.workflow()  # type: ignore[untyped-decorator]
    def book() -> None:
        charge(look())
        confirm()

    DBOS(
        config={
            "name": "killed",
            "system_database_url": f"sqlite:///{job.path}",
            "application_version": "1",
            "enable_otlp": False,
            "log_level": "ERROR",
        }
    )
    logging.getLogger("dbos").setLevel(logging.ERROR)
    DBOS.launch()
    if DBOS.get_workflow_status(job.trip) is None:
        with SetWorkflowID(job.trip):
            DBOS.start_workflow(book)
    DBOS.retrieve_workflow(job.trip).get_result()
    DBOS.destroy()


def holdfast_agent(job: Job, **rules: Any) -> None:
    """Call tools in a driven session, after what an earlier process left was settled."""

    @holdfast.tool(effect="read")
    def look() -> int:
        return CENTS

    @holdfast.tool(effect="mutate", **rules)
    def charge(cents: int, *, idempotency_key: str) -> dict[str, Any]:
        return job.charge(cents, idempotency_key)

    @holdfast.tool(effect="write")
    def confirm() -> str:
        return job.confirm()

    with holdfast.open(f"sqlite:///{job.path}") as store:
        store.recover(instance="agent", tools=[charge])
        with store.session(job.trip).drive(instance="agent") as session:
            cents = session.call(look, call_id="1").value
            session.call(charge, cents=cents, call_id="2")
            session.call(confirm, call_id="3")


def holdfast_verifying(job: Job) -> None:
    """Let the tool look for the charge before it is made again."""

    def is_charged(_: dict[str, Any], key: str) -> holdfast.Landed | holdfast.NotLanded:
        found = job.find(key)
        return holdfast.Landed(found[0]) if found else holdfast.NotLanded()

    holdfast_agent(job, verify=is_charged)


AGENTS: dict[str, Callable[[Job], None]] = {
    "plain": lambda job: plain(job, has_key=False),
    "plain-key": lambda job: plain(job, has_key=True),
    "langgraph": lambda job: langgraph(job, has_key=False),
    "langgraph-key": lambda job: langgraph(job, has_key=True),
    "dbos": lambda job: dbos(job, has_key=False),
    "dbos-key": lambda job: dbos(job, has_key=True),
    "holdfast": holdfast_agent,
    "holdfast-verify": holdfast_verifying,
    "holdfast-key": lambda job: holdfast_agent(job, on_unknown="retry"),
}


def main(agent: str, port: str, trip: str, directory: str) -> None:
    """Book the trip, or go on with it."""
    try:
        AGENTS[agent](Job(int(port), trip, Path(directory)))
    except holdfast.Unresolved as doubt:
        print(doubt, file=sys.stderr)
        sys.exit(STOPPED)


if __name__ == "__main__":
    main(*sys.argv[1:])
