"""The benchmark of worlds: every contestant does the whole work, and says what it kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.measure import RATE, TIME
from benchmarks.worlds import _beside, _cycle, is_installed
from benchmarks.worlds_explorers import (
    holdfast_durable_rate,
    holdfast_rate,
    hypothesis_rate,
    side_of,
    venomqa_rate,
)
from benchmarks.worlds_subjects import (
    ROWS_CHANGED,
    HoldfastPostgres,
    HoldfastPostgresConnection,
    HoldfastSqlite,
    Subject,
    VenomSqlite,
)
from tests.worlds.test_postgres import at

STATES = 25


def check_cycle(subject: Subject, read: Any) -> None:
    try:
        subject.change()
        token = subject.checkpoint()
        before = read(subject)
        subject.change()
        assert read(subject) != before
        subject.rollback(token)
        assert read(subject) == before
        subject.release(token)
        figures = _cycle(subject, 2)
        assert figures[TIME] == figures["checkpoint µs"] + figures["rollback µs"] > 0
        # Twenty rows of a kilobyte, before and after, or their pages.
        assert figures["bytes kept"] > ROWS_CHANGED * 1_000
    finally:
        subject.close()


def rows(subject: Any) -> Any:
    return subject._connection.execute("SELECT n FROM items ORDER BY id LIMIT 30").fetchall()


def test_sqlite_is_kept_and_restored(tmp_path: Path) -> None:
    check_cycle(HoldfastSqlite(tmp_path / "a.db", 1), rows)


@pytest.mark.parametrize("make", [HoldfastPostgres, HoldfastPostgresConnection])
def test_postgres_is_kept_and_restored(postgres_dsn: str, make: Any) -> None:
    import psycopg

    name = f"bench_{make.__name__.lower()}"
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
        try:
            check_cycle(make(at(postgres_dsn, name), 1), rows)
        finally:
            connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


@pytest.mark.skipif(not is_installed("venomqa"), reason="`make bench` installs VenomQA")
def test_venomqa_keeps_and_restores_too(tmp_path: Path) -> None:
    def rows_of(subject: Any) -> Any:
        read = subject._adapter.connection.execute("SELECT n FROM items WHERE id <= 30")
        return [tuple(row) for row in read]

    check_cycle(VenomSqlite(tmp_path / "a.db", 1), rows_of)
    assert venomqa_rate(STATES)[RATE] > 0


def test_a_peer_stands_beside_holdfast_of_the_same_size() -> None:
    assert _beside("Holdfast, 1 MB") is None
    assert _beside("Holdfast, shared connection, 1 MB") == "Holdfast, 1 MB"
    assert _beside("VenomQA, 100 MB") == "Holdfast, 100 MB"
    assert _beside("VenomQA") == "Holdfast"


def test_the_grid_is_explored_whole(tmp_path: Path) -> None:
    assert side_of(2_000) == 45
    assert holdfast_rate(STATES)[RATE] > 0
    assert holdfast_durable_rate(STATES, tmp_path, 100)[RATE] > 0
    walked = hypothesis_rate(STATES)
    assert walked[RATE] > 0
    assert 1 < walked["states seen"] <= STATES
