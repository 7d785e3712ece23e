"""Snapshots as a tree: each holds what changed since its parent.

Going from one to another means undoing changes up to their common ancestor and redoing changes
down from it. The cost depends on what differs between the two, not on the size of the system, and
restoring one snapshot destroys no other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ..errors import CheckpointInvalid

D = TypeVar("D")


@dataclass(slots=True, eq=False)
class Node(Generic[D]):
    """One snapshot: what changed since its parent, and how many tokens stand for it."""

    number: int
    parent: Node[D] | None
    changes: D
    holds: int = 0
    children: dict[int, Node[D]] = field(default_factory=dict)


class SnapshotTree(ABC, Generic[D]):
    """Nodes by number; `head` is the one that the live content was last equal to.

    All others descend from the `first` one.
    """

    def __init__(self, base: D) -> None:
        self.head: Node[D] = Node(0, None, base)
        self.first = self.head
        self._nodes = {0: self.head}
        self._next = 1

    @abstractmethod
    def fold(self, first: D, second: D) -> D:
        """Return both changes as one."""

    def rebase(self, base: D, changes: D) -> D:
        """Return what the first node holds after these changes to the one before it."""
        return self.fold(base, changes)

    @abstractmethod
    def is_empty(self, changes: D) -> bool:
        """Return whether the changes change nothing."""

    def __len__(self) -> int:
        return len(self._nodes)

    def add(self, changes: D) -> int:
        """Return a token for the live content: the head with these changes."""
        node = self.head
        if not self.is_empty(changes):
            node = Node(self._next, self.head, changes)
            self._next += 1
            self._nodes[node.number] = self.head.children[node.number] = node
        node.holds += 1
        self.move(node)
        return node.number

    def find(self, token: Any) -> Node[D]:
        """Return the node of a token, or raise CheckpointInvalid."""
        node = self._nodes.get(token)
        if node is None or not node.holds:
            raise CheckpointInvalid(f"there is no snapshot {token!r}", token=token)
        return node

    def move(self, node: Node[D]) -> None:
        """Record that the live content is now equal to a node."""
        left, self.head = self.head, node
        self._collect(left)

    def leave(self, changes: D) -> None:
        """Record that the live content is the head with these changes, without making a token."""
        self.release(self.add(changes))

    def release(self, token: Any) -> None:
        """Release a token; a node that is no longer needed is folded into another."""
        node = self.find(token)
        node.holds -= 1
        self._collect(node)

    def route(self, target: Node[D]) -> tuple[list[Node[D]], list[Node[D]], Node[D]]:
        """Return the nodes to undo from the head, those to redo, and the common ancestor."""
        up, down = [self.head], [target]
        seen = {self.head.number: up, target.number: down}
        if self.head is target:
            return [], [], target
        while True:
            # Both sides climb in turn, so that the search takes no longer than the distance.
            for mine, theirs in ((up, down), (down, up)):
                parent = mine[-1].parent
                if parent is None:
                    continue
                if seen.get(parent.number) is theirs:
                    del theirs[theirs.index(parent) :]
                    return up, down[::-1], parent
                seen[parent.number] = mine
                mine.append(parent)

    def _collect(self, node: Node[D]) -> None:
        if node.holds or node is self.head or len(node.children) > 1:
            return
        parent = node.parent
        if not node.children:
            if parent is None:
                return
            del parent.children[node.number], self._nodes[node.number]
            self._collect(parent)
            return
        [child] = node.children.values()
        join = self.rebase if parent is None else self.fold
        child.changes = join(node.changes, child.changes)
        child.parent = parent
        del self._nodes[node.number]
        if parent is None:
            self.first = child
        else:
            del parent.children[node.number]
            parent.children[child.number] = child


Changes = dict[Any, tuple[Any, Any]]


class DeltaTree(SnapshotTree[Changes]):
    """Changes as a map: key → value before and after; None if it does not exist."""

    def __init__(self) -> None:
        super().__init__({})

    def fold(self, first: Changes, second: Changes) -> Changes:
        """Return both changes as one, from the first value before to the last value after."""
        folded = dict(first)
        for key, (before, after) in second.items():
            folded[key] = folded.get(key, (before, after))[0], after
        return {key: change for key, change in folded.items() if change[0] != change[1]}

    def rebase(self, base: Changes, changes: Changes) -> Changes:
        """Return nothing: there is nothing to undo before the first node."""
        return {}

    def is_empty(self, changes: Changes) -> bool:
        """Return whether nothing differs."""
        return not changes

    def changes_to(self, target: Node[Changes], pending: Changes) -> Changes:
        """Return what to change in the live content, which is the head with pending changes."""
        now = {key: after for key, (_, after) in pending.items()}
        wanted = {key: before for key, (before, _) in pending.items()}
        up, down, _ = self.route(target)
        for node in up:
            for key, (before, after) in node.changes.items():
                now.setdefault(key, after)
                wanted[key] = before
        for node in down:
            for key, (before, after) in node.changes.items():
                now.setdefault(key, before)
                wanted[key] = after
        return {key: (now[key], value) for key, value in wanted.items() if now[key] != value}
