"""The frontier of a shared exploration: rows that workers lease in batches, as work items."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.clock import VirtualClock
from holdfast.errors import (
    Conflict,
    InvalidArgument,
    LeaseLost,
    NotFound,
    SessionEnded,
    SessionNotFound,
)
from holdfast.explorations import KeptState, KeptStep, Totals
from holdfast.explorations.frontier import Batch, Frontier
from holdfast.leases import default_holder
from holdfast.worlds import clean, explore, shared, take_part
from holdfast.worlds.journal import drive, frontier_of, journal_in
from tests.work.fleet import wait_until
from tests.worlds import crew, grid
from tests.worlds.grid import explored, facts
from tests.worlds.test_resumed import killed_and_resumed, run_until

NOTHING = Totals(states=1, steps=0, violations=0)
INITIAL = KeptState(id="s", body=b"the initial state")


@pytest.fixture(autouse=True)
def environment(temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the processes of a test know; they leave nothing in the temporary directory."""
    monkeypatch.setenv(grid.SIDE, "6")
    monkeypatch.setenv(crew.PLACE, str(tmp_path / "mark"))


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def store(place: dict[str, Any], clock: VirtualClock) -> Iterator[holdfast.Store]:
    with holdfast.open(**place, clock=clock) as store:
        yield store


@pytest.fixture
def frontier(store: holdfast.Store) -> Iterator[Frontier[Any]]:
    """A frontier with two batches, as the process that explores has it."""
    with drive(store, "explored") as session:
        frontier = frontier_of(session)
        frontier.publish([[("s", 0), ("s", 1), ("s", 2)], [("s", 3)]], NOTHING)
        yield frontier


def step(number: int, to: str | None = "s") -> KeptStep:
    return KeptStep(from_id="s", candidate=number, to_id=to, body=b"%d" % number)


def claimed(frontier: Frontier[Any], holder: str = "worker") -> Batch:
    batch: Batch | None = frontier.claim(holder, 10)
    assert batch is not None
    return batch


def tried(frontier: Frontier[Any]) -> list[int]:
    return [edge.candidate for edge in frontier.edges()]


def left(batch: Batch) -> list[int]:
    return [entry.candidate for entry in batch.entries]


def test_a_batch_is_a_work_item_that_names_rows_and_is_done_when_they_are(
    store: holdfast.Store, frontier: Frontier[Any]
) -> None:
    first = claimed(frontier)
    assert left(first) == [0, 1, 2]
    assert first.item.input == {"entries": [entry.number for entry in first.entries]}
    worker = frontier.under(first.item)
    worker.record([INITIAL], [step(0)])
    assert tried(frontier) == [0]
    second = worker.turn(first, [], [step(1), step(2, None)], "worker")
    assert tried(frontier) == [0, 1, 2]
    assert store.work.get(first.item.id).status == "completed"
    assert second is not None
    assert left(second) == [3]
    assert frontier.under(second.item).turn(second, [], [step(3)], "worker") is None
    assert [edge.to_id for edge in frontier.edges()] == ["s", "s", None, "s"]
    assert frontier.edges(after=frontier.edges()[2].number)[0].candidate == 3


def test_only_the_workers_of_an_exploration_get_its_batches(
    store: holdfast.Store, frontier: Frontier[Any]
) -> None:
    frontier.join("worker", 10)
    own = store.work.submit("mine")
    assert [item.id for item in store.work.claim("someone", limit=100)] == [own.id]
    with drive(store, "other") as session:
        assert frontier_of(session).claim("worker", 10) is None
    assert left(claimed(frontier)) == [0, 1, 2]


def test_who_stops_for_longer_than_its_lease_loses_its_batch_and_can_write_nothing(
    store: holdfast.Store, frontier: Frontier[Any], clock: VirtualClock
) -> None:
    late = claimed(frontier, "late")
    worker = frontier.under(late.item)
    worker.record([INITIAL], [step(0)])
    clock.advance(seconds=11)
    assert store.work.sweep().requeued == 1
    with pytest.raises(LeaseLost):
        worker.record([], [step(1)])
    with pytest.raises(LeaseLost):
        worker.turn(late, [], [step(1), step(2)], "late")
    clock.advance(seconds=5)
    store.work.promote()
    assert left(claimed(frontier, "second")) == [1, 2], "what was written is not tried again"
    # Not even while the next holder is still at it.
    with pytest.raises(LeaseLost):
        worker.record([], [step(1)])
    assert tried(frontier) == [0]


def test_deaths_are_counted_for_the_entry_that_was_tried(
    store: holdfast.Store, frontier: Frontier[Any]
) -> None:
    def died(batch: Batch) -> Batch:
        store.work.get(batch.item.id, fence=batch.item.fence).fail("died", delay_seconds=0)
        return claimed(frontier)

    def deaths(batch: Batch) -> list[int]:
        return [entry.deaths for entry in batch.entries]

    batch = claimed(frontier)
    assert (batch.is_again, deaths(batch)) == (False, [0, 0, 0])
    batch = died(batch)
    assert (batch.is_again, deaths(batch)) == (True, [1, 0, 0])
    batch = died(batch)
    assert deaths(batch) == [2, 0, 0]
    frontier.under(batch.item).record([INITIAL], [step(0)])
    batch = died(batch)
    assert deaths(batch) == [1, 0]
    # The other batch has nothing to do with it, and whoever gives one back has not died.
    other = claimed(frontier)
    assert deaths(other) == [0]
    other.item.release()
    other = claimed(frontier)
    assert (other.is_again, deaths(other)) == (False, [0])


def test_entries_and_items_are_gone_when_it_is_over(
    store: holdfast.Store, frontier: Frontier[Any]
) -> None:
    member, batch = frontier.join("worker", 10), claimed(frontier)
    frontier.discard(with_workers=False)
    assert [item.id for item in store.work.list()] == [member.id]
    with pytest.raises(LeaseLost):
        frontier.under(batch.item).record([], [step(0)])
    frontier.publish([[("s", 0)]], NOTHING)
    assert len(store.work.list()) == 2
    frontier.discard(with_workers=True)
    assert store.work.list() == []
    with pytest.raises(LeaseLost):
        member.complete()
    # A second one with the same entries begins anew.
    frontier.publish([[("s", 0), ("s", 1), ("s", 2)]], NOTHING)
    assert left(claimed(frontier)) == [0, 1, 2]


def test_they_are_removed_with_their_session(store: holdfast.Store) -> None:
    with drive(store, "explored") as session:
        frontier = frontier_of(session)
        frontier.publish([[("s", 0)], [("s", 1)]], NOTHING)
        worker = frontier.under(claimed(frontier).item)
        member = frontier.join("worker", 10)
    journal = journal_in(store, "explored")
    assert journal is not None
    store.find_session("explored").delete(force=True)
    assert store.work.list() == []
    with pytest.raises(LeaseLost):
        worker.record([], [step(0)])
    with pytest.raises(LeaseLost):
        frontier.under(member).begin(b"settings", INITIAL)
    with pytest.raises(SessionNotFound):
        frontier_of(journal).join("worker", 10)
    with drive(store, "explored") as session:
        again = frontier_of(session)
        assert again.claim("worker", 10) is None
        again.publish([[("s", 0)]], NOTHING)
        assert left(claimed(again)) == [0]


def test_the_first_worker_begins_and_the_others_are_told_how(
    store: holdfast.Store, frontier: Frontier[Any]
) -> None:
    first, second = (frontier.under(frontier.join(name, 10)) for name in "ab")
    begun = first.begin(b"settings", INITIAL)
    assert (begun.settings, begun.initial_id) == (b"settings", "s")
    other = KeptState(id="t", body=b"another")
    assert second.begin(b"others", other) == begun
    assert [state.id for state in frontier.states()] == ["s"]


def test_nobody_joins_what_has_ended(store: holdfast.Store) -> None:
    with drive(store, "explored") as session:
        frontier = frontier_of(session)
        assert frontier.is_running()
        session.end()
    outside = frontier_of(store.find_session("explored"))
    assert not outside.is_running()
    with pytest.raises(SessionEnded):
        outside.join("worker", 10)


# With processes


def test_a_worker_that_was_stopped_for_longer_than_its_lease_disturbs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "LEASE_SECONDS", 3.0)
    actions = [crew.grow, crew.shrink, crew.stop_once]
    mark = Path(os.environ[crew.PLACE])
    first, again = mark.with_suffix(".first"), mark.with_suffix(".again")
    first.touch()
    alone = explore(crew.make_world, actions, [crew.below_five])
    first.unlink()
    again.unlink()
    with holdfast.open(f"sqlite:///{tmp_path}/store.db") as store:

        def go_on() -> None:
            wait_until(lambda: mark.exists() and crew.is_stopped(int(mark.read_text())))
            # Only another worker can have tried it again.
            wait_until(again.exists)
            os.kill(int(mark.read_text()), signal.SIGCONT)

        thread = threading.Thread(target=go_on)
        thread.start()
        together = explore(
            crew.make_world, actions, [crew.below_five], store=store, id="a", workers=2
        )
        thread.join()
        assert facts(together) == facts(alone)
        assert together.steps == alone.steps
        assert store.work.list() == []
        assert store.find_session("a").info().status == "completed"


def test_killed_exploration_by_two_workers_on_either_database(
    place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(grid.SIDE, "12")
    with holdfast.open(**place) as store:
        url = store.url
    killed_and_resumed("memory", url, 2, workers=2)
    with holdfast.open(**place) as store:
        assert store.work.list() == []


def test_clean_waits_for_workers_whose_starter_was_killed(
    place: dict[str, Any], temporary: Path
) -> None:
    with holdfast.open(**place) as store:
        assert not run_until(10, "own", store.url, workers=2)
        cleaned = clean(grid.make_own_world, store, "grid")
        assert (cleaned.is_found, cleaned.problem) == (True, None)
        assert store.work.list() == []
        assert store.sessions() == []
        assert journal_in(store, "grid") is None
    assert list(temporary.iterdir()) == [], "one call is enough"


def test_clean_tells_workers_to_leave_and_waits_for_them(place: dict[str, Any]) -> None:
    left: list[str] = []
    with holdfast.open(**place) as store:
        with drive(store, "grid") as session:
            member = frontier_of(session).join(default_holder(), 600)

        def leave() -> None:
            wait_until(lambda: store.work.get(member.id).cancel_requested)
            left.append(member.id)
            member.complete()

        thread = threading.Thread(target=leave)
        thread.start()
        cleaned = clean(grid.make_memory_world, store, "grid")
        assert left == [member.id]
        assert cleaned.problem is None
        thread.join()


def test_a_depth_limit_holds_when_one_process_continues_what_workers_began(
    place: dict[str, Any],
) -> None:
    actions = [crew.grow, crew.shrink]
    alone = facts(explore(crew.make_world, actions, max_depth=3))
    with holdfast.open(**place) as store:
        given: dict[str, Any] = {"store": store, "id": "a", "max_depth": 3}
        together = explore(crew.make_world, actions, workers=2, **given)
        assert facts(together) == alone
        assert facts(explore(crew.make_world, actions, resume=True, **given)) == alone


def test_a_killed_exploration_without_a_store_leaves_nothing(temporary: Path) -> None:
    code = (
        "from tests.worlds.grid import explored\n"
        "explored('memory', workers=2, on_progress=lambda now: print(now.steps, flush=True))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) == 1
        assert list(temporary.iterdir()) != []
        process.kill()
    wait_until(lambda: list(temporary.iterdir()) == [])


def test_another_process_takes_part(place: dict[str, Any]) -> None:
    actions = [crew.grow, crew.meet]
    mark = Path(os.environ[crew.PLACE])
    mark.touch()
    alone = explore(crew.make_world, actions)
    assert alone.is_complete
    mark.unlink()
    found: list[int] = []
    with holdfast.open(**place) as store, holdfast.open(**place) as other:

        def join() -> None:
            found.append(take_part(crew.make_world, actions, store=other, id="a"))

        thread = threading.Thread(target=join)

        def begin(now: Any) -> None:
            if now.steps == 1:
                with pytest.raises(InvalidArgument, match="different settings: actions"):
                    take_part(crew.make_world, [crew.grow], store=store, id="a")
                with pytest.raises(Conflict, match="different initial states"):
                    take_part(crew.make_another_each_time, actions, store=store, id="a")
                thread.start()

        together = explore(
            crew.make_world, actions, store=store, id="a", workers=2, on_progress=begin
        )
        thread.join()
        assert facts(together) == facts(alone)
        assert found[0] > 0
        with pytest.raises(NotFound, match="no exploration b to take part in"):
            take_part(crew.make_world, actions, store=store, id="b")
        with pytest.raises(Conflict, match="not running"):
            take_part(crew.make_world, actions, store=store, id="a")
        assert store.work.list() == []


def test_workers_use_a_temporary_store_and_need_the_keys_of_an_encrypted_one(
    tmp_path: Path,
) -> None:
    whole = facts(explored("memory"))
    with holdfast.open("sqlite://") as store:
        assert facts(explored("memory", store=store, id="a", workers=2)) == whole
    pytest.importorskip("cryptography")
    from holdfast.ciphers import AesGcm

    cipher = AesGcm({"k": os.urandom(32)}, current="k")
    with (
        holdfast.open(f"sqlite:///{tmp_path}/secret.db", cipher=cipher) as store,
        pytest.raises(InvalidArgument, match="HOLDFAST_KEYS_FILE"),
    ):
        explored("memory", store=store, id="a", workers=2)


def test_an_id_that_begins_others_is_new(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        for id in ("explored-1", "explored-2"):
            store.session(id)
        assert not clean(grid.make_memory_world, store, "explored").is_found
        assert explored("memory", store=store, id="explored").is_complete
        assert clean(grid.make_memory_world, store, "explored").is_found
        assert len(store.sessions()) == 2
