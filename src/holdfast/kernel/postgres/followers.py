"""Who listens: each process that does holds advisory locks on its LISTEN connection.

NOTIFY takes a server-wide lock, so rings that nobody hears are not sent. There is one lock for
those who follow changes of trees: a writing process checks for it about once a second, inside a
statement that it sends anyway; until then, followers rely on polling. Another lock is for all that
listen: a process that is alone sends nothing, and is told at once when another begins to listen. It
then rings everything once, if it has withheld rings.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence

from ..operation import Row

LOOK_SECONDS = 1.0
# The first half of a lock's key; the second is a hash of the schema.
_FOLLOWED = 0x466F6C6C
_HEARD = 0x48656172


class Announcement:
    """A shared advisory lock by which a process announces something about a schema."""

    def __init__(self, key: int, schema: str) -> None:
        number = zlib.crc32(schema.encode()) & 0x7FFFFFFF
        self.made = f"SELECT pg_advisory_lock_shared({key}, {number})"
        """The statement that makes it, on a connection that stays open."""
        self.revoked = f"SELECT pg_advisory_unlock_shared({key}, {number})"
        self.held = (
            "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' "  # noqa: S608
            f"AND classid = {key} AND objid = {number} AND objsubid = 2 AND database = "
            "(SELECT oid FROM pg_database WHERE datname = current_database())"
        )
        """The query for connections that have made it."""


class OtherListeners:
    """What a process knows about other processes that listen for rings of a schema."""

    def __init__(self, schema: str) -> None:
        self.announcement = Announcement(_HEARD, schema)
        self.look = f"""
            SELECT EXISTS ({self.announcement.held} AND pid <> pg_backend_pid()) AS are_there
        """
        """The query, on the LISTEN connection, for whether there is another one."""
        self.times_heard = 0
        self._are_there = True
        self._has_withheld = False
        self._look_at = 0.0

    def may_be_there(self) -> bool:
        """Whether another process may listen; if not, a ring is withheld."""
        if self._are_there or self.is_look_due():
            return True
        self._has_withheld = True
        # Whoever was heard meanwhile may not have seen that.
        return self._are_there

    def is_look_due(self) -> bool:
        """Whether to check again before a ring is sent."""
        return time.monotonic() >= self._look_at

    def hear(self) -> bool:
        """Record that another process was heard; return whether rings were withheld before.

        It may have begun to listen before one of them.
        """
        self.times_heard += 1
        self._are_there = True
        has_withheld, self._has_withheld = self._has_withheld, False
        return has_withheld

    def note(self, are_there: bool, times_heard: int) -> None:
        """Record the result of a check, unless one was heard since it began."""
        self._are_there = are_there or times_heard != self.times_heard
        self._look_at = time.monotonic() + LOOK_SECONDS


class Followers:
    """What a process knows about listeners for changes of a schema's trees."""

    def __init__(self, schema: str, *, is_awaited: bool) -> None:
        """Without `is_awaited` it never checks for listeners."""
        self.announcement = Announcement(_FOLLOWED, schema)
        self.look = f"EXISTS ({self.announcement.held}) AS is_followed"
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
