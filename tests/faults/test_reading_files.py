"""SQLite files that can only be read: on full and read-only disks, left by a crash, replaced."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import apsw
import pytest

import holdfast
from holdfast import Op, StoreMoved, StoreReadOnly, StoreUnavailable, Sync
from holdfast.kernel.operation import Handle, query, rows
from holdfast.store import check
from holdfast.testing.nouns import Counter
from tests.crash.children import Child
from tests.faults.workload import prepare

SECONDS_MAX = 300
READ = """
import json, os, sys, holdfast
# What Python itself loads on the way may not be readable to others.
holdfast.open(sys.argv[1], mode="read").close()
if os.getuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
with holdfast.open(sys.argv[1], mode="read") as store:
    found = [[each.id for each in store.sessions()]]
    try:
        store.session("new")
    except holdfast.StoreReadOnly:
        found.append("refused")
print(json.dumps(found))
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    place = tmp_path / "disk"
    place.mkdir()
    return place / "store.db"


def fill(path: Path) -> None:
    with holdfast.open(f"sqlite:///{path}") as store:
        store.session("s").save({"n": 1})


def leave(path: Path) -> None:
    """Fill a store in a process that dies, so that all it wrote lies in the log."""

    def write(say: object) -> None:
        store = holdfast.open(f"sqlite:///{path}")
        store.session("s").save({"n": 1})
        os._exit(0)

    Child(write).wait()
    assert path.with_name("store.db-wal").stat().st_size > 0


def files(path: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in path.parent.iterdir()}


def ids(path: Path) -> list[str]:
    with holdfast.open(f"sqlite:///{path}", mode="read") as store:
        return [session.id for session in store.sessions()]


def mount(place: Path, *options: str) -> None:
    done = subprocess.run(["mount", *options, str(place)], check=False, capture_output=True)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.decode().strip()}")


@pytest.fixture
def disk(path: Path) -> Iterator[Path]:
    """A real file system of 2 MB."""
    mount(path.parent, "-t", "tmpfs", "-o", "size=2m", "tmpfs")
    try:
        yield path.parent
    finally:
        subprocess.run(["umount", str(path.parent)], check=True)


def test_nothing_is_written_and_nothing_left_beside_the_file(path: Path) -> None:
    fill(path)
    path.with_name("store.db-lock").unlink()
    path.with_name("store.db-turn").unlink()
    before = files(path)
    assert ids(path) == ["s"]
    assert check(f"sqlite:///{path}")
    assert files(path) == before


def test_what_a_crash_left_in_the_log_is_read_and_stays_there(path: Path) -> None:
    leave(path)
    before = files(path)
    assert ids(path) == ["s"]
    after = files(path)
    # The shared memory of a log belongs to those who have it open.
    del before["store.db-shm"], after["store.db-shm"]
    assert after == before


@pytest.mark.parametrize("beside", ["nothing", "log", "log and memory"])
def test_a_read_only_file_system(path: Path, disk: Path, beside: str) -> None:
    if beside == "nothing":
        fill(path)
    else:
        leave(path)
    if beside == "log":
        path.with_name("store.db-shm").unlink()
    before = files(path)
    mount(disk, "-o", "remount,ro")
    with holdfast.open(f"sqlite:///{path}", mode="read") as store:
        assert [session.id for session in store.sessions()] == ["s"]
        latest = store.find_session("s").latest()
        assert latest is not None
        assert latest.channels == {"n": 1}
        with pytest.raises(StoreReadOnly):
            store.session("t")
        store.backup(disk.parent / "copy.db")
    assert ids(disk.parent / "copy.db") == ["s"]
    assert files(path) == before
    with pytest.raises(holdfast.StoreError):
        holdfast.open(f"sqlite:///{path}")


@pytest.mark.parametrize("beside", ["nothing", "log", "log and memory", "failed write"])
def test_a_full_file_system(path: Path, disk: Path, beside: str) -> None:
    if beside.startswith("log"):
        leave(path)
    else:
        fill(path)
    if beside == "log":
        path.with_name("store.db-shm").unlink()
    with (disk / "filling").open("wb", buffering=0) as filling, suppress(OSError):
        while True:
            filling.write(bytes(4096))
    assert shutil.disk_usage(disk).free == 0
    if beside == "failed write":
        with pytest.raises(holdfast.StoreFull):
            holdfast.open(f"sqlite:///{path}")
    assert ids(path) == ["s"]
    (disk / "filling").unlink()
    with holdfast.open(f"sqlite:///{path}") as store:
        store.session("t")
    assert ids(path) == ["s", "t"]


@pytest.mark.parametrize("is_live", [False, True], ids=["at rest", "live"])
@pytest.mark.parametrize("mode", [0o555, 0o777], ids=["closed directory", "open directory"])
def test_a_file_without_permission_to_write(is_live: bool, mode: int) -> None:
    directory = Path("/var/tmp", f"holdfast-reading-{os.getpid()}-{mode}-{is_live}")
    directory.mkdir()
    path = directory / "store.db"
    try:
        fill(path)
        with holdfast.open(f"sqlite:///{path}") as store:
            if is_live:
                store.session("t")
            else:
                store.close()
            for file in directory.iterdir():
                file.chmod(0o444)
            directory.chmod(mode)
            before = sorted(each.name for each in directory.iterdir())
            done = subprocess.run(
                [sys.executable, "-c", READ, f"sqlite:///{path}"],
                capture_output=True,
                text=True,
                check=False,
                timeout=SECONDS_MAX,
            )
            assert json.loads(done.stdout or "0") == [
                ["s", "t"] if is_live else ["s"],
                "refused",
            ], done.stderr
            assert sorted(each.name for each in directory.iterdir()) == before
    finally:
        directory.chmod(0o700)
        shutil.rmtree(directory)


def test_a_reader_sees_whole_states_while_writers_open_and_close_the_file(path: Path) -> None:
    """Each sum is of one moment, whether there is a log at that moment or not."""
    with holdfast.open(f"sqlite:///{path}") as store:
        prepare(store, "a", "b")

    def write(say: object) -> None:
        for _ in range(60):
            with holdfast.open(f"sqlite:///{path}", durability="normal") as store:
                store.run(both)

    def both(tx: holdfast.Transaction) -> holdfast.Op[None]:
        for root_id in ("a", "b"):
            yield from Counter.add(Counter(tx, root_id), 1, note="x" * 2_000)

    def read(tx: holdfast.Transaction) -> holdfast.Op[tuple[int, int]]:
        first = yield from Counter.value(Counter(tx, "a"))
        return first, (yield from Counter.value(Counter(tx, "b")))

    child = Child(write)
    seen = set()
    with holdfast.open(f"sqlite:///{path}", mode="read") as store:
        while os.waitpid(child.pid, os.WNOHANG) == (0, 0):
            seen.add(store.run(read))
        seen.add(store.run(read))
    child.lines.close()
    assert (60, 60) in seen
    assert {first - second for first, second in seen} == {0}
    assert len(seen) > 2


class Sums(Handle[Sync]):
    """Reads two tables that every addition changes, with an addition between the two reads."""

    def __init__(self, store: holdfast.Store, between: Callable[[], object]) -> None:
        super().__init__(store.runtime)
        self._between = between

    @query
    def read(self) -> Op[tuple[int, int]]:
        [counter] = yield from rows("SELECT value FROM hf_test_counters")
        self._between()
        [events] = yield from rows("SELECT count(*) AS n FROM hf_events")
        return counter["value"], events["n"]


def test_what_was_read_while_the_file_changed_is_read_again(path: Path) -> None:
    with holdfast.open(f"sqlite:///{path}") as store:
        prepare(store)
        Counter(store).add(1)
        before = Sums(store, lambda: None).read()

    def add(say: object) -> None:
        with holdfast.open(f"sqlite:///{path}") as store:
            Counter(store).add(1)

    additions = [add]
    with holdfast.open(f"sqlite:///{path}", mode="read") as store:
        found = Sums(store, lambda: additions and Child(additions.pop()).wait()).read()
    assert additions == []
    assert found == (before[0] + 1, before[1] + 1)


def test_a_file_that_is_replaced_is_told(path: Path) -> None:
    fill(path)
    with holdfast.open(f"sqlite:///{path}", mode="read") as store:
        store.sessions()
        other = path.with_name("other.db")
        fill(other)
        os.replace(other, path)
        with pytest.raises(StoreMoved, match="replaced"):
            store.sessions()


def test_a_transaction_that_was_cut_short_is_left_to_a_writer(path: Path) -> None:
    fill(path)

    def write(say: object) -> None:
        connection = apsw.Connection(str(path))
        connection.pragma("journal_mode", "delete")
        connection.pragma("cache_size", 1)
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("CREATE TABLE large AS SELECT randomblob(5000000)")
        os._exit(0)

    Child(write).wait()
    assert path.with_name("store.db-journal").exists()
    before = files(path)
    with pytest.raises(StoreUnavailable, match="open the store for writing once"):
        ids(path)
    assert files(path) == before
    holdfast.open(f"sqlite:///{path}").close()
    assert ids(path) == ["s"]


def test_a_forked_child_cannot_use_it_and_can_open_its_own(path: Path) -> None:
    fill(path)
    with holdfast.open(f"sqlite:///{path}") as writing:
        writing.session("t")
        with holdfast.open(f"sqlite:///{path}", mode="read") as store:
            store.sessions()

            def use(say: object) -> None:
                with pytest.raises(holdfast.StoreForked):
                    store.sessions()
                store.close()
                assert ids(path) == ["s", "t"]

            assert Child(use).wait()[0] == 0
            assert [session.id for session in store.sessions()] == ["s", "t"]
        with pytest.raises(holdfast.StoreClosed):
            store.sessions()
        store.close()
