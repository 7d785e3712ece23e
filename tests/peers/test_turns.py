"""Turns of a service that fail, as a whole or for one of their items: no other suffers from it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.kernel.driver import Hooks, Point, Trace
from holdfast.mesh import Service
from holdfast.testing.proxy import Moment, PostgresProxy
from holdfast.testing.subject import Subject, done
from tests.checkpoints.colours import both_colours, sql
from tests.work.test_outages import locked
from tests.work.working import SECONDS_MAX, opened, until

INSTANCES = 4
# Those that wait while the first ones run are claimed in the turn that completes these.
REQUESTS = 2 * INSTANCES


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait before another attempt is as random as always, but short."""
    monkeypatch.setattr("holdfast.work.transitions.RETRY_SECONDS", 0.02)


class Peer:
    """A service whose first requests begin, and are answered together once they may."""

    def __init__(self, colour: str) -> None:
        self.runs: Counter[Any] = Counter()
        self.service = Service("peer", self.plain if colour == "sync" else self.asynchronous)
        self._begun = threading.Semaphore(0)
        self._go = threading.Event()

    def plain(self, request: holdfast.PeerRequest[Any]) -> Any:
        request.session.add_artifact("made", data=request.input)
        self._begin(request)
        assert self._go.wait(SECONDS_MAX)
        return request.input

    async def asynchronous(self, request: holdfast.PeerRequest[Any]) -> Any:
        await request.session.add_artifact("made", data=request.input)
        self._begin(request)
        while not self._go.is_set():  # noqa: ASYNC110 - it is set by another thread
            await asyncio.sleep(0.01)
        return request.input

    def _begin(self, request: holdfast.PeerRequest[Any]) -> None:
        self.runs[request.input] += 1
        self._begun.release()

    async def all_begun(self) -> None:
        for _ in range(INSTANCES):
            assert await asyncio.to_thread(self._begun.acquire, timeout=SECONDS_MAX)

    def go(self) -> None:
        self._go.set()


async def asked(store: Any, numbers: range) -> None:
    for number in numbers:
        await done(store.request("peer", number, request_id=f"r{number}"))


@contextlib.asynccontextmanager
async def serving(store: Any, peer: Peer, **options: Any) -> AsyncIterator[Any]:
    """Serve beside the test until all first requests have begun; drain at the end."""
    given: dict[str, Any] = {"instances": INSTANCES, "poll_seconds": 0.05, **options}
    worker: Any = peer.service.worker(store, **given)
    is_async = isinstance(store, holdfast.AsyncStore)
    task = asyncio.ensure_future(worker.run() if is_async else asyncio.to_thread(worker.run))
    try:
        await peer.all_begun()
        yield worker
    finally:
        peer.go()
        worker.stop()
        await task


async def all_answered(store: Any, count: int = REQUESTS) -> dict[str, str]:
    """Wait until all requests have their answers; return their states."""

    async def states() -> dict[str, str]:
        return {each.id: each.state for each in await done(store.asks(limit=100))}

    found: dict[str, str] = await until(
        states, lambda found: len(found) == count and "open" not in found.values()
    )
    return found


async def is_clean(store: Any) -> None:
    """Nothing is left that runs, waits or is leased, and every answer is that of its request."""
    await until(lambda: store.work.list(status=["pending", "in_progress"]), lambda found: not found)
    assert not [each for each in await done(store.sessions(limit=100)) if each.holder is not None]
    for call in await done(store.asks(state="ok", limit=100)):
        assert (call.answer.result, len(call.answer.artifacts)) == (call.input, 1)


def attempts(items: list[Any]) -> dict[str, int]:
    return {item.id.removeprefix("request "): item.attempts for item in items}


ALL_OK = {f"r{number}": "ok" for number in range(REQUESTS)}
ONCE = dict.fromkeys(ALL_OK, 1)


@both_colours
async def test_a_turn_that_fails_is_made_again_in_parts(subject: Subject) -> None:
    failed: list[Point] = []
    is_armed = threading.Event()

    def probe(point: Point) -> None:
        if point.call == "serve_turn" and point.boundary == "commit" and is_armed.is_set():
            is_armed.clear()
            failed.append(point)
            raise holdfast.StoreUnavailable("the disk is away; nothing was written")

    store = await opened(subject, hooks=Hooks(probe=probe))
    peer = Peer(subject.colour)
    await asked(store, range(REQUESTS))
    async with serving(store, peer) as worker:
        is_armed.set()
        with locked(subject.place):
            peer.go()
        assert await all_answered(store) == ALL_OK
        await is_clean(store)
    assert len(failed) == 1
    assert worker.counts == {"completed": REQUESTS}
    assert attempts(await done(store.work.list(limit=100))) == ONCE
    assert set(peer.runs.values()) == {1}


@both_colours
async def test_an_answer_that_cannot_be_made_is_an_error_of_its_own_request(
    subject: Subject,
) -> None:
    traces: list[Trace] = []
    store = await opened(subject, hooks=Hooks(trace=traces.append))
    peer = Peer(subject.colour)
    await asked(store, range(REQUESTS))
    async with serving(store, peer):
        damage = "UPDATE hf_artifacts SET data = CAST('damaged' AS BLOB) WHERE session_id = 'r1'"
        await done(sql(store, damage))
        with locked(subject.place):
            peer.go()
        assert await all_answered(store) == {**ALL_OK, "r1": "error"}
        await is_clean(store)
    call = await done(store.peer_call("r1"))
    assert "hf_artifacts/r1" in call.answer.result
    assert call.answer.artifacts == ()
    assert [each.error for each in traces if each.call == "serve_turn" and each.error]
    runs = {f"r{number}": count for number, count in peer.runs.items() if number != 1}
    assert set(runs.values()) == {1}


@both_colours
async def test_an_item_that_cannot_be_taken_up_spoils_no_turn(subject: Subject) -> None:
    traces: list[Trace] = []
    store = await opened(subject, hooks=Hooks(trace=traces.append))
    peer = Peer(subject.colour)
    await asked(store, range(INSTANCES))
    odd = await done(store.session("odd"))
    given: dict[str, Any] = {"session": odd, "queue": "agent:peer", "max_retries": 0}
    bad = await done(store.work.submit("resume", None, **given))
    await asked(store, range(INSTANCES, REQUESTS))
    async with serving(store, peer) as worker:
        with locked(subject.place):
            peer.go()
        assert await all_answered(store) == ALL_OK
        await until(lambda: store.work.get(bad.id), lambda item: item.status == "failed")
        await is_clean(store)
    assert [each.error for each in traces if each.call == "serve_turn" and each.error]
    assert worker.counts == {"completed": REQUESTS, "failed": 1}
    items = await done(store.work.list(type="request", limit=100))
    assert attempts(items) == ONCE
    assert (await done(odd.info())).status == "failed"


@both_colours
async def test_a_lease_that_was_lost_harms_no_other_of_its_turn(subject: Subject) -> None:
    store = await opened(subject)
    peer = Peer(subject.colour)
    await asked(store, range(REQUESTS))
    async with serving(store, peer) as worker:
        stolen = await done(store.work.get("request r2", fence=1))
        await done(stolen.release())
        await done((await done(store.find_session("r3"))).cancel())
        with locked(subject.place):
            peer.go()
        assert await all_answered(store) == {**ALL_OK, "r3": "cancelled"}
        await is_clean(store)
    assert worker.counts["lost"] + worker.counts["cancelled"] == 2
    assert worker.counts["completed"] == REQUESTS - 1
    items = await done(store.work.list(limit=100))
    assert attempts(items) == {**ONCE, "r2": 2}
    assert {item.retry_count for item in items} == {0}
    assert peer.runs == {**dict.fromkeys(range(REQUESTS), 1), 2: 2}


def in_postgres(
    case: Callable[[Subject], Any], postgres_dsn: str, namespace: str, tmp_path: Any, colour: Any
) -> None:
    async def run() -> None:
        # Stores of one server are made one after the other.
        holdfast.open(postgres_dsn, namespace=namespace).close()
        subject = Subject({"url": postgres_dsn, "namespace": namespace}, colour, tmp_path)
        try:
            await case(subject)
        finally:
            await subject.close()

    asyncio.run(run())


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_while_a_tree_is_locked_the_others_are_answered_and_the_next_ones_served(
    postgres_dsn: str, namespace: str, tmp_path: Any, colour: Any
) -> None:
    async def case(subject: Subject) -> None:
        traces: list[Trace] = []
        store = await opened(subject, hooks=Hooks(trace=traces.append))
        peer = Peer(colour)
        await asked(store, range(REQUESTS))
        lock = f"SELECT 1 FROM {namespace}.hf_trees WHERE root_id = 'r1' FOR NO KEY UPDATE"
        async with serving(store, peer) as worker:
            with psycopg.connect(postgres_dsn) as other:
                other.execute(lock.encode())
                peer.go()
                rest = lambda: store.asks(state="ok", limit=100)  # noqa: E731
                await until(rest, lambda found: len(found) == REQUESTS - 1)
                assert (await done(store.peer_call("r1"))).state == "open"
            assert await all_answered(store) == ALL_OK
            await is_clean(store)
        # No turn has waited for the tree until it failed.
        assert {each.error for each in traces if each.call == "serve_turn"} == {None}
        assert worker.counts == {"completed": REQUESTS}
        assert attempts(await done(store.work.list(limit=100))) == ONCE

    in_postgres(case, postgres_dsn, namespace, tmp_path, colour)


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("colour", ["sync", "async"])
def test_a_turn_whose_commit_is_in_doubt_is_settled_before_anything_is_done_again(
    proxy: PostgresProxy,
    postgres_dsn: str,
    namespace: str,
    tmp_path: Any,
    colour: Any,
    moment: Moment,
) -> None:
    """Nobody can tell for longer than the store waits."""

    async def case(subject: Subject) -> None:
        cuts: list[Any] = []

        def probe(point: Point) -> None:
            if is_armed.is_set() and point.call == "serve_turn" and point.boundary == "commit":
                is_armed.clear()
                cuts.append(proxy.cut_next_commit(moment))
                proxy.refuse(1.5)

        is_armed = threading.Event()
        url = f"{proxy.dsn(postgres_dsn)}&listen=off"
        store = await subject.open(
            url=url, busy_timeout_seconds=0.5, durability="normal", hooks=Hooks(probe=probe)
        )
        peer = Peer(colour)
        await asked(store, range(REQUESTS))
        given = {"lease_seconds": 10, "sweep_interval_seconds": 0.2}
        async with serving(store, peer, **given) as worker:
            is_armed.set()
            peer.go()
            async with await holdfast.aopen(postgres_dsn, namespace=namespace) as direct:
                assert await all_answered(direct) == ALL_OK
                await is_clean(direct)
                items = await direct.work.list(limit=100)
        assert [cut.wait() for cut in cuts] == ["COMMIT" if moment == "after" else None]
        # What was answered is not taken for lost; what was claimed unseen has another attempt.
        assert worker.counts["lost"] == 0
        first = {f"r{number}": 1 for number in range(INSTANCES)}
        assert {id: n for id, n in attempts(items).items() if id in first} == first
        assert set(peer.runs.values()) == {1}

    in_postgres(case, postgres_dsn, namespace, tmp_path, colour)
