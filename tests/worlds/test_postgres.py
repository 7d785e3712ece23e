"""PostgreSQL: rows that other connections commit go back, whatever their types and keys."""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest

from holdfast.errors import CheckpointError, Conflict, InvalidArgument, RollbackError, SystemBusy
from holdfast.worlds import World, check_system
from holdfast.worlds.systems.postgres import PostgresSystem
from tests.worlds.test_killed import check_kept

SCHEMA = """
CREATE TABLE plain (id serial PRIMARY KEY, name text UNIQUE, n integer);
CREATE TABLE child (id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    plain integer REFERENCES plain ON DELETE CASCADE,
    twice integer GENERATED ALWAYS AS (plain * 2) STORED);
CREATE TABLE "Odd name" ("a b" text, "SELECT" integer, "x%s" text, PRIMARY KEY ("a b", "SELECT"));
CREATE TABLE typed (id uuid PRIMARY KEY, at timestamptz, wait interval, doc jsonb, raw bytea,
    tags text[], amount numeric, ratio double precision, span int4range, long text);
CREATE TABLE unique_only (code text NOT NULL UNIQUE, n integer);
CREATE TABLE parts (id integer, region integer, PRIMARY KEY (id, region))
    PARTITION BY LIST (region);
CREATE TABLE parts_1 PARTITION OF parts FOR VALUES IN (1);
CREATE TABLE parts_2 PARTITION OF parts FOR VALUES IN (2);
CREATE TABLE keyless (a integer, b text);
CREATE SEQUENCE tickets;
CREATE FUNCTION noted() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN INSERT INTO keyless VALUES (NEW.id, 'noted'); RETURN NULL; END $$;
CREATE TRIGGER noted AFTER INSERT ON plain FOR EACH ROW EXECUTE FUNCTION noted();
"""
TABLES = [
    "plain", "child", '"Odd name"', "typed", "unique_only", "parts_1", "parts_2", "keyless",
]  # fmt: skip
SEQUENCES = ["plain_id_seq", "child_id_seq", "tickets"]


@pytest.fixture(scope="module")
def template(postgres_dsn: str) -> Iterator[str]:
    """A database with the schema, to be copied."""
    name = f"world_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
        with psycopg.connect(at(postgres_dsn, name), autocommit=True) as made:
            made.execute(SCHEMA)
        yield name
        connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


@pytest.fixture
def dsn(postgres_dsn: str, template: str) -> Iterator[str]:
    name = f"world_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
        yield at(postgres_dsn, name)
        connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


def at(dsn: str, database: str) -> str:
    return urlsplit(dsn)._replace(path=f"/{database}").geturl()


def open_system(dsn: str, **options: Any) -> PostgresSystem:
    with pytest.warns(UserWarning, match=r"reads the whole of public\.keyless, because"):
        return PostgresSystem(dsn, **options)


def statement(random: Random) -> tuple[str, list[Any]]:
    n = random.randrange(12)
    choices: list[tuple[str, list[Any]]] = [
        ("INSERT INTO plain (name, n) VALUES (%s, %s) ON CONFLICT DO NOTHING", [f"p{n}", n]),
        ("UPDATE plain SET n = n + 1 WHERE id %% 3 = %s", [n % 3]),
        ("UPDATE plain SET id = id + 1000 WHERE id = (SELECT min(id) FROM plain)", []),
        ("DELETE FROM plain WHERE n %% 4 = %s", [n % 4]),
        ("INSERT INTO child (plain) SELECT id FROM plain LIMIT 2", []),
        ("INSERT INTO \"Odd name\" VALUES (%s, %s, 'é,\"(') ON CONFLICT DO NOTHING", [f"a {n}", n]),
        ('DELETE FROM "Odd name" WHERE "SELECT" = %s', [n]),
        (
            "INSERT INTO typed VALUES (gen_random_uuid(), now(), '1 day 2 hours', %s::jsonb, %s,"
            " ARRAY['a', NULL, 'b\"c', ''], 1.500, 'NaN', '[1,5)', repeat('x', %s))",
            ['{"a": [1, null, "é"]}', random.randbytes(9), n * 1000],
        ),
        ("UPDATE typed SET ratio = %s, doc = NULL, tags = '{}'", [random.random()]),
        ("INSERT INTO unique_only VALUES (%s, %s) ON CONFLICT (code) DO UPDATE SET n = %s",
         [f"u{n % 4}", n, n]),
        ("INSERT INTO parts VALUES (%s, %s) ON CONFLICT DO NOTHING", [n, 1 + n % 2]),
        ("UPDATE parts SET region = 3 - region WHERE id %% 2 = %s AND id NOT IN (SELECT id FROM"
         " parts GROUP BY id HAVING count(*) > 1)", [n % 2]),
        ("INSERT INTO keyless VALUES (%s, 'same'), (%s, 'same'), (NULL, NULL)", [n % 2, n % 2]),
        ("DELETE FROM keyless WHERE a = %s", [n % 2]),
        ("SELECT nextval('tickets')", []),
        ("TRUNCATE plain CASCADE", []),
        ("TRUNCATE parts", []),
    ]  # fmt: skip
    return random.choice(choices)


def content(connection: psycopg.Connection[Any]) -> object:
    tables = {
        name: sorted(row for (row,) in connection.execute(f"SELECT t::text FROM {name} t"))
        for name in TABLES
    }
    reads = (connection.execute(f"SELECT last_value, is_called FROM {name}") for name in SEQUENCES)
    return [tables, [read.fetchone() for read in reads]]


def leftovers(connection: psycopg.Connection[Any]) -> list[Any]:
    return connection.execute(
        "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'holdfast%'"
        " UNION ALL SELECT tgname FROM pg_trigger WHERE tgname LIKE 'holdfast%'"
    ).fetchall()


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rollback_restores_what_other_connections_committed(dsn: str, seed: int) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        for _ in range(5):
            connection.execute(*statement(Random(seed)))
        system = open_system(dsn)

        def change(random: Random) -> str:
            text, arguments = statement(random)
            connection.execute(text, arguments)
            return text

        check_system(system, change, lambda: content(connection), seed=seed)
        assert leftovers(connection)
        system.close()
        assert leftovers(connection) == []


def test_swapped_unique_values_and_foreign_keys_do_not_stand_in_the_way(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("INSERT INTO plain (name, n) VALUES ('a', 1), ('b', 2)")
        connection.execute("INSERT INTO child (plain) VALUES (1)")
        system = open_system(dsn)
        token = system.checkpoint("start")
        with connection.transaction():
            connection.execute("UPDATE plain SET name = 'c' WHERE id = 1")
            connection.execute("UPDATE plain SET name = 'a' WHERE id = 2")
            connection.execute("UPDATE plain SET name = 'b' WHERE id = 1")
        connection.execute("DELETE FROM plain")
        wanted = [(1, "a", 1), (2, "b", 2)]
        system.rollback(token)
        assert connection.execute("SELECT * FROM plain ORDER BY id").fetchall() == wanted
        assert connection.execute("SELECT plain, twice FROM child").fetchall() == [(1, 2)]
        # The trigger of the schema did not fire again.
        assert connection.execute("SELECT count(*) FROM keyless").fetchone() == (2,)
        system.close()


def test_a_change_of_the_schema_is_refused_by_name(dsn: str) -> None:
    with (
        psycopg.connect(dsn, autocommit=True) as connection,
        World({"db": open_system(dsn)}) as world,
    ):
        here = world.checkpoint("here")
        for change, undo, name in (
                ("CREATE TABLE extra (id integer)", "DROP TABLE extra", "public.extra"),
                ("ALTER TABLE typed ADD COLUMN added integer",
                 "ALTER TABLE typed DROP COLUMN added", "public.typed"),
                ("CREATE SEQUENCE more", "DROP SEQUENCE more", "more"),
            ):  # fmt: skip
            connection.execute(change)
            with pytest.raises(CheckpointError, match=f"The schema changed: {name}"):
                world.checkpoint("there")
            with pytest.raises(RollbackError, match=f"The schema changed: {name}"):
                world.rollback(here)
            assert world.is_consistent
            connection.execute(undo)
        world.rollback(here)


def test_an_open_transaction_of_another_refuses_the_rollback(dsn: str) -> None:
    with psycopg.connect(dsn, application_name="shop") as other:
        system = open_system(dsn, wait_seconds=0.1)
        token = system.checkpoint("start")
        other.execute("SELECT 1")
        with pytest.raises(SystemBusy, match=r"\d+ shop is idle in transaction"):
            system.prepare(token)
        with pytest.raises(SystemBusy, match="idle in transaction"):
            system.rollback(token)
        other.commit()
        system.rollback(token)
        system.close()


def test_capture_begins_only_when_nobody_is_in_a_transaction(dsn: str) -> None:
    with psycopg.connect(dsn) as other:
        other.execute("INSERT INTO plain (name) VALUES ('open')")
        with pytest.raises(SystemBusy):
            PostgresSystem(dsn, wait_seconds=0.1)
        other.commit()
    with psycopg.connect(dsn) as connection:
        assert leftovers(connection) == []


def test_a_role_without_the_right_is_told_so(dsn: str) -> None:
    role = f"world_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {role} LOGIN")
        try:
            parts = urlsplit(dsn)
            host = parts.netloc.rpartition("@")[2]
            with pytest.raises(Conflict, match="may not create the schema"):
                PostgresSystem(parts._replace(netloc=f"{role}@{host}").geturl())
        finally:
            connection.execute(f"DROP ROLE {role}")


def test_what_a_killed_process_left_is_cleaned_and_what_lives_is_not(dsn: str) -> None:
    alive = open_system(dsn)
    dead = open_system(dsn)
    dead._connection.close()  # As when its process is killed.
    with psycopg.connect(dsn, autocommit=True) as connection:
        count = "SELECT count(*) FROM pg_namespace WHERE nspname LIKE 'holdfast_world%'"
        assert connection.execute(count).fetchone() == (2,)
        assert PostgresSystem.clean(dsn) == 1
        assert connection.execute(count).fetchone() == (1,)
        token = alive.checkpoint("start")
        connection.execute("INSERT INTO plain (name) VALUES ('x')")
        alive.rollback(token)
        assert connection.execute("SELECT count(*) FROM plain").fetchone() == (0,)
        alive.close()
        assert leftovers(connection) == []


def test_a_failed_rollback_changes_nothing_and_can_be_repeated(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        system = open_system(dsn)
        token = system.checkpoint("start")
        connection.execute("INSERT INTO plain (name) VALUES ('x')")

        def failing(changes: object) -> None:
            raise OSError("no")

        with monkeypatch.context() as patch:
            patch.setattr(system._rows, "apply", failing)
            with pytest.raises(OSError, match="no"):
                system.rollback(token)
        assert connection.execute("SELECT count(*) FROM plain").fetchone() == (1,)
        system.rollback(token)
        assert connection.execute("SELECT count(*) FROM plain").fetchone() == (0,)
        assert connection.execute("SELECT count(*) FROM keyless").fetchone() == (0,)
        system.close()


def test_bad_arguments_are_refused() -> None:
    refused: list[dict[str, Any]] = [{"schemas": "public"}, {"schemas": []}, {"wait_seconds": -1}]
    for options in refused:
        with pytest.raises(InvalidArgument):
            PostgresSystem("postgresql://127.0.0.1:1/none", **options)


def test_what_a_killed_process_kept_is_restored_exactly(dsn: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Each checkpoint reads the whole of")
        check_kept("postgres", dsn, tmp_path)
    with psycopg.connect(dsn) as connection:
        left = "SELECT count(*) FROM pg_namespace WHERE nspname LIKE 'holdfast_world%'"
        assert connection.execute(left).fetchone() == (0,)
        assert connection.execute("SELECT last_value FROM tickets").fetchone() == (2,)
