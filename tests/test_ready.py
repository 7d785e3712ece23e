"""What one test does to a schema, no other finds."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.ciphers import AesGcm
from tests.ready import Schemas
from tests.schemas import describe
from tests.threads import begin

FIRST_AND_LAST = """
SELECT min(relname), max(relname) FROM pg_class
WHERE relkind = 'r' AND relnamespace = '"{}"'::regnamespace
"""


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


@pytest.mark.parametrize("rows", [1, 5_000])
def test_a_table_is_as_empty_as_a_new_one_however_full_it_was(postgres_dsn: str, rows: int) -> None:
    schemas = Schemas(postgres_dsn)
    with schemas.lent() as name:
        fill = f"SELECT n::text, n FROM generate_series(1, {rows}) n"
        run(postgres_dsn, f'INSERT INTO "{name}".hf_test_counters {fill}')
        run(postgres_dsn, f'ANALYZE "{name}".hf_test_counters')
    with schemas.lent() as again:
        assert again == name
        assert run(postgres_dsn, f'SELECT * FROM "{name}".hf_test_counters') == []
        planned = f"""SELECT reltuples, relpages, pg_relation_size(oid) FROM pg_class
            WHERE oid = '"{name}".hf_test_counters'::regclass"""
        assert run(postgres_dsn, planned) == [(-1, 0, 0)]
    schemas.close()


def test_what_a_killed_process_still_writes_is_waited_for(postgres_dsn: str) -> None:
    schemas, lent = Schemas(postgres_dsn), ExitStack()
    name = lent.enter_context(schemas.lent())
    giving_back = threading.Thread(target=lent.close)
    waiting = f"""SELECT 1 FROM pg_locks WHERE NOT granted
        AND relation = '"{name}".hf_test_counters'::regclass"""
    with psycopg.connect(postgres_dsn) as late:
        late.execute(f'INSERT INTO "{name}".hf_test_counters VALUES (%s, 1)'.encode(), ["late"])
        giving_back.start()
        while giving_back.is_alive() and not run(postgres_dsn, waiting):
            time.sleep(0.01)
    giving_back.join()
    with schemas.lent() as again:
        assert again == name
        assert run(postgres_dsn, f'SELECT * FROM "{name}".hf_test_counters') == []
    schemas.close()


def test_a_killed_process_that_locks_the_other_way_round_is_waited_for(postgres_dsn: str) -> None:
    schemas, lent = Schemas(postgres_dsn), ExitStack()
    name = lent.enter_context(schemas.lent())
    [(first, last)] = run(postgres_dsn, FIRST_AND_LAST.format(name))
    # The first of two to wait looks for a deadlock first, and gives way.
    with psycopg.connect(postgres_dsn, options="-c deadlock_timeout=60s") as late:
        late.execute(f'LOCK TABLE "{name}"."{last}" IN ROW EXCLUSIVE MODE'.encode())
        giving_back = begin(lent.close)
        waiting = f"""SELECT 1 FROM pg_locks WHERE NOT granted
            AND relation = '"{name}"."{last}"'::regclass"""
        while not giving_back.done() and not run(postgres_dsn, waiting):
            time.sleep(0.01)
        late.execute(f'LOCK TABLE "{name}"."{first}" IN ROW EXCLUSIVE MODE'.encode())
    giving_back.result(60)
    with schemas.lent() as again:
        assert again == name
    schemas.close()


def run(dsn: str, statement: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


def named(dsn: str, prefix: str) -> list[str]:
    """Return the schemas whose names begin so."""
    found = run(dsn, "SELECT nspname FROM pg_namespace")
    return [schema for (schema,) in found if schema.startswith(prefix)]
