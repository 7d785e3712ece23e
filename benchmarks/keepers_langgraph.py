"""LangGraph's savers, called as its loop calls them: one `put` per turn, without the graph.

`DeltaChannel` (beta) stores what a turn writes and, at every hundredth, a snapshot of the whole
list; the writes of a turn and its checkpoint are two transactions, as in its loop.
"""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from .keepers import TRANSCRIPT, Keeper, Message, Place, Work, compacted

CHANNEL = "messages"
SNAPSHOT_FREQUENCY = 100


class SaverKeeper(Keeper):
    """`SqliteSaver` or `PostgresSaver` with the whole list in every checkpoint."""

    can_load_version = can_fork = can_compact = True

    def __init__(
        self, name: str, place: Place, *, langchain: bool = False, skips_turns: bool = False
    ) -> None:
        super().__init__(name, place)
        self.skips_turns = skips_turns
        self._langchain = langchain
        self._ids: dict[int, str] = {}
        self._number = 0
        self.config = _thread(TRANSCRIPT)

    def open(self) -> None:
        """Open a connection as durable as Holdfast's; it is closed with the saver."""
        if self.place.path is not None:
            self.saver, self._connection = _sqlite_saver(self.place)
        else:
            self.saver, self._connection = _postgres_saver(self.place)
            if not self._ids:
                self.saver.setup()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def native(self, message: Message) -> Any:
        """Return a dict or a LangChain message."""
        if not self._langchain:
            return message
        from langchain_core.messages import (  # type: ignore[import-not-found]
            AIMessage,
            HumanMessage,
        )

        kind = AIMessage if message["role"] == "assistant" else HumanMessage
        rest = {"usage": message["usage"]} if "usage" in message else {}
        return kind(content=message["content"], id=message["id"], additional_kwargs=rest)

    def save(self) -> None:
        """Put a checkpoint with the whole list."""
        self.config = self._put(self.config, self.history)
        self._ids[len(self.history)] = self.config["configurable"]["checkpoint_id"]

    def load(self) -> Any:
        """Get the newest checkpoint."""
        return self._list(_thread(TRANSCRIPT))

    def load_version(self, turn: int) -> Any:
        """Get an older checkpoint."""
        return self._list(self._at(turn))

    def fork(self, turn: int) -> None:
        """Put an older checkpoint as the first of another thread."""
        self._put(_thread(str(uuid.uuid4())), self._list(self._at(turn)))

    def begin_compaction(self, history: list[Any]) -> Work:
        """Put a checkpoint with the shorter list."""
        config = self._put(_thread(str(uuid.uuid4())), history)
        shorter = compacted(self, history)
        return lambda: self._put(config, shorter)

    def _put(self, config: Any, history: Sequence[Any]) -> Any:
        self._number += 1
        version = f"{self._number:032}.{0.5:016}"
        checkpoint = _checkpoint({CHANNEL: history}, version)
        return self.saver.put(config, checkpoint, _metadata(self._number), {CHANNEL: version})

    def _list(self, config: Any) -> Any:
        return self.saver.get_tuple(config).checkpoint["channel_values"][CHANNEL]

    def _at(self, turn: int) -> Any:
        return _thread(TRANSCRIPT, self._ids[turn])


class DeltaKeeper(SaverKeeper):
    """A saver below a `DeltaChannel`."""

    def open(self) -> None:
        """Open the saver, and the thread with an empty checkpoint to hang the first write on."""
        from langgraph.channels.delta import DeltaChannel  # type: ignore[import-not-found]

        super().open()
        self._channel = DeltaChannel(_extend, list, snapshot_frequency=SNAPSHOT_FREQUENCY)
        if not self._ids:
            self.config = self._write(self.config, None, [], snapshot=False)

    def save(self) -> None:
        """Put the turn's write, then a checkpoint: every hundredth with the whole list."""
        is_due = len(self.history) % SNAPSHOT_FREQUENCY == 0
        self.config = self._write(self.config, self.history[-1:], self.history, snapshot=is_due)
        self._ids[len(self.history)] = self.config["configurable"]["checkpoint_id"]

    def fork(self, turn: int) -> None:
        """Put an older list as the first snapshot of another thread, as a branch begins."""
        history = self._list(self._at(turn))
        self._write(_thread(str(uuid.uuid4())), None, history, snapshot=True)

    def begin_compaction(self, history: list[Any]) -> Work:
        """Overwrite the list, which also makes a snapshot."""
        from langgraph.types import Overwrite  # type: ignore[import-not-found]

        config = self._write(_thread(str(uuid.uuid4())), None, history, snapshot=True)
        shorter = compacted(self, history)
        return lambda: self._write(config, Overwrite(shorter), shorter, snapshot=True)

    def _write(self, config: Any, write: Any, history: Sequence[Any], *, snapshot: bool) -> Any:
        from langgraph.checkpoint.serde.types import (  # type: ignore[import-not-found]
            _DeltaSnapshot,
        )

        if write is not None:
            self.saver.put_writes(config, [(CHANNEL, write)], str(uuid.uuid4()))
        self._number += 1
        version = f"{self._number:032}.{0.5:016}"
        checkpoint = _checkpoint({CHANNEL: _DeltaSnapshot(history)} if snapshot else {}, version)
        metadata = _metadata(self._number)
        if not snapshot:
            since = len(history) % SNAPSHOT_FREQUENCY
            metadata["counters_since_delta_snapshot"] = {CHANNEL: (since, since)}
        return self.saver.put(config, checkpoint, metadata, {CHANNEL: version})

    def _list(self, config: Any) -> Any:
        from langgraph._internal._typing import MISSING  # type: ignore[import-not-found]

        found = self.saver.get_tuple(config)
        if CHANNEL in found.checkpoint["channel_values"]:
            seed, writes = found.checkpoint["channel_values"][CHANNEL], []
        else:
            history = self.saver.get_delta_channel_history(config=found.config, channels=[CHANNEL])
            seed, writes = history[CHANNEL].get("seed", MISSING), history[CHANNEL]["writes"]
        channel = self._channel.from_checkpoint(seed)
        channel.replay_writes(writes)
        return channel.get()


def _extend(state: list[Any], writes: Sequence[list[Any]]) -> list[Any]:
    return [*state, *(message for write in writes for message in write)]


def _sqlite_saver(place: Place) -> tuple[Any, Any]:
    from langgraph.checkpoint.sqlite import SqliteSaver  # type: ignore[import-not-found]

    assert place.path is not None
    connection = sqlite3.connect(place.path, check_same_thread=False)
    for pragma in ("PRAGMA journal_mode=WAL", "PRAGMA synchronous=FULL"):
        connection.execute(pragma).fetchall()
    return SqliteSaver(connection), connection


def _postgres_saver(place: Place) -> tuple[Any, Any]:
    import psycopg
    from langgraph.checkpoint.postgres import PostgresSaver  # type: ignore[import-not-found]
    from psycopg.rows import dict_row

    connection = psycopg.connect(
        place.conninfo, autocommit=True, prepare_threshold=0, row_factory=dict_row
    )
    return PostgresSaver(connection), connection


def _thread(thread_id: str, checkpoint_id: str | None = None) -> dict[str, dict[str, str]]:
    configurable = {"thread_id": thread_id, "checkpoint_ns": ""}
    if checkpoint_id is not None:
        configurable["checkpoint_id"] = checkpoint_id
    return {"configurable": configurable}


def _checkpoint(values: dict[str, Any], version: str) -> dict[str, Any]:
    from langgraph.checkpoint.base.id import uuid6  # type: ignore[import-not-found]

    return {
        "v": 4,
        "id": str(uuid6(clock_seq=-2)),
        "ts": datetime.now(UTC).isoformat(),
        "channel_values": values,
        "channel_versions": {CHANNEL: version},
        "versions_seen": {},
    }


def _metadata(step: int) -> dict[str, Any]:
    return {"source": "loop", "step": step, "parents": {}}
