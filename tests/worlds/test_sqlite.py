"""SQLite: a file that another process uses all the time, and a connection of this process."""

from __future__ import annotations

import gc
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import apsw
import pytest

from holdfast.errors import CheckpointInvalid, InvalidArgument, RollbackError, SystemBusy
from holdfast.worlds import SqliteConnectionSystem, SqliteSystem, World, check_system
from holdfast.worlds.systems import sqlite_connection, wal, wal_frames
from holdfast.worlds.systems.sqlite import all_tables
from holdfast.worlds.systems.sqlite_connection import Snapshot

SCHEMA = [
    "CREATE TABLE t (k INTEGER PRIMARY KEY AUTOINCREMENT, v)",
    "CREATE TABLE log (a, b)",
    "CREATE TABLE parent (id TEXT PRIMARY KEY, x)",
    "CREATE TABLE child (id INTEGER PRIMARY KEY, p REFERENCES parent (id) ON DELETE CASCADE)",
    "CREATE TRIGGER noted AFTER INSERT ON t BEGIN INSERT INTO log VALUES (new.k, 'new'); END",
    "CREATE TABLE pairs (a, b, PRIMARY KEY (a, b)) WITHOUT ROWID",
]
Ask = Callable[[str], list[list[Any]]]


def statement(random: Random) -> str:
    n = random.randrange(20)
    if random.random() < 0.08:
        return random.choice(
            [
                f"CREATE TABLE IF NOT EXISTS u{n % 3} (a, b{n % 4})",
                f"DROP TABLE IF EXISTS u{n % 3}",
                f"INSERT INTO parent VALUES (NULL, {n})",
                "DELETE FROM parent WHERE id IS NULL",
            ]
        )
    return row_statement(random)


def row_statement(random: Random) -> str:
    n = random.randrange(20)
    return random.choice(
        [
            f"INSERT INTO t (v) VALUES ('v{n}')",
            f"DELETE FROM t WHERE k % 5 = {n % 5}",
            f"UPDATE t SET v = randomblob({n * 100}) WHERE k % 3 = {n % 3}",
            f"INSERT OR REPLACE INTO parent VALUES ('p{n % 6}', {n})",
            f"INSERT OR IGNORE INTO child SELECT {n}, id FROM parent LIMIT 1",
            f"DELETE FROM parent WHERE id = 'p{n % 6}'",
            f"INSERT OR REPLACE INTO pairs VALUES ({n % 4}, {n % 3})",
            f"UPDATE log SET b = {n} WHERE a % 2 = 1",
            "DELETE FROM log WHERE a % 3 = 0",
        ]
    )


def content(ask: Ask) -> object:
    """Everything: definitions, rows, and the counters of AUTOINCREMENT."""
    definitions = ask("SELECT type, name, sql FROM sqlite_schema ORDER BY name")
    tables = [row[0] for row in ask("SELECT name FROM pragma_table_list WHERE schema = 'main'")]
    rows = {name: ask(f"SELECT * FROM {name.strip(chr(39))}") for name in sorted(tables)}
    return [definitions, {name: sorted(found) for name, found in rows.items()}]


@pytest.fixture(params=["wal", "delete"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return made(tmp_path / "x.db", request.param)


@pytest.fixture
def log_file(tmp_path: Path) -> Path:
    return made(tmp_path / "x.db", "wal")


def made(path: Path, mode: str) -> Path:
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA journal_mode = {mode}")
    for definition in SCHEMA:
        connection.execute(definition)
    connection.close()
    return path


@pytest.fixture
def user() -> Iterator[Callable[[Path], Ask]]:
    """Starts processes that use a file until the test ends."""
    started: list[subprocess.Popen[str]] = []

    def start(path: Path) -> Ask:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("sqlite_user.py")), str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)

        def ask(sql: str) -> list[list[Any]]:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(sql) + "\n")
            process.stdin.flush()
            rows: list[list[Any]] = json.loads(process.stdout.readline())
            return rows

        return ask

    yield start
    for process in started:
        assert process.stdin is not None
        process.stdin.close()
        assert process.stdout is not None
        process.stdout.close()
        process.wait()


def system_of(path: Path) -> SqliteSystem:
    connection = sqlite3.connect(path)
    mode = connection.execute("PRAGMA journal_mode").fetchone()[0]
    connection.close()
    if mode == "wal":
        return SqliteSystem(path)
    with pytest.warns(UserWarning, match="copies the whole database, because it is not in WAL"):
        return SqliteSystem(path)


def test_a_rollback_restores_what_was_there_while_another_process_is_connected(
    file: Path, user: Callable[[Path], Ask]
) -> None:
    system = system_of(file)
    ask = user(file)

    def change(random: Random) -> str:
        if random.random() < 0.1:
            assert ask("PRAGMA integrity_check") == [["'ok'"]]
            ask("PRAGMA wal_checkpoint(PASSIVE)")
        sql = statement(random)
        ask(sql)
        return sql

    check_system(system, change, lambda: content(ask))
    system.close()
    # The other process goes on, and nothing that was ours is left.
    ask("INSERT INTO t (v) VALUES ('after')")
    assert ask("PRAGMA integrity_check") == [["'ok'"]]
    names = {path.name for path in file.parent.iterdir()}
    assert names <= {"x.db", "x.db-wal", "x.db-shm"}


def test_the_log_is_pinned_while_a_system_is_open_and_gone_when_it_is_closed(
    log_file: Path,
) -> None:
    system = SqliteSystem(log_file)
    assert system.is_incremental
    other = sqlite3.connect(log_file, isolation_level=None)
    for n in range(50):
        other.execute("INSERT INTO t (v) VALUES (?)", (n,))
    _, frames, moved = other.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    assert frames > 50
    assert moved < frames
    other.close()
    system.close()
    assert [path.name for path in log_file.parent.iterdir()] == ["x.db"]
    again = sqlite3.connect(log_file)
    assert again.execute("SELECT count(*) FROM t").fetchone() == (50,)
    again.close()


def test_the_log_stays_when_this_process_has_lost_its_locks(
    log_file: Path, user: Callable[[Path], Ask]
) -> None:
    """Closing any descriptor of a file drops the locks that the process's connections have."""
    system = SqliteSystem(log_file)
    start = system.checkpoint("start")
    os.close(os.open(log_file, os.O_RDONLY))
    code = "import sqlite3, sys; sqlite3.connect(sys.argv[1], isolation_level=None).execute"
    insert = f"{code}(\"INSERT INTO t (v) VALUES ('x')\")"
    # Its connection is the last that has a lock, so that closing it would remove the log.
    subprocess.run([sys.executable, "-c", insert, str(log_file)], check=True)
    system.rollback(start)
    assert user(log_file)("SELECT count(*) FROM t") == [["0"]]
    system.close()


def test_a_stale_connection_does_not_take_another_branch_for_its_own(
    log_file: Path, user: Callable[[Path], Ask]
) -> None:
    """Both branches would have the same schema number, and different tables behind it."""
    system = SqliteSystem(log_file)
    ask, other = user(log_file), user(log_file)
    start = system.checkpoint("start")
    ask("CREATE TABLE x (only_x)")
    ask("INSERT INTO x VALUES ('x')")
    assert ask("SELECT only_x FROM x") == [["'x'"]]
    system.rollback(start)
    other("CREATE TABLE y (only_y)")
    other("INSERT INTO y VALUES ('y')")
    found = ask("SELECT name FROM sqlite_schema WHERE name IN ('x', 'y')")
    assert found == [["'y'"]]
    assert ask("SELECT only_y FROM y") == [["'y'"]]
    system.close()


def log_bytes(path: Path) -> int:
    return Path(f"{path}-wal").stat().st_size


@pytest.mark.parametrize("page_bytes", [512, 4096, 65536])
def test_a_long_log_is_written_again_shorter_and_every_checkpoint_stays_good(
    tmp_path: Path,
    page_bytes: int,
    user: Callable[[Path], Ask],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[int] = []
    real = wal_frames.shortened

    def counted(frames: bytes, page: int, checksum: tuple[int, int]) -> bytes:
        written.append(page)
        return real(frames, page, checksum)

    monkeypatch.setattr(wal, "shortened", counted)
    path = tmp_path / "x.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as first:
        first.execute(f"PRAGMA page_size = {page_bytes}")
        first.execute("VACUUM")
    system = SqliteSystem(made(path, "wal"))
    snapshots = system._snapshots
    assert isinstance(snapshots, wal.WalSnapshots)
    ask = user(path)

    def change(random: Random) -> str:
        # It is tried at every checkpoint.
        snapshots._long_bytes = 0
        # A database that becomes shorter leaves pages in the log that are beyond its end.
        sql = "VACUUM" if random.random() < 0.05 else statement(random)
        ask(sql)
        assert ask("PRAGMA integrity_check") == [["'ok'"]]
        return sql

    check_system(system, change, lambda: content(ask))
    assert written.count(page_bytes) > 10
    system.close()
    assert ask("PRAGMA integrity_check") == [["'ok'"]]


def test_a_walk_of_many_checkpoints_has_a_short_log(
    log_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wal, "LONG_BYTES", 100_000)
    system = SqliteSystem(log_file)
    other = sqlite3.connect(log_file, isolation_level=None)
    other.execute("INSERT INTO t (v) VALUES (0)")
    tokens = []
    for n in range(200):
        other.execute("UPDATE t SET v = ?", (n,))
        tokens.append(system.checkpoint(f"{n}"))
        # One more commit than is allowed is seen before it is made shorter.
        assert log_bytes(log_file) < 130_000
    for n in (0, 199, 100, 30):
        system.rollback(tokens[n])
        assert other.execute("SELECT v FROM t").fetchone() == (n,)
        assert log_bytes(log_file) < 130_000
    # What is kept for another process is the shorter log too.
    kept = system.keep(tokens[30])
    assert isinstance(kept, dict)
    system.restore(kept)
    assert other.execute("SELECT v FROM t").fetchone() == (30,)
    system.discard(kept)
    other.close()
    system.close()


def test_a_log_of_pages_that_differ_stays_as_it_is(
    log_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wal, "LONG_BYTES", 50_000)
    looks: list[int] = []
    real = wal_frames.shortened

    def counted(frames: bytes, page: int, checksum: tuple[int, int]) -> bytes:
        looks.append(len(frames))
        return real(frames, page, checksum)

    monkeypatch.setattr(wal, "shortened", counted)
    system = SqliteSystem(log_file)
    looks.clear()
    other = sqlite3.connect(log_file, isolation_level=None)
    token = system.checkpoint("start")
    for n in range(40):
        other.execute("INSERT INTO pairs VALUES (?, randomblob(20000))", (n,))
        system.checkpoint(f"{n}")
    # Each look reads the whole log, so the next one comes when it has doubled.
    assert 1 < len(looks) < 8
    system.rollback(token)
    assert other.execute("SELECT count(*) FROM pairs").fetchone() == (0,)
    other.close()
    system.close()


def test_a_checkpoint_does_not_wait_for_readers_to_make_the_log_shorter(
    log_file: Path, user: Callable[[Path], Ask], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wal, "LONG_BYTES", 20_000)
    system = SqliteSystem(log_file)
    writer, reader = user(log_file), user(log_file)
    reader("BEGIN")
    assert reader("SELECT count(*) FROM t") == [["0"]]
    writer("INSERT INTO t (v) VALUES (0)")
    for n in range(30):
        writer(f"UPDATE t SET v = {n}")
        system.checkpoint(f"{n}")
    long = log_bytes(log_file)
    assert long > 100_000
    assert reader("SELECT count(*) FROM t") == [["0"]]
    reader("COMMIT")
    writer("UPDATE t SET v = 30")
    system.checkpoint("30")
    assert log_bytes(log_file) < long // 2
    assert reader("SELECT v FROM t") == [["30"]]
    system.close()


def test_an_open_transaction_refuses_the_rollback_and_is_named(log_file: Path) -> None:
    with World({"db": SqliteSystem(log_file, wait_seconds=0.05)}) as world:
        here = world.checkpoint("here")
        other = sqlite3.connect(log_file, isolation_level=None)
        other.execute("INSERT INTO t (v) VALUES (1)")
        other.execute("BEGIN")
        other.execute("SELECT count(*) FROM t").fetchone()
        with pytest.raises(RollbackError, match=r"db: refused: SystemBusy: .*x\.db: a transaction"):
            world.rollback(here)
        assert world.is_consistent
        other.execute("COMMIT")
        world.rollback(here)
        assert other.execute("SELECT count(*) FROM t").fetchone() == (0,)
        other.close()


def test_a_rollback_that_is_cut_off_leaves_a_log_that_can_be_read(
    log_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = SqliteSystem(log_file)
    other = sqlite3.connect(log_file, isolation_level=None)
    tokens = []
    for n in range(3):
        other.execute("INSERT INTO t (v) VALUES (?)", (n,))
        tokens.append(system.checkpoint(f"{n}"))
    system.rollback(tokens[0])
    real = os.pwrite
    calls = 0

    def failing(file: int, content: bytes, place: int) -> int:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError("disk full")
        return real(file, content, place)

    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(OSError, match="disk full"):
        system.rollback(tokens[2])
    monkeypatch.undo()
    assert other.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    for token, count in ((tokens[2], 3), (tokens[0], 1), (tokens[1], 2)):
        system.rollback(token)
        assert other.execute("SELECT count(*) FROM t").fetchone() == (count,)
    other.close()
    system.close()


def test_pages_of_the_largest_size_are_kept_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as made:
        made.execute("PRAGMA page_size = 65536")
        made.execute("PRAGMA journal_mode = WAL")
        made.execute("CREATE TABLE t (v)")
    system = SqliteSystem(path)
    other = sqlite3.connect(path, isolation_level=None)
    tokens = []
    for n in range(3):
        other.execute("INSERT INTO t VALUES (?)", (n,))
        tokens.append(system.checkpoint(f"{n}"))
    for number in (0, 2, 1):
        system.rollback(tokens[number])
        assert other.execute("SELECT count(*) FROM t").fetchone() == (number + 1,)
    system.close()
    other.close()


def test_an_index_that_is_just_being_written_is_read_again(
    log_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = SqliteSystem(log_file)
    snapshots = system._snapshots
    assert isinstance(snapshots, wal.WalSnapshots)
    wanted = snapshots._end()
    real = os.pread
    torn: list[bytes] = []

    def reading(file: int, length: int, place: int) -> bytes:
        found = real(file, length, place)
        if file != snapshots._index or torn:
            return found
        # Its first copy has another number of frames than the second already.
        torn.append(found)
        return found[:16] + bytes([found[16] ^ 1]) + found[17:]

    monkeypatch.setattr(os, "pread", reading)
    assert snapshots._end() == wanted
    assert torn
    monkeypatch.undo()
    system.close()


def test_a_log_that_somebody_replaced_is_not_written_to(log_file: Path) -> None:
    system = SqliteSystem(log_file)
    snapshots = system._snapshots
    assert isinstance(snapshots, wal.WalSnapshots)
    token = system.checkpoint("start")
    salts = os.pread(snapshots._log, 8, 16)
    os.pwrite(snapshots._log, salts[::-1], 16)
    with pytest.raises(CheckpointInvalid, match="was replaced by somebody else"):
        system.rollback(token)
    os.pwrite(snapshots._log, salts, 16)
    system.rollback(token)
    system.close()


@pytest.mark.parametrize("byte", [120, 121, 122], ids=["write", "checkpoint", "recover"])
def test_a_writer_a_checkpointer_and_a_recovery_are_waited_for(log_file: Path, byte: int) -> None:
    """Another process: closing a descriptor of the index would drop the locks of this one."""
    code = (
        "import os, sys; from holdfast.worlds.systems import wal; import fcntl\n"
        "file = os.open(sys.argv[1] + '-shm', os.O_RDWR)\n"
        "print(wal._lock(file, fcntl.F_WRLCK, (int(sys.argv[2]), 1)), flush=True)\n"
        "sys.stdin.read()"
    )
    system = SqliteSystem(log_file, wait_seconds=0.05)
    token = system.checkpoint("start")
    command = [sys.executable, "-c", code, str(log_file), str(byte)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        with pytest.raises(SystemBusy, match="has been open"):
            system.rollback(token)
    system.rollback(token)
    system.close()


def test_an_unknown_token_and_a_file_that_is_none_are_refused(file: Path) -> None:
    system = system_of(file)
    token = system.checkpoint("x")
    system.release(token)
    for refused in (system.prepare, system.rollback, system.release):
        with pytest.raises(CheckpointInvalid):
            refused(99)
    system.close()
    with pytest.raises(InvalidArgument, match="is not a file"):
        SqliteSystem(file.with_name("missing.db"))


def test_an_observer_of_its_own_reads_what_a_state_shows(log_file: Path) -> None:
    count = "SELECT count(*) FROM t"
    system = SqliteSystem(log_file, observe=lambda db: db.execute(count).fetchall())
    assert system.observe() == [(0,)]
    system.close()


def apsw_connection() -> tuple[apsw.Connection, Ask]:
    connection = apsw.Connection(":memory:")
    return connection, lambda sql: [list(row) for row in connection.execute(sql)]


def standard_connection() -> tuple[sqlite3.Connection, Ask]:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    return connection, lambda sql: [list(row) for row in connection.execute(sql)]


def connection_system(connection: Any) -> SqliteConnectionSystem:
    connection.execute("PRAGMA foreign_keys = ON")
    for definition in SCHEMA:
        connection.execute(definition)
    if isinstance(connection, apsw.Connection):
        return SqliteConnectionSystem(connection)
    with pytest.warns(UserWarning, match="sqlite3 cannot record changes"):
        return SqliteConnectionSystem(connection)


@pytest.mark.parametrize("make", [apsw_connection, standard_connection])
@pytest.mark.parametrize("seed", range(3))
def test_a_shared_connection_goes_back_too(make: Callable[[], tuple[Any, Ask]], seed: int) -> None:
    connection, ask = make()
    system = connection_system(connection)

    def change(random: Random) -> str:
        sql = statement(random)
        ask(sql)
        return sql

    def everything() -> object:
        tables = ask("SELECT name, sql FROM sqlite_schema WHERE type = 'table' ORDER BY name")
        rows = [sorted(ask(f"SELECT * FROM {row[0]}"), key=repr) for row in tables]
        return [tables, rows, ask("PRAGMA foreign_keys")]

    check_system(system, change, everything)
    system.close()
    connection.close()


def test_a_checkpoint_of_a_shared_connection_costs_what_changed() -> None:
    connection, ask = apsw_connection()
    system = connection_system(connection)
    ask("INSERT INTO t (v) VALUES (randomblob(1000000))")
    system.checkpoint("large")
    ask("INSERT INTO t (v) VALUES (1)")
    ask("INSERT INTO log VALUES (1, 2)")
    system.checkpoint("small")
    [change] = system._tree.head.changes.changes
    assert len(change.rows) < 1_000


def test_an_open_transaction_of_the_shared_connection_is_refused() -> None:
    connection, ask = apsw_connection()
    system = connection_system(connection)
    token = system.checkpoint("x")
    ask("BEGIN")
    for refused in (lambda: system.checkpoint("y"), lambda: system.prepare(token)):
        with pytest.raises(SystemBusy, match="in a transaction"):
            refused()
    ask("COMMIT")
    system.prepare(token)
    with pytest.raises(InvalidArgument, match="must be an SQLite connection"):
        SqliteConnectionSystem(object())  # type: ignore[arg-type]


def test_a_change_that_cannot_be_applied_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    connection, ask = apsw_connection()
    system = connection_system(connection)
    token = system.checkpoint("empty")
    ask("INSERT INTO t (v) VALUES (1)")

    def failing(self: object, counters: object) -> None:
        raise OSError("no")

    with monkeypatch.context() as patch:
        patch.setattr(type(system._database), "_write_counters", failing)
        with pytest.raises(OSError, match="no"):
            system.rollback(token)
    assert ask("SELECT count(*) FROM t") == [[1]]
    ask("INSERT INTO t (v) VALUES (2)")
    system.rollback(token)
    assert ask("SELECT count(*) FROM t") == [[0]]
    assert ask("SELECT count(*) FROM log") == [[0]]


@pytest.mark.parametrize("flaw", ["nothing is recorded", "not built in", "wrong rows"])
def test_a_shared_connection_is_copied_where_changes_cannot_be_recorded(
    flaw: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(connection: object, database: str) -> object:
        raise AttributeError("module 'apsw' has no attribute 'Session'")

    if flaw == "not built in":
        monkeypatch.setattr(apsw, "Session", missing)
    elif flaw == "nothing is recorded":
        monkeypatch.setattr(
            sqlite_connection._Changesets, "pending", lambda self: Snapshot(None, ())
        )
    else:
        apply = apsw.Changeset.apply
        wrong = SimpleNamespace(apply=apply, invert=lambda rows: rows)
        monkeypatch.setattr(apsw, "Changeset", wrong)
    connection, ask = apsw_connection()
    with pytest.warns(UserWarning, match="the whole database, because a self-test") as warned:
        system = connection_system(connection)
    assert warned[0].filename == __file__
    assert type(system._database).__name__ == "_WholeCopies"

    def change(random: Random) -> str:
        sql = statement(random)
        ask(sql)
        return sql

    check_system(system, change, lambda: all_tables(connection), steps=60)
    system.close()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_connection_that_was_forgotten_does_not_take_the_log_away(tmp_path: Path) -> None:
    gc.disable()
    try:
        path = tmp_path / "x.db"
        with sqlite3.connect(path) as forgotten:
            forgotten.execute("PRAGMA journal_mode = WAL")
            forgotten.execute("CREATE TABLE t (a)")
        # It is in a cycle with its cache of statements.
        del forgotten
        system = SqliteSystem(path)
        token = system.checkpoint("empty")
        gc.collect()
        with closing(apsw.Connection(str(path))) as user:
            user.execute("INSERT INTO t VALUES (1)")
            system.rollback(token)
            assert user.execute("SELECT * FROM t").fetchall() == []
        system.close()
    finally:
        gc.enable()
