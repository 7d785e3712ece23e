"""Waiting is free: what a process holds does not depend on how many of its sessions wait."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import holdfast
from holdfast.kernel.driver import Hooks, Trace
from holdfast.kernel.operation import Call
from holdfast.mesh import Service
from holdfast.testing.subject import Subject, done
from holdfast.work.claims import find_ready
from tests.checkpoints.colours import both_colours
from tests.peers.agents import opened, planner

HOUR_MS = 3_600_000
FEW, MANY = 12, 120
# How many descriptors, threads and tasks may come and go by themselves.
SLACK = 10
DESCRIPTORS = Path("/proc/self/fd" if sys.platform == "linux" else "/dev/fd")


def wait_plainly(request: holdfast.PeerRequest[Any]) -> Any:
    session, kind = request.session, request.input
    if kind == 0:
        session.ask("nobody", timeout_seconds="never")
        return session.pause()
    if kind == 1:
        return session.wait_for_approval("may I?")
    return session.sleep(request.store.now_ms() + HOUR_MS)


async def wait_async(request: holdfast.PeerRequest[Any]) -> Any:
    session, kind = request.session, request.input
    if kind == 0:
        await session.ask("nobody", timeout_seconds="never")
        return await session.pause()
    if kind == 1:
        return await session.wait_for_approval("may I?")
    return await session.sleep(await request.store.now_ms() + HOUR_MS)


def held() -> list[int]:
    """Open descriptors, which connections and files are, threads, and tasks of the loop."""
    return [len(os.listdir(DESCRIPTORS)), threading.active_count(), len(asyncio.all_tasks())]


@both_colours
async def test_sessions_that_wait_hold_no_connection_no_thread_and_no_task(
    subject: Subject,
) -> None:
    store: Any = await subject.open(durability="normal")
    service = Service("waiter", wait_plainly if subject.colour == "sync" else wait_async)
    worker: Any = service.worker(store, poll_seconds=0.05)
    if subject.colour == "sync":
        serving = asyncio.ensure_future(asyncio.to_thread(worker.run))
    else:
        serving = asyncio.ensure_future(worker.run())
    counts = []
    for first, last in ((0, FEW), (FEW, MANY)):
        for number in range(first, last):
            await done(store.request("waiter", number % 3, request_id=f"r{number}"))
        while len(await done(store.pauses(state="waiting", limit=1_000))) < last:
            assert not serving.done()
            await asyncio.sleep(0.02)
        counts.append(held())
    few, many = counts
    assert all(more <= less + SLACK for less, more in zip(few, many, strict=True)), counts
    sessions = await done(store.sessions(agent="waiter", limit=1_000))
    assert {(each.status, each.holder) for each in sessions} == {("waiting", None)}
    worker.stop()
    await serving


@both_colours
async def test_looking_for_what_is_due_costs_the_same_however_many_wait(subject: Subject) -> None:
    traces: list[Trace] = []
    hooks = Hooks(trace=traces.append)
    store, clock = await opened(subject, hooks=hooks)

    async def look() -> list[int]:
        costs = []
        runtime = store.runtime
        steps: list[Callable[[], Any]] = [
            store._sweep,
            lambda: runtime.run(Call(find_ready, runtime, (["agent:planner"],))),
        ]
        for step in steps:
            traces.clear()
            await done(step())
            costs.append(sum(trace.statements for trace in traces))
        return costs

    costs = []
    for first, last in ((0, FEW), (FEW, MANY)):
        for number in range(first, last):
            session = await planner(store, f"s{number}")
            if number % 3 == 0:
                await done(session.ask("nobody"))
                await done(session.pause())
            elif number % 3 == 1:
                await done(session.wait_for_approval("may I?"))
            else:
                await done(session.sleep(clock.now_ms() + HOUR_MS + number))
        costs.append(await look())
    assert costs[0] == costs[1]
    assert all(costs[0])
