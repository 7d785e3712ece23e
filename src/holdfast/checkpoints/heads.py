"""What this process remembers of the newest checkpoints that it wrote or read.

A remembered head is only ever a guess. The write that uses it compares the head's random id in
the database, so a guess that is old costs a second look and can damage nothing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..kernel.operation import PerStore, Runtime
from .manifest import Entry

LIST_BYTES_MAX = 16 * 2**20
TOTAL_BYTES_MAX = 64 * 2**20
HEADS_MAX = 1_000


@dataclass(slots=True)
class KnownList:
    """The encoded items of a list: all of them joined, and those since its last full run."""

    joined: bytearray | None
    tail: list[bytes]

    def is_value(self, body: bytes) -> bool:
        """Tell whether a channel that is no list has this value."""
        return self.joined is not None and bytes(self.joined) == body


@dataclass(slots=True)
class Head:
    """A session's newest checkpoint."""

    id: int
    version: int
    manifest: Mapping[str, Entry]
    lists: dict[str, KnownList] = field(default_factory=dict)


class Heads(PerStore):
    """The heads of one store, the least recently used forgotten first; threads may share it."""

    def __init__(self, runtime: Runtime) -> None:
        self._lock = threading.Lock()
        self._heads: OrderedDict[int, Head] = OrderedDict()
        self._sizes: dict[int, int] = {}
        self._total_bytes = 0

    def get(self, session_number: int) -> Head | None:
        """Return what is remembered of a session."""
        with self._lock:
            head = self._heads.get(session_number)
            if head is not None:
                self._heads.move_to_end(session_number)
            return head

    def put(self, session_number: int, head: Head) -> None:
        """Remember a head, unless a newer one is known already."""
        with self._lock:
            known = self._heads.get(session_number)
            if known is not None and known.version > head.version:
                return
            size = 500
            for each in head.lists.values():
                # About how much memory a list takes.
                size += len(each.joined or b"") + sum(map(len, each.tail)) + 200
            self._total_bytes += size - self._sizes.get(session_number, 0)
            self._sizes[session_number] = size
            self._heads[session_number] = head
            self._heads.move_to_end(session_number)
            while len(self._heads) > HEADS_MAX or self._total_bytes > TOTAL_BYTES_MAX:
                self._drop(next(iter(self._heads)))

    def forget(self, *session_numbers: int) -> None:
        """Drop what is remembered of sessions."""
        with self._lock:
            for session_number in session_numbers:
                self._drop(session_number)

    def _drop(self, session_number: int) -> None:
        self._heads.pop(session_number, None)
        self._total_bytes -= self._sizes.pop(session_number, 0)
