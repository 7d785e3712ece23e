"""Turning what a caller wants to save into rows: appends in place, edits as pieces of old lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ..codec import Codec
from ..errors import TypeConflict
from ..kernel.operation import Op
from .heads import LIST_BYTES_MAX, Head, KnownList
from .lines import (
    PIECES_MAX,
    RUN_ITEMS,
    Piece,
    Ref,
    Write,
    bodies_of,
    cut,
    list_header,
    open_line,
    pieces_of,
    write_items,
)
from .manifest import INLINE_BYTES_MAX, Entry, Inline, Stored

EMPTY_LIST = b"\x90"


@dataclass(frozen=True, slots=True)
class Extend:
    """Append items to a list channel."""

    bodies: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Grown:
    """Set a channel to a list that only grew since a head: that head's items, and these.

    For any other head it is the whole list: the first bytes of what is known of that head's, which
    only ever grows, and these.
    """

    head_id: int
    bodies: Sequence[bytes]
    joined: bytearray
    joined_bytes: int
    joined_items: int

    def whole(self, codec: Codec) -> list[bytes]:
        """Return the bodies of all items."""
        before = list_header(self.joined_items) + self.joined[: self.joined_bytes]
        return [*codec.split(before), *self.bodies]


@dataclass(frozen=True, slots=True)
class SetValue:
    """Set a channel to a value that is not a list."""

    body: bytes


@dataclass(frozen=True, slots=True)
class SetList:
    """Set a channel to a list, whatever it was."""

    bodies: Sequence[bytes]


Change: TypeAlias = Extend | Grown | SetValue | SetList


@dataclass(slots=True)
class Plan:
    """The rows of one checkpoint's channels."""

    manifest: dict[str, Entry]
    lists: dict[str, KnownList]
    writes: list[Write] = field(default_factory=list)
    opened: list[int] = field(default_factory=list)
    grown: dict[str, Sequence[bytes]] = field(default_factory=dict)

    def remember(self) -> dict[str, KnownList]:
        """Return the lists as they are once the plan is durable; call it once, then."""
        for channel, bodies in self.grown.items():
            joined = self.lists[channel].joined
            if joined is not None:
                for body in bodies:
                    joined += body
                if len(joined) > LIST_BYTES_MAX:
                    self.lists[channel].joined = None
        return self.lists


def is_simple(head: Head, changes: Mapping[str, Change]) -> bool:
    """Tell whether a plan can be made from what is remembered, without asking the database."""
    for channel, change in changes.items():
        entry, known = head.manifest.get(channel), head.lists.get(channel)
        if isinstance(change, SetValue):
            is_same = (
                isinstance(entry, Stored) and known is not None and known.is_value(change.body)
            )
            if len(change.body) > INLINE_BYTES_MAX and not is_same:
                return False
            continue
        is_known = known is not None and isinstance(entry, Ref) and entry.is_open
        is_growth = isinstance(change, Extend) or (
            isinstance(change, Grown) and change.head_id == head.id
        )
        if not (is_growth and is_known):
            return False
    return True


def make_plan(codec: Codec, head: Head, changes: Mapping[str, Change]) -> Op[Plan]:
    """Plan the channels of the next checkpoint; what is not remembered is read."""
    plan = Plan(dict(head.manifest), dict(head.lists))
    for channel, change in changes.items():
        entry, known = head.manifest.get(channel), head.lists.get(channel)
        match change:
            case SetValue(body):
                yield from _set_value(codec, plan, channel, body)
            case Extend(bodies) if isinstance(entry, Ref):
                yield from _extend(codec, plan, channel, entry, bodies)
            case Extend(bodies):
                if entry is not None and entry != Inline(EMPTY_LIST):
                    raise TypeConflict(
                        f"channel {channel!r} is not a list; save() replaces it", channel=channel
                    )
                yield from _extend(codec, plan, channel, None, bodies)
            case Grown(head_id, bodies) if head_id == head.id and isinstance(entry, Ref):
                yield from _extend(codec, plan, channel, entry, bodies)
            case Grown():
                bodies = change.whole(codec)
                yield from _set_list(codec, plan, channel, entry, known, bodies)
            case SetList(bodies):
                yield from _set_list(codec, plan, channel, entry, known, bodies)
    return plan


def _set_value(codec: Codec, plan: Plan, channel: str, body: bytes) -> Op[None]:
    if len(body) <= INLINE_BYTES_MAX:
        plan.manifest[channel] = Inline(body)
        plan.lists.pop(channel, None)
        return
    entry, known = plan.manifest.get(channel), plan.lists.get(channel)
    if isinstance(entry, Stored) and known is None:
        (stored,) = yield from bodies_of(codec, [Piece(entry.line_id, 0, 1)])
        known = KnownList(bytearray(stored), [])
    if not isinstance(entry, Stored) or known is None or not known.is_value(body):
        line_id = yield from _open(codec, plan, [])
        plan.writes.append(write_items(codec, line_id, 0, [], [body]))
        plan.manifest[channel] = Stored(line_id)
    plan.lists[channel] = KnownList(bytearray(body), [])


def _set_list(
    codec: Codec,
    plan: Plan,
    channel: str,
    entry: Entry | None,
    known: KnownList | None,
    bodies: Sequence[bytes],
) -> Op[None]:
    if not isinstance(entry, Ref):
        yield from _extend(codec, plan, channel, None, bodies)
        return
    pieces = yield from pieces_of(codec, entry)
    if known is not None and known.joined is not None:
        old = codec.split(list_header(entry.length) + known.joined)
    else:
        old = yield from bodies_of(codec, pieces)
    prefix = _common(old, bodies)
    if prefix == len(old):
        plan.lists[channel] = known or _known(old, entry)
        yield from _extend(codec, plan, channel, entry, bodies[prefix:])
    elif prefix == len(bodies) and prefix >= entry.base:
        plan.manifest[channel] = Ref(entry.line_id, prefix, entry.base, entry.skip, is_open=False)
        plan.lists[channel] = _known(bodies, plan.manifest[channel])
    else:
        yield from _edit(codec, plan, channel, pieces, old, bodies, prefix)


def _edit(
    codec: Codec,
    plan: Plan,
    channel: str,
    pieces: Sequence[Piece],
    old: Sequence[bytes],
    new: Sequence[bytes],
    prefix: int,
) -> Op[None]:
    """Open a line of the parts that stay, with what is new between them."""
    longest = min(len(old), len(new)) - prefix
    suffix = _common(old[: -longest - 1 : -1], new[: -longest - 1 : -1]) if longest else 0
    middle = new[prefix : len(new) - suffix]
    kept = cut(pieces, 0, prefix)
    if suffix:
        own = [Piece(0, 0, len(middle))] if middle else []
        kept = [*kept, *own, *cut(pieces, len(old) - suffix, len(old))]
    if len(kept) > PIECES_MAX or not (prefix or suffix):
        yield from _extend(codec, plan, channel, None, new)
        return
    line_id = yield from _open(codec, plan, kept)
    plan.writes.append(write_items(codec, line_id, 0, [], middle))
    base = sum(piece.length for piece in kept)
    ref = Ref(line_id, len(new), base, skip=len(middle) if suffix else 0)
    plan.manifest[channel] = ref
    # What lies in the line is the middle, wherever that stands in the list.
    tail = _last(middle, ref.own_end % RUN_ITEMS)
    plan.lists[channel] = KnownList(_known(new, ref).joined, tail)


def _extend(
    codec: Codec, plan: Plan, channel: str, entry: Ref | None, new: Sequence[bytes]
) -> Op[None]:
    """Append to the open line, or open one that begins where the list stands."""
    if not new:
        if entry is None:
            plan.manifest[channel] = Inline(EMPTY_LIST)
            plan.lists.pop(channel, None)
        return
    known = plan.lists.get(channel)
    if entry is None:
        entry, known = Ref((yield from _open(codec, plan, [])), 0), KnownList(bytearray(), [])
    elif not entry.is_open:
        entry, known, before = yield from _reopen(codec, plan, entry, known)
        new = [*before, *new]
    start = entry.own_end
    since_run = start % RUN_ITEMS
    if known is not None and len(known.tail) == since_run:
        tail = known.tail
    else:
        piece = Piece(entry.line_id, start - since_run, since_run)
        tail = yield from bodies_of(codec, [piece])
    plan.writes.append(write_items(codec, entry.line_id, start, tail, new))
    plan.manifest[channel] = Ref(entry.line_id, entry.length + len(new), entry.base, entry.skip)
    whole = [*tail, *new]
    last = whole[len(whole) - (start + len(new)) % RUN_ITEMS :]
    plan.lists[channel] = KnownList(known.joined if known is not None else None, last)
    plan.grown[channel] = new


def _reopen(
    codec: Codec, plan: Plan, entry: Ref, known: KnownList | None
) -> Op[tuple[Ref, KnownList, Sequence[bytes]]]:
    """Open a line that begins with the whole list; one in too many pieces is written out anew."""
    pieces = yield from pieces_of(codec, entry)
    if len(pieces) > PIECES_MAX:
        before = yield from bodies_of(codec, pieces)
        return Ref((yield from _open(codec, plan, [])), 0), KnownList(bytearray(), []), before
    line_id = yield from _open(codec, plan, pieces)
    joined = known.joined if known is not None else None
    return Ref(line_id, entry.length, base=entry.length), KnownList(joined, []), ()


def _open(codec: Codec, plan: Plan, pieces: Sequence[Piece]) -> Op[int]:
    line_id = yield from open_line(codec, pieces)
    plan.opened.append(line_id)
    return line_id


def _known(bodies: Sequence[bytes], entry: Entry) -> KnownList:
    joined = bytearray().join(bodies)
    count = entry.own_end % RUN_ITEMS if isinstance(entry, Ref) else 0
    # Own items that stand before the base are not the list's last: they are read when needed.
    is_last = isinstance(entry, Ref) and count <= entry.length - entry.base
    tail = _last(bodies, count) if is_last else []
    return KnownList(joined if len(joined) <= LIST_BYTES_MAX else None, tail)


def _last(bodies: Sequence[bytes], count: int) -> list[bytes]:
    return list(bodies[len(bodies) - count :])


def _common(old: Sequence[bytes], new: Sequence[bytes]) -> int:
    """Return how many items two lists have in common at their beginning."""
    for index, (left, right) in enumerate(zip(old, new, strict=False)):
        if left != right:
            return index
    return min(len(old), len(new))
