"""A database file that is deleted, renamed or replaced under an open store is noticed in time."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import StoreMoved
from holdfast.kernel.sqlite import transactions as files
from holdfast.testing.nouns import Counter
from tests.crash.children import Child
from tests.faults.workload import found_in, in_threads, prepare, read_file, together
from tests.internals import engine_of


def delete(path: Path) -> None:
    path.unlink()


def rename(path: Path) -> None:
    path.rename(path.with_name("elsewhere.db"))


def rename_directory(path: Path) -> None:
    path.parent.rename(path.parent.with_name(f"{path.parent.name}-elsewhere"))


def replace(path: Path) -> None:
    """Put another database in its place, with files of its own beside it."""
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    other = path.with_name("other.db")
    with holdfast.open(f"sqlite:///{other}") as store:
        prepare(store)
        Counter(store).add(1, note="other")
    os.replace(other, path)


def delete_beside(suffix: str) -> Callable[[Path], None]:
    def act(path: Path) -> None:
        path.with_name(path.name + suffix).unlink()

    act.__name__ = f"delete{suffix}"
    return act


ACTS = [delete, rename, rename_directory, replace, delete_beside("-wal"), delete_beside("-shm")]
acts = pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)


@pytest.fixture
def path(tmp_path: Path, template: Path) -> Path:
    inside = tmp_path / "inside"
    inside.mkdir()
    return Path(shutil.copy(template, inside))


def settle(store: holdfast.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write until the store relies on its directory, which has not changed for a while."""
    monkeypatch.setattr(files, "SETTLED_MS", 100)
    engine: Any = engine_of(store)
    while engine.writer.files._settled is None:
        Counter(store).add(1, note="settled")


@acts
@pytest.mark.parametrize("written", ["nothing", "once", "until settled"])
def test_no_write_is_acknowledged_and_the_store_stops(
    path: Path, act: Callable[[Path], None], written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holdfast.open(f"sqlite:///{path}") as store:
        if written == "once":
            Counter(store).add(1, note="before")
        elif written == "until settled":
            settle(store, monkeypatch)
        act(path)
        with pytest.raises(StoreMoved, match="deleted, renamed or replaced"):
            Counter(store).add(1, note="after")
        # The store says so from then on, whatever is asked, on whichever way.
        refused: list[StoreMoved] = []

        def ask(function: Callable[[], object]) -> Callable[[], None]:
            def run() -> None:
                with pytest.raises(StoreMoved) as error:
                    function()
                refused.append(error.value)

            return run

        in_threads([ask(Counter(store).value), ask(lambda: store.session("s"))])
        assert len(refused) == 2


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm"])
def test_times_of_a_coarse_file_system_hide_no_change(
    path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two changes of the directory within one tick of its file system look like one."""

    def coarse(name: str) -> Any:
        try:
            status = os.stat(name)
        except OSError:
            return None
        tick = status.st_ctime_ns // 2_000_000_000 * 2_000_000_000
        return status.st_dev, status.st_ino, tick

    monkeypatch.setattr(files, "file_status", coarse)
    with holdfast.open(f"sqlite:///{path}") as store:
        Counter(store).add(1, note="before")
        path.with_name(path.name + suffix).unlink()
        with pytest.raises(StoreMoved):
            Counter(store).add(1, note="after")


def test_a_file_that_comes_and_goes_beside_the_database_changes_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holdfast.open(f"sqlite:///{path}") as store:
        settle(store, monkeypatch)
        path.with_name("beside").touch()
        Counter(store).add(1, note="after")
        settle(store, monkeypatch)
        path.with_name("beside").unlink()
        Counter(store).add(1, note="after")
        assert found_in(store).count("after") == 2


@acts
def test_calls_that_share_a_commit_are_all_refused(path: Path, act: Callable[[Path], None]) -> None:
    refused: list[int] = []

    def add() -> None:
        with pytest.raises(StoreMoved):
            Counter(store).add(1, note="after")
        refused.append(1)

    with holdfast.open(f"sqlite:///{path}") as store:
        Counter(store).add(1, note="before")
        act(path)
        together(store, 3 * [add])
    assert len(refused) == 3


@acts
def test_an_async_store_is_refused_alike(path: Path, act: Callable[[Path], None]) -> None:
    async def run() -> None:
        async with await holdfast.aopen(f"sqlite:///{path}") as store:
            await Counter(store).add(1, note="before")
            act(path)
            with pytest.raises(StoreMoved):
                await Counter(store).add(1, note="after")

    asyncio.run(run())


def test_a_new_reader_does_not_read_what_has_taken_the_place(path: Path) -> None:
    with holdfast.open(f"sqlite:///{path}") as store:
        Counter(store).add(1, note="before")
        engine: Any = engine_of(store)
        replace(path)
        engine._idle_readers.clear()
        with pytest.raises(StoreMoved):
            Counter(store).value()


def test_a_file_that_took_the_place_is_not_touched(path: Path) -> None:
    with holdfast.open(f"sqlite:///{path}") as store:
        Counter(store).add(1, note="before")
        replace(path)
        with holdfast.open(f"sqlite:///{path}") as other:
            Counter(other).add(1, note="second")
            with pytest.raises(StoreMoved):
                Counter(store).add(1, note="after")
            store.close()
            Counter(other).add(1, note="third")
            assert found_in(other) == ["other", "second", "third"]
    assert read_file(path) == ["other", "second", "third"]


def test_what_was_acknowledged_is_in_a_renamed_file_once_the_store_is_closed(path: Path) -> None:
    with holdfast.open(f"sqlite:///{path}") as store:
        Counter(store).add(1, note="before")
        rename(path)
        with pytest.raises(StoreMoved):
            Counter(store).add(1, note="after")
    assert read_file(path.with_name("elsewhere.db")) == ["before"]


class Other:
    """A process that has the store open and does the next thing when it is told to."""

    def __init__(self, path: Path) -> None:
        heard, self._told = os.pipe()

        def run(say: Callable[[str], None]) -> None:
            os.close(self._told)
            with holdfast.open(f"sqlite:///{path}") as store:
                Counter(store).add(1, note="child")
                say("ready")
                os.read(heard, 1)
                with pytest.raises(StoreMoved):
                    Counter(store).add(1, note="lost")
                say("refused")
                os.read(heard, 1)

        self._child = Child(run)
        assert self._child.lines.readline() == "ready\n"

    def is_refused(self) -> bool:
        os.write(self._told, b"!")
        return self._child.lines.readline() == "refused\n"

    def end(self) -> None:
        os.close(self._told)
        assert self._child.wait() == (0, [])


@pytest.mark.parametrize("suffix", ["-wal", "-shm"])
def test_files_deleted_beside_a_database_of_several_processes_do_not_destroy_it(
    path: Path, suffix: str
) -> None:
    """Without the check the writers overwrite each other's commits in the WAL."""
    url = f"sqlite:///{path}"
    child = Other(path)
    with holdfast.open(url) as store:
        # What the child wrote is in the database itself: -wal alone may be deleted then.
        engine: Any = engine_of(store)
        with engine._locked():
            engine.writer._checkpoint()
        path.with_name(path.name + suffix).unlink()
        with pytest.raises(StoreMoved, match=suffix):
            Counter(store).add(1, note="lost")
        with holdfast.open(url) as third:
            Counter(third).add(1, note="third")
            assert child.is_refused()
            store.close()
            child.end()
            Counter(third).add(1, note="fourth")
    assert read_file(path) == ["child", "third", "fourth"]


def test_a_file_with_two_names_is_not_opened(path: Path) -> None:
    """Each name would have a WAL of its own, and a commit in one is not seen in the other."""
    other = path.with_name("other.db")
    with holdfast.open(f"sqlite:///{path}") as store:
        Counter(store).add(1, note="before")
        os.link(path, other)
        for name in (path, other):
            with pytest.raises(holdfast.StoreError, match=r"has 2 names \(hard links\)"):
                holdfast.open(f"sqlite:///{name}")
        assert not other.with_name("other.db-wal").exists()
        assert Counter(store).add(1, note="after") == 2
    other.unlink()
    with holdfast.open(f"sqlite:///{path}") as store:
        assert Counter(store).value() == 2
