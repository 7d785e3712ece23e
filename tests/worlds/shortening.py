"""A log that is made shorter, by a process that can be killed at each of its writes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw

from holdfast.worlds.systems import wal

WRITES = ("pwrite", "ftruncate", "fsync")
KINDS = ("grown", "shrunk", "with older frames")


class Watched:
    """The module `os`, with a function that is called before, amid and after each write."""

    def __init__(self, at: Callable[[], None]) -> None:
        self._at = at

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in WRITES:
            return real

        def write(file: int, *arguments: Any) -> Any:
            self._at()
            if name == "pwrite":
                content, place = arguments
                # A process can die when only a part of it is written.
                os.pwrite(file, content[: len(content) // 2], place)
                self._at()
            return real(file, *arguments)

        return write


def prepare(path: Path) -> None:
    """Make the file, with a log."""
    with closing(apsw.Connection(str(path))) as made:
        made.pragma("page_size", 512)
        made.pragma("journal_mode", "wal")
        made.execute("CREATE TABLE t (a PRIMARY KEY, b); CREATE TABLE filling (c)")
        made.executemany("INSERT INTO filling VALUES (?)", [(bytes(400),)] * 20)


def shorten(path: Path, kind: str, at: Callable[[wal.WalSnapshots], None]) -> None:
    """Have much written, and a checkpoint that makes the log shorter."""
    with (
        closing(apsw.Connection(str(path))) as user,
        closing(apsw.Connection(str(path))) as own,
    ):
        own.pragma("wal_autocheckpoint", 0)
        user.pragma("wal_autocheckpoint", 0)
        user.execute("SELECT * FROM t").fetchall()
        if kind == "with older frames":
            user.execute("INSERT INTO t VALUES ('older', zeroblob(600))")
        own.execute("SELECT * FROM t").fetchall()
        snapshots = wal.WalSnapshots(path, own, 1, long_bytes=10**9)
        try:
            snapshots.checkpoint()
            for number in range(30):
                user.execute("INSERT OR REPLACE INTO t VALUES (?, ?)", (number % 3, number))
            if kind == "grown":
                user.execute("INSERT INTO t VALUES ('long', zeroblob(3000))")
            elif kind == "shrunk":
                user.execute("DELETE FROM filling")
                user.execute("VACUUM")
            snapshots._long_bytes = 0
            module: Any = wal
            module.os = Watched(lambda: at(snapshots))
            try:
                snapshots.checkpoint()
            finally:
                module.os = os
            own.close()
        finally:
            snapshots.close()


def content(connection: apsw.Connection) -> object:
    """Return all that is in the file, which is sound."""
    check = connection.execute("PRAGMA integrity_check").fetchall()
    rows = connection.execute("SELECT a, hex(b) FROM t ORDER BY a").fetchall()
    filling = connection.execute("SELECT count(*) FROM filling").fetchall()
    return [check, rows, filling]


def main(path: str, kind: str, nth: str) -> None:
    """Die at the nth moment."""
    left = int(nth)

    def at(snapshots: object) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    shorten(Path(path), kind, at)


if __name__ == "__main__":
    main(*sys.argv[1:])
