"""Spend in the life of a store."""

from __future__ import annotations

from collections.abc import Sequence

from ..kernel.nouns import Noun
from ..kernel.operation import Op, Query, Runtime, batch
from ..records import SessionRef
from .ledger import FORGET_SPEND_DETAILS
from .portable import SpendPortable


class SpendNoun(Noun):
    """Spend: what attempts cost, and the totals of sessions and trees, which stay."""

    portable = SpendPortable()

    def remove(self, runtime: Runtime, sessions: Sequence[SessionRef]) -> Op[None]:
        """Forget the details of what sessions spent."""
        numbers = (each.number for each in sessions)
        yield from batch(*(Query(FORGET_SPEND_DETAILS, {"number": number}) for number in numbers))
