"""What sessions and checkpoints mean, in memory and as simple as can be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Node:
    """One version, with everything it holds and the version it came from."""

    owner: Twin
    version: int
    epoch: int
    kind: str
    channels: dict[str, Any]
    parent: Node | None
    data: Any = None
    metadata: Any = None
    item_id: str | None = None
    is_pinned: bool = False
    is_attested: bool = False

    @property
    def iteration(self) -> int | None:
        """The iteration that it starts or ends."""
        return self.data["iteration"] if self.kind.startswith("iteration_") else None


@dataclass(eq=False)
class Twin:
    """A session in memory."""

    id: str
    number: int
    root_id: str
    parent: Twin | None = None
    origin: Twin | None = None
    origin_version: int = 0
    status: str = "active"
    version: int = 0
    epoch: int = 1
    head: Node | None = None
    nodes: dict[int, Node] = field(default_factory=dict)
    is_deleted: bool = False

    @property
    def channels(self) -> dict[str, Any]:
        """What the newest version holds."""
        return {} if self.head is None else dict(self.head.channels)

    @property
    def is_ended(self) -> bool:
        """Whether it takes no writes."""
        return self.status not in {"active", "waiting"}

    def write(self, kind: str, channels: dict[str, Any] | None = None, **parts: Any) -> Node:
        """Add the next version; channels that are not named carry over."""
        parent = parts.pop("parent", self.head)
        held = {} if parent is None else dict(parent.channels)
        self.version += 1
        node = Node(self, self.version, self.epoch, kind, held | (channels or {}), parent, **parts)
        self.nodes[self.version] = self.head = node
        return node

    def rewind(self, target: Node) -> Node:
        """Go on from an older version in a new epoch."""
        self.epoch += 1
        data = {"rewound_to": target.version}
        return self.write("state_transition", parent=target, data=data)

    def change_status(self, status: str) -> None:
        """Record a change of status."""
        self.write("state_transition", data={"from": self.status, "to": status})
        self.status = status

    def fork(self, at: Node, id: str, number: int, root_id: str) -> Twin:
        """Return a session that begins with a copy of a version."""
        twin = Twin(id, number, root_id, self.parent, at.owner, at.version, version=at.version)
        parts = (at.kind, dict(at.channels), at.parent, at.data, at.metadata, at.item_id)
        twin.head = Node(twin, at.version, 1, *parts)
        twin.nodes[at.version] = twin.head
        return twin

    def seen(self, version: int) -> Node | None:
        """Return a version that this session can load: its own, or one of a living origin."""
        if version >= self.origin_version:
            return self.nodes.get(version)
        if self.origin is None or self.origin.is_deleted:
            return None
        return self.origin.seen(version)

    def all_seen(self) -> list[Node]:
        """Return every version that can be loaded, newest first."""
        found = (self.seen(version) for version in range(self.version, 0, -1))
        return [node for node in found if node is not None]

    def path(self) -> Iterator[Node]:
        """Go back from the newest version to the first, as the epochs say."""
        node = self.head
        while node is not None:
            if self.seen(node.version) is node:
                yield node
            node = node.parent

    def resume_point(self) -> tuple[int, Node | None]:
        """Return the iteration to run next, and the version that says so."""
        for node in self.path():
            if node.iteration is not None:
                return node.iteration + (node.kind == "iteration_end"), node
        return 1, None

    def prunable(self, keep: int, living: list[Twin]) -> list[int]:
        """Return the versions that retention may remove; resume points of forks stay too."""
        newest = sorted(self.nodes)[-keep:]
        fork_points = {other.origin_version for other in living if other.origin is self}
        resume_points = [other.resume_point()[1] for other in living]
        return [
            version
            for version, node in sorted(self.nodes.items())
            if version < newest[0]
            and node not in resume_points
            and node.kind != "approval_point"
            and not node.is_pinned
            and not node.is_attested
            and version not in fork_points
        ]


def same(left: Any, right: Any) -> bool:
    """Tell whether two values are equal in every type, order and sign: 1, 1.0 and true differ."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return repr(left) == repr(right)
