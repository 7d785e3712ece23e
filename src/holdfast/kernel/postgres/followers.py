"""Whether any process listens for changes of trees: each one that does holds an advisory lock.

NOTIFY takes a server-wide lock, so commits that nobody follows send none. A listening process holds
a shared advisory lock on its LISTEN connection. A writing process checks for such a lock about once
a second, inside a statement that it sends anyway; until then, followers rely on polling.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence

from ..operation import Row

LOOK_SECONDS = 1.0
# The first half of the lock's key; the second is a hash of the schema.
_FOLLOWED = 0x466F6C6C


class Followers:
    """What a process knows about listeners for changes of a schema's trees."""

    def __init__(self, schema: str, *, is_awaited: bool) -> None:
        """Without `is_awaited` it never checks for listeners."""
        number = zlib.crc32(schema.encode()) & 0x7FFFFFFF
        self.announcement = f"SELECT pg_advisory_lock_shared({_FOLLOWED}, {number})"
        """The statement with which a process announces that it listens."""
        self.farewell = f"SELECT pg_advisory_unlock_shared({_FOLLOWED}, {number})"
        """The statement with which it revokes the announcement."""
        self.look = (
            "EXISTS (SELECT 1 FROM pg_locks WHERE locktype = 'advisory' "  # noqa: S608
            f"AND classid = {_FOLLOWED} AND objid = {number} AND objsubid = 2 AND database = "
            "(SELECT oid FROM pg_database WHERE datname = current_database())) AS is_followed"
        )
        """The expression for whether any process has announced that it listens."""
        self.are_there = False
        self._is_awaited = is_awaited
        self._look_at = 0.0

    def is_look_due(self) -> bool:
        """Whether the caller should check again now."""
        if not self._is_awaited or (now := time.monotonic()) < self._look_at:
            return False
        self._look_at = now + LOOK_SECONDS
        return True

    def note(self, found: Sequence[Row]) -> None:
        """Record the result of a check; rows of a statement that did not check are ignored."""
        if found and "is_followed" in found[0]:
            self.are_there = found[0]["is_followed"]
