"""What only PostgreSQL has: the caller's own transaction, lost connections, poolers."""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import pytest
import sqlalchemy

import holdfast
from holdfast.kernel.driver import Hooks, Trace
from holdfast.kernel.postgres import PostgresDriver
from holdfast.kernel.postgres.connections import CONNECTIONS_MAX
from holdfast.kernel.postgres.followers import OtherListeners
from holdfast.kernel.postgres.pipeline import Message
from holdfast.kernel.postgres.transactions import BACKOFF_SECONDS_MAX, _pause
from holdfast.kernel.postgres.tree_queues import queue_of
from holdfast.testing.conformance import CASES
from holdfast.testing.nouns import Counter, Setup
from holdfast.testing.subject import Case, Colour, Subject
from tests.internals import engine_of

POOL_SIZE = 4
PREPARED = "SELECT name, statement FROM pg_prepared_statements WHERE name LIKE 'holdfast%'"


@pytest.fixture
def where(postgres_dsn: str, ready_namespace: str) -> dict[str, Any]:
    place: dict[str, Any] = {"url": postgres_dsn, "namespace": ready_namespace}
    with holdfast.open(**place) as store:
        Setup(store).install()
        Counter(store).plant()
    return place


def test_within_joins_the_callers_transaction(where: dict[str, Any]) -> None:
    with holdfast.open(**where) as store, psycopg.connect(where["url"]) as connection:
        inside = Counter(store.within(connection))
        assert inside.add(5) == 5
        assert inside.value() == 5
        assert Counter(store).value() == 0, "nothing is visible before the caller commits"
        connection.rollback()
        assert Counter(store).value() == 0
        assert Counter(store.within(connection)).add(7) == 7
        connection.commit()
        assert Counter(store).value() == 7
        assert [event.position for event in store.events("root")] == [1]


def test_threads_take_turns_inside_the_callers_transaction(where: dict[str, Any]) -> None:
    def add(inside: Any) -> None:
        inside.add()
        # This one is rolled back, which undoes nothing but itself.
        with pytest.raises(holdfast.InvalidArgument, match="above the limit"):
            inside.add_below(0)

    with (
        holdfast.open(**where) as store,
        psycopg.connect(where["url"]) as connection,
        ThreadPoolExecutor(4) as threads,
    ):
        inside = [Counter(store.within(connection)) for _ in range(20)]
        list(threads.map(add, inside))
        connection.commit()
        assert Counter(store).value() == len(inside)


def test_tasks_take_turns_inside_the_callers_transaction(where: dict[str, Any]) -> None:
    async def body() -> None:
        async with (
            holdfast.aopen(**where) as store,
            await psycopg.AsyncConnection.connect(where["url"]) as connection,
        ):
            inside = [Counter(store.within(connection)) for _ in range(8)]
            await asyncio.gather(*(each.add(1) for each in inside))
            await connection.commit()
            assert await Counter(store).value() == len(inside)

    asyncio.run(body())


def test_a_call_in_a_transaction_that_has_failed_or_is_gone(where: dict[str, Any]) -> None:
    with holdfast.open(**where) as store, psycopg.connect(where["url"]) as connection:
        inside = Counter(store.within(connection))
        with pytest.raises(psycopg.errors.UndefinedTable):
            connection.execute("SELECT * FROM nothing")
        with pytest.raises(holdfast.InvalidArgument, match="has failed; roll it back"):
            inside.add(1)
        connection.rollback()
        connection.execute("SELECT 1")
        with psycopg.connect(where["url"], autocommit=True) as other:
            other.execute("SELECT pg_terminate_backend(%s)", (connection.info.backend_pid,))
        with pytest.raises(holdfast.StoreUnavailable):
            inside.add(1)


def test_a_refused_operation_inside_leaves_the_callers_transaction_usable(
    where: dict[str, Any],
) -> None:
    with holdfast.open(**where) as store, psycopg.connect(where["url"]) as connection:
        joined = store.within(connection)
        Counter(joined).add(1)
        with pytest.raises(holdfast.InvalidArgument, match="above the limit"):
            Counter(joined).add_below(3, 5)
        with pytest.raises(holdfast.NotFound):
            Counter(joined, "nowhere").add()

        def both(tx: holdfast.Transaction) -> holdfast.Op[int]:
            yield from Counter(tx).add(1)
            return (yield from Counter(tx).add(1))

        assert joined.run(both) == 3
        connection.commit()
        assert Counter(store).value() == 3


def test_within_serves_async_connections(where: dict[str, Any]) -> None:
    async def run() -> None:
        async with (
            await holdfast.aopen(**where) as store,
            await psycopg.AsyncConnection.connect(where["url"]) as connection,
        ):
            assert await Counter(store.within(connection)).add(4) == 4
            assert await Counter(store).value() == 0
            await connection.commit()
            assert await Counter(store).value() == 4

    asyncio.run(run())


def test_within_serves_sqlalchemy(where: dict[str, Any]) -> None:
    url = where["url"].replace("postgresql://", "postgresql+psycopg://")
    engine = sqlalchemy.create_engine(url)
    with holdfast.open(**where) as store, engine.begin() as connection:
        connection.execute(sqlalchemy.text("SELECT 1"))
        driver_connection = connection.connection.driver_connection
        Counter(store.within(driver_connection)).add(3)
    engine.dispose()
    with holdfast.open(**where) as store:
        assert Counter(store).value() == 3


def test_calls_one_after_the_other_share_one_connection(where: dict[str, Any]) -> None:
    with holdfast.open(**where) as store:
        for _ in range(3):
            Counter(store).add()
            Counter(store).value()
        assert isinstance(store.runtime.driver, PostgresDriver)
        assert len(engine_of(store).connections.idle) == 1


def test_connections_that_the_server_closed_are_replaced(where: dict[str, Any]) -> None:
    with holdfast.open(**where) as store, psycopg.connect(where["url"], autocommit=True) as admin:
        counter = Counter(store)
        for expected in range(1, 6):
            for connection in engine_of(store).connections.idle:
                admin.execute("SELECT pg_terminate_backend(%s)", [connection.backend_pid])
            assert counter.add() == expected
            assert counter.value() == expected
        assert len(store.events("root")) == 5


@pytest.mark.parametrize("place", ["the row", "the queue before it"])
def test_a_tree_locked_for_too_long_is_busy_and_nothing_is_written(
    where: dict[str, Any], place: str
) -> None:
    lock = f'SELECT * FROM "{where["namespace"]}".hf_trees FOR UPDATE'
    if place != "the row":
        lock = f"SELECT pg_advisory_xact_lock({queue_of(where['namespace'], ['root'])})"
    with (
        holdfast.open(**where, busy_timeout_seconds=0.3) as store,
        psycopg.connect(where["url"]) as other,
    ):
        other.execute(lock.encode())
        with pytest.raises(holdfast.StoreBusy, match="lock timeout"):
            Counter(store).add()
        with pytest.raises(holdfast.StoreBusy, match="lock timeout"):
            Counter(store).add_at_once()
        other.rollback()
        assert Counter(store).add() == 1


IN_LINE = """
SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1 AND NOT granted
AND (CAST(classid AS BIGINT) << 32 | CAST(objid AS BIGINT)) = %s
"""


def test_writers_of_one_tree_queue_outside_its_row_and_all_commit(where: dict[str, Any]) -> None:
    """One of 64 waits for the row that another transaction holds, the rest behind it in line."""
    queue = queue_of(where["namespace"], ["root"])
    with (
        ExitStack() as stack,
        ThreadPoolExecutor(64) as threads,
        psycopg.connect(where["url"]) as holder,
        psycopg.connect(where["url"], autocommit=True) as admin,
    ):
        stores = [
            stack.enter_context(holdfast.open(**where, busy_timeout_seconds=30)) for _ in range(2)
        ]
        Counter(stores[0].within(holder)).add()
        # These take all connections; calls in one round trip would share some of them.
        adding = [
            threads.submit(Counter(store).add) for _ in range(CONNECTIONS_MAX) for store in stores
        ]
        while admin.execute(IN_LINE, [queue]).fetchone() != (2 * CONNECTIONS_MAX - 1,):
            assert not any(each.done() for each in adding)
            time.sleep(0.02)
        adding += [
            threads.submit(Counter(store).add_at_once)
            for _ in range(CONNECTIONS_MAX)
            for store in stores
        ]
        holder.commit()
        assert sorted(each.result() for each in adding) == [*range(2, 66)]
        positions = [event.position for event in stores[0].events("root")]
    assert positions == [*range(1, 66)]


def test_serialization_failures_are_run_again(where: dict[str, Any]) -> None:
    """A statement that fails with 40001 twice: the caller sees one addition."""
    schema = where["namespace"]
    with psycopg.connect(where["url"], autocommit=True) as admin:
        admin.execute(f'CREATE SEQUENCE "{schema}".tries')
        admin.execute(
            f"""
            CREATE FUNCTION "{schema}".fail_twice() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN
                IF nextval('"{schema}".tries') <= 2 THEN
                    RAISE EXCEPTION 'on purpose' USING ERRCODE = 'serialization_failure';
                END IF;
                RETURN NEW;
            END $$
            """
        )
        admin.execute(
            f'CREATE TRIGGER t BEFORE INSERT ON "{schema}".hf_test_counters '
            f'FOR EACH ROW EXECUTE FUNCTION "{schema}".fail_twice()'
        )
        traces: list[Trace] = []
        with holdfast.open(**where, hooks=Hooks(trace=traces.append)) as store:
            first, second = Counter(store).name_twice()
            assert first != second
            assert Counter(store).value() == 1
            assert len(store.events("root")) == 1
        assert [trace.attempts for trace in traces if trace.call == "Counter.name_twice"] == [3]


def test_the_pause_between_tries_is_bounded_however_many_there_were() -> None:
    """A server may be away for an hour, which is the longest busy_timeout_seconds."""
    assert all(0 < _pause(tries) <= BACKOFF_SECONDS_MAX for tries in (0, 1, 50, 20_000))


WRITERS = "SELECT id FROM {schema}.hf_writers ORDER BY id"


def test_connections_closed_in_good_order_leave_no_row_behind(
    where: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with psycopg.connect(where["url"], autocommit=True) as admin:

        def writers() -> list[str]:
            found = admin.execute(WRITERS.format(schema=f'"{where["namespace"]}"').encode())
            return [id for (id,) in found.fetchall()]

        with holdfast.open(**where) as store:
            assert writers() == []
            Counter(store).add()
            [first] = writers()
            with monkeypatch.context() as patched:
                # The connection has lived long enough when it comes back.
                patched.setattr("holdfast.kernel.postgres.connections.LIFE_SECONDS_MAX", 0.0)
                Counter(store).add()
            # The one in its place removes its row.
            Counter(store).add()
            [second] = writers()
            assert second != first
            with ThreadPoolExecutor(4) as threads:
                list(threads.map(lambda _: Counter(store).add(), range(40)))
        assert writers() == []


def test_a_row_that_says_no_to_a_commit_stays(where: dict[str, Any]) -> None:
    with holdfast.open(**where) as store, psycopg.connect(where["url"], autocommit=True) as admin:
        Counter(store).add()
        [link] = engine_of(store).connections.idle
        assert not store.settle(f"{link.writer_id}:1000")
        store.close()
        found = admin.execute(WRITERS.format(schema=f'"{where["namespace"]}"').encode())
        assert found.fetchall() == [(link.writer_id,)]


LISTENING = """
SELECT pid FROM pg_stat_activity
WHERE application_name = 'holdfast-listener' AND strpos(query, %s) > 0 AND state = 'idle'
"""


def listening(store: holdfast.Store, where: dict[str, Any], *, gone: int = 0) -> int:
    """Let a store listen, and return the id of the server's process that it listens to."""
    signals = store.runtime.signals
    with psycopg.connect(where["url"], autocommit=True) as admin:
        for _ in range(1_200):
            signals.wait("nobody rings", signals.count("nobody rings"), 0.05)
            found = admin.execute(LISTENING, [where["namespace"]]).fetchall()
            if found and found != [(gone,)]:
                return int(found[0][0])
    raise AssertionError("the store does not listen")


def ring(admin: psycopg.Connection[Any], where: dict[str, Any], topic: str) -> None:
    """Ring as another process does."""
    admin.execute("SELECT pg_notify(%s, %s)", [f"holdfast_{where['namespace']}", topic])


def test_the_listener_reconnects(where: dict[str, Any]) -> None:
    """After its connection is cut, rings still arrive."""
    with (
        holdfast.open(**where) as store,
        psycopg.connect(where["url"], autocommit=True) as admin,
    ):
        cut = listening(store, where)
        admin.execute("SELECT pg_terminate_backend(%s)", [cut])
        listening(store, where, gone=cut)
        signals = store.runtime.signals
        # It wakes everybody once by itself, for rings that it may have missed.
        for _ in range(2):
            seen = signals.count("topic")
            ring(admin, where, "topic")
            assert signals.wait("topic", seen, 60) is True


def test_stores_of_one_process_wait_on_one_connection(where: dict[str, Any]) -> None:
    """Those of other schemas too; it is closed with the last of them."""
    other = {**where, "namespace": f"{where['namespace']}_other"}
    with psycopg.connect(where["url"], autocommit=True) as admin, ExitStack() as stack:
        stores = [stack.enter_context(holdfast.open(**where)) for _ in range(3)]
        pid = listening(stores[0], where)
        elsewhere = stack.enter_context(holdfast.open(**other))
        assert listening(elsewhere, other) == pid
        for store in stores:
            # Closing one leaves the others listening.
            signals = store.runtime.signals
            for each, topic in ((where, "here"), (other, "there")):
                waiting = signals if each is where else elsewhere.runtime.signals
                seen = waiting.count(topic)
                ring(admin, each, topic)
                assert waiting.wait(topic, seen, 60) is True
            store.close()
        elsewhere.close()
        for _ in range(1_200):
            found = admin.execute("SELECT 1 FROM pg_stat_activity WHERE pid = %s", [pid])
            if not found.fetchall():
                return
            time.sleep(0.05)
        raise AssertionError("the connection outlives the stores")


def test_a_ring_wakes_the_other_stores_of_the_process(where: dict[str, Any]) -> None:
    with holdfast.open(**where) as here, holdfast.open(**where) as there:
        seen = there.runtime.signals.count("topic")
        here.runtime.signals.ring("topic")
        assert there.runtime.signals.wait("topic", seen, 60) is True


def test_a_ring_is_sent_although_the_one_before_it_returned_late(
    where: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that rings may be held up just after it has woken the listener."""
    write = os.write

    def late(descriptor: int, data: bytes) -> int:
        written = write(descriptor, data)
        arrived.extend(each.payload for each in other.notifies(timeout=60, stop_after=1))
        return written

    arrived: list[str] = []
    with (
        holdfast.open(**where) as store,
        psycopg.connect(where["url"], autocommit=True) as other,
    ):
        listening(store, where)
        other.execute(OtherListeners(where["namespace"]).announcement.made.encode())
        other.execute(f"LISTEN holdfast_{where['namespace']}")
        with monkeypatch.context() as patch:
            patch.setattr("holdfast.kernel.postgres.notify.os.write", late)
            store.runtime.signals.ring("first")
        store.runtime.signals.ring("second")
        arrived.extend(each.payload for each in other.notifies(timeout=60, stop_after=1))
        assert arrived == ["first", "second"]


@pytest.fixture(scope="module")
def pooler(postgres_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A pgbouncer in transaction mode before the server."""
    program = shutil.which("pgbouncer")
    if program is None:
        pytest.skip("pgbouncer is not installed: the tests behind a pooler did not run")
    info = psycopg.conninfo.conninfo_to_dict(postgres_dsn)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tmp_path_factory.mktemp("pgbouncer")
    user = info.get("user", "postgres")
    settings = folder / "pgbouncer.ini"
    settings.write_text(
        f"[databases]\n* = host={info['host']} port={info.get('port', 5432)} user={user}\n"
        f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nauth_type = any\n"
        f"pool_mode = transaction\ndefault_pool_size = {POOL_SIZE}\n"
        "unix_socket_dir =\nmax_client_conn = 200\n"
    )
    command = [program, str(settings)]
    if os.geteuid() == 0:
        # It refuses to run as root, and the server's socket is open to the server's user.
        for path in (folder, *folder.parents[:2]):
            path.chmod(0o755)
        command[1:1] = ["-u", pwd.getpwuid(os.stat(str(info["host"])).st_uid).pw_name]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for_port(port)
        yield f"postgresql://{user}@127.0.0.1:{port}/{info['dbname']}"
    finally:
        process.terminate()
        process.wait()


def wait_for_port(port: int) -> None:
    for _ in range(1_200):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError("pgbouncer did not start")


@pytest.mark.parametrize("colour", ["sync", "async"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_every_case_behind_a_pooler(
    case: Case, colour: Colour, pooler: str, postgres_dsn: str, ready_namespace: str, tmp_path: Path
) -> None:
    async def run() -> None:
        direct = quote(postgres_dsn, safe="")
        place = {"url": f"{pooler}?prepare=off&listen={direct}", "namespace": ready_namespace}
        subject = Subject(place, colour, tmp_path)
        try:
            await case(subject)
        finally:
            await subject.close()

    asyncio.run(run())


def test_no_two_statements_are_prepared_under_one_name(where: dict[str, Any]) -> None:
    """An old pooler lets one client run what another has prepared on the same connection."""
    texts: dict[str, set[str]] = {}
    for first, second in (("add", "value"), ("value", "add")):
        with holdfast.open(**where) as store:
            getattr(Counter(store), first)()
            getattr(Counter(store), second)()
            (link,) = engine_of(store).connections.idle
            for row in link.run([Message(PREPARED)], 60)[0].rows:
                texts.setdefault(row["name"], set()).add(row["statement"])
    assert len(texts) > 2
    assert all(len(found) == 1 for found in texts.values())


def test_a_pooler_without_prepared_statements_says_what_to_do(
    pooler: str, ready_namespace: str
) -> None:
    def open_often() -> None:
        for _ in range(POOL_SIZE + 1):
            holdfast.open(f"{pooler}?listen=off", namespace=ready_namespace).close()

    with pytest.raises(holdfast.StoreError, match="add `prepare=off` to the URL"):
        open_often()
