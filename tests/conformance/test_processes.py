"""Several processes, threads and tasks on one store."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.kernel.driver import Hooks, Trace
from holdfast.testing import history
from holdfast.testing.nouns import Counter, Queue, Setup
from tests.crash.children import Child
from tests.internals import engine_of

ROOTS = ("root", "other")


def prepare(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        Setup(store).install()
        for root_id in ROOTS:
            Counter(store, root_id).plant()


def in_processes(count: int, function: Callable[[int, Callable[[str], None]], None]) -> list[str]:
    """Run a function in several processes at once; return all lines that they wrote."""
    children = [
        Child(lambda say, number=number: function(number, say))  # type: ignore[misc]
        for number in range(count)
    ]
    lines: list[str] = []
    for child in children:
        status, written = child.wait()
        assert status == 0
        lines += written
    return lines


def test_composed_in_any_order_by_six_processes_without_deadlock(
    place: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(place)

    def compose(tx: holdfast.Transaction, parts: list[str], note: str) -> holdfast.Op[None]:
        """Do the parts in their order; each locks the tree by itself."""
        for index, part in enumerate(parts):
            if part == "add":
                yield from Counter(tx).add(1, note=f"{note}/{index}")
            elif part == "submit":
                yield from Queue(tx).submit(f"{note}/{index}")
            elif part == "claim":
                yield from Queue(tx).claim("worker", lease_seconds=600)

    def work(number: int, say: Callable[[str], None]) -> None:
        chance = random.Random(number)
        retries = [0]

        def count(trace: Trace) -> None:
            retries[0] += trace.attempts - 1

        record = history.History(tmp_path)
        with holdfast.open(**place, hooks=Hooks(trace=count)) as store:
            for _ in range(40):
                parts = chance.choices(["add", "submit", "claim"], k=chance.randint(1, 5))
                with record.call("compose", parts=parts) as call:
                    store.run(compose, parts, call.id)
        say(str(retries[0]))

    retries = in_processes(6, work)
    calls = history.read(tmp_path)
    assert [call.outcome for call in calls] == ["ok"] * 240
    with holdfast.open(**place) as store:
        events = store.events("root", limit=10_000)
        queue_counts = Queue(store).counts()
        value = Counter(store).value()
    assert [event.position for event in events] == list(range(1, len(events) + 1))
    wanted = {
        part: sum(call.arguments["parts"].count(part) for call in calls)
        for part in ("add", "submit")
    }
    assert value == wanted["add"]
    assert sum(queue_counts.values()) == wanted["submit"]
    assert len(events) == wanted["add"] + wanted["submit"]
    # The parts of one composition stand together, and compositions in real-time order.
    notes = [event.data.get("note") or event.data["payload"] for event in events]
    owners = [note.partition("/")[0] for note in notes]
    distinct = [owner for index, owner in enumerate(owners) if owners[index - 1 : index] != [owner]]
    assert len(distinct) == len(set(distinct))
    assert history.out_of_order(calls, distinct) == []
    with capsys.disabled():
        print(f"\n{place['url'].partition(':')[0]}: re-runs inside the driver: {retries}")


def test_two_trees_in_opposite_order_reach_no_caller_as_a_deadlock(place: dict[str, Any]) -> None:
    prepare(place)

    def move(tx: holdfast.Transaction, first: str, second: str) -> holdfast.Op[None]:
        yield from Counter(tx, first).add(1)
        yield from Counter(tx, second).add(-1)

    def work(number: int, say: Callable[[str], None]) -> None:
        with holdfast.open(**place) as store:
            for _ in range(25):
                store.run(move, *(ROOTS if number % 2 else reversed(ROOTS)))

    in_processes(4, work)
    with holdfast.open(**place) as store:
        assert Counter(store).all_values() == {"root": 0, "other": 0}
        for root_id in ROOTS:
            assert [event.position for event in store.events(root_id, limit=1000)] == list(
                range(1, 101)
            )


def test_eight_processes_on_one_sqlite_file_all_progress(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = {"url": f"sqlite:///{tmp_path}/store.db"}
    prepare(place)

    def work(number: int, say: Callable[[str], None]) -> None:
        with holdfast.open(**place) as store:  # type: ignore[arg-type]
            counter = Counter(store)
            until, count = time.monotonic() + 60, 0
            while len(list(tmp_path.glob("has-*"))) < 8 and time.monotonic() < until:
                counter.add()
                count += 1
                if count == 20:
                    (tmp_path / f"has-{number}").touch()
        say(str(count))

    counts = [int(line) for line in in_processes(8, work)]
    with holdfast.open(**place) as store:  # type: ignore[arg-type]
        assert Counter(store).value() == sum(counts)
    assert min(counts) >= 20, "somebody starved while the others wrote"
    with capsys.disabled():
        print(f"\n8 processes: {min(counts)} to {max(counts)} commits")


def test_threads_and_tasks_of_one_process_together(place: dict[str, Any]) -> None:
    """32 threads with sync calls and 64 tasks at once: no error, nobody is left behind."""
    prepare(place)
    per_client = 10

    async def tasks() -> None:
        async with await holdfast.aopen(**place) as store:
            counter = Counter(store, "other")

            async def task() -> None:
                for _ in range(per_client):
                    await counter.add()

            await asyncio.gather(*(task() for _ in range(64)))

    with holdfast.open(**place) as store:
        errors: list[BaseException] = []

        def thread() -> None:
            try:
                for _ in range(per_client):
                    Counter(store).add()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=thread) for _ in range(32)]
        for started in threads:
            started.start()
        asyncio.run(tasks())
        for started in threads:
            started.join()
        assert errors == []
        assert Counter(store).all_values() == {"root": 320, "other": 640}


def test_ten_processes_may_open_a_new_store_at_once(new_place: dict[str, Any]) -> None:
    def work(number: int, say: Callable[[str], None]) -> None:
        with holdfast.open(**new_place) as store:
            say(store.store_id())

    ids = in_processes(10, work)
    assert len(ids) == 10
    assert len(set(ids)) == 1


def add_in_new_process(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        Counter(store).add()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_start_methods(place: dict[str, Any], method: str) -> None:
    """A process started in any way opens the store for itself."""
    prepare(place)
    context: Any = multiprocessing.get_context(method)
    process = context.Process(target=add_in_new_process, args=(place,))
    process.start()
    process.join()
    assert process.exitcode == 0
    with holdfast.open(**place) as store:
        assert Counter(store).value() == 1


@pytest.mark.parametrize("exits", ["_exit", "exit"])
def test_a_forked_child_cannot_use_the_store_and_the_parent_goes_on(
    place: dict[str, Any], exits: str
) -> None:
    prepare(place)
    with holdfast.open(**place) as store:
        counter = Counter(store)
        counter.add()
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            outcomes = []
            for call in (counter.add, counter.value, store.store_id):
                try:
                    call()
                    outcomes.append("used it")
                except BaseException as error:
                    outcomes.append(type(error).__name__)
            store.close()
            os.write(writer, " ".join(outcomes).encode())
            if exits == "_exit":
                os._exit(0)
            # Runs finalizers on what the child inherited, as a plain script would.
            os.execv("/bin/true", ["true"])
        os.close(writer)
        with os.fdopen(reader) as answers:
            assert answers.read() == "StoreForked StoreForked StoreForked"
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert counter.add() == 2
    with holdfast.open(**place) as store:
        assert Counter(store).value() == 2


@pytest.mark.parametrize("waits", [False, True], ids=["", "while it waits for others"])
def test_a_forked_childs_own_store_does_not_depend_on_the_parents(
    place: dict[str, Any], waits: bool
) -> None:
    """The child has locks of its own, so the parent is not the last user when it closes."""
    prepare(place)
    store = holdfast.open(**place)
    counter = Counter(store)
    counter.add()
    assert counter.value() == 1
    if waits:
        store.runtime.signals.wait("nobody rings", store.runtime.signals.count("nobody rings"), 0.3)
    reader, writer = os.pipe()

    def child(say: Callable[[str], None]) -> None:
        os.close(writer)
        with holdfast.open(**place) as own:
            say(str(Counter(own).add()))
            os.read(reader, 1)
            say(str(Counter(own).add()))

    forked = Child(child)
    os.close(reader)
    assert forked.lines.readline() == "2\n"
    store.close()
    os.close(writer)
    assert forked.wait() == (0, ["3"])
    with holdfast.open(**place) as again:
        assert Counter(again).value() == 3


def test_a_child_forked_during_another_threads_write_can_open_the_store(
    place: dict[str, Any],
) -> None:
    prepare(place)
    inside, go_on = threading.Event(), threading.Event()

    def wait_inside(tx: holdfast.Transaction) -> holdfast.Op[int]:
        yield from Counter(tx).add()
        inside.set()
        go_on.wait(0.2)
        return (yield from Counter(tx).add())

    def child(say: Callable[[str], None]) -> None:
        with holdfast.open(**place) as own:
            say(str(Counter(own).add()))

    with holdfast.open(**place) as store:
        thread = threading.Thread(target=store.run, args=(wait_inside,))
        thread.start()
        assert inside.wait(120)
        assert Child(child).wait() == (0, ["3"])
        thread.join()
        assert Counter(store).add() == 4


def test_a_child_forked_during_a_write_does_not_keep_the_lock(tmp_path: Path) -> None:
    """The side lock of a killed parent is free although its forked child lives on."""
    place: dict[str, Any] = {"url": f"sqlite:///{tmp_path}/store.db"}
    prepare(place)

    def parent(say: Callable[[str], None]) -> None:
        grandchild: list[int] = []

        def fork_inside(point: Any) -> None:
            if point.boundary == "commit" and not grandchild:
                grandchild.append(os.fork())
                if grandchild[0] == 0:
                    time.sleep(5)
                    os._exit(0)
                os.kill(os.getpid(), 9)

        hooks = Hooks()
        store = holdfast.open(**place, hooks=hooks)
        engine_of(store).writer._probe = fork_inside
        Counter(store).add()

    child = Child(parent)
    child.lines.close()
    assert os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1]) == -9
    with holdfast.open(**place, busy_timeout_seconds=2) as store:
        assert Counter(store).add() == 1
