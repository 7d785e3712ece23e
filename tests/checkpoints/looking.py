"""Reading rows as the database has them, and finding sessions without touching them."""

from __future__ import annotations

from typing import Any

import holdfast
from holdfast.kernel.operation import Handle, Op, Sync, large_query, rows
from holdfast.kernel.sql import Dialect


class Look(Handle[Sync]):
    """Raw reads of one store."""

    def __init__(self, store: holdfast.Store) -> None:
        super().__init__(store.runtime)
        self.store = store

    @large_query
    def rows(self, /, sql: str, **parameters: object) -> Op[list[dict[str, Any]]]:
        """Return the rows of a SELECT."""
        return (yield from rows(sql, **parameters))


def plan_for_any(dsn: str, namespace: str, statement: str) -> list[str]:
    """Return the plan that PostgreSQL keeps for a statement of a write, for any parameters."""
    import psycopg

    text = Dialect(namespace).statement(statement).text
    with psycopg.connect(dsn) as connection, psycopg.RawCursor(connection) as cursor:
        cursor.execute("SET enable_seqscan = off")
        cursor.execute(f"EXPLAIN (GENERIC_PLAN) {text}".encode())
        return [row[0] for row in cursor.fetchall()]
