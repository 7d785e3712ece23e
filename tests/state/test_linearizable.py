"""Shared state is linearizable: recorded histories of many clients, some of them killed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.testing.history import History, read
from holdfast.testing.linearizability import check
from holdfast.testing.recorded_state import RecordedState
from tests.crash.children import Child
from tests.state.calls import COUNTERS, LISTS, REGISTERS, SETS, make_calls

PROCESSES = 3
THREADS = 2


def clients(
    place: dict[str, Any], directory: Path, seed: int, calls: int
) -> Callable[[Callable[[str], None]], None]:
    """Return what a process does: its threads make calls, and it tells of each."""

    def run(tell: Callable[[str], None]) -> None:
        with holdfast.open(**place, durability="normal") as store:
            state = store.find_session("root").state
            history = History(directory)
            threads = [
                threading.Thread(
                    target=make_calls,
                    args=(RecordedState(state, history), seed + number, calls),
                    kwargs={"tell": lambda: tell("")},
                )
                for number in range(THREADS)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    return run


def record(place: dict[str, Any], directory: Path, calls: int, kills: int) -> None:
    """Let processes make calls; some are killed in the middle of it."""
    with holdfast.open(**place) as store:
        store.session("root")
    each = calls // (PROCESSES * THREADS)
    running = [Child(clients(place, directory, 100 * n, each)) for n in range(PROCESSES)]
    for number in range(kills):
        victim = Child(clients(place, directory, 1_000 + 100 * number, each))
        for _ in range(20 + 7 * number):
            victim.lines.readline()
        victim.kill()
        victim.wait()
    assert [child.wait()[0] for child in running] == [0] * PROCESSES
    with holdfast.open(**place) as store:
        state = RecordedState(store.find_session("root").state, History(directory))
        for key in (*COUNTERS, *REGISTERS, *LISTS, *SETS):
            state.get(key)


def judge(place: dict[str, Any], directory: Path, calls: int, kills: int) -> None:
    record(place, directory, calls, kills)
    found = read(directory)
    assert len(found) >= calls
    assert check(found) == []


def test_state_is_linearizable(place: dict[str, Any], tmp_path: Path) -> None:
    judge(place, tmp_path, calls=5_000, kills=3)


@pytest.mark.slow
def test_state_is_linearizable_for_long(place: dict[str, Any], tmp_path: Path) -> None:
    judge(place, tmp_path, calls=100_000, kills=20)
