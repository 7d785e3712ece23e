"""Opening SQLite connections safely, and translating SQLite's errors."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
import time
from pathlib import Path

import apsw

from ...arguments import shown
from ...errors import (
    CorruptStore,
    HoldfastError,
    InvalidArgument,
    NotAStore,
    Refused,
    StoreBusy,
    StoreError,
    StoreFull,
    StoreReentered,
    StoreUnavailable,
)
from ..driver import Durability, Progress
from ..files import require_no_link, require_private
from ..schema import APPLICATION_ID

# SQLite itself waits rarely: only for programs that do not take the writer's side lock.
BUSY_MS = 5_000
STATEMENTS_CACHED = 256
IDLE_READERS_MAX = 8
# A backup is written to the disk in parts of this size, not at its end: commits of others would
# wait until the disk has taken all of it.
PAGES_PER_STEP = 256
PAUSE_SECONDS_MAX = 0.1
# SQLite's locks are not reliable on these file systems.
NETWORK_FILE_SYSTEMS = {
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ncpfs", "ceph", "lustre", "gpfs",
    "beegfs", "fuse.sshfs", "fuse.ceph", "fuse.glusterfs", "fuse.juicefs", "fuse.gcsfuse",
    "fuse.s3fs", "fuse.rclone",
}  # fmt: skip

BESIDE = ("", "-wal", "-shm", "-journal", "-lock", "-turn")

# A signal handler may open a store while its thread holds the lock.
_creating = threading.RLock()
_being_created: set[Path] = set()


def is_safe_version(version: str) -> bool:
    """Whether an SQLite release is free of the bug that loses commits when a WAL restarts."""
    major, minor, patch = (int(part) for part in f"{version}.0".split(".")[:3])
    major_minor = (major, minor)
    fixed_in = {(3, 44): 6, (3, 50): 7, (3, 51): 3}
    if major_minor in fixed_in:
        return patch >= fixed_in[major_minor]
    return major_minor > (3, 51)


def require_safe_library() -> None:
    """Refuse an SQLite library that can corrupt a file written by several connections."""
    version = apsw.sqlite_lib_version()
    if not is_safe_version(version):
        raise StoreError(
            f"SQLite {version} can lose commits when several connections write (fixed in 3.51.3); "
            "install apsw 3.54 or newer",
            version=version,
        )


def files_of(path: Path) -> list[Path]:
    """Return the paths of the database and its companion files."""
    return [path.with_name(path.name + suffix) for suffix in BESIDE]


def require_place(path: Path, vfs: str | None) -> None:
    """Refuse a path where a database file would not be safe."""
    if vfs is not None and vfs not in apsw.vfs_names():
        raise InvalidArgument(f"SQLite has no file system layer {shown(vfs)}; leave ?vfs= out")
    for file in files_of(path):
        require_no_link(file)
    if os.path.isdir(path):
        raise InvalidArgument(f"{path} is a directory; name a database file in it")
    if not os.path.isdir(path.parent):
        raise InvalidArgument(f"there is no directory {path.parent}; create it first")
    require_one_name(path)
    if (kind := file_system(path.parent)) in NETWORK_FILE_SYSTEMS:
        raise StoreError(
            f"{path} is on a {kind} file system, where SQLite cannot lock safely; "
            "use a local disk, or PostgreSQL for several machines",
            file_system=kind,
        )


def require_one_name(path: Path) -> None:
    """Refuse anything but a regular file, and hard links: each name would have its own WAL."""
    try:
        found = os.stat(path)
    except OSError:
        return
    if not stat.S_ISREG(found.st_mode):
        raise InvalidArgument(f"{path} is not a regular file; name a database file")
    if found.st_nlink > 1:
        raise StoreError(
            f"{path} has {found.st_nlink} names (hard links), and commits made under another name "
            "would be lost; remove the other names, or make a copy with `holdfast backup`",
            links=found.st_nlink,
        )


def prepare_file(path: Path, vfs: str | None) -> None:
    """Create the database file with mode 600 unless it exists.

    Refuses a file of another user, and logs a warning about one that other users can open.
    """
    require_place(path, vfs)
    # Opening and closing a file that SQLite has open in this process would drop SQLite's locks:
    # O_EXCL and the lock make sure that it has not.
    with _creating:
        if path in _being_created:
            raise StoreReentered(f"this thread is just creating {path}; open it afterwards")
        try:
            _being_created.add(path)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            pass
        except OSError as error:
            raise StoreUnavailable(f"cannot create {path}: {error.strerror}") from error
        finally:
            _being_created.discard(path)
    for file in files_of(path):
        with contextlib.suppress(FileNotFoundError):
            require_private(file)


def file_system(directory: Path) -> str:
    """Return the type of a directory's file system, or '' if unknown."""
    try:
        mounts = Path("/proc/self/mounts").read_text("utf-8", "replace").splitlines()
    except OSError:
        return ""
    real = os.path.realpath(directory)
    best, kind = "", ""
    for mount in mounts:
        _, point, found, *_ = mount.split(" ")
        point = point.replace("\\040", " ")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, found
    return kind


def connect(
    path: Path, *, durability: Durability, vfs: str | None, read_only: bool = False
) -> apsw.Connection:
    """Open a connection with every setting made and verified."""
    try:
        connection = apsw.Connection(
            str(path),
            flags=apsw.SQLITE_OPEN_READWRITE,
            vfs=vfs,
            statementcachesize=STATEMENTS_CACHED,
        )
        try:
            configure(connection, durability=durability, read_only=read_only)
        except BaseException:
            connection.close()
            raise
    except apsw.Error as error:
        raise translate(error, path) from error
    return connection


def configure(connection: apsw.Connection, *, durability: Durability, read_only: bool) -> None:
    """Make the settings that our guarantees need, and check that SQLite accepted them."""
    connection.set_busy_timeout(BUSY_MS)
    require_store(connection)
    wanted = {
        "journal_mode": "wal",
        "synchronous": 2 if durability == "full" else 1,
        "fullfsync": 1,
        "foreign_keys": 1,
        "trusted_schema": 0,
        # Makes REPLACE fire the delete triggers of append-only tables.
        "recursive_triggers": 1,
        "cell_size_check": 1,
        "mmap_size": 0,
        "temp_store": 2,
        "query_only": int(read_only),
    }
    for name, value in wanted.items():
        connection.pragma(name, value)
        found = connection.pragma(name)
        if found not in {value, None}:
            raise StoreError(f"SQLite did not accept {name}={value}; it is {found}")
    connection.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 1)
    # Without it SQLite replans a statement whenever a parameter that it peeked at is rebound,
    # at ten times the cost of a point read.
    connection.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
    connection.limit(apsw.SQLITE_LIMIT_ATTACHED, 0)


def require_store(connection: apsw.Connection) -> None:
    """Refuse another program's database before anything is written to it."""
    # In one snapshot: another process may be creating the store right now.
    connection.execute("BEGIN")
    try:
        tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchall()[0][0]
        application_id = connection.pragma("application_id")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
    if application_id != APPLICATION_ID and (application_id or tables):
        raise NotAStore(
            f"{connection.filename} is an SQLite database of another program; "
            "name another file, or a new one"
        )


def copy_pages(source: apsw.Connection, target: Path, progress: Progress | None) -> None:
    """Copy a database through SQLite's backup API."""
    copy = apsw.Connection(str(target))
    # Closed after the copy's connection: closing it drops the locks of that file in this process.
    with open(target, "rb") as written:
        try:
            # A read transaction fixes the source: writers cannot make the backup restart.
            source.execute("BEGIN")
            source.execute("SELECT count(*) FROM sqlite_master").fetchall()
            with copy.backup("main", source, "main") as backup:
                others = Others(source)
                while not backup.done:
                    started = time.monotonic()
                    backup.step(PAGES_PER_STEP)
                    _sync(written.fileno(), target)
                    if progress is not None:
                        progress(backup.page_count - backup.remaining, backup.page_count)
                    if others.have_written():
                        time.sleep(min(time.monotonic() - started, PAUSE_SECONDS_MAX))
            copy.pragma("journal_mode", "delete")
        finally:
            source.execute("ROLLBACK")
            copy.close()


def _sync(descriptor: int, path: Path) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise StoreUnavailable(f"cannot write {path}: {error.strerror}") from error


class Others:
    """Whether others write to a database, as its write-ahead log shows."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._wal = f"{connection.filename}-wal"
        self._seen = self._look()

    def have_written(self) -> bool:
        """Whether somebody has written since the last call."""
        seen, self._seen = self._seen, self._look()
        return seen != self._seen

    def _look(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self._wal)
        except OSError:
            return None
        return found.st_size, found.st_mtime_ns


def vacuum(path: Path, durability: Durability, vfs: str | None) -> None:
    """Rewrite a database without its free pages; the caller holds the side lock."""
    connection = connect(path, durability=durability, vfs=vfs)
    try:
        # VACUUM builds the new database in an attached temporary one, which may be large.
        connection.limit(apsw.SQLITE_LIMIT_ATTACHED, 1)
        connection.pragma("temp_store", 1)
        connection.execute("VACUUM").fetchall()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    except apsw.Error as error:
        raise translate(error, path) from error
    finally:
        connection.close()


_DAMAGED = (apsw.CorruptError, apsw.FormatError)
_UNREACHABLE = (
    apsw.IOError,
    apsw.CantOpenError,
    apsw.ReadOnlyError,
    apsw.PermissionsError,
    apsw.NoMemError,
    apsw.ProtocolError,
    apsw.InterruptError,
)


def translate(error: apsw.Error, path: Path) -> HoldfastError:
    """Return our error for one of SQLite's."""
    if isinstance(error, apsw.FullError) or lacks_shared_memory(error):
        # For a failed backup SQLite's message is "not an error".
        reason = "" if str(error).endswith("not an error") else f": {error}"
        return StoreFull(f"no space left for {path}{reason}; nothing was written")
    if isinstance(error, apsw.BusyError | apsw.LockedError):
        return StoreBusy(f"{path} is locked by another program: {error}; nothing was written")
    if isinstance(error, apsw.NotADBError):
        return NotAStore(f"{path} is not an SQLite database; name another file, or a new one")
    if isinstance(error, _DAMAGED):
        return CorruptStore(f"{path} is damaged: {error}; restore a backup")
    if isinstance(error, apsw.ConstraintError):
        return Refused(f"the database refused the change: {error}")
    if isinstance(error, _UNREACHABLE):
        reason = _denied(error, path) or str(error)
        return StoreUnavailable(f"{path} cannot be used: {reason}; nothing was written")
    return StoreError(f"SQLite reports for {path}: {error}")


def _denied(error: apsw.Error, path: Path) -> str | None:
    """Return which permission is missing, if that is why SQLite cannot open or write a file."""
    if isinstance(error, apsw.CantOpenError):
        for file in files_of(path)[:4]:
            if file.exists() and not os.access(file, os.R_OK):
                return f"no permission to read {file}"
    if isinstance(error, apsw.ReadOnlyError):
        for place in (path, path.parent):
            if not os.access(place, os.W_OK):
                return f'no permission to write to {place}; to only read the store, use mode="read"'
    return None


def lacks_shared_memory(error: apsw.Error) -> bool:
    """Whether the shared-memory file could not grow because the disk is full."""
    return getattr(error, "extendedresult", 0) == apsw.SQLITE_IOERR_SHMSIZE


def lock_error(path: Path, error: OSError) -> StoreError:
    """Return our error for a side lock that cannot be opened."""
    reason = "the directory is read-only" if error.errno == errno.EROFS else error.strerror
    return StoreUnavailable(
        f'cannot open the lock file {path}: {reason}; to only read the store, use mode="read"'
    )
