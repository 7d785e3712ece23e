"""What a server does by itself: it sweeps and prunes as workers do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import holdfast
from holdfast.kernel.operation import rows
from holdfast.server.options import Options
from tests.server.live import live
from tests.work.fleet import wait_until


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.worker.upkeep.RETENTION_SECONDS", 0.05)


def replies_of(store: holdfast.Store) -> int:
    def count(tx: holdfast.Transaction) -> holdfast.Op[int]:
        [row] = yield from rows("SELECT count(*) AS n FROM hf_replies")
        return int(row["n"])

    return store.run(count)


def grow_old(tx: holdfast.Transaction) -> holdfast.Op[None]:
    yield from rows("UPDATE hf_replies SET created_at = 0")


def test_a_server_sweeps_and_prunes(place: dict[str, Any]) -> None:
    options = Options(work_days=0, sweep_interval_seconds=0.05)
    with holdfast.open(**place) as store, live(options, **place) as server:
        dead, done = store.work.submit("dead"), store.work.submit("done")
        delayed = store.work.submit("later", delay_seconds=0.1)
        store.work.claim("w", queues="done")[0].complete()
        # Nobody renews this lease, and no worker runs.
        store.work.claim("w", queues="dead", lease_seconds=0.1)
        key = {"idempotency-key": "k", "if-match": "*"}
        store.session("one")
        path = "/sessions/one/state/keys/n"
        assert server.client.put(path, json={"value": 1}, headers=key).status_code == 200
        assert replies_of(store) == 1
        store.run(grow_old)
        is_so: list[Callable[[], bool]] = [
            lambda: store.work.get(dead.id).rescues == 1,
            lambda: store.work.get(delayed.id).waits_for is None,
            lambda: done.id not in {item.id for item in store.work.list()},
            lambda: replies_of(store) == 0,
        ]
        for each in is_so:
            wait_until(each)


def test_a_server_that_only_reads_changes_nothing(place: dict[str, Any]) -> None:
    options = Options(work_days=0, sweep_interval_seconds=0.01, is_read_only=True)
    with holdfast.open(**place) as store:
        item = store.work.submit("done")
        store.work.claim("w")[0].complete()
        with live(options, **place) as server:
            for _ in range(20):
                assert server.client.get("/healthz").status_code == 200
        assert store.work.get(item.id).status == "completed"
