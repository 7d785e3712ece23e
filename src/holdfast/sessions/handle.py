"""The base of all handles of a session."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

from ..dataclass import dataclass
from ..errors import SessionNotFound
from ..kernel.operation import C, Handle, Lock, Op, Row, Runtime, rows
from ..leases import Guard, Keeper
from ..wire import travels
from .access import LOCK_SESSION, Place, require_fence
from .rows import READ_SESSION


@travels
@dataclass(frozen=True, slots=True)
class ItemName:
    """The work item that a session is written for, where its handle is not known."""

    id: str


class SessionHandle(Handle[C]):
    """One session, and the lease with which this handle writes to it, if any."""

    def __init__(
        self,
        runtime: Runtime,
        id: str,
        number: int,
        root_id: str,
        name: str | None = None,
        *,
        fence: int | None = None,
        guard: Guard | None = None,
        holder: str | None = None,
        item: Any = None,
    ) -> None:
        super().__init__(runtime)
        self.id = id
        self.number = number
        self.root_id = root_id
        self.name = name
        self.guard = guard
        self._place = Place(id, number, root_id, fence, guard)
        self.holder = holder
        self.item = item
        """The work item whose attempt this handle belongs to, if any."""

    def _to_wire(self) -> tuple[Any, ...]:
        """Return what names the session and the lease under which it is written."""
        item = None if self.item is None else ItemName(self.item.id)
        place = (self.id, self.number, self.root_id, self.name)
        return (*place, self.fence, self.guard, self.holder, item)

    @classmethod
    def _from_wire(
        cls,
        runtime: Runtime,
        id: str,
        number: int,
        root_id: str,
        name: str | None,
        fence: int | None,
        guard: Guard | None,
        holder: str | None,
        item: ItemName | None,
    ) -> SessionHandle[Any]:
        """Return a handle of what was named."""
        lease: dict[str, Any] = {"fence": fence, "guard": guard, "holder": holder, "item": item}
        return cls(runtime, id, number, root_id, name, **lease)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}>"

    @property
    def fence(self) -> int | None:
        """The fence of the lease with which this handle writes; None if it needs none."""
        return self._place.fence

    @fence.setter
    def fence(self, fence: int | None) -> None:
        self._place = replace(self._place, fence=fence)

    def _lock(self) -> Op[None]:
        """Lock the tree. Raises LeaseLost."""
        yield Lock(self.root_id)
        yield from Keeper.of(self.runtime).check(self.guard)
        if self.fence is not None:
            for row in (yield from rows(LOCK_SESSION, number=self.number)):
                require_fence(self._place, row)

    def _row(self) -> Op[Row]:
        return self._found((yield from rows(READ_SESSION, id=self.id)))

    def _found(self, found: list[Row]) -> Row:
        if not found or found[0]["number"] != self.number:
            raise SessionNotFound(f"there is no session {self.id!r}", id=self.id)
        return found[0]


class SessionPart(Handle[C]):
    """A handle of what belongs to one session; it travels as that session."""

    def __init__(self, session: SessionHandle[C]) -> None:
        super().__init__(session.runtime)
        self._session = session
        self.root_id = session.root_id

    def _to_wire(self) -> tuple[Any, ...]:
        """Return the session."""
        return (self._session,)

    @classmethod
    def _from_wire(cls, runtime: Runtime, session: SessionHandle[Any]) -> Self:
        """Return that of a session."""
        return cls(session)
