"""The benchmarks of costs, exports, maintenance and steady work do what they measure."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from benchmarks import beside, costs, exports, steady, writers
from benchmarks.measure import RATE

SMALL = beside.Plan(versions=200, children=12, rounds=1, quiet_seconds=0.01)


def test_a_cost_is_what_one_operation_adds(tmp_path: Path) -> None:
    file = tmp_path / "store.db"
    with holdfast.open(f"sqlite:///{file}") as store:
        subject = costs.SQLiteSubject(store, file)
        for operation in costs.COSTS.values():
            figures = costs.measure(subject, operation, 2)
            assert figures[costs.CPU] > 0
            assert figures["bytes written"] > 1_000
        assert subject.session.info().version == 2 * len(["append", "save"])
        assert len(store.work.list(status="completed")) == 2


def test_exports_and_imports_are_of_all_sessions(place: dict[str, str], tmp_path: Path) -> None:
    database = exports.Database(tmp_path, place["url"] if "namespace" in place else None)
    with database.store() as store, database.store() as other:
        source = exports.Source(database, store, size=3)
        for figures in (source.export(), source.import_into_new()):
            assert figures[RATE] > 0
            assert figures[costs.CPU] > 0
            assert (costs.SERVER_CPU in figures) == ("namespace" in place)
        assert other.import_sessions(source.file).sessions == source.size


@pytest.mark.parametrize("name", beside.TASKS)
def test_maintenance_is_prepared_and_done(name: str, place: dict[str, str], tmp_path: Path) -> None:
    where = beside.Place(place["url"], place.get("namespace"), tmp_path)
    with where.open() as store:
        act = beside.TASKS[name](store, where, SMALL)
        before = len(store.checkpoints(limit=1_000))
        act()
        left = [info for info in store.sessions(limit=1_000) if info.id != beside.TREE]
        match name.split(maxsplit=1)[0]:
            case "prune":
                assert before == SMALL.versions
                assert len(store.checkpoints(limit=1_000)) < before
            case "cancel":
                assert {info.status for info in left} == {"cancelled"}
                assert len(left) == SMALL.children + 1
            case "delete":
                assert left == []
            case _:
                assert any(file.stat().st_size > 1_000 for file in tmp_path.iterdir())


def test_a_writer_measures_until_it_is_over(tmp_path: Path) -> None:
    with holdfast.open(f"sqlite:///{tmp_path}/store.db") as store:
        figures = beside.Writer(store).until(lambda: True)
        assert figures["writes"] == 4
        assert len(store.work.list(status="completed")) == 1


def test_an_error_of_steady_work_is_not_hidden(
    postgres_dsn: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = steady.Plan(periods=1, period_seconds=0.2, compared=1)
    with holdfast.open(postgres_dsn, namespace=namespace) as store:
        found = dict(steady.watched(plan, store, postgres_dsn, namespace))
        assert found["period 1"][steady.SIZE] > 0

        def fail(load: steady.Load) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(steady.Load, "worker", fail)
        with pytest.raises(ZeroDivisionError):
            dict(steady.watched(plan, store, postgres_dsn, namespace))


def test_writers_of_one_tree_write_together_with_and_without_what_helps_them(
    postgres_dsn: str, namespace: str
) -> None:
    plan = writers.Plan(processes=2, threads=2, seconds=0.2, rounds=1)
    with writers.writers(plan, postgres_dsn, namespace) as pipes:
        for absent in ((), writers.NOT_SHARED, writers.NOT_QUEUED):
            order = writers.Order(plan.threads, plan.seconds, absent)
            figures = writers.together(pipes, order, postgres_dsn)
            assert figures[RATE] * plan.seconds >= plan.processes * plan.threads
    with holdfast.open(postgres_dsn, namespace=namespace) as store:
        written = [info.version for info in store.sessions() if info.id != writers.ROOT]
    assert len(written) == plan.processes * plan.threads
    assert all(version >= 2 for version in written)
