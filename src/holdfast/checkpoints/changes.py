"""Changes of channels as rows: appends in place, edits as pieces of old lines.

They are planned from the newest checkpoint as this process remembers it. The write that uses a
remembered head compares the head's random id in the database, so a stale one costs a retry and does
no harm.

A list that is saved again only grew if it begins with the fingerprint of the remembered one:
XXH3-128 of the exact forms of all items. Whatever has the fingerprint of items that were checked is
plain data too; it is neither checked nor encoded again.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any, TypeAlias

from xxhash import xxh3_128

from ..arguments import require_text
from ..codec import Codec, exact_forms
from ..dataclass import dataclass
from ..errors import InvalidArgument, LimitExceeded, TypeConflict
from ..kernel.operation import Op, PerStore, Runtime
from . import lines
from .keys import ITEMS
from .lines import PIECES_MAX, RUN_ITEMS, Entry, Inline, Manifest, Piece, Ref, Stored

LIST_BYTES_MAX = 16 * 2**20
TOTAL_BYTES_MAX = 64 * 2**20
HEADS_MAX = 1_000
EMPTY_LIST = Inline(b"\x90")
# Nobody can prepare two lists with the same fingerprint.
_SEED = secrets.randbits(64)


@dataclass(slots=True)
class KnownList:
    """The encoded items of a list: all of them joined, and those since its last full run."""

    joined: bytearray | None
    """None for a list that is too large to remember. It is shared with later heads, and only ever
    grows."""
    tail: list[bytes]
    joined_bytes: int = 0
    """How much of `joined` belongs to this list."""
    fingerprint: xxh3_128 | None = None
    """Of all items; None if some were not given to this process."""

    def grow(self, bodies: Sequence[bytes]) -> None:
        """Add items at the end."""
        if self.joined is not None:
            for body in bodies:
                self.joined += body
            self.joined_bytes = len(self.joined)
            if self.joined_bytes > LIST_BYTES_MAX:
                self.joined = None

    def bodies(self, codec: Codec, ref: Ref) -> list[bytes] | None:
        """Return the encoded items of the list, or None if they are not remembered."""
        if self.joined is None:
            return None
        return codec.split(lines.list_header(ref.length) + self.joined[: self.joined_bytes])

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
                size += len(each.joined or b"") + sum(map(len, each.tail)) + 900
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
    forms: list[bytes]
    """The exact forms of the items."""


@dataclass(frozen=True, slots=True)
class Grown:
    """Set a channel to a list that only grew since a head: that head's items, and `bodies`.

    For any other head it is set to the whole list.
    """

    head_id: int
    bodies: Sequence[bytes]
    fingerprint: xxh3_128
    """Of the whole list."""
    before: Ref
    """The head's list, equal to the first items of this one."""
    known: KnownList
    given: Sequence[Any]
    """The first items, as the caller gave them."""

    def whole(self, codec: Codec) -> Op[list[bytes]]:
        """Return the bodies of all items, encoding those of the head if they are not remembered."""
        before = self.known.bodies(codec, self.before) or self._encoded(codec)
        if before is None:
            pieces = yield from lines.pieces_of(codec, self.before)
            before = yield from lines.bodies_of(codec, pieces)
        return [*before, *self.bodies]

    def _encoded(self, codec: Codec) -> list[bytes] | None:
        """Return the bodies of the first items; None if the caller has changed one meanwhile.

        The head is not the session's any more: its items may be gone from the database.
        """
        forms: list[bytes] = []
        try:
            bodies = codec.encode_each(self.given, forms=forms)
        except InvalidArgument:
            return None
        assert self.known.fingerprint is not None
        is_same = fingerprint(forms).digest() == self.known.fingerprint.digest()
        return bodies if is_same else None


@dataclass(frozen=True, slots=True)
class SetValue:
    """Set a channel to a value that is not a list."""

    body: bytes


@dataclass(frozen=True, slots=True)
class SetList:
    """Set a channel to a list, whatever it was."""

    bodies: Sequence[bytes]
    fingerprint: xxh3_128


ChannelChange: TypeAlias = Extend | Grown | SetValue | SetList


def change_to(codec: Codec, head: Head | None, channel: str, value: Any) -> ChannelChange:
    """Encode a channel; a list that only grew since the known head becomes an append."""
    require_text("channel", channel)
    if type(value) is not list:
        return SetValue(codec.encode(value, name=channel))
    grown = None if head is None else _growth(codec, head, channel, value)
    if grown is not None:
        return grown
    forms: list[bytes] = []
    bodies = codec.encode_each(value, name=channel, forms=forms)
    return SetList(bodies, fingerprint(forms))


def _growth(codec: Codec, head: Head, channel: str, value: list[Any]) -> Grown | None:
    """Return how a list grew since a head; None if it did not, or that is not known."""
    known, entry = head.lists.get(channel), head.manifest.get(channel)
    if known is None or not isinstance(entry, Ref) or len(value) < entry.length:
        return None
    if known.fingerprint is None:
        return None
    given = value[: entry.length]
    found = fingerprint_of(given)
    if found is None or found.digest() != known.fingerprint.digest():
        return None
    forms: list[bytes] = []
    new = codec.encode_each(value[entry.length :], name=channel, start=entry.length, forms=forms)
    return Grown(head.id, new, fingerprint(forms, found), entry, known, given)


def fingerprint(forms: Iterable[bytes], after: xxh3_128 | None = None) -> xxh3_128:
    """Return the fingerprint of items, given by their exact forms, behind those of another."""
    found = xxh3_128(seed=_SEED) if after is None else after.copy()
    for form in forms:
        found.update(form)
    return found


def fingerprint_of(items: Sequence[Any]) -> xxh3_128 | None:
    """Return the fingerprint of items that may be anything; None if they cannot be plain data."""
    found = fingerprint(())
    # One run at a time, so that its form is read while in the CPU cache.
    for start in range(0, len(items), RUN_ITEMS):
        forms = exact_forms(items[start : start + RUN_ITEMS])
        if forms is None:
            return None
        found.update(forms)
    return found


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
            entry, known = self.manifest.get(channel), self.lists.get(channel)
            after: xxh3_128 | None = None
            match change:
                case SetValue(body):
                    yield from self._set_value(channel, entry, body)
                case Extend(bodies, forms):
                    if entry is not None and not isinstance(entry, Ref) and entry != EMPTY_LIST:
                        raise TypeConflict(
                            f"channel {channel!r} is not a list; save() replaces it",
                            channel=channel,
                        )
                    yield from self._extend(channel, entry, bodies)
                    if not isinstance(entry, Ref):
                        after = fingerprint(forms)
                    elif known is not None and known.fingerprint is not None:
                        after = fingerprint(forms, known.fingerprint)
                case Grown(head_id, bodies, after) if head_id == self.head_id:
                    yield from self._extend(channel, entry, bodies)
                case Grown(_, _, after):
                    whole = yield from change.whole(self.codec)
                    yield from self._set_list(channel, entry, whole)
                case SetList(bodies, after):
                    yield from self._set_list(channel, entry, bodies)
            if channel in self.lists:
                self.lists[channel].fingerprint = after

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
        old = None if known is None else known.bodies(self.codec, entry)
        if old is None:
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
