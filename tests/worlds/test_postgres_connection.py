"""PostgreSQL on a shared connection: savepoints where they live, changes where they do not."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import psycopg
import pytest

from holdfast.errors import Conflict, InvalidArgument, SystemBusy
from holdfast.worlds import check_system
from holdfast.worlds.systems import postgres_connection
from holdfast.worlds.systems.postgres_connection import PostgresConnectionSystem
from tests.worlds.test_postgres import content, dsn, leftovers, statement, template

__all__ = ["dsn", "template"]


@pytest.fixture(params=[False, True], ids=["transaction", "autocommit"])
def connection(dsn: str, request: pytest.FixtureRequest) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(dsn, autocommit=request.param) as connection:
        yield connection


def open_system(connection: psycopg.Connection[Any], **options: Any) -> PostgresConnectionSystem:
    with pytest.warns(UserWarning, match=r"reads the whole of public\.keyless, because"):
        return PostgresConnectionSystem(connection, **options)


@pytest.mark.parametrize("savepoints_max", [4, 200])
def test_a_rollback_restores_what_the_connection_sees(
    connection: psycopg.Connection[Any], savepoints_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_connection, "_SAVEPOINTS_MAX", savepoints_max)
    for number in range(5):
        connection.execute(*statement(Random(number)))
    connection.commit()
    before = content(connection)
    connection.rollback()
    system = open_system(connection)

    def change(random: Random) -> str:
        text, arguments = statement(random)
        with connection.transaction():
            connection.execute(text, arguments)
        return text

    check_system(system, change, lambda: content(connection))
    assert len(system._stack) <= savepoints_max
    system.close()
    assert content(connection) == before
    assert leftovers(connection) == []


def test_a_live_savepoint_costs_no_rows(
    connection: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    system = open_system(connection)
    start = system.checkpoint("start")
    connection.execute("INSERT INTO plain (name) VALUES ('a')")
    below = system.checkpoint("below")
    connection.execute("DELETE FROM plain")
    applied: list[object] = []
    monkeypatch.setattr(system._rows, "apply", applied.append)
    system.rollback(below)
    system.rollback(start)
    assert applied == []
    system.rollback(below)
    assert len(applied) == 1
    system.close()


def test_the_stack_of_savepoints_has_a_limit(
    connection: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_connection, "_SAVEPOINTS_MAX", 5)
    system = open_system(connection)
    tokens = []
    for number in range(20):
        connection.execute("INSERT INTO plain (name) VALUES (%s)", [str(number)])
        tokens.append(system.checkpoint("one more"))
        assert len(system._stack) <= 5
    for number in (19, 3, 12, 0):
        system.rollback(tokens[number])
        count = connection.execute("SELECT count(*) FROM plain").fetchone()
        assert count == (number + 1,)
    system.close()


def test_a_state_is_reached_also_when_what_came_before_it_is_forgotten(
    connection: psycopg.Connection[Any],
) -> None:
    system = open_system(connection)
    tokens = []
    for number in range(3):
        connection.execute("INSERT INTO plain (name) VALUES (%s)", [str(number)])
        tokens.append(system.checkpoint("one more"))
    first, middle, last = tokens
    system.rollback(first)
    system.rollback(last)
    system.release(first)
    system.rollback(middle)
    assert connection.execute("SELECT count(*) FROM plain").fetchone() == (2,)
    # Reached by changes, it is as good as a savepoint.
    with pytest.raises(psycopg.errors.UniqueViolation):
        connection.execute("INSERT INTO plain (name) VALUES ('1')")
    system.checkpoint("again")
    assert connection.execute("SELECT count(*) FROM plain").fetchone() == (2,)
    system.close()


def test_a_failed_statement_undoes_what_came_since_the_last_checkpoint(
    connection: psycopg.Connection[Any],
) -> None:
    system = open_system(connection)
    connection.execute("INSERT INTO plain (name) VALUES ('kept')")
    token = system.checkpoint("kept")
    shown = system.observe()
    connection.execute("INSERT INTO plain (name) VALUES ('lost')")
    with pytest.raises(psycopg.errors.UniqueViolation):
        connection.execute("INSERT INTO plain (name) VALUES ('kept')")
    assert system.observe() == shown
    with pytest.raises(psycopg.errors.DivisionByZero):
        connection.execute("SELECT 1 / 0")
    system.prepare(token)
    system.rollback(token)
    assert system.observe() == shown
    system.close()


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_code_that_ends_the_transaction_is_told_so(
    connection: psycopg.Connection[Any], end: str
) -> None:
    system = open_system(connection)
    token = system.checkpoint("start")
    connection.execute("INSERT INTO plain (name) VALUES ('x')")
    getattr(connection, end)()
    for attempt in (lambda: system.checkpoint("x"), lambda: system.prepare(token), system.observe):
        with pytest.raises(Conflict, match="has committed or rolled back"):
            attempt()
    connection.execute("SELECT 1")
    with pytest.raises(Conflict, match="has committed or rolled back"):
        system.rollback(token)
    system.close()
    assert leftovers(connection) == []
    rows = connection.execute("SELECT count(*) FROM plain").fetchone()
    assert rows == (1 if end == "commit" else 0,)


def test_sequences_go_back_also_when_the_system_is_closed(
    connection: psycopg.Connection[Any],
) -> None:
    system = open_system(connection)
    token = system.checkpoint("start")
    assert connection.execute("SELECT nextval('tickets')").fetchone() == (1,)
    later = system.checkpoint("later")
    connection.execute("SELECT nextval('tickets')")
    for wanted, value in ((token, (1, False)), (later, (1, True)), (token, (1, False))):
        system.rollback(wanted)
        read = connection.execute("SELECT last_value, is_called FROM tickets")
        assert read.fetchone() == value
    system.rollback(later)
    system.close()
    assert connection.execute("SELECT nextval('tickets')").fetchone() == (1,)


def test_a_change_of_the_schema_is_refused_and_goes_back(
    connection: psycopg.Connection[Any],
) -> None:
    system = open_system(connection)
    token = system.checkpoint("start")
    connection.execute("CREATE TABLE extra (id integer)")
    with pytest.raises(Conflict, match=r"The schema changed: public\.extra"):
        system.checkpoint("there")
    system.rollback(token)
    assert connection.execute("SELECT to_regclass('extra')").fetchone() == (None,)
    system.checkpoint("here")
    system.close()


def test_what_cannot_be_shared_is_refused(connection: psycopg.Connection[Any]) -> None:
    with pytest.raises(InvalidArgument, match="a psycopg connection"):
        PostgresConnectionSystem("postgresql://")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="schemas"):
        PostgresConnectionSystem(connection, schemas=[])
    with connection.transaction():
        connection.execute("SELECT 1")
        with pytest.raises(SystemBusy, match="in a transaction"):
            PostgresConnectionSystem(connection)
