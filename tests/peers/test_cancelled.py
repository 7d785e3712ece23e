"""Calls that are cancelled or time out while their peer runs: what the peer and the asker learn."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from typing import Any

import pytest

import holdfast
from holdfast import Ask, LeaseLost, WorkCancelled
from holdfast.mesh import Mesh, Service
from holdfast.testing.subject import Subject, done
from tests.checkpoints.colours import both_colours
from tests.crash.children import Child
from tests.work.test_abandoned import logged
from tests.work.working import SECONDS_MAX, until

OPTIONS: dict[str, Any] = {"lease_seconds": 3, "poll_seconds": 0.05, "drain_seconds": 0.1}


@contextlib.asynccontextmanager
async def served(store: Any, service: Service, **options: Any) -> Any:
    worker: Any = service.worker(store, **OPTIONS, **options)
    is_async = isinstance(store, holdfast.AsyncStore)
    task = asyncio.ensure_future(worker.run() if is_async else asyncio.to_thread(worker.run))
    try:
        yield worker
    finally:
        worker.stop()
        await task


class Hanging:
    """A service whose requests hang until they are let go, or until they are told to stop."""

    def __init__(self, *, is_async: bool) -> None:
        self.go_on = threading.Event()
        self.heard: list[str] = []
        self.service = Service("slow", self.serve_async if is_async else self.serve)

    def serve(self, request: Any) -> str:
        if request.input == "hang":
            assert self.go_on.wait(SECONDS_MAX)
        if request.input == "polite":
            deadline = time.monotonic() + SECONDS_MAX
            try:
                while time.monotonic() < deadline:
                    request.check()
                    time.sleep(0.01)
            except (LeaseLost, WorkCancelled) as error:
                self.heard.append(type(error).__name__)
                raise
        return "fine"

    async def serve_async(self, request: Any) -> str:
        while request.input == "hang" and not self.go_on.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.02)
        if request.input == "polite":
            try:
                while True:
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.sleep(0.01)
                    request.check()
            except (LeaseLost, WorkCancelled) as error:
                self.heard.append(type(error).__name__)
                raise
        return "fine"


@both_colours
async def test_requests_that_hang_do_not_take_a_service_down(subject: Subject) -> None:
    store = await subject.open(durability="normal")
    hanging = Hanging(is_async=subject.colour == "async")
    mesh = Mesh(store)
    with logged() as lines:
        async with served(store, hanging.service, instances=2) as worker:
            for name in ("h1", "h2"):
                given: dict[str, Any] = {"request_id": name, "timeout_seconds": 0.5}
                await done(mesh.request("slow", "hang", **given, wait_seconds=0))
            await done(mesh.request("slow", "ok", request_id="ok", wait_seconds=0))
            await until(lambda: store.peer_call("ok"), lambda call: call.state == "ok")
            assert (await done(store.peer_call("h1"))).state == "timeout"
            await until(lambda: worker.abandoned, lambda count: count == 2)
            hanging.go_on.set()
            await until(lambda: worker.abandoned, lambda count: count == 0)
    text = "\n".join(lines)
    assert "INFO call h1 (request) timed out; its handler is told to stop" in lines
    freed = "handler of call h1 (request) still runs after its call timed out; its slot is free"
    assert freed in text
    assert "is lost or was not renewed" not in text


@both_colours
async def test_a_request_that_asks_whether_to_stop_is_told(subject: Subject) -> None:
    store = await subject.open(durability="normal")
    hanging = Hanging(is_async=subject.colour == "async")
    mesh = Mesh(store)
    with logged() as lines:
        async with served(store, hanging.service) as worker:
            await done(mesh.request("slow", "polite", request_id="p", wait_seconds=0))
            await until(lambda: store.work.get("request p"), lambda item: item.attempts == 1)
            assert await done(store.cancel_ask("p"))
            await until(lambda: worker.counts, lambda counts: counts["lost"] == 1)
            await done(mesh.request("slow", "polite", request_id="q", wait_seconds=0))
            await until(lambda: store.work.get("request q"), lambda item: item.attempts == 1)
            assert await done(store.work.cancel("request q")) == "in_progress"
            await until(lambda: worker.counts, lambda counts: counts["cancelled"] == 1)
            assert worker.abandoned == 0
    assert hanging.heard == ["LeaseLost", "WorkCancelled"]
    assert (await done(store.peer_call("q"))).state == "cancelled"
    assert any(line.startswith("INFO call p (request) was cancelled; ") for line in lines)
    assert not any(line.startswith("WARNING") for line in lines)


@both_colours
async def test_a_call_says_why_it_was_cancelled(subject: Subject) -> None:
    store = await subject.open(durability="normal")

    async def asked(name: str, **given: Any) -> list[str]:
        session = await done(store.session(name, agent="planner"))
        await done(session.pause(asks=[Ask("peer", 1), Ask("peer", 2)], **given))
        return [each.id for each in await done(session.asks())]

    async def why(id: str) -> tuple[str, str]:
        call = await done(store.peer_call(id))
        assert call.open_effects == ()
        return call.answer.status, call.answer.result

    first, second = await asked("enough", need="any")
    await done(store.answer(first, 1))
    assert await why(second) == (
        "cancelled",
        "The call was cancelled because the pause that waited for it needs no more answers.",
    )
    first, second = await asked("by hand")
    await done(store.cancel_ask(first))
    assert await why(first) == ("cancelled", "The call was cancelled by hand.")
    await done((await done(store.find_session(second))).cancel())
    served = "The call was cancelled with the session that served it."
    assert await why(second) == ("cancelled", served)
    first, second = await asked("asker")
    await done((await done(store.find_session("asker"))).cancel())
    asker = "The call was cancelled with the session that asked."
    assert await why(first) == await why(second) == ("cancelled", asker)


@both_colours
async def test_what_a_cancelled_peer_may_have_done_is_told_with_its_call(subject: Subject) -> None:
    """The outcome that it reports afterwards is kept, but its session's fence has gone on."""
    store = await subject.open(durability="normal")
    session = await done(store.session("s", agent="planner"))
    await done(session.pause(need=1, asks=[Ask("quick"), Ask("payer")]))
    quick, payer = await done(session.asks())
    paying, go_on = threading.Event(), threading.Event()

    @holdfast.tool(effect="mutate")
    def pay() -> str:
        paying.set()
        assert go_on.wait(SECONDS_MAX)
        return "paid"

    [item] = await done(store.work.claim("w", queues="agent:payer"))
    request = await done(item.receive())
    if subject.colour == "async":
        running = asyncio.ensure_future(request.session.call(pay))
    else:
        running = asyncio.ensure_future(asyncio.to_thread(request.session.call, pay))
    assert await asyncio.to_thread(paying.wait, SECONDS_MAX)
    await done(store.answer(quick.id, 1))
    call = await done(store.peer_call(payer.id))
    [effect] = call.open_effects
    assert (call.state, effect.tool, effect.status) == ("cancelled", "pay", "issued")
    assert effect.late is None
    go_on.set()
    with pytest.raises(LeaseLost):
        await running
    [effect] = (await done(store.find_ask(payer.id))).open_effects
    assert (effect.status, effect.late["status"]) == ("issued", "completed")
    assert effect.late["result"] == "paid"
    assert [each.open_effects for each in await done(store.asks())] == [(), None]


def test_a_process_with_handlers_that_hang_still_drains(place: dict[str, Any]) -> None:
    def serve(say: Any) -> None:
        def slow(request: Any) -> str:
            if request.input == "hang":
                say("hangs")
                threading.Event().wait()
            return "fine"

        with holdfast.open(**place, durability="normal") as store, logged() as lines:
            Service("slow", slow).serve(store, instances=1, **OPTIONS)
            say("\n".join(lines))

    with holdfast.open(**place, durability="normal"):
        pass
    child = Child(serve)
    with holdfast.open(**place, durability="normal") as store:
        mesh = Mesh(store)
        given: dict[str, Any] = {"request_id": "h", "timeout_seconds": 0.5, "wait_seconds": 0}
        mesh.request("slow", "hang", **given)
        assert mesh.request("slow", "ok").state == "ok"
    os.kill(child.pid, signal.SIGTERM)
    status, lines = child.wait()
    assert status == 0
    left = "still runs after its call timed out; the worker ends without it"
    assert len([line for line in lines if line.endswith(left)]) == 1
