"""The writers of an SQLite file take turns: none is overtaken, and a long one lets others in."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.kernel.sqlite.side_lock import FileLock, SideLock
from holdfast.kernel.sqlite.transactions import REST_SECONDS_MAX
from holdfast.testing.nouns import Counter
from tests.crash.children import Child, stopped
from tests.faults.interrupts import Alarm
from tests.faults.workload import in_threads
from tests.internals import engine_of
from tests.threads import begin
from tests.work.fleet import wait_until

WAIT_SECONDS = 120
TURNS = 50
LINGER_SECONDS = 0.01


def is_taken(turn: FileLock) -> bool:
    try:
        return not turn.try_acquire()
    finally:
        turn.release()


def waits() -> int:
    return sum(each.name == "holdfast-lock" for each in threading.enumerate())


def beside(path: Path, name: str) -> FileLock:
    return FileLock(path.with_name(f"{path.name}-{name}"))


def fork_and_tell(say: Callable[[str], None]) -> None:
    """Fork a process that lives until it is killed, or its test hangs."""
    forked = os.fork()
    if forked == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(WAIT_SECONDS)
        while True:
            signal.pause()
    say(str(forked))


def test_a_writer_that_waits_is_not_overtaken_by_the_one_before_it(path: Path) -> None:
    def wait() -> None:
        waiting.acquire()
        assert may_go.wait(WAIT_SECONDS)
        waiting.release()

    def release_and_try_again() -> None:
        wait_until(lambda: is_taken(turn))
        writing.release()
        overtakes.append(writing.try_acquire())
        writing.release()
        may_go.set()

    writing, waiting = SideLock(path), SideLock(path)
    turn = beside(path, "turn")
    overtakes: list[bool] = []
    for _ in range(TURNS):
        may_go = threading.Event()
        assert writing.try_acquire()
        in_threads([wait, release_and_try_again])
    for lock in (writing, waiting, turn):
        lock.close()
    assert overtakes == TURNS * [False]


def test_a_writer_that_found_the_lock_taken_is_next(path: Path) -> None:
    first, second = SideLock(path), SideLock(path)
    assert first.try_acquire()
    assert not second.try_acquire(keeps_turn=True)
    first.release()
    assert not first.try_acquire()
    second.acquire()
    second.release()
    assert first.try_acquire()
    assert not second.try_acquire()
    first.release()
    assert first.try_acquire()
    for lock in (first, second):
        lock.close()


def test_a_call_that_was_interrupted_before_it_was_queued_does_not_stay_next(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: object) -> None:
        assert is_taken(turn)
        raise KeyboardInterrupt

    other, turn = SideLock(path), beside(path, "turn")
    with holdfast.open(f"sqlite:///{path}") as store:
        assert other.try_acquire()
        monkeypatch.setattr(engine_of(store), "_run_queued", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Counter(store).add()
        assert not is_taken(turn)
        other.release()
    for lock in (other, turn):
        lock.close()


def test_a_process_that_was_stopped_while_it_waits_keeps_nobody_from_writing(path: Path) -> None:
    with holdfast.open(f"sqlite:///{path}") as store:
        session = store.session("s")
        holder, turn = SideLock(path), beside(path, "turn")
        assert holder.try_acquire()
        child = Child(lambda _: SideLock(path).acquire())
        wait_until(lambda: is_taken(turn))
        os.kill(child.pid, signal.SIGSTOP)
        # Only then it is sure that it does not get the lock any more.
        os.waitpid(child.pid, os.WUNTRACED)
        holder.release()
        for _ in range(TURNS):
            session.append("log", [1])
    with holdfast.open(f"sqlite:///{path}"):
        assert is_taken(turn)
    child.kill()
    child.wait()
    for lock in (holder, turn):
        lock.close()


def test_a_process_rests_for_as_long_as_it_has_written(path: Path) -> None:
    def linger(tx: holdfast.Transaction) -> holdfast.Op[None]:
        yield from Counter(tx).add()
        started.append(time.monotonic())
        while time.monotonic() < started[0] + LINGER_SECONDS:
            pass

    started: list[float] = []
    with holdfast.open(f"sqlite:///{path}") as store:
        store.run(linger)
        writer = engine_of(store).writer
        assert started[0] + 2 * LINGER_SECONDS <= writer.rest_until
        assert writer.rest_until <= time.monotonic() + REST_SECONDS_MAX


def test_it_rests_only_if_others_want_to_write(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sleep(seconds: float) -> None:
        rests.append(seconds)
        assert not is_taken(turn)
        other.release()

    rests: list[float] = []
    other, turn = SideLock(path), beside(path, "turn")
    with holdfast.open(f"sqlite:///{path}") as store:
        writer = engine_of(store).writer
        monkeypatch.setattr("holdfast.kernel.sqlite.driver.time.sleep", sleep)
        writer.rest_until = time.monotonic() + 60
        Counter(store).add()
        assert rests == []
        writer.rest_until = time.monotonic() + 60
        assert other.try_acquire()
        Counter(store).add()
        (seconds,) = rests
        assert seconds > LINGER_SECONDS
    for lock in (other, turn):
        lock.close()


def test_who_waits_for_the_disk_or_a_processor_does_not_rest(path: Path) -> None:
    def wait(tx: holdfast.Transaction) -> holdfast.Op[None]:
        yield from Counter(tx).add()
        time.sleep(LINGER_SECONDS)

    with holdfast.open(f"sqlite:///{path}") as store:
        store.run(wait)
        before = engine_of(store).writer.rest_until
        store.run(wait)
        assert engine_of(store).writer.rest_until == before


def refuse_large_writes(engine: Any) -> None:
    with pytest.raises(holdfast.StoreBusy, match=r"busy for 0\.1 seconds"):
        engine.vacuum()
    with pytest.raises(holdfast.StoreBusy, match=r"busy for 0\.1 seconds"), engine.bulk():
        pass


def test_large_writes_wait_for_the_lock_no_longer_than_others(path: Path) -> None:
    def hold() -> None:
        with engine.writer.mutex:
            held.set()
            assert released.wait(WAIT_SECONDS)

    other, held, released = SideLock(path), threading.Event(), threading.Event()
    with holdfast.open(f"sqlite:///{path}", busy_timeout_seconds=0.1) as store:
        engine = engine_of(store)
        assert other.try_acquire()
        refuse_large_writes(engine)
        other.release()
        holding = begin(hold)
        assert held.wait(WAIT_SECONDS)
        refuse_large_writes(engine)
        released.set()
        holding.result(WAIT_SECONDS)
        engine.vacuum()
        with engine.bulk():
            assert not other.try_acquire()
        Counter(store).add()
        assert other.try_acquire()
    other.close()


def test_turns_are_taken_again_as_soon_as_the_stopped_process_goes_on(path: Path) -> None:
    lock, turn = SideLock(path), beside(path, "turn")
    assert turn.try_acquire()
    for _ in range(3):
        assert lock.acquire_within(WAIT_SECONDS)
        lock.release()
        assert lock.try_acquire()
        lock.release()
        assert waits() == 1
    turn.release()
    wait_until(lambda: waits() == 0)
    assert turn.try_acquire()
    assert not lock.try_acquire()
    for each in (lock, turn):
        each.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def open_async(url: str) -> None:
    await (await holdfast.aopen(url, busy_timeout_seconds=0.05)).close()


OPENS: dict[str, Callable[[str], None]] = {
    "sync": lambda url: holdfast.open(url, busy_timeout_seconds=0.05).close(),
    "async": lambda url: asyncio.run(open_async(url)),
}


@pytest.mark.parametrize("colour", OPENS)
@pytest.mark.parametrize("name", ["lock", "turn"])
def test_what_a_stopped_process_keeps_is_waited_for_by_one_thread_however_often_it_is_opened(
    path: Path, name: str, colour: str
) -> None:
    def hold(_: Callable[[str], None]) -> None:
        lock = beside(path, name)
        assert lock.try_acquire()
        os.kill(os.getpid(), signal.SIGSTOP)
        lock.close()

    url, open_once = f"sqlite:///{path}", OPENS[colour]
    holdfast.open(url).close()
    child = stopped(hold)
    used = []
    for _ in range(5):
        if name == "lock":
            with pytest.raises(holdfast.StoreBusy):
                open_once(url)
        else:
            open_once(url)
        assert waits() == 1
        used.append(descriptors())
    assert used == [used[0]] * 5
    os.kill(child.pid, signal.SIGCONT)
    assert child.wait()[0] == 0
    wait_until(lambda: waits() == 0)
    open_once(url)
    assert (waits(), descriptors()) == (0, used[0] - 2)


def test_an_interrupted_wait_for_a_lock_does_not_take_it_later(path: Path) -> None:
    waiting, other = beside(path, "turn"), beside(path, "turn")
    assert other.try_acquire()
    with pytest.raises(KeyboardInterrupt), Alarm().after(0.05):
        waiting.acquire_within(WAIT_SECONDS)
    other.release()
    wait_until(lambda: waits() == 0)
    assert other.try_acquire()
    for lock in (waiting, other):
        lock.close()


def test_a_process_without_descriptors_to_wait_for_its_turn_writes_without(path: Path) -> None:
    def write(say: Callable[[str], None]) -> None:
        with holdfast.open(f"sqlite:///{path}") as store:
            session = store.session("s")
            turn = beside(path, "turn")
            assert turn.try_acquire()
            used = [os.dup(0)]
            resource.setrlimit(resource.RLIMIT_NOFILE, (used[0] + 10, used[0] + 10))
            with contextlib.suppress(OSError):
                while True:
                    used.append(os.dup(0))
            session.append("log", [1])
            for each in used:
                os.close(each)
            turn.release()
            session.append("log", [2])
            say(str(session.at(2).channels["log"]))

    assert Child(write).wait() == (0, ["[1, 2]"])


def test_a_child_forked_while_its_parent_waits_for_the_turn_does_not_keep_it(path: Path) -> None:
    def wait_and_fork(say: Callable[[str], None]) -> None:
        session = holdfast.open(f"sqlite:///{path}").session("s")
        say("open")
        wait_until(lambda: is_taken(turn_seen))
        first = begin(session.append, "log", [1])
        wait_until(lambda: waits() == 1)
        fork_and_tell(say)
        first.result(WAIT_SECONDS)
        say("written")
        wait_until(lambda: is_taken(lock_seen))
        session.append("log", [2])

    lock, turn, turn_seen, lock_seen = (
        beside(path, name) for name in ("lock", "turn", "turn", "lock")
    )
    child = Child(wait_and_fork)
    assert child.lines.readline() == "open\n"
    wait_until(lock.try_acquire)
    wait_until(turn.try_acquire)
    forked = int(child.lines.readline())
    turn.release()
    lock.release()
    assert child.lines.readline() == "written\n"
    wait_until(lock.try_acquire)
    wait_until(lambda: is_taken(turn))
    child.kill()
    os.waitpid(child.pid, 0)
    try:
        assert turn.try_acquire()
    finally:
        os.kill(forked, signal.SIGKILL)
    child.lines.close()
    for each in (lock, turn, turn_seen, lock_seen):
        each.close()


def test_a_child_forked_while_its_parent_opens_a_store_does_not_keep_the_lock(path: Path) -> None:
    def die(tx: holdfast.Transaction) -> holdfast.Op[None]:
        yield from Counter(tx).add()
        os.kill(os.getpid(), signal.SIGKILL)

    def open_and_fork(say: Callable[[str], None]) -> None:
        opening = begin(holdfast.open, f"sqlite:///{path}")
        wait_until(lambda: waits() == 1)
        fork_and_tell(say)
        opening.result(WAIT_SECONDS).run(die)

    lock = beside(path, "lock")
    assert lock.try_acquire()
    child = Child(open_and_fork)
    forked = int(child.lines.readline())
    lock.release()
    os.waitpid(child.pid, 0)
    try:
        assert lock.try_acquire()
    finally:
        os.kill(forked, signal.SIGKILL)
    child.lines.close()
    lock.close()


@pytest.mark.parametrize("suffix", ["lock", "turn"])
def test_a_pipe_in_place_of_a_lock_file_is_an_error(path: Path, suffix: str) -> None:
    pipe = path.with_name(f"{path.name}-{suffix}")
    os.mkfifo(pipe, 0o600)
    opening = begin(holdfast.open, f"sqlite:///{path}")
    with pytest.raises(holdfast.StoreUnavailable, match=f"cannot open the lock file {pipe}"):
        opening.result(WAIT_SECONDS)
