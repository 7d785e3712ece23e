"""What is compared in the benchmark of peers does the same work, and all of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from benchmarks.keepers import Place
from benchmarks.mesh_waiting import fill, park
from benchmarks.meshes import Collector, HoldfastCollector, HoldfastFan, ThreeTables
from benchmarks.meshes_apart import FanApart
from benchmarks.queues import database
from tests.mesh.meshes import until


@pytest.fixture
def place() -> Iterator[Place]:
    with database(os.environ["HOLDFAST_TEST_POSTGRES"]) as made:
        yield made


@pytest.mark.parametrize("kind", [HoldfastCollector, ThreeTables])
def test_every_answer_is_collected(kind: type[Collector], place: Place) -> None:
    collector = kind(place)
    try:
        tasks = [collector.park(peers) for peers in (1, 3)]
        assert [collector.collect(calls) for calls in tasks] == [1, 3]
    finally:
        collector.close()


def test_requests_fan_out_and_in(tmp_path: Path) -> None:
    fan = HoldfastFan(Place(path=tmp_path / "mesh.db"))
    fan.open()
    try:
        assert fan.ask(2, 3) == [[0, 1, 2]] * 2
    finally:
        fan.close()


def test_a_fan_apart_stands_still_while_it_is_not_measured(tmp_path: Path) -> None:
    fan = FanApart(HoldfastFan, Place(path=tmp_path / "mesh.db"))
    try:
        for _ in range(2):
            until(lambda: state(fan.process.pid) == "T", "the process goes on")
            assert fan.seconds(2, 3) > 0
    finally:
        fan.close()
    assert fan.process.exitcode == 0


def state(pid: int | None) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_sessions_are_parked_until_there_are_so_many(tmp_path: Path) -> None:
    with holdfast.open(f"sqlite:///{tmp_path}/mesh.db") as store:
        fill(store, 10, park)
        fill(store, 120, park, before=10)
        assert len(store.pauses(state="waiting", limit=1_000)) == 120
