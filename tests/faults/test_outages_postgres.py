"""A PostgreSQL server that is away, silent or read-only: calls end in time and say why."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import psycopg
import pytest

import holdfast
from holdfast.kernel.operation import Async, C, Handle, Op, query, rows, whole_query
from holdfast.kernel.postgres import copy
from holdfast.testing.nouns import Counter
from holdfast.testing.proxy import PostgresProxy
from tests.faults.workload import found_in, in_threads
from tests.internals import engine_of

Place = dict[str, Any]

BUSY_SECONDS = 0.5
SILENT = "the server gave no answer for 2.5 s; nothing was written"


def within_limits(function: Callable[[], object]) -> None:
    """Run something that must return although the server does not answer."""
    in_threads([function])


@pytest.fixture
def impatient(through: Place) -> Place:
    return {**through, "busy_timeout_seconds": BUSY_SECONDS}


def test_a_silent_server_ends_every_call_in_time(
    proxy: PostgresProxy, impatient: Place, direct: Place
) -> None:
    def run() -> None:
        store = holdfast.open(**impatient)
        Counter(store).add(1, note="first")
        proxy.freeze()
        with pytest.raises(holdfast.StoreUnavailable, match=SILENT):
            Counter(store).value()
        with pytest.raises(holdfast.StoreUnavailable, match="nothing was written"):
            Counter(store).add(1, note="never")
        with pytest.raises(holdfast.StoreUnavailable, match="reached: connection timeout"):
            holdfast.open(**impatient)
        proxy.thaw()
        # The first call that can reach the server does.
        Counter(store).add(1, note="second")
        proxy.freeze()
        store.close()

    within_limits(run)
    with holdfast.open(**direct) as other:
        assert found_in(other) == ["first", "second"]


def test_a_commit_that_a_silent_server_may_have_seen_is_unknown(
    proxy: PostgresProxy, impatient: Place, direct: Place
) -> None:
    with holdfast.open(**impatient) as store, holdfast.open(**direct) as other:
        Counter(store).add_at_once(1, note="first")

        def run() -> None:
            proxy.freeze()
            with pytest.raises(holdfast.CommitUnknown) as caught:
                Counter(store).add_at_once(1, note="unknown")
            proxy.thaw()
            is_made = other.settle(caught.value.id)
            assert store.settle(caught.value.id) is is_made
            assert found_in(other) == ["first", *(["unknown"] if is_made else [])]

        within_limits(run)


def test_a_silent_server_ends_every_async_call_in_time(
    proxy: PostgresProxy, impatient: Place
) -> None:
    async def run() -> None:
        store = await holdfast.aopen(**impatient)
        counter = Counter(store)
        await counter.add(1, note="first")
        proxy.freeze()
        with pytest.raises(holdfast.StoreUnavailable, match=SILENT):
            await counter.value()
        with pytest.raises(holdfast.StoreUnavailable, match="nothing was written"):
            await counter.add(1, note="never")
        proxy.thaw()
        assert await counter.add(1, note="second") == 2
        proxy.freeze()
        with pytest.raises(holdfast.CommitUnknown):
            await counter.add_at_once(1, note="unknown")
        await store.close()

    within_limits(lambda: asyncio.run(run()))


class Slow(Handle[C]):
    """Statements that take long on the server."""

    SLEEP = "SELECT pg_sleep(CAST(:seconds AS double precision)) IS NOT NULL AS slept"
    LOCKED = "SELECT count(*) AS found FROM hf_test_counters"

    @query
    def read(self, seconds: float) -> Op[list[dict[str, Any]]]:
        """Sleep on the server."""
        return (yield from rows(self.SLEEP, seconds=seconds))

    @whole_query
    def read_all(self, seconds: float) -> Op[list[dict[str, Any]]]:
        """Sleep on the server, as a query that reads everything."""
        return (yield from rows(self.SLEEP, seconds=seconds))

    @whole_query
    def read_locked(self) -> Op[list[dict[str, Any]]]:
        """Read a table that somebody may have locked."""
        return (yield from rows(self.LOCKED))


LONGER_THAN_THE_LIMIT = 6.0
FOR_EVER = 600.0


def test_a_query_that_reads_everything_may_be_slow(impatient: Place) -> None:
    with holdfast.open(**impatient) as store:
        slow = Slow(store.runtime)
        with pytest.raises(holdfast.StoreUnavailable, match=SILENT):
            slow.read(FOR_EVER)
        assert slow.read_all(LONGER_THAN_THE_LIMIT) == [{"slept": True}]


def test_an_async_query_that_reads_everything_may_be_slow(impatient: Place) -> None:
    async def run() -> None:
        async with holdfast.aopen(**impatient) as store:
            slow: Slow[Async] = Slow(store.runtime)
            with pytest.raises(holdfast.StoreUnavailable, match=SILENT):
                await slow.read(FOR_EVER)
            assert await slow.read_all(LONGER_THAN_THE_LIMIT) == [{"slept": True}]

    asyncio.run(run())


def test_an_export_counts_what_it_leaves_behind_however_long_that_takes(
    impatient: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = f"SELECT 1 AS items WHERE pg_sleep({LONGER_THAN_THE_LIMIT}) IS NOT NULL"
    monkeypatch.setattr("holdfast.work.portable.COUNT_OF_NO_SESSION", slow)
    with holdfast.open(**impatient) as store:
        assert store.export(tmp_path / "all.export").left_behind == {"work_items": 1}


def test_a_slow_query_ends_when_the_server_answers_nobody(
    proxy: PostgresProxy, impatient: Place
) -> None:
    def run() -> None:
        with holdfast.open(**impatient) as store:
            freezing = threading.Timer(0.5, proxy.freeze)
            freezing.start()
            with pytest.raises(holdfast.StoreUnavailable, match=SILENT):
                Slow(store.runtime).read_all(FOR_EVER)
            freezing.join()
            proxy.thaw()

    within_limits(run)


def test_a_query_that_reads_everything_does_not_wait_for_a_lock(
    impatient: Place, direct: Place
) -> None:
    with holdfast.open(**impatient) as store, locked(direct, "hf_test_counters"):

        def run() -> None:
            with pytest.raises(holdfast.StoreBusy):
                Slow(store.runtime).read_locked()

        within_limits(run)


def test_a_backup_ends_when_the_server_falls_silent(
    proxy: PostgresProxy, impatient: Place, tmp_path: Path
) -> None:
    def freeze(done: int, total: int) -> None:
        proxy.freeze()

    def run() -> None:
        with holdfast.open(**impatient) as store:
            Counter(store).add(1, note="first")
            with pytest.raises(holdfast.StoreUnavailable, match=SILENT):
                store.backup(tmp_path / "copy.db", progress=freeze)
            with pytest.raises(holdfast.StoreUnavailable, match="reached: connection timeout"):
                store.backup(tmp_path / "copy.db")
            proxy.thaw()
            assert list(tmp_path.iterdir()) == []
            store.backup(tmp_path / "copy.db")
        with holdfast.open(f"sqlite:///{tmp_path}/copy.db") as copied:
            assert [event.data["note"] for event in copied.events("root")] == ["first"]

    within_limits(run)


@contextlib.contextmanager
def locked(place: Place, table: str = "hf_work") -> Iterator[psycopg.Connection[Any]]:
    """Lock a table of a store for all others."""
    with psycopg.connect(place["url"]) as locking:
        locking.execute(f'LOCK TABLE "{place["namespace"]}".{table}'.encode())
        yield locking


def test_neither_a_backup_nor_a_vacuum_waits_for_ever_for_a_lock(
    impatient: Place, direct: Place, tmp_path: Path
) -> None:
    def run() -> None:
        with pytest.raises(holdfast.StoreBusy, match="lock timeout"):
            store.backup(tmp_path / "copy.db")
        with pytest.raises(holdfast.StoreBusy, match=r"was locked for 0\.5 seconds"):
            engine_of(store).vacuum()

    with holdfast.open(**impatient) as store:
        with locked(direct):
            within_limits(run)
        engine_of(store).vacuum()


WAITING = """
SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = CAST(%s AS text)::regclass
"""


def test_a_vacuum_ends_when_the_server_falls_silent(
    proxy: PostgresProxy, impatient: Place, direct: Place
) -> None:
    def freeze(looking: psycopg.Connection[Any]) -> None:
        table = f'"{direct["namespace"]}".hf_work'
        while looking.execute(WAITING, [table]).fetchone() == (0,):
            time.sleep(0.01)
        proxy.freeze()

    def run() -> None:
        with pytest.raises(holdfast.StoreUnavailable, match=SILENT):
            engine_of(store).vacuum()
        proxy.thaw()

    with holdfast.open(**impatient) as store, locked(direct) as locking:
        freezing = threading.Thread(target=freeze, args=[locking])
        freezing.start()
        within_limits(run)
        freezing.join()


def test_a_vacuum_may_be_slow(impatient: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = f"FROM pg_sleep({LONGER_THAN_THE_LIMIT}), pg_tables"
    listing = copy.LIST_POSTGRES_TABLES.replace("FROM pg_tables", slow)
    monkeypatch.setattr(copy, "LIST_POSTGRES_TABLES", listing)
    with holdfast.open(**impatient) as store:
        engine_of(store).vacuum()


def test_one_silent_connection_is_the_end_of_all_that_were_idle(
    proxy: PostgresProxy, impatient: Place
) -> None:
    """Else each call after an outage could find another one that leads nowhere."""
    with holdfast.open(**impatient) as store:
        connections: Any = engine_of(store).connections
        taken = [connections.take(), connections.take(), connections.take()]
        for place in taken[1:]:
            connections.give(connections.connect(place, 10))
        connections.give(taken[0])
        assert len(connections.idle) == 3
        proxy.freeze()
        with pytest.raises(holdfast.StoreUnavailable):
            Counter(store).value()
        assert connections.idle == []
        assert connections.lent == 0
        proxy.thaw()


def test_the_first_call_that_can_reach_the_server_succeeds(
    proxy: PostgresProxy, impatient: Place
) -> None:
    with holdfast.open(**impatient) as store:
        Counter(store).add(1, note="first")
        proxy.refuse(600)
        proxy.cut_all()
        until = time.monotonic() + 5
        while time.monotonic() < until:
            with pytest.raises(holdfast.StoreUnavailable, match="cannot be reached"):
                Counter(store).value()
        proxy.refuse(0)
        assert Counter(store).value() == 1


@contextlib.contextmanager
def closing_server() -> Iterator[tuple[str, list[float]]]:
    """Accept connections and close them at once; remember when."""
    listener = socket.create_server(("127.0.0.1", 0))
    accepted: list[float] = []

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                listener.accept()[0].close()
                accepted.append(time.monotonic())

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield f"postgresql://u@127.0.0.1:{listener.getsockname()[1]}/d?sslmode=disable", accepted
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def test_the_thread_that_listens_waits_between_its_attempts_however_often_it_is_rung(
    direct: Place,
) -> None:
    with closing_server() as (dsn, accepted):
        url = f"{direct['url']}&listen={quote(dsn, safe='')}"
        with holdfast.open(**{**direct, "url": url}) as store:
            began = time.monotonic()
            while len(accepted) < 5:
                store.runtime.signals.ring("topic")
                time.sleep(0.001)
            # The pauses double, from half of 0.05 s on.
            assert accepted[4] - began > 0.025 + 0.05 + 0.1 + 0.2


def wait_for_connection(proxy: PostgresProxy) -> None:
    while not proxy.connections:
        time.sleep(0.01)


def test_closing_an_async_store_leaves_the_event_loop_free(
    proxy: PostgresProxy, direct: Place, postgres_dsn: str
) -> None:
    """A ring waits to be sent to a server that does not answer."""
    url = f"{direct['url']}&listen={quote(proxy.dsn(postgres_dsn), safe='')}"

    async def run() -> int:
        arguments = {**direct, "url": url, "busy_timeout_seconds": BUSY_SECONDS}
        store = await holdfast.aopen(**arguments)
        store.runtime.signals.ring("first")
        await asyncio.to_thread(wait_for_connection, proxy)
        proxy.freeze()
        store.runtime.signals.ring("second")
        closing = asyncio.create_task(store.close())
        turns = 0
        while not closing.done():
            await asyncio.sleep(0.01)
            turns += 1
        await closing
        return turns

    turns = []
    within_limits(lambda: turns.append(asyncio.run(run())))
    assert turns[0] > 5


def read_only(place: Place) -> Place:
    option = quote("-c default_transaction_read_only=on")
    return {**place, "url": f"{place['url']}&options={option}"}


def test_a_read_only_server_serves_reads(direct: Place) -> None:
    with holdfast.open(**direct) as store:
        store.session("s").append("log", ["a"])
        Counter(store).add(1, note="first")
    with holdfast.open(**read_only(direct)) as store:
        assert Counter(store).value() == 1
        assert [info.id for info in store.sessions()] == ["s"]
        assert found_in(store) == ["first"]
        with pytest.raises(holdfast.StoreUnavailable, match="PostgreSQL is read-only"):
            Counter(store).add(1, note="refused")
        with pytest.raises(holdfast.StoreUnavailable, match="PostgreSQL is read-only"):
            Counter(store).add_at_once(1, note="refused")
        assert Counter(store).value() == 1


def test_a_read_only_server_serves_async_reads(direct: Place) -> None:
    async def run() -> None:
        async with holdfast.aopen(**read_only(direct)) as store:
            assert await Counter(store).value() == 0
            with pytest.raises(holdfast.StoreUnavailable, match="PostgreSQL is read-only"):
                await Counter(store).add(1, note="refused")
            assert await Counter(store).value() == 0

    asyncio.run(run())


@pytest.fixture
def role(postgres_dsn: str) -> Iterator[str]:
    """A role whose new connections are read-only, until that is reset."""
    name = f"r_{uuid.uuid4().hex[:20]}"
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {name} LOGIN SUPERUSER")
        connection.execute(f"ALTER ROLE {name} SET default_transaction_read_only = on")
        yield name
        connection.execute(f"DROP OWNED BY {name}")
        connection.execute(f"DROP ROLE {name}")


def test_the_first_write_after_a_server_was_read_only_succeeds(
    direct: Place, role: str, postgres_dsn: str
) -> None:
    with holdfast.open(**direct) as store:
        Counter(store).add(1, note="first")
    parts = urlsplit(direct["url"])
    host = parts.netloc.rpartition("@")[2]
    url = parts._replace(netloc=f"{role}@{host}").geturl()
    with holdfast.open(**{**direct, "url": url}) as store:
        for write in (Counter(store).add, Counter(store).add_at_once):
            with pytest.raises(holdfast.StoreUnavailable, match="PostgreSQL is read-only"):
                write(1, note="refused")
        with psycopg.connect(postgres_dsn, autocommit=True) as connection:
            connection.execute(f"ALTER ROLE {role} RESET default_transaction_read_only")
        # As after a failover: the connections that are open still are read-only.
        Counter(store).add(1, note="second")
        assert found_in(store) == ["first", "second"]
