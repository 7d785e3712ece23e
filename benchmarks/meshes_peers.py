"""DBOS and Absurd fan out and in, as their documentation does it, and with shorter polls.

Both look for work in intervals, of a second and of a quarter of one. With those most of the time
would be spent waiting, so both are told to look every 20 ms.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

import psycopg

from .meshes import CALLER, INSTANCES, PEER, WAIT_SECONDS_MAX, Fan
from .queues_peers import _dbos_config

POLL_SECONDS = 0.02
QUEUE = "default"


class DbosFan(Fan):
    """A workflow enqueues child workflows and waits for their results, on a thread of its own."""

    name = "DBOS"

    def open(self) -> None:
        """Register both workflows, and launch."""
        from dbos import DBOS  # type: ignore[import-not-found]

        DBOS(config=_dbos_config(self.place))
        logging.getLogger("dbos").setLevel(logging.ERROR)

        @DBOS.workflow(name=PEER)  # type: ignore[untyped-decorator]
        def peer(number: int) -> int:
            return number

        @DBOS.workflow(name=CALLER)  # type: ignore[untyped-decorator]
        def caller(peers: int) -> list[int]:
            handles = [DBOS.enqueue_workflow(PEER, peer, number) for number in range(peers)]
            return [handle.get_result(polling_interval_sec=POLL_SECONDS) for handle in handles]

        self._caller = caller
        self._dbos = DBOS
        DBOS.launch()
        self._stack.callback(DBOS.destroy)
        DBOS.register_queue(PEER, polling_interval_sec=POLL_SECONDS)

    def make(self, peers: int) -> Any:
        """Start a workflow."""
        return self._dbos.start_workflow(self._caller, peers)

    def answer(self, made: Any) -> Any:
        """Wait for its result."""
        return made.get_result(polling_interval_sec=POLL_SECONDS)


class AbsurdFan(Fan):
    """A task spawns others and is suspended until each has emitted its event."""

    name = "Absurd"

    def open(self) -> None:
        """Run its schema, make a queue, and start a worker."""
        from absurd_sdk import Absurd  # type: ignore[import-not-found]
        from absurdctl import BUNDLED_SCHEMA_SQL  # type: ignore[import-not-found]

        with psycopg.connect(self.place.url, autocommit=True) as connection:
            connection.execute(BUNDLED_SCHEMA_SQL)
        # Each thread has a connection of its own: threads that share one wait for each other.
        local = threading.local()

        def connected() -> Any:
            if not hasattr(local, "app"):
                local.app = Absurd(self.place.url)
                self._stack.callback(local.app.close)
            return local.app

        def spawn(given: dict[str, Any]) -> None:
            connected().spawn(PEER, given, queue=QUEUE)

        self._connected = connected
        connected().create_queue()
        serving = Absurd(self.place.url)
        self._stack.callback(serving.close)

        @serving.register_task(PEER)  # type: ignore[untyped-decorator]
        def peer(params: Any, context: Any) -> None:
            context.emit_event(params["event"], params["number"])

        @serving.register_task(CALLER)  # type: ignore[untyped-decorator]
        def caller(params: Any, context: Any) -> Any:
            events = [f"{context.task_id}:{number}" for number in range(params["peers"])]
            for number, event in enumerate(events):
                given = {"number": number, "event": event}
                context.step(f"ask {number}", lambda given=given: spawn(given))
            return [context.await_event(event) for event in events]

        def serve() -> None:
            serving.start_worker(concurrency=INSTANCES, poll_interval=POLL_SECONDS)

        running = threading.Thread(target=serve)
        running.start()
        self._stack.callback(running.join)
        self._stack.callback(serving.stop_worker)

    def make(self, peers: int) -> str:
        """Spawn a task."""
        made = self._connected().spawn(CALLER, {"peers": peers}, queue=QUEUE)
        task_id: str = made["task_id"]
        return task_id

    def answer(self, made: str) -> Any:
        """Wait for its result."""
        return self._connected().await_task_result(made, timeout=WAIT_SECONDS_MAX).result
