"""Progress reaches whoever waits, through as many stores as there are between."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import holdfast
from holdfast.mesh import Memory, Mesh, Service
from tests.mesh.meshes import PLANNER, QUICK, is_idle, running, until


def test_progress_of_a_peers_peer_comes_through_two_stores(
    place: dict[str, Any], other: dict[str, Any], tmp_path: Path
) -> None:
    is_told = threading.Event()
    notes: list[Any] = []

    def serve(request: holdfast.PeerRequest[Any]) -> Any:
        request.store.progress(request.ask_id, "halfway")
        assert is_told.wait(120)
        return "sun"

    def told(note: Any) -> None:
        notes.append(note)
        is_told.set()

    transport = Memory(resend_seconds=0.5, repeat_every=2)
    with (
        holdfast.open(**place, durability="normal") as front,
        holdfast.open(**other, durability="normal") as planners,
        holdfast.open(f"sqlite:///{tmp_path}/peers.db", durability="normal") as peers,
        Mesh(front, transport) as mesh,
        running(
            PLANNER.worker(planners, transport, **QUICK),
            Service("weather", serve).worker(peers, transport, **QUICK),
        ),
    ):
        call = mesh.request("planner", ["Oslo"], on_progress=told, wait_seconds=120)
        assert call.answer is not None
        assert call.answer.result == [["ok", "sun"]]
        assert notes == ["halfway"]
        stores = (front, planners, peers)
        until(lambda: all(map(is_idle, stores)), "something is left")
