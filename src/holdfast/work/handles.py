"""Handles of work and of its items in every colour."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from ..kernel.operation import AsyncBound, Composition, Row, SyncBound, TxBound
from .attempt import LEASE_SECONDS, ItemOps
from .effects import ItemEffects
from .items import Item
from .ops import WorkOps

S = TypeVar("S")


class _Work:
    """What the handle of a store's work keeps."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.codec = owner.codec
        self.heads = owner.heads
        self.signals = owner.signals


class _WorkItem(Item, Generic[S]):
    """What the handle of an item keeps beside its fields."""

    def __init__(self, owner: Any, row: Row, lease_seconds: float | None) -> None:
        self.owner = owner
        self.codec = owner.codec
        self.heads = owner.heads
        self.signals = owner.signals
        self.ledger = owner.ledger
        self.is_held = lease_seconds is not None
        self.lease_seconds = LEASE_SECONDS if lease_seconds is None else lease_seconds
        self._take(row)

    @property
    def session(self) -> S | None:
        """The item's session, None if it has none; while the item is held, what is written
        through this handle is written only as long as the item's lease lives.
        """
        if self.session_number is None:
            return None
        return self._session(self.driving_fence if self.is_held else None)

    def _session(self, fence: int | None) -> S:
        place = (self.session_id, self.session_number, self.root_id, None)
        session = self.owner._session(*place)
        if self.is_held:
            session.guard, session.fence, session.item = self._guard(), fence, self
            session.holder = self.holder
        found: S = session
        return found


class WorkItem(_WorkItem[S], ItemOps[S], ItemEffects, SyncBound):
    """A work item; each call returns once its change is durable."""

    def __init__(self, owner: Any, row: Row, lease_seconds: float | None = None) -> None:
        super().__init__(owner, row, lease_seconds)
        self.driver = owner.driver


class AsyncWorkItem(_WorkItem[S], ItemOps[S], ItemEffects, AsyncBound):
    """A work item in one event loop; each awaited call is durable when it returns."""

    def __init__(self, owner: Any, row: Row, lease_seconds: float | None = None) -> None:
        super().__init__(owner, row, lease_seconds)
        self.driver = owner.driver


class TxWorkItem(_WorkItem[S], ItemOps[S], TxBound):
    """A work item inside `store.run`: every operation is a generator to `yield from`."""

    composition: Composition

    def __init__(self, owner: Any, row: Row, lease_seconds: float | None = None) -> None:
        super().__init__(owner, row, lease_seconds)
        self.composition = owner.composition


class Work(_Work, WorkOps[WorkItem[S]], SyncBound, Generic[S]):
    """The work of a store."""

    def __init__(self, owner: Any) -> None:
        super().__init__(owner)
        self.driver = owner.driver

    def _item(self, row: Row, *, lease_seconds: float | None = None) -> WorkItem[S]:
        return WorkItem(self.owner, row, lease_seconds)


class AsyncWork(_Work, WorkOps[AsyncWorkItem[S]], AsyncBound, Generic[S]):
    """The work of a store in one event loop."""

    def __init__(self, owner: Any) -> None:
        super().__init__(owner)
        self.driver = owner.driver

    def _item(self, row: Row, *, lease_seconds: float | None = None) -> AsyncWorkItem[S]:
        return AsyncWorkItem(self.owner, row, lease_seconds)


class TxWork(_Work, WorkOps[TxWorkItem[S]], TxBound, Generic[S]):
    """The work of a store inside `store.run`."""

    def __init__(self, owner: Any) -> None:
        super().__init__(owner)
        self.composition = owner.composition

    def within(self, item: Item) -> TxWorkItem[S]:
        """Return an item's handle for this transaction, with the item's lease."""
        inside: TxWorkItem[S] = TxWorkItem(self.owner, {}, None)
        inside._adopt(item)
        return inside

    def _item(self, row: Row, *, lease_seconds: float | None = None) -> TxWorkItem[S]:
        return TxWorkItem(self.owner, row, lease_seconds)
