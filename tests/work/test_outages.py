"""The store is away for a while: workers wait, and fence themselves in time."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast import Submission, Worker
from holdfast.testing.subject import Subject, done
from tests.checkpoints.colours import both_colours
from tests.work.working import SECONDS_MAX, opened, running, until


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait before another attempt is as random as always, but short."""
    monkeypatch.setattr("holdfast.work.transitions.RETRY_SECONDS", 0.02)


@contextlib.contextmanager
def locked(place: dict[str, Any]) -> Iterator[None]:
    """Keep every writer out, as a process that hangs in a transaction would."""
    if "namespace" in place:
        with psycopg.connect(place["url"]) as connection:
            connection.execute(f'LOCK TABLE "{place["namespace"]}".hf_work')
            yield
        return
    path = place["url"].removeprefix("sqlite:///") + "-lock"
    with open(path, "rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@both_colours
async def test_a_store_that_is_away_is_waited_for(subject: Subject) -> None:
    # Stores of one server are made one after the other.
    holdfast.open(**subject.place).close()
    store = await opened(subject, busy_timeout_seconds=0.1)
    held, go_on = threading.Event(), threading.Event()

    def handler(item: Any) -> int:
        if item.input == 0:
            held.set()
            assert go_on.wait(SECONDS_MAX)
        return int(item.input)

    await done(store.work.submit_many([Submission("t", n) for n in range(6)]))
    async with running(store, {"t": handler}, concurrency=2, poll_seconds=0.05):
        await asyncio.to_thread(held.wait, SECONDS_MAX)
        with locked(subject.place):
            go_on.set()
            await asyncio.sleep(1)
        look = lambda: store.work.list(status="completed")  # noqa: E731
        found = await until(look, lambda found: len(found) == 6)
    assert sorted(item.output for item in found) == list(range(6))
    assert {(item.attempts, item.retry_count) for item in found} == {(1, 0)}


def test_a_worker_whose_connections_are_cut_all_the_time_loses_no_item(
    postgres_dsn: str, namespace: str
) -> None:
    """Claims, heartbeats, progress and ends all meet a connection that was just closed."""

    def handler(item: Any) -> int:
        item.progress(item.input)
        time.sleep(0.02)
        return int(item.input)

    cut = """
        SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
        WHERE pid <> pg_backend_pid() AND starts_with(application_name, 'holdfast')
            AND strpos(query, %s) > 0
    """
    place: dict[str, Any] = {"url": postgres_dsn, "namespace": namespace}
    with holdfast.open(**place) as store:
        wanted = [Submission("t", n, max_retries=100) for n in range(150)]
        ids = [item.id for item in store.work.submit_many(wanted)]
    with holdfast.open(**place) as store, psycopg.connect(postgres_dsn, autocommit=True) as other:
        worker = Worker(
            store,
            {"t": handler},
            lease_seconds=3,
            poll_seconds=0.1,
            sweep_interval_seconds=0.2,
            prefetch=3,
        )
        thread = threading.Thread(target=worker.run)
        thread.start()
        cuts = 0
        for _ in range(20):
            time.sleep(0.1)
            row = other.execute(cut, [f'"{namespace}"']).fetchone()
            cuts += 0 if row is None else row[0]
        deadline = time.monotonic() + SECONDS_MAX
        while worker.counts["completed"] < len(ids) and time.monotonic() < deadline:
            time.sleep(0.05)
        worker.stop()
        thread.join()
        items = [store.work.get(id) for id in ids]
    assert cuts > 0
    assert [item.output for item in items] == list(range(len(ids)))


def test_a_worker_cut_off_from_its_store_fences_itself(
    place: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    said: list[str] = []
    lost = threading.Event()

    def handler(item: Any) -> str:
        if item.retry_count:
            return "second"
        started.set()
        deadline = time.monotonic() + SECONDS_MAX
        while not item.is_lost and time.monotonic() < deadline:
            time.sleep(0.01)
        for write in (item.progress, lambda note: item.session.save(note=note)):
            try:
                write("late")
            except holdfast.HoldfastError as error:
                said.append(type(error).__name__)
        lost.set()
        return "first"

    started = threading.Event()
    # Stores of one server are made one after the other.
    holdfast.open(**place).close()
    with holdfast.open(**place, busy_timeout_seconds=0.1) as store:
        item = store.work.submit("t", session=store.session("s"))
        worker = Worker(
            store, {"t": handler}, lease_seconds=1, poll_seconds=0.05, sweep_interval_seconds=0.2
        )
        thread = threading.Thread(target=worker.run)
        thread.start()
        assert started.wait(SECONDS_MAX)
        with caplog.at_level(logging.WARNING, "holdfast.worker"), locked(place):
            assert lost.wait(SECONDS_MAX)
        deadline = time.monotonic() + SECONDS_MAX
        while store.work.get(item.id).completed_at is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        worker.stop()
        thread.join()
        item = store.work.get(item.id)
        latest = store.session("s").latest()
        assert latest is not None
        assert latest.channels == {}
    assert (item.output, item.rescues, item.retry_count) == ("second", 1, 1)
    assert said[0] == "LeaseLost"
    assert "was not renewed in time" in caplog.text
