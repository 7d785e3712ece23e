"""What a noun does in the life of a store and of the sessions that its rows belong to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..records import Effect, Swept

if TYPE_CHECKING:
    from .flow import Flow
    from .handle import Runtime
    from .operation import Op


SWEPT_PER_PASS = 100


class Noun:
    """One kind of thing that a store keeps. A method does nothing unless the noun overrides it.

    An `Op` is part of one transaction, in which the tree of the session it is about is locked. A
    `Flow` runs transactions of its own.
    """

    def cancel(self, runtime: Runtime, numbers: Sequence[int]) -> Op[None]:
        """Cancel what belongs to sessions that are about to be cancelled."""
        yield from ()

    def remove(self, runtime: Runtime, number: int) -> Op[None]:
        """Remove what belongs to a session that is about to be deleted."""
        yield from ()

    def rewind(self, runtime: Runtime, number: int, keeping: str | None) -> Op[None]:
        """Fence what runs for a session that is rewound, except the item that rewinds it."""
        yield from ()

    def settled(self, runtime: Runtime, effect_id: str) -> Op[None]:
        """Go on with what waited for an effect that was resolved."""
        yield from ()

    def fence(self, holder: str, boots: str) -> Op[int]:
        """Take away the leases of holders that begin with `boots`, except this one; count them."""
        yield from ()
        return 0

    def recover(
        self, runtime: Runtime, holder: str, tools: Mapping[str, Any]
    ) -> Flow[tuple[list[Effect], list[Effect]]]:
        """Settle what dead owners left; return what is settled, and what lacks its tool."""
        yield from ()
        return [], []

    def sweep(self, runtime: Runtime, limit: int) -> Flow[Swept]:
        """Take back up to `limit` rows whose lease ran out, and begin what is due."""
        yield from ()
        return Swept()
