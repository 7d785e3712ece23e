"""What stands beside shared state does the same work: versions, history and events are written."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from benchmarks.keepers import Place
from benchmarks.registers import (
    BATCH,
    READ_TREE,
    WORKS,
    ApswRegister,
    HoldfastRegister,
    PsycopgRegister,
    Register,
)


@pytest.fixture(params=["sqlite", "postgres"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "sqlite":
        yield Place(path=tmp_path / "a.db")
        return
    place = Place(
        dsn=os.environ["HOLDFAST_TEST_POSTGRES"], schema=request.getfixturevalue("namespace")
    )
    place.create()
    yield place


def do_all(register: Register) -> None:
    works = register.works()
    assert set(works) == set(WORKS)
    for work in WORKS:
        for _ in range(2):
            works[work]()


def test_holdfast_does_its_works(where: Place) -> None:
    register = HoldfastRegister(where)
    try:
        do_all(register)
        assert register.state.version() == 3 + 2 + 2 * BATCH
    finally:
        register.close()


def test_sql_by_hand_counts_as_holdfast_does(where: Place) -> None:
    register: Any = ApswRegister(where) if where.path is not None else PsycopgRegister(where)
    try:
        do_all(register)
    finally:
        register.close()
    if where.path is not None:
        with closing(sqlite3.connect(where.path)) as connection:
            [tree] = connection.execute(READ_TREE).fetchall()
    else:
        with psycopg.connect(where.conninfo) as server:
            [tree] = server.execute(READ_TREE.encode()).fetchall()
    assert tree == (3 + 2 + 2 * BATCH, 3 + 2 + 2 * BATCH, "active", 1)
