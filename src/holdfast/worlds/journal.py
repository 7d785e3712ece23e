"""What a world keeps in a store, so that another process can continue if this one is killed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..arguments import require_text, shown
from ..errors import Conflict, InvalidArgument, NotFound
from ..explorations import Explorations, Journal, KeptCheckpoint
from ..explorations.frontier import Frontier
from ..kernel.operation import C, Sync
from ..session import DrivenSession, Session
from ..sessions.handle import SessionHandle
from ..store import Store
from .checkpoints import Checkpoint
from .rollback import Kept
from .system import System
from .values import decode, encode

AGENT = "holdfast.worlds"
_LEASE_SECONDS = 60


def require_store(store: object) -> Store:
    """Return the store, after checking that it can keep what worlds write."""
    if not isinstance(store, Store):
        raise InvalidArgument(f"store must be a Store, not {shown(store)}; worlds are synchronous")
    if store.runtime.is_remote:
        raise InvalidArgument("store must be opened directly on its database, not through a server")
    return store


def require_foreign(store_id: str | None, systems: Mapping[str, System]) -> None:
    """Raise InvalidArgument if a system would roll back the store that keeps the world's data."""
    for name, system in systems.items():
        if store_id is not None and system.uses(store_id):
            raise InvalidArgument(
                f"store is rolled back as system {name}, so it cannot keep the data of this world; "
                "use a separate store"
            )


def drive(store: Store, id: str) -> DrivenSession:
    """Take over the session of a world at once; a process that still drives it is fenced."""
    session = store.session(require_text("id", id), agent=AGENT, reopen=True)
    return session.drive(lease_seconds=_LEASE_SECONDS, instance=AGENT)


def journal_of(session: Session[C]) -> Journal[C]:
    """Return the journal of a session, which is written under the session's lease."""
    place = (session.runtime, session.id, session.number, session.root_id)
    return Journal(*place, fence=session.fence, guard=session.guard)


def frontier_of(session: SessionHandle[C]) -> Frontier[C]:
    """Return the frontier of a session, which is written under the session's lease."""
    place = (session.runtime, session.id, session.number, session.root_id)
    return Frontier(*place, fence=session.fence, guard=session.guard)


def discard(frontier: Frontier[Sync], *, with_workers: bool = True) -> None:
    """Remove what is published and leased; without `with_workers`, they have to leave first."""
    while frontier.discard(with_workers=with_workers):
        pass


def journal_in(store: Store, id: str) -> Journal[Sync] | None:
    """Return the journal of the session with exactly this id, for reading; None without one."""
    return Explorations(store.runtime).journal(id)


def require_new(store: Store, id: str) -> None:
    """Raise Conflict if the store has an exploration with this id, which may be running."""
    if _has(store, id):
        raise Conflict(
            f"Exploration {id} is already in the store: resume=True continues it, and "
            "holdfast.worlds.clean, or --clean, removes it."
        )


def require_known(store: Store, id: str) -> None:
    """Raise NotFound unless the store has an exploration of this id."""
    if not _has(store, id):
        raise NotFound(
            f"There is no exploration {id} in the store to continue; leave out resume=True.", id=id
        )


def _has(store: Store, id: str) -> bool:
    journal = journal_in(store, id)
    return journal is not None and journal.world().settings is not None


class WorldJournal:
    """The durable checkpoints of a world, and the rollback in progress, if any."""

    def __init__(self, store: Store, id: str) -> None:
        self._session = drive(require_store(store), id)
        self._journal = journal_of(self._session)
        # What systems have kept for checkpoints, in this process and earlier ones.
        self._kept: list[Mapping[str, Any]] = []
        self._ids: set[str] = set()

    def load(self) -> tuple[list[Checkpoint], str | None]:
        """Return the checkpoints, and the id of the target of an unfinished rollback."""
        found = [checkpoint_of(kept) for kept in self._journal.checkpoints()]
        self._ids = {checkpoint.id for checkpoint in found}
        for checkpoint in found:
            self._kept.append({name: kept.data for name, kept in checkpoint.tokens.items()})
        intent = self._journal.world().intent
        return found, None if intent is None else decode(intent)

    def add(self, checkpoint: Checkpoint, kept: Mapping[str, Any]) -> None:
        """Write a checkpoint, with what another process needs to restore it."""
        self._kept.append(kept)
        self._journal.add_checkpoint(kept_checkpoint(checkpoint, kept))
        self._ids.add(checkpoint.id)

    def remove(self, id: str) -> list[Mapping[str, Any]]:
        """Remove a checkpoint; return what systems can discard, everything with the last one."""
        if id in self._ids:
            self._journal.remove_checkpoint(id)
            self._ids.remove(id)
        return [] if self._ids else self._take_kept()

    def begin(self, id: str) -> None:
        """Record the target of a rollback that is about to start."""
        self._journal.set_intent(encode(id, "id"))

    def end(self) -> None:
        """Record that no rollback is in progress."""
        self._journal.set_intent(None)

    def clear(self) -> list[Mapping[str, Any]]:
        """Remove all checkpoints, end the session, and return what systems can discard."""
        self._journal.clear()
        self._session.end()
        return self._take_kept()

    def close(self) -> None:
        """Release the lease."""
        self._session.close()

    def _take_kept(self) -> list[Mapping[str, Any]]:
        kept, self._kept = self._kept, []
        return kept


def kept_checkpoint(checkpoint: Checkpoint, kept: Mapping[str, Any]) -> KeptCheckpoint:
    """Return a checkpoint as it is stored."""
    body = {
        "systems": dict(kept),
        "context": dict(checkpoint.context),
        "runs": dict(checkpoint.runs),
        "state_id": checkpoint.state_id,
    }
    return KeptCheckpoint(
        id=checkpoint.id,
        name=checkpoint.name,
        body=encode(body, "checkpoint"),
        created_at=checkpoint.created_at,
    )


def checkpoint_of(kept: KeptCheckpoint) -> Checkpoint:
    """Return a checkpoint that was stored by a process that died."""
    body = decode(kept.body)
    return Checkpoint(
        id=kept.id,
        name=kept.name,
        tokens={name: Kept(data) for name, data in body["systems"].items()},
        context=body["context"],
        runs=body["runs"],
        state_id=body["state_id"],
        created_at=kept.created_at,
    )
