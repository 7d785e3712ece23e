"""Agents for the tests of transports, and their workers."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import holdfast
from holdfast.kernel.operation import rows
from holdfast.mesh import Service

PATIENCE_SECONDS = 180.0
QUICK: dict[str, Any] = {"poll_seconds": 0.05, "sweep_interval_seconds": 0.2}


def plan(request: holdfast.PeerRequest[Any]) -> Any:
    for city in request.input:
        request.session.ask("weather", {"city": city})
    return request.session.pause({"cities": request.input})


def planned(resumption: holdfast.Resumption[Any]) -> Any:
    return [[answer.status, answer.result] for answer in resumption.answers]


def weather(request: holdfast.PeerRequest[Any]) -> Any:
    return f"{request.input['city']}: sun for {request.user}"


PLANNER = Service("planner", plan, planned)
WEATHER = Service("weather", weather)


@contextlib.contextmanager
def running(*workers: Any) -> Iterator[None]:
    """Run workers until the end of the block."""
    threads = [threading.Thread(target=worker.run) for worker in workers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for worker in workers:
            worker.stop()
        for thread in threads:
            thread.join()


def until(is_true: Callable[[], Any], what: str) -> None:
    """Wait for a condition."""
    ends_at = time.monotonic() + PATIENCE_SECONDS
    while not is_true():
        assert time.monotonic() < ends_at, what
        time.sleep(0.02)


def outbox(store: Any) -> list[tuple[str, str, int]]:
    """Return the messages of a store: kind, ask and attempts."""
    found = store.run(lambda tx: rows("SELECT * FROM hf_outbox ORDER BY number"))
    return [(row["kind"], row["ask_id"], row["attempts"]) for row in found]


def is_idle(store: Any) -> bool:
    """Whether nothing is left to be sent, asked or run."""
    unfinished = store.work.list(status=["pending", "in_progress"], limit=1)
    return not (outbox(store) or unfinished or store.asks(state="open", limit=1))
