"""Folders in which systems keep snapshots: those of live processes, and what dead ones left."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from ..clock import SystemClock
from ..errors import CheckpointInvalid

PREFIX: Final = ".holdfast-"
_LOCK: Final = "lock"
_KEPT: Final = "kept"
# A folder is locked right after it is created, so an unlocked one is dead or younger than this.
_YOUNG_MS: Final = 60_000
_clock: Final = SystemClock()


class OwnFolder:
    """A folder that is locked while its process lives, and removed when it is closed.

    A kept folder stays until `remove_kept`.
    """

    def __init__(self, kind: str, parent: Path | None = None) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}-", dir=parent))
        self._lock: int | None = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def keep(self) -> None:
        """Keep the folder when the process ends, because another process may need its content."""
        (self.path / _KEPT).touch()

    def close(self) -> None:
        """Remove the folder, unless it is kept."""
        if self._lock is None:
            return
        if not (self.path / _KEPT).exists():
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = None


def kept_folder(name: str, kind: str) -> Path:
    """Return a kept folder; raise CheckpointInvalid if it no longer exists."""
    path = Path(name)
    if not path.name.startswith(f"{PREFIX}{kind}-") or not (path / _KEPT).exists():
        raise CheckpointInvalid(
            f"the snapshots that were kept in {path} no longer exist", path=name
        )
    return path


def remove_kept(name: str, kind: str) -> None:
    """Remove a kept folder: now, or when its process closes it if that is still alive."""
    try:
        path = kept_folder(name, kind)
    except CheckpointInvalid:
        return
    (path / _KEPT).unlink(missing_ok=True)
    if _is_dead(path):
        shutil.rmtree(path, ignore_errors=True)


def sweep_folders(kind: str, parent: Path | None = None) -> int:
    """Remove the folders of processes that died, except kept ones; return how many."""
    place = Path(tempfile.gettempdir()) if parent is None else parent
    dead = [path for path in place.glob(f"{PREFIX}{kind}-*") if _is_dead(path)]
    for path in dead:
        shutil.rmtree(path, ignore_errors=True)
    return len(dead)


def _is_dead(path: Path) -> bool:
    try:
        if (path / _KEPT).exists():
            return False
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return path.exists() and _clock.now_ms() - path.stat().st_mtime_ns // 10**6 > _YOUNG_MS
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True
