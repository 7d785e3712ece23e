"""Images of a SQLite database as a power cut may leave it, from a log of its file operations.

`PowerLog` is a VFS that records every write, truncate, sync and delete of databases, WAL files and
rollback journals, in order, with the marks a test sets between them. `images` replays the log. A
cut may come before any operation; what was written to a file since its last sync is then lost,
kept, or kept in part, write by write and 512-byte sector by sector. What a failed sync should have
saved stays uncertain forever, because Linux drops it and reports success the next time.

What the model leaves out: directory entries (create, delete) are durable at once; a successful
sync never lies; a sector is written whole or not at all; bytes outside a write are never damaged;
what a file held when the log first opened it counts as durable; writes that do not pass through
the log (other processes, other VFSes) are not seen. One log serves one database.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from os.path import basename
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import apsw

from .closing import Closing

if TYPE_CHECKING:
    from typing_extensions import Buffer

SECTOR_BYTES = 512
LOGGED_FILES = apsw.SQLITE_OPEN_MAIN_DB | apsw.SQLITE_OPEN_WAL | apsw.SQLITE_OPEN_MAIN_JOURNAL

Marks = tuple[tuple[str, object], ...]

_vfs_numbers = count(1)


class Operation(NamedTuple):
    """One entry of the log; `number` is a write's offset or a truncate's size."""

    kind: Literal["open", "write", "truncate", "sync", "sync_failed", "delete", "mark", "end"]
    path: str = ""
    number: int = 0
    data: bytes = b""
    mark: tuple[str, object] | None = None


@dataclass(frozen=True, slots=True)
class Image:
    """The files one power cut leaves, and the marks set before it."""

    name: str
    main: str
    files: dict[str, bytes]
    marks: Marks

    @property
    def acknowledged(self) -> list[object]:
        """The values marked "acknowledged" before the cut."""
        return [value for label, value in self.marks if label == "acknowledged"]

    def write_to(self, directory: Path) -> Path:
        """Write the files, replacing an earlier image there, and return the database's path."""
        main = directory / self.main
        for suffix in ("", "-wal", "-shm", "-journal"):
            main.with_name(self.main + suffix).unlink(missing_ok=True)
        for name, content in self.files.items():
            (directory / name).write_bytes(content)
        return main


class PowerLog(Closing):
    """A VFS that records what SQLite asks of the disk; open databases with `vfs=log.vfs_name`."""

    def __init__(self, name: str | None = None, base: str = "") -> None:
        self.vfs_name = name or f"power-{next(_vfs_numbers)}"
        self.operations: list[Operation] = []
        self._lock = threading.RLock()
        self._live: set[str] = set()
        self._vfs = _LoggingVFS(self, self.vfs_name, base)

    def close(self) -> None:
        """Unregister the VFS; close its connections first. The log stays readable."""
        self._vfs.unregister()

    def mark(self, label: str, value: object = None) -> None:
        """Record that the test got this far; "acknowledged" promises that `value` is durable."""
        with self._lock:
            self.operations.append(Operation("mark", mark=(label, value)))

    def images(
        self, *, seed: int = 0, per_cut: int = 5, wanted: Callable[[Marks], bool] | None = None
    ) -> Iterator[Image]:
        """Yield the distinct images of every cut: all unsynced lost, all kept, the rest torn.

        With `wanted`, only those of cuts that come after marks which it accepts.
        """
        opened = (o.path for o in self.operations if o.kind == "open")
        main = basename(next(path for path in opened if not path.endswith(("-wal", "-journal"))))
        disk: dict[str, _File] = {}
        marks: Marks = ()
        seen: set[int] = set()
        for cut, operation in enumerate([*self.operations, Operation("end")]):
            if operation.mark:
                marks += (operation.mark,)
                continue
            settled = all(file.is_settled for file in disk.values())
            variants = 1 if settled else per_cut
            for variant in range(variants if wanted is None or wanted(marks) else 0):
                name = f"cut {cut} variant {variant} seed {seed}"
                files = {
                    basename(path): file.content(_choice(variant, name + basename(path)))
                    for path, file in disk.items()
                }
                key = hash((len(marks), *files.items()))
                if key not in seen:
                    seen.add(key)
                    yield Image(name, main, files, marks)
            _replay(disk, operation)

    def _record_open(self, file: _LoggingFile) -> None:
        with self._lock:
            if file.path not in self._live:
                self._live.add(file.path)
                self.operations.append(Operation("open", file.path, data=file.read_whole()))


Choice = Callable[[Operation], Callable[[], bool] | bool]
"""Whether an unsynced operation reached the disk: yes, no, or decided for each sector."""


def _choice(variant: int, seed: str) -> Choice:
    if variant < 2:
        return lambda operation: variant == 1
    chance = random.Random(seed)
    share = chance.choice((0.1, 0.5, 0.9, 0.99))

    def sector() -> bool:
        return chance.random() < share

    def in_order(operation: Operation) -> Callable[[], bool] | bool:
        nonlocal share
        if share == 0 or sector():
            return share > 0
        share = 0
        return lambda: chance.random() < 0.5

    return chance.choice((in_order, lambda operation: sector(), lambda operation: sector))


@dataclass(slots=True)
class _Unsettled:
    operation: Operation
    state: Literal["pending", "doubtful", "certain"] = "pending"


@dataclass(slots=True)
class _File:
    """A file's durable bytes, and the later operations, of which some are uncertain."""

    durable: bytearray
    tail: list[_Unsettled] = field(default_factory=list)
    settled: bytes | None = None  # One object for many images, which is hashed once.

    @property
    def is_settled(self) -> bool:
        return not self.tail

    def sync(self, *, failed: bool) -> None:
        self.settled = None
        for entry in self.tail:
            if entry.state == "pending":
                entry.state = "doubtful" if failed else "certain"
        for index in reversed(range(len(self.tail))):
            operation, state = self.tail[index].operation, self.tail[index].state
            if state == "certain" and operation.kind == "truncate" and operation.number == 0:
                self.durable.clear()
                del self.tail[: index + 1]
                break
        settled = 0
        for entry in self.tail:
            if entry.state != "certain":
                break
            _apply(self.durable, entry.operation)
            settled += 1
        del self.tail[:settled]

    def content(self, choice: Choice) -> bytes:
        if self.is_settled:
            self.settled = bytes(self.durable) if self.settled is None else self.settled
            return self.settled
        content = bytearray(self.durable)
        for entry in self.tail:
            operation = entry.operation
            chosen = True if entry.state == "certain" else choice(operation)
            if chosen is True:
                _apply(content, operation)
            elif chosen is not False:
                for part in _sectors(operation):
                    if chosen():
                        _apply(content, part)
        return bytes(content)


def _replay(disk: dict[str, _File], operation: Operation) -> None:
    match operation.kind:
        case "open":
            disk[operation.path] = _File(bytearray(operation.data))
        case "delete":
            disk.pop(operation.path, None)
        case "write" | "truncate":
            disk[operation.path].tail.append(_Unsettled(operation))
        case "sync" | "sync_failed":
            disk[operation.path].sync(failed=operation.kind == "sync_failed")


def _apply(content: bytearray, operation: Operation) -> None:
    start = operation.number
    if start > len(content):
        content.extend(bytes(start - len(content)))
    if operation.kind == "write":
        content[start : start + len(operation.data)] = operation.data
    else:
        del content[start:]


def _sectors(operation: Operation) -> Iterator[Operation]:
    if operation.kind != "write":
        yield operation
        return
    start, end = operation.number, operation.number + len(operation.data)
    while start < end:
        stop = min(end, (start // SECTOR_BYTES + 1) * SECTOR_BYTES)
        data = operation.data[start - operation.number : stop - operation.number]
        yield operation._replace(number=start, data=data)
        start = stop


class _LoggingVFS(apsw.VFS):
    def __init__(self, log: PowerLog, name: str, base: str) -> None:
        super().__init__(name, base)
        self._log = log
        self._base = base

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:
        if name is None or not flags[0] & LOGGED_FILES:
            return apsw.VFSFile(self._base, name, flags)
        return _LoggingFile(self._log, self._base, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        with self._log._lock:
            super().xDelete(filename, syncdir)
            self._log._live.discard(filename)
            self._log.operations.append(Operation("delete", filename))


class _LoggingFile(apsw.VFSFile):
    def __init__(
        self, log: PowerLog, base: str, name: str | apsw.URIFilename, flags: list[int]
    ) -> None:
        super().__init__(base, name, flags)
        self.path = name if isinstance(name, str) else name.filename()
        self._log = log
        log._record_open(self)

    def read_whole(self) -> bytes:
        return super().xRead(super().xFileSize(), 0)

    def xWrite(self, data: Buffer, offset: int) -> None:
        content = bytes(data)
        with self._log._lock:
            try:
                super().xWrite(data, offset)
            except apsw.Error:
                content = super().xRead(len(content), offset)
                raise
            finally:
                self._log.operations.append(Operation("write", self.path, offset, content))

    def xTruncate(self, newsize: int) -> None:
        with self._log._lock:
            try:
                super().xTruncate(newsize)
            finally:
                size = super().xFileSize()
                self._log.operations.append(Operation("truncate", self.path, size))

    def xSync(self, flags: int) -> None:
        with self._log._lock:
            try:
                super().xSync(flags)
            except apsw.Error:
                self._log.operations.append(Operation("sync_failed", self.path))
                raise
            self._log.operations.append(Operation("sync", self.path))
