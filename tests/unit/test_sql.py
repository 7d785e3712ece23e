"""One SQL text becomes what each database takes."""

from __future__ import annotations

import apsw
import pytest

from holdfast.kernel.operation import Query
from holdfast.kernel.sql import Dialect, _rewritten
from holdfast.kernel.sqlite.transactions import fetch

sqlite = Dialect(None)
postgres = Dialect("s")


def rewritten(sql: str) -> str:
    return postgres.statement(sql).text


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT :a, :b, :a", "SELECT $1, $2, $1"),
        ("SELECT a::text, ':b', \":c\" FROM t", "SELECT a::text, ':b', \":c\" FROM t"),
        ("SELECT '100%', 'it''s :x'", "SELECT '100%', 'it''s :x'"),
        ("SELECT 1 /*pg FOR UPDATE */", "SELECT 1 FOR UPDATE"),
        ("SELECT 1 /*pg LIMIT :n */", "SELECT 1 LIMIT $1"),
        ("SELECT /*sqlite*/ :a = hf_t /*end*/ /*pg :b */, :c", "SELECT   $1, $2"),
        ("SELECT 1 -- :no\n, 2 /* :no */", "SELECT 1  \n, 2"),
        ("SELECT * FROM hf_events", 'SELECT * FROM "s".hf_events'),
        ("SELECT 'hf_events', x_hf_y", "SELECT 'hf_events', x_hf_y"),
        ("SELECT :now + 1", 'SELECT "s".hf_now() + 1'),
        ("CREATE TABLE hf_t (a INTEGER, b BLOB)", 'CREATE TABLE "s".hf_t (a BIGINT, b BYTEA)'),
        (
            "CREATE TABLE hf_t (a INTEGER PRIMARY KEY AUTOINCREMENT) WITHOUT ROWID",
            'CREATE TABLE "s".hf_t (a BIGINT PRIMARY KEY GENERATED ALWAYS AS IDENTITY)',
        ),
        ("SELECT CAST(:a AS INTEGER)", "SELECT CAST($1 AS BIGINT)"),
    ],
)
def test_postgres_text(sql: str, expected: str) -> None:
    assert rewritten(sql) == expected


def test_each_store_has_its_schema_and_its_columns_in_a_text_that_was_rewritten_once() -> None:
    sql = "SELECT a FROM hf_shared WHERE a < :now"
    done = _rewritten.cache_info().misses
    one, other = (Dialect(schema).statement(sql) for schema in ("one", "other"))
    assert _rewritten.cache_info().misses == done + 1
    assert one.text == 'SELECT a FROM "one".hf_shared WHERE a < "one".hf_now()'
    assert other.text == 'SELECT a FROM "other".hf_shared WHERE a < "other".hf_now()'
    assert one.columns is not other.columns


def test_sqlite_takes_the_text_as_it_is() -> None:
    sql = "SELECT :a, :now, :a, ':b' /*pg , :c */ /*sqlite*/ , :d /*end*/ FROM hf_events"
    statement = sqlite.statement(sql)
    assert statement.text == sql
    assert statement.parameters == ("a", "now", "d")


def test_sqlite_gets_values_by_the_numbers_that_it_gives_to_names() -> None:
    sql = """SELECT ':x', :b, :now, /* :y */ :a, :b + 0, ":z" /*pg , :c */ -- :d
        FROM (SELECT 7 AS ":z") WHERE :now = 5"""
    [row] = fetch(
        apsw.Connection(":memory:"), sqlite.statement(sql), Query(sql, {"a": 1, "b": 2}), 5
    )
    assert list(row.values()) == [":x", 2, 5, 1, 2, 7]


def test_parameters_are_given_in_the_order_of_their_numbers() -> None:
    statement = postgres.statement("SELECT :b, :now, :a, :b, ':c' /*pg , :d */")
    assert statement.parameters == ("b", "a", "d")
    assert statement.values({"a": 1, "b": 2, "d": 3}) == (2, 1, 3)


def test_a_missing_parameter_is_an_error_on_both() -> None:
    sql, given = "SELECT :a, :b", {"a": 1}
    with pytest.raises(KeyError, match="b"):
        postgres.statement(sql).values(given)
    with pytest.raises(KeyError, match="b"):
        fetch(apsw.Connection(":memory:"), sqlite.statement(sql), Query(sql, given), 0)


@pytest.mark.parametrize(
    ("sql", "may_change", "counts_changes"),
    [
        ("SELECT 1", False, False),
        ("  \n select 1", False, False),
        ("INSERT INTO t VALUES (1)", True, True),
        ("UPDATE t SET a = 1", True, True),
        ("DELETE FROM t", True, True),
        ("WITH x AS (INSERT INTO t VALUES (1) RETURNING 1) SELECT 1", True, False),
        ("CREATE TABLE t (a)", True, False),
        ("PRAGMA user_version = 1", True, False),
    ],
)
def test_what_may_change_is_never_taken_for_a_read(
    sql: str, may_change: bool, counts_changes: bool
) -> None:
    for dialect in (sqlite, postgres):
        statement = dialect.statement(sql)
        assert (statement.may_change, statement.counts_changes) == (may_change, counts_changes)
        assert statement.is_uncounted == (may_change and not counts_changes)


def test_a_statement_is_compiled_once() -> None:
    assert postgres.statement("SELECT :x") is postgres.statement("SELECT :x")
