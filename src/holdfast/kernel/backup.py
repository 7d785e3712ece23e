"""Backups: a copy of a live store, one consistent moment of it, as an SQLite file.

An SQLite store is copied page by page through SQLite's own backup interface: copying the file
would drop its locks. A PostgreSQL store is copied row by row from one snapshot; because both
databases have one schema, the copy is a store that opens by itself.
"""

from __future__ import annotations

from pathlib import Path

from ..errors import InvalidArgument
from .driver import Driver, Progress
from .newfile import new_file


def back_up(driver: Driver, place: str | Path, progress: Progress | None) -> None:
    """Copy a store into a new file; nothing is left behind if that fails."""
    driver.entrance.require_outside()
    if progress is not None and not callable(progress):
        raise InvalidArgument(f"progress must be a function, not {type(progress).__name__}")
    with new_file(place) as partial:
        driver.copy_to(partial, progress)
