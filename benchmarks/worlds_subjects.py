"""What is checkpointed and rolled back: databases, keys and files, by Holdfast and by others.

A subject changes some of its content, keeps a state, and restores it. VenomQA's adapters are used
as its documentation says: SQLite as copies of the file, PostgreSQL as savepoints on its own
connection, Redis as dumps of all keys.
"""

from __future__ import annotations

import itertools
import shutil
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psycopg

from holdfast.worlds import FileSystem, SqliteSystem, System
from holdfast.worlds.systems.postgres import PostgresSystem
from holdfast.worlds.systems.postgres_connection import PostgresConnectionSystem

ROWS_CHANGED = 20
KEYS, KEYS_CHANGED = 10_000, 10
FILES, FILES_CHANGED, FILE_BYTES = 2_000, 10, 5_000
ROW_BYTES = 1_000
CREATE = "CREATE TABLE items (id INTEGER PRIMARY KEY, n INTEGER NOT NULL, body TEXT NOT NULL)"


class Subject(ABC):
    """Something that changes, and whose states are kept and restored."""

    def __init__(self) -> None:
        self.numbers = itertools.count(1)

    @abstractmethod
    def change(self) -> None:
        """Change a little."""

    @abstractmethod
    def checkpoint(self) -> object:
        """Keep the present state."""

    @abstractmethod
    def rollback(self, token: Any) -> None:
        """Restore it."""

    @abstractmethod
    def release(self, token: Any) -> None:
        """Forget it."""

    @abstractmethod
    def bytes_kept(self, token: Any) -> float:
        """Return what the newest checkpoint holds."""

    def close(self) -> None:  # noqa: B027
        """Let go, if there is something to."""


class HoldfastSubject(Subject):
    """A system of Holdfast; its first state stays, so that a checkpoint holds changes to it."""

    def __init__(self, system: System) -> None:
        super().__init__()
        self.system = system
        self._first = system.checkpoint("first")

    def checkpoint(self) -> object:
        """Keep the present state."""
        return self.system.checkpoint("bench")

    def rollback(self, token: Any) -> None:
        """Restore it."""
        self.system.rollback(token)

    def release(self, token: Any) -> None:
        """Forget it, and begin anew: what changes next is no change to what is forgotten."""
        self.system.release(token)
        self.system.rollback(self._first)

    def bytes_kept(self, token: Any) -> float:
        """Return what the changes since the checkpoint before hold."""
        system: Any = self.system
        tree = getattr(system, "_snapshots", system)._tree
        return float(_bytes_in(tree.head.changes))

    def close(self) -> None:
        """Let go."""
        self.system.close()


def _bytes_in(value: Any) -> int:
    if isinstance(value, bytes | str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_bytes_in(part) for pair in value.items() for part in pair)
    if isinstance(value, Sequence):
        return sum(map(_bytes_in, value))
    return len(getattr(value, "content", b""))


def fill_sqlite(path: Path, megabytes: int) -> None:
    """Make a database of a size, in WAL mode."""
    connection = sqlite3.connect(path)
    with connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(CREATE)
        rows = ((n, "x" * ROW_BYTES) for n in range(megabytes * 1_000))
        connection.executemany("INSERT INTO items (n, body) VALUES (?, ?)", rows)
    connection.close()


class HoldfastSqlite(HoldfastSubject):
    """An SQLite file that another connection writes to."""

    def __init__(self, path: Path, megabytes: int) -> None:
        fill_sqlite(path, megabytes)
        super().__init__(SqliteSystem(path))
        self._connection = sqlite3.connect(path, isolation_level=None)

    def change(self) -> None:
        """Change some rows."""
        change_sqlite(self._connection, next(self.numbers))

    def close(self) -> None:
        """Close the system first: its locks are this process's own."""
        super().close()
        self._connection.close()


def change_sqlite(connection: sqlite3.Connection, number: int) -> None:
    """Change some rows in one transaction."""
    connection.execute("UPDATE items SET n = ? WHERE id <= ?", (number, ROWS_CHANGED))


class VenomSqlite(Subject):
    """VenomQA's adapter, which copies the file."""

    def __init__(self, path: Path, megabytes: int) -> None:
        super().__init__()
        from venomqa.v1.adapters.sqlite import SQLiteAdapter

        fill_sqlite(path, megabytes)
        self._adapter: Any = SQLiteAdapter(str(path))

    def change(self) -> None:
        """Change some rows."""
        with self._adapter.connection as connection:
            change_sqlite(connection, next(self.numbers))

    def checkpoint(self) -> object:
        """Copy the file."""
        return self._adapter.checkpoint("bench")

    def rollback(self, token: Any) -> None:
        """Copy it back."""
        self._adapter.rollback(token)

    def release(self, token: Any) -> None:
        """Remove the copy; the adapter itself keeps all of them."""
        Path(token).unlink()

    def bytes_kept(self, token: Any) -> float:
        """Return the size of the copy."""
        return float(Path(token).stat().st_size)

    def close(self) -> None:
        """Close its connection and remove its copies."""
        self._adapter.close()
        shutil.rmtree(self._adapter._temp_dir, ignore_errors=True)


def fill_postgres(dsn: str, megabytes: int) -> None:
    """Make a table of a size."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(CREATE)
        fill = "INSERT INTO items SELECT n, n, repeat('x', %s) FROM generate_series(1, %s) AS n"
        connection.execute(fill, (ROW_BYTES, megabytes * 1_000))
        connection.execute("VACUUM ANALYZE items")
        # Else the pages of all this are written out while others are measured.
        connection.execute("CHECKPOINT")


def change_postgres(connection: psycopg.Connection[Any], number: int) -> None:
    """Change some rows."""
    connection.execute("UPDATE items SET n = %s WHERE id <= %s", (number, ROWS_CHANGED))


class HoldfastPostgres(HoldfastSubject):
    """A database whose user commits on a connection of its own."""

    def __init__(self, dsn: str, megabytes: int) -> None:
        fill_postgres(dsn, megabytes)
        super().__init__(PostgresSystem(dsn))
        self._connection = psycopg.connect(dsn, autocommit=True)

    def change(self) -> None:
        """Change some rows, and commit."""
        change_postgres(self._connection, next(self.numbers))

    def close(self) -> None:
        """Close both connections."""
        super().close()
        self._connection.close()


class HoldfastPostgresConnection(HoldfastSubject):
    """One connection that is shared, in a transaction that is never committed."""

    def __init__(self, dsn: str, megabytes: int) -> None:
        fill_postgres(dsn, megabytes)
        self._connection = psycopg.connect(dsn)
        super().__init__(PostgresConnectionSystem(self._connection))

    def change(self) -> None:
        """Change some rows."""
        change_postgres(self._connection, next(self.numbers))

    def close(self) -> None:
        """Undo everything."""
        super().close()
        self._connection.close()


class VenomPostgres(Subject):
    """VenomQA's adapter: savepoints on its own connection, restored as a stack only."""

    def __init__(self, dsn: str, megabytes: int) -> None:
        super().__init__()
        from venomqa.v1.adapters.postgres import PostgresAdapter

        fill_postgres(dsn, megabytes)
        self._adapter: Any = PostgresAdapter(dsn)
        self._adapter.connect()

    def change(self) -> None:
        """Change some rows."""
        change_postgres(self._adapter._conn, next(self.numbers))

    def checkpoint(self) -> object:
        """Make a savepoint."""
        return self._adapter.checkpoint("bench")

    def rollback(self, token: Any) -> None:
        """Go back to it."""
        self._adapter.rollback(token)

    def release(self, token: Any) -> None:
        """Release it, which the adapter itself never does."""
        self._adapter._conn.execute(f"RELEASE SAVEPOINT {token}")

    def bytes_kept(self, token: Any) -> float:
        """Return nothing: the server keeps it."""
        return 0.0

    def close(self) -> None:
        """Close its connection."""
        self._adapter.close()


class RedisKeys(HoldfastSubject):
    """Ten thousand keys, of which ten change."""

    def __init__(self, url: str) -> None:
        import redis

        from holdfast.worlds.systems.redis import RedisSystem

        self._client = redis.Redis.from_url(url)
        fill_redis(self._client, "holdfast:")
        super().__init__(RedisSystem(url, prefix="holdfast:"))

    def change(self) -> None:
        """Change some keys."""
        change_redis(self._client, "holdfast:", next(self.numbers))


class VenomRedis(Subject):
    """VenomQA's adapter: a dump of every key."""

    def __init__(self, url: str) -> None:
        super().__init__()
        from venomqa.v1.adapters.redis import RedisAdapter

        self._adapter: Any = RedisAdapter(url, track_patterns=["venom:*"])
        self._adapter.connect()
        fill_redis(self._adapter._client, "venom:")

    def change(self) -> None:
        """Change some keys."""
        change_redis(self._adapter._client, "venom:", next(self.numbers))

    def checkpoint(self) -> object:
        """Dump all keys."""
        return self._adapter.checkpoint("bench")

    def rollback(self, token: Any) -> None:
        """Delete all keys and restore them."""
        self._adapter.rollback(token)

    def release(self, token: Any) -> None:
        """Let go of the dump."""

    def bytes_kept(self, token: Any) -> float:
        """Return the size of the dump."""
        return float(_bytes_in(token))


def fill_redis(client: Any, prefix: str) -> None:
    """Write all keys."""
    client.mset({f"{prefix}{n}": "x" * 100 for n in range(KEYS)})


def change_redis(client: Any, prefix: str, number: int) -> None:
    """Change some keys."""
    client.mset({f"{prefix}{n}": f"changed {number}" for n in range(KEYS_CHANGED)})


def fill_files(folder: Path) -> None:
    """Write all files."""
    folder.mkdir()
    for number in range(FILES):
        (folder / str(number)).write_bytes(b"x" * FILE_BYTES)


def change_files(folder: Path, number: int) -> None:
    """Change some files."""
    for name in range(FILES_CHANGED):
        (folder / str(name)).write_text(f"changed {number}")


class HoldfastFiles(HoldfastSubject):
    """Two thousand files, of which ten change."""

    def __init__(self, folder: Path) -> None:
        fill_files(folder)
        self._folder = folder
        super().__init__(FileSystem(folder))

    def change(self) -> None:
        """Change some files."""
        change_files(self._folder, next(self.numbers))

    def bytes_kept(self, token: Any) -> float:
        """Return the size of the contents that changed."""
        return float(sum((self._folder / str(n)).stat().st_size for n in range(FILES_CHANGED)))


class CopiedFiles(Subject):
    """The whole directory, copied and copied back."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        fill_files(folder)
        self._folder = folder

    def change(self) -> None:
        """Change some files."""
        change_files(self._folder, next(self.numbers))

    def checkpoint(self) -> object:
        """Copy everything."""
        place = self._folder.with_name(f"{self._folder.name}-copy-{next(self.numbers)}")
        shutil.copytree(self._folder, place)
        return place

    def rollback(self, token: Any) -> None:
        """Copy it back."""
        shutil.rmtree(self._folder)
        shutil.copytree(token, self._folder)

    def release(self, token: Any) -> None:
        """Remove the copy."""
        shutil.rmtree(token)

    def bytes_kept(self, token: Any) -> float:
        """Return the size of the copy."""
        return float(sum(file.stat().st_size for file in token.iterdir()))
