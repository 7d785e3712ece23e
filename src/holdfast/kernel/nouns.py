"""What a noun may do when something happens to the sessions that its rows belong to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .handle import Runtime
    from .operation import Op


class Noun:
    """One kind of thing that a store keeps. The tree is locked when a method is called.

    A method does nothing unless the noun has something to do.
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
