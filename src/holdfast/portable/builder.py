"""Records of a session that is known only as whole versions: its lists become lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..checkpoints.changes import EMPTY_LIST
from ..checkpoints.lines import (
    INLINE_BYTES_MAX,
    RUN_BYTES_MAX,
    RUN_ITEMS,
    Entry,
    Inline,
    Ref,
    Stored,
    write_manifest,
)
from ..checkpoints.portable import CheckpointRecord, ItemsRecord, LineRecord
from ..codec import Codec
from ..kernel.portable import Record
from ..records import Kind


class SessionBuilder:
    """Takes the versions of a session in order; a list that only grew is stored once."""

    def __init__(self, codec: Codec, number: int, new_line_id: Callable[[], int]) -> None:
        self._codec = codec
        self.number = number
        """The session's, in the file."""
        self._new_line_id = new_line_id
        self._lines: dict[int, list[bytes]] = {}
        self._lists: dict[str, int] = {}
        self._values: dict[str, tuple[bytes, Entry]] = {}
        self._checkpoints: list[CheckpointRecord] = []

    @property
    def version(self) -> int:
        """The newest version so far, or 0."""
        return self._checkpoints[-1].version if self._checkpoints else 0

    def add(
        self,
        version: int,
        kind: Kind,
        created_at: int,
        channels: Mapping[str, Any],
        data: Any = None,
        name: str = "channel",
        *,
        iteration: int | None = None,
        item_id: str | None = None,
        metadata: Any = None,
    ) -> None:
        """Add a version with all its channels; a refusal of a value begins with `name`."""
        manifest = {
            channel: self._entry(channel, value, f"{name} {channel}")
            for channel, value in channels.items()
        }
        record = CheckpointRecord(
            session_number=self.number,
            version=version,
            epoch=1,
            kind=kind,
            iteration=iteration,
            item_id=item_id,
            state_sequence=0,
            manifest=write_manifest(self._codec, manifest),
            data=None if data is None else self._codec.encode(data, name=name),
            metadata=None if metadata is None else self._codec.encode(metadata, name=name),
            created_at=created_at,
        )
        self._checkpoints.append(record)

    def records(self) -> Iterator[Record]:
        """Yield the lines, then the versions."""
        for line_id, bodies in self._lines.items():
            yield LineRecord(line_id, [])
            for start in range(0, len(bodies), RUN_ITEMS):
                yield from self._run(line_id, start, bodies[start : start + RUN_ITEMS])
        yield from self._checkpoints

    def _run(self, line_id: int, start: int, bodies: Sequence[bytes]) -> Iterator[ItemsRecord]:
        if len(bodies) == RUN_ITEMS and sum(map(len, bodies)) <= RUN_BYTES_MAX:
            yield ItemsRecord(line_id, start, RUN_ITEMS, self._codec.join(bodies))
        else:
            for index, body in enumerate(bodies, start):
                yield ItemsRecord(line_id, index, 1, body)

    def _entry(self, channel: str, value: Any, name: str) -> Entry:
        if type(value) is list:
            return self._list(channel, self._codec.encode_each(value, name=name))
        body = self._codec.encode(value, name=name)
        if len(body) <= INLINE_BYTES_MAX:
            return Inline(body)
        known, entry = self._values.get(channel, (b"", EMPTY_LIST))
        if known != body:
            entry = Stored(self._open([body]))
            self._values[channel] = body, entry
        return entry

    def _list(self, channel: str, bodies: list[bytes]) -> Entry:
        if not bodies:
            return EMPTY_LIST
        line_id = self._lists.get(channel, 0)
        old = self._lines.get(line_id, [])
        if old and bodies[: len(old)] == old:
            self._lines[line_id] = bodies
        else:
            line_id = self._lists[channel] = self._open(bodies)
        return Ref(line_id, len(bodies))

    def _open(self, bodies: list[bytes]) -> int:
        line_id = self._new_line_id()
        self._lines[line_id] = bodies
        return line_id
