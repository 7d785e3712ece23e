"""A ring is never lost, and what is remembered of rings stays small."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time

import pytest

from holdfast.kernel.signals import LOCAL_TOPIC, TOPICS_MAX, Signals


def test_a_ring_after_the_count_is_seen_and_that_of_another_topic_is_not() -> None:
    signals = Signals()
    signals.ring("a")
    seen_a, seen_b = signals.count("a"), signals.count("b")
    signals.ring("a")
    assert signals.wait("a", seen_a, 0)
    assert not signals.wait("b", seen_b, 0)
    assert not signals.wait("a", signals.count("a"), 0)


def test_a_ring_of_all_topics_is_one_of_each() -> None:
    signals = Signals()
    signals.ring("known")
    seen = {topic: signals.count(topic) for topic in ("known", "new")}
    signals.ring_here(None)
    assert all(signals.wait(topic, count, 0) for topic, count in seen.items())


def test_topics_that_are_rung_once_do_not_fill_the_memory() -> None:
    signals = Signals()
    for number in range(5 * TOPICS_MAX):
        signals.ring(f"effect:{number}")
    assert sys.getsizeof(signals._last) < 200 * TOPICS_MAX


def test_no_ring_is_lost_however_many_topics_are_rung_behind_it() -> None:
    signals = Signals()
    for others in (0, 1, TOPICS_MAX - 1, TOPICS_MAX, 3 * TOPICS_MAX):
        seen = signals.count("topic")
        signals.ring("topic")
        for number in range(others):
            signals.ring(f"other:{others}:{number}")
        assert signals.wait("topic", seen, 0)


def test_a_change_of_the_database_wakes_nobody_who_waits_for_this_process_alone() -> None:
    signals, local = Signals(), f"{LOCAL_TOPIC}x"

    async def wait_for_both() -> None:
        of_process = asyncio.create_task(signals.wait_async(local, signals.count(local), 60))
        of_database = asyncio.create_task(signals.wait_async("x", signals.count("x"), 60))
        await asyncio.sleep(0)
        signals.ring_here(None)
        assert await of_database
        assert not of_process.done()
        signals.ring_here(local)
        assert await of_process

    asyncio.run(wait_for_both())


@pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="signals come to the main"
)
def test_a_signal_handler_wakes_an_event_loop_that_sleeps() -> None:
    signals, is_awake = Signals(), threading.Event()

    async def wait_for_ring() -> None:
        telling = threading.Thread(target=tell, args=(asyncio.get_running_loop(),))
        telling.start()
        assert await signals.wait_async("x", signals.count("x"), 600)
        is_awake.set()
        telling.join()

    def tell(loop: asyncio.AbstractEventLoop) -> None:
        sleeper = threading.main_thread().ident or 0
        while not signals._waiters or sys._current_frames()[sleeper].f_code.co_name != "select":
            time.sleep(0.001)
        for _ in range(500):
            os.kill(os.getpid(), signal.SIGUSR1)
            if is_awake.wait(0.01):
                return
        lost.append("the loop slept on")
        loop.call_soon_threadsafe(is_awake.set)

    lost: list[str] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: signals.ring("x"))
    try:
        asyncio.run(wait_for_ring())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not lost
