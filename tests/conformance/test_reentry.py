"""A call from inside a call of the same store is refused, and nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import itertools
import os
import random
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import holdfast
from holdfast import StoreReentered
from holdfast.kernel.driver import Hooks, Point, Trace
from holdfast.kernel.sqlite import connection
from holdfast.testing.nouns import Counter
from tests.faults.workload import found_in, prepare, together

CALLS: dict[str, Callable[[holdfast.Store], object]] = {
    "write": lambda store: Counter(store).add(1, note="inner"),
    "read": lambda store: Counter(store).value(),
    "compose": lambda store: store.run(holdfast.Transaction.store_id),
    "close": lambda store: store.close(),
    "flow": lambda store: store.once("key", lambda: 1),
    "backup": lambda store: store.backup(Path(tempfile.mkdtemp()) / "copy.db"),
}


@holdfast.tool(effect="mutate")
def note(number: int) -> int:
    return number


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """A deadlock ends the run with the stacks of all threads, not with silence."""
    faulthandler.dump_traceback_later(120, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.mark.parametrize("call", CALLS)
def test_the_function_of_run_cannot_call_its_store(place: dict[str, Any], call: str) -> None:
    def outer(tx: holdfast.Transaction) -> holdfast.Op[int]:
        first = yield from tx.session("first")
        yield from first.append("t", [1])
        with pytest.raises(StoreReentered, match="inside a call"):
            CALLS[call](store)
        second = yield from tx.session("second")
        return (yield from second.append("t", [2])).version

    with holdfast.open(**place) as store:
        prepare(store)
        assert store.run(outer) == 1
        # Both halves are there, with the checkpoints that their events name.
        for id in ("first", "second"):
            found = store.find_session(id)
            assert [event.kind for event in store.events(id)][-1] == "checkpoint_saved"
            assert found.latest() is not None
        CALLS[call](store)


@pytest.mark.parametrize("call", ["write", "read", "close"])
def test_not_on_the_thread_that_commits_for_others_either(tmp_path: Any, call: str) -> None:
    refused: list[str] = []

    def outer(tx: holdfast.Transaction, number: int) -> holdfast.Op[None]:
        session = yield from tx.session(f"s{number}")
        with pytest.raises(StoreReentered):
            CALLS[call](store)
        refused.append(threading.current_thread().name)
        yield from session.append("t", [number])

    with holdfast.open(f"sqlite:///{tmp_path}/store.db") as store:
        prepare(store)
        together(store, [partial(store.run, outer, number) for number in range(3)])
        assert {name.startswith("holdfast-writer") for name in refused} == {True}
        assert [store.find_session(f"s{n}").info().version for n in range(3)] == [1, 1, 1]


def test_a_hook_cannot_call_its_store(place: dict[str, Any]) -> None:
    refused: list[Point | Trace] = []

    def call(told: Point | Trace) -> None:
        if is_asked:
            with pytest.raises(StoreReentered):
                Counter(store).add(1, note="inner")
            refused.append(told)

    is_asked = False
    with holdfast.open(**place, hooks=Hooks(probe=call, trace=call)) as store:
        prepare(store)
        is_asked = True
        Counter(store).add(1, note="outer")
        is_asked = False
        assert len(refused) > 4
        assert found_in(store) == ["outer"]


def test_a_finalizer_cannot_call_its_store(place: dict[str, Any]) -> None:
    refused: list[BaseException] = []

    class Dropped:
        def __del__(self) -> None:
            try:
                Counter(store).add(1, note="inner")
            except BaseException as error:
                refused.append(error)

    def outer(tx: holdfast.Transaction) -> holdfast.Op[None]:
        session = yield from tx.session("s")
        dropped = Dropped()
        yield from session.append("t", [1])
        del dropped
        yield from session.append("t", [2])

    with holdfast.open(**place) as store:
        prepare(store)
        store.run(outer)
        assert [type(error) for error in refused] == [StoreReentered]
        assert store.find_session("s").info().version == 2
        assert found_in(store) == []


@contextlib.contextmanager
def striking(handler: Callable[[], object]) -> Iterator[None]:
    """Call a function again and again from a signal handler of the main thread."""
    chance = random.Random(11)

    def strike(number: int, frame: FrameType | None) -> None:
        handler()
        signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.0005, 0.01))

    before = signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, 0.001)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_signal_handler_is_refused_inside_a_call_and_served_outside(
    place: dict[str, Any],
) -> None:
    refused: list[StoreReentered] = []
    served: list[str] = []
    outer: list[str] = []

    def handler() -> None:
        try:
            Counter(store).add(1, note=f"inner {len(served)}")
        except StoreReentered as error:
            refused.append(error)
        else:
            served.append(f"inner {len(served)}")

    def wait() -> None:
        # Rings of the handler's own writes and of others meet the locks of who waits.
        store.runtime.signals.wait("topic", store.runtime.signals.count("topic"), 0.0005)
        store.runtime.signals.ring("topic")

    with holdfast.open(**place, busy_timeout_seconds=60) as store:
        prepare(store)
        with striking(handler):
            while len(refused) < 30 or len(served) < 30:
                outer.append(f"outer {len(outer)}")
                Counter(store).add(1, note=outer[-1])
                Counter(store).value()
                wait()
        found = found_in(store)
        assert [note for note in found if note.startswith("outer")] == outer
        assert [note for note in found if note.startswith("inner")] == served


def struck_at_each_line(
    places: tuple[str, ...],
    act: Callable[[], object],
    handler: Callable[[], object],
    prepare: Callable[[], object] = lambda: None,
) -> int:
    """Call a handler before each line of some files or functions, on the thread that runs it."""

    left = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if not {Path(frame.f_code.co_filename).name, frame.f_code.co_name}.intersection(places):
            return None
        left -= event == "line"
        if left == 0 and event == "line":
            with contextlib.suppress(StoreReentered):
                handler()
        return trace

    for place in itertools.count(1):
        prepare()
        left = place
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            act()
        finally:
            sys.settrace(before)
        if left > 0:
            return place - 1
    raise AssertionError


@pytest.mark.parametrize("act", ["follow", "drive", "close", "keep", "record"])
def test_a_signal_handler_waits_for_no_lock_of_its_own_thread(
    place: dict[str, Any], act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # While one follower reads for all, the others wait for so long.
    monkeypatch.setattr("holdfast.feed.follow.READ_SECONDS_MAX", 0.01)

    def follow() -> None:
        events: Any = store.follow("fed", after=0, poll_seconds=0.01)
        assert [next(events).position, next(events).position] == [1, 2]
        events.close()

    def drive() -> None:
        with store.session(f"s{next(numbers)}").drive() as session:
            session.append("t", [1])

    def open_driven() -> None:
        opened[:] = [holdfast.open(**place)]
        opened[0].session(f"s{next(numbers)}").drive()

    def close() -> None:
        opened[0].close()

    def reopen() -> None:
        for each in opened:
            each.close()
        opened[:] = [holdfast.open(**place)]

    def call() -> None:
        asked = [holdfast.ToolUse(note, {"number": next(numbers)}) for _ in range(3)]
        for each in opened[0].session("called").call_all(asked):
            assert not isinstance(each, Exception), each

    numbers, opened = itertools.count(), list[holdfast.Store]()
    with holdfast.open(**place) as store:
        fed = store.session("fed")
        fed.append("t", [1])
        acts: dict[str, Any] = {
            "follow": ("follow.py", follow, follow),
            "drive": ("leases.py", drive, drive),
            "close": ("close", close, close, open_driven),
            # Each store starts its threads with its first calls.
            "keep": ("keep", call, call, reopen),
            "record": ("recorder.py", call, call, reopen),
        }
        where, *each = acts[act]
        assert struck_at_each_line((where,), *each) > 10
        for left in opened:
            left.close()


def test_a_signal_handler_may_create_a_store_while_one_is_created(tmp_path: Path) -> None:
    def create() -> None:
        holdfast.open(f"sqlite:///{tmp_path}/{next(numbers)}.db").close()

    numbers = itertools.count()
    assert struck_at_each_line(("prepare_file",), create, create) > 5


def test_an_interrupt_while_a_file_is_created_costs_only_that_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Struck(set[Path]):
        def add(self, path: Path) -> None:
            super().add(path)
            if strikes:
                raise strikes.pop()

    strikes, url = [KeyboardInterrupt()], f"sqlite:///{tmp_path}/store.db"
    monkeypatch.setattr(connection, "_being_created", Struck())
    with pytest.raises(KeyboardInterrupt):
        holdfast.open(url)
    holdfast.open(url).close()


def test_a_file_is_not_opened_while_its_own_thread_creates_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing the file that was created would drop the locks that SQLite has on it by then."""
    refused: list[str] = []

    def create(path: Path, flags: int, mode: int) -> int:
        with pytest.raises(StoreReentered, match="just creating"):
            holdfast.open(url)
        refused.append(str(path))
        return real(path, flags, mode)

    real, url = os.open, f"sqlite:///{tmp_path}/store.db"
    with monkeypatch.context() as patched:
        patched.setattr("holdfast.kernel.sqlite.connection.os.open", create)
        connection.prepare_file(tmp_path / "store.db", None)
    holdfast.open(url).close()
    assert refused == [f"{tmp_path}/store.db"]


def test_another_store_object_on_the_same_database_is_another_client(
    place: dict[str, Any],
) -> None:
    def outer(tx: holdfast.Transaction) -> holdfast.Op[int]:
        session = yield from tx.session("root-of-both")
        yield from session.append("t", [1])
        assert [info.id for info in other.sessions()] == ["before"]
        with pytest.raises(holdfast.StoreBusy):
            other.session("before").append("t", [1]) if is_sqlite else busy()
        return (yield from session.append("t", [2])).version

    def busy() -> None:
        # On PostgreSQL only what is locked is waited for, and the tree is not there yet.
        other.session("root-of-both")

    is_sqlite = place["url"].startswith("sqlite")
    with (
        # However long the other takes, the open transaction is not ended for being idle.
        holdfast.open(**place, busy_timeout_seconds=60) as store,
        holdfast.open(**place, busy_timeout_seconds=0.2) as other,
    ):
        store.session("before")
        assert store.run(outer) == 2
        assert other.find_session("root-of-both").info().version == 2


def test_an_async_store_serves_other_tasks_meanwhile_and_a_call_inside_does_nothing(
    place: dict[str, Any],
) -> None:
    async def run() -> None:
        left: list[Any] = []

        def outer(tx: holdfast.Transaction, note: str) -> holdfast.Op[int]:
            session = yield from tx.session(note)
            left.append(Counter(store).add(1, note="inner"))
            return (yield from session.append("t", [1])).version

        async with await holdfast.aopen(**place) as store:
            prepare_done = await asyncio.gather(*(store.run(outer, f"s{n}") for n in range(5)))
            assert prepare_done == [1] * 5
            # A coroutine that nobody awaits has asked the store for nothing.
            for coroutine in left:
                coroutine.close()
            assert len(await store.sessions()) == 5

    asyncio.run(run())
