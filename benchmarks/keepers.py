"""Who keeps a transcript: the contract of a contestant, and Holdfast in its ways of saving.

A keeper saves one message per turn and reads the transcript back. What a keeper does not offer it
does not define, and its cell stays empty. Work that a program would have done anyway, such as
making the message, is done before the clock starts.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import psycopg

import holdfast
from holdfast.codec import Compression

Message: TypeAlias = dict[str, Any]
Work: TypeAlias = Callable[[], Any]

CONTENT_CHARACTERS = 2_050
SUMMARY = "A summary of what was said so far: the order was placed, paid and is on its way."
TRANSCRIPT = "transcript"


def messages(count: int) -> list[Message]:
    """Return a conversation in English prose, about 2.2 KB a message, the same in every run."""
    from pydoc_data import topics

    prose = " ".join(" ".join(text.split()) for _, text in sorted(topics.topics.items()))
    found = []
    for number in range(count):
        start = number * CONTENT_CHARACTERS % (len(prose) - CONTENT_CHARACTERS)
        name = uuid.uuid5(uuid.NAMESPACE_URL, f"message {number}")
        found.append(
            {
                "id": f"msg_{name.hex}",
                "role": "assistant" if number % 2 else "user",
                "content": prose[start : start + CONTENT_CHARACTERS],
                "usage": {"input_tokens": 900 + number, "output_tokens": 400 + number % 97},
            }
        )
    return found


def payload_bytes(transcript: Sequence[Message]) -> int:
    """Return what the messages take as JSON without spaces."""
    return sum(len(json.dumps(message, separators=(",", ":"))) for message in transcript)


@dataclass(frozen=True, slots=True)
class Place:
    """An SQLite file or a PostgreSQL schema, for one keeper alone."""

    path: Path | None = None
    dsn: str = ""
    schema: str = ""

    @property
    def url(self) -> str:
        """The address as Holdfast takes it."""
        return self.dsn if self.path is None else f"sqlite:///{self.path}"

    @property
    def conninfo(self) -> str:
        """The address as libpq takes it, with the schema as the place of every name."""
        return psycopg.conninfo.make_conninfo(self.dsn, options=f"-csearch_path={self.schema}")

    def create(self) -> None:
        """Make the schema; a file is made by its keeper."""
        if self.path is None:
            with psycopg.connect(self.dsn, autocommit=True) as connection:
                connection.execute(f'CREATE SCHEMA IF NOT EXISTS "{self.schema}"'.encode())

    def size_bytes(self) -> int:
        """Return what lies on the disk, after everything was moved from the log into the database.

        The keeper must be closed: two SQLite libraries on one file would lose their locks.
        """
        if self.path is not None:
            connection = sqlite3.connect(self.path)
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            connection.close()
            return self.path.stat().st_size
        with psycopg.connect(self.dsn, autocommit=True) as server:
            row = server.execute(SCHEMA_BYTES, [self.schema]).fetchone()
        assert row is not None
        return int(row[0])


SCHEMA_BYTES = """
SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = %s AND c.relkind = 'r'
"""


class Keeper:
    """Somebody who keeps a transcript; `history` holds what was saved, in the keeper's own form."""

    name: str
    runner: asyncio.Runner | None = None
    """Set where the keeper's methods return awaitables."""

    skips_turns = False
    """Set where saving every turn of a long transcript would take minutes: then only some turns
    before the measured ones are saved, and what depends on all of them is not told."""

    can_load_last = False
    can_load_version = False
    can_fork = False
    can_compact = False

    def __init__(self, name: str, place: Place) -> None:
        self.name = name
        self.place = place
        self.history: list[Any] = []

    def open(self) -> None:
        """Open the place and the transcript in it, which may be there already."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of the place, as at the end of a process."""
        raise NotImplementedError

    def native(self, message: Message) -> Any:
        """Return a message in the form that this keeper's users have it in."""
        return message

    def save(self) -> Any:
        """Save the last message of `history` as a turn."""
        raise NotImplementedError

    def load(self) -> Any:
        """Return all messages."""
        raise NotImplementedError

    def load_last(self, count: int) -> Any:
        """Return the last messages."""
        raise NotImplementedError

    def load_version(self, turn: int) -> Any:
        """Return the messages as they were after a turn."""
        raise NotImplementedError

    def fork(self, turn: int) -> Any:
        """Start another transcript that goes on from a turn."""
        raise NotImplementedError

    def begin_compaction(self, history: list[Any]) -> Any:
        """Save a transcript at once; return the work that puts a summary for its first 90 %."""
        raise NotImplementedError

    def turn(self, message: Message) -> float:
        """Add a message and save it; return the seconds."""
        self.history.append(self.native(message))
        return self.timed(self.save)[0]

    def timed(self, work: Work) -> tuple[float, Any]:
        """Do some work and return the seconds it took; awaitables are timed inside their loop."""
        if self.runner is not None:
            return self.runner.run(_timed(work))
        started = time.perf_counter()
        result = work()
        return time.perf_counter() - started, result

    def done(self, work: Work) -> Any:
        """Do some work and return its result."""
        return self.timed(work)[1]


async def _timed(work: Callable[[], Awaitable[Any]]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = await work()
    return time.perf_counter() - started, result


def compacted(keeper: Keeper, history: Sequence[Any]) -> list[Any]:
    """Return a history whose first 90 % are one summary."""
    summary = keeper.native({"id": "msg_summary", "role": "assistant", "content": SUMMARY})
    return [summary, *history[len(history) * 9 // 10 :]]


class HoldfastKeeper(Keeper):
    """Holdfast: the list channel `messages` of a session."""

    can_load_last = can_load_version = can_fork = can_compact = True

    def __init__(
        self,
        name: str,
        place: Place,
        *,
        saves_all: bool = False,
        compression: Compression = "none",
    ) -> None:
        super().__init__(name, place)
        self._saves_all = saves_all
        self._compression: Compression = compression

    def open(self) -> None:
        """Open the store and resume the session."""
        self.store = holdfast.open(
            self.place.url, namespace=self.place.schema or None, compression=self._compression
        )
        self.session = self.store.session(TRANSCRIPT)

    def close(self) -> None:
        """Close the store."""
        self.store.close()

    def save(self) -> Any:
        """Append the newest message, or hand over the whole list."""
        if self._saves_all:
            return self.session.save(messages=self.history)
        return self.session.append("messages", self.history[-1:])

    def load(self) -> Any:
        """Load the newest version."""
        newest = self.session.latest()
        assert newest is not None
        return newest["messages"]

    def load_last(self, count: int) -> Any:
        """Load the end of the list alone."""
        newest = self.session.latest(last=count)
        assert newest is not None
        return newest["messages"]

    def load_version(self, turn: int) -> Any:
        """Load a version: every turn is one."""
        return self.session.at(turn)["messages"]

    def fork(self, turn: int) -> Any:
        """Fork the session."""
        return self.session.fork(turn)

    def begin_compaction(self, history: list[Any]) -> Work:
        """Hand over the shorter list; what stays is found and not written again."""
        session = self.store.session()
        session.append("messages", history)
        shorter = compacted(self, history)
        return lambda: session.save(messages=shorter)


class AsyncHoldfastKeeper(Keeper):
    """Holdfast in an event loop, as the peers that have no other colour are called."""

    can_load_last = can_load_version = can_fork = can_compact = True

    def __init__(self, name: str, place: Place, runner: asyncio.Runner) -> None:
        super().__init__(name, place)
        self.runner = runner

    def open(self) -> None:
        """Open the store and resume the session."""
        self.done(self._open)

    async def _open(self) -> None:
        namespace = self.place.schema or None
        self.store = await holdfast.aopen(self.place.url, namespace=namespace)
        self.session = await self.store.session(TRANSCRIPT)

    def close(self) -> None:
        """Close the store."""
        self.done(self.store.close)

    async def save(self) -> Any:
        """Append the newest message."""
        return await self.session.append("messages", self.history[-1:])

    async def load(self) -> Any:
        """Load the newest version."""
        newest = await self.session.latest()
        assert newest is not None
        return newest["messages"]

    async def load_last(self, count: int) -> Any:
        """Load the end of the list alone."""
        newest = await self.session.latest(last=count)
        assert newest is not None
        return newest["messages"]

    async def load_version(self, turn: int) -> Any:
        """Load a version: every turn is one."""
        return (await self.session.at(turn))["messages"]

    async def fork(self, turn: int) -> Any:
        """Fork the session."""
        return await self.session.fork(turn)

    def begin_compaction(self, history: list[Any]) -> Work:
        """Hand over the shorter list; what stays is found and not written again."""
        session = self.done(self.store.session)
        self.done(lambda: session.append("messages", history))
        shorter = compacted(self, history)
        return lambda: session.save(messages=shorter)
