"""Writers of one tree queue for an advisory lock before they lock the tree's row.

A transaction that waits for a row which others update must walk all versions made since, and so
must every one behind it. An advisory lock has no versions and is granted in order. It is taken in
the statement that opens a transaction, before any other lock, so it cannot be part of a deadlock.
It only forms the queue: the tree is protected by the lock of its row, which is taken in any case.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection

ENTER_QUEUE = "pg_advisory_xact_lock(:queue)"


def queue_of(schema: str, root_ids: Collection[str]) -> int | None:
    """Return the key of the queue to enter before trees are locked: that of the first one."""
    if not root_ids:
        return None
    name = f"{schema} {min(root_ids)}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big", signed=True)
