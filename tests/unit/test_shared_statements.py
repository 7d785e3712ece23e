"""The threads of a process share the compiled statements."""

from __future__ import annotations

import dataclasses

import apsw

from holdfast.kernel.operation import Query
from holdfast.kernel.sql import Dialect
from holdfast.kernel.sqlite.transactions import fetch

SELECT = "SELECT 1 AS one, 2 AS two"


class Overtaken(list[str]):
    """Columns that another thread fills just after they were seen to be empty."""

    seen_empty = False

    def __len__(self) -> int:
        length = super().__len__()
        if not length and not self.seen_empty:
            self.seen_empty = True
            self.overtake()
        return length

    def overtake(self) -> None:
        statement = dataclasses.replace(STATEMENT, columns=self)
        assert fetch(apsw.Connection(":memory:"), statement, Query(SELECT, {}), 0) == ROWS


STATEMENT = Dialect(None).statement(SELECT)
ROWS = [{"one": 1, "two": 2}]


def test_two_threads_that_run_a_new_statement_at_once_both_learn_its_columns() -> None:
    columns = Overtaken()
    statement = dataclasses.replace(STATEMENT, columns=columns)
    connection = apsw.Connection(":memory:")
    assert fetch(connection, statement, Query(SELECT, {}), 0) == ROWS
    assert columns.seen_empty
    assert columns == ["one", "two"]
    assert fetch(connection, statement, Query(SELECT, {}), 0) == ROWS
