"""Creation of sessions: one row and one event, under the lock of the tree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..clock import random_id
from ..codec import Codec
from ..errors import SessionNotFound
from ..feed import emit
from ..kernel.operation import Op, Row, fresh_id, one
from .access import CLOSING, ended
from .rows import CREATE_SESSION, READ_SESSION


def insert_session(
    codec: Codec, given: Mapping[str, Any], parent_id: str | None, root_id: str
) -> Op[Row | None]:
    """Create a session whose tree is locked, and return its row; None if its id is taken.

    `given` has its `id`, `name`, `agent`, `user_id` and sealed `metadata`; None means empty.
    """
    if parent_id is not None:
        parent = yield from one(READ_SESSION, id=parent_id)
        if parent is None:
            raise SessionNotFound(f"parent session {parent_id!r} was deleted", id=parent_id)
        if parent["status"] in CLOSING:
            raise ended(parent_id, parent["status"])
    head = random_id((yield from fresh_id()))
    place = {"parent_id": parent_id, "root_id": root_id, "head": head}
    metadata = given["metadata"] or codec.pack({}, context=("hf_sessions", given["id"]))
    row = yield from one(CREATE_SESSION, **{**given, **place, "metadata": metadata})
    if row is not None:
        data = {"name": given["name"], "parent_id": parent_id, "agent": given["agent"]}
        yield from emit(codec, root_id, given["id"], "session_created", data)
    return row
