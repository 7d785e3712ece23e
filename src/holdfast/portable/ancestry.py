"""Who is whose parent, where only names were kept, and names are not unique."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ..arguments import shown
from ..errors import InvalidArgument
from ..kernel.operation import Row


class Ancestry:
    """Finds every session's parent and root. Raises InvalidArgument for a cycle of parents."""

    def __init__(self, sessions: Sequence[Row], began: Callable[[Row], int]) -> None:
        self.notes: list[str] = []
        self._sessions = {self._id(row): row for row in sessions}
        self._began = {id: began(row) for id, row in self._sessions.items()}
        self._named: dict[str, list[Row]] = {}
        for row in sorted(sessions, key=self._when):
            self._named.setdefault(row["session_name"], []).append(row)
        self._parents = {id: self._parent(row) for id, row in self._sessions.items()}
        self._roots: dict[str, tuple[str, int]] = {}
        for id in self._sessions:
            self._climb(id)

    @property
    def ids(self) -> set[str]:
        """All sessions."""
        return set(self._sessions)

    def ordered(self) -> Iterator[tuple[Row, str | None, str]]:
        """Yield each session with its parent's id and its root's, parents first."""
        order = sorted(self._sessions, key=lambda id: (self._roots[id][1], self._began[id], id))
        for id in order:
            yield self._sessions[id], self._parents[id], self._roots[id][0]

    def _when(self, row: Row) -> int:
        return self._began[row["session_id"]]

    def _id(self, row: Row) -> str:
        id = row["session_id"]
        if not isinstance(id, str):
            raise InvalidArgument(f"a session's id is text, not {shown(id)}")
        return id

    def _parent(self, row: Row) -> str | None:
        """Return the session that a name means: the newest of that name when this one began."""
        name, id = row["parent_session_name"], row["session_id"]
        if not name:
            return None
        named = self._named.get(name, [])
        others = [other for other in named if other is not row]
        if not others:
            return id if named else self._root_named(row)
        before = [other for other in others if self._when(other) <= self._when(row)]
        parent: str = (before[-1] if before else others[0])["session_id"]
        if len(others) > 1:
            self.notes.append(
                f"session {id!r} has the parent {name!r}, a name of {len(others)} sessions; "
                f"{parent!r} was chosen, the newest when it began"
            )
        return parent

    def _root_named(self, row: Row) -> str | None:
        id, root_id = row["session_id"], row.get("root_session_id")
        name = row["parent_session_name"]
        if root_id in self._sessions and root_id != id:
            self.notes.append(
                f"session {id!r} is placed under its root: its parent {name!r} is missing"
            )
            return str(root_id)
        self.notes.append(f"session {id!r} becomes a root: its parent {name!r} is missing")
        return None

    def _climb(self, id: str) -> None:
        """Find the root of a session and of all on the way to it."""
        path: list[str] = []
        on_path: set[str] = set()
        here: str | None = id
        while here is not None and here not in self._roots:
            if here in on_path:
                circle = " → ".join([*path[path.index(here) :], here])
                raise InvalidArgument(f"sessions are each other's parents: {circle}")
            path.append(here)
            on_path.add(here)
            here = self._parents[here]
        root_id, depth = self._roots[here] if here is not None else (path[-1], -1)
        for member in reversed(path):
            depth += 1
            self._roots[member] = root_id, depth
