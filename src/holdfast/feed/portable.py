"""Trees and their feeds in export files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..arguments import require_text
from ..kernel.operation import Op, Row
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
    read_each,
)


class TreeRecord(Record, frozen=True, tag="tree"):
    """A session tree: how far its feed and its state have counted, and where its feed begins."""

    root_id: Name
    position: Count
    sequence: Count
    floor: Count = 0

    def problem(self, seen: Seen) -> str | None:
        """Check that it comes once, and that its feed does not begin behind its end."""
        require_text("id", self.root_id)
        if self.root_id in seen.trees:
            return f"tree {self.root_id!r} comes twice"
        if self.floor > self.position:
            return f"the feed of tree {self.root_id!r} begins behind its end"
        seen.trees[self.root_id] = self.floor
        seen.of(_Feeds).ends[self.root_id] = self.position
        seen.of(_Feeds).sequences[self.root_id] = self.sequence
        return None

    def add(self, into: Import) -> Op[None]:
        """Add the tree, locked; one whose sessions were deleted here goes on where it was."""

        def note(found: list[Row]) -> None:
            into.of(_Feeds).is_known[self.root_id] = bool(found)

        into.later(READ_TREE, {"root_id": self.root_id}, then=note)
        into.later(ADD_TREE, self.row(into.codec))
        into.lock(self.root_id)
        yield from ()


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
        """Add the event, unless the store has a feed of this tree."""
        is_known = into.of(_Feeds).is_known
        if self.root_id not in is_known:
            yield from into.flush()
        if not is_known[self.root_id]:
            into.later(ADD_EVENT, self.row(into.codec))


@dataclass(slots=True)
class _Feeds:
    ends: dict[str, int] = field(default_factory=dict)
    sequences: dict[str, int] = field(default_factory=dict)
    is_known: dict[str, bool] = field(default_factory=dict)


READ_TREE = f"SELECT {TreeRecord.selected()} FROM hf_trees WHERE root_id = :root_id"  # noqa: S608
ADD_TREE = f"""
INSERT INTO hf_trees {TreeRecord.inserted()}
ON CONFLICT (root_id) DO UPDATE SET sequence = CASE
    WHEN hf_trees.sequence > excluded.sequence THEN hf_trees.sequence ELSE excluded.sequence END
"""
LIST_EVENTS = f"""
SELECT {EventRecord.selected()} FROM hf_events
WHERE root_id = :root_id AND position > :position ORDER BY position LIMIT :limit
"""  # noqa: S608
ADD_EVENT = f"INSERT INTO hf_events {EventRecord.inserted()}"


class FeedPortable(Portable):
    """A tree travels with its whole feed."""

    records = (TreeRecord, EventRecord)

    def export(self, out: Export) -> Op[None]:
        """Write the trees in the order in which they can be locked, then their events."""
        roots = [{"root_id": root_id} for root_id in sorted(out.root_ids)]
        yield from read_each(READ_TREE, roots, TreeRecord.to(out))
        yield from read_each(LIST_EVENTS, roots, EventRecord.to(out), ["position"])

    def problem_at_end(self, seen: Seen) -> str | None:
        """Check that every feed ends where its tree says."""
        ends = seen.of(_Feeds).ends
        for root_id, position in seen.trees.items():
            if position != ends[root_id]:
                return f"the feed of tree {root_id!r} ends at {position}"
        return None


def sequence_of(seen: Seen, root_id: str) -> int:
    """Return how far the shared state of a tree in a file has counted."""
    return seen.of(_Feeds).sequences[root_id]


def read_positions(root_ids: Iterable[str]) -> Op[dict[str, int]]:
    """Return how far the feeds of some trees have counted."""
    found: dict[str, int] = {}
    roots = ({"root_id": root_id} for root_id in root_ids)
    yield from read_each(
        READ_TREE, roots, lambda row: found.update({row["root_id"]: row["position"]})
    )
    return found
