"""Whether anybody listens for changes of trees: each process that does holds a lock.

NOTIFY takes a lock of the whole server, so the many commits that nobody follows send none. Who
listens takes a shared advisory lock on the connection on which it listens, and loses it with that
connection. A process that writes looks for such a lock about once a second, inside a statement
that it sends anyhow. Until it has looked, followers find its changes by polling.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence

from ..operation import Row

LOOK_SECONDS = 1.0
# Both halves of the lock's number: what it is for, and which schema.
_FOLLOWED = 0x466F6C6C


class Followers:
    """What a process knows of those who listen for changes of a schema's trees."""

    def __init__(self, schema: str, *, is_awaited: bool) -> None:
        """Without `is_awaited` nobody is looked for."""
        number = zlib.crc32(schema.encode()) & 0x7FFFFFFF
        self.announcement = f"SELECT pg_advisory_lock_shared({_FOLLOWED}, {number})"
        """The statement with which a process says that it listens."""
        self.farewell = f"SELECT pg_advisory_unlock_shared({_FOLLOWED}, {number})"
        """The statement with which it says that it does no more."""
        self.look = (
            "EXISTS (SELECT 1 FROM pg_locks WHERE locktype = 'advisory' "  # noqa: S608
            f"AND classid = {_FOLLOWED} AND objid = {number} AND objsubid = 2 AND database = "
            "(SELECT oid FROM pg_database WHERE datname = current_database())) AS is_followed"
        )
        """The expression that tells whether any process has said so."""
        self.are_there = False
        self._is_awaited = is_awaited
        self._look_at = 0.0

    def is_look_due(self) -> bool:
        """Whether it is time to look again; then the caller does."""
        if not self._is_awaited or (now := time.monotonic()) < self._look_at:
            return False
        self._look_at = now + LOOK_SECONDS
        return True

    def note(self, found: Sequence[Row]) -> None:
        """Take over what a look has found; a statement that did not look says nothing."""
        if found and "is_followed" in found[0]:
            self.are_there = found[0]["is_followed"]
