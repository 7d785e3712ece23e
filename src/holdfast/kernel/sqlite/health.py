"""Checks of an SQLite file: its surroundings and its content."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import apsw

from ...formatting import plural, size
from ...records import Finding
from .connection import NETWORK_FILE_SYSTEMS, file_system, files_of, is_safe_version
from .readonly import SqliteReader

WAL_BYTES_MAX = 64 * 1024 * 1024
FREE_BYTES_MIN = 64 * 1024 * 1024
FREE_BYTES_LOW = 512 * 1024 * 1024
MESSAGES_MAX = 10
USERS_SHOWN_MAX = 10


def file_findings(path: Path) -> list[Finding]:
    """Check the library and, from outside, the file: permissions, log, file system, space."""
    return [
        library_finding(),
        *mode_findings(path),
        wal_finding(path),
        file_system_finding(path),
        room_finding(path),
    ]


def library_finding() -> Finding:
    """Check for a library version that can lose commits."""
    version = apsw.sqlite_lib_version()
    if is_safe_version(version):
        return Finding.of("sqlite library", f"SQLite {version}.")
    message = f"SQLite {version} can lose commits when several connections write."
    return Finding.of("sqlite library", message, problem="Install apsw 3.54 or newer.")


def mode_findings(path: Path) -> list[Finding]:
    """Look for files that other users of the machine can open."""
    found = []
    for file in files_of(path):
        if file.exists() and (mode := file.stat().st_mode & 0o777) & 0o077:
            message = f"{file} is open to other users (mode {mode:04o})."
            found.append(Finding.of("file modes", message, problem=f"Run `chmod 600 {file}`."))
    return found or [Finding.of("file modes", "The files are open to their owner alone.")]


def wal_finding(path: Path) -> Finding:
    """Check the size of the write-ahead log."""
    wal = path.with_name(f"{path.name}-wal")
    count = wal.stat().st_size if wal.exists() else 0
    message = f"The write-ahead log is {size(count)}, the database {size(path.stat().st_size)}."
    if count <= WAL_BYTES_MAX:
        return Finding.of("wal size", message)
    advice = "The next write shrinks it, unless a long-running reader prevents that."
    if users := users_of(path):
        shown = ", ".join(map(str, users[:USERS_SHOWN_MAX]))
        advice = f"{advice} The database is open in process {shown}: end those not needed."
    return Finding.of("wal size", message, warning=advice)


def users_of(path: Path) -> list[int]:
    """Return the other processes that have a file open, as far as /proc shows."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(link), os.stat(path)):
                found.add(int(link.parts[2]))
    return sorted(found - {os.getpid()})


def file_system_finding(path: Path) -> Finding:
    """Check the file system of the file."""
    kind = file_system(path.parent)
    if kind in NETWORK_FILE_SYSTEMS:
        message = f"SQLite cannot lock safely on a {kind} file system."
        return Finding.of("file system", message, problem="Use a local disk, or PostgreSQL.")
    if kind in {"tmpfs", "ramfs"}:
        message = f"A {kind} file system is in memory: the store is lost at a restart."
        return Finding.of("file system", message, warning="Move the store to a disk.")
    return Finding.of("file system", f"The file is on {kind or 'an unknown file system'}.")


def room_finding(path: Path) -> Finding:
    """Check the free space."""
    free = shutil.disk_usage(path.parent).free
    advice = "Free some space before writes fail."
    return Finding.of(
        "disk space",
        f"{size(free)} are free.",
        problem=advice if free < FREE_BYTES_MIN else "",
        warning=advice if free < FREE_BYTES_LOW + path.stat().st_size else "",
    )


def page_checks(file: SqliteReader, *, full: bool) -> dict[str, Callable[[], list[Finding]]]:
    """Return the checks of the file's content, by name."""
    return {
        "journal mode": lambda: [journal_finding(file)],
        "synchronous": lambda: [synchronous_finding(file)],
        "integrity": lambda: integrity_findings(file, full=full),
        "foreign keys": lambda: [foreign_key_finding(file)],
    }


def journal_finding(file: SqliteReader) -> Finding:
    """Check the journal mode; a closed store or a backup has no write-ahead log."""
    mode = file.pragma("journal_mode")[0][0]
    message = f"No write-ahead log is in use ({mode}): the store is closed, or is a new backup."
    if mode == "wal":
        message = "The database uses a write-ahead log."
    return Finding.of("journal mode", message)


def synchronous_finding(file: SqliteReader) -> Finding:
    """Check that the library accepts the setting that durable commits need."""
    file.pragma("synchronous", 2)
    if (found := file.pragma("synchronous")[0][0]) != 2:
        message = f"SQLite does not accept synchronous=FULL; it is {found}."
        return Finding.of("synchronous", message, problem="Install apsw from its wheels.")
    return Finding.of("synchronous", "Every commit is synced to the disk (FULL) by default.")


def integrity_findings(file: SqliteReader, *, full: bool) -> list[Finding]:
    """Run SQLite's page check, with `full` also of every index against its table."""
    name = "integrity_check" if full else "quick_check"
    messages = [str(row[0]) for row in file.pragma(name, MESSAGES_MAX)]
    if messages == ["ok"]:
        return [Finding.of("integrity", f"{name} found no damage.")]
    lines = [line for message in messages for line in message.splitlines()]
    return [
        Finding.of("integrity", f"{line}.", problem="Restore a backup.")
        for line in lines[:MESSAGES_MAX]
        if not line.startswith("***")
    ]


def foreign_key_finding(file: SqliteReader) -> Finding:
    """Look for references to rows that do not exist."""
    broken = file.pragma("foreign_key_check")
    if not broken:
        return Finding.of("foreign keys", "Every reference has its row.")
    tables = ", ".join(sorted({str(row[0]) for row in broken}))
    message = f"{plural(len(broken), 'row')} of {tables} refer to rows that do not exist."
    return Finding.of("foreign keys", message, problem="Restore a backup.")
