"""Calls that share one SQLite commit fail alone, wait no longer than they may, and end cleanly."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import apsw
import pytest

import holdfast
from holdfast.kernel.driver import Hooks, Trace
from holdfast.kernel.operation import Op, operation, rows
from holdfast.kernel.sqlite.side_lock import SideLock
from holdfast.testing.nouns import Counter
from tests.crash.children import Child
from tests.faults.workload import Clients, each_connection, found_in, in_threads, together
from tests.internals import engine_of

Report = Callable[[str], None]

BUSY_SECONDS = 0.5
WAIT_SECONDS = 120  # A call that takes so long hangs.
NEIGHBOURS = 4


BREAK_A_RULE = "UPDATE hf_trees SET position = -1"


class Failing(Counter):
    """Operations that add and then fail, each in its own way."""

    @operation
    def broken_by_itself(self) -> Op[None]:
        yield from Counter.add(self, 1, note="never")
        raise ZeroDivisionError("on purpose")

    @operation
    def refused_by_the_schema(self) -> Op[None]:
        yield from Counter.add(self, 1, note="never")
        yield from rows(BREAK_A_RULE)

    @operation
    def renames_the_error(self) -> Op[None]:
        yield from Counter.add(self, 1, note="never")
        try:
            yield from rows(BREAK_A_RULE)
        except holdfast.Refused as error:
            raise ValueError("renamed") from error

    @operation
    def ignores_the_error(self) -> Op[None]:
        yield from Counter.add(self, 1, note="never")
        for _ in range(3):
            with contextlib.suppress(holdfast.Refused):
                yield from rows(BREAK_A_RULE)

    @operation
    def mistyped(self) -> Op[None]:
        yield from Counter.add(self, 1, note="never")
        yield from rows("SELECT nothing FROM nowhere")

    @operation
    def lacks_a_parameter(self) -> Op[None]:
        yield from Counter.add(self, 1, note="never")
        yield from rows("SELECT :missing")


FAILING: dict[str, type[Exception]] = {
    "broken_by_itself": ZeroDivisionError,
    "refused_by_the_schema": holdfast.Refused,
    "renames_the_error": holdfast.Refused,
    "ignores_the_error": holdfast.Refused,
    "mistyped": holdfast.StoreError,
    "lacks_a_parameter": KeyError,
}


@pytest.mark.parametrize("name", FAILING)
def test_a_call_that_fails_in_a_group_leaves_its_neighbours_results_intact(
    path: Path, name: str
) -> None:
    clients = Clients(path.parent / "history")
    with holdfast.open(f"sqlite:///{path}") as store:

        def fail() -> None:
            with pytest.raises(FAILING[name]):
                getattr(Failing(store), name)()

        fail()
        for place in range(NEIGHBOURS + 1):
            calls = NEIGHBOURS * [partial(clients.add, store)]
            together(store, [*calls[:place], fail, *calls[place:], fail])
        clients.judge(store)
    assert clients.outcomes == {"returned": NEIGHBOURS * (NEIGHBOURS + 1)}


def test_an_error_is_delivered_only_when_the_whole_group_is_durable(path: Path) -> None:
    """At that moment another connection sees what the neighbours wrote."""
    seen: list[int] = []
    with holdfast.open(f"sqlite:///{path}") as store:

        def fail() -> None:
            with pytest.raises(holdfast.InvalidArgument, match="above the limit"):
                Counter(store).add_below(-1)
            seen.append(count_from_outside(path))

        def succeed() -> None:
            Counter(store).add()
            seen.append(count_from_outside(path))

        for _ in range(20):
            together(store, [fail, *(NEIGHBOURS * [succeed]), fail])
    expected = [NEIGHBOURS * (turn + 1) for turn in range(20) for _ in range(NEIGHBOURS + 2)]
    assert seen == expected


def count_from_outside(path: Path) -> int:
    connection = apsw.Connection(str(path))
    try:
        found = connection.execute("SELECT value FROM hf_test_counters").fetchall()
        return int(str(found[0][0])) if found else 0
    finally:
        connection.close()


def test_calls_are_run_again_alone_when_the_engine_ends_the_whole_transaction(path: Path) -> None:
    """A row for which there is no room ends it; the neighbours have a second try, one by one."""
    traces: list[Trace] = []
    errors: list[BaseException] = []
    clients = Clients(path.parent / "history")
    with (
        each_connection(path, max_page_count=60),
        holdfast.open(f"sqlite:///{path}", hooks=Hooks(trace=traces.append)) as store,
    ):

        def fill(tx: holdfast.Transaction) -> Op[None]:
            yield from Counter(tx).add(1, note="never")
            yield from rows("INSERT INTO hf_meta VALUES ('big', zeroblob(1000000))")

        def overfill() -> None:
            with pytest.raises(holdfast.StoreFull) as caught:
                store.run(fill)
            errors.append(caught.value)

        together(store, [*(NEIGHBOURS * [partial(clients.add, store)]), overfill])
        clients.judge(store)
    assert clients.outcomes == {"returned": NEIGHBOURS}
    assert [type(error) for error in errors] == [holdfast.StoreFull]
    written = [trace for trace in traces if trace.call in {"Counter.add", "_Compose.run"}]
    assert [trace.attempts for trace in written] == (NEIGHBOURS + 1) * [2]


@contextlib.contextmanager
def stopped_holder(path: Path) -> Iterator[Child]:
    """Another process that holds the writers' lock and was stopped."""

    def hold(say: Callable[[str], None]) -> None:
        lock = SideLock(path)
        lock.acquire()
        say("held")
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)

    child = Child(hold)
    assert child.lines.readline() == "held\n"
    os.waitpid(child.pid, os.WUNTRACED)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def test_behind_a_stopped_writer_a_call_gives_up_in_time_and_is_never_run(path: Path) -> None:
    with holdfast.open(f"sqlite:///{path}", busy_timeout_seconds=BUSY_SECONDS) as store:
        clients = Clients(path.parent / "history")
        clients.add(store)
        with stopped_holder(path):
            started = time.monotonic()
            in_threads([*(3 * [partial(clients.add, store)]), partial(clients.add_twice, store)])
            waited = time.monotonic() - started
            assert BUSY_SECONDS <= waited < WAIT_SECONDS
            assert clients.outcomes == {"returned": 1, "StoreBusy": 4}
            assert Counter(store).value() == 1, "reads do not wait"
        clients.add(store)
        assert clients.outcomes["returned"] == 2
        clients.judge(store)
    assert all("nothing was written" in str(error) for error in clients.errors)


def test_behind_a_stopped_writer_a_task_gives_up_in_time_and_is_never_run(path: Path) -> None:
    clients = Clients(path.parent / "history")

    async def run() -> None:
        url = f"sqlite:///{path}"
        async with await holdfast.aopen(url, busy_timeout_seconds=BUSY_SECONDS) as store:
            with stopped_holder(path):
                started = time.monotonic()
                await asyncio.gather(*(clients.add_async(store) for _ in range(5)))
                assert BUSY_SECONDS <= time.monotonic() - started < WAIT_SECONDS
                assert clients.outcomes == {"StoreBusy": 5}
                assert await Counter(store).value() == 0
            await clients.add_async(store)

    asyncio.run(run())
    assert clients.outcomes["returned"] == 1
    with holdfast.open(f"sqlite:///{path}") as store:
        clients.judge(store)


def test_behind_a_stopped_writer_a_store_is_opened_and_closed_in_time(path: Path) -> None:
    url = f"sqlite:///{path}"
    store = holdfast.open(url, busy_timeout_seconds=BUSY_SECONDS)
    Counter(store).add()
    with stopped_holder(path):
        started = time.monotonic()
        with pytest.raises(holdfast.StoreBusy, match=r"busy for 0\.5 seconds"):
            holdfast.open(url, busy_timeout_seconds=BUSY_SECONDS)
        assert time.monotonic() - started < WAIT_SECONDS
        with pytest.raises(holdfast.StoreBusy):
            Counter(store).add()
        started = time.monotonic()
        store.close()
        assert time.monotonic() - started < WAIT_SECONDS
    with holdfast.open(url) as again:
        assert Counter(again).value() == 1


class Slow(Counter):
    """An operation that takes its time before its first statement, on the caller's thread."""

    begun = threading.Event()
    go_on = threading.Event()

    @operation
    def think_and_add(self) -> Op[int]:
        """Add, once it may go on."""
        self.begun.set()
        assert self.go_on.wait(WAIT_SECONDS)
        return (yield from Counter.add(self, 1, note="late"))


@pytest.mark.parametrize("has_thread", [False, True])
@pytest.mark.parametrize("is_writer_free", [True, False])
def test_a_call_that_comes_after_the_closing_is_refused_at_once(
    path: Path, has_thread: bool, is_writer_free: bool
) -> None:
    store = holdfast.open(f"sqlite:///{path}", busy_timeout_seconds=2 * WAIT_SECONDS)
    if has_thread:
        together(store, 2 * [lambda: Counter(store).add(1, note="early")])
    writer = engine_of(store).writer
    slow = Slow(store)
    slow.begun.clear()
    slow.go_on.clear()

    def call() -> None:
        with pytest.raises(holdfast.StoreClosed):
            slow.think_and_add()

    def close() -> None:
        assert slow.begun.wait(WAIT_SECONDS)
        store.close()
        with contextlib.nullcontext() if is_writer_free else writer.mutex:
            slow.go_on.set()
            time.sleep(0.05)

    started = time.monotonic()
    in_threads([call, close])
    assert time.monotonic() - started < WAIT_SECONDS, "it waited for the writer"
    with holdfast.open(f"sqlite:///{path}") as again:
        assert "late" not in [event.data["note"] for event in again.events("root")]


def closing(path: Path, clients: Clients, turn: int) -> float:
    """Close a store under the hands of its threads; return how long the longest call took."""
    store = holdfast.open(f"sqlite:///{path}", busy_timeout_seconds=2 * WAIT_SECONDS)
    longest: list[float] = []

    def work() -> None:
        while True:
            started = time.monotonic()
            before = len(clients.errors)
            clients.add(store)
            longest.append(time.monotonic() - started)
            if any(isinstance(error, holdfast.StoreClosed) for error in clients.errors[before:]):
                return

    def close() -> None:
        time.sleep(0.002 * (turn % 7))
        store.close()

    in_threads([*(6 * [work]), close, close])
    return max(longest)


def test_a_store_closed_under_load_finishes_or_refuses_every_call(
    path: Path, report: Report
) -> None:
    clients = Clients(path.parent / "history")
    longest = max(closing(path, clients, turn) for turn in range(40))
    report(f"40 closings, longest call {longest:.3f} s: {dict(clients.outcomes)}")
    assert set(clients.outcomes) == {"returned", "StoreClosed"}
    assert longest < WAIT_SECONDS
    with holdfast.open(f"sqlite:///{path}") as store:
        clients.judge(store)


def test_an_async_store_closed_under_load_finishes_or_refuses_every_call(path: Path) -> None:
    clients = Clients(path.parent / "history")

    async def run(turn: int) -> None:
        store = await holdfast.aopen(f"sqlite:///{path}", busy_timeout_seconds=2 * WAIT_SECONDS)

        async def work() -> None:
            while not any(isinstance(error, holdfast.StoreClosed) for error in clients.errors):
                await clients.add_async(store)

        async def close() -> None:
            await asyncio.sleep(0.002 * (turn % 7))
            await store.close()

        clients.errors.clear()
        async with asyncio.timeout(WAIT_SECONDS):
            await asyncio.gather(*(work() for _ in range(20)), close())

    for turn in range(20):
        asyncio.run(run(turn))
    assert set(clients.outcomes) == {"returned", "StoreClosed"}
    with holdfast.open(f"sqlite:///{path}") as store:
        clients.judge(store)


def test_a_store_is_opened_and_closed_again_and_again_and_leaves_nothing_behind(
    path: Path, report: Report
) -> None:
    def left() -> dict[str, Any]:
        return {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": [thread.name for thread in threading.enumerate()],
            "exit handlers": atexit._ncallbacks(),
            "files": sorted(file.name for file in path.parent.iterdir()),
        }

    holdfast.open(f"sqlite:///{path}").close()
    before = left()
    started = time.monotonic()
    for turn in range(1_000):
        with holdfast.open(f"sqlite:///{path}") as store:
            if turn % 20 == 0:
                together(store, 2 * [Counter(store).add])
                signals = store.runtime.signals
                signals.wait("topic", signals.count("topic"), 0.0)
            elif turn % 3 == 0:
                Counter(store).value()
    report(f"1,000 times opened and closed in {time.monotonic() - started:.1f} s")
    after = left()
    assert after.pop("files") == ["live.db", "live.db-lock", "live.db-turn"] == before.pop("files")
    assert after == before
    lock = SideLock(path)
    assert lock.try_acquire(), "the lock is still held"
    lock.close()


def test_a_statement_is_not_run_behind_a_transaction_that_has_ended(path: Path) -> None:
    def end(tx: holdfast.Transaction, note: str) -> holdfast.Op[int]:
        yield from Counter(tx).add(1, note=f"{note}/first")
        if len(ended) < 2:
            # As SQLite does by itself when the disk is full or fails.
            engine.writer.connection.execute("ROLLBACK")
            ended.append(note)
        return (yield from Counter(tx).add(1, note=f"{note}/second"))

    ended: list[str] = []
    with holdfast.open(f"sqlite:///{path}") as store:
        engine: Any = engine_of(store)
        with pytest.raises(holdfast.StoreUnavailable, match="ended early"):
            store.run(end, "alone")
        assert found_in(store) == []
        together(store, [partial(store.run, end, note) for note in ("a", "b", "c")])
        assert sorted(found_in(store)) == ["a", "b", "c"]


def test_an_error_in_a_trace_belongs_to_its_call_and_ends_no_thread(path: Path) -> None:
    class Stopped(BaseException):
        pass

    def trace(trace: Trace) -> None:
        if trace.call == "Counter.add_below":
            raise Stopped

    async def live() -> int:
        async with holdfast.aopen(f"sqlite:///{path}", hooks=Hooks(trace=trace)) as store:
            for _ in range(2):
                with pytest.raises(Stopped):
                    await Counter(store).add_below(100)
            return await Counter(store).add()

    assert asyncio.run(live()) == 3
