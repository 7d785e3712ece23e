"""What an SQLite store refuses to stand on, and the settings that keep its promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import apsw
import pytest

import holdfast
from holdfast.kernel.sqlite import connection as sqlite
from holdfast.kernel.sqlite import transactions
from holdfast.testing.nouns import Counter
from tests.internals import engine_of


@pytest.mark.parametrize("version", ["3.40.1", "3.50.6", "3.51.2", "3.44.5"])
def test_a_library_that_can_lose_commits_is_refused_at_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(apsw, "sqlite_lib_version", lambda: version)
    with pytest.raises(holdfast.StoreError, match=f"SQLite {version} can lose commits"):
        holdfast.open(f"sqlite:///{tmp_path}/store.db")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", sorted(sqlite.NETWORK_FILE_SYSTEMS))
def test_a_network_file_system_is_refused_at_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    mounts = f"/dev/vda / ext4 rw 0 0\nserver:/x {tmp_path} {kind} rw 0 0\n"
    read_text = Path.read_text

    def read(path: Path, *arguments: Any, **keywords: Any) -> str:
        is_asked = str(path) == "/proc/self/mounts"
        return mounts if is_asked else read_text(path, *arguments, **keywords)

    monkeypatch.setattr(Path, "read_text", read)
    (tmp_path / "inside").mkdir()
    for directory in (tmp_path, tmp_path / "inside"):
        with pytest.raises(holdfast.StoreError, match=f"is on a {kind} file system"):
            holdfast.open(f"sqlite:///{directory}/store.db")
    assert [path.name for path in tmp_path.rglob("*")] == ["inside"]


@pytest.fixture
def connections(path: Path) -> Any:
    """The writing and a reading connection of an open store."""
    with holdfast.open(f"sqlite:///{path}") as store:
        Counter(store).add(1, note="one")
        engine: Any = engine_of(store)
        with engine._lend() as reader:
            yield engine.writer.connection, reader


def test_a_reading_connection_cannot_write(connections: Any) -> None:
    writer, reader = connections
    for statement in ("DELETE FROM hf_meta", "CREATE TABLE t (x)", "PRAGMA user_version = 1"):
        with pytest.raises(apsw.ReadOnlyError):
            reader.execute(statement)
    assert writer.pragma("query_only") == 0


def test_a_schema_is_not_trusted_and_no_database_is_attached(
    connections: Any, tmp_path: Path
) -> None:
    for connection in connections:
        with pytest.raises(apsw.SQLError, match="too many attached"):
            connection.execute("ATTACH ? AS other", (str(tmp_path / "other.db"),))
        assert connection.pragma("trusted_schema") == 0
    writer, _ = connections
    # A view that a hostile file brings along cannot call what has effects of its own.
    writer.create_scalar_function("effect", lambda: 1)
    writer.execute("CREATE TEMP TABLE x (y)")
    writer.execute("CREATE VIEW hostile AS SELECT effect()")
    with pytest.raises(apsw.SQLError, match="unsafe use of effect"):
        writer.execute("SELECT * FROM hostile").fetchall()
    assert list((tmp_path).glob("other.db")) == []


def test_the_log_is_given_back_once_a_long_reader_is_gone(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transactions, "WAL_BYTES_KEPT", 2**18)
    monkeypatch.setattr(transactions, "WAL_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(transactions, "WAL_WAIT_MS", 1)
    log = path.with_name(f"{path.name}-wal")
    with holdfast.open(f"sqlite:///{path}", durability="normal") as store:
        session = store.session("s")
        engine: Any = engine_of(store)
        with engine._lend() as reader:
            reader.execute("BEGIN")
            before = reader.execute("SELECT count(*) FROM hf_checkpoints").fetchall()
            while log.stat().st_size < 2**22:
                session.save(text="x" * 100_000)
            session.save(text="x")
            assert log.stat().st_size >= 2**22
            assert reader.execute("SELECT count(*) FROM hf_checkpoints").fetchall() == before
            reader.execute("ROLLBACK")
        # One moves what is in the log, without a lock; the next one truncates it.
        session.save(text="x")
        session.save(text="y")
        assert log.stat().st_size <= 2**18
        newest = session.latest()
        assert newest is not None
        assert newest["text"] == "y"
        assert engine.writer.connection.pragma("busy_timeout") == sqlite.BUSY_MS
