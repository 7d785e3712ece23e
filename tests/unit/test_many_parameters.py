"""A query with many sets of parameters is run once for each of them."""

from __future__ import annotations

import apsw

from holdfast.kernel.operation import Query
from holdfast.kernel.sql import Dialect
from holdfast.kernel.sqlite.transactions import fetch

INSERT = "INSERT INTO t (id, at) VALUES (:id, :now) ON CONFLICT DO NOTHING RETURNING id, at"


def test_all_returned_rows_are_fetched_in_order_with_the_same_time() -> None:
    connection = apsw.Connection(":memory:")
    connection.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, at INTEGER NOT NULL)")
    query = Query(INSERT, {}, each=[{"id": 3}, {"id": 1}, {"id": 3}, {"id": 2}])
    found = fetch(connection, Dialect(None).statement(INSERT), query, 7)
    assert found == [{"id": 3, "at": 7}, {"id": 1, "at": 7}, {"id": 2, "at": 7}]
    assert list(connection.execute("SELECT id, at FROM t")) == [(1, 7), (2, 7), (3, 7)]
