"""Frames of a session that is known only as whole versions: its lists become lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import Raw

from ..checkpoints.lines import PIECES_MAX, RUN_BYTES_MAX, RUN_ITEMS, Piece, Ref, cut
from ..checkpoints.manifest import INLINE_BYTES_MAX, Entry, Inline, Stored, write
from ..checkpoints.planning import EMPTY_LIST
from ..codec import Codec
from ..records import Kind
from .frames import NIL, CheckpointFrame, Frame, ItemsFrame, LineFrame

ITERATIONS = frozenset({"iteration_start", "iteration_end"})


@dataclass(slots=True)
class _Line:
    """A line in the making."""

    line_id: int
    pieces: list[Piece]
    own: list[bytes] = field(default_factory=list)

    @property
    def base(self) -> int:
        return sum(piece.length for piece in self.pieces)

    def all_pieces(self) -> list[Piece]:
        own = [Piece(self.line_id, 0, len(self.own))] if self.own else []
        return [*self.pieces, *own]


class SessionBuilder:
    """Takes the versions of a session in order and stores each item once."""

    def __init__(self, codec: Codec, new_line_id: Callable[[], int]) -> None:
        self._codec = codec
        self._new_line_id = new_line_id
        self._lines: list[_Line] = []
        self._lists: dict[str, tuple[_Line, list[bytes]]] = {}
        self._values: dict[str, tuple[bytes, Entry]] = {}
        self._checkpoints: list[CheckpointFrame] = []

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
        frame = CheckpointFrame(
            version=version,
            epoch=1,
            kind=kind,
            iteration=iteration,
            item_id=item_id,
            state_sequence=0,
            created_at=created_at,
            manifest=Raw(write(self._codec, manifest)),
            data=NIL if data is None else Raw(self._codec.encode(data, name=name)),
            metadata=NIL if metadata is None else Raw(self._codec.encode(metadata, name=name)),
        )
        self._checkpoints.append(frame)

    def lines(self) -> Iterator[Frame]:
        """Yield the lines, which come before the session."""
        for line in self._lines:
            yield LineFrame(line.line_id, [(p.line_id, p.start, p.length) for p in line.pieces])
            for start in range(0, len(line.own), RUN_ITEMS):
                yield from self._run(start, line.own[start : start + RUN_ITEMS])

    def checkpoints(self) -> Iterator[Frame]:
        """Yield the versions, which come after the session."""
        yield from self._checkpoints

    def _run(self, start: int, bodies: Sequence[bytes]) -> Iterator[ItemsFrame]:
        if len(bodies) == RUN_ITEMS and sum(map(len, bodies)) <= RUN_BYTES_MAX:
            yield ItemsFrame(start, RUN_ITEMS, Raw(self._codec.join(bodies)))
        else:
            for index, body in enumerate(bodies, start):
                yield ItemsFrame(index, 1, Raw(body))

    def _entry(self, channel: str, value: Any, name: str) -> Entry:
        if type(value) is list:
            return self._list(channel, self._codec.encode_each(value, name=name))
        body = self._codec.encode(value, name=name)
        if len(body) <= INLINE_BYTES_MAX:
            return Inline(body)
        known, entry = self._values.get(channel, (b"", Inline(EMPTY_LIST)))
        if known != body:
            entry = Stored(self._open([], [body]).line_id)
            self._values[channel] = body, entry
        return entry

    def _list(self, channel: str, bodies: list[bytes]) -> Entry:
        if not bodies:
            return Inline(EMPTY_LIST)
        if channel not in self._lists:
            line = self._open([], bodies)
        else:
            line, old = self._lists[channel]
            prefix = _common(old, bodies)
            if prefix == len(old):
                line.own += bodies[prefix:]
            else:
                pieces = cut(line.all_pieces(), 0, prefix)
                if len(pieces) > PIECES_MAX:
                    pieces, prefix = [], 0
                line = self._open(pieces, bodies[prefix:])
        self._lists[channel] = line, bodies
        return Ref(line.line_id, len(bodies), line.base)

    def _open(self, pieces: list[Piece], bodies: Sequence[bytes]) -> _Line:
        line = _Line(self._new_line_id(), pieces, list(bodies))
        self._lines.append(line)
        return line


def _common(old: Sequence[bytes], new: Sequence[bytes]) -> int:
    for index, (left, right) in enumerate(zip(old, new, strict=False)):
        if left != right:
            return index
    return min(len(old), len(new))
