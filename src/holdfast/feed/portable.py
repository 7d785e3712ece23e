"""Trees and their feeds in export files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

from ..arguments import require_new_id
from ..dataclass import dataclass
from ..kernel.inserts import Insert
from ..kernel.kept import Kept, kept
from ..kernel.operation import AfterCommit, Lock, Op, Row, rows
from ..kernel.owned_rows import OwnedRows, read_each
from ..kernel.portable import (
    ANY,
    Count,
    Export,
    Import,
    Name,
    Portable,
    Record,
    Sealed,
    Seen,
    Time,
)
from ..kernel.schema import read_now_ms
from ..kernel.signals import TREE_TOPIC
from ..kernel.sql import among, given
from .events import emit, event


class TreeRecord(Record, frozen=True, tag="tree"):
    """A session tree: the position of its feed, the sequence of its state, and its floor."""

    root_id: Name
    position: Count
    sequence: Count
    floor: Count = 0

    def problem(self, seen: Seen) -> str | None:
        """Check that it is not repeated, and that its feed does not begin after its end."""
        require_new_id("id", self.root_id)
        if self.root_id in seen.trees:
            return f"tree {self.root_id!r} comes twice"
        if self.floor > self.position:
            return f"the feed of tree {self.root_id!r} begins after its end"
        seen.trees[self.root_id] = self.floor
        seen.of(_Feeds).ends[self.root_id] = self.position
        seen.of(_Feeds).sequences[self.root_id] = self.sequence
        return None

    def add(self, into: Import) -> Op[None]:
        """Add and lock the tree; one whose sessions were deleted here keeps its feed."""

        def note(found: list[Row]) -> Op[None] | None:
            into.of(_Feeds).is_known[self.root_id] = not found
            return None if found else self._continue()

        into.insert(ADD_TREE, self.row(into.codec), then=note)
        yield from ()

    def _continue(self) -> Op[None]:
        yield Lock(self.root_id)
        yield from rows(RAISE_SEQUENCE, root_id=self.root_id, sequence=self.sequence)


class EventRecord(Record, frozen=True, tag="event"):
    """One event of a tree."""

    sealed = Sealed(lambda row, name: ("hf_events", row["root_id"]), data=ANY)

    root_id: Name
    position: Count
    session_id: Name
    kind: Name
    created_at: Time
    data: bytes

    def problem(self, seen: Seen) -> str | None:
        """Check that it is the next of its tree."""
        if self.position != seen.trees.get(self.root_id, -1) + 1:
            return f"event {self.position} is out of order"
        seen.trees[self.root_id] = self.position
        return None

    def add(self, into: Import) -> Op[None]:
        """Add the event, unless the store has a feed for this tree."""
        is_known = into.of(_Feeds).is_known
        if self.root_id not in is_known:
            yield from into.flush()
        if not is_known[self.root_id]:
            into.insert(ADD_EVENT, self.row(into.codec))


@dataclass(slots=True)
class _Feeds:
    ends: Kept[str, int] = kept(int)
    sequences: Kept[str, int] = kept(int)
    is_known: Kept[str, bool] = kept(bool)
    """For each added tree, whether the store had it already."""


ADD_TREE = Insert(
    "hf_trees",
    TreeRecord.columns(),
    "ON CONFLICT (root_id) DO NOTHING RETURNING root_id",
    key="root_id",
)
RAISE_SEQUENCE = """
UPDATE hf_trees SET sequence = :sequence WHERE root_id = :root_id AND sequence < :sequence
"""
ADVANCE_FEEDS = f"""
UPDATE hf_trees SET position = position + 1 WHERE root_id {among("root_ids")}
"""  # noqa: S608
TREES = OwnedRows(
    TreeRecord.selected(), "hf_trees", "root_id = {owner}", {"root_id": ""}, owner="TEXT"
)
EVENTS = OwnedRows(
    EventRecord.selected(), "hf_events", "root_id = {owner}", {"position": 0}, owner="TEXT"
)
ADD_EVENT = Insert("hf_events", EventRecord.columns())


class FeedPortable(Portable):
    """A tree is exported with its whole feed."""

    records = (TreeRecord, EventRecord)

    def export(self, out: Export) -> Op[None]:
        """Write the trees in lock order, then their events."""
        yield from read_each(TREES, sorted(out.root_ids), TreeRecord.to(out))
        yield from read_each(EVENTS, sorted(out.root_ids), EventRecord.to(out))

    def problem_at_end(self, seen: Seen) -> str | None:
        """Check that every feed ends at its tree's position."""
        ends = seen.of(_Feeds).ends
        for root_id, position in seen.trees.items():
            if position != ends[root_id]:
                return f"the feed of tree {root_id!r} ends at {position}"
        return None


def emit_each(into: Import, kind: str, data_of: Mapping[str, object]) -> Op[None]:
    """Emit an event to each of some trees of a group; to all new trees in one batch."""
    feeds = into.of(_Feeds)
    new = {root_id: data for root_id, data in data_of.items() if not feeds.is_known[root_id]}
    for root_id in sorted(data_of.keys() - new.keys()):
        yield from emit(into.codec, root_id, root_id, kind, data_of[root_id])
    if not new:
        return
    yield from rows(ADVANCE_FEEDS, root_ids=given(new))
    at, now_ms = (yield from read_positions(new)), (yield from read_now_ms())
    for root_id, data in new.items():
        sealed = event(into.codec, root_id, root_id, kind, data).data
        row = (root_id, at[root_id], root_id, kind, now_ms, sealed)
        into.insert(ADD_EVENT, dict(zip(ADD_EVENT.columns, row, strict=True)))
    if into.groups == 0:
        # Wakes followers of all trees; nobody can follow a tree that did not exist.
        yield AfterCommit(partial(into.runtime.signals.ring, TREE_TOPIC + next(iter(new))))


def sequence_of(seen: Seen, root_id: str) -> int:
    """Return the sequence of the shared state of a tree in a file."""
    return seen.of(_Feeds).sequences[root_id]


def read_positions(root_ids: Iterable[str]) -> Op[dict[str, int]]:
    """Return the positions of the feeds of trees."""
    found: dict[str, int] = {}
    yield from read_each(
        TREES, root_ids, lambda row: found.update({row["root_id"]: row["position"]})
    )
    return found
