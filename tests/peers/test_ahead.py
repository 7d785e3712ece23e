"""A service claims for slots that become free during a turn, as long as its handlers are quick."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import holdfast
from holdfast.mesh import Service
from holdfast.testing.subject import Subject, done
from tests.checkpoints.colours import both_colours
from tests.work.working import SECONDS_MAX, opened, until

INSTANCES = 4
QUICK = 6 * INSTANCES
ROUNDS_MAX = 100


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.worker.loop.AHEAD_SECONDS_MAX", 0.2)


class Peer:
    """A service with quick requests, and with slow ones that take as long as they are told to."""

    def __init__(self, colour: str) -> None:
        self.service = Service("peer", self.plain if colour == "sync" else self.asynchronous)
        self.begun: set[str] = set()
        self.slow = threading.Semaphore(0)
        self.go = threading.Event()

    def plain(self, request: holdfast.PeerRequest[Any]) -> Any:
        self.begun.add(request.ask_id)
        if request.input == "slow":
            self.slow.release()
            assert self.go.wait(SECONDS_MAX)
        return request.input

    async def asynchronous(self, request: holdfast.PeerRequest[Any]) -> Any:
        self.begun.add(request.ask_id)
        if request.input == "slow":
            self.slow.release()
            assert await asyncio.to_thread(self.go.wait, SECONDS_MAX)
        return request.input

    async def all_slow(self) -> None:
        for _ in range(INSTANCES):
            assert await asyncio.to_thread(self.slow.acquire, timeout=SECONDS_MAX)


async def ask(store: Any, inputs: list[str]) -> None:
    for each in inputs:
        await done(store.request("peer", each))


async def claimed_ahead(store: Any, peer: Peer) -> set[str]:
    """Return the items that are held although no handler has begun them."""
    held = await done(store.work.list(status="in_progress", limit=100))
    return {item.id for item in held if item.session_id not in peer.begun}


async def is_answered(store: Any) -> None:
    await until(lambda: store.asks(state="open", limit=1), lambda found: not found)


@both_colours
async def test_what_a_service_claimed_ahead_is_given_back_when_its_handlers_become_slow(
    subject: Subject,
) -> None:
    store = await opened(subject)
    peer = Peer(subject.colour)
    worker: Any = peer.service.worker(store, instances=INSTANCES, poll_seconds=0.05)
    is_async = isinstance(store, holdfast.AsyncStore)
    running = asyncio.ensure_future(worker.run() if is_async else asyncio.to_thread(worker.run))
    try:
        for _ in range(ROUNDS_MAX):
            await ask(store, ["quick"] * QUICK + ["slow"] * INSTANCES + ["quick"] * QUICK)
            await peer.all_slow()
            if ahead := await claimed_ahead(store, peer):
                break
            peer.go.set()
            await is_answered(store)
            peer.go.clear()
        else:
            pytest.fail("it never claimed ahead, although many handlers were quick")
        await until(lambda: claimed_ahead(store, peer), lambda found: not found)
        # What was given back waits for anybody.
        waiting = await done(store.work.list(status="pending", limit=100))
        given_back = {item.id for item in waiting if item.releases > 0}
        assert given_back >= ahead
        assert {item.retry_count for item in waiting} == {0}
        peer.go.set()
        await is_answered(store)
    finally:
        peer.go.set()
        worker.stop()
        await running
    calls = await done(store.asks(limit=1_000))
    assert {call.answer.result == call.input for call in calls} == {True}
