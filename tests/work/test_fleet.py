"""Fleets of worker processes that are killed the whole time: every item ends, once."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import Submission, Worker
from tests.work.fleet import Fleet, read_lines, wait_until, write_line

WORKERS = 8
SESSIONS = 5
MAX_RETRIES = 20
LEASE_SECONDS = 2.0


def work(place: dict[str, Any], runs: str, seed: int) -> None:
    """One worker of the fleet: until it is killed."""
    chance = random.Random(seed)

    def handler(item: Any) -> dict[str, Any]:
        write_line(runs, f"{item.id} {item.fence}")
        if item.session is not None:
            item.session.record("manual_checkpoint", {"fence": item.fence}, item=item)
        time.sleep(chance.uniform(0, 0.05))
        if chance.random() < 0.02:
            raise ConnectionError("by chance")
        return {"fence": item.fence}

    with holdfast.open(**place, durability="normal") as store:
        Worker(
            store,
            {"t": handler},
            concurrency=2,
            prefetch=seed % 3,
            lease_seconds=LEASE_SECONDS,
            poll_seconds=0.3,
            sweep_interval_seconds=0.5,
        ).run()


def submit(store: holdfast.Store, count: int) -> None:
    sessions = [store.session(f"s{number}") for number in range(SESSIONS)]
    wanted = [
        Submission(
            "t", n, session=sessions[n % SESSIONS] if n % 2 else None, max_retries=MAX_RETRIES
        )
        for n in range(count)
    ]
    store.work.submit_many(wanted)


def unfinished(store: holdfast.Store) -> int:
    return sum(count.items for count in store.work.counts(finished=False))


def check_fleet(place: dict[str, Any], directory: Path, items: int, kills: int, seed: int) -> str:
    """Kill random workers until everything has ended and enough have been killed."""
    chance = random.Random(seed)
    runs = str(directory / "runs")
    with Fleet(work=work) as fleet, holdfast.open(**place, durability="normal") as store:
        submit(store, items)
        total, killed = items, 0
        for number in range(WORKERS):
            fleet.start("work", place, runs, number)
        deadline = time.monotonic() + 600
        while (left := unfinished(store)) or killed < kills:
            assert time.monotonic() < deadline, f"after {killed} kills {reasons(store)}"
            if left < WORKERS and killed < kills:
                submit(store, items // 10)
                total += items // 10
            time.sleep(chance.uniform(0, 0.3))
            if killed < kills:
                fleet.kill(chance.choice(fleet.pids))
                killed += 1
                fleet.start("work", place, runs, 1000 + killed)
        checked = check_items(store, total, runs)
    return f"{total} items, {killed} kills, {checked}"


def reasons(store: holdfast.Store) -> list[str]:
    """Say of the first items that have not ended where they are, and why."""
    found = store.work.list(status=["pending", "in_progress"], limit=10)
    return [f"{item.to_dict()}: {store.work.why(item.id)}" for item in found]


def check_items(store: holdfast.Store, total: int, runs: str) -> str:
    """Make sure that each item has ended once, under its newest fence, within its budget."""
    found, before = [], None
    while page := store.work.list(before=before, limit=1000):
        found += page
        before = page[-1].number
    assert len(found) == total
    runs_of: dict[str, list[int]] = defaultdict(list)
    for line in read_lines(runs):
        id, fence = line.split()
        runs_of[id].append(int(fence))
    for item in found:
        assert (item.status, item.output) == ("completed", {"fence": item.fence}), item.to_dict()
        assert item.retry_count == item.failures + item.rescues <= MAX_RETRIES
        assert item.attempts == 1 + item.failures + item.rescues + item.releases
        # Each lease ran at most once; one that was killed before its handler began ran never.
        assert len(set(runs_of[item.id])) == len(runs_of[item.id]) <= item.attempts
        assert runs_of[item.id][-1] == item.fence
    for number in range(SESSIONS):
        check_history(store, f"s{number}")
    rescues = sum(item.rescues for item in found)
    executions = sum(map(len, runs_of.values()))
    return f"{executions} executions, {rescues} rescues"


def check_history(store: holdfast.Store, id: str) -> None:
    """Make sure of one accepted end for each item, and of no write under an old fence."""
    completed: Counter[str] = Counter()
    newest: dict[str, int] = {}
    after = 0
    while events := store.events(id, after=after, limit=1000):
        for event in events:
            if event.kind.startswith("work_") and event.kind != "work_submitted":
                item, fence = event.data["item"], event.data["fence"]
                completed[item] += event.kind == "work_completed"
                # An attempt that has ended writes nothing more.
                assert fence > newest.get(item, 0), f"{event.kind} under an old fence"
                newest[item] = fence
        after = events[-1].position
    items = store.work.list(session=id, limit=1000)
    assert set(completed) >= {item.id for item in items}
    assert set(completed.values()) == {1}
    session = store.session(id)
    writes: dict[str, list[int]] = defaultdict(list)
    before = None
    while page := session.history(before=before, limit=500):
        for checkpoint in page:
            if checkpoint.kind == "manual_checkpoint":
                writes[str(checkpoint.item_id)].append(checkpoint.data["fence"])
        before = page[-1].version
    for item, fences in writes.items():
        assert fences == sorted(fences, reverse=True), f"{item} took a write under an old fence"
        assert fences[0] == newest[item]


def test_every_item_ends_once_while_workers_are_killed(
    place: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = check_fleet(place, tmp_path, items=300, kills=20, seed=1)
    with capsys.disabled():
        print(f"\n{place['url'].partition(':')[0]}: {told}")


@pytest.mark.slow
def test_two_thousand_items_and_a_hundred_kills(
    place: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = int(os.environ.get("HOLDFAST_TEST_SEED", "2"))
    told = check_fleet(place, tmp_path, items=2_000, kills=120, seed=seed)
    with capsys.disabled():
        print(f"\n{place['url'].partition(':')[0]}: {told}")


# Workers that always die


def die(place: dict[str, Any], runs: str) -> None:
    """A worker whose handler kills it."""

    def handler(item: Any) -> None:
        write_line(runs, f"{item.max_retries}")
        os.kill(os.getpid(), signal.SIGKILL)

    with holdfast.open(**place, durability="normal") as store:
        Worker(
            store,
            {"t": handler},
            concurrency=1,
            lease_seconds=2,
            poll_seconds=0.05,
            sweep_interval_seconds=0.1,
        ).run()


def test_a_worker_that_always_dies_uses_up_the_budget_and_no_more(
    place: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """max_retries of 0, 1 and 3 are 1, 2 and 4 executions."""
    monkeypatch.setattr("holdfast.work.transitions.RETRY_SECONDS", 0.01)
    runs = str(tmp_path / "runs")
    with Fleet(die=die) as fleet, holdfast.open(**place, durability="normal") as store:
        ids = [store.work.submit("t", max_retries=budget).id for budget in (0, 1, 3)]
        deadline = time.monotonic() + 120
        while unfinished(store):
            assert time.monotonic() < deadline, read_lines(runs)
            fleet.pids = [pid for pid in fleet.pids if fleet.is_alive(pid)]
            while len(fleet.pids) < 2:
                fleet.start("die", place, runs)
            time.sleep(0.05)
        items = [store.work.get(id) for id in ids]
    assert Counter(read_lines(runs)) == {"0": 1, "1": 2, "3": 4}
    for item in items:
        assert item.status == "failed"
        assert (item.retry_count, item.rescues) == (item.max_retries, item.max_retries + 1)
        assert "sent no heartbeat" in (item.error or "")


# Waking up


def wait_for_work(place: dict[str, Any], runs: str) -> None:
    """A worker that hardly ever looks by itself."""
    with holdfast.open(**place) as store:
        worker = Worker(
            store, {"t": lambda item: item.input}, poll_seconds=600, sweep_interval_seconds=600
        )
        threading.Thread(target=lambda: write_line(runs, "runs")).start()
        worker.run()


def test_an_item_of_another_process_wakes_the_worker(place: dict[str, Any], tmp_path: Path) -> None:
    runs = str(tmp_path / "runs")
    with Fleet(wait=wait_for_work) as fleet:
        fleet.start("wait", place, runs)
        wait_until(lambda: read_lines(runs))
        with holdfast.open(**place) as store:
            for number in range(3):
                item = store.work.submit("t", number)
                wait_until(lambda id=item.id: store.work.get(id).status == "completed")  # type: ignore[misc]


def poll_for_work(place: dict[str, Any]) -> None:
    """A worker to which no notification comes."""
    with holdfast.open(**place) as store:
        store.runtime.signals._listen = None
        Worker(store, {"t": lambda item: item.input}, poll_seconds=0.05).run()


def test_without_notifications_the_worker_looks_by_itself(place: dict[str, Any]) -> None:
    if "namespace" in place:
        place = {
            **place,
            "url": place["url"] + ("&" if "?" in place["url"] else "?") + "listen=off",
        }
    with Fleet(poll=poll_for_work) as fleet:
        fleet.start("poll", place)
        with holdfast.open(**place) as store:
            for number in range(3):
                item = store.work.submit("t", number)
                wait_until(lambda id=item.id: store.work.get(id).status == "completed")  # type: ignore[misc]
            item = store.work.submit("t", "later", delay_seconds=0.3)
            wait_until(lambda: store.work.get(item.id).status == "completed")
