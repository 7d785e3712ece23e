"""Sessions: durable conversations or tasks, in trees, each with its status and lease."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..checkpoints import Heads, RewindOps, copy_fork_point
from ..checkpoints.branching import find_and_hold
from ..checkpoints.collecting import remove_all
from ..checkpoints.ops import require_kind, require_limit, require_version
from ..checkpoints.reading import HEADER, header
from ..checkpoints.writing import LOOK, Place, draft, random_id, require_writable, write
from ..codec import Codec
from ..errors import (
    InvalidArgument,
    SessionBusy,
    SessionEnded,
    SessionNotFound,
)
from ..feed import emit, plant_tree
from ..kernel.operation import (
    AfterCommit,
    Lock,
    Op,
    Query,
    Row,
    batch,
    fresh_id,
    one,
    operation,
    query,
    rows,
)
from ..leases import LeasedTable
from ..records import KINDS, STATUSES, Checkpoint, Kind, Lease, SessionInfo, Status

H = TypeVar("H")

TEXT_CHARACTERS_MAX = 256
SESSIONS_PER_PAGE_MAX = 1_000
SESSIONS = LeasedTable("hf_sessions", "session")

COLUMNS = """number, id, name, parent_id, root_id, agent, user_id, status, version, epoch,
    origin_version, metadata, holder, lease_expires_at, created_at, updated_at, last_resumed_at"""
READ = f"SELECT {COLUMNS} FROM hf_sessions WHERE id = :id"  # noqa: S608
CREATE = f"""
INSERT INTO hf_sessions (
    id, name, parent_id, root_id, agent, user_id, status, head, metadata,
    created_at, updated_at, last_resumed_at
) VALUES (
    :id, :name, :parent_id, :root_id, :agent, :user_id, 'active', :head, :metadata,
    :now, :now, :now
) ON CONFLICT (id) DO NOTHING RETURNING {COLUMNS}
"""  # noqa: S608
RESUME = f"""
UPDATE hf_sessions SET
    last_resumed_at = :now, updated_at = :now,
    name = coalesce(CAST(:name AS TEXT), name),
    agent = coalesce(CAST(:agent AS TEXT), agent),
    user_id = coalesce(CAST(:user_id AS TEXT), user_id),
    metadata = coalesce(CAST(:metadata AS BLOB), metadata),
    status = CASE WHEN status = 'waiting' THEN 'waiting' ELSE 'active' END
WHERE id = :id RETURNING {COLUMNS}
"""  # noqa: S608
LIST = f"SELECT {COLUMNS} FROM hf_sessions WHERE number > :after"  # noqa: S608
CHILDREN = f"SELECT {COLUMNS} FROM hf_sessions WHERE parent_id = :id ORDER BY number"  # noqa: S608
NEWEST = f"""
SELECT s.id AS session_id, {", ".join(f"c.{name.strip()}" for name in HEADER.split(","))}
FROM hf_checkpoints c JOIN hf_sessions s ON s.number = c.key / 4294967296
WHERE c.kind = :kind AND c.created_at >= :since
ORDER BY c.created_at DESC, c.key DESC LIMIT :limit
"""  # noqa: S608
DOOMED = """
WITH RECURSIVE below (member) AS (
    SELECT CAST(:id AS TEXT)
    UNION SELECT s.id FROM hf_sessions s JOIN below ON s.parent_id = below.member
)
SELECT id, number, status, holder IS NOT NULL AND lease_expires_at > :now AS is_leased
FROM hf_sessions WHERE id IN (SELECT member FROM below) ORDER BY number
"""
DELETE = "DELETE FROM hf_sessions WHERE number = :number"
DESCENDANTS = f"""
WITH RECURSIVE below (member) AS (
    SELECT CAST(:id AS TEXT)
    UNION SELECT s.id FROM hf_sessions s JOIN below ON s.parent_id = below.member
)
SELECT {COLUMNS} FROM hf_sessions WHERE id IN (SELECT member FROM below) ORDER BY number
"""  # noqa: S608
SET_STATUS = """
UPDATE hf_sessions SET status = :status, updated_at = :now, holder = NULL,
    lease_expires_at = NULL, fence = fence + :raised
WHERE number = :number
"""
COPY = """
INSERT INTO hf_sessions (
    id, name, parent_id, root_id, agent, user_id, status, version, head, origin_number,
    origin_version, metadata, created_at, updated_at, last_resumed_at
)
SELECT CAST(:id AS TEXT), CAST(:name AS TEXT), parent_id, CAST(:root_id AS TEXT), agent, user_id,
    'active', CAST(:version AS INTEGER), CAST(:head AS INTEGER), CAST(:owner AS INTEGER),
    CAST(:version AS INTEGER), CAST(:metadata AS BLOB), :now, :now, :now
FROM hf_sessions WHERE number = :number
ON CONFLICT (id) DO NOTHING RETURNING number
"""
# What stands between an instance's name and the boot that holds a lease in its name.
BOOT_MARK = " @ "
FENCE_INSTANCE = """
UPDATE hf_sessions SET holder = NULL, lease_expires_at = NULL
WHERE number = :number AND holder <> :holder
    AND substr(holder, 1, length(CAST(:boots AS TEXT))) = :boots
"""
_PLACEHOLDER = re.compile(r"\$\{([A-Z_]+)\}")


@dataclass(frozen=True, slots=True)
class Identity:
    """Which session this process belongs to, as its environment says."""

    id: str
    name: str | None
    root_id: str
    url: str


def current_session(environment: Mapping[str, str] | None = None) -> Identity | None:
    """Return the session that started this process, or None."""
    found = os.environ if environment is None else environment
    if not found.get("AGENT_SESSION_ID"):
        return None
    return Identity(
        id=found["AGENT_SESSION_ID"],
        name=found.get("AGENT_SESSION_NAME") or None,
        root_id=found.get("AGENT_ROOT_SESSION_ID") or found["AGENT_SESSION_ID"],
        url=found.get("HOLDFAST_URL", ""),
    )


class SessionsOps(Generic[H]):
    """What a store does with its sessions."""

    codec: Codec
    heads: Heads

    def _session(self, id: str, number: int, root_id: str, name: str | None) -> H:
        """Return a handle of this colour."""
        raise NotImplementedError

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
    ) -> Op[H]:
        """Start a session, or resume it if it exists. An ended one needs `reopen=True`.

        Its root is its parent's root, for ever; without a parent it is a root itself.
        """
        for label, text in (("name", name), ("agent", agent), ("user", user)):
            require_text(label, text)
        if metadata is not None and type(metadata) is not dict:
            raise InvalidArgument(f"metadata must be a dict, not {type(metadata).__name__}")
        body = None if metadata is None else self.codec.encode(metadata, name="metadata")
        parent_id = None
        if parent is not None:
            parent_id = require_id(getattr(parent, "id", parent), "parent")
        session_id = require_id(id) if id is not None else (yield from fresh_id())
        context = ("hf_sessions", session_id)
        given: dict[str, Any]
        given = {"id": session_id, "name": name, "agent": agent, "user_id": user}
        row = (yield from one(READ, id=session_id)) if id is not None else None
        given["metadata"] = None if body is None else self.codec.seal(body, context=context)
        if row is None:
            row = yield from self._create(given, parent_id, reopen)
        else:
            row = yield from self._resume(given, row["root_id"], reopen)
        return self._session(row["id"], row["number"], row["root_id"], row["name"])

    def _create(self, given: dict[str, Any], parent_id: str | None, reopen: bool) -> Op[Row]:
        root_id = given["id"]
        if parent_id is None:
            yield from plant_tree(root_id)
        else:
            parent = yield from one(READ, id=parent_id)
            if parent is None:
                raise SessionNotFound(f"there is no parent session {parent_id!r}", id=parent_id)
            root_id = parent["root_id"]
        yield Lock(root_id)
        if parent_id is not None and (yield from one(READ, id=parent_id)) is None:
            raise SessionNotFound(f"parent session {parent_id!r} was deleted", id=parent_id)
        head = random_id((yield from fresh_id()))
        place = {"parent_id": parent_id, "root_id": root_id, "head": head}
        empty = self.codec.pack({}, context=("hf_sessions", given["id"]))
        metadata = given["metadata"] or empty
        row = yield from one(CREATE, **{**given, **place, "metadata": metadata})
        if row is None:
            # Somebody started it between our look and our lock.
            row = yield from one(READ, id=given["id"])
            assert row is not None
            return (yield from self._resume(given, row["root_id"], reopen))
        data = {"name": given["name"], "parent_id": parent_id, "agent": given["agent"]}
        yield from emit(self.codec, root_id, given["id"], "session_created", data)
        return row

    def _resume(self, given: dict[str, Any], root_id: str, reopen: bool) -> Op[Row]:
        yield Lock(root_id)
        before = yield from one(READ, id=given["id"])
        if before is None:
            raise SessionNotFound(f"session {given['id']!r} was deleted", id=given["id"])
        has_ended = before["status"] not in {"active", "waiting"}
        if has_ended and not reopen:
            raise SessionEnded(
                f"session {given['id']} is {before['status']}; open it with reopen=True to go on",
                session_id=given["id"],
                status=before["status"],
            )
        row = yield from one(RESUME, **given)
        assert row is not None
        yield from emit(self.codec, root_id, given["id"], "session_resumed", {})
        if has_ended:
            place = Place(row["id"], row["number"], root_id, None)
            yield from record_status(self.codec, self.heads, place, before["status"], "active")
        return row

    @query
    def sessions(
        self,
        *,
        status: Status | None = None,
        agent: str | None = None,
        root: object = None,
        after: int = 0,
        limit: int = 100,
    ) -> Op[list[SessionInfo]]:
        """Return sessions in the order of their creation, without reading any channel.

        `after` is the `number` of the last one seen.
        """
        if status is not None and status not in STATUSES:
            raise InvalidArgument(f"unknown status {status!r}; it is one of {', '.join(STATUSES)}")
        require_limit(limit, SESSIONS_PER_PAGE_MAX)
        require_text("agent", agent)
        root_id = getattr(root, "root_id", root)
        require_text("root", root_id)
        if type(after) is not int or not 0 <= after < 2**63:
            raise InvalidArgument(f"after must be the number of a session, not {after!r}")
        wanted = {"status": status, "agent": agent, "root_id": root_id}
        given = {column: value for column, value in wanted.items() if value is not None}
        # Only what is given stands in the text: then each has its index.
        conditions = "".join(f" AND {column} = :{column}" for column in given)
        page = f"{LIST}{conditions} ORDER BY number LIMIT :limit"
        found = yield from rows(page, **given, after=after, limit=limit)
        return [info(self.codec, row) for row in found]

    @query
    def checkpoints(
        self, *, kind: Kind | None = None, since: int = 0, limit: int = 100
    ) -> Op[list[Checkpoint]]:
        """Return the newest checkpoints of all sessions without their channels, newest first.

        `since` is a time in milliseconds.
        """
        require_kind(kind)
        require_limit(limit, SESSIONS_PER_PAGE_MAX)
        if type(since) is not int or not 0 <= since < 2**63:
            raise InvalidArgument(f"since must be a time in milliseconds, not {since!r}")
        kinds = KINDS if kind is None else (kind,)
        # One look per kind, each along the index; the newest of all are among them.
        found = yield from batch(
            *(Query(NEWEST, {"kind": each, "since": since, "limit": limit}) for each in kinds)
        )
        newest = sorted(
            (row for rows_of_kind in found for row in rows_of_kind),
            key=lambda row: (row["created_at"], row["key"]),
            reverse=True,
        )
        return [header(self.codec, row["session_id"], row) for row in newest[:limit]]


class SessionOps(RewindOps, Generic[H]):
    """What one session does, beside its checkpoints."""

    name: str | None
    url: str

    def _session(self, id: str, number: int, root_id: str, name: str | None) -> H:
        """Return a handle of this colour."""
        raise NotImplementedError

    @query
    def info(self) -> Op[SessionInfo]:
        """Return the session as it is stored now."""
        return info(self.codec, (yield from self._row()))

    @query
    def children(self) -> Op[list[SessionInfo]]:
        """Return the sessions whose parent this is."""
        return [info(self.codec, row) for row in (yield from rows(CHILDREN, id=self.id))]

    @query
    def tree(self) -> Op[list[SessionInfo]]:
        """Return this session and everything below it, parents before their children."""
        return [info(self.codec, row) for row in (yield from rows(DESCENDANTS, id=self.id))]

    @operation
    def end(self, status: Status = "completed") -> Op[None]:
        """End the session as completed, failed or cancelled; its lease is given back."""
        if status not in {"completed", "failed", "cancelled"}:
            raise InvalidArgument(
                f"a session ends as completed, failed or cancelled, not {status!r}"
            )
        _, found = yield from batch(Lock(self.root_id), Query(LOOK, {"number": self.number}))
        row = require_writable(self._place(), found)
        yield from record_status(self.codec, self.heads, self._place(), row["status"], status)
        yield from rows(SET_STATUS, number=self.number, status=status, raised=0)

    @operation
    def cancel(self) -> Op[list[str]]:
        """Cancel the session and everything below it; drivers are fenced. Returns their ids."""
        yield from self._lock()
        yield from self._row()
        cancelled = []
        for row in (yield from rows(DESCENDANTS, id=self.id)):
            if row["status"] in {"active", "waiting"}:
                # The lease is taken away first: the record is then nobody's to refuse.
                yield from rows(SET_STATUS, number=row["number"], status="active", raised=1)
                place = Place(row["id"], row["number"], self.root_id, None)
                yield from record_status(self.codec, self.heads, place, row["status"], "cancelled")
                yield from rows(SET_STATUS, number=row["number"], status="cancelled", raised=0)
                cancelled.append(row["id"])
        return cancelled

    @operation
    def delete(self, *, force: bool = False) -> Op[list[str]]:
        """Delete the session and everything below it, with their checkpoints. Returns their ids.

        Refused while one of them is leased, or active below this one, unless forced.
        """
        yield from self._lock()
        yield from self._row()
        doomed = yield from rows(DOOMED, id=self.id)
        for row in doomed:
            is_active_below = row["status"] in {"active", "waiting"} and row["id"] != self.id
            if not force and (row["is_leased"] or is_active_below):
                why = "is driven now" if row["is_leased"] else f"is {row['status']}"
                raise SessionBusy(
                    f"session {row['id']} {why}; end it first, or delete with force=True",
                    session_id=row["id"],
                )
        for row in reversed(doomed):
            yield from remove_all(row["number"])
            yield from rows(DELETE, number=row["number"])
        ids = [row["id"] for row in doomed]
        yield from emit(self.codec, self.root_id, self.id, "session_deleted", {"sessions": ids})
        yield AfterCommit(lambda: self.heads.forget(*(row["number"] for row in doomed)))
        return ids

    @operation
    def fork(self, version: int, *, id: str | None = None, name: str | None = None) -> Op[H]:
        """Start a session that shares this one's history up to a version, at no cost per item.

        It stands beside this one in the tree; the fork of a root is a new root.
        """
        require_version(version)
        require_text("name", name)
        new_id = require_id(id) if id is not None else (yield from fresh_id())
        yield from self._lock()
        origin = yield from self._row()
        owner, row = yield from find_and_hold(self.number, self.id, version)
        root_id = self.root_id
        if origin["parent_id"] is None:
            root_id = new_id
            yield from plant_tree(root_id)
            yield Lock(root_id)
        metadata = self.codec.unpack(origin["metadata"], context=("hf_sessions", self.id))
        created = yield from one(
            COPY,
            id=new_id,
            name=name or origin["name"],
            root_id=root_id,
            version=version,
            head=random_id((yield from fresh_id())),
            metadata=self.codec.pack(metadata, context=("hf_sessions", new_id)),
            number=self.number,
            owner=owner,
        )
        if created is None:
            raise InvalidArgument(f"there is a session {new_id!r} already; choose another id")
        yield from copy_fork_point(self.codec, owner, row, created["number"])
        data = {"origin": self.id, "version": version}
        yield from emit(self.codec, root_id, new_id, "session_forked", data)
        return self._session(new_id, created["number"], root_id, name or origin["name"])

    @operation
    def lease(self, holder: str, lease_seconds: float, *, instance: str | None = None) -> Op[Lease]:
        """Take the session's lease. Raises SessionBusy while another's is alive.

        With `instance`, the lease of an earlier boot of that name is taken over at once.
        """
        if instance is not None:
            require_text("instance", instance)
            holder = f"{instance}{BOOT_MARK}{holder}"
            yield from rows(
                FENCE_INSTANCE, number=self.number, holder=holder, boots=f"{instance}{BOOT_MARK}"
            )
        place = Place(self.id, self.number, self.root_id, None)
        require_writable(place, (yield from rows(LOOK, number=self.number)))
        return (yield from SESSIONS.acquire(self.id, holder, lease_seconds))

    @operation
    def renew(self, lease: Lease, lease_seconds: float) -> Op[Lease]:
        """Prolong the lease, or raise LeaseLost."""
        return (yield from SESSIONS.renew(lease, lease_seconds))

    @operation
    def release(self, lease: Lease) -> Op[None]:
        """Give the lease back, or raise LeaseLost."""
        yield from SESSIONS.release(lease)

    def environment(self) -> dict[str, str]:
        """Return what a child process needs to find this session."""
        return {
            "AGENT_SESSION_ID": self.id,
            "AGENT_SESSION_NAME": self.name or "",
            "AGENT_ROOT_SESSION_ID": self.root_id,
            "HOLDFAST_URL": self.url,
        }

    def expand(self, text: str) -> str:
        """Fill `${AGENT_SESSION_NAME}`-style placeholders; unknown ones are left alone."""
        values = self.environment()
        return _PLACEHOLDER.sub(lambda found: values.get(found[1], found[0]), text)

    def _row(self) -> Op[Row]:
        row = yield from one(READ, id=self.id)
        if row is None or row["number"] != self.number:
            raise SessionNotFound(f"there is no session {self.id!r}", id=self.id)
        return row


def record_status(codec: Codec, heads: Heads, place: Place, before: str, after: str) -> Op[None]:
    """Write a change of status into the session's history and into the feed."""
    data = {"from": before, "to": after}
    ready = draft(codec, "state_transition", {}, data, None, None, None)
    yield from write(codec, heads, place, ready)
    yield from emit(codec, place.root_id, place.session_id, "session_status_changed", data)


def info(codec: Codec, row: Row) -> SessionInfo:
    """Return a row as a record."""
    fields = dict(row)
    fields["user"] = fields.pop("user_id")
    fields["metadata"] = codec.unpack(row["metadata"], context=("hf_sessions", row["id"]))
    return SessionInfo(**fields)


def require_id(id: object, what: str = "id") -> str:
    """Return an id that is text of 1 to 256 printable characters."""
    if not isinstance(id, str) or not 0 < len(id) <= TEXT_CHARACTERS_MAX or not id.isprintable():
        raise InvalidArgument(
            f"{what} must be text of 1 to {TEXT_CHARACTERS_MAX} printable characters, not {id!r}"
        )
    return id


def require_text(label: str, text: object) -> None:
    """Refuse what is neither None nor short text."""
    if text is None:
        return
    require_id(text, label)
