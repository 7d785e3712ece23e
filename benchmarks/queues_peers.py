"""Procrastinate, PgQueuer, Absurd, DBOS and huey, each as its documentation uses it.

All but huey take an item under a lease or a heartbeat and keep it until it is completed. huey
deletes an item when a worker takes it: a worker that dies loses it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import psycopg

from .keepers import Place
from .queues import BATCH, HOLDFAST_ASYNC, QUEUE, Queue, Slots

CONNECTIONS_MAX = 16
WORKER_NAME = "bench"


class ServerQueue(Queue):
    """A peer on PostgreSQL."""

    alive: str
    """The statement that counts what is not completed."""

    def open(self) -> None:
        """Connect, to count."""
        self._counting = psycopg.connect(self.place.url, autocommit=True)
        self._stack.callback(self._counting.close)

    def unfinished(self) -> int:
        """Count, beside its own connections."""
        row = self._counting.execute(self.alive.encode()).fetchone()
        assert row is not None
        return int(row[0])


# Procrastinate


def _procrastinate(place: Place, handle: Callable[..., Any]) -> tuple[Any, Any]:
    from procrastinate import App, PsycopgConnector  # type: ignore[import-not-found]

    connector = PsycopgConnector(conninfo=place.url, max_size=CONNECTIONS_MAX)
    app = App(connector=connector)
    return app, app.task(name="item", queue=QUEUE)(handle)


def serve_procrastinate(place: Place, hold: Callable[[], None], slots: Slots) -> None:
    """Run its worker, ten jobs at a time."""

    async def item(number: int) -> None:
        slots[number] = time.monotonic()

    async def work() -> None:
        app, _ = _procrastinate(place, item)
        async with app.open_async():
            hold()
            await app.run_worker_async(queues=[QUEUE], concurrency=BATCH)

    asyncio.run(work())


class ProcrastinateQueue(ServerQueue):
    """Jobs are fetched and finished one by one, also by its worker."""

    name = "Procrastinate"
    beside = HOLDFAST_ASYNC
    serve = staticmethod(serve_procrastinate)
    claims_many = False
    alive = "SELECT count(*) FROM procrastinate_jobs WHERE status IN ('todo', 'doing')"

    def open(self) -> None:
        """Apply its schema and open its pool."""
        super().open()

        async def item(number: int) -> None: ...

        self._app, self._task = _procrastinate(self.place, item)
        self.runner.run(self._open())
        self._stack.callback(lambda: self.runner.run(self._app.close_async()))

    async def _open(self) -> None:
        await self._app.open_async()
        await self._app.schema_manager.apply_schema_async()
        self._manager = self._app.job_manager
        self._worker_id = await self._manager.register_worker()

    async def enqueue(self, number: int) -> None:
        """Defer a job."""
        await self._task.defer_async(number=number)

    async def enqueue_many(self, numbers: Sequence[int]) -> None:
        """Defer jobs in one statement."""
        await self._task.batch_defer_async(*({"number": number} for number in numbers))

    async def work(self, limit: int) -> int:
        """Fetch a job and finish it, as its worker does."""
        from procrastinate.jobs import Status  # type: ignore[import-not-found]

        job = await self._manager.fetch_job([QUEUE], self._worker_id)
        if job is None:
            return 0
        await self._manager.finish_job(job, Status.SUCCEEDED, delete_job=False)
        return 1


# PgQueuer


def serve_pgqueuer(place: Place, hold: Callable[[], None], slots: Slots) -> None:
    """Run its worker with its own batch of ten, in the loop that its command line uses."""
    import asyncpg  # type: ignore[import-not-found]
    import uvloop  # type: ignore[import-not-found]
    from pgqueuer import PgQueuer  # type: ignore[import-not-found]

    async def item(job: Any) -> None:
        slots[int(job.payload)] = time.monotonic()

    async def work() -> None:
        connection = await asyncpg.connect(place.url)
        app = PgQueuer.from_asyncpg_connection(connection)
        app.entrypoint(QUEUE)(item)
        hold()
        await app.run(batch_size=BATCH)

    uvloop.run(work())


class PgQueuerQueue(ServerQueue):
    """Jobs are dequeued by the batch, and logged by the batch; a finished job is moved to a log."""

    name = "PgQueuer"
    beside = HOLDFAST_ASYNC
    serve = staticmethod(serve_pgqueuer)
    alive = "SELECT count(*) FROM pgqueuer"

    def open(self) -> None:
        """Install its tables, all of them logged, which is its default."""
        super().open()
        import uvloop

        factory = uvloop.new_event_loop
        self.runner = self._stack.enter_context(asyncio.Runner(loop_factory=factory))
        self.runner.run(self._open())

    async def _open(self) -> None:
        import asyncpg
        from pgqueuer.ports.repository import (  # type: ignore[import-not-found]
            EntrypointExecutionParameter,
        )
        from pgqueuer.queries import Queries  # type: ignore[import-not-found]

        connection = await asyncpg.connect(self.place.url)
        self._stack.callback(lambda: self.runner.run(connection.close()))
        self._queries = Queries.from_asyncpg_connection(connection)
        await self._queries.install()
        self._entrypoints = {QUEUE: EntrypointExecutionParameter(concurrency_limit=0)}
        self._manager_id = uuid.uuid4()

    async def enqueue(self, number: int) -> None:
        """Enqueue a job."""
        await self._queries.enqueue(QUEUE, str(number).encode())

    async def enqueue_many(self, numbers: Sequence[int]) -> None:
        """Enqueue jobs in one statement."""
        count = len(numbers)
        payloads = [str(number).encode() for number in numbers]
        await self._queries.enqueue([QUEUE] * count, payloads, [0] * count)

    async def work(self, limit: int) -> int:
        """Dequeue and log, as its worker does."""
        jobs = await self._queries.dequeue(
            batch_size=limit,
            entrypoints=self._entrypoints,
            queue_manager_id=self._manager_id,
            global_concurrency_limit=None,
            heartbeat_timeout=timedelta(seconds=30),
        )
        if jobs:
            await self._queries.log_jobs([(job, "successful", None) for job in jobs])
        return len(jobs)


# Absurd


def _absurd(place: Place, handle: Callable[[Any, Any], Any]) -> Any:
    from absurd_sdk import Absurd  # type: ignore[import-not-found]

    app = Absurd(place.url)
    app.register_task("item")(handle)
    return app


def serve_absurd(place: Place, hold: Callable[[], None], slots: Slots) -> None:
    """Run its worker, which claims ten tasks at a time and completes each."""

    def item(params: Any, _: Any) -> None:
        slots[params["number"]] = time.monotonic()

    app = _absurd(place, item)
    hold()
    app.start_worker(batch_size=BATCH)


class AbsurdQueue(ServerQueue):
    """Tasks are claimed by the batch; each is completed in a transaction of its own."""

    name = "Absurd"
    serve = staticmethod(serve_absurd)
    alive = "SELECT count(*) FROM absurd.t_default WHERE state NOT IN ('completed', 'failed')"

    def open(self) -> None:
        """Run the schema that its command line brings with it, and make a queue."""
        super().open()
        from absurdctl import BUNDLED_SCHEMA_SQL  # type: ignore[import-not-found]

        with psycopg.connect(self.place.url, autocommit=True) as connection:
            connection.execute(BUNDLED_SCHEMA_SQL)
        self._completing = self._stack.enter_context(
            psycopg.connect(self.place.url, autocommit=True)
        )
        self._app = _absurd(self.place, lambda _, __: None)
        self._stack.callback(self._app.close)
        self._app.create_queue()

    def enqueue(self, number: int) -> None:
        """Spawn a task."""
        self._app.spawn("item", {"number": number})

    def work(self, limit: int) -> int:
        """Claim a batch and complete each task by itself, as its worker does."""
        tasks = self._app.claim_tasks(batch_size=limit)
        for task in tasks:
            self._completing.execute(
                "SELECT absurd.complete_run(%s, %s, %s)", ("default", task["run_id"], "null")
            )
        return len(tasks)


# DBOS


def _dbos_config(place: Place) -> dict[str, Any]:
    return {
        "name": "bench",
        "system_database_url": place.url,
        "application_version": "1",
        "executor_id": f"worker-{os.getpid()}",
        "enable_otlp": False,
        "log_level": "ERROR",
    }


def serve_dbos(place: Place, hold: Callable[[], None], slots: Slots) -> None:
    """Run its worker with its defaults: it looks once a second and takes all there is."""
    from dbos import DBOS  # type: ignore[import-not-found]

    def item(number: int) -> None:
        slots[number] = time.monotonic()

    DBOS(config=_dbos_config(place))
    logging.getLogger("dbos").setLevel(logging.ERROR)
    DBOS.workflow(name="item")(item)
    hold()
    DBOS.launch()
    DBOS.register_queue(QUEUE)
    while True:
        time.sleep(1)


class DbosQueue(ServerQueue):
    """An item is a workflow in a queue; only its own worker can claim one."""

    name = "DBOS"
    serve = staticmethod(serve_dbos)
    claims_by_hand = claims_many = False
    fleet_items = 400
    alive = "SELECT count(*) FROM dbos.workflow_status WHERE status IN ('ENQUEUED', 'PENDING')"

    def open(self) -> None:
        """Make its tables, and a client that enqueues."""
        super().open()
        from dbos import DBOS, DBOSClient

        DBOS(config=_dbos_config(self.place))
        DBOS.launch()
        DBOS.register_queue(QUEUE)
        DBOS.destroy()
        self._client = DBOSClient(system_database_url=self.place.url)
        self._stack.callback(self._client.destroy)

    def enqueue(self, number: int) -> None:
        """Enqueue a workflow."""
        options = {"workflow_name": "item", "queue_name": QUEUE, "application_name": "bench"}
        self._client.enqueue(options, number)

    def drain(self) -> None:
        """Remove what was enqueued."""
        self._counting.execute("TRUNCATE dbos.workflow_status CASCADE")


# huey


def _huey(place: Place, handle: Callable[[int], Any]) -> tuple[Any, Any]:
    from huey import SqliteHuey  # type: ignore[import-not-found]

    # WAL is its default; with fsync it sets synchronous=FULL.
    app = SqliteHuey(QUEUE, filename=str(place.path), fsync=True)
    return app, app.task(name="item")(handle)


def serve_huey(place: Place, hold: Callable[[], None], slots: Slots) -> None:
    """Run its consumer with one thread, which is its default."""

    def item(number: int) -> None:
        slots[number] = time.monotonic()

    app, _ = _huey(place, item)
    logging.getLogger("huey").setLevel(logging.ERROR)
    consumer = app.create_consumer(periodic=False)
    hold()
    consumer.run()


class HueyQueue(Queue):
    """Tasks are dequeued, which deletes them, and executed."""

    name = "huey"
    serve = staticmethod(serve_huey)
    claims_many = False

    def open(self) -> None:
        """Open its file."""

        def item(number: int) -> None: ...

        logging.getLogger("huey").setLevel(logging.ERROR)
        self._app, self._task = _huey(self.place, item)
        self._stack.callback(self._app.storage.close)

    def enqueue(self, number: int) -> None:
        """Call the task, which enqueues it."""
        self._task(number)

    def work(self, limit: int) -> int:
        """Dequeue a task and execute it, as its consumer does."""
        task = self._app.dequeue()
        if task is None:
            return 0
        self._app.execute(task)
        return 1

    def unfinished(self) -> int:
        """Count what nobody has taken; what was taken is forgotten."""
        return int(self._app.pending_count())
