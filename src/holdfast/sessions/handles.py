"""Handles of sessions in every colour, and the driver's handle that keeps its lease alive."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, TypeVar

from ..effects import AsyncIssued, Issued, Ticket
from ..errors import LeaseLost, NotFound
from ..kernel.flow import finish
from ..kernel.operation import AsyncBound, Call, Composition, SyncBound, TxBound
from ..leases import Guard, Heartbeat, Kept, default_holder
from ..records import Lease
from .ops import Rewinding, SessionOps

S = TypeVar("S")


class _Named:
    """What a handle keeps of its session and of the store it came from."""

    def __init__(
        self, owner: Any, id: str, number: int, root_id: str, name: str | None = None
    ) -> None:
        self.owner = owner
        self.codec = owner.codec
        self.heads = owner.heads
        self.id = id
        self.number = number
        self.root_id = root_id
        self.name = name
        self.fence: int | None = None
        self.guard: Guard | None = None
        self.holder: str | None = None
        self.item: Any = None
        """The work item whose attempt this handle writes for, if it came from one."""
        self.ledger = owner.ledger
        self.attached = owner.attached

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}>"


class Session(_Named, Rewinding, SessionOps["Session", Issued], SyncBound):
    """A session; each call returns once its change is durable."""

    def __init__(
        self, owner: Any, id: str, number: int, root_id: str, name: str | None = None
    ) -> None:
        super().__init__(owner, id, number, root_id, name)
        self.driver = owner.driver

    def _session(self, id: str, number: int, root_id: str, name: str | None) -> Session:
        return Session(self.owner, id, number, root_id, name)

    def _issued(self, ticket: Ticket, kept: Kept | None) -> Issued:
        return Issued(self.ledger, ticket, kept, self.driver)

    def drive(
        self, holder: str | None = None, lease_seconds: float = 60, *, instance: str | None = None
    ) -> DrivenSession:
        """Take the session's lease and keep it until closed: one process advances a session.

        Raises SessionBusy while another drives it; `instance` names this one over restarts, and
        fences what an earlier boot of that name still holds.
        """
        name = default_holder() if holder is None else holder
        lease = self.lease(name, lease_seconds, instance=instance)
        return DrivenSession(self, lease, lease_seconds)


class DrivenSession(Session):
    """A session whose lease this handle holds; all its writes carry the fence."""

    def __init__(self, session: Session, lease: Lease, lease_seconds: float) -> None:
        super().__init__(session.owner, session.id, session.number, session.root_id, session.name)
        self.fence = lease.fence
        self.guard = session.guard
        self.holder = lease.holder
        self._lease = lease
        self.heads.driven[self.number] = lease.fence
        self.heartbeat = keep(self, session, lease, lease_seconds)

    def close(self) -> None:
        """Give the lease back; one that is lost already is not an error."""
        self.heartbeat.stop()
        self.heads.driven.pop(self.number, None)
        with contextlib.suppress(LeaseLost, NotFound):
            self.release(self._lease)

    def __enter__(self) -> DrivenSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncSession(_Named, Rewinding, SessionOps["AsyncSession", AsyncIssued], AsyncBound):
    """A session in one event loop; each awaited call is durable when it returns."""

    def __init__(
        self, owner: Any, id: str, number: int, root_id: str, name: str | None = None
    ) -> None:
        super().__init__(owner, id, number, root_id, name)
        self.driver = owner.driver

    def _session(self, id: str, number: int, root_id: str, name: str | None) -> AsyncSession:
        return AsyncSession(self.owner, id, number, root_id, name)

    def _issued(self, ticket: Ticket, kept: Kept | None) -> AsyncIssued:
        return AsyncIssued(self.ledger, ticket, kept, self.driver)

    async def drive(
        self, holder: str | None = None, lease_seconds: float = 60, *, instance: str | None = None
    ) -> AsyncDrivenSession:
        """Take the session's lease and keep it until closed: one process advances a session.

        Raises SessionBusy while another drives it; `instance` names this one over restarts, and
        fences what an earlier boot of that name still holds.
        """
        name = default_holder() if holder is None else holder
        lease = await self.lease(name, lease_seconds, instance=instance)
        return AsyncDrivenSession(self, lease, lease_seconds)


class AsyncDrivenSession(AsyncSession):
    """A session whose lease this handle holds; all its writes carry the fence."""

    def __init__(self, session: AsyncSession, lease: Lease, lease_seconds: float) -> None:
        super().__init__(session.owner, session.id, session.number, session.root_id, session.name)
        self.fence = lease.fence
        self.guard = session.guard
        self.holder = lease.holder
        self._lease = lease
        self.heads.driven[self.number] = lease.fence
        self.heartbeat = keep(self, session, lease, lease_seconds)

    async def close(self) -> None:
        """Give the lease back; one that is lost already is not an error."""
        await finish(asyncio.to_thread(self.heartbeat.stop))
        self.heads.driven.pop(self.number, None)
        with contextlib.suppress(LeaseLost, NotFound):
            await self.release(self._lease)

    async def __aenter__(self) -> AsyncDrivenSession:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class TxSession(_Named, SessionOps["TxSession", Any], TxBound):
    """A session inside `store.run`: every operation is a generator to `yield from`."""

    composition: Composition
    rewind = SessionOps.move_back

    def __init__(
        self, owner: Any, id: str, number: int, root_id: str, name: str | None = None
    ) -> None:
        super().__init__(owner, id, number, root_id, name)
        self.composition = owner.composition

    def _session(self, id: str, number: int, root_id: str, name: str | None) -> TxSession:
        return TxSession(self.owner, id, number, root_id, name)


def keep(driven: Any, session: Any, lease: Lease, lease_seconds: float) -> Heartbeat:
    """Renew a session's lease from a thread, which neither the loop nor a handler can block."""
    renew = Call(SessionOps.renew, session, (lease, lease_seconds))
    return Heartbeat(driven, lambda: session.driver.twin().run(renew), lease_seconds)
