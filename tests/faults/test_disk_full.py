"""A disk without room, and one that cannot be read: clear errors, nothing lost, no reopening."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import apsw
import pytest

import holdfast
from holdfast.kernel.operation import Op
from holdfast.testing.faults import FaultyDisk, FileRole
from holdfast.testing.nouns import Counter, Queue
from tests.faults.workload import (
    Clients,
    each_connection,
    moving_the_log_every,
    prepare,
    read_file,
    together,
)
from tests.internals import engine_of

Report = Callable[[str], None]

BIG = "x" * 900_000


@pytest.fixture
def disk() -> Iterator[FaultyDisk]:
    with FaultyDisk() as disk:
        yield disk


def submit(store: holdfast.Store, payload: str) -> None:
    """Write one row of any size."""

    def body(tx: holdfast.Transaction) -> Op[str]:
        return (yield from Queue(tx, "big").submit(payload))

    store.run(body)


def count_pages(path: Path) -> int:
    connection = apsw.Connection(str(path))
    try:
        return int(str(connection.pragma("page_count")))
    finally:
        connection.close()


def fill(store: holdfast.Store) -> list[BaseException]:
    """Try to write more than fits, and return what was raised."""
    errors: list[BaseException] = []
    try:
        submit(store, BIG)
    except holdfast.HoldfastError as error:
        errors.append(error)
    return errors


def ready(path: Path) -> Clients:
    """Have one acknowledged call in the store."""
    clients = Clients(path.parent / "history")
    with holdfast.open(f"sqlite:///{path}") as store:
        clients.add(store)
    return clients


def test_what_does_not_fit_fails_alone_and_its_neighbours_succeed(
    path: Path, report: Report
) -> None:
    """One of six calls in a group needs more pages than the database may have."""
    clients = ready(path)
    errors: list[BaseException] = []
    limit = count_pages(path) + 8
    with each_connection(path, max_page_count=limit), holdfast.open(f"sqlite:///{path}") as store:
        for place in range(6):
            calls = 5 * [partial(clients.add, store)]
            together(store, [*calls[:place], lambda: errors.extend(fill(store)), *calls[place:]])
        assert clients.outcomes == {"returned": 31}
        assert [type(error) for error in errors] == 6 * [holdfast.StoreFull]
        assert all("no space left" in str(error) for error in errors)
        assert all("nothing was written" in str(error) for error in errors)
        clients.judge(store)
        assert store.events("big") == []
    assert len(read_file(path) or []) == 31
    report(f"{len(errors)} calls did not fit, {clients.outcomes['returned']} neighbours did")


def test_each_of_a_group_that_does_not_fit_says_so_and_reads_go_on(path: Path) -> None:
    clients = ready(path)
    full = count_pages(path)
    errors: list[BaseException] = []
    with holdfast.open(f"sqlite:///{path}") as store:
        with each_connection(path, max_page_count=full + 1):
            reopen_writer(store)
            together(store, 5 * [lambda: errors.extend(fill(store))])
            assert [type(error) for error in errors] == 5 * [holdfast.StoreFull]
            assert len({id(error) for error in errors}) == 5, "each call has an error of its own"
            clients.judge(store)
        reopen_writer(store)
        assert fill(store) == [], "with room again the same store works"
        clients.add(store)
        clients.judge(store)


def reopen_writer(store: holdfast.Store) -> None:
    """Let the next write use a new connection, on which the limit is another."""
    engine = engine_of(store)
    with engine._locked():
        engine.writer.close()


@pytest.mark.parametrize("file", ["wal", None])
def test_with_no_room_for_the_log_every_call_says_so_until_there_is_room(
    path: Path, disk: FaultyDisk, file: FileRole | None, report: Report
) -> None:
    clients = ready(path)
    with (
        moving_the_log_every(8),
        holdfast.open(f"sqlite:///{path}?vfs={disk.vfs_name}") as store,
    ):
        clients.add(store)
        for _ in range(5):
            disk.fail_on("write", file=file, error=errno.ENOSPC, persistent=True)
            clients.add(store)
            together(
                store, [*(4 * [partial(clients.add, store)]), partial(clients.add_twice, store)]
            )
            clients.judge(store)
            disk.reset()
            before = clients.outcomes["returned"]
            clients.add(store)
            clients.add_twice(store)
            assert clients.outcomes["returned"] == before + 2, "there is room again"
        clients.judge(store)
    with holdfast.open(f"sqlite:///{path}") as store:
        clients.judge(store)
    report(f"no room in {file or 'any file'}: {dict(clients.outcomes)}")
    assert clients.outcomes == {"returned": 12, "StoreFull": 30}
    assert all("no space left" in str(error) for error in clients.errors)


def test_room_that_ends_within_a_commit_loses_nothing(path: Path, disk: FaultyDisk) -> None:
    """Whichever write of a commit is the first that finds no room."""
    clients = ready(path)
    with holdfast.open(f"sqlite:///{path}?vfs={disk.vfs_name}") as store:
        clients.add(store)
        for nth in range(1, 25):
            disk.fail_on("write", nth=nth, file="wal", error=errno.ENOSPC, persistent=True)
            together(store, 3 * [partial(clients.add, store)])
            disk.reset()
            clients.judge(store)
        assert clients.outcomes["StoreFull"] > 0
        assert clients.outcomes["returned"] > 20
    with holdfast.open(f"sqlite:///{path}") as store:
        clients.judge(store)
    assert set(clients.outcomes) == {"returned", "StoreFull"}


@pytest.mark.parametrize("file", ["db", "wal"])
def test_a_passing_read_error_is_tried_again_and_a_lasting_one_reported(
    path: Path, disk: FaultyDisk, file: FileRole
) -> None:
    clients = ready(path)
    with holdfast.open(f"sqlite:///{path}?vfs={disk.vfs_name}") as store:
        clients.add(store)
        for has_reader in (True, False):
            for nth in (1, 2, 3):
                forget_pages(store, keep=has_reader)
                disk.fail_on("read", file=file, nth=nth)
                assert Counter(store).value() == 2, (has_reader, nth)
                disk.reset()
        forget_pages(store, keep=False)
        fault = disk.fail_on("read", persistent=True)
        with pytest.raises(holdfast.StoreUnavailable, match="cannot be used"):
            Counter(store).value()
        assert fault.fired > 1
        disk.reset()
        assert Counter(store).value() == 2
        clients.add(store)
        clients.judge(store)


def forget_pages(store: holdfast.Store, *, keep: bool) -> None:
    """Make the next read go to the disk, on the connection that waits or on a new one."""
    engine = engine_of(store)
    for connection in engine._idle_readers:
        connection.pragma("shrink_memory")
    while engine._idle_readers and not keep:
        engine._idle_readers.pop().close()


def test_who_waits_for_other_processes_goes_on_waiting_after_a_read_error(
    path: Path, disk: FaultyDisk
) -> None:
    with (
        holdfast.open(f"sqlite:///{path}?vfs={disk.vfs_name}") as store,
        holdfast.open(f"sqlite:///{path}") as other,
    ):
        signals = store.runtime.signals
        # Who begins to watch looks once: something may have happened just before.
        assert signals.wait("topic", signals.count("topic"), 60)
        assert not signals.wait("topic", signals.count("topic"), 0.2)
        fault = disk.fail_on("read", persistent=True)
        Counter(other).add()
        until = time.monotonic() + 60
        while fault.fired < 2:
            assert time.monotonic() < until
            time.sleep(0.01)
        seen = signals.count("topic")
        disk.reset()
        assert signals.wait("topic", seen, 60), "what was missed must be looked for"
        seen = signals.count("topic")
        Counter(other).add()
        assert signals.wait("topic", seen, 60)


def test_a_write_that_cannot_read_says_that_nothing_was_written(
    path: Path, disk: FaultyDisk
) -> None:
    clients = ready(path)
    with holdfast.open(f"sqlite:///{path}?vfs={disk.vfs_name}") as store:
        for nth in range(1, 12):
            reopen_writer(store)
            disk.fail_on("read", nth=nth, persistent=True)
            clients.add(store)
            disk.reset()
            clients.judge(store)
        clients.add(store)
        clients.judge(store)
    assert set(clients.outcomes) == {"returned", "StoreUnavailable"}
    with holdfast.open(f"sqlite:///{path}") as store:
        clients.judge(store)


@pytest.mark.parametrize("operation", ["write", "sync"])
def test_a_disk_that_fails_while_a_store_is_made_leaves_nothing_half_made(
    tmp_path: Path, disk: FaultyDisk, operation: str, report: Report
) -> None:
    """At whatever write or sync: the next opening makes the store, and nothing stays open."""
    seen: Tally[str] = Tally()
    descriptors = len(os.listdir("/proc/self/fd"))
    for nth in range(1, 200):
        path = tmp_path / f"{nth}.db"
        error = errno.ENOSPC if operation == "write" else errno.EIO
        fault = disk.fail_on(operation, nth=nth, error=error, persistent=True)  # type: ignore[arg-type]
        try:
            holdfast.open(f"sqlite:///{path}?vfs={disk.vfs_name}").close()
        except holdfast.StoreError as raised:
            seen[type(raised).__name__ if str(path) in str(raised) else "nameless"] += 1
        disk.reset()
        assert len(os.listdir("/proc/self/fd")) == descriptors, "a descriptor leaks"
        with holdfast.open(f"sqlite:///{path}") as store:
            prepare(store)
            assert Counter(store).add(1, note="first") == 1
        assert read_file(path) == ["first"]
        if not fault.fired:
            break
    report(f"{operation} failed at {nth - 1} places of opening: {dict(seen)}")
    assert nth > 3
    assert set(seen) <= {"StoreFull", "StoreUnavailable"}


# Room for a new store and its log, and for little more.
DISK_KILOBYTES = 2_048


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system that is soon full."""
    place = tmp_path / "small"
    place.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={DISK_KILOBYTES}k", "tmpfs", str(place)]
    mounted = subprocess.run(["mount", *options], check=False, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no small file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_on_a_real_file_system_that_fills_up_nothing_is_lost(
    tmp_path: Path, small_disk: Path, report: Report
) -> None:
    clients = Clients(tmp_path / "history")
    path = small_disk / "live.db"
    with ExitStack() as stack:
        store = stack.enter_context(holdfast.open(f"sqlite:///{path}"))
        prepare(store, "root", "big")
        while clients.outcomes["StoreFull"] < 10:
            clients.add(store)
            together(store, 3 * [partial(clients.add, store)])
            for error in fill(store):
                clients.outcomes[type(error).__name__] += 1
            assert sum(clients.outcomes.values()) < 10_000
        clients.judge(store)
        assert set(clients.outcomes) == {"returned", "StoreFull"}
        first = dict(clients.outcomes)
        subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
        clients.outcomes.clear()
        clients.add(store)
        together(store, 3 * [partial(clients.add, store)])
        assert fill(store) == []
        clients.judge(store)
        assert clients.outcomes == {"returned": 4}
    with holdfast.open(f"sqlite:///{path}") as store:
        clients.judge(store)
    report(f"{DISK_KILOBYTES} kB: {first}")


def test_a_backup_that_does_not_fit_says_so(tmp_path: Path, small_disk: Path) -> None:
    with holdfast.open(f"sqlite:///{tmp_path}/live.db") as store:
        store.session("s").append("t", ["x" * 1_000] * 3_000)
        with pytest.raises(holdfast.StoreFull) as raised:
            store.backup(small_disk / "copy.db")
    assert str(raised.value).startswith("no space left for ")
    assert str(raised.value).endswith("/.copy.db.partial; nothing was written")
    assert list(small_disk.iterdir()) == []


def test_a_store_cannot_be_made_where_there_is_no_room_and_can_be_later(
    small_disk: Path, report: Report
) -> None:
    filling = small_disk / "filling"
    seen: Tally[str] = Tally()
    for free_kilobytes in range(0, DISK_KILOBYTES, DISK_KILOBYTES // 50):
        filling.write_bytes(bytes((DISK_KILOBYTES - free_kilobytes) * 1024))
        path = small_disk / "live.db"
        try:
            with holdfast.open(f"sqlite:///{path}") as store:
                prepare(store)
            seen["made"] += 1
        except holdfast.StoreError as error:
            seen[type(error).__name__] += 1
        filling.unlink()
        with holdfast.open(f"sqlite:///{path}") as store:
            prepare(store)
            assert Counter(store).add() == 1
        assert read_file(path) == [""]
        for file in small_disk.iterdir():
            file.unlink()
    report(f"opened with 0 to {DISK_KILOBYTES} kB: {dict(seen)}")
    assert set(seen) == {"made", "StoreFull"}
