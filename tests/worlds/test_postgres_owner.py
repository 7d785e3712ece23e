"""PostgreSQL with a role that may not silence triggers: slower, as exact, and with a warning."""

from __future__ import annotations

import re
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest

from holdfast.errors import CheckpointError, Conflict, RollbackError, SystemBusy
from holdfast.worlds import System, World, check_system
from holdfast.worlds.systems.postgres import PostgresSystem
from holdfast.worlds.systems.postgres_connection import PostgresConnectionSystem
from tests.worlds.test_killed import check_kept
from tests.worlds.test_postgres import SCHEMA, at, content, leftovers, statement

# What only the owner has to switch off: triggers of all kinds, rules, and foreign keys between
# partitioned tables, deferred ones and those that are not valid.
MORE = """
CREATE FUNCTION never() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN RAISE EXCEPTION 'a trigger ran'; END $$;
CREATE TABLE watched (id integer PRIMARY KEY, part integer, region integer, plain integer,
    FOREIGN KEY (part, region) REFERENCES parts ON DELETE CASCADE DEFERRABLE INITIALLY DEFERRED);
ALTER TABLE watched ADD CONSTRAINT "odd ""name" FOREIGN KEY (plain) REFERENCES plain
    ON DELETE RESTRICT NOT VALID;
COMMENT ON CONSTRAINT "odd ""name" ON watched IS 'it''s odd';
CREATE TRIGGER replicas BEFORE INSERT OR DELETE ON watched EXECUTE FUNCTION never();
ALTER TABLE watched ENABLE REPLICA TRIGGER replicas;
CREATE TRIGGER "off" BEFORE INSERT OR DELETE ON watched EXECUTE FUNCTION never();
ALTER TABLE watched DISABLE TRIGGER "off";
CREATE TRIGGER always AFTER DELETE ON watched FOR EACH ROW WHEN (OLD.id > 90)
    EXECUTE FUNCTION never();
ALTER TABLE watched ENABLE ALWAYS TRIGGER always;
CREATE RULE logged AS ON INSERT TO watched DO ALSO INSERT INTO keyless VALUES (NEW.id, 'rule');
"""
DEFINITIONS = """
SELECT c.conrelid::regclass::text, c.conname, pg_get_constraintdef(c.oid), c.convalidated::text,
    obj_description(c.oid, 'pg_constraint') FROM pg_constraint c WHERE contype = 'f'
    AND conparentid = 0
UNION ALL SELECT tgrelid::regclass::text, tgname, pg_get_triggerdef(oid), tgenabled::text, ''
    FROM pg_trigger WHERE NOT tgisinternal AND tgname NOT LIKE 'holdfast%'
UNION ALL SELECT ev_class::regclass::text, rulename, pg_get_ruledef(oid), ev_enabled::text, ''
    FROM pg_rewrite WHERE ev_class = 'watched'::regclass
ORDER BY 1, 2, 3
"""


@pytest.fixture
def owner(postgres_dsn: str) -> Iterator[str]:
    """A database whose owner is no superuser, with tables of its own."""
    name = f"world_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {name} LOGIN")
        connection.execute(f"CREATE DATABASE {name} OWNER {name}")
        place = as_role(at(postgres_dsn, name), name)
        with psycopg.connect(place, autocommit=True) as made:
            made.execute(SCHEMA)
            made.execute(MORE)
        yield place
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
        connection.execute(f"DROP ROLE {name}")


def as_role(dsn: str, role: str) -> str:
    parts = urlsplit(dsn)
    return parts._replace(netloc=f"{role}@{parts.netloc.rpartition('@')[2]}").geturl()


@pytest.fixture(params=["own connections", "shared connection"])
def opened(
    owner: str, request: pytest.FixtureRequest
) -> Iterator[tuple[System, psycopg.Connection[Any]]]:
    """A system, and a connection of the code under test."""
    with psycopg.connect(owner, autocommit=True) as connection:
        with pytest.warns(UserWarning, match="Each ") as warned:
            system: System = (
                PostgresConnectionSystem(connection)
                if request.param == "shared connection"
                else PostgresSystem(owner)
            )
        assert sum("Each rollback disables triggers" in str(one.message) for one in warned) == 1
        assert {Path(one.filename).name for one in warned} == {Path(__file__).name}
        assert "may not set session_replication_role" in str([one.message for one in warned])
        yield system, connection
        system.close()
        assert leftovers(connection) == []


def change(random: Random) -> tuple[str, list[Any]]:
    n = random.randrange(12)
    watched = [
        ("INSERT INTO watched SELECT %s, id, region, (SELECT min(id) FROM plain) FROM parts"
         " LIMIT 1", [n]),
        ("DELETE FROM watched WHERE id %% 3 = %s", [n % 3]),
        ("DELETE FROM parts WHERE id = %s", [n]),
    ]  # fmt: skip
    return random.choice([*watched, statement(random), statement(random)])


def everything(connection: psycopg.Connection[Any]) -> object:
    rows = connection.execute("SELECT w::text FROM watched w ORDER BY id").fetchall()
    return [content(connection), rows, connection.execute(DEFINITIONS).fetchall()]


def test_a_rollback_of_the_owner_is_as_exact(
    opened: tuple[System, psycopg.Connection[Any]],
) -> None:
    system, connection = opened

    def do(random: Random) -> str:
        text, given = change(random)
        try:
            with connection.transaction():
                connection.execute(text, given)
                connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
        except (psycopg.errors.IntegrityError, psycopg.errors.FeatureNotSupported) as error:
            return f"{text} refused: {error}"
        return text

    check_system(system, do, lambda: everything(connection))


def test_triggers_and_cascades_do_not_run_in_a_rollback(
    opened: tuple[System, psycopg.Connection[Any]],
) -> None:
    system, connection = opened
    connection.execute("INSERT INTO plain (name) VALUES ('a')")
    connection.execute("INSERT INTO parts VALUES (1, 1)")
    connection.execute("INSERT INTO watched VALUES (91, 1, 1, 1), (1, 1, 1, NULL)")
    kept = system.checkpoint("with it"), everything(connection)
    with pytest.raises(psycopg.errors.RaiseException), connection.transaction():
        connection.execute("DELETE FROM watched")
    connection.execute("UPDATE watched SET id = 2 WHERE id = 1")
    connection.execute("UPDATE plain SET n = 7")
    connection.execute("DELETE FROM watched WHERE id = 2")
    other = system.checkpoint("other"), everything(connection)
    for token, wanted in (kept, other, kept):
        system.rollback(token)
        assert everything(connection) == wanted


def test_what_a_killed_process_kept_is_restored_by_the_owner(owner: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Each ")
        check_kept("postgres", owner, tmp_path)
    with psycopg.connect(owner) as connection:
        assert leftovers(connection) == []


def test_a_role_without_either_right_is_told_so(owner: str) -> None:
    role = f"world_{uuid.uuid4().hex[:12]}"
    mine = urlsplit(owner).username
    with psycopg.connect(owner.replace(f"{mine}@", "postgres@"), autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {role} LOGIN")
        try:
            with pytest.raises(Conflict, match="may not create the schema"):
                PostgresSystem(as_role(owner, role))
            connection.execute(f"GRANT CREATE ON DATABASE {mine} TO {role}")
            with pytest.raises(Conflict, match=r"nor disable the triggers of .*\bwatched\b"):
                PostgresSystem(as_role(owner, role))
            assert leftovers(connection) == []
        finally:
            connection.execute(f"REVOKE CREATE ON DATABASE {mine} FROM {role}")
            connection.execute(f"DROP ROLE {role}")


def test_a_reader_that_holds_a_table_refuses_the_rollback_and_costs_nothing(owner: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        system = PostgresSystem(owner, wait_seconds=0.2)
    mine = urlsplit(owner).username
    with (
        psycopg.connect(owner, autocommit=True) as connection,
        # Whose transactions the role cannot see in pg_stat_activity.
        psycopg.connect(owner.replace(f"{mine}@", "postgres@")) as reader,
    ):
        token = system.checkpoint("start")
        connection.execute("INSERT INTO plain (name) VALUES ('a')")
        reader.execute("SELECT * FROM plain")
        before = everything(connection)
        with pytest.raises(SystemBusy, match=re.escape("open for 0.2 s")):
            system.rollback(token)
        assert everything(connection) == before
        reader.rollback()
        system.rollback(token)
        assert connection.execute("SELECT count(*) FROM plain").fetchone() == (0,)
        system.close()


@pytest.mark.parametrize("is_enabled_again", [False, True])
def test_rows_that_changed_while_triggers_were_disabled_are_not_restored_wrongly(
    opened: tuple[System, psycopg.Connection[Any]], is_enabled_again: bool
) -> None:
    system, connection = opened
    with World({"db": system}) as world:
        here = world.checkpoint("here")
        connection.execute("INSERT INTO plain (name) VALUES ('seen')")
        world.rollback(here)
        connection.execute("ALTER TABLE plain DISABLE TRIGGER USER")
        connection.execute("INSERT INTO plain (name) VALUES ('unseen')")
        if is_enabled_again:
            connection.execute("ALTER TABLE plain ENABLE TRIGGER USER")
        with pytest.raises(CheckpointError, match="has disabled triggers"):
            world.checkpoint("there")
        if isinstance(system, PostgresSystem):
            with pytest.raises(RollbackError, match="has disabled triggers"):
                world.rollback(here)
        else:
            # A savepoint covers that too, but where to come back to could not be kept.
            with pytest.raises(RollbackError, match="could not have been undone"):
                world.rollback(here)
            system.rollback(world.find(here).tokens["db"])
            assert connection.execute("SELECT count(*) FROM plain").fetchone() == (0,)
