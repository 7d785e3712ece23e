"""Reading two versions at the cost of what differs between them, not of what they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..codec import Codec
from ..kernel.operation import Op
from . import manifest as manifests
from .lines import SHIFT, Piece, Ref, cut, pieces_of, values_of
from .manifest import Entry, Manifest, checkpoint_context
from .read import find, naming, value_of


@dataclass(slots=True)
class Delta:
    """The channels in which two versions may differ.

    `shared` counts the items at the beginning of a list that both have; they are not loaded.
    """

    before: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)


def manifest_at(codec: Codec, number: int, session_id: str, version: int) -> Op[dict[str, Entry]]:
    """Return the manifest of a version, from the session or from an origin."""
    owner, row = yield from find(number, session_id, version)
    context = checkpoint_context(owner, row["key"] % SHIFT, "manifest")
    with naming(session_id, version):
        return manifests.unpack(codec, row["manifest"], context)


def read_delta(
    codec: Codec, before: Manifest, after: Manifest, *, with_before: bool = True
) -> Op[Delta]:
    """Load what two manifests do not share; without `before`, only the newer side of it."""
    delta = Delta()
    for channel in sorted(before.keys() | after.keys()):
        old, new = before.get(channel), after.get(channel)
        if old is not None and new is not None and _is_same(old, new):
            continue
        shared = 0
        if isinstance(old, Ref) and isinstance(new, Ref):
            olds = yield from pieces_of(codec, old)
            news = yield from pieces_of(codec, new)
            shared = delta.shared[channel] = _shared(olds, news)
        if old is not None and with_before:
            delta.before[channel] = yield from _rest(codec, old, shared)
        if new is not None:
            delta.after[channel] = yield from _rest(codec, new, shared)
    return delta


def _rest(codec: Codec, entry: Entry, start: int) -> Op[Any]:
    if isinstance(entry, Ref) and start:
        pieces = yield from pieces_of(codec, entry)
        return (yield from values_of(codec, cut(pieces, start, entry.length)))
    value, _ = yield from value_of(codec, entry, None)
    return value


def _is_same(old: Entry, new: Entry) -> bool:
    if isinstance(old, Ref) and isinstance(new, Ref):
        return old.closed() == new.closed()
    return old == new


def _shared(olds: Sequence[Piece], news: Sequence[Piece]) -> int:
    """Return how many items at the beginning of two lists are the very same rows."""
    count = 0
    for old, new in zip(olds, news, strict=False):
        if (old.line_id, old.start) != (new.line_id, new.start):
            break
        count += min(old.length, new.length)
        if old.length != new.length:
            break
    return count
