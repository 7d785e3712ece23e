"""Which indexes listings with two filters and more read, as the databases plan them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

import holdfast
from benchmarks import bulk
from holdfast.effects import listings
from holdfast.kernel.sql import Dialect
from holdfast.peers import handle
from holdfast.sessions import rows, subtree
from tests.checkpoints.looking import Look

SIZE = 2_000
SCHEMA = f"t_filter_plans_{uuid.uuid4().hex[:12]}"
# What a tree is like that has grown since the tables were analyzed.
FORGET_STATISTICS = """
DELETE FROM pg_statistic WHERE starelid IN (
    SELECT oid FROM pg_class WHERE relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = %s)
)
"""
VALUES = {
    "root_id": bulk.session_id(bulk.WIDE_NUMBER),
    "number": bulk.WIDE_NUMBER,
    "agent": "writer",
    "reason": "peers",
    "state": "closed",
    "status": "completed",
    "after": 0,
    "start": 0,
    "limit": 10,
}


def effects_of(*columns: str, status: Any = None) -> str:
    return listings.page_of(columns, status)


# Each with the indexes that it reads, and the columns of which it gives a value.
STATEMENTS: dict[str, tuple[str, dict[str, str]]] = {
    "effects(root=)": (
        effects_of("root_id"),
        {"ix_effects_session": "session_number", "ix_effects_below": "root_above status"},
    ),
    "effects(root=, status=completed)": (
        effects_of("root_id", "status", status="completed"),
        {"ix_effects_below": "root_above status"},
    ),
    "effects(root=, status=failed)": (
        effects_of("root_id", "status", status="failed"),
        {"ix_effects_below": "root_above status"},
    ),
    "sessions(root=)": (rows.page_of(("root_id",), False), {"ix_sessions_root": "root_id"}),
    "sessions(root=, status=)": (
        rows.page_of(("status", "root_id"), False),
        {"ix_sessions_below": "root_id+status"},
    ),
    "sessions(root=, agent=)": (
        rows.page_of(("agent", "root_id"), False),
        {"ix_sessions_root_agent": "root_id+agent status"},
    ),
    "sessions(root=, agent=, status=)": (
        rows.page_of(("status", "agent", "root_id"), False),
        {"ix_sessions_root_agent": "root_id+agent status"},
    ),
    "asks(root=)": (
        handle.page_of(handle.LIST_ASKS, ("root_id",)),
        {"ix_asks_root": "root_id state"},
    ),
    "asks(root=, agent=)": (
        handle.page_of(handle.LIST_ASKS, ("root_id", "agent")),
        {"ix_asks_root_agent": "root_id+agent state"},
    ),
    "pauses(root=)": (
        handle.page_of(handle.LIST_PAUSES, ("root_id",)),
        {"ix_pauses_root": "root_id state"},
    ),
    "pauses(root=, agent=)": (
        handle.page_of(handle.LIST_PAUSES, ("root_id", "agent")),
        {"ix_pauses_root_agent": "root_id+agent reason state"},
    ),
    "pauses(root=, agent=, reason=, state=)": (
        handle.page_of(handle.LIST_PAUSES, ("root_id", "agent", "reason", "state")),
        {"ix_pauses_root_agent": "root_id+agent reason state"},
    ),
    "pauses(root=, reason=)": (
        handle.page_of(handle.LIST_PAUSES, ("root_id", "reason")),
        {"ix_pauses_root_reason": "root_id+reason state"},
    ),
    "pauses(agent=, reason=)": (
        handle.page_of(handle.LIST_PAUSES, ("agent", "reason")),
        {"ix_pauses_agent_reason": "agent+reason state"},
    ),
}


@pytest.fixture(scope="module")
def sqlite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[holdfast.Store]:
    url = f"sqlite:///{tmp_path_factory.mktemp('plans')}/store.db"
    with holdfast.open(url, durability="normal") as store:
        bulk.fill(store, SIZE)
        yield store


@pytest.fixture(scope="module", params=["analyzed", "unknown"])
def postgres(request: pytest.FixtureRequest, postgres_dsn: str) -> Iterator[psycopg.Connection]:
    with holdfast.open(postgres_dsn, namespace=SCHEMA, durability="normal") as store:
        bulk.fill(store, SIZE)
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        if request.param == "unknown":
            connection.execute(FORGET_STATISTICS, [SCHEMA])
        yield connection
        connection.execute(f'DROP SCHEMA "{SCHEMA}" CASCADE'.encode())


@pytest.mark.parametrize("name", STATEMENTS)
def test_sqlite_looks_for_all_filters_in_an_index(sqlite: holdfast.Store, name: str) -> None:
    statement, indexes = STATEMENTS[name]
    names = Dialect(None).statement(statement).parameters
    given = {each: VALUES[each] for each in names if each != "now"}
    found = Look(sqlite).rows(f"EXPLAIN QUERY PLAN {statement}", **given)
    plan = "\n".join(row["detail"] for row in found)
    assert "SCAN hf_" not in plan, plan
    for index, columns in indexes.items():
        looked_for = ("<expr>" if "+" in each else each for each in columns.split())
        equal = " AND ".join(f"{each}=?" for each in looked_for)
        assert f"{index} ({equal} AND number>?)" in plan, plan


@pytest.mark.parametrize("name", STATEMENTS)
def test_postgres_looks_for_all_filters_in_an_index(
    postgres: psycopg.Connection, name: str
) -> None:
    statement, indexes = STATEMENTS[name]
    compiled = Dialect(SCHEMA).statement(statement)
    with psycopg.RawCursor(postgres) as cursor:
        cursor.execute(f"EXPLAIN {compiled.text}".encode(), compiled.values(VALUES))
        plan = "\n".join(row[0] for row in cursor.fetchall())
    assert "Seq Scan on hf_" not in plan, plan
    for index, columns in indexes.items():
        assert index in plan, plan
        first, *others = columns.split()
        if "+" in first:
            both = first.replace("+", " || ' '::text) || ")
            first = f"(({both})"
        condition = f"ROW({', '.join([first, *others, 'number'])}) > ROW"
        assert condition in plan, plan


@pytest.mark.parametrize(
    "statement", [subtree.LIST_SOME_BELOW, subtree.LIST_BELOW, rows.LIST_DESCENDANTS]
)
def test_postgres_looks_for_the_children_of_each_session(
    postgres: psycopg.Connection, statement: str
) -> None:
    """Most sessions have none, and one has most of those that there are."""
    compiled = Dialect(SCHEMA).statement(statement)
    with psycopg.RawCursor(postgres) as cursor:
        given = compiled.values({**VALUES, "id": bulk.session_id(1)})
        cursor.execute(f"EXPLAIN {compiled.text}".encode(), given)
        plan = "\n".join(row[0] for row in cursor.fetchall())
    assert "ix_sessions_parent" in plan, plan
    assert "Seq Scan on hf_sessions s" not in plan, plan
