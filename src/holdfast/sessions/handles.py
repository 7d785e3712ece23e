"""Handles of sessions in every colour, and the driver's handle that keeps its lease alive."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from ..effects import AsyncIssued, Issued, Ticket
from ..kernel.awaiting import Opening
from ..kernel.flow import finish, in_thread
from ..kernel.operation import AsyncBound, Call, Composition, SyncBound, SyncDriver, TxBound
from ..leases import Guard, Heartbeat, Kept, default_holder
from ..records import Lease
from .ops import Rewinding, SessionOps

R = TypeVar("R")


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


class SessionLease:
    """A session's lease as its heartbeat has it: on a thread, whatever the session's colour."""

    def __init__(
        self, session: Any, holder: str | None, lease_seconds: float, instance: str | None
    ) -> None:
        self.lease_seconds = lease_seconds
        self._session = session
        self._holder = default_holder() if holder is None else holder
        self._instance = instance
        self._driven: dict[int, int] = session.heads.driven

    def take(self) -> Lease:
        """Take the lease. Raises SessionBusy while another's is alive."""
        keywords = {"instance": self._instance}
        arguments = (self._holder, self.lease_seconds)
        lease = self._run(Call(SessionOps.lease, self._session, arguments, keywords))
        self._driven[self._session.number] = lease.fence
        return lease

    def renew(self, lease: Lease) -> Lease:
        """Prolong the lease, or raise LeaseLost."""
        return self._run(Call(SessionOps.renew, self._session, (lease, self.lease_seconds)))

    def release(self, lease: Lease) -> None:
        """Give the lease back, or raise LeaseLost."""
        if self._driven.get(self._session.number) == lease.fence:
            del self._driven[self._session.number]
        self._run(Call(SessionOps.release, self._session, (lease,)))

    def _run(self, call: Call[R]) -> R:
        driver: SyncDriver = self._session.driver.twin()
        return driver.run(call)


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
        self.driver.entrance.require_outside()
        driven = DrivenSession(self, SessionLease(self, holder, lease_seconds, instance))
        try:
            lease = driven.heartbeat.take()
            driven.fence, driven.holder = lease.fence, lease.holder
        except BaseException:
            driven.heartbeat.stops.put(None)
            driven.heartbeat.leave()
            raise
        return driven


class DrivenSession(Session):
    """A session whose lease this handle holds; all its writes carry the fence.

    The lease is given back when the handle is closed, and also when nobody has it any more.
    """

    def __init__(self, session: Session, lease: SessionLease) -> None:
        super().__init__(session.owner, session.id, session.number, session.root_id, session.name)
        self.guard = session.guard
        self.heartbeat = Heartbeat(self, lease)

    def close(self) -> None:
        """Give the lease back; one that is lost already is not an error."""
        self.heartbeat.stops.put(None)
        # A signal handler or `__del__` may be inside a call that the release has to wait for.
        if not self.driver.entrance.is_inside:
            self.heartbeat.finish()

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

    def drive(
        self, holder: str | None = None, lease_seconds: float = 60, *, instance: str | None = None
    ) -> Opening[AsyncDrivenSession]:
        """Take the session's lease, by `await` or `async with`, and keep it until closed.

        One process advances a session. Raises SessionBusy while another drives it; `instance`
        names this one over restarts, and fences what an earlier boot of that name still holds.
        """

        async def driving() -> AsyncDrivenSession:
            driven = AsyncDrivenSession(self, SessionLease(self, holder, lease_seconds, instance))
            heartbeat = driven.heartbeat
            try:
                lease = await asyncio.wrap_future(in_thread(heartbeat.take))
                driven.fence, driven.holder = lease.fence, lease.holder
            except BaseException as error:
                heartbeat.stops.put(None)
                if not isinstance(error, GeneratorExit):
                    await finish(asyncio.wrap_future(in_thread(heartbeat.leave)))
                raise
            return driven

        return Opening(driving())


class AsyncDrivenSession(AsyncSession):
    """A session whose lease this handle holds; all its writes carry the fence.

    The lease is given back when the handle is closed, and also when nobody has it any more.
    """

    def __init__(self, session: AsyncSession, lease: SessionLease) -> None:
        super().__init__(session.owner, session.id, session.number, session.root_id, session.name)
        self.guard = session.guard
        self.heartbeat = Heartbeat(self, lease)

    async def close(self) -> None:
        """Give the lease back, also when cancelled; one that is lost already is not an error."""
        self.heartbeat.stops.put(None)
        await finish(asyncio.wrap_future(in_thread(self.heartbeat.finish)))

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
