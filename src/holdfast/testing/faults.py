"""A disk that fails on command: a SQLite VFS whose file operations report errors when told to.

A fault replaces the operation or, with `after_effect`, follows it: the disk did what it was asked
but reports that it did not. To find out what a power cut leaves afterwards, stack it with a
`PowerLog` of `holdfast.testing.power`. `PowerLog(base=disk.vfs_name)` sees failed syncs, and treats
what they should have saved as uncertain from then on. `FaultyDisk(base=log.vfs_name)` keeps the log
exact: a replaced operation never happened, and a later sync saves everything.

What differs from a real disk: apsw raises an injected error also where SQLite itself ignores it. A
failing automatic checkpoint makes COMMIT raise although it succeeded, and the checkpoint of the
last connection makes its close raise. Shared memory and locks do not fail.
"""

from __future__ import annotations

import errno
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Literal, TypeAlias

import apsw

from .closing import Closing

if TYPE_CHECKING:
    from typing_extensions import Buffer

FileOperation: TypeAlias = Literal["read", "write", "truncate", "sync"]
FileRole: TypeAlias = Literal["db", "wal", "journal"]

ROLES: dict[int, FileRole] = {
    apsw.SQLITE_OPEN_MAIN_DB: "db",
    apsw.SQLITE_OPEN_WAL: "wal",
    apsw.SQLITE_OPEN_MAIN_JOURNAL: "journal",
}
EIO_CODES: dict[FileOperation, int] = {
    "read": apsw.SQLITE_IOERR_READ,
    "write": apsw.SQLITE_IOERR_WRITE,
    "truncate": apsw.SQLITE_IOERR_TRUNCATE,
    "sync": apsw.SQLITE_IOERR_FSYNC,
}

_vfs_numbers = count(1)


@dataclass(slots=True)
class Fault:
    """One armed failure; `fired` counts how often it struck."""

    operation: FileOperation
    file: FileRole | None
    nth: int
    error: int
    after_effect: bool
    persistent: bool
    fired: int = 0

    def exception(self) -> Exception:
        """Return what apsw raises for this error, as SQLite's unix VFS would report it."""
        full = self.operation == "write" and self.error == errno.ENOSPC
        exception = apsw.exception_for(apsw.SQLITE_FULL if full else EIO_CODES[self.operation])
        exception.args = ("database or disk is full" if full else "disk I/O error",)
        return exception


class FaultyDisk(Closing):
    """A VFS that fails when told to; open databases with `vfs=disk.vfs_name`. Thread-safe."""

    def __init__(self, name: str | None = None, base: str = "") -> None:
        self.vfs_name = name or f"faulty-{next(_vfs_numbers)}"
        self.counts: Counter[tuple[FileOperation, FileRole]] = Counter()
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._vfs = _FaultyVFS(self, self.vfs_name, base)

    def close(self) -> None:
        """Unregister the VFS; close its connections first."""
        self._vfs.unregister()

    def fail_on(
        self,
        operation: FileOperation,
        *,
        nth: int = 1,
        file: FileRole | None = None,
        error: int = errno.EIO,
        after_effect: bool = False,
        persistent: bool = False,
    ) -> Fault:
        """Make the nth such operation from now fail, and with `persistent` all later ones too."""
        if error not in (errno.EIO, errno.ENOSPC):
            raise ValueError(f"error must be errno.EIO or errno.ENOSPC, not {error}")
        fault = Fault(operation, file, nth, error, after_effect, persistent)
        with self._lock:
            self._faults.append(fault)
        return fault

    def reset(self) -> None:
        """Disarm every fault and set the counters to zero."""
        with self._lock:
            self._faults.clear()
            self.counts.clear()

    def _strike(self, operation: FileOperation, file: FileRole) -> Fault | None:
        """Count one operation and return the fault that hits it, if any."""
        with self._lock:
            self.counts[operation, file] += 1
            struck = None
            for fault in [*self._faults]:
                if fault.operation != operation or fault.file not in (None, file):
                    continue
                fault.nth -= 1
                if fault.nth > 0 or struck is not None:
                    continue
                fault.fired += 1
                struck = fault
                if not fault.persistent:
                    self._faults.remove(fault)
            return struck


class _FaultyVFS(apsw.VFS):
    def __init__(self, disk: FaultyDisk, name: str, base: str) -> None:
        super().__init__(name, base)
        self._disk = disk
        self._base = base

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:
        for flag, role in ROLES.items():
            if flags[0] & flag:
                return _FaultyFile(self._disk, role, self._base, name, flags)
        return apsw.VFSFile(self._base, name, flags)


class _FaultyFile(apsw.VFSFile):
    def __init__(
        self,
        disk: FaultyDisk,
        role: FileRole,
        base: str,
        name: str | apsw.URIFilename | None,
        flags: list[int],
    ) -> None:
        super().__init__(base, name, flags)
        self._disk = disk
        self._role: FileRole = role

    def xRead(self, amount: int, offset: int) -> bytes:
        if fault := self._disk._strike("read", self._role):
            raise fault.exception()
        return super().xRead(amount, offset)

    def xWrite(self, data: Buffer, offset: int) -> None:
        self._perform("write", partial(super().xWrite, data, offset))

    def xTruncate(self, newsize: int) -> None:
        self._perform("truncate", partial(super().xTruncate, newsize))

    def xSync(self, flags: int) -> None:
        self._perform("sync", partial(super().xSync, flags))

    def _perform(self, operation: FileOperation, effect: Callable[[], None]) -> None:
        fault = self._disk._strike(operation, self._role)
        if fault is None or fault.after_effect:
            effect()
        if fault is not None:
            raise fault.exception()
