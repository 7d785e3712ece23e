"""Changes of channels as rows: appends in place, edits as pieces of old lines.

They are planned from the newest checkpoint as this process remembers it. The write that uses a
remembered head compares the head's random id in the database, so a stale one costs a retry and does
no harm.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from hashlib import blake2b
from typing import Any, TypeAlias

from ..arguments import require_text
from ..codec import Codec
from ..dataclass import dataclass
from ..errors import LimitExceeded, TypeConflict
from ..kernel.operation import Op, PerStore, Runtime
from . import lines
from .keys import ITEMS
from .lines import PIECES_MAX, RUN_ITEMS, Entry, Inline, Manifest, Piece, Ref, Stored

LIST_BYTES_MAX = 16 * 2**20
TOTAL_BYTES_MAX = 64 * 2**20
HEADS_MAX = 1_000
EMPTY_LIST = Inline(b"\x90")


@dataclass(slots=True)
class KnownList:
    """The encoded items of a list: all of them joined, and those since its last full run.

    For a list that is too large to remember, there is a digest instead of the items.
    """

    joined: bytearray | None
    tail: list[bytes]
    digest: blake2b | None = None

    def grow(self, bodies: Sequence[bytes]) -> None:
        """Add items at the end."""
        if self.joined is not None:
            for body in bodies:
                self.joined += body
            if len(self.joined) > LIST_BYTES_MAX:
                self.digest, self.joined = blake2b(self.joined), None
        elif self.digest is not None:
            self.digest.update(b"".join(bodies))

    def is_value(self, body: bytes) -> bool:
        """Whether a channel that is not a list has this value."""
        return self.joined is not None and bytes(self.joined) == body


@dataclass(slots=True)
class Head:
    """A session's newest checkpoint."""

    id: int
    version: int
    manifest: Manifest
    lists: dict[str, KnownList] = field(default_factory=dict)


class Heads(PerStore):
    """An LRU cache of the heads of one store; thread-safe."""

    def __init__(self, runtime: Runtime) -> None:
        self._lock = threading.Lock()
        self._heads: OrderedDict[int, Head] = OrderedDict()
        self._sizes: dict[int, int] = {}
        self._total_bytes = 0

    def get(self, session_number: int) -> Head | None:
        """Return the remembered head of a session, or None."""
        with self._lock:
            head = self._heads.get(session_number)
            if head is not None:
                self._heads.move_to_end(session_number)
            return head

    def put(self, session_number: int, head: Head) -> None:
        """Remember a head, unless a newer one is known."""
        with self._lock:
            known = self._heads.get(session_number)
            if known is not None and known.version > head.version:
                return
            size = 500
            for each in head.lists.values():
                # An estimate of a list's memory.
                size += len(each.joined or b"") + sum(map(len, each.tail)) + 200
            self._total_bytes += size - self._sizes.get(session_number, 0)
            self._sizes[session_number] = size
            self._heads[session_number] = head
            self._heads.move_to_end(session_number)
            while len(self._heads) > HEADS_MAX or self._total_bytes > TOTAL_BYTES_MAX:
                self._drop(next(iter(self._heads)))

    def forget(self, *session_numbers: int) -> None:
        """Drop the heads of sessions."""
        with self._lock:
            for session_number in session_numbers:
                self._drop(session_number)

    def _drop(self, session_number: int) -> None:
        self._heads.pop(session_number, None)
        self._total_bytes -= self._sizes.pop(session_number, 0)


@dataclass(frozen=True, slots=True)
class Extend:
    """Append items to a list channel."""

    bodies: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Grown:
    """Set a channel to a list that only grew since a head: that head's items, and `bodies`.

    For any other head it is set to the whole list, whose first items are the first `joined_bytes`
    of `joined`, which only ever grows.
    """

    head_id: int
    bodies: Sequence[bytes]
    before: Ref
    """The head's list, equal to the first items of this one."""
    joined: bytearray | None
    joined_bytes: int

    def whole(self, codec: Codec) -> Op[list[bytes]]:
        """Return the bodies of all items, reading those of the head if they are not remembered."""
        if self.joined is None:
            pieces = yield from lines.pieces_of(codec, self.before)
            before = yield from lines.bodies_of(codec, pieces)
        else:
            header = lines.list_header(self.before.length)
            before = codec.split(header + self.joined[: self.joined_bytes])
        return [*before, *self.bodies]


class Comparison:
    """Compares encoded items, given in order, with those of a known list."""

    def __init__(self, known: KnownList) -> None:
        self.joined = known.joined
        self.joined_bytes = 0
        self._wanted = None if known.digest is None else known.digest.digest()
        self._digest = blake2b()

    @property
    def is_possible(self) -> bool:
        """Whether there is anything to compare with."""
        return bool(self.joined) or self._wanted is not None

    def add(self, items: memoryview) -> bool:
        """Compare the next items; return False if they are known to differ."""
        start, self.joined_bytes = self.joined_bytes, self.joined_bytes + len(items)
        if self.joined is not None:
            return self.joined.startswith(items, start)
        self._digest.update(items)
        return True

    def is_equal(self) -> bool:
        """Whether the given items are equal to the whole list."""
        return self.joined is not None or self._digest.digest() == self._wanted


@dataclass(frozen=True, slots=True)
class SetValue:
    """Set a channel to a value that is not a list."""

    body: bytes


@dataclass(frozen=True, slots=True)
class SetList:
    """Set a channel to a list, whatever it was."""

    bodies: Sequence[bytes]


ChannelChange: TypeAlias = Extend | Grown | SetValue | SetList


def change_to(codec: Codec, head: Head | None, channel: str, value: Any) -> ChannelChange:
    """Encode a channel; a list that only grew since the known head becomes an append."""
    require_text("channel", channel)
    if type(value) is not list:
        return SetValue(codec.encode(value, name=channel))
    grown = None if head is None else _growth(codec, head, channel, value)
    return grown or SetList(codec.encode_each(value, name=channel))


def _growth(codec: Codec, head: Head, channel: str, value: list[Any]) -> ChannelChange | None:
    """Return how a list grew since a head, by comparing bytes; None if it did not."""
    known, entry = head.lists.get(channel), head.manifest.get(channel)
    if known is None or not isinstance(entry, Ref) or len(value) < entry.length:
        return None
    comparison = Comparison(known)
    if not comparison.is_possible:
        return None
    buffer = bytearray()
    # One run at a time, so that encoded bytes are compared while in the CPU cache.
    for start in range(0, entry.length, RUN_ITEMS):
        run = value[start : min(start + RUN_ITEMS, entry.length)]
        # A tuple would encode like a list, but is refused as everywhere.
        codec.check_each(run, channel, start)
        if not codec.encode_into(run, buffer):
            return None
        with memoryview(buffer)[len(lines.list_header(len(run))) :] as items:
            if not comparison.add(items):
                return None
    if not comparison.is_equal():
        return None
    new = codec.encode_each(value[entry.length :], name=channel)
    return Grown(head.id, new, entry, comparison.joined, comparison.joined_bytes)


def is_simple(head: Head, changes: Mapping[str, ChannelChange]) -> bool:
    """Whether changes can be planned from the remembered head, without a query."""
    for channel, change in changes.items():
        entry, known = head.manifest.get(channel), head.lists.get(channel)
        if isinstance(change, SetValue):
            is_same = (
                isinstance(entry, Stored) and known is not None and known.is_value(change.body)
            )
            if len(change.body) > lines.INLINE_BYTES_MAX and not is_same:
                return False
            continue
        is_growth = isinstance(change, Extend) or (
            isinstance(change, Grown) and change.head_id == head.id
        )
        if not is_growth or known is None or not isinstance(entry, Ref) or not entry.is_open:
            return False
        if entry.own_end + len(change.bodies) > ITEMS:
            return False
    return True


@dataclass(slots=True)
class ChannelPlan:
    """The rows of one checkpoint's channels, and the lists to remember once they are durable."""

    codec: Codec
    head_id: int
    manifest: dict[str, Entry]
    lists: dict[str, KnownList]
    writes: list[lines.LineRows] = field(default_factory=list)
    opened: list[int] = field(default_factory=list)
    grown: dict[str, Sequence[bytes]] = field(default_factory=dict)

    def add(self, changes: Mapping[str, ChannelChange]) -> Op[None]:
        """Plan changes, one per channel, reading what is not remembered."""
        for channel, change in changes.items():
            entry = self.manifest.get(channel)
            match change:
                case SetValue(body):
                    yield from self._set_value(channel, entry, body)
                case Extend(bodies):
                    if entry is not None and not isinstance(entry, Ref) and entry != EMPTY_LIST:
                        raise TypeConflict(
                            f"channel {channel!r} is not a list; save() replaces it",
                            channel=channel,
                        )
                    yield from self._extend(channel, entry, bodies)
                case Grown(head_id, bodies) if head_id == self.head_id and isinstance(entry, Ref):
                    yield from self._extend(channel, entry, bodies)
                case Grown():
                    whole = yield from change.whole(self.codec)
                    yield from self._set_list(channel, entry, whole)
                case SetList(bodies):
                    yield from self._set_list(channel, entry, bodies)

    def remember(self) -> dict[str, KnownList]:
        """Return the lists as of this plan; call it once, when the plan is durable."""
        for channel, bodies in self.grown.items():
            self.lists[channel].grow(bodies)
        return self.lists

    def _set_value(self, channel: str, entry: Entry | None, body: bytes) -> Op[None]:
        if len(body) <= lines.INLINE_BYTES_MAX:
            self.manifest[channel] = Inline(body)
            self.lists.pop(channel, None)
            return
        known = self.lists.get(channel)
        if isinstance(entry, Stored) and known is None:
            (stored,) = yield from lines.bodies_of(self.codec, [Piece(entry.line_id, 0, 1)])
            known = KnownList(bytearray(stored), [])
        if not isinstance(entry, Stored) or known is None or not known.is_value(body):
            line_id = yield from self._open([])
            self.writes.append(lines.write_items(self.codec, line_id, 0, [], [body]))
            self.manifest[channel] = Stored(line_id)
        self.lists[channel] = KnownList(bytearray(body), [])

    def _set_list(self, channel: str, entry: Entry | None, bodies: Sequence[bytes]) -> Op[None]:
        if not isinstance(entry, Ref):
            yield from self._extend(channel, None, bodies)
            return
        known = self.lists.get(channel)
        pieces = yield from lines.pieces_of(self.codec, entry)
        if known is not None and known.joined is not None:
            old = self.codec.split(lines.list_header(entry.length) + known.joined)
        else:
            old = yield from lines.bodies_of(self.codec, pieces)
        prefix = _common(old, bodies)
        if prefix == len(old):
            self.lists[channel] = known or _known(old, entry)
            yield from self._extend(channel, entry, bodies[prefix:])
        elif prefix == len(bodies) and prefix >= entry.base:
            ref = Ref(entry.line_id, prefix, entry.base, entry.skip, is_open=False)
            self.manifest[channel] = ref
            self.lists[channel] = _known(bodies, ref)
        else:
            yield from self._edit(channel, pieces, old, bodies, prefix)

    def _edit(
        self,
        channel: str,
        pieces: Sequence[Piece],
        old: Sequence[bytes],
        new: Sequence[bytes],
        prefix: int,
    ) -> Op[None]:
        """Open a line of the unchanged parts with the new items between them."""
        longest = min(len(old), len(new)) - prefix
        suffix = _common(old[: -longest - 1 : -1], new[: -longest - 1 : -1]) if longest else 0
        middle = new[prefix : len(new) - suffix]
        kept = lines.cut(pieces, 0, prefix)
        if suffix:
            own = [Piece(0, 0, len(middle))] if middle else []
            kept = [*kept, *own, *lines.cut(pieces, len(old) - suffix, len(old))]
        if len(kept) > PIECES_MAX or len(middle) > ITEMS or not (prefix or suffix):
            yield from self._extend(channel, None, new)
            return
        line_id = yield from self._open(kept)
        self.writes.append(lines.write_items(self.codec, line_id, 0, [], middle))
        base = sum(piece.length for piece in kept)
        ref = Ref(line_id, len(new), base, skip=len(middle) if suffix else 0)
        self.manifest[channel] = ref
        # The line's own items are the middle, wherever that is in the list.
        tail = _last(middle, ref.own_end % RUN_ITEMS)
        self.lists[channel] = replace(_known(new, ref), tail=tail)

    def _extend(self, channel: str, entry: Entry | None, new: Sequence[bytes]) -> Op[None]:
        """Append to the open line, or open one that begins with the current list."""
        ref = entry if isinstance(entry, Ref) else None
        if not new:
            if ref is None:
                self.manifest[channel] = EMPTY_LIST
                self.lists.pop(channel, None)
            return
        known = self.lists.get(channel)
        if ref is None:
            ref, known = Ref((yield from self._open([])), 0), KnownList(bytearray(), [])
        grown: list[bytes] = []
        while new:
            if not ref.is_open or ref.own_end == ITEMS:
                _require_room(channel, ref.length + len(new))
                ref, known, before = yield from self._reopen(ref, known)
                grown, new = ([], [*before, *new]) if before else (grown, new)
            room = ITEMS - ref.own_end
            ref, known = yield from self._append(ref, known, new[:room])
            grown += new[:room]
            new = new[room:]
        assert known is not None
        self.manifest[channel], self.lists[channel], self.grown[channel] = ref, known, grown

    def _append(
        self, ref: Ref, known: KnownList | None, new: Sequence[bytes]
    ) -> Op[tuple[Ref, KnownList]]:
        """Append to an open line that has room."""
        start = ref.own_end
        since_run = start % RUN_ITEMS
        if known is not None and len(known.tail) == since_run:
            tail = known.tail
        else:
            piece = Piece(ref.line_id, start - since_run, since_run)
            tail = yield from lines.bodies_of(self.codec, [piece])
        self.writes.append(lines.write_items(self.codec, ref.line_id, start, tail, new))
        whole = [*tail, *new]
        last = whole[len(whole) - (start + len(new)) % RUN_ITEMS :]
        known = KnownList(None, last) if known is None else replace(known, tail=last)
        return Ref(ref.line_id, ref.length + len(new), ref.base, ref.skip), known

    def _reopen(
        self, entry: Ref, known: KnownList | None
    ) -> Op[tuple[Ref, KnownList, Sequence[bytes]]]:
        """Open a line that begins with the whole list; rewrite a list of too many pieces."""
        pieces = yield from lines.pieces_of(self.codec, entry)
        if len(pieces) > PIECES_MAX:
            before = yield from lines.bodies_of(self.codec, pieces)
            return Ref((yield from self._open([])), 0), KnownList(bytearray(), []), before
        line_id = yield from self._open(pieces)
        known = KnownList(None, []) if known is None else replace(known, tail=[])
        return Ref(line_id, entry.length, base=entry.length), known, ()

    def _open(self, pieces: Sequence[Piece]) -> Op[int]:
        line_id = yield from lines.open_line(self.codec, pieces)
        self.opened.append(line_id)
        return line_id


def _require_room(channel: str, length: int) -> None:
    """Refuse a list that would exceed the maximum number of pieces."""
    if length > PIECES_MAX * ITEMS:
        most = f"{PIECES_MAX * ITEMS:,}"
        raise LimitExceeded(f"channel {channel!r} would have {length:,} items, more than {most}")


def _known(bodies: Sequence[bytes], ref: Ref) -> KnownList:
    joined = bytearray().join(bodies)
    count = ref.own_end % RUN_ITEMS
    # Own items before the base are not at the list's end: they are read when needed.
    tail = _last(bodies, count) if count <= ref.length - ref.base else []
    known = KnownList(joined, tail)
    known.grow([])
    return known


def _last(bodies: Sequence[bytes], count: int) -> list[bytes]:
    return list(bodies[len(bodies) - count :])


def _common(old: Sequence[bytes], new: Sequence[bytes]) -> int:
    """Return the length of the common prefix of two lists."""
    for index, (left, right) in enumerate(zip(old, new, strict=False)):
        if left != right:
            return index
    return min(len(old), len(new))
