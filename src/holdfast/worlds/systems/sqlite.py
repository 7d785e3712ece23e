"""An SQLite database file that other processes use."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Final, Protocol

import apsw

from ...arguments import require_path, require_seconds
from ...errors import CheckpointInvalid, InvalidArgument, SystemBusy
from ..folders import OwnFolder, kept_folder, remove_kept, sweep_folders
from ..system import System
from . import wal

Observer = Callable[[apsw.Connection], object]

_WAIT_SECONDS_MAX: Final = 3_600
_KIND: Final = "sqlite"
_TRIAL: Final = "trial"


class _Snapshots(Protocol):
    def checkpoint(self) -> int: ...
    def keep(self, token: int, folder: Path) -> list[str]: ...
    def prepare(self, token: int) -> None: ...
    def rollback(self, token: int) -> None: ...
    def release(self, token: int) -> None: ...
    def close(self) -> None: ...


class SqliteSystem(System):
    """A database file, whoever writes to it; its users see a rollback as an ordinary change.

    In WAL mode on Linux a checkpoint costs what changed. Elsewhere each is a copy of the whole
    database, and a warning says so. `observe` is a function of a connection that returns what a
    state shows; by default it is the content of all tables. A rollback waits up to
    `wait_seconds` for the transactions of others. Open it before connections of this process.
    """

    not_covered = (
        "transactions that are open: a rollback waits for them",
        "temporary tables, attached databases, and rows that a program keeps in memory",
        "AUTOINCREMENT counters are restored, but are not part of a state",
    )

    def __init__(
        self, path: str | Path, *, observe: Observer | None = None, wait_seconds: float = 5
    ) -> None:
        self.path = require_path(path)
        require_seconds("wait_seconds", wait_seconds, _WAIT_SECONDS_MAX)
        if not self.path.is_file():
            raise InvalidArgument(f"path must be an SQLite database; {self.path} is not a file")
        self._observe = observe or all_tables
        # Connections of sqlite3 that nobody has closed are closed by the collector: later it would
        # take the log away, because in one process no lock protects it.
        gc.collect()
        self._folder = OwnFolder(_KIND)
        self._connection = _connect(self.path, wait_seconds)
        try:
            problem = _why_no_segments(self._connection, self.path)
            if problem is None:
                self._snapshots: _Snapshots = wal.WalSnapshots(
                    self.path, self._connection, wait_seconds
                )
            else:
                warnings.warn(
                    f"{self.path}: each checkpoint copies the whole database, because {problem}",
                    stacklevel=2,
                )
                self._snapshots = _Copies(self._connection, self._folder.path)
        except BaseException:
            self._connection.close()
            self._folder.close()
            raise

    @property
    def is_incremental(self) -> bool:
        """Whether a checkpoint stores only what changed, not a copy of the database."""
        return isinstance(self._snapshots, wal.WalSnapshots)

    def checkpoint(self, name: str) -> int:
        """Store what is committed now."""
        return self._snapshots.checkpoint()

    def prepare(self, token: int) -> None:
        """Raise unless the token is known and no open transaction prevents a rollback."""
        self._snapshots.prepare(token)

    def rollback(self, token: int) -> None:
        """Restore what was committed then."""
        self._snapshots.rollback(token)

    def release(self, token: int) -> None:
        """Forget a checkpoint."""
        self._snapshots.release(token)

    def keep(self, token: int) -> object:
        """Write the database file once, and then what changed, to a folder of the system."""
        self._folder.keep()
        pieces = self._snapshots.keep(token, self._folder.path)
        return {"folder": str(self._folder.path), "pieces": pieces}

    def restore(self, kept: dict[str, Any]) -> None:
        """Replace the whole database with what a dead process has kept."""
        folder = kept_folder(kept["folder"], _KIND)
        with tempfile.TemporaryDirectory(dir=self._folder.path) as scratch:
            copy = Path(scratch) / "copy.db"
            _assemble(folder, kept["pieces"], copy)
            with closing(_connect(copy, 0)) as source:
                copy_database(source, self._connection)

    def discard(self, kept: dict[str, Any]) -> None:
        """Remove the folder with the kept files."""
        remove_kept(kept["folder"], _KIND)

    def sweep(self) -> int:
        """Remove the folders of killed processes, and the scratch databases of their self-tests."""
        return sweep_folders(_KIND) + sweep_folders(_TRIAL, self.path.parent)

    def observe(self) -> object:
        """Return what the observer reads, in one transaction."""
        self._connection.execute("BEGIN")
        try:
            return self._observe(self._connection)
        finally:
            self._connection.execute("ROLLBACK")

    def close(self) -> None:
        """Release the file; its content is left as it is."""
        self._connection.close()
        self._snapshots.close()
        self._folder.close()
        # Closing the last connection that has read the log copies it into the file.
        with closing(_connect(self.path, 0)) as last:
            last.pragma("user_version")


class _Copies:
    """Snapshots as whole copies, made and restored by SQLite itself: slow, but always exact."""

    def __init__(self, connection: apsw.Connection, directory: Path) -> None:
        self._connection = connection
        self._directory = directory
        self._next = 1

    def checkpoint(self) -> int:
        token, self._next = self._next, self._next + 1
        with closing(apsw.Connection(str(self._file(token)))) as copy:
            copy_database(self._connection, copy)
        return token

    def prepare(self, token: int) -> None:
        if not self._file(token).is_file():
            raise CheckpointInvalid(f"there is no snapshot {token!r}", token=token)

    def rollback(self, token: int) -> None:
        self.prepare(token)
        with closing(apsw.Connection(str(self._file(token)))) as copy:
            copy_database(copy, self._connection)

    def release(self, token: int) -> None:
        self.prepare(token)
        self._file(token).unlink()

    def keep(self, token: int, folder: Path) -> list[str]:
        # Copies have no log, so the only piece is the whole database, under a separate name.
        kept = f"kept-{token}.db"
        if not (folder / kept).exists():
            os.link(self._file(token), folder / kept)
        return [kept]

    def close(self) -> None:
        """Do nothing: the folder belongs to the system."""

    def _file(self, token: int) -> Path:
        return self._directory / f"{token}.db"


class Reads(Protocol):
    """A connection of apsw or of the standard library that runs SQL."""

    def execute(self, statement: str, /) -> Any:
        """Run a statement."""
        ...


def all_tables(connection: Reads) -> object:
    """Return the rows of every table, in the order of their values, and its definition."""
    found = connection.execute(
        "SELECT name, sql FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite~_%'"
        " ESCAPE '~' ORDER BY name"
    ).fetchall()
    tables = {}
    for name, definition in found:
        select = f"SELECT * FROM {quoted(name)}"  # noqa: S608
        rows = [list(row) for row in connection.execute(select)]
        tables[name] = {"definition": definition, "rows": sorted(rows, key=_order)}
    return tables


def quoted(name: str) -> str:
    """Return the name of a table, quoted for SQL."""
    return '"' + name.replace('"', '""') + '"'


def _order(row: list[object]) -> list[tuple[str, str]]:
    return [(type(value).__name__, repr(value)) for value in row]


def _assemble(folder: Path, pieces: list[str], copy: Path) -> None:
    """Rebuild a database from the pieces that were kept."""
    try:
        if pieces[0].endswith(".db"):
            shutil.copyfile(folder / pieces[0], copy)
            return
        shutil.copyfile(folder / wal.BASE, copy)
        with Path(f"{copy}-wal").open("wb") as log:
            for piece in pieces:
                log.write((folder / piece).read_bytes())
    except FileNotFoundError as error:
        raise CheckpointInvalid(f"{error.filename} no longer exists") from error


def _connect(path: Path, wait_seconds: float) -> apsw.Connection:
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    connection.set_busy_timeout(round(wait_seconds * 1000))
    connection.pragma("wal_autocheckpoint", 0)
    return connection


def copy_database(source: apsw.Connection, target: apsw.Connection) -> None:
    """Replace a whole database with another, in one transaction."""
    with target.backup("main", source, "main") as backup:
        try:
            while not backup.done:
                backup.step(-1)
        except (apsw.BusyError, apsw.LockedError) as error:
            raise SystemBusy("a transaction of another connection is open") from error


def _why_no_segments(connection: apsw.Connection, path: Path) -> str | None:
    if not wal.IS_SUPPORTED or sys.byteorder != "little":
        return "this platform lacks the locks that checkpoints of the log need"
    if connection.pragma("journal_mode") != "wal":
        return "it is not in WAL mode (PRAGMA journal_mode = WAL)"
    # In the same directory, so that the file system treats locks and shared memory the same way.
    folder = OwnFolder(_TRIAL, path.parent)
    try:
        trial = folder.path / "trial.db"
        trial.touch()
        return _try_out(trial)
    except (OSError, apsw.Error, AssertionError) as error:
        return f"a self-test of the faster method failed here: {error}"
    finally:
        folder.close()


def _try_out(path: Path) -> str | None:
    """Roll back a scratch database while another connection is open, and compare."""
    with closing(_connect(path, 1)) as other, closing(_connect(path, 1)) as connection:
        other.pragma("journal_mode", "wal")
        other.execute("CREATE TABLE t (a); INSERT INTO t VALUES (1)")
        connection.execute("SELECT * FROM t").fetchall()
        # The log is rewritten, shorter, whenever that is possible.
        with closing(wal.WalSnapshots(path, connection, 1, long_bytes=0)) as snapshots:
            token = snapshots.checkpoint()
            other.execute("UPDATE t SET a = 2; CREATE TABLE u (b)")
            later = snapshots.checkpoint()
            for number in range(3, 9):
                other.execute("UPDATE t SET a = ?", (number,))
            last = snapshots.checkpoint()
            for wanted, expected in ((token, (1, 1)), (last, (2, 8)), (later, (2, 2))):
                snapshots.rollback(wanted)
                found = other.execute("SELECT count(*), (SELECT a FROM t) FROM sqlite_schema")
                if found.fetchall() != [expected]:
                    return "a self-test of the faster method gave a different result here"
            connection.close()
    return None
