"""Backups: a copy of a live store, one consistent moment of it, as an SQLite file.

An SQLite store is copied page by page through SQLite's own backup interface: copying the file
would drop its locks. A PostgreSQL store is copied row by row from one snapshot; because both
databases have one schema, the copy is a store that opens by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import InvalidArgument
from .newfile import new_file
from .opening import open_engine
from .outside import require_own
from .settings import Settings
from .url import PostgresTarget, SqliteTarget, Target

ROWS_PER_FETCH = 1_000

Progress = Callable[[int, int], None]


def back_up(
    driver: Any, target: Target, settings: Settings, place: str | Path, progress: Progress | None
) -> None:
    """Copy a store into a new file; nothing is left behind if that fails."""
    driver.entrance.require_outside()
    if progress is not None and not callable(progress):
        raise InvalidArgument(f"progress must be a function, not {type(progress).__name__}")
    with new_file(place) as partial:
        if isinstance(target, PostgresTarget):
            require_own(driver, "be backed up")
            copy_rows(target, settings, partial, progress)
        else:
            driver.engine.copy_to(partial, progress)


def copy_rows(
    target: PostgresTarget, settings: Settings, path: Path, progress: Progress | None
) -> None:
    """Copy every table of a PostgreSQL store from one snapshot."""
    from .postgres.copying import Snapshot

    engine = open_engine(SqliteTarget(path), replace(settings, mode="write"), migrate=True)
    try:
        with Snapshot(target.dsn, target.schema) as snapshot, engine.bulk() as connection:
            tables = [str(row[0]) for row in connection.execute(TABLES).fetchall()]
            total, done = sum(map(snapshot.count, tables)), 0
            for table in tables:
                connection.execute(f'DELETE FROM "{table}"')  # noqa: S608 - a name from our schema
                names = [str(row[1]) for row in connection.execute(f'PRAGMA table_info("{table}")')]
                columns = ", ".join(f'"{name}"' for name in names)
                places = ", ".join("?" * len(names))
                insert = f'INSERT INTO "{table}" ({columns}) VALUES ({places})'  # noqa: S608
                for rows in snapshot.read(table, names, ROWS_PER_FETCH):
                    connection.executemany(insert, rows)
                    done += len(rows)
                    if progress is not None:
                        progress(done, total)
    finally:
        engine.close()


# In the order of their creation, so that a row comes after the row it refers to.
TABLES = "SELECT name FROM sqlite_master WHERE type = 'table' AND name LIKE 'hf%' ORDER BY rowid"
