"""One session, many processes: versions without holes, and zombies that can write nothing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast
from tests.crash.children import Child

PROCESSES, SAVES = 8, 200


def test_eight_processes_write_sixteen_hundred_consecutive_versions(
    place: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Appends and saves of a process' own list, mixed: no error, nothing lost, nothing twice."""
    with holdfast.open(**place) as store:
        store.session("shared")

    def work(number: int, say: Callable[[str], None]) -> None:
        with holdfast.open(**place) as store:
            session = store.session("shared")
            mine: list[str] = []
            for turn in range(SAVES):
                if turn % 4 == 3:
                    mine.append(f"{number}.{turn}")
                    version = session.save({f"mine-{number}": mine}).version
                else:
                    version = session.append("all", [f"{number}.{turn}"]).version
                say(str(version))

    children = [
        Child(lambda say, number=number: work(number, say))  # type: ignore[misc]
        for number in range(PROCESSES)
    ]
    versions: list[int] = []
    for child in children:
        status, lines = child.wait()
        assert status == 0
        versions += map(int, lines)
        assert lines == [str(version) for version in sorted(map(int, lines))]
    assert sorted(versions) == list(range(1, PROCESSES * SAVES + 1))
    with holdfast.open(**place) as store:
        latest = store.session("shared").latest()
        assert latest is not None
        appended = [f"{n}.{t}" for n in range(PROCESSES) for t in range(SAVES) if t % 4 != 3]
        assert sorted(latest["all"]) == sorted(appended)
        for number in range(PROCESSES):
            mine = [item for item in latest["all"] if item.startswith(f"{number}.")]
            assert mine == sorted(mine, key=lambda item: int(item.partition(".")[2]))
            assert latest[f"mine-{number}"] == [f"{number}.{t}" for t in range(3, SAVES, 4)]
    with capsys.disabled():
        print(f"\n{place['url'].partition(':')[0]}: {len(versions)} consecutive versions")


def test_a_frozen_driver_can_write_nothing_after_another_took_over(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        store.session("driven").append("transcript", ["start"])

    def zombie(say: Callable[[str], None]) -> None:
        with holdfast.open(**place) as store:
            driver = store.session("driven").drive("zombie", lease_seconds=1)
            driver.append("transcript", ["by the zombie, alive"])
            say("driving")
            deadline = time.monotonic() + 60
            # Frozen in here; it goes on once somebody else drives.
            while store.session("driven").info().holder == "zombie":
                assert time.monotonic() < deadline
                time.sleep(0.01)
            writes: dict[str, Callable[[], object]] = {
                "save": lambda: driver.save(x=1),
                "append": lambda: driver.append("transcript", ["by the zombie, dead"]),
                "record": lambda: driver.record("manual_checkpoint", {}),
                "rewind": lambda: driver.rewind(1),
                "end": driver.end,
            }
            for name, write in writes.items():
                try:
                    write()
                    say(f"{name} written")
                except holdfast.LeaseLost:
                    say(f"{name} refused")
            until = time.monotonic() + 10
            while not driver.heartbeat.is_lost and time.monotonic() < until:
                time.sleep(0.05)
            say(f"lost {driver.heartbeat.is_lost}")
            driver.close()

    child = Child(zombie)
    assert child.lines.readline() == "driving\n"
    os.kill(child.pid, signal.SIGSTOP)
    time.sleep(1.2)
    with holdfast.open(**place) as store:
        session = store.session("driven")
        taken = session.drive("successor", lease_seconds=60)
        assert taken.fence == 2
        taken.append("transcript", ["by the successor"])
        os.kill(child.pid, signal.SIGCONT)
        status, lines = child.wait()
        assert status == 0
        refused = [f"{name} refused" for name in ("save", "append", "record", "rewind", "end")]
        assert lines == [*refused, "lost True"]
        taken.append("transcript", ["still by the successor"])
        taken.close()
        latest = session.latest()
        assert latest is not None
        assert latest["transcript"] == [
            "start",
            "by the zombie, alive",
            "by the successor",
            "still by the successor",
        ]
        assert latest.version == 4


def test_a_driver_keeps_its_lease_while_its_thread_is_blocked(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store, holdfast.open(**place) as other:
        session = store.session("blocked")
        with session.drive("a", lease_seconds=0.6) as driver:
            time.sleep(2)
            with pytest.raises(holdfast.SessionBusy):
                other.session("blocked").save(x=1)
            driver.save(x=2)
        other.session("blocked").save(x=3)


def test_forks_in_other_trees_outlive_their_origin(place: dict[str, Any], tmp_path: Path) -> None:
    with holdfast.open(**place) as store:
        origin = store.session("origin")
        for number in range(150):
            origin.append("transcript", [number])
        forks = [origin.fork(version) for version in (10, 64, 65, 100, 150)]
        nested = forks[3].fork(100)
        origin.end()
        origin.delete()
    with holdfast.open(**place) as store:
        for fork, length in zip([*forks, nested], (10, 64, 65, 100, 150, 100), strict=True):
            again = store.session(fork.id)
            latest = again.latest()
            assert latest is not None
            assert latest["transcript"] == list(range(length))
            again.append("transcript", ["on"])
            assert again.at(length + 1)["transcript"][-2:] == [length - 1, "on"]
