"""The testing plan of shared state: who writes at once, in many processes, loses nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest

import holdfast
from tests.crash.children import Child

PROCESSES = 8


def run_children(place: dict[str, Any], count: int, work: Callable[[Any, int], None]) -> None:
    """Let processes do the work of children 0 to count, each with handles of its own."""

    def serve(first: int) -> Callable[[Callable[[str], None]], None]:
        def run(tell: Callable[[str], None]) -> None:
            with holdfast.open(**place) as store:
                for number in range(first, count, PROCESSES):
                    child = store.session(f"child-{number}", parent="root")
                    work(child, number)

        return run

    children = [Child(serve(first)) for first in range(min(PROCESSES, count))]
    assert [child.wait()[0] for child in children] == [0] * len(children)


@pytest.fixture
def root(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        store.session("root")


@pytest.mark.usefixtures("root")
def test_parallel_updates_different_keys(place: dict[str, Any]) -> None:
    """Disjoint keys never conflict."""

    def work(child: holdfast.Session, number: int) -> None:
        child.state.set(f"child_{number}_result", number, if_version=0)

    run_children(place, 5, work)
    with holdfast.open(**place) as store:
        state = store.session("root").state
        assert state.snapshot().document == {f"child_{n}_result": n for n in range(5)}
        assert state.conflicts() == []


@pytest.mark.usefixtures("root")
def test_parallel_updates_same_key_cas(place: dict[str, Any]) -> None:
    """Compare-and-swap on one key succeeds in the end, with retries."""

    def work(child: holdfast.Session, number: int) -> None:
        child.state.update("counter", lambda value: (value or 0) + 1, retries=50)

    run_children(place, 3, work)
    with holdfast.open(**place) as store:
        state = store.session("root").state
        assert state.get("counter") == 3
        assert all(each.is_retried for each in state.conflicts())


@pytest.mark.usefixtures("root")
def test_atomic_increment_no_conflicts(place: dict[str, Any]) -> None:
    """Fifty children in eight processes: the total is exact, and versions have no gaps."""
    times = 5

    def work(child: holdfast.Session, number: int) -> None:
        for _ in range(times):
            child.state.increment("counter")

    run_children(place, 50, work)
    with holdfast.open(**place) as store:
        state = store.session("root").state
        entry = state.entry("counter")
        assert entry is not None
        assert (entry.value, entry.version, entry.sequence) == (250, 250, 250)
        assert state.conflicts() == []
        found = state.history("counter", limit=1_000)
        assert [each.value for each in found] == list(range(250, 0, -1))
        feed = [e for e in store.events("root", limit=10_000) if e.kind == "state_changed"]
        assert [event.data["sequence"] for event in feed] == list(range(1, 251))


@pytest.mark.slow
@pytest.mark.usefixtures("root")
def test_many_atomic_increments(place: dict[str, Any]) -> None:
    def work(child: holdfast.Session, number: int) -> None:
        for _ in range(200):
            child.state.increment("counter")

    run_children(place, 50, work)
    with holdfast.open(**place) as store:
        state = store.session("root").state
        assert (state.get("counter"), state.version()) == (10_000, 10_000)


def test_a_retried_item_does_not_count_twice(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        root = store.session("root")
        store.work.submit("count", session=root)

        def attempt(holder: str) -> holdfast.WorkItem:
            [item] = store.work.claim(holder)
            item.state.increment("n")
            item.state.increment("n")
            item.state.append("log", ["read"])
            item.state.set("last", holder)
            return item

        first = attempt("one")
        assert first.fail("it broke", delay_seconds=0) == "pending"
        second = attempt("two")
        second.state.increment("n")
        second.fail("for good", retry=False)
        store.work.redrive(second.id)
        third = attempt("three")
        assert root.state.snapshot().document == {"n": 3, "log": ["read"], "last": "three"}
        assert {event.item_id for event in root.state.events()} == {first.id, third.id}
        with pytest.raises(holdfast.LeaseLost):
            first.state.increment("n")
        with pytest.raises(holdfast.InvalidArgument, match="no session"):
            store.work.submit("alone").state  # noqa: B018


def test_a_writer_killed_at_any_moment_leaves_whole_mutations(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        store.session("root")

    def write(tell: Callable[[str], None]) -> None:
        with holdfast.open(**place) as store:
            state = store.session("root").state
            for number in range(10_000):
                state.batch(
                    [
                        {"op": "increment", "key": "n"},
                        {"op": "append", "key": "log", "items": [number]},
                    ]
                )
                tell(json.dumps(number))

    told: list[int] = []
    for _ in range(5):
        child = Child(write)
        for _ in range(3 + os.getpid() % 5):
            told.append(json.loads(child.lines.readline()))
        child.kill()
        _, rest = child.wait()
        told += [json.loads(line) for line in rest if line]
    with holdfast.open(**place) as store:
        state = store.session("root").state
        document = state.snapshot().document
        assert len(document["log"]) == document["n"] >= len(told)
        assert state.version() == 2 * document["n"]
        assert [event.sequence for event in state.events(limit=1_000)] == list(
            range(1, min(1_000, state.version()) + 1)
        )
