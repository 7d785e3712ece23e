"""The public API of sessions: what all nouns can do with one session, in one class."""

from __future__ import annotations

import asyncio
import re
import threading
import uuid
from collections.abc import Awaitable
from dataclasses import replace
from functools import partial
from typing import Any, Literal, overload

from . import trees
from .access import Tokens, record
from .arguments import (
    require_new_id,
    require_one_of,
    require_text,
    require_text_or_none,
    shown,
)
from .checkpoints.branches import copy_fork_point, find_and_hold, require_rewindable, write_rewind
from .checkpoints.keys import VERSIONS
from .checkpoints.read import naming, require_version
from .checkpoints.write import CheckpointOps, end_session
from .clock import random_id
from .effects import SessionEffects
from .effects.history import inherit
from .effects.tools import by_name
from .effects.undo import Compensation, Rewound, leave_behind, undo_after
from .errors import InvalidArgument
from .feed import create_tree, emit
from .kernel.flow import Flow, finish, flow, in_thread, perform, served
from .kernel.opening import Opening
from .kernel.operation import (
    Async,
    C,
    Call,
    Lock,
    Op,
    Row,
    Sync,
    fresh_id,
    one,
    operation,
    query,
    rows,
)
from .leases import Guard, Held, Keeper, default_holder
from .peers import SessionPeers
from .records import Checkpoint, Lease, SessionInfo, SessionRef, Status
from .sessions.access import (
    CLOSING,
    LOCK_SESSION,
    Place,
    ended,
    lock_and_read,
    require_writable,
)
from .sessions.rows import (
    BOOT_MARK,
    COPY_SESSION,
    FENCE_EXPIRED_SESSION,
    FENCE_INSTANCE_SESSION,
    LIST_CHILDREN,
    LIST_DESCENDANTS,
    READ_SESSION,
    SESSION_LEASES,
    info,
    place_of_number,
)
from .spend import SpendOps
from .state import State
from .state.copy import StateCopy, read_copy, write_copy
from .trees import Progress
from .wire import travels

_PLACEHOLDER = re.compile(r"\$\{([A-Z_]+)\}")


@travels
class Session(CheckpointOps[C], SpendOps[C], SessionEffects[C], SessionPeers[C]):
    """A session. Every change is durable when its call returns."""

    @property
    def url(self) -> str:
        """The URL that opens this session's store again; a temporary store has none."""
        return self.runtime.target.url

    @property
    def state(self) -> State[C]:
        """The state that this session shares with its whole tree."""
        return State(self)

    @query
    def info(self) -> Op[SessionInfo]:
        """Return the session as it is stored now."""
        return info(self.runtime.codec, (yield from self._row()))

    @query
    def children(self) -> Op[list[SessionInfo]]:
        """Return the direct children of this session, all at once; `store.sessions` has pages."""
        return [
            info(self.runtime.codec, row) for row in (yield from rows(LIST_CHILDREN, id=self.id))
        ]

    @query
    def tree(self) -> Op[list[SessionInfo]]:
        """Return this session and everything below it, parents before children, all at once.

        A tree of many thousands is read in pages: `store.sessions(root=, after=, limit=)`.
        """
        return [
            info(self.runtime.codec, row) for row in (yield from rows(LIST_DESCENDANTS, id=self.id))
        ]

    @operation
    def end(self, status: Status = "completed") -> Op[None]:
        """End the session as completed, failed or cancelled, and release its lease."""
        if status not in {"completed", "failed", "cancelled"}:
            raise InvalidArgument(
                f"a session ends as completed, failed or cancelled, not {shown(status)}"
            )
        place = self._place
        found = yield from lock_and_read(self.runtime, place)
        row = require_writable(self.runtime, place, found)
        yield from end_session(self.runtime, place, row["status"], status)

    @served
    def cancel(self, *, progress: Progress | None = None) -> Flow[list[str]]:
        """Cancel the session and everything below it, and fence their drivers. Returns their ids.

        Work items are cancelled too, also those of sessions that have ended. A large tree takes
        several transactions; `progress` is called with the number of sessions done and in all.
        Until the last, this session is `cancelling`; after a crash, cancel it again.
        """
        return (yield from trees.cancel(self, progress))

    @served
    def delete(self, *, force: bool = False, progress: Progress | None = None) -> Flow[list[str]]:
        """Delete the session and everything below it, with their checkpoints. Returns their ids.

        Kept are emptied events, what a late retry needs of settled effects, and totals of spend.
        Raises SessionBusy while one of them is leased, or open below this one, unless forced. A
        large tree takes several transactions; `progress` is called with the number of sessions
        removed and in all. Until then they are `deleting`; after a crash, delete it again.
        """
        return (yield from trees.delete(self, force=force, progress=progress))

    @operation
    def fork(
        self,
        version: int,
        *,
        id: str | None = None,
        name: str | None = None,
        state: Literal["copy"] | None = None,
    ) -> Op[Session[C]]:
        """Start a session that shares this one's history up to a version, without copying it.

        It has the same parent. The fork of a root is a new root with empty shared state or, with
        `state="copy"`, the state as of that version.
        """
        require_version(version)
        require_text_or_none("name", name)
        new_id = require_new_id("id", id) if id is not None else (yield from fresh_id())
        yield from self._lock()
        origin = yield from self._row()
        row = yield from find_and_hold(self.number, self.id, version)
        copied = yield from self._copied_state(state, origin, row)
        root_id = self.root_id
        if origin["parent_id"] is None:
            root_id = new_id
            yield from create_tree(root_id)
            yield Lock(root_id)
        metadata = self.runtime.codec.unpack(origin["metadata"], context=("hf_sessions", self.id))
        created = yield from one(
            COPY_SESSION,
            id=new_id,
            name=name or origin["name"],
            root_id=root_id,
            version=version,
            head=random_id((yield from fresh_id())),
            metadata=self.runtime.codec.pack(metadata, context=("hf_sessions", new_id)),
            number=self.number,
            owner=row["key"] // VERSIONS,
        )
        if created is None:
            yield from self._require_staying(origin)
            raise InvalidArgument(f"session {shown(new_id)} exists already; choose another id")
        yield from inherit(self.number, self.id, version, created["number"])
        with naming(self.id, version):
            yield from copy_fork_point(self.runtime.codec, row, created["number"])
        data = {"origin": self.id, "version": version}
        yield from emit(self.runtime.codec, root_id, new_id, "session_forked", data)
        if copied is not None:
            place = Place(new_id, created["number"], root_id, None)
            yield from write_copy(self.runtime, copied, place)
        return Session(self.runtime, new_id, created["number"], root_id, name or origin["name"])

    def _require_staying(self, origin: Row) -> Op[None]:
        """Raise if this session, or its parent, is being deleted or its parent cancelled."""
        if origin["status"] == "deleting":
            raise ended(self.id, origin["status"])
        parent = yield from one(READ_SESSION, id=origin["parent_id"])
        if parent is not None and parent["status"] in CLOSING:
            raise ended(parent["id"], parent["status"])

    def _copied_state(
        self, state: Literal["copy"] | None, origin: Row, checkpoint: Row
    ) -> Op[StateCopy | None]:
        """Return the shared state as of a checkpoint, from the tree that wrote the checkpoint."""
        if state is None:
            return None
        require_one_of("state", state, ("copy",))
        if origin["parent_id"] is not None:
            raise InvalidArgument(
                f"session {self.id} is not a root: its fork shares the state of its tree; omit "
                "state"
            )
        owner = yield from place_of_number(checkpoint["key"] // VERSIONS)
        root_id = self.root_id if owner is None else owner["root_id"]
        return (yield from read_copy(self.runtime.codec, root_id, checkpoint["state_sequence"]))

    @operation
    def move_back(self, version: int) -> Op[Rewound]:
        """Continue from an older version, in a new epoch, without undoing any effect.

        Version numbers continue: the rewind itself is a `state_transition` record. Later versions
        are kept off the path; effects that remain in place are listed. Running work items of the
        session are fenced and requeued, without using up a retry.
        """
        require_version(version)
        place = self._place
        require_writable(self.runtime, place, (yield from lock_and_read(self.runtime, place)))
        keeping = None if self.guard is None else self.guard.id
        here = SessionRef(self.id, self.number, self.root_id)
        for noun in reversed(self.runtime.nouns):
            yield from noun.rewind(self.runtime, here, version, keeping)
        if self.fence is None:
            yield from rows(FENCE_EXPIRED_SESSION, number=self.number)
        left = yield from leave_behind(self.ledger, place, version)
        checkpoint = yield from write_rewind(self.runtime, place, version)
        yield from record(self.runtime.actor, "session_rewound", self.id, f"to version {version}")
        return Rewound(
            **{name: getattr(checkpoint, name) for name in Checkpoint.__dataclass_fields__},
            **{name: getattr(left, name) for name in Compensation.__dataclass_fields__},
        )

    @flow
    def rewind(self, version: int, *, tools: object = None) -> Flow[Rewound]:
        """Undo the effects since a version, newest first, and continue from it in a new epoch.

        `tools` adds to those that this process has called. Effects that are not undone remain in
        place: identical calls get their results, they are listed with the reason, and unless they
        are irreversible they can be compensated later.
        """
        require_version(version)
        known = {**self.ledger.tools, **by_name(tools)}
        place = self._place
        yield from perform(Session._require_rewindable, self, version)
        tried = yield from undo_after(self.ledger, place, version, known, self.holder)
        rewound = yield from perform(Session.move_back, self, version)
        reasons = {effect.id: (effect, why) for effect, why in rewound.not_undone}
        reasons |= {effect.id: (effect, why) for effect, why in tried.not_undone}
        return replace(rewound, undone=tried.undone, not_undone=tuple(reasons.values()))

    @query
    def _require_rewindable(self, version: int) -> Op[None]:
        """Raise what `move_back` would, before anything is undone for it."""
        yield from require_rewindable(self.runtime, self._place, version)

    @operation
    def lease(self, holder: str, lease_seconds: float, *, instance: str | None = None) -> Op[Lease]:
        """Take the session's lease. Raises SessionBusy while another holder has it.

        With `instance`, the lease of an earlier boot of that name is taken over at once.
        """
        if instance is not None:
            require_text("instance", instance)
            holder = f"{instance}{BOOT_MARK}{holder}"
            yield from rows(
                FENCE_INSTANCE_SESSION,
                number=self.number,
                holder=holder,
                boots=f"{instance}{BOOT_MARK}",
            )
        yield from Keeper.of(self.runtime).check(self.guard)
        place = replace(self._place, fence=None)
        require_writable(self.runtime, place, (yield from rows(LOCK_SESSION, number=self.number)))
        return (yield from SESSION_LEASES.acquire(self.id, holder, lease_seconds))

    @operation
    def renew(self, lease: Lease, lease_seconds: float) -> Op[Lease]:
        """Renew the lease, or raise LeaseLost."""
        return (yield from SESSION_LEASES.renew(lease, lease_seconds))

    @operation
    def release(self, lease: Lease) -> Op[None]:
        """Release the lease, or raise LeaseLost."""
        yield from SESSION_LEASES.release(lease)

    @overload
    def drive(
        self: Session[Sync],
        holder: str | None = None,
        lease_seconds: float = 60,
        *,
        instance: str | None = None,
    ) -> DrivenSession[Sync]: ...
    @overload
    def drive(
        self: Session[Async],
        holder: str | None = None,
        lease_seconds: float = 60,
        *,
        instance: str | None = None,
    ) -> Opening[DrivenSession[Async]]: ...
    def drive(
        self, holder: str | None = None, lease_seconds: float = 60, *, instance: str | None = None
    ) -> Any:
        """Take the session's lease, and renew it until the handle is closed.

        Use `await` or `async with` on an async session. Raises SessionBusy while another holder
        drives it. `instance` names this process across restarts, and fences the lease of an earlier
        boot of that name.
        """
        driven: DrivenSession[Any] = DrivenSession(self, holder, lease_seconds, instance)
        if self.runtime.is_async:
            return Opening(driven.open_async(), "session.drive(…)")
        self.runtime.driver.require_outside()
        try:
            taking = in_thread(partial(driven.keeper.take, driven.held))
            taking.latch.wait(threading.TIMEOUT_MAX)
            driven.take(taking.result())
        except BaseException:
            driven.held.inbox.put(driven.held)
            driven.held.leave()
            raise
        return driven

    @flow
    def environment(self) -> Flow[dict[str, str]]:
        """Return the environment by which a child process finds this session.

        On a server, that includes a new token limited to the tree. Raises for a temporary store.
        """
        url = self.url
        found = {**(yield from perform(Session._names, self)), "HOLDFAST_URL": url}
        if self.runtime.is_remote:
            made = yield from perform(
                Tokens.create,
                Tokens(self.runtime),
                f"environment {uuid.uuid4()}",
                permission="write",
                session=self.id,
            )
            found["HOLDFAST_TOKEN"] = made.secret
        return found

    @flow
    def expand(self, text: str) -> Flow[str]:
        """Expand placeholders such as `${AGENT_SESSION_NAME}`; unknown ones are kept."""
        if not isinstance(text, str):
            raise InvalidArgument(f"text must be text, not {type(text).__name__}")
        values = {"HOLDFAST_URL": self.url} if "${HOLDFAST_URL}" in text else {}
        values |= yield from perform(Session._names, self)
        return _PLACEHOLDER.sub(lambda found: values.get(found[1], found[0]), text)

    @query
    def _names(self) -> Op[dict[str, str]]:
        row = yield from self._row()
        root = yield from one(READ_SESSION, id=self.root_id)
        return {
            "AGENT_SESSION_ID": self.id,
            "AGENT_SESSION_NAME": row["name"] or "",
            "AGENT_ROOT_SESSION_ID": self.root_id,
            "AGENT_ROOT_SESSION_NAME": "" if root is None else root["name"] or "",
        }


class DrivenSession(Session[C]):
    """A session whose lease this handle holds; all its writes check the fence.

    The lease is released when the handle is closed or garbage-collected.
    """

    def __init__(
        self,
        session: Session[Any],
        holder: str | None,
        lease_seconds: float,
        instance: str | None,
    ) -> None:
        place = (session.id, session.number, session.root_id, session.name)
        super().__init__(session.runtime, *place, guard=session.guard)
        given = (default_holder() if holder is None else holder, lease_seconds)
        taking = Call(Session.lease, session, given, {"instance": instance})

        def take() -> tuple[Guard, Lease]:
            lease: Lease = session.runtime.run(taking)
            return Guard("session", session.id, session.number, lease.fence), lease

        def release(lease: Lease) -> None:
            session.runtime.run(Call(Session.release, session, (lease,)))

        self.keeper = Keeper.of(session.runtime)
        self.held = Held(self, self.keeper, lease_seconds, take, release)

    def take(self, lease: Lease) -> None:
        """Use this lease for all further writes."""
        self.fence, self.holder = lease.fence, lease.holder

    async def open_async(self) -> DrivenSession[C]:
        """Take the lease; if cancelled meanwhile, release it."""
        try:
            taking = in_thread(partial(self.keeper.take, self.held))
            self.take(await asyncio.wrap_future(taking))
        except BaseException as error:
            self.held.inbox.put(self.held)
            if not isinstance(error, GeneratorExit):
                await finish(asyncio.wrap_future(in_thread(self.held.leave)))
            raise
        return self

    @overload
    def close(self: DrivenSession[Sync]) -> None: ...
    @overload
    def close(self: DrivenSession[Async]) -> Awaitable[None]: ...
    def close(self) -> Any:
        """Release the lease, also when cancelled. A lost lease is not an error."""
        return self._close_async() if self.runtime.is_async else self._close()

    def _close(self) -> None:
        self.held.inbox.put(self.held)
        # A signal handler or `__del__` may run inside a call that the release would wait for.
        if not self.runtime.driver.is_inside:
            self.keeper.finish(self.held)

    async def _close_async(self) -> None:
        self.held.inbox.put(self.held)
        await finish(asyncio.wrap_future(in_thread(partial(self.keeper.finish, self.held))))

    def __enter__(self: DrivenSession[Sync]) -> DrivenSession[Sync]:
        return self

    def __exit__(self: DrivenSession[Sync], *_: object) -> None:
        self._close()

    async def __aenter__(self: DrivenSession[Async]) -> DrivenSession[Async]:
        return self

    async def __aexit__(self: DrivenSession[Async], *_: object) -> None:
        await self._close_async()
