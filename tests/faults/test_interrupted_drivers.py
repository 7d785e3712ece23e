"""A driver that is interrupted or cancelled never leaves its session held."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import threading
import time
import types
from collections import Counter
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any

import pytest

import holdfast
from holdfast.agent import Agent, ScriptedModel
from holdfast.errors import SessionBusy, StoreReentered
from holdfast.kernel.driver import Hooks, Point
from tests.faults.interrupts import WAIT_SECONDS, driven_soon
from tests.faults.tracing import Interrupt, beside_threads, interrupted_everywhere

Report = Callable[[str], None]

# Far longer than any test waits: a lease that nobody gives back is noticed.
LEASE_SECONDS = 6_000

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def drive(session: holdfast.Session) -> None:
    with session.drive(lease_seconds=LEASE_SECONDS):
        pass


def seconds_of(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


async def driven_soon_async(session: holdfast.Session[holdfast.Async]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            async with session.drive("other"):
                return
        except SessionBusy:
            assert time.monotonic() < deadline, f"{session} is still held"
            await asyncio.sleep(0.005)


@beside_threads
def test_a_driver_interrupted_at_any_place_lets_go(place: dict[str, Any], report: Report) -> None:
    with holdfast.open(**place) as store:
        sessions = [store.session("s")]
        for nth in interrupted_everywhere(lambda _: drive(sessions[-1])):
            driven_soon(sessions[-1])
            sessions.append(store.session(f"s{nth}"))
        report(f"interrupted at {nth - 1} places")
        assert nth > 30


@beside_threads
def test_an_interrupt_that_is_kept_keeps_no_lease(
    place: dict[str, Any], report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt keeps the last error, and with it the frames that it came through."""
    kept: list[KeyboardInterrupt] = []
    # The test runner keeps an interrupt that Python dropped, and with it the driver's own frame.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)

    def drive(nth: int) -> None:
        try:
            sessions[-1].drive(lease_seconds=LEASE_SECONDS)
        except KeyboardInterrupt as error:
            kept.append(error)

    with holdfast.open(**place) as store:
        sessions = [store.session("s")]
        for nth in interrupted_everywhere(drive):
            driven_soon(sessions[-1])
            sessions.append(store.session(f"s{nth}"))
        report(f"interrupted at {len(kept)} places")
        assert len(kept) > 20


def test_a_driver_interrupted_once_its_lease_is_taken_lets_go_though_the_error_is_kept(
    place: dict[str, Any],
) -> None:
    struck = threading.Event()

    def strike(number: int, frame: types.FrameType | None) -> None:
        struck.set()
        raise KeyboardInterrupt

    def probe(point: Point) -> None:
        is_taken = (point.boundary, point.moment) == ("commit", "after")
        if point.call.endswith(".lease") and is_taken and not struck.is_set():
            signal.pthread_kill(main, signal.SIGALRM)
            assert struck.wait(WAIT_SECONDS)

    main = threading.get_ident()
    before = signal.signal(signal.SIGALRM, strike)
    try:
        with holdfast.open(**place, hooks=Hooks(probe=probe)) as store:
            session = store.session("s")
            with pytest.raises(KeyboardInterrupt) as kept:
                session.drive(lease_seconds=LEASE_SECONDS)
            driven_soon(session)
            assert kept.value.__traceback__ is not None
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_driver_that_two_signals_hit_lets_go(
    place: dict[str, Any], report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, remaining, hits = random.Random(3), 0, Counter[int]()
    # The second may hit while the test runner notes that Python dropped the first.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)

    def strike(number: int, frame: types.FrameType | None) -> None:
        nonlocal remaining
        if remaining > 0:
            remaining -= 1
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, strike)
    try:
        with holdfast.open(**place) as store:
            span = min(seconds_of(partial(drive, store.session(f"w{n}"))) for n in range(5))
            while hits[1] + hits[2] < 20 and hits.total() < 2_000:
                session = store.session(f"s{hits.total()}")
                first, second = chance.uniform(1e-6, span), chance.uniform(1e-6, span / 4)
                # Not `suppress`: the second may hit while that ends.
                try:
                    try:
                        remaining = 2
                        signal.setitimer(signal.ITIMER_REAL, first, second)
                        drive(session)
                    except KeyboardInterrupt:
                        pass
                    hit, remaining = 2 - remaining, 0
                except KeyboardInterrupt:
                    hit = 2
                signal.setitimer(signal.ITIMER_REAL, 0)
                hits[hit] += 1
                driven_soon(session)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    report(f"of {hits.total()} drivers {hits[1]} were interrupted once, {hits[2]} twice")
    assert hits[1] + hits[2] >= 20


def cancelling(
    coroutine: Coroutine[Any, Any, Any], places: set[int], *, when_done: bool
) -> Coroutine[Any, Any, Any]:
    """Run a coroutine that is cancelled at some of its awaits, as they begin or as they end."""

    @types.coroutine
    def run() -> Generator[Any, Any, Any]:
        task = asyncio.current_task()
        assert task is not None
        resume: Callable[[Any], Any]
        waited_for, nth = coroutine.send(None), 0
        while True:
            nth += 1
            if nth in places and not when_done:
                task.cancel()
            try:
                answer = yield waited_for
                if nth in places and when_done:
                    raise asyncio.CancelledError
            except BaseException as error:
                resume, answer = coroutine.throw, error
            else:
                resume = coroutine.send
            try:
                waited_for = resume(answer)
            except StopIteration as stop:
                if nth >= min(places):
                    return stop.value
                raise IndexError("it has not so many awaits") from None

    async def own() -> Any:
        return await run()

    return own()


@pytest.mark.parametrize("when_done", [False, True], ids=["as it begins", "as it ends"])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_driver_cancelled_at_any_await_lets_go(
    place: dict[str, Any], when_done: bool, times: int, report: Report
) -> None:
    async def drive(session: holdfast.Session[holdfast.Async]) -> None:
        async with session.drive(lease_seconds=LEASE_SECONDS) as driven:
            await driven.append("transcript", [1])

    async def cancel_everywhere() -> int:
        async with holdfast.aopen(**place) as store:
            for nth in range(1, 1_000):
                session = await store.session(f"s{nth}")
                places = set(range(nth, nth + times))
                task = asyncio.create_task(cancelling(drive(session), places, when_done=when_done))
                await asyncio.wait([task])
                await driven_soon_async(session)
                if not task.cancelled():
                    assert isinstance(task.exception(), IndexError), task
                    return nth - 1
        raise AssertionError("it has no end")

    places = asyncio.run(cancel_everywhere())
    report(f"cancelled at {places} awaits")
    assert places > 1


def test_a_driver_that_nobody_has_any_more_lets_go(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        session = store.session("s")
        driven = session.drive("me", lease_seconds=LEASE_SECONDS)
        with pytest.raises(SessionBusy, match="this process"):
            session.save(x=1)
        del driven
        driven_soon(session)
        session.save(x=1)


def test_an_async_driver_that_nobody_has_any_more_lets_go(place: dict[str, Any]) -> None:
    async def forget() -> None:
        async with holdfast.aopen(**place) as store:
            session = await store.session("s")
            driven = await session.drive("me", lease_seconds=LEASE_SECONDS)
            with pytest.raises(SessionBusy, match="this process"):
                await session.save(x=1)
            del driven
            await driven_soon_async(session)
            await session.save(x=1)

    asyncio.run(forget())


def test_a_driver_is_had_by_await_and_by_async_with(place: dict[str, Any]) -> None:
    async def drive() -> None:
        async with holdfast.aopen(**place) as store:
            session = await store.session("s")
            async with session.drive("a") as driven:
                await driven.save(x=1)
            async with await session.drive("b") as driven:
                await driven.save(x=2)
            driven = await asyncio.create_task(session.drive("c"))
            assert (await session.info()).holder == "c"
            await driven.close()
            assert (await session.info()).holder is None

    asyncio.run(drive())


def test_a_driver_closed_inside_a_call_lets_go_behind_it(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        session = store.session("s")
        driven = session.drive(lease_seconds=LEASE_SECONDS)

        def close(tx: holdfast.Transaction) -> holdfast.Op[None]:
            yield from tx.session("other")
            driven.close()
            with pytest.raises(StoreReentered):
                session.drive()

        store.run(close)
        driven_soon(session)


@beside_threads
def test_an_agent_that_was_interrupted_can_run_again(place: dict[str, Any], report: Report) -> None:
    chance = random.Random(4)
    with holdfast.open(**place) as store:

        def run(name: str) -> None:
            session = store.session(name, reopen=True)
            agent = Agent(session, ScriptedModel(["done"]), lease_seconds=LEASE_SECONDS)
            agent.run("hello", message_id="m1")

        run("first")
        whole = Interrupt(1_000_000)
        whole.strike(lambda: run("whole"))
        places = 1_000_000 - whole.remaining
        for nth in sorted(chance.sample(range(1, places), 30)):
            Interrupt(nth).strike(partial(run, f"s{nth}"))
            driven_soon(store.session(f"s{nth}", reopen=True))
            run(f"s{nth}")
    report(f"interrupted at 30 of {places} places")
