"""The rows of a world or an exploration, which belong to a session of the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from ..arguments import require_limit, require_whole
from ..codec import Codec
from ..dataclass import dataclass
from ..errors import NotFound
from ..kernel.operation import (
    C,
    Handle,
    Op,
    Query,
    Row,
    batch,
    large_query,
    one,
    operation,
    query,
    rows,
)
from ..kernel.sql import among, given
from ..records import Activity
from ..sessions.access import lock_and_read, require_fence, require_open
from ..sessions.handle import SessionHandle
from ..sessions.rows import ALL_SESSIONS, READ_PLACE_BY_ID, SESSION_COLUMNS, info
from ..work.claims import RESERVED

ROWS_PER_PAGE = 1_000
NUMBER_MAX = 2**62

READ_WORLD = "SELECT settings, intent FROM hf_worlds WHERE session_number = :number"
WRITE_SETTINGS = """
INSERT INTO hf_worlds (session_number, settings) VALUES (:number, :settings)
ON CONFLICT (session_number) DO UPDATE SET settings = excluded.settings
"""
WRITE_TOTALS = """
UPDATE hf_worlds SET states = :states, steps = :steps, violations = :violations
WHERE session_number = :number
"""
SELECT_EXPLORATIONS = f"""
SELECT {SESSION_COLUMNS}, states, steps, violations
FROM {ALL_SESSIONS} JOIN hf_worlds w ON w.session_number = s.number
WHERE w.settings IS NOT NULL
"""  # noqa: S608
READ_EXPLORATION = f"{SELECT_EXPLORATIONS} AND w.session_number = :number"
LIST_EXPLORATIONS = f"""
{SELECT_EXPLORATIONS} AND w.session_number > :after ORDER BY w.session_number LIMIT :limit
"""
LIST_NEWEST = f"""
{SELECT_EXPLORATIONS} AND w.session_number < :before
ORDER BY w.session_number DESC LIMIT :limit
"""
WRITE_INTENT = """
INSERT INTO hf_worlds (session_number, intent) VALUES (:number, CAST(:intent AS BLOB))
ON CONFLICT (session_number) DO UPDATE SET intent = excluded.intent
"""
LIST_CHECKPOINTS = """
SELECT id, name, body, created_at FROM hf_world_checkpoints
WHERE session_number = :number ORDER BY number
"""
ADD_CHECKPOINT = """
INSERT INTO hf_world_checkpoints (session_number, id, name, body, created_at)
VALUES (:number, :id, :name, :body, :created_at)
"""
REMOVE_CHECKPOINT = "DELETE FROM hf_world_checkpoints WHERE session_number = :number AND id = :id"
REMOVE_CHECKPOINTS = "DELETE FROM hf_world_checkpoints WHERE session_number = :number"
# A state that was too deep, and is nearer now, is written again with what to try there.
ADD_STATE = """
INSERT INTO hf_world_states (session_number, id, body) VALUES (:number, :id, :body)
ON CONFLICT (session_number, id) DO UPDATE SET body = excluded.body
    WHERE CAST(:is_nearer AS INTEGER) = 1
"""
ADD_STEP = """
INSERT INTO hf_world_steps (session_number, from_id, candidate, to_id, has_findings, body)
VALUES (:number, :from_id, :candidate, CAST(:to_id AS TEXT), :has_findings, :body)
ON CONFLICT (session_number, from_id, candidate) DO NOTHING
"""
# Written so that PostgreSQL does not walk along the primary key, past the rows of other sessions.
AFTER = """(session_number, number) > (:session, :after) AND session_number <= :session
ORDER BY session_number, number LIMIT :limit"""
LIST_STATES = f"""
SELECT number, id, body FROM hf_world_states WHERE {AFTER}
"""  # noqa: S608
GIVEN_STATES = f"""
SELECT number, id, body FROM hf_world_states
WHERE session_number = :session AND id {among("ids")}
"""  # noqa: S608
SELECT_STEPS = """
SELECT number, from_id, candidate, to_id, has_findings, body FROM hf_world_steps
"""
LIST_STEPS = f"{SELECT_STEPS} WHERE {AFTER}"
LIST_FINDINGS = f"""{SELECT_STEPS} WHERE session_number = :session AND has_findings = 1
ORDER BY number LIMIT :limit"""
LIST_EDGES = f"SELECT number, from_id, candidate, to_id FROM hf_world_steps WHERE {AFTER}"  # noqa: S608


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptWorld:
    """The settings of an exploration, and the rollback in progress; None if there is none."""

    settings: bytes | None
    intent: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """How far an exploration has come."""

    states: int
    steps: int
    violations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplorationInfo:
    """An exploration in a store, without its graph; `status` is that of its session."""

    number: int
    id: str
    status: Activity
    states: int
    steps: int
    violations: int
    created_at: int
    updated_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCheckpoint:
    """A checkpoint from which another process can restore the world."""

    id: str
    name: str
    body: bytes
    created_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptState:
    """A state that was seen; `is_nearer` if it is written again, with what to try there."""

    id: str
    body: bytes
    number: int = 0
    is_nearer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptStep:
    """Something that was tried in a state, and where it led; nowhere if it was not possible.

    `has_findings` says that the body contains a violation or a warning.
    """

    from_id: str
    candidate: int
    to_id: str | None
    body: bytes
    number: int = 0
    has_findings: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """A step without its body."""

    number: int
    from_id: str
    candidate: int
    to_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """The beginning of an exploration, without the observations of its states.

    `initial` is None if it was removed. `findings` are the first steps that found something,
    including those after the last of the `edges`.
    """

    settings: bytes | None
    initial: KeptState | None
    edges: list[Edge]
    findings: list[KeptStep]


Infos = list[ExplorationInfo]


class Explorations(Handle[C]):
    """The explorations of a store."""

    @query
    def get(self, session: SessionHandle[Any]) -> Op[ExplorationInfo]:
        """Return the exploration that belongs to a session, or raise NotFound."""
        row = yield from one(READ_EXPLORATION, number=session.number)
        if row is None:
            raise NotFound(f"session {session.id} is not an exploration", id=session.id)
        return self._info(row)

    @query
    def journal(self, id: str) -> Op[Journal[C] | None]:
        """Return the journal of the session with exactly this id, for reading; None without one."""
        row = yield from one(READ_PLACE_BY_ID, id=id)
        return None if row is None else Journal(self.runtime, id, row["number"], row["root_id"])

    @query
    def list(self, *, after: int = 0, limit: int = 100) -> Op[Infos]:
        """Return explorations in order of creation; `after` is the number of the last one seen."""
        require_whole("after", after, 0)
        require_limit(limit, ROWS_PER_PAGE)
        found = yield from rows(LIST_EXPLORATIONS, after=after, limit=limit)
        return [self._info(row) for row in found]

    @query
    def newest(self, *, before: int | None = None, limit: int = 100) -> Op[Infos]:
        """Return explorations, newest first; `before` is the number of the last one seen."""
        before = NUMBER_MAX if before is None else require_whole("before", before, 1)
        require_limit(limit, ROWS_PER_PAGE)
        found = yield from rows(LIST_NEWEST, before=before, limit=limit)
        return [self._info(row) for row in found]

    def _info(self, row: Row) -> ExplorationInfo:
        totals = {field.name: row[field.name] for field in fields(Totals)}
        session = info(self.runtime.codec, {name: row[name] for name in row if name not in totals})
        return ExplorationInfo(
            number=session.number,
            id=session.id,
            status=session.activity,
            created_at=session.created_at,
            updated_at=session.updated_at,
            **totals,
        )


class Journal(SessionHandle[C]):
    """The records of a world or an exploration under one session.

    Every write checks the lease of the session, or of the work item, with which the handle was
    created; LeaseLost means that another process has taken over.
    """

    @large_query
    def world(self) -> Op[KeptWorld]:
        """Return the settings, and the rollback in progress."""
        row = yield from one(READ_WORLD, number=self.number)
        if row is None:
            return KeptWorld(settings=None, intent=None)
        return KeptWorld(**{name: self._opened(name, record) for name, record in row.items()})

    @operation
    def set_settings(self, settings: bytes) -> Op[None]:
        """Write the settings of an exploration."""
        yield from self._lock()
        sealed = self._sealed("settings", settings)
        yield from rows(WRITE_SETTINGS, number=self.number, settings=sealed)

    @operation
    def set_intent(self, intent: bytes | None) -> Op[None]:
        """Record the rollback that is about to start, or that none is in progress."""
        yield from self._lock()
        sealed = None if intent is None else self._sealed("intent", intent)
        yield from rows(WRITE_INTENT, number=self.number, intent=sealed)

    @large_query
    def checkpoints(self) -> Op[list[KeptCheckpoint]]:
        """Return the checkpoints, oldest first."""
        found = yield from rows(LIST_CHECKPOINTS, number=self.number)
        return [
            KeptCheckpoint(**{**row, "body": self._body(row["id"], row["body"])}) for row in found
        ]

    @operation
    def add_checkpoint(self, checkpoint: KeptCheckpoint) -> Op[None]:
        """Add a checkpoint."""
        yield from self._lock()
        yield from rows(
            ADD_CHECKPOINT,
            number=self.number,
            id=checkpoint.id,
            name=checkpoint.name,
            body=self._sealed(checkpoint.id, checkpoint.body),
            created_at=checkpoint.created_at,
        )

    @operation
    def remove_checkpoint(self, id: str) -> Op[None]:
        """Remove a checkpoint."""
        yield from self._lock()
        yield from rows(REMOVE_CHECKPOINT, number=self.number, id=id)

    @operation
    def clear(self) -> Op[None]:
        """Remove all checkpoints, and the rollback in progress."""
        yield from self._lock()
        yield from batch(
            Query(REMOVE_CHECKPOINTS, {"number": self.number}),
            Query(WRITE_INTENT, {"number": self.number, "intent": None}),
        )

    @operation
    def add(
        self,
        states: Sequence[KeptState],
        steps: Sequence[KeptStep],
        totals: Totals | None = None,
    ) -> Op[None]:
        """Add what some steps of an exploration found, all of it or nothing.

        A state or a step that already exists is left as it is. `totals` are the totals of the
        exploration after these steps.
        """
        yield from self._lock()
        yield from batch(*self._additions(states, steps, totals))

    def _additions(
        self, states: Sequence[KeptState], steps: Sequence[KeptStep], totals: Totals | None = None
    ) -> list[Query]:
        """Return the statements that add states and steps."""
        queries = [
            Query(
                ADD_STATE,
                {
                    "number": self.number,
                    "id": state.id,
                    "body": self._sealed(state.id, state.body),
                    "is_nearer": int(state.is_nearer),
                },
            )
            for state in states
        ]
        queries += [
            Query(
                ADD_STEP,
                {
                    "number": self.number,
                    "from_id": step.from_id,
                    "candidate": step.candidate,
                    "to_id": step.to_id,
                    "has_findings": int(step.has_findings),
                    "body": self._sealed(f"{step.from_id} {step.candidate}", step.body),
                },
            )
            for step in steps
        ]
        if totals is not None:
            queries.append(Query(WRITE_TOTALS, {"number": self.number, **asdict(totals)}))
        return queries

    @large_query
    def states(self, *, after: int = 0) -> Op[list[KeptState]]:
        """Return some of the states after a number, in the order in which they were seen."""
        page = {"session": self.number, "after": after, "limit": ROWS_PER_PAGE}
        found = yield from rows(LIST_STATES, **page)
        return [self._state(row) for row in found]

    @large_query
    def given_states(self, ids: Sequence[str]) -> Op[dict[str, KeptState]]:
        """Return the given states that exist, by their ids."""
        found = yield from rows(GIVEN_STATES, session=self.number, ids=given(ids))
        return {row["id"]: self._state(row) for row in found}

    @large_query
    def steps(self, *, after: int = 0) -> Op[list[KeptStep]]:
        """Return some of the log of actions after a number, in order."""
        page = {"session": self.number, "after": after, "limit": ROWS_PER_PAGE}
        found = yield from rows(LIST_STEPS, **page)
        return [self._step(row) for row in found]

    @large_query
    def edges(self, *, after: int = 0) -> Op[list[Edge]]:
        """Return the same without what was found."""
        page = {"session": self.number, "after": after, "limit": ROWS_PER_PAGE}
        return [Edge(**row) for row in (yield from rows(LIST_EDGES, **page))]

    @large_query
    def outline(self, *, edges: int, findings: int) -> Op[Outline]:
        """Return how the states are connected, for at most this many steps, and what was found."""
        page = {"session": self.number}
        world = yield from one(READ_WORLD, number=self.number)
        first = yield from rows(LIST_STATES, **page, after=0, limit=1)
        led = yield from rows(LIST_EDGES, **page, after=0, limit=edges)
        told = yield from rows(LIST_FINDINGS, **page, limit=findings)
        return Outline(
            settings=None if world is None else self._opened("settings", world["settings"]),
            initial=self._state(first[0]) if first else None,
            edges=[Edge(**row) for row in led],
            findings=[self._step(row) for row in told],
        )

    def _state(self, row: Row) -> KeptState:
        return KeptState(**{**row, "body": self._body(row["id"], row["body"])})

    def _step(self, row: Row) -> KeptStep:
        body = self._body(f"{row['from_id']} {row['candidate']}", row["body"])
        return KeptStep(**{**row, "body": body, "has_findings": bool(row["has_findings"])})

    def _lock(self) -> Op[None]:
        """Lock the tree and check the lease; raise if it is lost, or the session has ended."""
        found = yield from lock_and_read(self.runtime, self._place)
        for row in found:
            require_fence(self._place, row)
        require_open(self._place, found)

    def _sealed(self, what: str, body: bytes) -> bytes:
        return self.runtime.codec.seal(body, context=context(self.id, what))

    def _body(self, what: str, record: bytes) -> bytes:
        return opened(self.runtime.codec, self.id, what, record)

    def _opened(self, what: str, record: bytes | None) -> bytes | None:
        return None if record is None else self._body(what, record)


def context(session_id: str, what: str) -> tuple[str, ...]:
    """Return the context that a sealed body is bound to."""
    return ("hf_worlds", session_id, what)


def opened(codec: Codec, session_id: str, what: str, record: bytes) -> bytes:
    """Return the body of a record, or raise CorruptRecord."""
    return codec.unseal(record, context=context(session_id, what))


def queues_of(number: int) -> tuple[str, str]:
    """Return the queues of the exploration of a session: of its batches, and of its workers."""
    return f"{RESERVED}worlds/{number}", f"{RESERVED}worlds/{number}/workers"
