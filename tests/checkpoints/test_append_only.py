"""The database itself keeps history: no statement of anybody changes or replaces its rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import psycopg
import pytest

import holdfast
from tests.internals import engine_of

TABLES = ["hf_checkpoints", "hf_events", "hf_lines", "hf_items", "hf_uses", "hf_work"]
# A use has no data of its own, and an item of work changes until it has ended.
REPLACED = [table for table in TABLES if table != "hf_uses"]


@pytest.fixture
def place_with_history(place: dict[str, Any]) -> dict[str, Any]:
    """A store whose lists are long enough to have been packed."""
    with holdfast.open(**place) as store:
        session = store.session("s")
        for number in range(130):
            session.append("transcript", [{"number": number}])
        store.work.submit("step")
        store.work.claim("worker")[0].complete()
    return place


class Foreign:
    """A connection of another program, which knows no rules of ours."""

    def __init__(self, place: dict[str, Any]) -> None:
        self._connection: Any
        if "namespace" in place:
            self._connection = psycopg.connect(place["url"], autocommit=True)
            self._connection.execute(f'SET search_path TO "{place["namespace"]}"')
            self._error: type[Exception] = psycopg.Error
        else:
            self._connection = apsw.Connection(place["url"].removeprefix("sqlite:///"))
            self._error = apsw.ConstraintError

    def rows(self, table: str) -> list[Any]:
        return sorted(self._connection.execute(f"SELECT * FROM {table}").fetchall(), key=repr)

    def refuses(self, statement: str) -> bool:
        with pytest.raises(self._error, match=r"append-only|immutable|cannot truncate"):
            self._connection.execute(statement)
        return True

    def close(self) -> None:
        self._connection.close()


@pytest.mark.parametrize("table", TABLES)
def test_rows_are_neither_changed_nor_deleted(
    place_with_history: dict[str, Any], table: str
) -> None:
    foreign = Foreign(place_with_history)
    before = foreign.rows(table)
    assert before
    column = {"hf_events": "kind", "hf_lines": "base", "hf_uses": "line_id", "hf_work": "type"}
    name = column.get(table, "key")
    assert foreign.refuses(f"UPDATE {table} SET {name} = {name}")
    assert foreign.refuses(f"DELETE FROM {table}")
    if "namespace" in place_with_history:
        assert foreign.refuses(f"TRUNCATE {table}")
        assert foreign.refuses(f"TRUNCATE {table} CASCADE")
    elif table in REPLACED:
        assert foreign.refuses(f"REPLACE INTO {table} SELECT * FROM {table}")
        assert foreign.refuses(f"INSERT OR REPLACE INTO {table} SELECT * FROM {table} LIMIT 1")
    assert foreign.rows(table) == before
    foreign.close()


def test_a_replaced_row_fires_the_triggers_of_our_own_connections(tmp_path: Any) -> None:
    with holdfast.open(f"sqlite:///{tmp_path}/store.db") as store:
        engine: Any = engine_of(store)
        assert engine.writer.connection.pragma("recursive_triggers") == 1


def test_history_is_still_packed_pruned_and_deleted(place_with_history: dict[str, Any]) -> None:
    with holdfast.open(**place_with_history) as store:
        session = store.find_session("s")
        latest = session.latest()
        assert latest is not None
        assert len(latest["transcript"]) == 130
        foreign = Foreign(place_with_history)
        assert len(foreign.rows("hf_items")) < 70
        store.prune(keep=1)
        session.delete(force=True)
        assert (
            foreign.rows("hf_items") == foreign.rows("hf_lines") == foreign.rows("hf_doors") == []
        )
        foreign.close()


@pytest.fixture
def history(tmp_path: Path) -> Path:
    """A file with rows for every unique key of every table that keeps history."""
    path = tmp_path / "store.db"
    with holdfast.open(f"sqlite:///{path}") as store:
        session = store.session("s")
        for number in range(130):
            session.append("transcript", [{"number": number}])
        for number in range(3):
            session.state.set("k", number, idempotency_key=f"k-{number}")
            store.audit.refused(f"wrong token {number}")
            store.work.submit("step", key=f"open-{number}", queue="open")
            store.work.submit("step", key=f"done-{number}", max_retries=0)
        for item in store.work.claim("worker", limit=3):
            item.fail("no", retry=False)
            store.work.redrive(item.id)
    return path


def test_no_unique_key_lets_another_program_replace_history(history: Path) -> None:
    """SQLite runs no triggers for a row that REPLACE deletes, unless the program asks for it."""
    protected, unprotected = apsw.Connection(str(history)), apsw.Connection(":memory:")
    with unprotected.backup("main", protected, "main") as backup:
        backup.step()
    for (trigger,) in [*unprotected.execute(TRIGGERS)]:
        unprotected.execute(f"DROP TRIGGER {trigger}")
    tables = [table for (table,) in protected.execute(PROTECTED)]
    assert {*TABLES, "hf_audit", "hf_state_events"} == {*tables}
    for table in tables:
        for key in keys_of(protected, table):
            replaced = 0
            for statement, values in replacing(protected, table, key):
                replaced += loses_history(unprotected, table, statement, values)
                assert not loses_history(protected, table, statement, values), statement
            assert replaced, f"nothing was replaced by the key {key} of {table}"
    protected.close()


TRIGGERS = "SELECT name FROM sqlite_master WHERE type = 'trigger'"
PROTECTED = "SELECT tbl_name FROM sqlite_master WHERE name LIKE 'hf_%_no_delete'"


def all_of(connection: apsw.Connection, table: str) -> set[Any]:
    return {*connection.execute(f"SELECT * FROM {table}")}


def loses_history(
    connection: apsw.Connection, table: str, statement: str, values: list[Any]
) -> bool:
    """Whether a row is gone after a statement, which is then undone."""
    before = all_of(connection, table)
    connection.execute("SAVEPOINT tried")
    with contextlib.suppress(apsw.ConstraintError):
        connection.execute(statement, values)
    is_lost = not before <= all_of(connection, table)
    connection.execute("ROLLBACK TO tried")
    connection.execute("RELEASE tried")
    return is_lost


def keys_of(connection: apsw.Connection, table: str) -> list[list[str]]:
    """Return the columns of each unique key that leaves other columns to be changed."""
    columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
    primary = [row[1] for row in connection.execute(f"PRAGMA table_info({table})") if row[5]]
    found = [primary]
    for _, name, is_unique, *_ in connection.execute(f"PRAGMA index_list({table})"):
        if is_unique:
            found.append([row[2] for row in connection.execute(f"PRAGMA index_info({name})")])
    return [key for key in found if set(key) != set(columns)]


def replacing(
    connection: apsw.Connection, table: str, key: list[str]
) -> Iterator[tuple[str, list[Any]]]:
    """Return statements that replace rows by one key, all other keys being free."""
    columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
    others = {name for each in keys_of(connection, table) for name in each} - set(key)
    chosen, holes = ", ".join(columns), ", ".join("?" * len(columns))
    for row in [*connection.execute(f"SELECT {chosen} FROM {table}")][-12:]:
        found = dict(zip(columns, row, strict=True))
        free = {name: other(value) if name in others else value for name, value in found.items()}
        for name in [name for name in columns if name not in key]:
            changed = {**free, name: other(found[name])}
            yield f"REPLACE INTO {table} ({chosen}) VALUES ({holes})", [*changed.values()]
        marks, taken = ", ".join("?" * len(key)), [found[name] for name in key]
        yield f"UPDATE OR REPLACE {table} SET ({', '.join(key)}) = ({marks})", taken
        if len(key) == 1 and isinstance(taken[0], int):
            yield f"UPDATE OR REPLACE {table} SET rowid = ?", taken


def other(value: Any) -> Any:
    """Return a value of a key that no row has."""
    if isinstance(value, int):
        return value + 1_000_000
    return f"{value}x" if isinstance(value, str) else value
