"""Reading a store's schema as the database itself describes it, and an example of a later one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import holdfast
from holdfast.kernel import schema
from holdfast.kernel.operation import rows

NEXT = """
--[both]
CREATE TABLE hf_example (
    id TEXT PRIMARY KEY,
    count INTEGER NOT NULL
);

ALTER TABLE hf_sessions ADD COLUMN example TEXT;

--[sqlite]
CREATE INDEX ix_example ON hf_example (count) WHERE count > 0;

--[postgres]
CREATE INDEX ix_example ON hf_example (count) INCLUDE (id);
"""

SQLITE = "SELECT type, name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_%' ORDER BY name"
COLUMNS = """
SELECT table_name, column_name, data_type, is_nullable, column_default
FROM information_schema.columns WHERE table_schema = :schema
ORDER BY table_name, ordinal_position
"""
CONSTRAINTS = """
SELECT conrelid::regclass::text AS table_name, pg_get_constraintdef(oid) AS definition
FROM pg_constraint WHERE connamespace = CAST(:schema AS text)::regnamespace ORDER BY 1, 2
"""
INDEXES = "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = :schema ORDER BY 1"
FUNCTIONS = """
SELECT proname, prosrc FROM pg_proc
WHERE pronamespace = CAST(:schema AS text)::regnamespace ORDER BY 1
"""
TRIGGERS = """
SELECT tgname, pg_get_triggerdef(oid) AS definition FROM pg_trigger
WHERE NOT tgisinternal AND tgrelid IN (
    SELECT oid FROM pg_class WHERE relnamespace = CAST(:schema AS text)::regnamespace
) ORDER BY 1, 2
"""


def describe(store: holdfast.Store) -> list[dict[str, Any]]:
    """Return all that the database knows of the schema, without the schema's name."""
    target: Any = store.runtime.target
    schema = getattr(target, "schema", None)

    def read(tx: holdfast.Transaction) -> holdfast.Op[list[dict[str, Any]]]:
        found: list[dict[str, Any]] = []
        queries = (
            [SQLITE] if schema is None else [COLUMNS, CONSTRAINTS, INDEXES, FUNCTIONS, TRIGGERS]
        )
        for sql in queries:
            found += yield from rows(sql, schema=schema)
        return found

    return [
        {name: str(value).replace(str(schema), "schema") for name, value in row.items()}
        for row in store.run(read)
    ]


@contextmanager
def next_format(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Give this Holdfast one more format; the number is lent."""
    number = schema.newest() + 1
    with monkeypatch.context() as patched:
        example = schema.Migration(number, "example", NEXT)
        patched.setattr(schema, "later_migrations", lambda: [example])
        yield number
