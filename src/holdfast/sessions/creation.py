"""Creation of sessions: one row and one event, under the lock of the tree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..clock import random_id
from ..codec import Codec
from ..errors import SessionNotFound
from ..feed import event
from ..kernel.operation import Emit, Op, Query, Row, fresh_id, one
from .access import CLOSING, ended
from .rows import CREATE_SESSION, READ_SESSION


def insert_session(
    codec: Codec, given: Mapping[str, Any], parent_id: str | None, root_id: str
) -> Op[Row | None]:
    """Create a session whose tree is locked, and return its row; None if its id is taken.

    `given` has its `id`, `name`, `agent`, `user_id` and sealed `metadata`; None means empty.
    """
    yield from require_parent(parent_id)
    creation, created = yield from new_session(codec, given, parent_id, root_id)
    row = yield from one(creation.sql, **creation.parameters)
    if row is not None:
        yield created
    return row


def require_parent(parent_id: str | None) -> Op[None]:
    """Raise an error if the parent of a new session was deleted, or is being ended."""
    if parent_id is None:
        return
    parent = yield from one(READ_SESSION, id=parent_id)
    if parent is None:
        raise SessionNotFound(f"parent session {parent_id!r} was deleted", id=parent_id)
    if parent["status"] in CLOSING:
        raise ended(parent_id, parent["status"])


def new_session(
    codec: Codec, given: Mapping[str, Any], parent_id: str | None, root_id: str
) -> Op[tuple[Query, Emit]]:
    """Return the statement that creates a session below an open parent, and its event."""
    head = random_id((yield from fresh_id()))
    place = {"parent_id": parent_id, "root_id": root_id, "head": head}
    metadata = given["metadata"] or codec.pack({}, context=("hf_sessions", given["id"]))
    data = {"name": given["name"], "parent_id": parent_id, "agent": given["agent"]}
    creation = Query(CREATE_SESSION, {**given, **place, "metadata": metadata})
    return creation, event(codec, root_id, given["id"], "session_created", data)
