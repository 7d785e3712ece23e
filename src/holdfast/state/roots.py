"""Whether a tree is there at all: where nothing was found, it may have been deleted."""

from __future__ import annotations

from ..errors import SessionNotFound
from ..kernel.operation import Op, one
from ..sessions.rows import READ_SESSION


def require_root(root_id: str) -> Op[None]:
    """Raise SessionNotFound if a tree's root was deleted; all its state went with it."""
    if (yield from one(READ_SESSION, id=root_id)) is None:
        raise SessionNotFound(f"there is no session {root_id!r}", id=root_id)
