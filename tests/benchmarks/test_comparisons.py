"""What is compared with what: an event loop with an event loop, cold with cold, warm with warm."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from benchmarks import servers
from benchmarks.checkpoints import (
    AGAIN,
    COLD,
    FORK,
    HOLDFAST,
    HOLDFAST_ASYNC,
    LAST,
    LAST_AGAIN,
    LAST_ITEMS,
    SAVE,
    VERSION,
    Calm,
    Ratios,
    _contestants,
    _load,
)
from benchmarks.keepers import AsyncHoldfastKeeper, HoldfastKeeper, Place, messages
from benchmarks.sides import PIPELINED, PostgresSide

TURNS = LAST_ITEMS + 1


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


class Noting(HoldfastKeeper):
    """Holdfast, with a list of what was asked of it."""

    def __init__(self, name: str, place: Place) -> None:
        super().__init__(name, place)
        self.asked: list[str] = []

    def open(self) -> None:
        self.asked.append("open")
        super().open()

    def load(self) -> Any:
        self.asked.append("load")
        return super().load()

    def load_last(self, count: int) -> Any:
        self.asked.append("last")
        return super().load_last(count)

    def load_version(self, turn: int) -> Any:
        self.asked.append("version")
        return super().load_version(turn)


def test_cold_loads_are_those_of_a_new_object(tmp_path: Path) -> None:
    keeper = Noting(HOLDFAST, Place(path=tmp_path / "kept.db"))
    keeper.open()
    for message in messages(TURNS):
        keeper.turn(message)
    keeper.asked.clear()
    with Calm(tmp_path / "calm") as calm:
        found = _load(keeper, calm=calm, turns=TURNS)
    keeper.close()
    assert keeper.asked == ["open", "load", "load", "open", "last", "last", "open", "version"]
    assert {COLD, AGAIN, LAST, LAST_AGAIN, VERSION, FORK} < set(found)


def test_a_peer_of_an_event_loop_is_compared_with_holdfast_in_one(
    tmp_path: Path, runner: asyncio.Runner
) -> None:
    place = Place(path=tmp_path / "kept.db")
    keepers = [
        HoldfastKeeper(HOLDFAST, place),
        AsyncHoldfastKeeper(HOLDFAST_ASYNC, place, runner),
        HoldfastKeeper("sync peer", place),
        AsyncHoldfastKeeper("async peer", place, runner),
    ]
    contestants = _contestants(keepers, lambda keeper: {})
    assert {each.name: each.beside for each in contestants} == {
        HOLDFAST: HOLDFAST,
        HOLDFAST_ASYNC: HOLDFAST,
        "sync peer": HOLDFAST,
        "async peer": HOLDFAST_ASYNC,
    }
    milliseconds = {HOLDFAST: 1.0, HOLDFAST_ASYNC: 2.0, "sync peer": 6.0, "async peer": 6.0}
    rounds = {name: [{SAVE: value}] for name, value in milliseconds.items()}
    table = Ratios("saves", SAVE, contestants, rounds)
    assert table.ratio("sync peer", SAVE) == 6
    assert table.ratio("async peer", SAVE) == 3
    assert table.ratio("async peer", SAVE, beside=HOLDFAST) == 6


def test_pipelined_sql_by_hand_takes_part_and_writes_what_the_others_write(
    postgres_dsn: str, runner: asyncio.Runner
) -> None:
    with (
        servers.schemas(postgres_dsn, 2) as (schema, peer_schema),
        PostgresSide(runner, postgres_dsn, schema, peer_schema) as side,
        contextlib.closing(psycopg.connect(postgres_dsn, autocommit=True)) as connection,
    ):

        def written() -> tuple[int, ...]:
            row = connection.execute(
                f'SELECT (SELECT sum(value) FROM "{peer_schema}".hf_test_counters),'
                f' (SELECT count(*) FROM "{peer_schema}".hf_events),'
                f' (SELECT sum(position) FROM "{peer_schema}".hf_trees)'.encode()
            ).fetchone()
            assert row is not None
            return tuple(row)

        one = {each.name: each for each in side.one_caller("save", 0.001)}
        many = {each.name: each for each in side.sessions(2, 0.001)}
        assert one[PIPELINED].beside == "Holdfast"
        assert one[f"{PIPELINED}, async"].beside == "Holdfast async"
        assert many[PIPELINED].beside == "Holdfast"
        for contestant in (one[PIPELINED], one[f"{PIPELINED}, async"], many[PIPELINED]):
            before = written()
            contestant.round()
            added = {after - first for after, first in zip(written(), before, strict=True)}
            assert len(added) == 1, contestant.name
            assert added.pop() > 0, contestant.name
