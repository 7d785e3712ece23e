"""What must hold around and inside an SQLite file."""

from __future__ import annotations

import shutil
from pathlib import Path

import apsw

from ...records import Finding
from ...words import plural, size
from ..sqlite.connection import NETWORK_FILE_SYSTEMS, file_system, files_of, is_safe_version
from ..sqlite.readonly import SqliteReadEngine
from .contents import guarded

WAL_BYTES_MAX = 64 * 1024 * 1024
FREE_BYTES_MIN = 64 * 1024 * 1024
FREE_BYTES_LOW = 512 * 1024 * 1024
MESSAGES_MAX = 10


def library_finding() -> Finding:
    """Refuse a library that can lose commits."""
    version = apsw.sqlite_lib_version()
    if is_safe_version(version):
        return Finding("sqlite library", "ok", f"SQLite {version}.")
    message = f"SQLite {version} can lose commits when several connections write."
    return Finding("sqlite library", "problem", message, "Install apsw 3.54 or newer.")


def file_findings(path: Path) -> list[Finding]:
    """Look at the file from outside: who may read it, and what it lies on."""
    return [*mode_findings(path), wal_finding(path), file_system_finding(path), room_finding(path)]


def mode_findings(path: Path) -> list[Finding]:
    """Look for files that other users of the machine can open."""
    found = []
    for file in files_of(path):
        if file.exists() and (mode := file.stat().st_mode & 0o777) & 0o077:
            message = f"{file} is open to other users (mode {mode:04o})."
            found.append(Finding("file modes", "problem", message, f"Run `chmod 600 {file}`."))
    return found or [Finding("file modes", "ok", "The files are open to their owner alone.")]


def wal_finding(path: Path) -> Finding:
    """Look at how much waits to be moved into the database."""
    wal = path.with_name(f"{path.name}-wal")
    count = wal.stat().st_size if wal.exists() else 0
    message = f"The write-ahead log has {size(count)}, the database {size(path.stat().st_size)}."
    if count > WAL_BYTES_MAX:
        advice = "A reader that never ends keeps the log from being moved: end old processes."
        return Finding("wal size", "warning", message, advice)
    return Finding("wal size", "ok", message)


def file_system_finding(path: Path) -> Finding:
    """Look at what the file lies on."""
    kind = file_system(path.parent)
    if kind in NETWORK_FILE_SYSTEMS:
        message = f"SQLite cannot lock safely on a {kind} file system."
        return Finding("file system", "problem", message, "Use a local disk, or PostgreSQL.")
    if kind in {"tmpfs", "ramfs"}:
        message = f"A {kind} file system is memory: the store is gone after a restart."
        return Finding("file system", "warning", message, "Move the store to a disk.")
    return Finding("file system", "ok", f"The file lies on {kind or 'an unknown file system'}.")


def room_finding(path: Path) -> Finding:
    """Look at how much room is left."""
    free = shutil.disk_usage(path.parent).free
    message = f"{size(free)} are free."
    advice = "Free some space before writes fail."
    if free < FREE_BYTES_MIN:
        return Finding("disk space", "problem", message, advice)
    if free < FREE_BYTES_LOW + path.stat().st_size:
        return Finding("disk space", "warning", message, advice)
    return Finding("disk space", "ok", message)


def page_findings(file: SqliteReadEngine, *, full: bool) -> list[Finding]:
    """Look inside the file."""
    return [
        *guarded("journal mode", lambda: [journal_finding(file)]),
        *guarded("synchronous", lambda: [synchronous_finding(file)]),
        *guarded("integrity", lambda: integrity_findings(file, full=full)),
        *guarded("foreign keys", lambda: [foreign_key_finding(file)]),
    ]


def journal_finding(file: SqliteReadEngine) -> Finding:
    """Look at how commits are made; a backup has no log of its own until it is opened."""
    mode = file.pragma("journal_mode")[0][0]
    if mode == "wal":
        return Finding("journal mode", "ok", "The database uses a write-ahead log.")
    message = f"The journal mode is {mode}, as in a new backup; opening the store sets it to wal."
    return Finding("journal mode", "ok", message)


def synchronous_finding(file: SqliteReadEngine) -> Finding:
    """Make sure that the library takes the setting a durable commit needs."""
    file.pragma("synchronous", 2)
    if (found := file.pragma("synchronous")[0][0]) != 2:
        message = f"SQLite does not take synchronous=FULL, it has {found}."
        return Finding("synchronous", "problem", message, "Install apsw from its wheels.")
    return Finding("synchronous", "ok", "Every commit is synced to the disk (FULL) by default.")


def integrity_findings(file: SqliteReadEngine, *, full: bool) -> list[Finding]:
    """Let SQLite check the pages, with `full` also every index against its table."""
    name = "integrity_check" if full else "quick_check"
    messages = [str(row[0]) for row in file.pragma(name, MESSAGES_MAX)]
    if messages == ["ok"]:
        return [Finding("integrity", "ok", f"{name} found no damage.")]
    lines = [line for message in messages for line in message.splitlines()]
    return [
        Finding("integrity", "problem", f"{line}.", "Restore a backup.")
        for line in lines[:MESSAGES_MAX]
        if not line.startswith("***")
    ]


def foreign_key_finding(file: SqliteReadEngine) -> Finding:
    """Look for rows that refer to rows which do not exist."""
    broken = file.pragma("foreign_key_check")
    if not broken:
        return Finding("foreign keys", "ok", "Every reference has its row.")
    tables = ", ".join(sorted({str(row[0]) for row in broken}))
    message = f"{plural(len(broken), 'row')} of {tables} refer to rows that do not exist."
    return Finding("foreign keys", "problem", message, "Restore a backup.")
