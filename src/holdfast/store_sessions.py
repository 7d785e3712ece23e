"""Starting, resuming and listing the sessions of a store."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from .arguments import (
    milliseconds_of,
    require_limit,
    require_new_id,
    require_one_of,
    require_text,
    require_text_or_none,
    require_whole,
)
from .checkpoints.read import newest_of_all, require_kind
from .checkpoints.write import record_status
from .errors import InvalidArgument, SessionNotFound
from .feed import create_tree, emit
from .kernel.operation import (
    C,
    Handle,
    Lock,
    Op,
    Row,
    fresh_id,
    one,
    operation,
    query,
)
from .records import STATUSES, Checkpoint, Kind, SessionInfo, Status
from .session import Session
from .sessions.access import CLOSING, Place, ended
from .sessions.creation import insert_session
from .sessions.handle import SessionHandle
from .sessions.rows import (
    READ_SESSION,
    RESUME_SESSION,
    begin_with,
    count_children,
    find_place,
    info,
    list_rows,
)
from .wire import travels

SESSIONS_PER_PAGE_MAX = 1_000
NUMBER_MAX = 2**62


@travels
class StoreSessions(Handle[C]):
    """The sessions of a store."""

    @operation
    def session(
        self,
        id: str | None = None,
        *,
        name: str | None = None,
        parent: object = None,
        agent: str | None = None,
        user: str | None = None,
        metadata: dict[str, Any] | None = None,
        reopen: bool = False,
    ) -> Op[Session[C]]:
        """Start a session, or resume it if it exists. An ended one needs `reopen=True`.

        Its root is its parent's root and never changes; without a parent it is a root itself.
        """
        for label, text in (("name", name), ("agent", agent), ("user", user)):
            require_text_or_none(label, text)
        if metadata is not None and type(metadata) is not dict:
            raise InvalidArgument(f"metadata must be a dict, not {type(metadata).__name__}")
        body = None if metadata is None else self.runtime.codec.encode(metadata, name="metadata")
        parent_id = None
        if parent is not None:
            parent_id = require_text("parent", getattr(parent, "id", parent))
        session_id = require_new_id("id", id) if id is not None else (yield from fresh_id())
        context = ("hf_sessions", session_id)
        given: dict[str, Any]
        given = {"id": session_id, "name": name, "agent": agent, "user_id": user}
        row = (yield from one(READ_SESSION, id=session_id)) if id is not None else None
        given["metadata"] = None if body is None else self.runtime.codec.seal(body, context=context)
        if row is None:
            if isinstance(parent, SessionHandle):
                # Whoever no longer drives the parent starts nothing in its name.
                yield from parent._lock()
            row = yield from self._create(given, parent_id, reopen)
        else:
            row = yield from self._resume(given, row["root_id"], reopen)
        return Session(self.runtime, row["id"], row["number"], row["root_id"], row["name"])

    def _create(self, given: dict[str, Any], parent_id: str | None, reopen: bool) -> Op[Row]:
        root_id = given["id"]
        if parent_id is None:
            yield from create_tree(root_id)
        else:
            parent = yield from one(READ_SESSION, id=parent_id)
            if parent is None:
                raise SessionNotFound(f"there is no parent session {parent_id!r}", id=parent_id)
            root_id = parent["root_id"]
        yield Lock(root_id)
        row = yield from insert_session(self.runtime.codec, given, parent_id, root_id)
        if row is None:
            # Another process started it between the read and the lock.
            row = yield from one(READ_SESSION, id=given["id"])
            assert row is not None
            return (yield from self._resume(given, row["root_id"], reopen))
        return row

    def _resume(self, given: dict[str, Any], root_id: str, reopen: bool) -> Op[Row]:
        yield Lock(root_id)
        before = yield from one(READ_SESSION, id=given["id"])
        if before is None:
            raise SessionNotFound(f"session {given['id']!r} was deleted", id=given["id"])
        has_ended = before["status"] not in {"active", "waiting"}
        if has_ended and (not reopen or before["status"] in CLOSING):
            raise ended(given["id"], before["status"])
        row = yield from one(RESUME_SESSION, **given)
        assert row is not None
        yield from emit(self.runtime.codec, root_id, given["id"], "session_resumed", {})
        if has_ended:
            place = Place(row["id"], row["number"], root_id, None)
            yield from record_status(self.runtime, place, before["status"], "active")
        return row

    @query
    def find_session(self, id: str) -> Op[Session[C]]:
        """Return an existing session, ended or not, or raise SessionNotFound. Changes nothing.

        `id` is its id, its number, or a unique prefix of its id of 8 characters or more.
        """
        row = yield from find_place(require_text("id", id))
        if row is None:
            raise SessionNotFound(f"there is no session {id!r}", id=id)
        return Session(self.runtime, row["id"], row["number"], row["root_id"], row["name"])

    @query
    def search_sessions(self, text: str, *, limit: int = 20) -> Op[list[SessionInfo]]:
        """Return sessions whose id begins with a text, by id, and then the newest of its agent."""
        require_text("text", text)
        require_limit(limit, SESSIONS_PER_PAGE_MAX)
        found = yield from begin_with(text, limit)
        given, most = {"agent": text}, limit - len(found)
        if most:
            found = [*found, *(yield from list_rows(given, NUMBER_MAX, most, newest_first=True))]
        known = {row["id"]: row for row in found}
        return [info(self.runtime.codec, row) for row in known.values()]

    @query
    def sessions(
        self,
        *,
        status: Status | None = None,
        agent: str | None = None,
        root: object = None,
        after: int = 0,
        before: int | None = None,
        limit: int = 100,
        newest_first: bool = False,
    ) -> Op[list[SessionInfo]]:
        """Return sessions in order of creation, without reading channels.

        `after` is the `number` of the last one seen; newest first it is `before`.
        """
        if status is not None:
            require_one_of("status", status, STATUSES)
        require_limit(limit, SESSIONS_PER_PAGE_MAX)
        require_text_or_none("agent", agent)
        root_id = getattr(root, "root_id", root)
        require_text_or_none("root", root_id)
        require_whole("after", after, 0)
        below = NUMBER_MAX if before is None else require_whole("before", before, 0, NUMBER_MAX)
        if (newest_first and after) or (before is not None and not newest_first):
            raise InvalidArgument("sessions are listed after one, or newest first before one")
        wanted = {"status": status, "agent": agent, "root_id": root_id}
        given = {column: value for column, value in wanted.items() if value is not None}
        start = below if newest_first else after
        found = yield from list_rows(given, start, limit, newest_first=newest_first)
        return [info(self.runtime.codec, row) for row in found]

    @query
    def child_counts(
        self, sessions: Sequence[SessionInfo], *, at_most: int = 100
    ) -> Op[dict[str, int]]:
        """Return by id how many children each of some sessions has, in one read.

        No more than one beyond `at_most` are counted.
        """
        require_whole("at_most", at_most, 1, SESSIONS_PER_PAGE_MAX)
        if len(sessions) > SESSIONS_PER_PAGE_MAX:
            most = f"{SESSIONS_PER_PAGE_MAX:,}"
            raise InvalidArgument(f"children are counted of up to {most} sessions at once")
        return (yield from count_children([each.id for each in sessions], at_most))

    @query
    def checkpoints(
        self, *, kind: Kind | None = None, since: datetime | int = 0, limit: int = 100
    ) -> Op[list[Checkpoint]]:
        """Return the newest checkpoints of all sessions without their channels, newest first.

        `since` is a datetime with a time zone, or a time in milliseconds.
        """
        require_kind(kind)
        require_limit(limit, SESSIONS_PER_PAGE_MAX)
        since_ms = milliseconds_of("since", since)
        return (yield from newest_of_all(self.runtime.codec, kind, since_ms, limit))
