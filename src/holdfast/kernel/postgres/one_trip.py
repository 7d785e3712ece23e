"""Writes in one round trip: a `deciding` operation that begins with its `Decide`.

BEGIN, the statements, the events, the mark and COMMIT are sent together. The events and the mark
are CTEs of the deciding statement, written only if it returns a row: after a COMMIT without an
answer, the mark also says that there was a row.
"""

from __future__ import annotations

import functools
from typing import Any

from psycopg import errors as pg

from ...errors import CommitUnknown, HoldfastError, NotFound
from ..commit_settlement import MARK_BATCH_IF_DONE
from ..driver import Execution, Services
from ..operation import Query, Row

# The error by which a `must_find` statement without a row aborts the transaction.
NothingFound = pg.DivisionByZero


def is_possible(execution: Execution[Any]) -> bool:
    """Whether all of a call can be sent at once, with its COMMIT."""
    decide = execution.decide
    if decide is None or not execution.call.operation.decides or execution.is_begun:
        return False
    return len({event.root_id for event in decide.emits}) < 2


def statements(
    execution: Execution[Any], services: Services, writer_id: str, batch: int
) -> list[Query]:
    """Return all queries of the call, the last one with the events and the mark."""
    before, last, events = _parts(execution, services)
    parameters = {**last.parameters, **events.parameters, "writer_id": writer_id, "batch": batch}
    return [*before, Query(_with_done(last.sql, events.sql), parameters)]


def statements_in_group(execution: Execution[Any], services: Services) -> list[Query]:
    """Return all queries of the call; the last one fails if it does not decide."""
    before, last, events = _parts(execution, services)
    parameters = {**last.parameters, **events.parameters}
    return [*before, Query(_done_or_failed(last.sql, events.sql), parameters)]


def _parts(execution: Execution[Any], services: Services) -> tuple[list[Query], Query, Query]:
    assert execution.decide is not None
    *before, last = execution.whole()
    emits = execution.decide.emits
    events = services.events_if_done(emits) if emits else Query("", {})
    return [_found_or_failed(each) if each.must_find else each for each in before], last, events


def conclude(execution: Execution[Any], answers: list[list[Row]]) -> None:
    """Answer a call that has decided; it must not ask for more."""
    execution.advance(answers)
    if execution.queries:
        raise HoldfastError(f"{execution.call.name} runs statements after its Decide")


def conclude_again(execution: Execution[Any], found: list[Row] | None) -> None:
    """Answer a call whose COMMIT was settled; `found` are the re-read rows, if it needs them."""
    if found is not None and not found:
        raise NotFound(
            f"{execution.call.name} was committed, but its result was lost with the connection, "
            "and what it wrote has been removed since"
        )
    answers: list[list[Row]] = [[{}] for _ in execution.queries]
    conclude(execution, [*answers[:-1], [{}] if found is None else found])


def answer_lost(execution: Execution[Any], commit_id: str) -> CommitUnknown:
    """Return the error for a committed call whose result cannot be read again."""
    return CommitUnknown(
        f"{execution.call.name} was committed, but its result was lost with the connection, and "
        "the server cannot be reached to read it again",
        id=commit_id,
    )


@functools.lru_cache(maxsize=1_000)
def _with_done(sql: str, events: str) -> str:
    parts = [f"done AS ({sql})", *([events] if events else []), f"marked AS ({MARK_BATCH_IF_DONE})"]
    return f"WITH {', '.join(parts)} SELECT * FROM done"  # noqa: S608 - our own statements


@functools.lru_cache(maxsize=1_000)
def _done_or_failed(sql: str, events: str) -> str:
    found = "found AS MATERIALIZED (SELECT 1 / count(*) FROM done)"
    parts = [f"done AS ({sql})", *([events] if events else []), found]
    return f"WITH {', '.join(parts)} SELECT done.* FROM found LEFT JOIN done ON true"  # noqa: S608


def _found_or_failed(query: Query) -> Query:
    """Return a query that aborts the transaction if the given one returns no row."""
    sql = f"SELECT 1 / count(*) FROM ({query.sql}) AS found"  # noqa: S608 - our own statement
    return Query(sql, query.parameters)
