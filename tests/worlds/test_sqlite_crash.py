"""A process that dies while it makes the log of an SQLite file shorter costs no commit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import apsw
import pytest

from holdfast.worlds.systems import wal
from tests.worlds.shortening import KINDS, content, prepare, shorten

ROOT = Path(__file__).parents[2]


def written(snapshots: wal.WalSnapshots) -> tuple[bytes, bytes]:
    """Return the files as a process that dies now would leave them."""
    # Opening and closing them would drop the locks of this process.
    database, log = snapshots._database, snapshots._log
    return tuple(os.pread(file, os.fstat(file).st_size, 0) for file in (database, log))  # type: ignore[return-value]


@pytest.mark.parametrize("kind", KINDS)
def test_every_moment_of_it_leaves_what_was_committed(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.db"
    prepare(path)
    moments: list[tuple[bytes, bytes]] = []
    shorten(path, kind, lambda snapshots: moments.append(written(snapshots)))
    with closing(apsw.Connection(str(path))) as user:
        wanted = content(user)
    assert wanted[0] == [("ok",)]  # type: ignore[index]
    assert len({log for _, log in moments}) > 4, "it was made shorter"
    assert len({database for database, _ in moments}) > 4
    for number, (database, log) in enumerate(dict.fromkeys(moments)):
        copy = tmp_path / f"{number}.db"
        copy.write_bytes(database)
        Path(f"{copy}-wal").write_bytes(log)
        with closing(apsw.Connection(str(copy))) as found:
            assert content(found) == wanted, f"moment {number}"
            found.execute("INSERT INTO t VALUES ('goes on', 1)")


@pytest.mark.parametrize("kind", KINDS)
def test_the_database_file_is_as_before_when_the_log_is_shorter(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.db"
    prepare(path)
    files: list[bytes] = []
    shorten(path, kind, lambda snapshots: files.append(written(snapshots)[0]))
    # What is restored after it builds on the file: the last write is that of its old pages.
    assert files[-1] == files[0]


def test_a_kill_leaves_what_was_committed_to_others_that_are_connected(tmp_path: Path) -> None:
    wanted: object = None
    for nth in range(0, 1000, 5):
        path = tmp_path / f"{nth}.db"
        prepare(path)
        with closing(apsw.Connection(str(path))) as other:
            other.execute("SELECT * FROM t").fetchall()
            command = [sys.executable, "-m", "tests.worlds.shortening", str(path), "grown"]
            ended = subprocess.run([*command, str(nth)], cwd=ROOT, check=False)
            if nth == 0:
                wanted = content(other)
            assert content(other) == wanted, f"moment {nth}"
            other.execute("INSERT INTO t VALUES ('goes on', 1)")
        if ended.returncode == 0:
            break
        assert ended.returncode == -signal.SIGKILL
    assert nth > 20


def test_a_full_disk_while_it_is_made_shorter_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    prepare(path)
    states: list[tuple[bytes, bytes]] = []

    def at(snapshots: wal.WalSnapshots) -> None:
        states.append(written(snapshots))
        if len(states) == 6:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        shorten(path, "grown", at)
    # As at the first write: the log counts, and the file is what it was.
    with closing(apsw.Connection(str(path))) as user:
        assert content(user)[0] == [("ok",)]  # type: ignore[index]
        assert user.execute("SELECT count(*) FROM t WHERE a = 'long'").fetchall() == [(1,)]
