"""What one test does to a schema, no other finds."""

from __future__ import annotations

import psycopg
import pytest

import holdfast
from holdfast.ciphers import AesGcm
from tests.ready import Schemas
from tests.schemas import describe


def opened(dsn: str, name: str) -> tuple[object, ...]:
    """Return what a store begins with."""
    with holdfast.open(dsn, namespace=name) as store:
        found = (describe(store), store.sessions(), store.events("s"), store.store_id())
        return (*found, store.session("first").number)


def test_the_next_test_finds_what_the_first_found(postgres_dsn: str) -> None:
    schemas = Schemas(postgres_dsn)
    with schemas.lent() as name:
        before = opened(postgres_dsn, name)
    cipher = AesGcm({"k": bytes(32)}, "k")
    with (
        schemas.lent() as again,
        holdfast.open(postgres_dsn, namespace=again, cipher=cipher) as store,
    ):
        store.session("s").append("transcript", ["x"])
        holdfast.open(postgres_dsn, namespace=f"{again}_other").close()
        run(postgres_dsn, f'CREATE TABLE "{again}".more (id int); ANALYZE "{again}".hf_sessions')
    with schemas.lent() as last:
        assert name == again == last
        assert opened(postgres_dsn, last) == before
        assert named(postgres_dsn, name) == [name]
    schemas.close()
    assert named(postgres_dsn, name) == []


@pytest.mark.parametrize(
    "damage",
    [
        'ALTER TABLE "{}".hf_sessions ADD COLUMN more int',
        'DROP TRIGGER no_delete ON "{}".hf_events',
        'ALTER TABLE "{}".hf_events DISABLE TRIGGER no_delete',
        'DROP INDEX "{}".{}',
        'DROP SCHEMA "{}" CASCADE',
    ],
)
def test_a_schema_that_was_changed_is_not_lent_again(postgres_dsn: str, damage: str) -> None:
    schemas = Schemas(postgres_dsn)
    with schemas.lent() as name:
        index = "SELECT indexname FROM pg_indexes WHERE schemaname = %s AND indexname LIKE 'ix%%'"
        with psycopg.connect(postgres_dsn, autocommit=True) as connection:
            found = connection.execute(index, [name]).fetchone()
            assert found is not None
            connection.execute(damage.format(name, *found).encode())
    with schemas.lent() as other:
        assert other != name
    schemas.close()


def run(dsn: str, statement: str) -> list[tuple[str]]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


def named(dsn: str, prefix: str) -> list[str]:
    """Return the schemas whose names begin so."""
    found = run(dsn, "SELECT nspname FROM pg_namespace")
    return [schema for (schema,) in found if schema.startswith(prefix)]
