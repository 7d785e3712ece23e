"""The database itself keeps history: no statement of anybody changes or replaces its rows."""

from __future__ import annotations

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
