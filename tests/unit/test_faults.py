"""What SQLite does when a commit meets a failing disk, and how its outcome can be settled."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apsw
import pytest

from holdfast.testing.faults import FaultyDisk, FileOperation
from holdfast.testing.power import PowerLog

OLD, NEW = 1, 2


@pytest.fixture
def disk() -> Iterator[FaultyDisk]:
    with FaultyDisk() as disk:
        yield disk


def connect(path: Path, vfs: str = "") -> apsw.Connection:
    connection = apsw.Connection(str(path), vfs=vfs or None)
    connection.pragma("journal_mode", "wal")
    connection.pragma("synchronous", "full")
    connection.pragma("wal_autocheckpoint", 0)
    return connection


def create(path: Path, vfs: str) -> apsw.Connection:
    connection = connect(path, vfs)
    connection.execute("CREATE TABLE t (x, filling); CREATE TABLE seal (n)")
    connection.execute("INSERT INTO seal VALUES (0); INSERT INTO t VALUES (1, '')")
    return connection


def rows(connection: apsw.Connection) -> list[Any]:
    return [x for (x,) in connection.execute("SELECT x FROM t ORDER BY x").fetchall()]


def begin_new(connection: apsw.Connection) -> None:
    connection.execute("BEGIN IMMEDIATE; INSERT INTO t VALUES (2, randomblob(9000))")


def truncate(connection: apsw.Connection) -> bool:
    """Run the checkpoint that empties the WAL, and tell whether it could."""
    ((busy, _, _),) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    return not busy


def seal(connection: apsw.Connection) -> bool:
    """Read the outcome and commit something in the same transaction."""
    connection.execute("BEGIN IMMEDIATE")
    found = NEW in rows(connection)
    connection.execute("UPDATE seal SET n = n + 1")
    connection.execute("COMMIT")
    return found


def after_a_kill(path: Path, directory: Path) -> list[Any]:
    """Return the rows that are found after every process that had the file open was killed.

    The database must be idle: reading its files here drops the locks of this process.
    """
    directory.mkdir()
    for suffix in ("", "-wal"):
        source = path.with_name(path.name + suffix)
        if source.exists():
            (directory / source.name).write_bytes(source.read_bytes())
    connection = connect(directory / path.name)
    try:
        return rows(connection)
    finally:
        connection.close()


@dataclass(frozen=True)
class Failure:
    """One error of the disk and what apsw makes of it."""

    operation: FileOperation
    error: int
    raised: type[apsw.Error]
    code: int


FAILURES = [
    Failure("sync", errno.EIO, apsw.IOError, apsw.SQLITE_IOERR_FSYNC),
    Failure("write", errno.EIO, apsw.IOError, apsw.SQLITE_IOERR_WRITE),
    Failure("write", errno.ENOSPC, apsw.FullError, apsw.SQLITE_FULL),
]


@pytest.mark.parametrize("after_effect", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("failure", FAILURES, ids=["fsync", "write", "full"])
def test_a_failed_commit_ends_the_transaction_and_is_gone_once_all_have_closed(
    tmp_path: Path, disk: FaultyDisk, failure: Failure, after_effect: bool
) -> None:
    path = tmp_path / "a.db"
    connection = create(path, disk.vfs_name)
    begin_new(connection)
    fault = disk.fail_on(
        failure.operation, file="wal", error=failure.error, after_effect=after_effect
    )
    with pytest.raises(failure.raised) as caught:
        connection.execute("COMMIT")
    error: Any = caught.value
    assert (error.result, error.extendedresult) == (failure.code & 0xFF, failure.code)
    assert fault.fired == 1
    assert not connection.in_transaction
    assert rows(connection) == [OLD]
    connection.close()
    connection = connect(path, disk.vfs_name)
    assert rows(connection) == [OLD]
    connection.close()


def test_the_next_statement_after_a_failure_inside_a_transaction_commits_alone(
    tmp_path: Path, disk: FaultyDisk
) -> None:
    connection = create(tmp_path / "a.db", disk.vfs_name)
    connection.pragma("cache_size", 5)
    connection.execute("BEGIN IMMEDIATE; SAVEPOINT job")
    disk.fail_on("write", file="wal", error=errno.ENOSPC)
    many = [(number,) for number in range(100, 200)]
    with pytest.raises(apsw.FullError):
        connection.executemany("INSERT INTO t VALUES (?, randomblob(3000))", many)
    assert not connection.in_transaction
    connection.execute("INSERT INTO t VALUES (999, '')")
    with pytest.raises(apsw.SQLError, match="no transaction is active"):
        connection.execute("COMMIT")
    assert rows(connection) == [OLD, 999]
    connection.close()


@pytest.mark.parametrize("after_effect", [False, True], ids=["before", "after"])
def test_a_commit_that_failed_comes_back_when_all_are_killed_while_another_had_it_open(
    tmp_path: Path, disk: FaultyDisk, after_effect: bool
) -> None:
    path = tmp_path / "a.db"
    connection, other = create(path, disk.vfs_name), connect(path, disk.vfs_name)
    assert rows(other) == [OLD]
    begin_new(connection)
    disk.fail_on("sync", file="wal", after_effect=after_effect)
    with pytest.raises(apsw.IOError):
        connection.execute("COMMIT")
    connection.close()
    connection = connect(path, disk.vfs_name)
    assert rows(connection) == rows(other) == [OLD]
    assert after_a_kill(path, tmp_path / "killed") == [OLD, NEW]
    connection.close()
    other.close()


def test_a_commit_that_failed_is_found_when_the_last_close_cannot_checkpoint(
    tmp_path: Path, disk: FaultyDisk
) -> None:
    path = tmp_path / "a.db"
    connection = create(path, disk.vfs_name)
    begin_new(connection)
    disk.fail_on("sync", persistent=True)
    with pytest.raises(apsw.IOError):
        connection.execute("COMMIT")
    with pytest.raises(apsw.IOError):  # A real disk's error is ignored here.
        connection.close(force=True)
    disk.reset()
    connection = connect(path, disk.vfs_name)
    assert rows(connection) == [OLD, NEW]
    connection.close()


def test_a_reader_keeps_the_truncating_checkpoint_from_settling_a_commit(
    tmp_path: Path, disk: FaultyDisk
) -> None:
    path = tmp_path / "a.db"
    connection, reader = create(path, disk.vfs_name), connect(path, disk.vfs_name)
    reader.execute("BEGIN")
    assert rows(reader) == [OLD]
    begin_new(connection)
    disk.fail_on("sync", file="wal")
    with pytest.raises(apsw.IOError):
        connection.execute("COMMIT")
    connection.close()
    connection = connect(path, disk.vfs_name)
    assert not truncate(connection)
    assert rows(connection) == [OLD]
    assert after_a_kill(path, tmp_path / "unsettled") == [OLD, NEW]
    assert seal(connection) is False
    assert after_a_kill(path, tmp_path / "settled") == [OLD]
    reader.execute("ROLLBACK")
    reader.close()
    connection.close()


def test_a_failing_automatic_checkpoint_raises_from_a_commit_that_succeeded(
    tmp_path: Path, disk: FaultyDisk
) -> None:
    connection = create(tmp_path / "a.db", disk.vfs_name)
    connection.pragma("wal_autocheckpoint", 1)
    begin_new(connection)
    disk.fail_on("sync", file="db")
    with pytest.raises(apsw.IOError):
        connection.execute("COMMIT")
    assert rows(connection) == [OLD, NEW]
    connection.close()


def test_faults_are_counted_one_shot_or_persistent_and_can_be_reset(
    tmp_path: Path, disk: FaultyDisk
) -> None:
    connection = create(tmp_path / "a.db", disk.vfs_name)
    disk.reset()
    fault = disk.fail_on("sync", nth=2, file="wal", persistent=True)
    insert = "INSERT INTO t VALUES (3, '')"
    connection.execute(insert)
    for _ in range(2):
        with pytest.raises(apsw.IOError):
            connection.execute(insert)
    assert fault.fired == 2
    assert disk.counts["sync", "wal"] == 3
    assert disk.counts["sync", "db"] == 0
    disk.reset()
    connection.execute(insert)
    assert disk.counts["sync", "wal"] == 1
    assert rows(connection) == [1, 3, 3]
    with pytest.raises(ValueError, match="EIO"):
        disk.fail_on("sync", error=errno.EACCES)
    connection.close()


def test_one_shot_faults_strike_once_among_many_threads(tmp_path: Path, disk: FaultyDisk) -> None:
    path = tmp_path / "a.db"
    create(path, disk.vfs_name).close()
    fault = disk.fail_on("sync", nth=5, file="wal")
    failures: list[apsw.Error] = []

    def write(number: int) -> None:
        connection = connect(path, disk.vfs_name)
        connection.set_busy_timeout(10_000)
        for step in range(10):
            try:
                connection.execute("INSERT INTO t VALUES (?, '')", (number * 100 + step,))
            except apsw.IOError as error:
                failures.append(error)
        connection.close()

    keeper = connect(path, disk.vfs_name)
    threads = [threading.Thread(target=write, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(failures) == fault.fired == 1
    assert len(rows(keeper)) == 1 + 40 - 1
    keeper.close()


def read_only_settlement(connection: apsw.Connection) -> bool | None:
    truncate(connection)
    return NEW in rows(connection)


def sealed_settlement(connection: apsw.Connection) -> bool | None:
    """Empty the WAL, then commit; None if the row is there but readers kept the WAL."""
    truncated = truncate(connection)
    found = seal(connection)
    return None if found and not truncated else found


def settlement_sealed_too_early(connection: apsw.Connection) -> bool | None:
    found = seal(connection)
    return None if found and not truncate(connection) else found


@dataclass(frozen=True)
class Case:
    """One way in which a COMMIT can fail and be settled."""

    operation: FileOperation
    nth: int
    after_effect: bool
    others: str
    close_fails: bool
    doubtful: bool


def changes_of_mind(
    case: Case, directory: Path, settle: Callable[[apsw.Connection], bool | None]
) -> int:
    """Fail a COMMIT, settle it, and count the power cuts after which the answer is wrong."""
    path = directory / "a.db"
    with ExitStack() as stack:
        if case.doubtful:
            disk = stack.enter_context(FaultyDisk())
            log = stack.enter_context(PowerLog(base=disk.vfs_name))
            vfs = log.vfs_name
        else:
            log = stack.enter_context(PowerLog())
            disk = stack.enter_context(FaultyDisk(base=log.vfs_name))
            vfs = disk.vfs_name
        connection = create(path, vfs)
        other = None if case.others == "none" else connect(path, vfs)
        if other is not None:
            other.execute("BEGIN" if case.others == "pinned" else "SELECT 1")
            assert rows(other) == [OLD]
        begin_new(connection)
        disk.fail_on(case.operation, nth=case.nth, file="wal", after_effect=case.after_effect)
        with pytest.raises(apsw.IOError):
            connection.execute("COMMIT")
        if case.close_fails:
            disk.fail_on("sync", persistent=True)
        with suppress(apsw.IOError):
            connection.close()
        disk.reset()
        connection = connect(path, vfs)
        answer = settle(connection)
        log.mark("settled")
        connection.execute("INSERT INTO t VALUES (3, '')")
        log.mark("acknowledged", 3)
        if other is not None:
            other.close()
        connection.close()
    wrong = judged = 0
    for image in log.images(per_cut=12):
        if ("settled", None) not in image.marks:
            continue
        judged += 1
        connection = apsw.Connection(str(image.write_to(directory)))
        found = rows(connection)
        connection.close()
        wrong += OLD not in found or (answer is not None and (NEW in found) != answer)
        wrong += any(value not in found for value in image.acknowledged)
    assert judged >= 10
    return wrong


# A frame is two writes: after the eighth the whole transaction is in the WAL.
FAILING: list[tuple[FileOperation, int]] = [("sync", 1), ("write", 8)]
CASES = [
    Case(operation, nth, after_effect, others, close_fails, doubtful)
    for operation, nth in FAILING
    for after_effect in (False, True)
    for others, close_fails in (("none", False), ("none", True), ("idle", False), ("pinned", False))
    for doubtful in (False, True)
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_settlement_that_commits_is_final_also_after_power_loss(
    case: Case, tmp_path: Path
) -> None:
    assert changes_of_mind(case, tmp_path, sealed_settlement) == 0


@pytest.mark.parametrize(
    ("settle", "case"),
    [
        (read_only_settlement, Case("sync", 1, True, "idle", False, False)),
        (read_only_settlement, Case("sync", 1, False, "pinned", False, False)),
        (read_only_settlement, Case("sync", 1, False, "none", True, True)),
        # The truncation itself is not synced, so the old WAL can come back without its end.
        (settlement_sealed_too_early, Case("sync", 1, False, "none", True, True)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_settlement_without_a_commit_at_its_end_can_be_wrong_after_power_loss(
    settle: Callable[[apsw.Connection], bool | None], case: Case, tmp_path: Path
) -> None:
    assert changes_of_mind(case, tmp_path, settle) > 0


def test_a_checkpoint_that_could_not_sync_loses_nothing(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    with FaultyDisk() as disk, PowerLog(base=disk.vfs_name) as log:
        connection = create(tmp_path / "a.db", log.vfs_name)
        connection.pragma("wal_autocheckpoint", 4)
        for number in range(10, 40):
            if number % 3 == 0:
                disk.fail_on("sync", file="db")
            with suppress(apsw.IOError):  # The commit succeeds; only its checkpoint fails.
                connection.execute("INSERT INTO t VALUES (?, randomblob(2000))", (number,))
            log.mark("acknowledged", number)
        disk.reset()
        connection.close()
    assert any(operation.kind == "sync_failed" for operation in log.operations)
    for image in log.images(per_cut=4):
        if not image.acknowledged:
            continue
        connection = apsw.Connection(str(image.write_to(tmp_path / "images")))
        assert connection.pragma("integrity_check") == "ok", image.name
        assert set(image.acknowledged) <= set(rows(connection)), image.name
        connection.close()
