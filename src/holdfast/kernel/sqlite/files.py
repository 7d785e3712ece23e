"""Whether the names of a database's files still stand for the files that are open."""

from __future__ import annotations

import os
from pathlib import Path

from ...clock import wall_ms
from ...errors import StoreMoved

# File systems tell time in ticks of up to two seconds: of two changes within one tick, a look
# between them sees nothing of the second. A directory that changed longer ago tells of the next.
SETTLED_MS = 3_000


class Files:
    """The files of one open database: itself, its `-wal` and its `-shm`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._directory = str(path.parent)
        self._names = [f"{path}{suffix}" for suffix in ("", "-wal", "-shm")]
        self._known: list[tuple[int, int] | None] = [None, None, None]
        self._settled: tuple[int, int, int] | None = None
        self.is_moved = False

    def note(self) -> None:
        """Take the files that the names stand for now as those that are open."""
        self._known = self._found()
        self._settled = None

    def note_new(self) -> None:
        """Take what a new database has only now."""
        if None in self._known:
            self.note()

    def forget_beside(self) -> None:
        """Expect that SQLite has removed the files beside the database."""
        self._known[1:] = [None, None]

    def require_in_place(self) -> None:
        """Make sure that the names of the database's files still stand for those that are open.

        What is written to others is lost with them, or destroys what has taken their place.
        """
        # One look at the directory costs less than three at the files.
        directory = _last_change(self._directory)
        if directory is not None and directory == self._settled and not self.is_moved:
            return
        changed = [
            name
            for name, known, now in zip(self._names, self._known, self._found(), strict=True)
            if known is not None and known != now
        ]
        self.is_moved |= bool(changed)
        if self.is_moved:
            raise StoreMoved(
                f"{' and '.join(changed) or self._path} was deleted, renamed or replaced while the "
                "store was open; nothing was written; put it back and open the store again"
            )
        age_ms = 0 if directory is None else wall_ms() - directory[-1] // 1_000_000
        self._settled = directory if abs(age_ms) > SETTLED_MS else None

    def are_replaced_beside(self) -> bool:
        """Tell whether `-wal` or `-shm` is not the one that is open."""
        return self._found()[1:] != self._known[1:]

    def is_database_gone(self) -> bool:
        """Tell whether nothing has the database's name."""
        return self._found()[0] is None

    def _found(self) -> list[tuple[int, int] | None]:
        """Return device and inode of the file behind each name, None where there is none."""
        changes = [_last_change(name) for name in self._names]
        return [change and change[:2] for change in changes]


def _last_change(name: str) -> tuple[int, int, int] | None:
    """Return device, inode and time of the last change of what a name stands for, if anything."""
    try:
        status = os.stat(name)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_ctime_ns
