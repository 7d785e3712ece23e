"""Shared state of another program, converted to the records of an export."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..kernel.operation import Runtime
from ..kernel.portable import Record
from ..sessions.access import Place
from .portable import StateEntryRecord, StateEventRecord, StateRecord
from .values import DocumentOperation, Mutation
from .write import StateWrite


class AdoptedState:
    """Replays the mutations of a tree's state in order, each with its own writer and time."""

    def __init__(self, runtime: Runtime, root_id: str, floor: int = 0) -> None:
        self._write = StateWrite(runtime, Place(root_id, 0, root_id, None), sequence=floor)
        self._floor = floor
        self._authors: dict[str, tuple[str, int, int]] = {}

    @property
    def sequence(self) -> int:
        """The sequence of the last mutation."""
        return self._write.sequence

    def document(self) -> dict[str, Any]:
        """Return the state so far."""
        return self._write.document()

    def expect(
        self, key: str, above: int, updated_by: str, created_at: int, updated_at: int
    ) -> None:
        """Start a key above a version, and record it under this writer and these times."""
        self._write.slot(key).version = above
        self._authors[key] = updated_by, created_at, updated_at

    def mutate(self, mutation: Mutation, updated_by: str, at: int) -> None:
        """Change one key."""
        self._begin(updated_by, at)
        self._write.mutate(mutation)

    def write_document(
        self, operation: DocumentOperation, wanted: Mapping[str, Any], updated_by: str, at: int
    ) -> None:
        """Replace the state by this document."""
        self._begin(updated_by, at)
        self._write.write_document(operation, wanted)

    def _begin(self, updated_by: str, at: int) -> None:
        self._write.place = replace(self._write.place, session_id=updated_by)
        self._write.at = at

    def records(self) -> Iterator[Record]:
        """Yield the state, its events and its entries."""
        write, created_at = self._write, {}
        codec, root_id = write.runtime.codec, write.place.root_id
        yield StateRecord(root_id, write.keys, self._floor, 0, 0)
        last: dict[str, dict[str, Any]] = {}
        for row in write.event_rows():
            key, at = row["key"], row.pop("at")
            by, first_at, at = self._authors.get(key, (row["session_id"], at, at))
            row["session_id"], row["created_at"] = by, at
            if key not in last or last[key]["is_deleted"]:
                created_at[key] = first_at
            last[key] = row
            yield StateEventRecord.of(codec, row)
        for row in write.entry_rows():
            key, event = row["key"], last[row["key"]]
            row["updated_by"], row["updated_at"] = event["session_id"], event["created_at"]
            yield StateEntryRecord.of(codec, {**row, "created_at": created_at[key]})
