"""Ctrl-C at any moment of a write leaves the whole change or nothing, and a store that works."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import itertools
import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

import holdfast
from holdfast.access.audit import Audit
from holdfast.access.tokens import Tokens
from holdfast.kernel.flow import flow, stream
from holdfast.kernel.operation import large_query, operation, query, whole_query
from holdfast.kernel.sqlite import async_driver
from holdfast.kernel.sqlite.side_lock import SideLock
from holdfast.kernel.threads import Latch, Thread
from holdfast.state.handle import State
from holdfast.testing.nouns import Counter
from tests.faults import interrupts
from tests.faults.interrupts import OPERATIONS, run
from tests.faults.tracing import interrupted_everywhere
from tests.faults.workload import found_in, in_threads, read_file, together
from tests.internals import engine_of

Report = Callable[[str], None]

# Python drops an interrupt that hits while it clears an object away.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def check_usable(store: holdfast.Store, path: Path, note: str) -> None:
    """Make sure that no lock is held and nothing is open, and write from another thread."""
    engine: Any = engine_of(store)
    connection = engine.writer.connection
    assert connection is None or not connection.in_transaction, "a transaction is open"
    other = SideLock(path)
    assert other.try_acquire(), "the lock between processes is held"
    other.close()

    def take() -> None:
        assert engine.writer.mutex.acquire(blocking=False), "the lock between threads is held"
        engine.writer.mutex.release()

    in_threads([take])
    in_threads([lambda: Counter(store).add(1, note=note)])


def calling(function: Callable[[], object]) -> Callable[[int], object]:
    return lambda nth: function()


def judge(store: holdfast.Store, asked: list[str], after: list[str]) -> int:
    """Make sure that nothing is there twice or half; return how many were whole."""
    found = found_in(store)
    assert len(found) == len(set(found))
    assert [note for note in found if note in set(after)] == after
    assert set(found) <= {*asked, *after}
    return len(found) - len(after)


@pytest.mark.parametrize("is_first", [False, True], ids=["later-write", "first-write"])
def test_an_interrupt_at_any_place_leaves_the_whole_or_nothing_and_a_usable_store(
    path: Path, is_first: bool, report: Report
) -> None:
    asked: list[str] = []
    after: list[str] = []

    def add(nth: int) -> None:
        asked.append(f"asked {nth}")
        Counter(store).add(1, note=asked[-1])

    store = open_store(path)
    for nth in interrupted_everywhere(add):
        after.append(f"after {nth}")
        check_usable(store, path, after[-1])
        if is_first:
            store.close()
            store = open_store(path)
    whole = judge(store, asked, after)
    # Closed only now: after a failure above it could wait for a lock that nobody frees.
    store.close()
    with open_store(path) as again:
        assert judge(again, asked, after) == whole
    report(f"interrupted at {nth - 1} places: {whole - 2} whole, {nth + 1 - whole} absent")
    assert nth > 50
    assert 2 < whole < nth


def test_a_read_interrupted_at_any_place_costs_no_later_read(path: Path, report: Report) -> None:
    with open_store(path) as store:
        session = store.session("s")
        session.save(t=[1, 2, 3])
        for read in (session.info, session.latest, Counter(store).value_twice):
            places = 0
            for places in interrupted_everywhere(calling(read)):  # noqa: B007
                # As many readers as there can be: none of them is in the middle of something.
                in_threads(3 * [read, Counter(store).value])
            assert places > 50
            report(f"interrupted at {places - 1} places of {read}")


@pytest.mark.parametrize("name", ["add", "add_at_once", "value_twice"])
def test_an_interrupt_at_any_place_costs_no_connection(
    direct: dict[str, Any], name: str, report: Report
) -> None:
    asked: list[str] = []

    def ask(nth: int) -> None:
        asked.append(f"asked {nth}")
        call(**({} if name == "value_twice" else {"note": asked[-1]}))

    with holdfast.open(**direct, busy_timeout_seconds=30) as store:
        connections: Any = engine_of(store).connections
        call = getattr(Counter(store), name)
        for nth in interrupted_everywhere(ask):
            assert connections.lent == 0, f"place {nth}"
        Counter(store).add_at_once(1, note="after")
        whole = judge(store, asked, ["after"])
    report(f"interrupted at {nth - 1} places: {whole} whole")
    assert nth > 50


def test_an_interrupt_of_a_starting_thread_is_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It can hit where Python waits for the thread with a lock, whose error then hides it."""

    def interrupted() -> None:
        try:
            raise KeyboardInterrupt
        finally:
            threading.Lock().release()

    thread = Thread(lambda: None, "started")
    monkeypatch.setattr(thread, "_started", SimpleNamespace(wait=interrupted, set=lambda: None))
    thread._started.is_set = lambda: False  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        thread.start()


def test_a_flag_whose_setting_is_interrupted_can_be_set_and_is_seen(report: Report) -> None:
    flags = [Latch()]
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(flags[-1].wait, 60)
        for nth in interrupted_everywhere(lambda _: flags[-1].set()):
            flags[-1].set()
            assert waiting.result(60), f"place {nth}"
            flags.append(Latch())
            waiting = other.submit(flags[-1].wait, 60)
        flags[-1].set()
    report(f"interrupted at {nth - 1} places")
    assert nth > 1


def test_an_interrupt_that_is_kept_keeps_no_connection(direct: dict[str, Any]) -> None:
    """A prompt keeps the last error; a program may keep all of them."""
    chance = random.Random(11)
    kept: list[KeyboardInterrupt] = []
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with holdfast.open(**direct, busy_timeout_seconds=30) as store:
            connections: Any = engine_of(store).connections
            while len(kept) < 200:
                try:
                    signal.setitimer(signal.ITIMER_REAL, chance.uniform(2e-6, 3e-3))
                    # Without an end it would go on for ever after an interrupt that Python drops.
                    for _ in range(100):
                        Counter(store).add_at_once()
                except KeyboardInterrupt as error:
                    kept.append(error)
                assert connections.lent == 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("ends", [True, False], ids=["loop-ends", "loop-goes-on"])
def test_an_interrupt_where_the_loop_wakes_calls_keeps_none_of_them_waiting(
    path: Path, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have shared a commit, and each waits for its own outcome."""
    set_done, woken = async_driver._AsyncJob.set_done, itertools.count(1)

    def interrupted(job: async_driver._AsyncJob) -> None:
        if next(woken) == 3:
            raise KeyboardInterrupt
        set_done(job)

    async def add_together() -> list[int]:
        async with holdfast.aopen(f"sqlite:///{path}") as store:
            adds = [Counter(store).add(1, note=f"{n}") for n in range(10)]
            monkeypatch.setattr(async_driver._AsyncJob, "set_done", interrupted)
            return await asyncio.gather(*adds)

    if ends:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(add_together())
    else:
        with asyncio.Runner() as runner:
            loop = runner.get_loop()
            adding = loop.create_task(add_together())
            with pytest.raises(KeyboardInterrupt):
                loop.run_until_complete(adding)
            assert sorted(loop.run_until_complete(adding)) == list(range(1, 11))
    assert read_file(path) == [f"{n}" for n in range(10)]


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside"])
def test_an_interrupt_of_any_operation_costs_only_that_call(
    place: dict[str, str], beside: bool, report: Report
) -> None:
    hits = 2 if "namespace" in place else 5
    asked = run(place=place, hits=hits, beside=beside)
    report(f"{hits * len(asked)} interrupts of {len(asked)} operations")
    assert asked.keys() == OPERATIONS.keys()


HANDLES = (
    holdfast.Store, holdfast.Session, holdfast.Work, holdfast.WorkItem, State, Audit, Tokens,
)  # fmt: skip
LOOKS = (large_query, query, whole_query)
# `rewind` moves back, `call` is `call_with`; the rest writes nothing, or is not left half-way.
INTERRUPTED_ELSEWHERE = {
    "begun", "call_with", "environment", "expand", "follow", "follow_all", "import_legacy",
    "move_back", "watch_changes",
}  # fmt: skip


def test_every_call_that_writes_is_among_the_operations() -> None:
    tree = ast.parse(Path(interrupts.__file__).read_text())
    called = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    writing = {
        name
        for handle in HANDLES
        for owner in handle.__mro__
        for name, each in vars(owner).items()
        if isinstance(each, flow | operation | stream) and not isinstance(each, LOOKS)
        if not name.startswith("_")
    }
    assert len(writing) > 60
    assert writing - called == INTERRUPTED_ELSEWHERE


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS)
def test_ten_thousand_interrupts_cost_only_the_calls(
    place: dict[str, str], operation: str, report: Report
) -> None:
    for beside in (False, True):
        asked = run(
            place=place, hits=5_000, beside=beside, operations=[operation], limit_seconds=3_600
        )
        report(f"{operation}: 5,000 of {asked[operation]} calls interrupted")


def open_store(path: Path) -> holdfast.Store:
    return holdfast.open(f"sqlite:///{path}", busy_timeout_seconds=2)


def test_interrupts_by_a_real_signal_leave_the_whole_or_nothing_and_a_usable_store(
    path: Path, report: Report
) -> None:
    chance = random.Random(5)
    is_armed, interrupted = False, 0
    asked: list[str] = []
    after: list[str] = []

    def strike(number: int, frame: FrameType | None) -> None:
        nonlocal is_armed
        if is_armed:
            is_armed = False
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, strike)
    try:
        with holdfast.open(f"sqlite:///{path}", busy_timeout_seconds=2) as store:
            for turn in range(1_000):
                asked.append(f"asked {turn}")
                try:
                    is_armed = True
                    signal.setitimer(signal.ITIMER_REAL, chance.uniform(2e-6, 4e-4))
                    Counter(store).add(1, note=asked[-1])
                    is_armed = False
                except KeyboardInterrupt:
                    interrupted += 1
                signal.setitimer(signal.ITIMER_REAL, 0)
                if turn % 10 == 0:
                    after.append(f"after {turn}")
                    check_usable(store, path, after[-1])
            whole = judge(store, asked, after)
    finally:
        signal.signal(signal.SIGALRM, before)
    report(f"{interrupted} of 1,000 writes interrupted, {whole} whole")
    assert interrupted > 100
    assert whole > 1_000 - interrupted - 1


def test_a_call_interrupted_while_it_waits_in_the_queue_is_never_run(path: Path) -> None:
    with holdfast.open(f"sqlite:///{path}") as store:
        together(store, 2 * [lambda: Counter(store).add(1, note="group")])
        engine: Any = engine_of(store)
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            with engine_held(engine):
                signal.setitimer(signal.ITIMER_REAL, 0.1)
                with pytest.raises(KeyboardInterrupt):
                    Counter(store).add(1, note="interrupted")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        Counter(store).add(1, note="after")
        assert found_in(store) == ["group", "group", "after"]


@contextlib.contextmanager
def engine_held(engine: Any) -> Iterator[None]:
    """Another thread holds the writer."""
    held, free = threading.Event(), threading.Event()

    def hold() -> None:
        with engine.writer.mutex:
            held.set()
            free.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        yield
    finally:
        free.set()
        thread.join()
