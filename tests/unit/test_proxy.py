"""The proxy must cut where it says, in front of a real server."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from holdfast.testing.proxy import Moment, PostgresProxy

Send = Callable[[psycopg.Connection, str], None]


@dataclass(frozen=True)
class Ends:
    """A table, the way to it through the proxy and the way around it."""

    proxy: PostgresProxy
    through: str
    around: psycopg.Connection
    table: str

    def insert(self, number: int) -> str:
        return f"INSERT INTO {self.table} VALUES ({number})"

    def rows(self) -> list[int]:
        rows = self.around.execute(f"SELECT x FROM {self.table} ORDER BY x").fetchall()
        return [x for (x,) in rows]


@pytest.fixture
def ends(postgres_dsn: str) -> Iterator[Ends]:
    table = f"proxy_{uuid.uuid4().hex[:16]}"
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute(f"CREATE TABLE {table} (x int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
        with PostgresProxy(postgres_dsn) as proxy:
            yield Ends(proxy, proxy.dsn(postgres_dsn), connection, table)
        connection.execute(f"DROP TABLE {table}")


def simple(connection: psycopg.Connection, insert: str) -> None:
    connection.execute(insert)
    connection.commit()


def in_one_message(connection: psycopg.Connection, insert: str) -> None:
    connection.autocommit = True
    connection.execute(f"BEGIN; {insert}; COMMIT".encode())


def prepared(connection: psycopg.Connection, insert: str) -> None:
    connection.execute(insert)
    connection.execute("COMMIT", prepare=True)


def pipelined(connection: psycopg.Connection, insert: str) -> None:
    connection.autocommit = True
    with connection.pipeline():
        connection.execute("BEGIN")
        connection.execute(insert)
        connection.execute("COMMIT")
        connection.execute(insert.replace("(1)", "(2)"))


def pipelined_in_steps(connection: psycopg.Connection, insert: str) -> None:
    with connection.pipeline(), connection.transaction():
        assert connection.execute(insert + " RETURNING x").fetchall() == [(1,)]


def connect(dsn: str) -> psycopg.Connection:
    """Connect, and leave a prepared statement behind whose text is COMMIT."""
    connection = psycopg.connect(dsn, autocommit=True)
    connection.execute("BEGIN")
    connection.execute("COMMIT", prepare=True)
    prepared = "SELECT count(*) FROM pg_prepared_statements WHERE statement = 'COMMIT'"
    assert connection.execute(prepared).fetchall() == [(1,)]
    connection.autocommit = False
    return connection


SENDERS = [simple, in_one_message, prepared, pipelined, pipelined_in_steps]


@pytest.mark.parametrize("send", SENDERS)
def test_a_commit_cut_before_never_happens(ends: Ends, send: Send) -> None:
    connection = connect(ends.through)
    cut = ends.proxy.cut_next_commit("before")
    with pytest.raises(psycopg.OperationalError):
        send(connection, ends.insert(1))
    assert connection.closed
    assert cut.wait() is None
    assert ends.rows() == []


@pytest.mark.parametrize("send", SENDERS)
def test_a_commit_cut_after_has_happened_unknown_to_the_client(ends: Ends, send: Send) -> None:
    connection = connect(ends.through)
    cut = ends.proxy.cut_next_commit("after")
    with pytest.raises(psycopg.OperationalError):
        send(connection, ends.insert(1))
    assert connection.closed
    assert cut.wait() == "COMMIT"
    assert ends.rows() == [1]


@pytest.mark.parametrize("send", SENDERS)
def test_a_late_commit_happens_after_the_client_was_cut(ends: Ends, send: Send) -> None:
    connection = connect(ends.through)
    cut = ends.proxy.cut_next_commit("before-late", delay_seconds=2.0)
    with pytest.raises(psycopg.OperationalError):
        send(connection, ends.insert(1))
    assert ends.rows() == []
    assert cut.wait() == "COMMIT"
    assert ends.rows() == [1]


def test_the_lock_of_a_late_commit_makes_the_question_wait(ends: Ends) -> None:
    connection = connect(ends.through)
    cut = ends.proxy.cut_next_commit("before-late", delay_seconds=0.3)
    with pytest.raises(psycopg.OperationalError):
        simple(connection, ends.insert(1))
    with ends.around.transaction():
        ends.around.execute(f"LOCK TABLE {ends.table}")
        assert ends.rows() == [1]
    assert cut.wait() == "COMMIT"


def test_the_answer_of_a_commit_that_failed_is_kept(ends: Ends) -> None:
    connection = connect(ends.through)
    connection.execute(ends.insert(1))
    connection.execute(ends.insert(1))
    cut = ends.proxy.cut_next_commit("after")
    with pytest.raises(psycopg.OperationalError):
        connection.commit()
    assert cut.wait() == "ERROR 23505"
    assert ends.rows() == []


@pytest.mark.parametrize(("moment", "expected"), [("before", []), ("after", [1])])
def test_a_statement_that_commits_by_itself_can_be_cut_too(
    ends: Ends, moment: Moment, expected: list[int]
) -> None:
    connection = connect(ends.through)
    connection.autocommit = True
    cut = ends.proxy.cut_next_commit(moment, statement="INSERT .*")
    with pytest.raises(psycopg.OperationalError):
        connection.execute(f"INSERT INTO {ends.table} VALUES (%s)", (1,))
    assert cut.wait() == ("INSERT 0 1" if expected else None)
    assert ends.rows() == expected


def test_what_is_not_cut_passes_unchanged(ends: Ends) -> None:
    with psycopg.connect(ends.through) as connection:
        with connection.cursor().copy(f"COPY {ends.table} FROM STDIN") as copy:
            for number in range(2000):
                copy.write_row((number,))
        connection.execute("SAVEPOINT s")
        with pytest.raises(psycopg.errors.DivisionByZero):
            connection.execute("SELECT 1 / %s", (0,))
        connection.execute("ROLLBACK TO s")
        rows = connection.execute("SELECT repeat('x', 1000000)").fetchall()
        assert len(rows[0][0]) == 1_000_000
        cut = ends.proxy.cut_next_commit("after")
        with pytest.raises(psycopg.OperationalError):
            connection.commit()
    assert cut.wait() == "COMMIT"
    assert ends.rows() == list(range(2000))


def test_a_copy_with_parameters_does_not_confuse_the_count_of_answers(ends: Ends) -> None:
    connection = psycopg.connect(ends.through)
    query = f"COPY {ends.table} FROM STDIN"
    pgconn = connection.pgconn
    connection.execute("SELECT 1")
    assert pgconn.exec_params(query.encode(), []).status == psycopg.pq.ExecStatus.COPY_IN
    pgconn.put_copy_data(b"7\n")
    pgconn.put_copy_end()
    # Waiting inside libpq would hold the interpreter lock, which the proxy's thread needs.
    while pgconn.flush() or pgconn.is_busy():
        time.sleep(0.001)
        pgconn.consume_input()
    while pgconn.get_result() is not None:
        pass
    cut = ends.proxy.cut_next_commit("after")
    with pytest.raises(psycopg.OperationalError):
        connection.commit()
    assert cut.wait() == "COMMIT"
    assert ends.rows() == [7]


def test_a_client_that_asks_for_encryption_is_refused_and_goes_on_without(ends: Ends) -> None:
    dsn = ends.through.replace("sslmode=disable", "sslmode=prefer")
    with psycopg.connect(dsn) as connection:
        assert connection.execute("SELECT 1").fetchall() == [(1,)]


def test_a_statement_can_be_cancelled_through_the_proxy(ends: Ends) -> None:
    with psycopg.connect(ends.through, autocommit=True) as connection:
        timer = threading.Timer(0.1, connection.cancel_safe)
        timer.start()
        with pytest.raises(psycopg.errors.QueryCanceled):
            connection.execute("SELECT pg_sleep(10)")
        timer.join()


def test_cut_all_ends_every_connection_and_new_ones_work(ends: Ends) -> None:
    connections = [psycopg.connect(ends.through, autocommit=True) for _ in range(3)]
    assert ends.proxy.connections == 3
    ends.proxy.cut_all()
    for connection in connections:
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    psycopg.connect(ends.through).close()


def test_connections_are_refused_for_a_while_and_open_ones_live_on(ends: Ends) -> None:
    with psycopg.connect(ends.through, autocommit=True) as connection:
        ends.proxy.refuse()
        with pytest.raises(psycopg.OperationalError, match="refused"):
            psycopg.connect(ends.through)
        connection.execute("SELECT 1")
        ends.proxy.accept()
        psycopg.connect(ends.through).close()
        ends.proxy.refuse(0.2)
        until = time.monotonic() + 60
        while True:
            try:
                psycopg.connect(ends.through).close()
                break
            except psycopg.OperationalError:
                assert time.monotonic() < until


def test_a_frozen_wire_delivers_nothing_until_it_thaws(ends: Ends) -> None:
    with psycopg.connect(ends.through, autocommit=True) as connection:
        ends.proxy.freeze()
        insert = threading.Thread(target=connection.execute, args=(ends.insert(1),))
        newcomer = threading.Thread(target=lambda: psycopg.connect(ends.through).close())
        insert.start()
        newcomer.start()
        time.sleep(0.2)
        assert insert.is_alive()
        assert newcomer.is_alive()
        assert ends.rows() == []
        ends.proxy.thaw()
        insert.join()
        newcomer.join()
    assert ends.rows() == [1]


def test_an_unreachable_server_drops_the_client(tmp_path: Path) -> None:
    nowhere = f"postgresql://postgres@/postgres?host={tmp_path}"
    with PostgresProxy(nowhere) as proxy, pytest.raises(psycopg.OperationalError):
        psycopg.connect(proxy.dsn(nowhere))


def test_addresses_keep_all_but_the_place() -> None:
    with PostgresProxy("postgresql://localhost") as proxy:
        through = proxy.dsn(
            "postgresql://u%40x:p%2Fw@[::1]:6000/d%20b?sslmode=require&options=-c%20a=1"
        )
        assert conninfo_to_dict(through) == {
            "user": "u@x",
            "password": "p/w",
            "host": "127.0.0.1",
            "port": str(proxy.port),
            "dbname": "d b",
            "sslmode": "disable",
            "gssencmode": "disable",
            "options": "-c a=1",
        }
    with pytest.raises(ValueError, match="URL"):
        PostgresProxy("host=localhost")
