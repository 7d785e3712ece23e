"""Followers are woken by every commit, in any process, and need no wake-up to miss nothing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import islice
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.kernel.driver import Hooks, Trace
from holdfast.kernel.postgres.followers import Followers, OtherListeners
from holdfast.kernel.postgres.notify import TREES_NAMED_MAX
from holdfast.kernel.signals import LOCAL_TOPIC
from tests.crash.children import Child
from tests.faults.tracing import beside_threads, interrupted_everywhere
from tests.threads import begin

# Longer than any test: who is not woken does not pass.
NEVER = 3_600.0
SECONDS_MAX = 120


def without_notifications(place: dict[str, Any]) -> dict[str, Any]:
    if "namespace" not in place:
        return place
    return {**place, "url": f"{place['url']}{'&' if '?' in place['url'] else '?'}listen=off"}


def next_of(events: Iterator[Any], count: int = 1) -> Future[list[Any]]:
    return begin(lambda: list(islice(events, count)))


def test_a_commit_wakes_the_followers_of_the_same_store(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        # Nothing is heard from other processes.
        store.runtime.signals._listen = None
        state = store.session("root").state
        events = store.follow("root", after=1, poll_seconds=NEVER)
        changes = state.watch(poll_seconds=NEVER)
        for number in range(1, 4):
            event, change = next_of(events), next_of(changes)
            store.session(f"other-{number}")
            state.increment("n")
            assert event.result(SECONDS_MAX)[0].position == number + 1
            assert change.result(SECONDS_MAX)[0].sequence == number


@pytest.mark.parametrize("mode", ["write", "read"])
def test_a_commit_of_another_process_wakes_followers(place: dict[str, Any], mode: Any) -> None:
    with holdfast.open(**place) as store:
        store.session("root")
    writes = threading.Event()

    def write(tell: Callable[[str], None]) -> None:
        with holdfast.open(**place) as store:
            while True:
                store.find_session("root").state.increment("n")
                writes.wait(0.05)

    child = Child(write)
    try:
        with holdfast.open(**place, mode=mode) as reader:
            found = next_of(reader.follow("root", after=1, poll_seconds=NEVER), 30)
            positions = [event.position for event in found.result(SECONDS_MAX)]
            assert positions == list(range(2, 32))
    finally:
        child.kill()
        child.wait()


def test_a_follower_of_one_tree_is_woken_although_many_have_changed(place: dict[str, Any]) -> None:
    trees = [f"tree-{number}" for number in range(2 * TREES_NAMED_MAX)]

    def write_all(tx: holdfast.Transaction) -> holdfast.Op[None]:
        for root_id in trees:
            session = yield from tx.find_session(root_id)
            yield from session.state.increment("n")

    with holdfast.open(**place) as store, holdfast.open(**place) as other:
        for root_id in trees:
            other.session(root_id)
        waiting = next_of(store.follow(trees[-1], after=1, poll_seconds=NEVER), 5)
        deadline = time.monotonic() + SECONDS_MAX
        while not waiting.done():
            assert time.monotonic() < deadline
            other.run(write_all)
        assert [event.position for event in waiting.result()] == [2, 3, 4, 5, 6]


def test_with_polling_alone_nothing_is_missed(place: dict[str, Any]) -> None:
    place = without_notifications(place)
    with holdfast.open(**place) as store, holdfast.open(**place) as other:
        store.runtime.signals._listen = None
        state = other.session("root").state
        found = [
            next_of(store.follow("root", poll_seconds=0.01), 61),
            next_of(store.find_session("root").state.watch(poll_seconds=0.01), 60),
        ]
        for _ in range(60):
            state.increment("n")
        events, changes = (each.result(SECONDS_MAX) for each in found)
        assert [event.position for event in events] == list(range(1, 62))
        assert [change.sequence for change in changes] == list(range(1, 61))


def test_followers_of_one_tree_share_one_reader(place: dict[str, Any]) -> None:
    followers, writes = 50, 20
    reads: list[str] = []

    def trace(call: Trace) -> None:
        if call.call == "TreeReader.read":
            reads.append(call.call)

    with holdfast.open(**place, hooks=Hooks(trace=trace)) as store:
        state = store.session("root").state
        feeds = [store.follow("root", after=1, poll_seconds=NEVER) for _ in range(followers)]
        for number in range(writes):
            waiting = [next_of(events) for events in feeds]
            state.increment("n")
            assert {each.result(SECONDS_MAX)[0].position for each in waiting} == {number + 2}
    assert len(reads) < followers * writes / 2


def test_a_follower_that_fails_while_it_reads_leaves_the_others_their_reader(
    place: dict[str, Any],
) -> None:
    with holdfast.open(**place) as store:
        state = store.session("root").state
        state.set("k", 1)
        state.set("k", 2)
        assert [each.sequence for each in islice(state.watch(), 2)] == [1, 2]
        state.compact(2)
        with pytest.raises(holdfast.Compacted):
            next(state.watch(after=0, poll_seconds=NEVER))
        waiting = next_of(state.watch(after=2, poll_seconds=NEVER))
        state.set("k", 3)
        assert waiting.result(SECONDS_MAX)[0].sequence == 3


# Python drops an interrupt that hits while it clears an object away.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@beside_threads
def test_a_follower_interrupted_at_any_place_leaves_the_others_their_wake_ups(
    place: dict[str, Any],
) -> None:
    """Also the one that waits and reads for all of them."""
    last = 1

    def is_awaited(topic: str) -> bool:
        return any(each.startswith(topic) for each in store.runtime.signals.awaited())

    def write_when_both_wait(has_ended: threading.Event, other: Iterator[Any]) -> Any:
        try:
            until(lambda: is_awaited("tree ") or has_ended.is_set())
            found = next_of(other)
            until(lambda: is_awaited(LOCAL_TOPIC) or has_ended.is_set())
        finally:
            # Whoever is to be interrupted would wait for it for ever.
            state.increment("n")
        return found.result(SECONDS_MAX)[0]

    def follow_interrupted(nth: int) -> None:
        next(store.follow("root", after=last, poll_seconds=2 * SECONDS_MAX))

    with holdfast.open(**place) as store:
        # Nothing is heard from other processes.
        store.runtime.signals._listen = None
        state = store.session("root").state
        other = store.follow("root", after=1, poll_seconds=2 * SECONDS_MAX)
        has_ended = threading.Event()
        waiting = begin(write_when_both_wait, has_ended, other)
        for nth in interrupted_everywhere(follow_interrupted, ("feed/follow.py",)):
            has_ended.set()
            last += 1
            assert waiting.result(SECONDS_MAX).position == last, f"place {nth}"
            has_ended = threading.Event()
            waiting = begin(write_when_both_wait, has_ended, other)
        has_ended.set()
        waiting.result(SECONDS_MAX)
        assert nth > 20


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_an_event_loop_that_was_closed_in_the_middle_of_a_wait_costs_others_nothing(
    place: dict[str, Any],
) -> None:
    async def begin() -> tuple[holdfast.AsyncStore, Any]:
        store = await holdfast.aopen(**place)
        root = await store.session("root")
        events = store.follow(root, after=1, poll_seconds=NEVER)
        waiting = asyncio.ensure_future(anext(events))
        # Reads are made in the loop itself on SQLite, and by tasks of it on PostgreSQL.
        await asyncio.to_thread(until, lambda: "tree root" in store.runtime.signals.awaited())
        return store, waiting

    loop = asyncio.new_event_loop()
    store, waiting = loop.run_until_complete(begin())
    loop.close()
    signals, seen = store.runtime.signals, store.runtime.signals.count("tree root")
    try:
        with holdfast.open(**place) as other:
            state = other.find_session("root").state
            # On SQLite the thread that hears of commits must survive too.
            for number in range(1, 3):
                assert state.increment("n").value == number
                until(lambda seen=seen: signals.count("tree root") > seen)  # type: ignore[misc]
                seen = signals.count("tree root")
    finally:
        store.runtime.driver.twin().close()
        waiting._log_destroy_pending = False


def test_nobody_is_notified_of_changes_that_nobody_follows(
    postgres_dsn: str, namespace: str
) -> None:
    """NOTIFY takes a lock of the whole server."""

    def heard(listener: psycopg.Connection[Any], seconds: float) -> list[str]:
        with holdfast.open(postgres_dsn, namespace=namespace) as store:
            state = store.session("root").state
            for _ in range(20):
                state.increment("n")
        # Closing has sent what was waiting.
        told = listener.notifies(timeout=seconds, stop_after=1)
        return [note.payload for note in told]

    with psycopg.connect(postgres_dsn, autocommit=True) as listener:
        listener.execute(f'LISTEN "holdfast_trees_{namespace}"'.encode())
        assert heard(listener, 0) == []
        followers = Followers(namespace, is_awaited=True)
        for announcement in (followers.announcement, OtherListeners(namespace).announcement):
            listener.execute(announcement.made.encode())
        assert set(heard(listener, 120)) == {"tree root"}
        assert not Followers(namespace, is_awaited=False).is_look_due()
