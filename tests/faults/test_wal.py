"""The write-ahead log is moved into the database while others write, and begun again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import apsw
import pytest

import holdfast
from holdfast.kernel.sqlite.side_lock import SideLock
from holdfast.kernel.sqlite.transactions import Writer
from holdfast.testing.subject import Colour, Subject, done
from tests.faults.workload import moving_the_log_every
from tests.internals import engine_of

PAGES = 40
PAGE_BYTES = 4_200
WRITES = 150


def log_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_nothing_is_locked_while_the_log_is_moved(
    path: Path, colour: Colour, monkeypatch: pytest.MonkeyPatch
) -> None:
    def moving(writer: Writer, reader: apsw.Connection) -> None:
        other = SideLock(path)
        free.append(other.try_acquire())
        other.close()
        move(writer, reader)

    async def write() -> None:
        subject = Subject({"url": f"sqlite:///{path}"}, colour, path.parent)
        session = await done((await subject.open()).session("s"))
        for number in range(WRITES):
            await done(session.append("log", [number]))
        await subject.close()

    free: list[bool] = []
    move = Writer.move_wal_beside
    monkeypatch.setattr(Writer, "move_wal_beside", moving)
    with moving_the_log_every(PAGES):
        asyncio.run(write())
    assert len(free) > 5
    assert all(free)


def test_a_commit_moves_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Writer, "move_wal_beside", lambda writer, reader: None)
    with holdfast.open(f"sqlite:///{path}") as store:
        session = store.session("s")
        size = path.stat().st_size
        while log_of(path).stat().st_size < 3_000 * PAGE_BYTES:
            session.save(text="x" * 1_000_000)
        assert path.stat().st_size == size


def test_the_log_is_begun_again_although_others_write_while_it_is_moved(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def moving(writer: Writer, reader: apsw.Connection) -> None:
        # A transaction that began before, and ends afterwards.
        with engine_of(other).bulk() as connection:
            connection.execute("UPDATE hf_sessions SET updated_at = updated_at + 1")
            move(writer, reader)
        sizes.append(log_of(path).stat().st_size)

    sizes: list[int] = []
    move = Writer.move_wal_beside
    url = f"sqlite:///{path}"
    with moving_the_log_every(PAGES), holdfast.open(url) as store, holdfast.open(url) as other:
        session = store.session("s")
        monkeypatch.setattr(Writer, "move_wal_beside", moving)
        for number in range(WRITES):
            session.append("log", [number])
        assert len(sizes) > 5
        assert max(sizes) < 5 * PAGES * PAGE_BYTES


def test_a_reader_that_needs_the_log_keeps_no_writer_waiting(path: Path) -> None:
    with moving_the_log_every(PAGES), holdfast.open(f"sqlite:///{path}") as store:
        session = store.session("s")
        engine = engine_of(store)
        with engine._lend() as reader:
            reader.execute("BEGIN")
            before = reader.execute("SELECT count(*) FROM hf_checkpoints").fetchall()
            for number in range(WRITES):
                session.append("log", [number])
                assert engine.writer._is_wal_moved
            assert reader.execute("SELECT count(*) FROM hf_checkpoints").fetchall() == before
            reader.execute("ROLLBACK")
        assert log_of(path).stat().st_size > 5 * PAGES * PAGE_BYTES
