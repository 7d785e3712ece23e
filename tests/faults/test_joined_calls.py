"""A call that has joined the caller's transaction leaves all of its change in it, or nothing."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
import types
from collections.abc import Callable, Coroutine, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from psycopg import IsolationLevel
from psycopg.adapt import Loader
from psycopg.rows import namedtuple_row, tuple_row

import holdfast
from holdfast.testing.nouns import Counter
from tests.faults.tracing import interrupted_everywhere
from tests.faults.workload import found_in, prepare, twice

WAIT_SECONDS = 60.0
WAITING = "SELECT wait_event_type FROM pg_stat_activity WHERE pid = %s"
Report = Callable[[str], None]

# Python drops an interrupt that hits while it clears an object away.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def where(postgres_dsn: str, ready_namespace: str) -> dict[str, Any]:
    place: dict[str, Any] = {"url": postgres_dsn, "namespace": ready_namespace}
    with holdfast.open(**place) as store:
        prepare(store, "root", "taken")
    return place


def both_trees(tx: holdfast.Transaction) -> holdfast.Op[int]:
    """Add to one tree, then to one that another client may hold."""
    yield from Counter(tx).add(1, note="half")
    return (yield from Counter(tx, "taken").add(1, note="half"))


def refused(tx: holdfast.Transaction) -> holdfast.Op[None]:
    """Write, and fail."""
    yield from Counter(tx).add(1, note="half")
    raise holdfast.InvalidArgument("on purpose")


@pytest.fixture
def taken(where: dict[str, Any]) -> Iterator[psycopg.Connection[Any]]:
    """A connection that watches; another one holds a tree meanwhile."""
    with (
        holdfast.open(**where) as store,
        psycopg.connect(where["url"]) as holder,
        psycopg.connect(where["url"], autocommit=True) as watcher,
    ):
        Counter(store.within(holder), "taken").add(1, note="other")
        yield watcher
        holder.rollback()


def wait_until_waiting(watcher: psycopg.Connection[Any], connection: Any) -> None:
    """Wait until a connection waits for a lock."""
    deadline = time.monotonic() + WAIT_SECONDS
    while watcher.execute(WAITING, [connection.info.backend_pid]).fetchone() != ("Lock",):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def check(where: dict[str, Any], expected: list[str]) -> None:
    """Make sure that the store holds these calls, whole, and nothing else."""
    with holdfast.open(**where) as store:
        assert found_in(store) == expected
        assert found_in(store, "taken") == []
    found = holdfast.store.check(where["url"], namespace=where["namespace"])
    assert [each for each in found if each.level == "problem"] == []


def test_an_interrupted_call_is_undone_and_the_transaction_goes_on(
    where: dict[str, Any], taken: psycopg.Connection[Any]
) -> None:
    with holdfast.open(**where) as store, psycopg.connect(where["url"]) as connection:
        joined = store.within(connection)
        Counter(joined).add(1, note="earlier")

        def interrupt() -> None:
            wait_until_waiting(taken, connection)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        with ThreadPoolExecutor(1) as thread:
            sent = thread.submit(interrupt)
            with pytest.raises(KeyboardInterrupt):
                joined.run(both_trees)
            sent.result()
        Counter(joined).add(1, note="later")
        connection.commit()
    check(where, ["earlier", "later"])


def test_a_cancelled_call_is_undone_and_the_transaction_goes_on(
    where: dict[str, Any], taken: psycopg.Connection[Any]
) -> None:
    async def body() -> None:
        async with (
            holdfast.aopen(**where) as store,
            await psycopg.AsyncConnection.connect(where["url"]) as connection,
        ):
            joined = store.within(connection)
            await Counter(joined).add(1, note="earlier")
            calling = asyncio.ensure_future(joined.run(both_trees))
            await asyncio.to_thread(wait_until_waiting, taken, connection)
            calling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await calling
            await Counter(joined).add(1, note="later")
            await connection.commit()

    asyncio.run(body())
    check(where, ["earlier", "later"])


def test_a_call_interrupted_at_any_place_is_whole_or_absent(
    where: dict[str, Any], report: Report
) -> None:
    with holdfast.open(**where) as store, psycopg.connect(where["url"]) as connection:
        joined = store.within(connection)
        expected, asked = [], 0
        files = ("postgres/join.py", "postgres/pipeline.py")
        for nth in interrupted_everywhere(lambda n: joined.run(twice, f"call-{n}"), files):
            Counter(joined).add(1, note=f"after-{nth}")
            connection.commit()
            expected.append(f"after-{nth}")
            asked += 1
        found = found_in(store)
        assert [each for each in found if each.startswith("after")] == expected
        assert 0 < len(found) - len(expected) < asked
        report(f"interrupted at {nth - 1} places, {len(found) - len(expected)} calls were whole")
        assert nth > 50
    check(where, found)


@types.coroutine
def cancelled_at(
    running: Coroutine[Any, Any, Any], steps: int, times: int
) -> Generator[Any, Any, Any]:
    """Await a call that is cancelled so many times from its nth wait on."""
    answer: Any = None
    error: BaseException | None = None
    while True:
        try:
            waiting = running.send(answer) if error is None else running.throw(error)
        except StopIteration as stop:
            return stop.value
        answer = error = None
        if steps <= 0 and times > 0:
            times -= 1
            error = asyncio.CancelledError()
            waiting._asyncio_future_blocking = False
            continue
        steps -= 1
        try:
            answer = yield waiting
        except BaseException as raised:
            error = raised


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_call_cancelled_at_any_wait_is_whole_or_absent(
    where: dict[str, Any], report: Report, times: int
) -> None:
    async def body() -> list[str]:
        async with (
            holdfast.aopen(**where) as store,
            await psycopg.AsyncConnection.connect(where["url"]) as connection,
        ):
            joined = store.within(connection)
            expected: list[str] = []
            is_cancelled, number = True, -1
            while is_cancelled:
                number, is_cancelled = number + 1, False
                await Counter(joined).add(1, note=f"before-{number}")
                running: Any = joined.run(twice, f"call-{number}")
                try:
                    await cancelled_at(running, number, times)
                except asyncio.CancelledError:
                    is_cancelled = True
                await Counter(joined).add(1, note=f"after-{number}")
                await connection.commit()
                expected += [f"before-{number}", f"after-{number}"]
        report(f"cancelled at {number} waits")
        assert number > 4
        return expected

    expected = asyncio.run(body())
    with holdfast.open(**where) as store:
        found = found_in(store)
    assert [each for each in found if not each.startswith("call")] == expected
    check(where, found)


def test_a_call_that_is_thrown_away_ends_the_transaction(where: dict[str, Any]) -> None:
    """A task that is closed cannot wait for a rollback."""

    async def body() -> None:
        async with holdfast.aopen(**where) as store:
            connection = await psycopg.AsyncConnection.connect(where["url"])
            running: Any = store.within(connection).run(twice, "half")
            for _ in range(3):
                waiting = running.send(None)
                waiting._asyncio_future_blocking = False
                await waiting
            running.close()
            with pytest.raises(psycopg.OperationalError):
                await connection.commit()
            await connection.close()

    asyncio.run(body())
    check(where, [])


def test_a_call_that_fails_half_way_is_undone(where: dict[str, Any]) -> None:
    async def body() -> None:
        async with (
            holdfast.aopen(**where) as store,
            await psycopg.AsyncConnection.connect(where["url"]) as connection,
        ):
            joined = store.within(connection)
            with pytest.raises(holdfast.InvalidArgument, match="on purpose"):
                await joined.run(refused)
            await Counter(joined).add(1, note="async")
            await connection.commit()

    with holdfast.open(**where) as store, psycopg.connect(where["url"]) as connection:
        connection.execute("SAVEPOINT holdfast")
        joined = store.within(connection)
        with pytest.raises(holdfast.InvalidArgument, match="on purpose"):
            joined.run(refused)
        Counter(joined).add(1, note="sync")
        connection.execute("RELEASE SAVEPOINT holdfast")
        connection.commit()
    asyncio.run(body())
    check(where, ["sync", "async"])


class Shouting(Loader):
    """Loads a text in capitals."""

    def load(self, data: Any) -> str:
        """Load a text."""
        return bytes(data).decode().upper()


class Textual(Loader):
    """Loads a number as a text."""

    def load(self, data: Any) -> str:
        """Load the bytes."""
        return bytes(data).hex()


def customise(connection: Any) -> None:
    for format in (0, 1):
        for name, loader in (("text", Shouting), ("int8", Textual), ("bytea", Textual)):
            custom = type("Custom", (loader,), {"format": format})
            connection.adapters.register_loader(name, custom)


@pytest.mark.parametrize("row_factory", [tuple_row, namedtuple_row])
def test_loaders_and_row_factories_of_the_connection_do_not_matter(
    where: dict[str, Any], row_factory: Any
) -> None:
    async def body() -> None:
        connecting = psycopg.AsyncConnection.connect(where["url"], row_factory=row_factory)
        async with holdfast.aopen(**where) as store, await connecting as connection:
            customise(connection)
            session = await store.within(connection).session("async")
            await session.append("transcript", ["hello"])
            latest = await session.latest()
            assert latest is not None
            assert latest.channels["transcript"] == ["hello"]
            await connection.commit()

    with (
        holdfast.open(**where) as store,
        psycopg.connect(where["url"], row_factory=row_factory) as connection,
    ):
        customise(connection)
        session = store.within(connection).session("sync")
        session.append("transcript", ["hello"])
        latest = session.latest()
        assert latest is not None
        assert latest.channels["transcript"] == ["hello"]
        connection.commit()
        connection.isolation_level = IsolationLevel.SERIALIZABLE
        with pytest.raises(holdfast.InvalidArgument, match="this one is SERIALIZABLE"):
            session.append("transcript", ["again"])
        connection.rollback()
    asyncio.run(body())


def test_a_transaction_begins_as_the_connection_says(where: dict[str, Any]) -> None:
    with holdfast.open(**where) as store, psycopg.connect(where["url"]) as connection:
        connection.isolation_level = IsolationLevel.READ_UNCOMMITTED
        counter = Counter(store.within(connection))
        assert counter.add(1, note="first") == 1
        connection.commit()
        connection.isolation_level = IsolationLevel.REPEATABLE_READ
        with pytest.raises(holdfast.InvalidArgument, match="this one is REPEATABLE READ"):
            counter.value()
        connection.rollback()
        connection.isolation_level, connection.read_only = None, True
        with pytest.raises(holdfast.StoreUnavailable, match="read-only"):
            counter.add()
        assert counter.value() == 1
        connection.commit()
    check(where, ["first"])


def test_a_call_after_the_callers_transaction_is_refused(where: dict[str, Any]) -> None:
    with (
        holdfast.open(**where) as store,
        psycopg.connect(where["url"], autocommit=True) as connection,
    ):
        with connection.transaction():
            counter = Counter(store.within(connection))
            counter.add(1, note="inside")
        with pytest.raises(holdfast.InvalidArgument, match="begin one"):
            counter.add()
        with pytest.raises(holdfast.InvalidArgument, match="begin one"):
            store.within(connection)
    check(where, ["inside"])


def test_a_connection_in_pipeline_mode_is_refused_by_name(where: dict[str, Any]) -> None:
    with holdfast.open(**where) as store, psycopg.connect(where["url"]) as connection:
        with connection.pipeline(), pytest.raises(holdfast.InvalidArgument, match="pipeline mode"):
            Counter(store.within(connection)).add()
        Counter(store.within(connection)).add(1, note="after")
        connection.commit()
    check(where, ["after"])


def test_a_connection_that_another_thread_is_using_is_waited_for(where: dict[str, Any]) -> None:
    with (
        holdfast.open(**where) as store,
        psycopg.connect(where["url"]) as connection,
        psycopg.connect(where["url"]) as holder,
        psycopg.connect(where["url"], autocommit=True) as watcher,
        ThreadPoolExecutor(2) as threads,
    ):
        holder.execute("SELECT pg_advisory_xact_lock(4711)")
        threads.submit(connection.execute, "SELECT pg_advisory_xact_lock(4711)")
        wait_until_waiting(watcher, connection)
        adding = threads.submit(Counter(store.within(connection)).add, 1, note="after")
        holder.rollback()
        assert adding.result(WAIT_SECONDS) == 1
        connection.commit()
    check(where, ["after"])
