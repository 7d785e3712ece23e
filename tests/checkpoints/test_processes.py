"""Several processes on one session, and processes that do not know that they are dead."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast
import holdfast.kernel.postgres  # Imported once, not in each child.
from holdfast.checkpoints.keys import ITEMS
from holdfast.kernel.driver import Hooks, Point, Trace
from tests.checkpoints import tables
from tests.checkpoints.looking import Look
from tests.crash.children import Child, stopped

Say = Callable[[str], None]
PROCESSES = 8
SAVES = 200


def database(place: dict[str, Any]) -> str:
    return str(place["url"]).partition(":")[0]


def together(count: int, work: Callable[[int, Say], None]) -> list[list[str]]:
    """Run a function in several processes at once; return the lines of each."""
    children = [
        Child(lambda say, number=number: work(number, say))  # type: ignore[misc]
        for number in range(count)
    ]
    outcomes = [child.wait() for child in children]
    assert [status for status, _ in outcomes] == [0] * count
    return [lines for _, lines in outcomes]


def test_eight_processes_save_one_session_without_an_error_or_a_hole(
    place: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Appends to a shared list, full saves of lists of their own, and records, all mixed."""
    with holdfast.open(**place) as store:
        store.session("shared")

    def work(number: int, say: Say) -> None:
        mine: list[Any] = []
        with holdfast.open(**place) as store:
            session = store.find_session("shared")
            for turn in range(SAVES):
                match turn % 4:
                    case 0 | 1:
                        saved = session.append("log", [[number, turn]])
                    case 2:
                        mine.append({"turn": turn, "text": "x" * 40})
                        saved = session.save({f"mine {number}": mine, "last": number})
                    case _:
                        saved = session.record("tool_executed", [number, turn])
                say(f"{saved.version} {turn}")

    began = time.monotonic()
    lines = together(PROCESSES, work)
    seconds = time.monotonic() - began
    by_version: dict[int, tuple[int, int]] = {}
    for number, written in enumerate(lines):
        versions = [int(line.split()[0]) for line in written]
        assert versions == sorted(versions), "a process sees its own saves in order"
        for line in written:
            version, turn = map(int, line.split())
            assert version not in by_version, "no version is given twice"
            by_version[version] = (number, turn)
    assert sorted(by_version) == list(range(1, PROCESSES * SAVES + 1))
    with holdfast.open(**place) as store:
        session = store.find_session("shared")
        history = session.history(limit=10_000)
        assert [checkpoint.version for checkpoint in history] == sorted(by_version, reverse=True)
        log: list[list[int]] = []
        mine: dict[int, list[Any]] = {}
        for version in range(1, PROCESSES * SAVES + 1):
            number, turn = by_version[version]
            if turn % 4 < 2:
                log.append([number, turn])
            elif turn % 4 == 2:
                mine.setdefault(number, []).append({"turn": turn, "text": "x" * 40})
            if version % 97 == 0 or version == PROCESSES * SAVES:
                channels = session.at(version).channels
                assert channels["log"] == log
                assert {name for name in channels if name.startswith("mine")} == {
                    f"mine {number}" for number in mine
                }
                assert all(channels[f"mine {number}"] == mine[number] for number in mine)
        tables.check(store)
    with capsys.disabled():
        rate = PROCESSES * SAVES / seconds
        print(f"\n{database(place)}: {PROCESSES * SAVES} versions by 8 processes, {rate:.0f}/s")


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.005)


def attempts(driven: holdfast.Session) -> dict[str, Callable[[], Any]]:
    """Everything by which a driver changes its session."""
    return {
        "save": lambda: driven.save(plan="zombie"),
        "append": lambda: driven.append("log", ["zombie"]),
        "record": lambda: driven.record("turn", "zombie"),
        "rewind": lambda: driven.rewind(1),
        "fork": lambda: driven.fork(1),
        "pin": lambda: driven.pin(1, "zombie"),
        "unpin": lambda: driven.unpin(1),
        "attest": lambda: driven.attest(1, "zombie"),
        "end": lambda: driven.end("failed"),
        "cancel": driven.cancel,
        "delete": lambda: driven.delete(force=True),
    }


@pytest.mark.parametrize("has_written", [True, False], ids=["written to", "only taken"])
def test_a_driver_that_was_stopped_beyond_its_lease_can_write_nothing(
    place: dict[str, Any], tmp_path: Path, has_written: bool
) -> None:
    go = tmp_path / "go"

    def stop_after_a_beat(trace: Trace) -> None:
        # Between two transactions, so that it is not stopped with a lock in its hand.
        if trace.call.endswith(".renew") and not go.exists():
            os.kill(os.getpid(), signal.SIGSTOP)

    def zombie(say: Say) -> None:
        with holdfast.open(**place, hooks=Hooks(trace=stop_after_a_beat)) as store:
            driven = store.session("s").drive("zombie", lease_seconds=1.5)
            wait_for(go.exists)
            say(str(driven.held.is_lost))
            for name, attempt in attempts(driven).items():
                try:
                    attempt()
                    say(f"{name} succeeded")
                except holdfast.HoldfastError as error:
                    say(f"{name} {type(error).__name__}")
            driven.close()
            say(str(driven.held.is_lost))

    with holdfast.open(**place) as store:
        store.session("s").save(log=["before"])
    child = stopped(zombie)
    with holdfast.open(**place) as store:
        session = store.find_session("s")
        assert session.info().holder == "zombie"
        wait_for(lambda: _is_expired(store))
        heir = session.drive("heir", lease_seconds=60)
        assert heir.fence == 2
        if has_written:
            heir.append("log", ["heir"])
        before = tables.dump(store)
        go.touch()
        os.kill(child.pid, signal.SIGCONT)
        status, lines = child.wait()
        assert status == 0
        assert lines == ["True", *(f"{name} LeaseLost" for name in attempts(heir)), "True"]
        assert tables.dump(store) == before, "the zombie wrote something"
        heir.append("log", ["heir again"])
        assert not heir.held.is_lost
        heir.close()
        latest = session.latest()
        assert latest is not None
        assert latest["log"] == ["before", *(["heir"] if has_written else []), "heir again"]
        tables.check(store)


def test_a_driver_stopped_in_the_middle_of_a_save_loses_to_who_took_over(
    postgres_dsn: str, namespace: str
) -> None:
    """On SQLite nobody can take over meanwhile: the one who writes holds the file's lock."""
    place: dict[str, Any] = {"url": postgres_dsn, "namespace": namespace}

    def zombie(say: Say) -> None:
        stops: list[str] = []

        def stop(point: Point) -> None:
            if stops and "version = version + 1" in point.sql and point.moment == "before":
                stops.clear()
                say("stopped")
                os.kill(os.getpid(), signal.SIGSTOP)

        with holdfast.open(**place, hooks=Hooks(probe=stop)) as store:
            session = store.session("s")
            lease = session.lease("zombie", 0.3)
            session.fence = lease.fence
            session.save(log=["alive"])
            stops.append("now")
            try:
                session.save(log=["alive", "zombie"])
                say("saved")
            except holdfast.LeaseLost as error:
                say(f"lost {error.fence} {error.current_fence}")

    child = Child(zombie)
    assert child.lines.readline() == "stopped\n"
    with holdfast.open(**place) as store:
        session = store.find_session("s")
        wait_for(lambda: bool(session.info().lease_expires_at or 0) and _is_expired(store))
        heir = session.drive("heir")
        os.kill(child.pid, signal.SIGCONT)
        status, lines = child.wait()
        assert (status, lines) == (0, ["lost 1 2"])
        heir.save(log=["alive", "heir"])
        assert [checkpoint.version for checkpoint in session.history()] == [2, 1]
        heir.close()


def _is_expired(store: holdfast.Store) -> bool:
    sql = "SELECT 1 AS yes FROM hf_sessions WHERE lease_expires_at <= :now"
    return bool(Look(store).rows(sql))


def test_a_fork_in_another_tree_survives_the_deletion_of_its_origin(place: dict[str, Any]) -> None:
    items, first = list(range(130)), ["first"] * 100

    def fork_and_go_on(number: int, say: Say) -> None:
        with holdfast.open(**place) as store:
            fork = store.find_session("origin").fork(3, id=f"fork {number}")
            for turn in range(20):
                fork.append("log", [[number, turn]])
            if number % 2:
                fork.rewind(1)

    with holdfast.open(**place) as store:
        origin = store.session("origin")
        origin.save(log=first, memo="first" * 100)
        origin.save(log=items[:70], memo="m" * 500)
        origin.append("log", items[70:])
        together(4, fork_and_go_on)
        deleting = [threading.Thread(target=origin.delete)]
        forks = [store.find_session(f"fork {number}") for number in range(4)]
        deleting += [threading.Thread(target=forks[number].delete) for number in (2, 3)]
        for thread in deleting:
            thread.start()
        for thread in deleting:
            thread.join()
        tables.check(store)
    with holdfast.open(**place) as store:
        kept, rewound = store.find_session("fork 0"), store.find_session("fork 1")
        for turn in range(1, 21):
            wanted = [*items, *([0, done] for done in range(turn))]
            assert kept.at(3 + turn).channels == {"log": wanted, "memo": "m" * 500}
        latest = rewound.latest()
        assert latest is not None
        assert latest.channels == {"log": first, "memo": "first" * 100}
        with pytest.raises(holdfast.CheckpointNotFound):
            kept.at(2)
        for fork in (kept, rewound):
            fork.delete()
        left = tables.check(store)
        assert left["hf_lines"] == left["hf_items"] == left["hf_uses"] == []


# Beginnings of the statements that lock a tree, and that look where a session stands.
LOCK, ROOT = "SELECT root_id FROM", "SELECT s.id, s.number, s.root_id"


class Interruption:
    """Lets another thread do something after a statement of an operation.

    If the other can come in between, it is waited for; if it has to wait itself, it is only given
    the time to begin.
    """

    def __init__(self, *sql: str, count: int = 1, comes_between: bool) -> None:
        self.hooks = Hooks(probe=self._visit)
        self._sql = sql
        self._count = count
        self._comes_between = comes_between
        self._wait_seconds = 120 if comes_between else 0.3
        self._came_between = False
        self._work: Callable[[], Any] | None = None
        self._outcome: list[Any] = []
        self.thread: threading.Thread | None = None

    def arm(self, work: Callable[[], Any]) -> None:
        self._work = work

    def outcome(self) -> Any:
        """Return what the other got, or the error it met."""
        assert self.thread is not None, "the place was never passed"
        self.thread.join(120)
        assert self._came_between == self._comes_between
        return self._outcome[0]

    def _visit(self, point: Point) -> None:
        if self._work is None or point.moment != "after":
            return
        if not any(sql in point.sql for sql in self._sql):
            return
        self._count -= 1
        if self._count:
            return
        work, self._work = self._work, None

        def run() -> None:
            try:
                self._outcome.append(work())
            except holdfast.HoldfastError as error:
                self._outcome.append(error)

        self.thread = threading.Thread(target=run)
        self.thread.start()
        self.thread.join(self._wait_seconds)
        self._came_between = not self.thread.is_alive()


@pytest.mark.parametrize("how", ["fork", "rewind"])
@pytest.mark.parametrize("place_of_deletion", ["before the lock", "after the lock"])
def test_an_origin_deleted_at_the_same_moment_leaves_nothing_half(
    place: dict[str, Any], how: str, place_of_deletion: str
) -> None:
    """A fork reaches for a version of its origin, in another tree, while that is deleted."""
    # The fork's own tree is locked, the root of the origin is read, the origin's tree is locked. An
    # SQLite file is locked as a whole, and a rewind locks its own tree by no statement.
    count = 2 if place_of_deletion == "before the lock" else 3
    if database(place) == "sqlite" and how == "rewind":
        count -= 1
    # Deleting locks every tree that shares lines with the origin, so it waits for the fork.
    interruption = Interruption(LOCK, ROOT, count=count, comes_between=False)
    with holdfast.open(**place) as other, holdfast.open(**place, hooks=interruption.hooks) as store:
        origin = other.session("origin")
        origin.save(log=list(range(100)))
        origin.save(log=["new"])
        origin.fork(2, id="fork")
        fork = store.find_session("fork")
        interruption.arm(origin.delete)
        fork.fork(1, id="below") if how == "fork" else fork.rewind(1)
        assert interruption.outcome() == ["origin"]
        tables.check(other)
        found = {info.id: other.find_session(info.id).latest() for info in other.sessions()}
        logs = {id: latest and latest["log"] for id, latest in found.items()}
        old = list(range(100))
        assert logs == ({"fork": ["new"], "below": old} if how == "fork" else {"fork": old})


@pytest.mark.parametrize(
    ("how", "sql"), [("save", "AS is_leased"), ("rewind", "fence = fence + 1")]
)
def test_a_lease_taken_in_the_middle_of_a_write_waits_for_it(
    place: dict[str, Any], how: str, sql: str
) -> None:
    interruption = Interruption(sql, comes_between=False)
    with holdfast.open(**place) as other, holdfast.open(**place, hooks=interruption.hooks) as store:
        session = store.session("s")
        session.save(log=[1])
        elsewhere = other.find_session("s")
        elsewhere.save(log=[2])
        interruption.arm(lambda: elsewhere.lease("driver", 60))
        written = session.save(log=[3]) if how == "save" else session.rewind(1)
        assert written.version == 3
        assert interruption.outcome().fence == 1
        with pytest.raises(holdfast.SessionBusy):
            session.save(log=[4])


def test_two_that_start_one_session_at_once_both_get_it(place: dict[str, Any]) -> None:
    comes_between = database(place) == "postgresql"
    interruption = Interruption("SELECT number, id, name", comes_between=comes_between)
    with holdfast.open(**place) as other, holdfast.open(**place, hooks=interruption.hooks) as store:
        interruption.arm(lambda: other.session("s", name="b", metadata={"title": "kept"}))
        here = store.session("s", agent="a")
        there = interruption.outcome()
        assert here.number == there.number
        info = here.info()
        assert (info.metadata, info.agent, info.name) == ({"title": "kept"}, "a", "b")


def test_many_that_start_one_session_at_once_all_get_it(place: dict[str, Any]) -> None:
    def work(number: int, say: Say) -> None:
        with holdfast.open(**place) as store:
            for turn in range(10):
                metadata = {"by": number} if number == 0 else None
                session = store.session(f"s {turn}", metadata=metadata)
                say(f"{turn} {session.append('log', [number]).version}")

    lines = [line for written in together(4, work) for line in written]
    assert len(set(lines)) == 40
    with holdfast.open(**place) as store:
        for turn in range(10):
            latest = store.find_session(f"s {turn}").latest()
            assert latest is not None
            assert sorted(latest["log"]) == [0, 1, 2, 3]
            assert store.find_session(f"s {turn}").info().metadata == {"by": 0}


def test_a_parent_deleted_at_the_same_moment_is_not_found(place: dict[str, Any]) -> None:
    comes_between = database(place) == "postgresql"
    interruption = Interruption("SELECT number, id, name", count=2, comes_between=comes_between)
    with holdfast.open(**place) as other, holdfast.open(**place, hooks=interruption.hooks) as store:
        other.session("root")
        parent = other.session("parent", parent="root")
        interruption.arm(lambda: parent.delete(force=True))
        if comes_between:
            with pytest.raises(holdfast.SessionNotFound, match="parent session 'parent' was del"):
                store.session("child", parent="parent")
            assert interruption.outcome() == ["parent"]
        else:
            store.session("child", parent="parent")
            assert interruption.outcome() == ["parent", "child"]
        assert [info.id for info in other.sessions()] == ["root"]


def test_cancelling_a_tree_stops_the_drivers_that_write_it(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        root = store.session("root")
        for number in range(3):
            store.session(f"child {number}", parent=root)

    def drive(number: int, say: Say) -> None:
        with holdfast.open(**place) as store:
            driven = store.find_session(f"child {number}").drive(lease_seconds=600)
            say("driving")
            try:
                while True:
                    driven.append("log", [driven.info().version])
            except holdfast.LeaseLost:
                say("lease lost")
            driven.close()

    children = [Child(lambda say, n=number: drive(n, say)) for number in range(3)]  # type: ignore[misc]
    for child in children:
        assert child.lines.readline() == "driving\n"
    with holdfast.open(**place) as store:
        children_of_root = store.find_session("root").children
        wait_for(lambda: all(info.version > 2 for info in children_of_root()))
        assert sorted(store.find_session("root").cancel()) == ["child 0", "child 1", "child 2",
                                                                "root"]  # fmt: skip
        at_once = {info.id: info.version for info in store.sessions()}
        for child in children:
            assert child.wait() == (0, ["lease lost"])
        for info in store.sessions():
            session = store.find_session(info.id)
            assert info.status == "cancelled"
            assert info.holder is None
            assert info.version == at_once[info.id], "something was written after the cancellation"
            history = session.history(limit=10_000)
            assert [checkpoint.version for checkpoint in history] == list(
                range(info.version, 0, -1)
            )
            assert history[0].data == {"from": "active", "to": "cancelled"}
            latest = session.latest()
            assert latest is not None
            if info.id != "root":
                assert latest["log"] == list(range(info.version - 1))
        tables.check(store)


def test_processes_killed_at_random_lose_nothing_and_leave_nothing(
    place: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each life appends, saves, forks, rewinds and deletes until it is killed."""
    chance = random.Random(5)

    def work(life: int, say: Say) -> None:
        with holdfast.open(**place) as store:
            session = store.session("s")
            latest = session.latest()
            log = [] if latest is None else latest["log"]
            for turn in range(10_000):
                log.append([life, turn])
                saved = session.append("log", log[-1:]) if turn % 2 else session.save(log=log)
                say(f"{saved.version} {life} {turn}")
                if turn % 7 == 6:
                    fork = session.fork(saved.version)
                    fork.append("log", ["fork"])
                    fork.rewind(max(1, saved.version - 2))
                    fork.delete()

    acknowledged: list[tuple[int, int, int]] = []
    for life in range(8):
        child = Child(lambda say: work(life, say))  # noqa: B023
        first = child.lines.readline()
        time.sleep(chance.uniform(0, 0.4))
        child.kill()
        _, lines = child.wait()
        acknowledged += [tuple(map(int, line.split())) for line in [first, *lines]]  # type: ignore[misc]
    with holdfast.open(**place) as store:
        tables.check(store)
        session = store.session("s")
        latest = session.latest()
        assert latest is not None
        log = latest["log"]
        assert latest.version == len(log), "one version per item"
        for version, life, turn in acknowledged:
            assert log[version - 1] == [life, turn]
            assert session.at(version)["log"] == log[:version]
        assert len(log) - len(acknowledged) <= 8, "at most one unanswered save per life"
        for fork in store.sessions():
            if fork.id != "s":
                store.find_session(fork.id).delete()
        left = tables.check(store)
        needed = {row["line_id"] for row in left["hf_uses"]}
        assert {row["key"] // ITEMS for row in left["hf_items"]} <= needed
    with capsys.disabled():
        print(f"\n{database(place)}: 8 kills, {len(acknowledged)} saves judged")
