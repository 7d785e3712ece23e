"""Snapshots of an SQLite file in WAL mode that other processes use, as pieces of its log.

A lock that every process respects keeps the database file as it is: nobody can copy the log back
into it, and nobody can restart the log. So everything that is committed is in the log, and a
snapshot is a length of it. A rollback truncates the log where the two histories diverge, appends
what the other one wrote, and marks the index of the log as invalid; the next reader reads the log
again, as after a crash. Each frame carries a running checksum over all frames before it, so SQLite
itself would notice a piece in the wrong place.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import apsw

from ...errors import CheckpointInvalid, SystemBusy
from ..tree import Node, SnapshotTree
from .wal_frames import (
    FRAME_HEADER_BYTES,
    HEADER_BYTES,
    checksum_before,
    is_readable,
    latest_pages,
    shortened,
)

_HEADER_BYTES: Final = 48
_SALTS: Final = slice(16, 24)
# The offsets of locks in the index of the log, and in the database file.
_WRITE_TO_RECOVER: Final = (120, 3)
_READ_ZERO: Final = (123, 1)
_READERS: Final = (124, 4)
_SHARED: Final = (0x4000_0002, 510)
_LOCK: Final = "hhqqi4x"
_CHUNK_BYTES: Final = 1 << 20
_PAUSE_SECONDS: Final = 0.002
# SQLite reads the log again after each rollback, so one that is longer is written again, shorter.
LONG_BYTES: Final = 4 << 20
BASE: Final = "base"
IS_SUPPORTED: Final = hasattr(fcntl, "F_OFD_SETLK")


@dataclass(frozen=True, slots=True)
class Piece:
    """What was appended to the log, its length after that, and the schema version there."""

    content: bytes
    end: int
    schema: int


class _Pieces(SnapshotTree[Piece]):
    def fold(self, first: Piece, second: Piece) -> Piece:
        return Piece(first.content + second.content, second.end, second.schema)

    def rebase(self, base: Piece, changes: Piece) -> Piece:
        return Piece(b"", changes.end, changes.schema)

    def is_empty(self, changes: Piece) -> bool:
        return not changes.content


class WalSnapshots:
    """Snapshots of one file; the connection is this process's own, and is open all the time.

    The descriptors are closed after the connection: closing one drops the locks of this process.
    """

    def __init__(
        self,
        path: Path,
        connection: apsw.Connection,
        wait_seconds: float,
        long_bytes: int | None = None,
    ) -> None:
        self._connection = connection
        self._wait_seconds = wait_seconds
        self._path = path
        self._files: list[int] = []
        try:
            self._database, self._log, self._index = (
                self._opened(f"{path}{suffix}") for suffix in ("", "-wal", "-shm")
            )
            _lock(self._database, fcntl.F_RDLCK, _SHARED)
            _lock(self._index, fcntl.F_RDLCK, _READ_ZERO)
            # With a frame that is not in the database file, nobody can restart the log.
            version = connection.pragma("user_version")
            connection.pragma("user_version", version)
            end = self._end()
            self._salts = os.pread(self._log, HEADER_BYTES, 0)[_SALTS]
            self._schema_max = self._schema()
            self._tree = _Pieces(Piece(b"", end, self._schema_max))
            self._least_bytes = LONG_BYTES if long_bytes is None else long_bytes
            self._long_bytes = self._least_bytes
        except BaseException:
            self.close()
            raise

    def checkpoint(self) -> int:
        """Keep what was committed since the head."""
        pending = self._pending()
        length = pending.end - self._tree.first.changes.end
        if length > self._long_bytes and not self._tree.is_empty(pending):
            with suppress(SystemBusy):
                self._shorten(pending.end)
            pending = self._pending()
        return self._tree.add(pending)

    def prepare(self, token: int) -> None:
        """Raise unless the token is known and no open transaction prevents a rollback."""
        self._tree.find(token)
        with self._alone(self._wait_seconds):
            self._require_same_log()

    def rollback(self, token: int) -> None:
        """Truncate the log, and append what leads to the target."""
        target = self._tree.find(token)
        schema = self._schema()
        with self._alone(self._wait_seconds):
            self._require_same_log()
            self._rewrite(target)
        self._tree.move(target)
        self._schema_max = max(self._schema_max, schema)
        if schema != target.changes.schema:
            # Two branches could have the same number for different schemas, and a connection
            # that knows one of them would read the other's tables by it.
            self._connection.pragma("schema_version")
            self._schema_max += 1
            self._connection.pragma("schema_version", self._schema_max)

    def release(self, token: int) -> None:
        """Forget a snapshot."""
        self._tree.release(token)

    def keep(self, token: int, folder: Path) -> list[str]:
        """Write what is not there yet to a folder: the database file, and pieces of the log.

        Return the names of the pieces. The file does not change while it is locked, and the log
        not before the first snapshot.
        """
        path = [self._tree.find(token)]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        first, *others = path[::-1]
        start = f"0-{first.changes.end}"
        # Opening and closing the files again would drop the locks of this process.
        _write(folder / BASE, _read(self._database, os.fstat(self._database).st_size))
        _write(folder / start, _read(self._log, first.changes.end))
        names = [start]
        for node in others:
            piece = node.changes
            # A piece grows when the one before it is released.
            names.append(f"{node.number}-{piece.end}-{len(piece.content)}")
            _write(folder / names[-1], [piece.content])
        return names

    def close(self) -> None:
        """Release the log: from now on it is copied into the file as usual."""
        for file in self._files:
            os.close(file)
        self._files.clear()

    def _opened(self, name: str) -> int:
        file = os.open(name, os.O_RDWR | os.O_CLOEXEC)
        self._files.append(file)
        return file

    def _schema(self) -> int:
        return int(self._connection.pragma("schema_version"))

    def _pending(self) -> Piece:
        start, end = self._tree.head.changes.end, self._end()
        return Piece(os.pread(self._log, end - start, start), end, self._schema())

    def _shorten(self, end: int) -> None:
        """Rewrite the log after the first snapshot, with one frame for each page.

        The next snapshot follows on the first one then, as if nothing had come between them.
        """
        first = self._tree.first
        start = first.changes.end
        page_bytes = self._page_bytes()
        size = FRAME_HEADER_BYTES + page_bytes
        header = os.pread(self._log, HEADER_BYTES, 0)
        if not is_readable(header):
            return
        with self._alone(0), self._unread():
            self._require_same_log()
            if self._indexed_end() != end:
                return
            frames = os.pread(self._log, end - start, start)
            before = b"" if start == HEADER_BYTES else os.pread(self._log, size, start - size)
            content = shortened(frames, page_bytes, checksum_before(header, before))
            # A log in which all pages differ cannot be shortened; try again when it has doubled.
            self._long_bytes = max(self._least_bytes, 2 * len(content))
            if 2 * len(content) > len(frames):
                return
            # From here on all of it is what came after the first snapshot, in either form.
            self._tree.move(first)
            os.pwrite(self._index, bytes(2 * _HEADER_BYTES), 0)
            log = os.pread(self._log, end - HEADER_BYTES, HEADER_BYTES)
            with self._written_to_file(latest_pages(log, page_bytes), page_bytes):
                self._replace_tail(content, start, header)

    @contextmanager
    def _written_to_file(self, pages: Mapping[int, bytes], page_bytes: int) -> Iterator[None]:
        """Write these pages to the database file for the duration of the block, then restore it.

        The log hides them while it is valid, and is not needed while they are there. So a process
        that dies at any moment leaves what was committed.
        """
        size = os.fstat(self._database).st_size
        old = {page: self._page(page, page_bytes) for page in pages}
        try:
            self._write_pages(pages, page_bytes)
        except BaseException:
            # The disk may be full; the log is still valid.
            self._write_pages(old, page_bytes, size)
            raise
        yield
        self._write_pages(old, page_bytes, size)

    def _page(self, number: int, page_bytes: int) -> bytes:
        """Return a page of the database file; one beyond its end is empty."""
        return os.pread(self._database, page_bytes, (number - 1) * page_bytes)

    def _write_pages(
        self, pages: Mapping[int, bytes], page_bytes: int, size: int | None = None
    ) -> None:
        for number, content in pages.items():
            _write_at(self._database, content, (number - 1) * page_bytes)
        if size is not None:
            os.ftruncate(self._database, size)
        os.fsync(self._database)

    def _replace_tail(self, content: bytes, start: int, header: bytes) -> None:
        """Rewrite the log from a place on; meanwhile, without its header, it counts as empty."""
        os.pwrite(self._log, bytes(HEADER_BYTES), 0)
        os.fsync(self._log)
        _write_at(self._log, content, start)
        os.ftruncate(self._log, start + len(content))
        os.fsync(self._log)
        os.pwrite(self._log, header, 0)
        os.fsync(self._log)

    @contextmanager
    def _unread(self) -> Iterator[None]:
        """Prevent everybody from reading the database file without the log."""
        if not _lock(self._index, fcntl.F_WRLCK, _READ_ZERO):
            raise SystemBusy(f"{self._path}: an old transaction of another connection is open")
        try:
            yield
        finally:
            _lock(self._index, fcntl.F_RDLCK, _READ_ZERO)

    def _page_bytes(self) -> int:
        return int(self._connection.pragma("page_size"))

    def _end(self) -> int:
        """Return the committed length of the log, according to its index."""
        for _ in range(1_000):
            end = self._indexed_end()
            if end is not None:
                return end
            # The index is being written, or is still invalid after a rollback.
            self._schema()
            time.sleep(_PAUSE_SECONDS)
        raise SystemBusy(f"the index of the log of {self._path} keeps changing")

    def _indexed_end(self) -> int | None:
        both = os.pread(self._index, 2 * _HEADER_BYTES, 0)
        first, second = both[:_HEADER_BYTES], both[_HEADER_BYTES:]
        if first != second or len(second) != _HEADER_BYTES or not first[12]:
            return None
        size, frames = struct.unpack_from("=HI", first, 14)
        # A page of 65,536 bytes is written as 1.
        page = 65_536 if size == 1 else size
        return HEADER_BYTES + int(frames) * (FRAME_HEADER_BYTES + page)

    def _require_same_log(self) -> None:
        if os.pread(self._log, HEADER_BYTES, 0)[_SALTS] != self._salts:
            raise CheckpointInvalid(f"the log of {self._path} was replaced by somebody else")

    def _rewrite(self, target: Node[Piece]) -> None:
        _, down, ancestor = self._tree.route(target)
        # The index first: if this process dies here, the next reader still finds a valid log.
        os.pwrite(self._index, bytes(2 * _HEADER_BYTES), 0)
        os.ftruncate(self._log, ancestor.changes.end)
        place = ancestor.changes.end
        for node in down:
            _write_at(self._log, node.changes.content, place)
            place = node.changes.end

    @contextmanager
    def _alone(self, wait_seconds: float) -> Iterator[None]:
        """Keep readers and writers of all processes out, as soon as they let us in."""
        until = time.monotonic() + wait_seconds
        places = (_WRITE_TO_RECOVER, _READERS)
        try:
            for place in places:
                while not _lock(self._index, fcntl.F_WRLCK, place):
                    if time.monotonic() > until:
                        raise SystemBusy(
                            f"{self._path}: a transaction of another connection has been open "
                            f"for {wait_seconds:g} s"
                        )
                    time.sleep(_PAUSE_SECONDS)
            yield
        finally:
            for place in places:
                _lock(self._index, fcntl.F_UNLCK, place)


def _read(file: int, length: int) -> Iterator[bytes]:
    for start in range(0, length, _CHUNK_BYTES):
        yield os.pread(file, min(_CHUNK_BYTES, length - start), start)


def _write_at(file: int, content: bytes, place: int) -> None:
    left = memoryview(content)
    while left:
        written = os.pwrite(file, left, place)
        left, place = left[written:], place + written


def _write(path: Path, chunks: Iterable[bytes]) -> None:
    """Write a file atomically, unless it already exists."""
    if path.exists():
        return
    temporary = path.with_name(f"{path.name}.new")
    with temporary.open("wb") as file:
        file.writelines(chunks)
    temporary.replace(path)


def _lock(file: int, kind: int, place: tuple[int, int]) -> bool:
    """Take or drop a lock of an open file description; return whether that was possible."""
    start, length = place
    request = struct.pack(_LOCK, kind, os.SEEK_SET, start, length, 0)
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, request)
    except BlockingIOError:
        return False
    return True
