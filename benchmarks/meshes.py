"""Who fans out to peers and waits for all of them: Holdfast, and the design with three tables.

A round trip is one question to a peer and its answer. Everybody runs the caller and the peers in
this process, on threads of its own, and does the same: clients make requests, several at once, each
of which starts the caller; this asks so many peers, lets go, and is resumed with all answers; the
peers give back what they were given.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg

import holdfast
from holdfast.mesh import Mesh, Service

from .keepers import Place

CALLER, PEER = "caller", "peer"
WAIT_SECONDS_MAX = 300.0
INSTANCES = 8
CLIENTS = 8


class Fan:
    """Somebody who fans out and in, on a place of its own."""

    name: str

    def __init__(self, place: Place) -> None:
        self.place = place
        self._stack = contextlib.ExitStack()
        self._clients = self._stack.enter_context(ThreadPoolExecutor(CLIENTS))

    def open(self) -> None:
        """Make the tables, and begin to serve."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop serving."""
        self._stack.close()

    def ask(self, requests: int, peers: int) -> list[Any]:
        """Make so many requests, several clients at once; then wait for all answers."""
        made = list(self._clients.map(self.make, [peers] * requests))
        return [self.answer(each) for each in made]

    def make(self, peers: int) -> Any:
        """Make a request to so many peers, on any thread; return by what its answer is found."""
        raise NotImplementedError

    def answer(self, made: Any) -> Any:
        """Wait for the answer to a request."""
        raise NotImplementedError


class HoldfastFan(Fan):
    """Two services and their workers."""

    name = "Holdfast"

    def open(self) -> None:
        """Open the store and start the workers."""
        self.store = self._stack.enter_context(holdfast.open(self.place.url))
        self._mesh = Mesh(self.store)
        for service in (Service(CALLER, fan_out, fan_in), Service(PEER, lambda asked: asked.input)):
            worker = service.worker(self.store, instances=INSTANCES)
            running = threading.Thread(target=worker.run)
            running.start()
            self._stack.callback(running.join)
            self._stack.callback(worker.stop)

    def make(self, peers: int) -> str:
        """Ask, and do not wait."""
        return self.store.request(CALLER, peers).id

    def answer(self, made: str) -> Any:
        """Wait through a mesh."""
        call = self._mesh.wait(made, wait_seconds=WAIT_SECONDS_MAX)
        return call.answer and call.answer.result


def fan_out(request: holdfast.PeerRequest[Any]) -> Any:
    """Ask the peers, and let go."""
    asks = [holdfast.Ask(PEER, number) for number in range(request.input)]
    return request.session.pause(asks=asks)


def fan_in(resumption: holdfast.Resumption[Any]) -> Any:
    """Return all answers."""
    return [each.result for each in resumption.answers]


class Collector:
    """Takes the answers of peers, and resumes when all are there; nothing is delivered by it."""

    name: str

    def __init__(self, place: Place) -> None:
        self.place = place
        self._stack = contextlib.ExitStack()

    def close(self) -> None:
        """Let go of the place."""
        self._stack.close()

    def park(self, peers: int) -> list[str]:
        """Park a task that waits for so many peers; return the ids of its calls."""
        raise NotImplementedError

    def collect(self, calls: Sequence[str]) -> int:
        """Answer every call, then resume the task and finish; return how many answers it got."""
        raise NotImplementedError


class HoldfastCollector(Collector):
    """One commit for each answer; the last one also makes the session ready."""

    name = "Holdfast"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.store = self._stack.enter_context(holdfast.open(place.url))

    def park(self, peers: int) -> list[str]:
        """Ask and pause."""
        session = self.store.session(agent=CALLER)
        session.pause({"step": 1}, asks=[holdfast.Ask(PEER, number) for number in range(peers)])
        return [call.id for call in session.asks()]

    def collect(self, calls: Sequence[str]) -> int:
        """Answer, claim the resumption, and complete it."""
        for call in calls:
            self.store.answer(call, {"answer": call})
        [item] = self.store.work.claim("bench", queues=f"agent:{CALLER}")
        found = len(item.resume().answers)
        item.complete()
        return found


TABLES = """
CREATE TABLE agent_paused_tasks (
    logical_task_id text PRIMARY KEY, agent_name text, a2a_context text, checkpointed_at float8
);
CREATE TABLE agent_peer_sub_tasks (
    sub_task_id text PRIMARY KEY,
    logical_task_id text REFERENCES agent_paused_tasks ON DELETE CASCADE,
    invocation_id text, correlation_data text, timeout_deadline float8, created_at float8
);
CREATE INDEX ON agent_peer_sub_tasks (logical_task_id);
CREATE INDEX ON agent_peer_sub_tasks (invocation_id);
CREATE INDEX ON agent_peer_sub_tasks (timeout_deadline);
CREATE TABLE agent_parallel_invocations (
    logical_task_id text REFERENCES agent_paused_tasks ON DELETE CASCADE, invocation_id text,
    total_expected int, completed_count int, results text,
    PRIMARY KEY (logical_task_id, invocation_id)
);
"""
CLAIM = """
SELECT logical_task_id, invocation_id FROM agent_peer_sub_tasks WHERE sub_task_id = %s FOR UPDATE
"""
COUNT = """
SELECT total_expected, completed_count, results FROM agent_parallel_invocations
WHERE logical_task_id = %s AND invocation_id = %s FOR UPDATE
"""
RECORD = """
UPDATE agent_parallel_invocations SET completed_count = %s, results = %s
WHERE logical_task_id = %s AND invocation_id = %s
"""


class ThreeTables(Collector):
    """The original design by hand: an answer is claimed in one commit and counted in a second.

    The task is restored, its results are read, and everything is removed, in commits of their own.
    It loses an answer whose process dies between the first two.
    """

    name = "three tables"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._connection = self._stack.enter_context(psycopg.connect(place.url, autocommit=True))
        self._connection.execute(TABLES)

    def park(self, peers: int) -> list[str]:
        """Write the three tables in one commit."""
        task, calls = uuid.uuid4().hex, [uuid.uuid4().hex for _ in range(peers)]
        now, run = time.time(), self._connection.execute
        with self._connection.transaction():
            run("INSERT INTO agent_paused_tasks VALUES (%s, %s, %s, %s)", (task, CALLER, "{}", now))
            for call in calls:
                given = (call, task, "i", "{}", now + 300, now)
                run("INSERT INTO agent_peer_sub_tasks VALUES (%s, %s, %s, %s, %s, %s)", given)
            run(
                "INSERT INTO agent_parallel_invocations VALUES (%s, 'i', %s, 0, '[]')",
                (task, peers),
            )
        return calls

    def collect(self, calls: Sequence[str]) -> int:
        """Claim, count, and restore with the last."""
        found = 0
        for call in calls:
            task, invocation = self._claim(call)
            if self._record(task, invocation, {"answer": call}):
                found = self._restore(task, invocation)
        return found

    def _claim(self, call: str) -> tuple[str, str]:
        with self._connection.transaction():
            row = self._connection.execute(CLAIM, (call,)).fetchone()
            assert row is not None
            self._connection.execute(
                "DELETE FROM agent_peer_sub_tasks WHERE sub_task_id = %s", (call,)
            )
        return row[0], row[1]

    def _record(self, task: str, invocation: str, result: Any) -> bool:
        with self._connection.transaction():
            row = self._connection.execute(COUNT, (task, invocation)).fetchone()
            assert row is not None
            total, completed, results = row
            told = json.dumps([*json.loads(results), result])
            self._connection.execute(RECORD, (completed + 1, told, task, invocation))
        return bool(completed + 1 == total)

    def _restore(self, task: str, invocation: str) -> int:
        run = self._connection.execute
        run("SELECT * FROM agent_paused_tasks WHERE logical_task_id = %s", (task,)).fetchone()
        row = run(
            "SELECT results FROM agent_parallel_invocations "
            "WHERE logical_task_id = %s AND invocation_id = %s",
            (task, invocation),
        ).fetchone()
        assert row is not None
        with self._connection.transaction():
            for table in (
                "agent_peer_sub_tasks",
                "agent_parallel_invocations",
                "agent_paused_tasks",
            ):
                run(f"DELETE FROM {table} WHERE logical_task_id = %s".encode(), (task,))
        return len(json.loads(row[0]))
