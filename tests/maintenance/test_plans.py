"""How PostgreSQL finds the rows of sessions that are deleted, where one session has most."""

from __future__ import annotations

import psycopg
import pytest

import holdfast
from holdfast.checkpoints import deletion
from holdfast.effects import statements
from tests.checkpoints.looking import plan_for_any

ROWS = 500
STATEMENTS = {
    "effects": (statements.UNLINK_EFFECTS, "ix_effects_session", "session_number = ANY"),
    "lines": (deletion.LIST_LINES, "ix_uses_session", "session_number = ANY"),
    "checkpoints": (
        deletion.REMOVE_FROM_RANGES["hf_checkpoints"],
        "hf_checkpoints_pkey",
        "key = ANY",
    ),
}


@holdfast.tool(effect="mutate")
def act(number: int) -> int:
    """Do nothing."""
    return number


@pytest.fixture
def uneven(postgres_dsn: str, namespace: str) -> str:
    """A schema with many sessions, most of whose effects and lines belong to one."""
    with holdfast.open(postgres_dsn, namespace=namespace) as store:
        busy = store.session("busy")
        for number in range(ROWS):
            busy.call(act, number=number)
            busy.append(f"channel{number}", [number])
        for _ in range(20):
            store.session().append("log", [1])
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute(f'SET search_path = "{namespace}"'.encode())
        connection.execute(b"ANALYZE hf_effects, hf_uses, hf_checkpoints")
    return namespace


def test_each_session_is_looked_for_in_an_index(postgres_dsn: str, uneven: str) -> None:
    for name, (statement, index, condition) in STATEMENTS.items():
        plan = "\n".join(plan_for_any(postgres_dsn, uneven, statement))
        assert index in plan, f"{name}:\n{plan}"
        assert f"Index Cond: ({condition}" in plan, f"{name}:\n{plan}"
        # A join with the whole table, or its rows one after the other.
        assert "Join" not in plan, f"{name}:\n{plan}"
        assert "Filter: (session_number" not in plan, f"{name}:\n{plan}"
