"""The trees of an export in groups, each of which is written from one snapshot.

Trees that share history by forks are one group, whatever its size. Other trees are grouped until
there are enough sessions. Only trees that share something are kept in memory, the others in a
temporary file.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Hashable, Iterator, Sequence
from typing import IO

from ..kernel.operation import Op, Runtime, whole_query
from ..kernel.schema import read_store_id
from ..sessions.portable import list_trees, trees_of

SESSIONS_PER_GROUP = 256


class Links:
    """Disjoint sets of things that are linked with each other."""

    def __init__(self) -> None:
        self._above: dict[Hashable, Hashable] = {}

    def add(self, one: Hashable, other: Hashable) -> None:
        """Link two."""
        self._above[self.top(one)] = self.top(other)

    def top(self, one: Hashable) -> Hashable:
        """Return the representative of its set, which may be itself."""
        path = []
        while (above := self._above.setdefault(one, one)) != one:
            path.append(one)
            one = above
        for each in path:
            self._above[each] = one
        return one

    def __contains__(self, one: Hashable) -> bool:
        return one in self._above


class Plan:
    """The trees of an export, read when it begins. Close it to remove its file."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.store_id = ""
        self._file: IO[str] = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
        self._linked: dict[Hashable, list[str]] = {}
        self._chosen: list[str] | None = None

    @whole_query
    def read(self, ids: Sequence[str] | None) -> Op[None]:
        """Choose the trees of these sessions, with those they were forked from, or all."""
        self.store_id = yield from read_store_id()
        if ids is not None:
            self._chosen = yield from trees_of(ids)
            return
        links, self._linked = Links(), {}
        self._file.seek(0)
        self._file.truncate()
        for noun in self._runtime.nouns:
            yield from noun.portable.links(links.add)

        def note(root_id: str, sessions: int) -> None:
            if root_id in links:
                self._linked.setdefault(links.top(root_id), []).append(root_id)
            else:
                self._file.write(f"{json.dumps([root_id, sessions])}\n")

        yield from list_trees(note)

    def groups(self) -> Iterator[list[str]]:
        """Yield the roots of each group."""
        if self._chosen is not None:
            yield self._chosen
            return
        yield from self._linked.values()
        self._file.seek(0)
        group: list[str] = []
        size = 0
        for line in self._file:
            root_id, sessions = json.loads(line)
            group.append(root_id)
            size += sessions
            if size >= SESSIONS_PER_GROUP:
                yield group
                group, size = [], 0
        if group:
            yield group

    def close(self) -> None:
        """Remove the temporary file."""
        self._file.close()
