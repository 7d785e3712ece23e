"""Files that a store writes: backups, exports, and archives of removed rows.

An archive is a file of lines; the first names the format and the store. A line is durable before
its row is removed: a prune that was killed may archive a row twice, and may leave half a line at
the end, of a row that is still in the store.

A backup is one snapshot of a live store, as an SQLite file. An SQLite store is copied page by page
through SQLite's backup API: copying the file would drop its locks. A PostgreSQL store is copied
row by row.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..arguments import require_path
from ..codec import Codec, from_json, to_json
from ..errors import (
    HoldfastError,
    InvalidArgument,
    SchemaMismatch,
    StoreBusy,
    StoreError,
    StoreUnavailable,
)

if TYPE_CHECKING:
    from .driver import Driver, Progress

VERSION = 1
MARK = '{"holdfast_archive":'
READ_BYTES = 65_536
log = logging.getLogger("holdfast.kernel")


def archived(codec: Codec, kind: str, fields: Mapping[str, Any]) -> str:
    """Return a record as a line of an archive, encrypted if the store has a cipher."""
    text = to_json({"record": kind, **fields})
    if not codec.has_cipher:
        return text
    sealed = codec.seal(text.encode(), context=("archive",))
    return to_json({"sealed": base64.b64encode(sealed).decode()})


class Archive:
    """An archive that one process at a time has open for appending."""

    def __init__(self, path: str | Path, store_id: str) -> None:
        self._path = _place_of(path)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._descriptor = os.open(self._path, flags, 0o600)
        except OSError as error:
            raise self._unusable(error) from error
        try:
            require_private(self._path)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._end = self._begin(store_id)
        except BlockingIOError as error:
            self.close()
            raise StoreBusy(f"another process writes to the archive {self._path}") from error
        except OSError as error:
            self.close()
            raise self._unusable(error) from error
        except BaseException:
            self.close()
            raise

    def append(self, lines: Sequence[str]) -> None:
        """Append lines durably; if this raises, none was added."""
        try:
            self._end = self._write(self._end, "".join(f"{line}\n" for line in lines).encode())
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._end)
            raise self._unusable(error) from error

    def close(self) -> None:
        """Release the archive to other processes."""
        os.close(self._descriptor)

    def _begin(self, store_id: str) -> int:
        """Check the file, cut off an incomplete last line, and return where to append."""
        size = os.fstat(self._descriptor).st_size
        first = os.pread(self._descriptor, READ_BYTES, 0)
        if not MARK.encode().startswith(first[: len(MARK)]):
            raise InvalidArgument(f"{self._path} exists and is not an archive; name another file")
        if b"\n" in first:
            require_header(first.partition(b"\n")[0], self._path)
            end = self._last_line_end(size)
            os.ftruncate(self._descriptor, end)
            return end
        os.ftruncate(self._descriptor, 0)
        header = f'{MARK}{VERSION},"store_id":{to_json(store_id)}}}\n'
        end = self._write(0, header.encode())
        sync_directory(self._path.parent)
        return end

    def _last_line_end(self, size: int) -> int:
        end = size
        while end:
            start = max(0, end - READ_BYTES)
            found = os.pread(self._descriptor, end - start, start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
        return 0

    def _write(self, start: int, content: bytes) -> int:
        written = 0
        while written < len(content):
            written += os.pwrite(self._descriptor, content[written:], start + written)
        os.fsync(self._descriptor)
        return start + written

    def _unusable(self, error: OSError) -> HoldfastError:
        return StoreUnavailable(f"cannot write the archive {self._path}: {error.strerror}")


def _place_of(path: object) -> Path:
    """Return the path of an archive, or refuse it."""
    found = _own_path(path, "a file")
    if os.path.isdir(found):
        raise InvalidArgument(f"{found} is a directory; name a file in it")
    if not os.path.isdir(found.parent):
        raise InvalidArgument(f"there is no directory {found.parent}; create it first")
    return found


def _own_path(path: object, what: str) -> Path:
    """Return the real path of a file to write, which is no symbolic link; its directory may be."""
    found = require_path(path, what)
    require_no_link(Path(str(path)))
    return found


def require_no_link(path: Path) -> None:
    """Refuse a symbolic link."""
    if os.path.islink(path):
        raise StoreError(
            f"{path} is a symbolic link, perhaps planted to redirect writes to another file; "
            "name the file itself. Nothing was opened"
        )


def require_private(path: Path) -> None:
    """Refuse a file of another user; log a warning about one that other users can open."""
    found = os.lstat(path)
    if found.st_uid not in {os.geteuid(), 0} and os.geteuid() != 0:
        raise StoreError(f"{path} belongs to another user, who could change it; nothing was opened")
    mode = found.st_mode & 0o777
    if mode & 0o077:
        log.warning("%s is open to other users (mode %04o); run `chmod 600 %s`", path, mode, path)


def require_header(line: bytes, path: Path) -> None:
    """Refuse a file that is not an archive, or has a newer format."""
    try:
        header = from_json(line)
        version = header["holdfast_archive"]
    except (HoldfastError, TypeError, KeyError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path} is not an archive") from error
    if version != VERSION:
        raise SchemaMismatch(
            f"{path} is an archive of format {version}, this Holdfast reads {VERSION}; install a "
            "newer Holdfast"
        )


@contextlib.contextmanager
def new_file(place: object) -> Iterator[Path]:
    """Yield a temporary path; on success the file is renamed to `place` durably.

    Nothing is left behind on failure. A second writer of the same name gets StoreBusy.
    """
    path = _own_path(place, "a new file")
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
    """Make a new name in a directory durable."""
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
    """Be the only writer of a new file; a killed process releases the lock."""
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
    """Return the lock's descriptor; None if its last owner has just removed the file."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(lock, flags, 0o600)
    is_ours = False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_ours = _is_at(lock, descriptor)
    except BlockingIOError as error:
        raise StoreBusy(f"another process is writing {path}; try again when it is done") from error
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
    """Remove a file and the companion files of an SQLite database."""
    for suffix in ("", "-journal", "-wal", "-shm", "-lock", "-turn"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def back_up(driver: Driver, place: str | Path, progress: Progress | None) -> None:
    """Copy a store into a new file; nothing is left behind on failure."""
    driver.require_outside()
    if progress is not None and not callable(progress):
        raise InvalidArgument(f"progress must be a function, not {type(progress).__name__}")
    with new_file(place) as partial:
        driver.copy_to(partial, progress)
