"""The writers of an SQLite file take turns: none is overtaken, and a long one lets others in."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

import holdfast
from holdfast.kernel.sqlite.side_lock import FileLock, SideLock
from holdfast.kernel.sqlite.transactions import REST_SECONDS_MAX
from holdfast.testing.nouns import Counter
from tests.crash.children import Child
from tests.faults.workload import in_threads
from tests.internals import engine_of
from tests.work.fleet import wait_until

WAIT_SECONDS = 120
TURNS = 50
LINGER_SECONDS = 0.01


def is_taken(turn: FileLock) -> bool:
    try:
        return not turn.try_acquire()
    finally:
        turn.release()


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
    turn = FileLock(path.with_name(f"{path.name}-turn"))
    overtakes: list[bool] = []
    for _ in range(TURNS):
        may_go = threading.Event()
        assert writing.try_acquire()
        in_threads([wait, release_and_try_again])
    for lock in (writing, waiting, turn):
        lock.close()
    assert overtakes == TURNS * [False]


def test_a_process_that_was_stopped_while_it_waits_keeps_nobody_from_writing(path: Path) -> None:
    with holdfast.open(f"sqlite:///{path}") as store:
        session = store.session("s")
        holder, turn = SideLock(path), FileLock(path.with_name(f"{path.name}-turn"))
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
        other.release()

    rests: list[float] = []
    other = SideLock(path)
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
    other.close()
