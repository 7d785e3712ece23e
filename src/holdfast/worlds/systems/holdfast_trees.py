"""The trees of a store that is rolled back: the points their sessions were at, and restoring them.

Versions, sequences and epochs only increase. A session is restored by a rewind, which is a new
version with the channels of the old one; shared state under new versions of its keys.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ...checkpoints.read import find
from ...effects import Ledger
from ...effects.undo import (
    WITHOUT_SESSION,
    Range,
    find_running,
    find_unsettled,
    last_effect,
    sessions_of_effects,
    sessions_with_newer_effects,
    set_undone_by_world,
)
from ...errors import CheckpointInvalid, SystemBusy
from ...feed import list_trees
from ...kernel.operation import Handle, Lock, Op, Sync, Tx, large_query, one, operation, query, rows
from ...kernel.schema import read_now_ms
from ...records import Effect, SessionInfo, Status
from ...session import Session
from ...sessions.rows import FIND_DRIVEN, SET_LABELS, info, list_rows
from ...store import Transaction
from ...trees import OPEN, Tree

PER_PAGE: Final = 1_000
_UNSETTLED: Final[tuple[Status, ...]] = ("waiting", "cancelling", "deleting")


@dataclass(frozen=True, slots=True)
class SessionPoint:
    """A session at one moment: the version to rewind to, its status and its labels."""

    id: str
    version: int
    status: Status
    name: str | None
    agent: str | None
    user: str | None
    metadata: Mapping[str, Any]

    @property
    def labels(self) -> tuple[Any, ...]:
        """The attributes that a rewind does not change."""
        return self.name, self.agent, self.user, self.metadata


@dataclass(frozen=True, slots=True)
class TreePoint:
    """A tree at one moment: the sequence of its shared state, and its sessions by number."""

    sequence: int
    sessions: Mapping[int, SessionPoint]


# Stands for a tree that was started after the point.
NOTHING: Final = TreePoint(0, {})


@dataclass(frozen=True, slots=True)
class LiveTree:
    """A tree as it is stored, and the point whose values it has.

    `hidden` are sessions that were started after the point, with the version each was left at.
    """

    position: int | None
    stored: TreePoint
    point: TreePoint
    hidden: Mapping[int, int]

    def is_at(self, target: TreePoint, number: int) -> bool:
        """Return whether a session already has the values of another point."""
        return self.point.sessions.get(number) == target.sessions[number]


@dataclass(frozen=True, slots=True)
class Change:
    """The effects to undo and to reinstate, and the sessions that have new ones."""

    undone: Sequence[Range]
    redone: Sequence[Range]
    sessions: Collection[int]


class StoreTrees(Handle[Sync]):
    """The operations of a world on the trees of a store, each tree in one transaction."""

    @query
    def positions(self) -> Op[dict[str, int]]:
        """Return the position of each tree's feed; a tree that did not move did not change."""
        return {row["root_id"]: row["position"] for row in (yield from list_trees())}

    @query
    def effects_since(self, number: int) -> Op[tuple[int, set[int]]]:
        """Return the number of the last effect, and the sessions of those after a number."""
        return (yield from last_effect()), (yield from sessions_of_effects(number))

    @query
    def why_in_use(self) -> Op[str | None]:
        """Return who is writing to the store, if anybody is."""
        driven = yield from one(FIND_DRIVEN)
        if driven is not None:
            return f"session {driven['id']} is driven by {driven['holder']!r}"
        effect = yield from find_running()
        if effect is not None:
            return f"a call of {effect['tool']} is running (effect {effect['id']})"
        now_ms = yield from read_now_ms()
        tx = Transaction(self.runtime)
        for item in (yield from tx.work.list(status="in_progress", limit=PER_PAGE)):
            if (item.lease_expires_at or 0) > now_ms:
                return f"work item {item.id} is held by {item.holder!r}"
        return None

    @query
    def why_unsettled(self) -> Op[str | None]:
        """Return what is in progress and could not be restored, if anything."""
        effect = yield from find_unsettled()
        if effect is not None:
            what = "in flight" if effect["status"] == "issued" else "in doubt"
            return f"effect {effect['id']} of {effect['tool']} is {what}"
        tx = Transaction(self.runtime)
        for item in (yield from tx.work.list(status=("pending", "in_progress"), limit=1)):
            return f"work item {item.id} is {item.status}"
        for ask in (yield from tx.asks(state="open", limit=1)):
            return f"peer call {ask.id} has no answer"
        for status in _UNSETTLED:
            for session in (yield from tx.sessions(status=status, limit=1)):
                return f"session {session.id} is {session.status}"
        return None

    @operation
    def hold(
        self,
        root_id: str,
        position: int,
        live: LiveTree | None,
        touched: Collection[int],
        label: str,
    ) -> Op[LiveTree]:
        """Return a tree with its current point, to which it can be rewound later.

        A session without a version after its newest effect gets one, because a rewind to the
        version at which an effect was issued would also undo that effect.
        """
        yield Lock(root_id)
        infos = yield from self._visible(root_id, live)
        is_open = [each.number for each in infos if each.status in OPEN]
        tx = Transaction(self.runtime)
        needing = yield from sessions_with_newer_effects(is_open)
        for number in sorted(needing):
            [found] = [each for each in infos if each.number == number]
            session = self._session(tx, found)
            yield from session.record("manual_checkpoint", {"world": label})
        stored = yield from self._stored(tx, root_id, live)
        # Writing here moves the feed, so the tree is read again the next time.
        known = None if needing else position
        if live is None:
            return LiveTree(known, stored, stored, {})
        same = {
            number: live.point.sessions[number]
            for number, now in stored.sessions.items()
            if number in live.point.sessions
            and number not in touched
            and live.stored.sessions.get(number) == now
        }
        is_same_state = live.stored.sequence == stored.sequence
        sequence = live.point.sequence if is_same_state else stored.sequence
        point = TreePoint(sequence, {**stored.sessions, **same})
        return LiveTree(known, stored, live.point if point == live.point else point, live.hidden)

    @query
    def check(self, root_id: str, target: TreePoint) -> Op[None]:
        """Raise if a session, or the version to rewind it to, no longer exists."""
        there = {each.number for each in (yield from self._sessions(root_id))}
        for number, point in target.sessions.items():
            if number not in there:
                raise CheckpointInvalid(f"session {point.id} was deleted since")
            yield from find(number, point.id, point.version)

    @operation
    def restore(
        self, root_id: str, target: TreePoint, live: LiveTree | None, change: Change
    ) -> Op[LiveTree]:
        """Restore a tree to a point: rewind, reopen and end its sessions; cancel newer ones."""
        yield Lock(root_id)
        tx = Transaction(self.runtime)
        infos = yield from self._sessions(root_id)
        stored = TreePoint((yield from self._sequence(tx, infos)), _points(infos))
        is_same_state = live is not None and (
            live.stored.sequence == stored.sequence and live.point.sequence == target.sequence
        )
        for found in infos:
            session = self._session(tx, found)
            point = target.sessions.get(found.number)
            if point is None:
                if found.status in OPEN or found.status == "cancelling":
                    yield from Tree.of(session).cancel_whole()
                continue
            is_same = (
                live is not None
                and found.number not in change.sessions
                and live.is_at(target, found.number)
                and live.stored.sessions.get(found.number) == stored.sessions[found.number]
            )
            is_changed_root = found.id == root_id and not is_same_state
            if is_same and not is_changed_root:
                continue
            if found.status not in OPEN:
                yield from tx.session(found.id, reopen=True)
            yield from session.move_back(point.version)
            if point.labels != stored.sessions[found.number].labels:
                yield from self._label(found.number, point)
            if is_changed_root:
                yield from session.state.restore(target.sequence)
            if point.status not in OPEN:
                yield from session.end(point.status)
        yield from set_undone_by_world(change.undone, change.redone, list(stored.sessions))
        infos = yield from self._sessions(root_id)
        hidden = {each.number: each.version for each in infos}
        for number in target.sessions:
            del hidden[number]
        infos = [each for each in infos if each.number in target.sessions]
        stored = TreePoint((yield from self._sequence(tx, infos)), _points(infos))
        return LiveTree(None, stored, target, hidden)

    @operation
    def restore_effects(self, change: Change) -> Op[None]:
        """Do the same for effects that belong to no session."""
        yield from set_undone_by_world(change.undone, change.redone, None)

    @large_query
    def shown(self, root_id: str, live: LiveTree | None) -> Op[dict[str, Any] | None]:
        """Return the content of a tree, without versions; None if nothing is left of it."""
        infos = yield from self._visible(root_id, live)
        if not infos:
            return None
        tx = Transaction(self.runtime)
        sessions = []
        for each in infos:
            session = self._session(tx, each)
            latest = yield from session.latest()
            resuming = yield from session.resume_point()
            effects: list[Any] = []
            while page := (
                yield from tx.effects(session=each.id, limit=PER_PAGE, after=_last(effects))
            ):
                effects += page
            labels = {name: getattr(each, name) for name in _LABELS}
            channels = {} if latest is None else dict(latest.channels)
            shown = {**labels, "channels": channels, "iteration": resuming.iteration}
            sessions.append({**shown, "effects": list(_shown(effects))})
        snapshot = yield from self._session(tx, infos[0]).state.snapshot()
        return {"sessions": sessions, "state": dict(snapshot.document)}

    @large_query
    def shown_without_session(self) -> Op[list[Any]]:
        """Return the effects that belong to no session."""
        ledger = Ledger.of(self.runtime)
        effects: list[Effect] = []
        while page := (yield from rows(WITHOUT_SESSION, after=_last(effects), limit=PER_PAGE)):
            effects += [ledger.effect(row) for row in page]
        return list(_shown(effects))

    @query
    def visible(self, root_id: str, live: LiveTree | None) -> Op[list[SessionInfo]]:
        """Return the sessions of a tree, without those started after its point."""
        return (yield from self._visible(root_id, live))

    def _visible(self, root_id: str, live: LiveTree | None) -> Op[list[SessionInfo]]:
        hidden = {} if live is None else live.hidden
        found = yield from self._sessions(root_id)
        # A hidden session that was reopened is part of the world again.
        return [each for each in found if hidden.get(each.number) != each.version]

    def _sessions(self, root_id: str) -> Op[list[SessionInfo]]:
        found: list[SessionInfo] = []
        while page := (
            yield from list_rows({"root_id": root_id}, _last(found), PER_PAGE, newest_first=False)
        ):
            found += [info(self.runtime.codec, row) for row in page]
        for each in found:
            if each.status == "deleting":
                raise SystemBusy(f"session {each.id} is being deleted")
        return found

    def _stored(self, tx: Transaction, root_id: str, live: LiveTree | None) -> Op[TreePoint]:
        infos = yield from self._visible(root_id, live)
        return TreePoint((yield from self._sequence(tx, infos)), _points(infos))

    def _sequence(self, tx: Transaction, infos: Sequence[SessionInfo]) -> Op[int]:
        return (yield from self._session(tx, infos[0]).state.version()) if infos else 0

    def _label(self, number: int, point: SessionPoint) -> Op[None]:
        metadata = self.runtime.codec.pack(dict(point.metadata), context=("hf_sessions", point.id))
        given = {"name": point.name, "agent": point.agent, "user_id": point.user}
        yield from rows(SET_LABELS, number=number, metadata=metadata, **given)

    def _session(self, tx: Transaction, found: SessionInfo) -> Session[Tx]:
        return Session(tx.runtime, found.id, found.number, found.root_id, found.name)


_LABELS: Final = ("id", "parent_id", "name", "agent", "user", "status", "metadata")


def _points(infos: Sequence[SessionInfo]) -> dict[int, SessionPoint]:
    return {
        each.number: SessionPoint(
            each.id, each.version, each.status, each.name, each.agent, each.user, each.metadata
        )
        for each in infos
    }


def _last(found: Sequence[SessionInfo | Effect]) -> int:
    return found[-1].number if found else 0


def _shown(effects: Sequence[Effect]) -> Iterator[list[Any]]:
    """Yield the results that later calls may be answered with, in the order of the calls."""
    for each in effects:
        if each.undone_by is None and each.replay_of is None and not each.is_outside:
            yield [each.tool, each.call_id, each.arguments, each.status, each.result]
