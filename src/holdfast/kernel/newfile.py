"""New files that get their name when they are whole: backups and exports."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from ..arguments import require_path
from ..errors import InvalidArgument, StoreBusy, StoreUnavailable


@contextlib.contextmanager
def new_file(place: object) -> Iterator[Path]:
    """Yield where to write; what lies there then is durable under the wanted name.

    Nothing is left behind if that fails. A second writer of the same name gets StoreBusy: it
    would take away what the first one is writing, or give the name to half of its own.
    """
    path = require_path(place, "a new file")
    _require_new(path)
    if not os.path.isdir(path.parent):
        raise InvalidArgument(f"there is no directory {path.parent}; create it first")
    partial = path.with_name(f".{path.name}.partial")
    try:
        with _alone(path):
            _require_new(path)
            try:
                _remove(partial)
                yield partial
                os.replace(partial, path)
                sync_directory(path.parent)
            finally:
                with contextlib.suppress(OSError):
                    _remove(partial)
    except OSError as error:
        raise StoreUnavailable(f"cannot write {path}: {error.strerror}") from error


def sync_directory(directory: Path) -> None:
    """Make a new name durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _require_new(path: Path) -> None:
    if os.path.lexists(path):
        raise InvalidArgument(f"{path} exists already; name a new file")


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Be the only writer of a new file; the lock of a process that was killed is free."""
    lock = path.with_name(f".{path.name}.writing")
    while (descriptor := _locked(lock, path)) is None:
        pass
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            lock.unlink(missing_ok=True)
        os.close(descriptor)


def _locked(lock: Path, path: Path) -> int | None:
    """Return the lock's descriptor; None if its last owner removed the file meanwhile."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(lock, flags, 0o600)
    is_ours = False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_ours = _is_at(lock, descriptor)
    except BlockingIOError as error:
        raise StoreBusy(f"{path} is being written already; wait until that ends") from error
    finally:
        if not is_ours:
            os.close(descriptor)
    return descriptor if is_ours else None


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _remove(path: Path) -> None:
    """Remove a file, with those that SQLite has beside a database."""
    for suffix in ("", "-journal", "-wal", "-shm", "-lock"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
