"""On PostgreSQL the CHECK constraints of a table are one trigger, which refuses the same rows."""

from __future__ import annotations

import re
from typing import Any

import pytest

import holdfast
from holdfast.kernel import schema
from holdfast.kernel.checks import with_check_trigger
from holdfast.kernel.operation import rows
from holdfast.store import NOUNS
from tests.schemas import describe

TABLE = """
CREATE TABLE hf_example (
    id TEXT PRIMARY KEY,
    state TEXT NOT NULL CHECK (state IN ('open', 'id (')),
    count INTEGER CHECK (count >= 0),
    CHECK ((state = 'open') = (count IS NULL)),
    UNIQUE (state, count)
)"""
WITHOUT_CHECKS = """
CREATE TABLE hf_example (
    id TEXT PRIMARY KEY,
    state TEXT NOT NULL,
    count INTEGER,
    UNIQUE (state, count)
)"""


def test_a_trigger_takes_the_conditions_of_a_table() -> None:
    table, function, trigger = with_check_trigger(TABLE)
    assert table == WITHOUT_CHECKS
    for condition in (
        "(NEW.state IN ('open', 'id ('))",
        "(NEW.count >= 0)",
        "((NEW.state = 'open') = (NEW.count IS NULL))",
    ):
        assert function.count(condition) == 2
    assert "THEN 'state IN (''open'', ''id ('')'" in function
    assert "ON hf_example\n" in trigger


@pytest.mark.parametrize("statement", ["CREATE TABLE hf_x (\n    id TEXT\n)", "SELECT 'CHECK ('"])
def test_other_statements_stay_as_they_are(statement: str) -> None:
    assert with_check_trigger(statement) == [statement]


def test_every_check_of_the_schema_is_in_force(new_place: dict[str, Any]) -> None:
    [format_1] = schema.migrations(NOUNS)
    wanted = len(re.findall(r"\bCHECK \(", "".join(format_1.statements("sqlite"))))
    assert wanted > 50
    with holdfast.open(**new_place) as store:
        is_sqlite = store.runtime.driver.dialect == "sqlite"
        texts = "".join(row["sql" if is_sqlite else "prosrc"] or "" for row in of_schema(store))
    assert len(re.findall(r"\bCHECK \(" if is_sqlite else r"\) IS FALSE THEN '", texts)) == wanted


def of_schema(store: holdfast.Store) -> list[dict[str, Any]]:
    """Return what the database keeps of tables on SQLite, and of functions on PostgreSQL."""
    return [row for row in describe(store) if "sql" in row or "prosrc" in row]


@pytest.mark.parametrize(("keys", "is_refused"), [("-1", True), ("0", False), ("NULL", True)])
def test_a_new_row_is_tested_too(new_place: dict[str, Any], keys: str, is_refused: bool) -> None:
    def insert(tx: holdfast.Transaction) -> holdfast.Op[None]:
        yield from rows(f"INSERT INTO hf_state (root_id, keys) VALUES ('r', {keys})")

    with holdfast.open(**new_place) as store:
        if is_refused:
            with pytest.raises(holdfast.Refused):
                store.run(insert)
        else:
            store.run(insert)


def test_a_condition_that_is_neither_true_nor_false_is_met(new_place: dict[str, Any]) -> None:
    def insert(tx: holdfast.Transaction) -> holdfast.Op[None]:
        yield from rows(
            "INSERT INTO hf_state_rules (root_id, key, json_schema, updated_by, updated_at)"
            " VALUES ('r', 'k', CAST('x' AS BLOB), 's', 1)"
        )

    with holdfast.open(**new_place) as store:
        store.run(insert)


def test_a_refusal_names_what_is_violated(new_place: dict[str, Any]) -> None:
    with holdfast.open(**new_place) as store:
        store.work.submit("t")

        def change(tx: holdfast.Transaction) -> holdfast.Op[None]:
            yield from rows("UPDATE hf_work SET retry_count = 4, max_retries = 3")

        with pytest.raises(holdfast.Refused, match="retry_count >= 0 AND retry_count <= max_retr"):
            store.run(change)
