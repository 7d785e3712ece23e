"""A fence of a store that a session left counts nowhere; keys that have expired are removed."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import VirtualClock
from holdfast.worker import Worker

WAIT_SECONDS = 60.0
DAY_SECONDS = 24 * 3600


def test_an_imported_session_has_a_fence_above_all_that_its_origin_gave_out(
    place: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "exported"
    with holdfast.open(f"sqlite:///{tmp_path}/origin.db") as origin:
        session = origin.session("s")
        for holder in ("a", "b", "c"):
            session.release(session.lease(holder, 60))
        origin.export(file)
        given_out = [session.lease(f"late {n}", 60, instance=f"late {n}") for n in range(1)]
    with holdfast.open(**place) as store:
        store.import_sessions(file)
        moved = store.find_session("s")
        # Whoever held it there, also after the export, holds nothing here.
        for lease in given_out:
            with pytest.raises(holdfast.LeaseLost):
                moved.renew(lease, 60)
        taken = moved.lease("here", 60)
        assert taken.fence > max(lease.fence for lease in given_out) + 1_000_000


def test_a_worker_removes_keys_that_have_expired(
    place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.worker.upkeep.RETENTION_SECONDS", 0.05)
    clock = VirtualClock()
    with holdfast.open(**place, clock=clock) as store:
        store.once("expired", lambda: 1, ttl_seconds=60)
        store.once("kept", lambda: 2, ttl_seconds=None)
        clock.advance(30 * DAY_SECONDS)
        assert len(store.effects()) == 2
        worker = Worker(store, {"step": lambda item: None}, sweep_interval_seconds=0.05)
        thread = threading.Thread(target=worker.run)
        thread.start()
        try:
            deadline = time.monotonic() + WAIT_SECONDS
            while len(store.effects()) > 1:
                assert time.monotonic() < deadline
                time.sleep(0.02)
        finally:
            worker.stop()
            thread.join()
        assert store.once("kept", lambda: 3, ttl_seconds=None).value == 2
        assert store.once("expired", lambda: 3, ttl_seconds=60).value == 3
