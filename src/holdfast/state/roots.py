"""Telling an empty state from that of a deleted tree."""

from __future__ import annotations

from ..errors import SessionNotFound
from ..kernel.operation import Op, one
from ..sessions.rows import READ_SESSION


def require_root(root_id: str) -> Op[None]:
    """Raise SessionNotFound if a tree's root was deleted."""
    if (yield from one(READ_SESSION, id=root_id)) is None:
        raise SessionNotFound(f"there is no session {root_id!r}", id=root_id)
